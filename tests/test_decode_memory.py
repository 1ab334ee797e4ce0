"""A decode step and the write of a chunk copy no cache: the memory of a real process, at its peak, on CPU."""

import json
import pathlib
import subprocess
import sys

import pytest

GIB = 2**30
ROOT = pathlib.Path(__file__).resolve().parent.parent

# 16 layers: XLA for CPU takes one layer's keys and values (1/16 of the cache) out of the stack at a time.
CHILD = """
import gc, json, sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from disagg import decode, sampling
from disagg.chunk import Format
from models import llama

kv_cache_dtype = sys.argv[3] if len(sys.argv) > 3 else ""
SLOTS, LENGTH, CHUNK = 4, 2**15 if kv_cache_dtype else 8192, 512
model = llama.Llama(llama.Config(vocab_size=512, hidden_size=128, intermediate_size=384, num_layers=16, num_heads=8,
                                 num_kv_heads=4, head_dim=64, max_length=LENGTH, kv_cache_dtype=kv_cache_dtype, scan_layers=sys.argv[2] == "scanned"))
cache_bytes = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(model.cache_shape(SLOTS, LENGTH)))
layer_bytes = 2 * 4 * SLOTS * LENGTH * model.config.num_kv_heads * model.config.head_dim
mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
params = jax.jit(model.init)(jax.random.key(0))
chunk = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), Format(model, 1, 2**20, False).shape(CHUNK))

def status(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) * 1024

def peak(run):
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # VmHWM starts again at the present size
    jax.block_until_ready(run())
    return status("VmHWM")

def used_engine():
    engine = decode.DecodeEngine(model, params, mesh, slots=SLOTS, cache_length=LENGTH, top=0)
    for slot in range(SLOTS):
        engine.write(chunk, slot, 0)
        engine.activate(chunk["ticket"], slot, CHUNK, LENGTH - CHUNK, [], sampling.pack(0, 0.0, 0, 1.0))
    jax.block_until_ready(engine.run(LENGTH, int(sys.argv[1])))
    return engine

def write():
    engine.write(chunk, 1, CHUNK)
    return engine.run(LENGTH, int(sys.argv[1]))  # the last thing that the devices do

used_engine()  # once and away, so that the memory of compiling is not counted
gc.collect()
weights = status("VmRSS")
engine = used_engine()
cached = status("VmRSS")
figures = {"resident": cached, "run": peak(lambda: engine.run(LENGTH, int(sys.argv[1]))), "write": peak(write),
           "another": peak(lambda: np.ones(cache_bytes // 4, np.float32))}
print(json.dumps({"cache": cache_bytes, "layer": layer_bytes, **{name: size - weights for name, size in figures.items()}}))
"""


@pytest.fixture(scope="module", params=["4 scanned", "4 unrolled", pytest.param("4 unrolled int8", marks=pytest.mark.slow)])
def above_weights(request):
    """Bytes of the cache and of one layer of it in float32, and above the weights in a fresh process: with the cache, and
    at the peak of a run, of a write and a run, and while another array of the cache's size is there."""
    child = subprocess.run([sys.executable, "-c", CHILD, *request.param.split()], cwd=ROOT, capture_output=True, text=True,
                           timeout=240)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def one_copy(above_weights, figure):
    """Whether the cache was there once, with one layer of it in float32 beside it and an eighth of it for the rest."""
    cache = above_weights["cache"]
    return cache < above_weights[figure] < 1.125 * cache + above_weights["layer"]


def test_the_measurement_sees_the_cache_and_a_second_one(above_weights):
    assert above_weights["cache"] >= GIB
    assert one_copy(above_weights, "resident")
    assert above_weights["another"] > 2 * above_weights["cache"] and not one_copy(above_weights, "another")


def test_decoding_copies_no_cache(above_weights):
    assert one_copy(above_weights, "run")


def test_writing_a_chunk_copies_no_cache(above_weights):
    assert one_copy(above_weights, "write")
