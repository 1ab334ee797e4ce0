"""A checkpoint of Llama 2 7B's size, through the program's own start-up: memory, speed, and tokens that come out.

  bash launch/test.sh -m slow -s -o faulthandler_timeout=1800 tests/test_big_checkpoint.py

Takes 14 GB of disk under pytest's temporary folder and 16 GB of memory; with less of either, the model has fewer layers.
"""

import json
import re
import shutil
import sys
import time

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from configs import llama2
from disagg import weights
from disagg.topology import free_port
from disagg.weights import Checkpoint
from models import llama, llama_weights
from tests.cluster import Cluster
from tests.peak_memory import Watch

GB = 10**9
FILES = 3  # each over 4 GiB at full size, so that offsets need more than 32 bits
LOADING = GB // 2  # beside the shards, while loading: of a JAX process itself, and of the copies under way
SCRATCH = GB       # then: with its compiler and the temporaries of a step
# XLA for CPU multiplies in float32. Otherwise its scheduler widens all weights before the first product, not each before
# its own: three times the memory while a step runs.
XLA_FLAGS = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def layers_that_fit(folder, layers, of_one, rest):
    """As many of the model's layers as the disk and the memory have room for."""
    with open("/proc/meminfo") as f:
        memory = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    room = min(shutil.disk_usage(folder).free - 2 * GB, memory - 2 * GB - 2 * SCRATCH)
    return min(layers, (room - rest) // of_one)


def random_bits(name, shape):
    """bfloat16 numbers between 2^-7 and 2^-3 of both signs, the same for the same name; norms are 1."""
    if name.endswith("norm.weight"):
        return np.ones(shape, ml_dtypes.bfloat16)
    bits = np.frombuffer(np.random.default_rng(list(name.encode())).bytes(2 * int(np.prod(shape))), np.uint16)
    return ((bits & 0x81FF) | 0x3C00).view(ml_dtypes.bfloat16).reshape(shape)  # sign, 2 of 8 bits of exponent, fraction


def write(folder, model, config):
    """The checkpoint, one file at a time; -> bytes of tensors."""
    where = weights.tensor_shapes(llama_weights.tensors(False), model.params_shape(), model.config.num_layers)
    file_of = {name: f"model-{i % FILES}.safetensors" for i, name in enumerate(where)}
    for file in sorted(set(file_of.values())):
        save_file({n: random_bits(n, s) for n, s in where.items() if file_of[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    (folder / "config.json").write_text(json.dumps(config))
    return sum(2 * int(np.prod(s)) for s in where.values())


@pytest.mark.slow
def test_llama_2_7b_on_two_processes(tmp_path, tokenizer_folder):
    """Each process holds half of every matrix and takes little more memory while it loads; then tokens come out."""
    c = llama2.get_config("7b").model
    one = llama.Llama(llama.Config(**{k: v for k, v in c.to_dict().items() if v is not None} | {"num_layers": 1}))
    sizes = jax.tree.map(lambda s: s.size * s.dtype.itemsize, one.params_shape())
    of_one = sum(sizes.pop("layers").values())
    layers = layers_that_fit(tmp_path, c.num_layers, of_one, sum(sizes.values()))
    assert layers >= 2, "no room for two layers"
    model = llama.Llama(llama.Config(**{k: v for k, v in c.to_dict().items() if v is not None} | {"num_layers": layers}))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    try:
        started = time.monotonic()
        total = write(folder, model, {
            "model_type": "llama", "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size, "num_hidden_layers": layers, "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads, "max_position_embeddings": c.max_length, "rms_norm_eps": c.rms_norm_eps,
            "torch_dtype": "bfloat16"})
        print(f"\n{layers} layers, {total / GB:.2f} GB written in {time.monotonic() - started:.0f} s")
        serve(folder, tmp_path, tokenizer_folder, total)
        tensors = Checkpoint(folder, llama_weights.tensors(False), model.params_shape(), layers)._tensors
        for name in list(tensors)[-3:] + ["lm_head.weight"]:
            wanted = random_bits(name, tensors[name].shape)
            np.testing.assert_array_equal(tensors[name].reshape(tensors[name].shape).view(np.uint16), wanted.view(np.uint16))
    finally:
        shutil.rmtree(folder)


def serve(folder, tmp_path, tokenizer_folder, total):
    """Two processes of launch.main with one engine of tensor parallelism 2; checks their memory and the answer."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": [5, 6, 7, 8], "max_tokens": 3, "temperature": 0,
                                                   "ignore_eos": True}) + "\n")
    settings = {"checkpoint": folder, "tokenizer": tokenizer_folder, "mode": "interleaved", "decode.processes": 2,
                "decode.tp": 2, "decode.slots": 1, "decode.steps": 1, "cache_length": 32, "chunk": 16, "buckets": "(16,)",
                "compilation_cache": "", "control.start_s": 1200, "control.stall_s": 600, "control.deadline_s": 120}
    address = f"127.0.0.1:{free_port()}"
    commands = [[sys.executable, "-m", "launch.main", "--config=configs/auto.py:" + str(folder),
                 *[f"--config.{k}={v}" for k, v in settings.items()], f"--input={tmp_path}/in.jsonl",
                 f"--output={tmp_path}/out.jsonl", f"--coordinator_address={address}", "--num_processes=2",
                 f"--process_id={i}", "--cpu_devices=1"] for i in range(2)]
    with Cluster(commands, tmp_path, {"XLA_FLAGS": XLA_FLAGS}) as cluster:
        with Watch(cluster.processes[0].pid, 0.02) as first, Watch(cluster.processes[1].pid, 0.02) as second:
            while not all(re.search("weights on .* in", log.read_text()) for log in cluster.logs):
                assert all(p.poll() is None for p in cluster.processes), cluster.text()
                time.sleep(0.1)
        loaded = time.monotonic()
        with Watch(cluster.processes[0].pid, 0.02) as serving:
            assert cluster.wait(1800) == [0, 0], cluster.text()
        seconds = [float(re.search(r"weights on .* in ([\d.]+) s", log.read_text())[1]) for log in cluster.logs]
        said = [re.findall(r"weights: [\d.]+ of [\d.]+ GB", log.read_text()) for log in cluster.logs]
    print(f"loaded in {max(seconds):.1f} s, {total / max(seconds) / GB:.2f} GB/s both together; peak of RssAnon while loading "
          f"{first.peak / GB:.2f} and {second.peak / GB:.2f} GB, own shards {total / 2 / GB:.2f} GB; then "
          f"{serving.peak / GB:.2f} GB, 3 tokens and the end after {time.monotonic() - loaded:.0f} s")
    for peak, rest in ((first.peak, LOADING), (second.peak, LOADING), (serving.peak, SCRATCH)):
        assert 0.95 * total / 2 < peak < total / 2 + rest
    assert not said[1] and (said[0] or seconds[0] < 10)  # a line every 10 s, of process 0
    answer = json.loads((tmp_path / "out.jsonl").read_text())
    print(answer)
    assert len(answer["token_ids"]) == 3 and answer["finish_reason"] == "length"
