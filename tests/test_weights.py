"""Checkpoints: what is read, what is refused, and what config.json says."""

import dataclasses
import json
import logging
import os
import pty
import re
import sys
import termios
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

from disagg import sharding, weights
from disagg.weights import Checkpoint
from models import llama, llama_weights

CONFIG = llama.Config(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=4,
                      head_dim=4, max_length=64)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def random_tensors(model, dtype="float32"):
    """Tensor name -> array, all that a checkpoint of this model holds."""
    rng = np.random.default_rng(0)
    shapes = weights.tensor_shapes(table(model.config), model.params_shape(), model.config.num_layers)
    return {name: rng.normal(size=shape).astype(DTYPES[dtype]) for name, shape in shapes.items()}


def save(folder, tensors, shards=1):
    """One file, or several with an index, layers spread over all of them."""
    folder.mkdir(exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = [f"model-{i}.safetensors" for i in range(shards)]
    where = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def table(config):
    return llama_weights.tensors(config.tie_embeddings, None if config.scan_layers else config.num_layers)


def checkpoint(folder, config=CONFIG):
    return Checkpoint(folder, table(config), llama.Llama(config).params_shape(), config.num_layers,
                      llama_weights.ignored(config.tie_embeddings))


def shardings(model, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    return sharding.tree(mesh, model.params_shape(), model.params_axes())


def expected(tensors, c):
    """The parameters of a checkpoint of this architecture, layers stacked: numpy, in the tensors' dtype."""
    part = lambda i, name: tensors[f"model.layers.{i}.{name}.weight"]

    def layer(i):
        q, k, v = (part(i, f"self_attn.{name}_proj").reshape(c.num_kv_heads, -1, c.head_dim, c.hidden_size) for name in "qkv")
        return {"wqkv": np.concatenate([q, k, v], 1), "wo": part(i, "self_attn.o_proj"),
                "w_gate_up": np.stack([part(i, "mlp.gate_proj"), part(i, "mlp.up_proj")]), "w_down": part(i, "mlp.down_proj"),
                "attention_norm": part(i, "input_layernorm"), "mlp_norm": part(i, "post_attention_layernorm")}

    layers = {i: layer(i) for i in range(c.num_layers)}
    if c.scan_layers:
        layers = jax.tree.map(lambda *of_layers: np.stack(of_layers), *layers.values())
    params = {"embed": tensors["model.embed_tokens.weight"], "norm": tensors["model.norm.weight"], "layers": layers}
    return params if c.tie_embeddings else params | {"head": tensors["lm_head.weight"]}


def assert_loaded(params, tensors, model):
    """Every parameter equals the saved tensors, converted to the model's dtype."""
    dtype = jnp.dtype(model.config.dtype)

    def equal(got, saved):
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got), saved.astype(dtype))
    jax.tree.map(equal, params, expected(tensors, model.config))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("devices, stacked", [(1, True), (2, True), (4, True), (2, False)])
def test_loaded_equals_saved(tmp_path, devices, stacked, shards):
    """One file or several, on meshes of several sizes, layers stacked or not; each array laid out as asked."""
    model = llama.Llama(dataclasses.replace(CONFIG, scan_layers=stacked))
    tensors = random_tensors(llama.Llama(CONFIG))
    save(tmp_path, tensors, shards)
    layout = shardings(model, devices)
    params = checkpoint(tmp_path, model.config).load(layout)
    assert_loaded(params, tensors, model)
    jax.tree.map(lambda x, s: s.is_equivalent_to(x.sharding, x.ndim) or pytest.fail(f"{x.sharding} is not {s}"), params, layout)


@pytest.mark.parametrize("source", list(DTYPES))
@pytest.mark.parametrize("configured", list(DTYPES))
def test_dtypes(tmp_path, source, configured):
    """Each source dtype is converted to each configured one."""
    model = llama.Llama(dataclasses.replace(CONFIG, dtype=configured, num_layers=2))
    tensors = random_tensors(model, source)
    save(tmp_path, tensors)
    assert_loaded(checkpoint(tmp_path, model.config).load(shardings(model, 2)), tensors, model)


def test_tied_embeddings(tmp_path):
    """No head is loaded; a copy of it in the file is no fault, nor are the buffers of old checkpoints."""
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    model = llama.Llama(config)
    tensors = random_tensors(model)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
             "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    save(tmp_path, tensors | extra)
    params = checkpoint(tmp_path, config).load(shardings(model, 1))
    assert "head" not in params
    assert_loaded(params, tensors, model)


class Recorded:
    """A tensor of a file, noting how many elements are taken of it: by a shard's slice, and of that one place."""

    def __init__(self, source, reads, sliced=False):
        self._source, self._reads, self._sliced = source, reads, sliced

    def reshape(self, shape):
        return Recorded(self._source.reshape(shape), self._reads)

    def __getitem__(self, index):
        got = self._source[index]
        if not self._sliced:
            return Recorded(got, self._reads, sliced=True)
        self._reads.append(got.size)
        return got


@pytest.mark.parametrize("devices, copies, stacked", [(1, 1, True), (2, 1, True), (4, 1, True), (2, 2, True), (2, 2, False)])
def test_only_the_needed_slices_are_read(tmp_path, devices, copies, stacked):
    """A sharded tensor is read shard by shard, and no element twice, however many devices hold it."""
    model = llama.Llama(dataclasses.replace(CONFIG, scan_layers=stacked))
    save(tmp_path, random_tensors(llama.Llama(CONFIG)), shards=2)
    opened, reads = checkpoint(tmp_path, model.config), {}
    shapes = {name: tensor.shape for name, tensor in opened._tensors.items()}
    opened._tensors = {name: Recorded(t, reads.setdefault(name, [])) for name, t in opened._tensors.items()}
    mesh = Mesh(np.array(jax.devices()[:devices * copies]).reshape(devices, copies), ("tp", "copies"))
    opened.load(sharding.tree(mesh, model.params_shape(), model.params_axes()))
    for name, sizes in reads.items():
        whole = int(np.prod(shapes[name]))
        assert sum(sizes) == whole, name
        assert max(sizes) <= (whole if name.endswith("norm.weight") else whole // devices), name


# Progress.


def test_a_bar_on_a_terminal(monkeypatch):
    """Drawn once a load takes more than a moment, and cleared at its end."""
    terminal, ours = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    with open(ours, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with weights._Progress(3000) as progress:
            progress.add(900)
            time.sleep(2.1)
            progress.add(600)
        stderr.flush()
        drawn = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert re.search(r"weights:\s+50%.*1.50k/3.00k", drawn) and "\n" not in drawn.strip()
    assert drawn.endswith("\r")


def test_lines_elsewhere(monkeypatch, caplog):
    """Whole lines in the log, at most one in a while; none where the load is quick."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(weights, "EVERY", 0.1)
    with weights._Progress(4 * 10**9) as progress:
        for _ in range(4):
            progress.add(10**9)
            time.sleep(0.06)
    assert [r.getMessage() for r in caplog.records] == ["weights: 3.0 of 4.0 GB"]


# Faults.


Q = "model.layers.1.self_attn.q_proj.weight"


def fault(tmp_path, change, shards=1):
    """The error of a checkpoint whose tensors were changed by `change` (a function of the dict)."""
    tensors = random_tensors(llama.Llama(CONFIG))
    change(tensors)
    save(tmp_path, tensors, shards)
    with pytest.raises(ValueError) as e:
        checkpoint(tmp_path)
    return str(e.value)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop(Q), f"{Q} is missing"),
    (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": np.ones((2, 2), np.float32)}),
     "model.layers.3.mlp.up_proj.weight is not a tensor of this model"),
    (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(16, np.float32)}),
     "model.layers.0.self_attn.q_proj.bias is not a tensor of this model"),
    (lambda t: t.update({Q: t[Q][:, :8].copy()}), f"{Q} has shape [16, 8], expected [16, 16]"),
    (lambda t: t.update({Q: t[Q].reshape(-1)}), f"{Q} has shape [256], expected [16, 16]"),
    (lambda t: t.update({Q: t[Q].astype(np.int8)}), f"{Q} has dtype I8, expected one of F32, F16, BF16"),
    (lambda t: t.update({Q: t[Q].astype(np.float64)}), f"{Q} has dtype F64"),
    (lambda t: t.update({Q: t[Q].astype(ml_dtypes.float8_e4m3fn)}), f"{Q} has dtype F8_E4M3, expected one of F32, F16, BF16"),
    (lambda t: t.update({Q: t[Q] > 0}), f"{Q} has dtype BOOL"),
    (lambda t: t.update({Q: np.array(1, np.float32)}), f"{Q} has shape [], expected [16, 16]"),
    (lambda t: t.update({Q: t[Q][:0].copy()}), f"{Q} has shape [0, 16], expected [16, 16]"),
    (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
])
def test_a_wrong_tensor(tmp_path, change, message, shards):
    """Named, with what it is and what was expected."""
    assert message in fault(tmp_path, change, shards)


def test_several_wrong_tensors(tmp_path):
    """The first are named and the others counted."""
    message = fault(tmp_path, lambda t: [t.pop(n) for n in list(t) if "layers" in n])
    assert message.count("is missing") == 8 and message.endswith("; and 19 more")


def test_an_absent_shard(tmp_path):
    """A file that only the index knows is named."""
    save(tmp_path, random_tensors(llama.Llama(CONFIG)), 3)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match="index.json names model-1.safetensors, which .* does not have"):
        checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_a_truncated_file(tmp_path, keep):
    """Cut anywhere: nothing left, in the header, in the data, one byte short."""
    save(tmp_path, random_tensors(llama.Llama(CONFIG)), 2)
    file = tmp_path / "model-1.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match="model-1.safetensors is not a whole safetensors file"):
        checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", "null", '{"weight_map": 3}', '{"weight_map": ["a"]}', "\udcff"])
def test_a_bad_index(tmp_path, index):
    """An index that is no JSON, or of another form, is named."""
    save(tmp_path, random_tensors(llama.Llama(CONFIG)), 2)
    (tmp_path / "model.safetensors.index.json").write_bytes(index.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="index.json is not an index of safetensors files"):
        checkpoint(tmp_path)


def test_an_index_that_points_to_the_wrong_file(tmp_path):
    """The tensor and the file are named."""
    save(tmp_path, random_tensors(llama.Llama(CONFIG)), 2)
    index = tmp_path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    wrong = "model-1.safetensors" if where[Q] == "model-0.safetensors" else "model-0.safetensors"
    index.write_text(json.dumps({"weight_map": where | {Q: wrong}}))
    with pytest.raises(ValueError, match=f"{wrong} has no tensor {Q}, which the index puts there"):
        checkpoint(tmp_path)


def test_a_tensor_that_the_index_leaves_out(tmp_path):
    """It is in a file, so it is one too many all the same."""
    tensors = random_tensors(llama.Llama(CONFIG)) | {"extra": np.ones(3, np.float32)}
    save(tmp_path, tensors, 2)
    index = tmp_path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    del where["extra"]
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ValueError, match="extra is not a tensor of this model"):
        checkpoint(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    """Which of the two is meant would be a guess, whatever the index says: both files are named."""
    tensors = random_tensors(llama.Llama(CONFIG))
    save(tmp_path, tensors, 2)
    for i in (0, 1):
        rest = {n: t for j, (n, t) in enumerate(tensors.items()) if j % 2 == i}
        save_file(rest | {Q: tensors[Q]}, tmp_path / f"model-{i}.safetensors")
    with pytest.raises(ValueError, match=f"tensor {Q} is in two files of .*: model-0.safetensors and model-1.safetensors"):
        checkpoint(tmp_path)


def test_an_index_beside_another_whole_model(tmp_path):
    """Loaders differ in which they prefer, so neither is read."""
    save(tmp_path, random_tensors(llama.Llama(CONFIG)), 2)
    save(tmp_path, random_tensors(llama.Llama(CONFIG)))
    with pytest.raises(ValueError, match="has both model.safetensors and model.safetensors.index.json"):
        checkpoint(tmp_path)


@pytest.mark.parametrize("source, configured, value", [
    ("float32", "float16", 65520.0), ("bfloat16", "float16", -1e5), ("float32", "bfloat16", 3.4e38)])
def test_a_value_too_large_for_the_dtype(tmp_path, source, configured, value):
    """The tensor, the value and the dtype are named, wherever in the tensor it is; the largest that fits is loaded."""
    config = dataclasses.replace(CONFIG, dtype=configured)
    model = llama.Llama(config)
    tensors = random_tensors(model, source)
    tensors[Q][13, 2] = jnp.finfo(configured).max if source == "float32" else 32768
    save(tmp_path, tensors)
    assert_loaded(checkpoint(tmp_path, config).load(shardings(model, 2)), tensors, model)
    tensors[Q][15, 7] = value
    save(tmp_path, tensors)
    with pytest.raises(ValueError, match=rf"{Q} holds \S+, which is too large for config.model.dtype={configured}") as e:
        checkpoint(tmp_path, config).load(shardings(model, 2))
    assert float(str(e.value).split("holds ")[1].split(",")[0]) == float(DTYPES[source](value))


def test_large_tensors_are_copied_in_blocks(tmp_path, monkeypatch):
    """A tensor of many blocks, its last one shorter, in several threads; each block converted on its own."""
    monkeypatch.setattr(weights, "BLOCK", 3 * 16 * 2)  # three rows of 16 in bfloat16
    model = llama.Llama(dataclasses.replace(CONFIG, dtype="bfloat16"))
    tensors = random_tensors(model)
    save(tmp_path, tensors)
    assert_loaded(checkpoint(tmp_path, model.config).load(shardings(model, 2)), tensors, model)


def test_unaligned_tensors(tmp_path):
    """Tensors of several dtypes in one file may begin at odd offsets."""
    model = llama.Llama(CONFIG)
    tensors = random_tensors(model)
    header, data = {}, b"x"  # one byte of an ignored tensor moves all that follow
    header["model.layers.0.self_attn.rotary_emb.inv_freq"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    for name, t in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [len(data), len(data) + t.nbytes]}
        data += t.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert_loaded(checkpoint(tmp_path).load(shardings(model, 2)), tensors, model)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.gguf"])
def test_formats_that_are_not_read(tmp_path, file):
    """The formats that are, and the file that is not, are named."""
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ValueError, match=rf"0 safetensors files .* expected model.safetensors.* \(found {file}: not read\)"):
        checkpoint(tmp_path)


def test_several_files_without_an_index(tmp_path):
    """Which of them belong to the model would be a guess."""
    save(tmp_path, random_tensors(llama.Llama(CONFIG)), 2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="2 safetensors files and no index"):
        checkpoint(tmp_path)


# config.json.


HF = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
      "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
      "torch_dtype": "bfloat16"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def architecture(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return llama_weights.architecture(folder)


def test_plain_architecture(tmp_path):
    """A file without optional fields: head_dim, multi-head attention, untied, float32 and plain RoPE follow."""
    required = {k: v for k, v in HF.items() if k not in ("num_key_value_heads", "torch_dtype", "model_type")}
    assert architecture(tmp_path, required) == {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4,
        "head_dim": 4, "max_length": 64, "rms_norm_eps": 1e-6, "tie_embeddings": False, "dtype": "float32",
        "rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("fields, expected", [
    ({}, {"num_kv_heads": 2, "head_dim": 4, "dtype": "bfloat16"}),
    ({"head_dim": 8}, {"head_dim": 8}),
    ({"head_dim": None, "num_key_value_heads": None}, {"head_dim": 4, "num_kv_heads": 4}),
    ({"dtype": "float16"}, {"dtype": "float16"}),
    ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
    ({"rope_theta": 500000}, {"rope_theta": 500000.0, "rope_type": "default"}),
    ({"rope_scaling": None, "attention_bias": False, "hidden_act": "silu", "quantization_config": None}, {"rope_type": "default"}),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 9.0}, {"rope_theta": 7.0}),
    ({"rope_parameters": {"rope_type": None, "rope_theta": None}, "rope_theta": None}, {"rope_theta": 10000.0}),
    ({"rope_interleaved": False, "is_llama_config": True, "sliding_window": None, "mlp_bias": None}, {"dtype": "bfloat16"}),
    ({"pretraining_tp": 2, "attention_dropout": 0.1, "use_cache": False}, {"num_heads": 4}),  # of training
    ({"model_type": None, "partial_rotary_factor": 1.0}, {"num_heads": 4}),
])
def test_variants(tmp_path, fields, expected):
    """Optional fields, absent, null or set."""
    found = architecture(tmp_path, HF | fields)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("fields", [
    {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "rope_theta": 500000.0},
    {"rope_scaling": LLAMA3 | {"type": "llama3"}, "rope_theta": 500000.0},
    {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0}},
])
def test_llama3_rope(tmp_path, fields):
    """The old and the new way to write it give the same, and a Config."""
    found = architecture(tmp_path, HF | fields)
    assert {k: v for k, v in found.items() if k.startswith("rope")} == {
        "rope_type": "llama3", "rope_theta": 500000.0, "rope_factor": 8.0, "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0, "rope_original_length": 8192}
    llama.Config(**found)


@pytest.mark.parametrize("fields, message", [
    ({"attention_bias": True}, "not supported: attention_bias=True"),
    ({"mlp_bias": True}, "not supported: mlp_bias=True"),
    ({"hidden_act": "gelu"}, "not supported: hidden_act='gelu'"),
    ({"model_type": "qwen2"}, "not supported: model_type='qwen2'"),
    ({"quantization_config": {"bits": 4}}, "not supported: quantization_config="),
    ({"quantization_config": {}}, "not supported: quantization_config="),
    ({"model_type": "mistral", "sliding_window": 4096}, "not supported: model_type='mistral'"),
    ({"sliding_window": 4096}, "not supported: sliding_window=4096"),
    ({"rope_interleaved": True}, "not supported: rope_interleaved=True"),
    ({"partial_rotary_factor": 0.5}, "not supported: partial_rotary_factor=0.5"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "not supported: partial_rotary_factor=0.5"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "not supported: RoPE's parameters by kind of layer"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "not supported: RoPE scaling 'dynamic'"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "not supported: RoPE scaling 'longrope'"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "differ"),
    ({"hidden_size": 18}, r"without head_dim, hidden_size \(18\) must be a multiple of num_attention_heads \(4\)"),
    ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 4.0}},
     r"low_freq_factor \(4.0\) must be below high_freq_factor \(4.0\)"),
    ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 5.0}}, "must be below high_freq_factor"),
    ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "factor": True}}, "factor must be a positive number, got True"),
    ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "original_max_position_embeddings": 8192.5}},
     "original_max_position_embeddings must be a positive whole number, got 8192.5"),
    ({"rope_theta": float("inf")}, "rope_theta must be a positive number, got inf"),
    ({"rms_norm_eps": float("-inf")}, "rms_norm_eps must be a positive number, got -inf"),
    ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number, got True"),
    ({"vocab_size": True}, "vocab_size must be a positive whole number, got True"),
    ({"max_position_embeddings": float("nan")}, "max_position_embeddings must be a positive whole number, got nan"),
    ({"attention_bias": 1}, "not supported: attention_bias=1"),
    ({"dtype": ["bfloat16"]}, "is not supported; expected one of float32"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "not supported: RoPE scaling 'linear'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "not supported: RoPE scaling 'yarn'"),
    ({"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
     "lacks low_freq_factor, high_freq_factor, original_max_position_embeddings"),
    ({"rope_scaling": "llama3"}, "must be a JSON object, got 'llama3'"),
    ({"rope_theta": "10000"}, "rope_theta must be a positive number, got '10000'"),
    ({"hidden_size": "16"}, "hidden_size must be a positive whole number, got '16'"),
    ({"num_attention_heads": 0}, "num_attention_heads must be a positive whole number, got 0"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a positive whole number, got 2.5"),
    ({"head_dim": -4}, "head_dim must be a positive whole number, got -4"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
])
def test_what_is_not_supported(tmp_path, fields, message):
    """Each is named with its value."""
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        architecture(tmp_path, HF | fields)


@pytest.mark.parametrize("missing", [["vocab_size"], ["hidden_size", "rms_norm_eps"], ["max_position_embeddings"]])
def test_missing_fields(tmp_path, missing):
    """All are named; null is missing too."""
    with pytest.raises(ValueError, match=f"config.json lacks {', '.join(missing)}$"):
        architecture(tmp_path, {k: v for k, v in HF.items() if k not in missing})
    with pytest.raises(ValueError, match=f"config.json lacks {', '.join(missing)}$"):
        architecture(tmp_path, HF | dict.fromkeys(missing))


@pytest.mark.parametrize("content, message", [
    ("{", "is not JSON"), ("", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "must hold a JSON object, got list"),
    ("null", "must hold a JSON object, got NoneType")])
def test_a_bad_config_file(tmp_path, content, message):
    """A file that is no JSON object is named."""
    with pytest.raises(ValueError, match=f"config.json {message}"):
        architecture(tmp_path, content)


def test_no_config_file(tmp_path):
    """A folder without the file, and no folder."""
    with pytest.raises(ValueError, match="has no config.json"):
        llama_weights.architecture(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint folder at .*nowhere"):
        llama_weights.architecture(tmp_path / "nowhere")


def test_merge(tmp_path):
    """Unset fields come from the file; a set one may repeat it; dtype may differ."""
    theirs = architecture(tmp_path, HF)
    configured = dict.fromkeys(theirs) | {"num_heads": 4, "rope_theta": 10000, "dtype": "float32"}
    assert llama_weights.merge(configured, tmp_path) == theirs | {"dtype": "float32"}


def test_merge_disagreements(tmp_path):
    """Each names the field and both values."""
    architecture(tmp_path, HF)
    with pytest.raises(ValueError) as e:
        llama_weights.merge({"num_heads": 8, "vocab_size": 32, "rms_norm_eps": 1e-5}, tmp_path)
    assert str(e.value).endswith("config.json disagree on model.num_heads: config 8, checkpoint 4; "
                                 "model.rms_norm_eps: config 1e-05, checkpoint 1e-06")
