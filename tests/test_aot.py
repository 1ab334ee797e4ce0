"""The engines' programs for Llama-2 7B, compiled for a TPU v5e slice on a machine without one.

What the compiler reports and what it wrote prove memory, aliasing, bytes moved, copies and collectives; no times.
All sizes are those of configs/llama2.py, on v5e:2x4 with tensor parallelism 8. Needs the extra `aot`:

  pip install -e '.[aot,test]' && pytest -m aot tests/test_aot.py
"""

import dataclasses
import functools
import importlib.util
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from configs import llama2
from disagg import chunk, decode, prefill, sharding
from models import llama
from tests import hlo

pytestmark = [pytest.mark.aot, pytest.mark.skipif(importlib.util.find_spec("libtpu") is None,
                                                  reason="libtpu is not installed: pip install -e '.[aot]'")]

HBM = 15.75 * 2**30  # of a v5e device, as its compiler enforces it
CONFIG = llama2.get_config("7b")
MODEL = llama.Llama(llama.Config(**CONFIG.model.to_dict(), query_rows=8))  # 8: as on every TPU, see launch/program.py
SLOTS, LENGTH, CHUNK, TOP = CONFIG.decode.slots, CONFIG.cache_length, CONFIG.chunk, CONFIG.top_logits
INT8 = llama.Llama(dataclasses.replace(MODEL.config, kv_cache_dtype="int8"))
LAYERS = MODEL.config.num_layers
STEPS = {"decode": 1, "decode_steps": CONFIG.decode.steps, "decode int8": 1}  # the programs that decode
PROGRAMS = [*STEPS, "write", "prefill", "write int8", "prefill int8"]


@functools.cache
def mesh():
    # Before libtpu is loaded: no questions to a metadata server, and no lock against another process that compiles.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    return Mesh(np.array(topologies.get_topology_desc("v5e:2x4", platform="tpu").devices), ("tp",))


def like(shapes, shardings):
    return jax.tree.map(lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), shapes, shardings)


def params():
    return like(MODEL.params_shape(), sharding.tree(mesh(), MODEL.params_shape(), MODEL.params_axes()))


def device_bytes(tree):
    """Bytes of a tree of sharded ShapeDtypeStructs on one device."""
    return sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in jax.tree.leaves(tree))


def decode_programs(model=MODEL):
    return decode.programs(model, mesh(), slots=SLOTS, cache_length=LENGTH, top=TOP)


@functools.cache
def compiled(name):
    """-> the compiled program, its hlo.Program and the bytes of the cache it is given."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    model = INT8 if "int8" in name else MODEL
    form = chunk.Format(model, 8, CONFIG.transfer.piece_bytes, CONFIG.transfer.checksum)
    if "prefill" in name:
        programs = prefill.programs(model, mesh(), form, cache_length=LENGTH, top=TOP)
        cache = programs.init.eval_shape()
        integers = lambda n: jax.ShapeDtypeStruct((n,), jnp.int32)
        lowered = programs.chunk.lower(params(), cache, integers(CHUNK), number, number, integers(2), read=LENGTH)
    else:
        programs = decode_programs(model)
        state = programs.init.eval_shape()
        cache = state.cache
        if "write" in name:
            layout = chunk.shardings(mesh(), form.shape(CHUNK))
            kv = {name: jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=layout[name]), pieces)
                  for name, pieces in chunk.kv(form.shape(CHUNK)).items()}
            lowered = programs.write.lower(state, kv, number, number, number, length=None)
        else:
            lowered = programs.steps.lower(params(), state, read=LENGTH, steps=STEPS[name])
    result = lowered.compile()
    return result, hlo.Program(result.as_text()), device_bytes(cache)


def peak(memory):
    return (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_donated_cache_is_updated_in_place(name):
    program, _, cache = compiled(name)
    rest = program.memory_analysis().alias_size_in_bytes - cache
    assert 0 <= rest < 64 * 1024, f"{rest} bytes aliased beside the cache; the slots' few numbers need 8 KiB"


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_fits_and_needs_hardly_any_memory_of_its_own(name):
    memory = compiled(name)[0].memory_analysis()
    assert memory.argument_size_in_bytes > memory.alias_size_in_bytes > 0  # the figures are filled in
    assert peak(memory) < HBM
    assert memory.temp_size_in_bytes <= 0.03 * peak(memory)


@pytest.mark.parametrize("name", STEPS)
def test_a_decode_step_reads_weights_and_cache_once(name):
    """The ideal leaves out the embedding table, of which a step needs 32 rows. What is counted includes sampling with
    its dearest branch, the sort for top-k and top-p, and that the scales of an int8 cache are read and written whole."""
    _, text, cache = compiled(name)
    weights = {key: value for key, value in params().items() if key != "embed"}
    ideal = STEPS[name] * (device_bytes(weights) + cache + cache // LENGTH)  # the last: the new keys and values
    rewritten = 0.04 * ideal if "int8" in name else 0
    assert 0.98 * ideal < text.hbm_bytes() <= 1.05 * ideal + rewritten


@pytest.mark.parametrize("name", [*STEPS, "write", "write int8"])
def test_nothing_as_large_as_a_layers_cache_is_copied(name):
    """Keys or values of one layer; whatever the instruction is called, nothing of that size is written to HBM."""
    _, text, cache = compiled(name)
    size, instruction = text.hbm_writes()[0]
    assert 0 < size < cache / LAYERS / 2, instruction


@pytest.mark.parametrize("name", [*STEPS, "prefill"])
def test_a_layer_has_two_all_reduces_and_no_other_collective(name):
    text = compiled(name)[1]
    layers = [text.collectives(body) for trips, body in text.loops() if trips == LAYERS]
    assert layers == [{"all-reduce": 2}] * STEPS.get(name, 1)


def test_a_cache_that_is_not_donated_is_seen():
    """The tests above can fail: without donation the cache is copied, and neither aliased nor updated in place."""
    state = decode_programs().init.eval_shape()
    step = functools.partial(decode.decode_steps, MODEL, sharding.on_shards(mesh(), sharding.DECODE), TOP, read=LENGTH, steps=1)
    layout = jax.tree.map(lambda s: s.sharding, state)
    program = jax.jit(step, out_shardings=(layout, sharding.replicated(mesh()))).lower(params(), state).compile()
    text, cache = hlo.Program(program.as_text()), device_bytes(state.cache)
    assert program.memory_analysis().alias_size_in_bytes == 0
    assert text.hbm_writes()[0][0] == cache / 2  # the keys
    assert text.hbm_bytes() > 1.05 * (device_bytes(params()) + cache)


def test_kv_heads_that_do_not_divide():
    """A decode step of Llama-2 70B on 16 devices, 8 kv heads: weights and cache are read once, nothing of the cache is
    copied or gathered, and a layer has two all-reduces and, around its attention, two all-to-alls."""
    mesh()  # sets the compiler up
    config = llama2.get_config("70b")
    model = llama.Llama(llama.Config(**config.model.to_dict(), query_rows=8))
    flat = Mesh(np.array(topologies.get_topology_desc("v5e:4x4", platform="tpu").devices), ("tp",))
    split = sharding.attention_mesh(flat, model.config.num_kv_heads)
    assert dict(split.shape) == {"tp": 8, "split": 2}
    weights = like(model.params_shape(), sharding.tree(split, model.params_shape(), model.params_axes()))
    programs = decode.programs(model, flat, slots=32, cache_length=4096, top=0)
    state = programs.init.eval_shape()
    program = programs.steps.lower(weights, state, read=4096, steps=1).compile()
    memory, text, cache = program.memory_analysis(), hlo.Program(program.as_text()), device_bytes(state.cache)
    assert 0 <= memory.alias_size_in_bytes - cache < 64 * 1024
    assert peak(memory) < HBM and memory.temp_size_in_bytes <= 0.03 * peak(memory)
    ideal = device_bytes({key: value for key, value in weights.items() if key != "embed"}) + cache
    assert 0.98 * ideal < text.hbm_bytes() <= 1.05 * ideal
    # A slice-start fetches weights into on-chip memory.
    size, instruction = next(w for w in text.hbm_writes() if "slice-start" not in w[1])
    assert 0 < size < cache / model.config.num_layers / 2, instruction
    layers, = [text.collectives(body) for trips, body in text.loops() if trips == model.config.num_layers]
    assert layers == {"all-reduce": 2, "all-to-all": 2}
