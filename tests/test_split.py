"""Engines whose kv heads do not divide over their devices, against the same engine on one device."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from disagg import sampling, sharding
from disagg.chunk import Format
from disagg.decode import DecodeEngine
from disagg.prefill import PrefillEngine
from models import llama

GREEDY = sampling.pack(0, 0.0, 0, 1.0)
SLOTS, CACHE, BUCKETS, PROMPT, STEPS = 4, 64, (16, 32), 45, 1
TOKENS = np.random.default_rng(0).integers(0, 96, (3, PROMPT)).tolist()


def flat(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("tp",))


@functools.cache
def answers(kv_heads, groups, devices, scanned, cache=False):
    """Greedy tokens of three prompts decoded together in slots of their own, and all scores: first those of the first tokens.

    Everything goes the way it goes in a cell: chunks of a prefill engine, written to a decode engine; not all is read.
    """
    model = llama.Llama(llama.Config(vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2,
                                     num_heads=kv_heads * groups, num_kv_heads=kv_heads, head_dim=16, max_length=128,
                                     scan_layers=scanned))
    mesh = flat(devices)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda s: np.float32(2 * s.shape[-1] ** -0.5 * rng.normal(size=s.shape)), model.params_shape())
    params = jax.device_put(params, sharding.tree(sharding.attention_mesh(mesh, kv_heads), model.params_shape(), model.params_axes()))
    prefill = PrefillEngine(model, params, mesh, Format(model, devices, 1000, False), cache_length=CACHE, buckets=BUCKETS, top=3)
    decode = DecodeEngine(model, params, mesh, slots=SLOTS, cache_length=CACHE, top=3)
    tokens, scores = [], []
    slots = (3, 0, 2)
    for slot, prompt in zip(slots, TOKENS):
        for start in range(0, PROMPT, BUCKETS[-1]):
            last = start + BUCKETS[-1] >= PROMPT
            chunk, best = prefill.run(prompt[start:start + BUCKETS[-1]], start, start, last, GREEDY, 1, slot)
            decode.write(chunk, slot, start)
        decode.activate(chunk["ticket"], slot, PROMPT, CACHE - PROMPT, [], GREEDY)
        tokens.append(int(best[0][0, 0]))
        scores.append(np.asarray(best[1][0]))
    for _ in range(2):
        made, _, values = decode.run(48, STEPS)
        tokens += np.asarray(made)[:, slots].ravel().tolist()
        scores += np.asarray(values)[:, slots].reshape(-1, 3).tolist()
    if cache:
        return decode._state.cache
    return tokens, np.array(scores)


@pytest.mark.parametrize("kv_heads, groups, devices, scanned", [(3, 3, 2, False), (2, 4, 4, True), (1, 4, 2, False)])
def test_equal_to_one_device(kv_heads, groups, devices, scanned):
    """3 heads on 2 devices, 2 on 4, 1 on 2."""
    want, got = answers(kv_heads, groups, 1, scanned), answers(kv_heads, groups, devices, scanned)
    assert got[0] == want[0]
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-4 * np.abs(want[1]).max())


def test_nothing_of_a_decode_cache_is_held_twice():
    """2 kv heads on 4 devices: a device has one head of half of the slots."""
    cache = answers(2, 4, 4, True, cache=True)
    assert {s.data.shape for s in cache.k.addressable_shards} == {(2, SLOTS // 2, 1, CACHE, 16)}


@pytest.mark.parametrize("kv_heads, devices, role, slots, buckets, words", [
    (8, 4, "decode", 5, (16,), "8 kv heads over 4 devices"),
    (8, 16, "decode", 32, (16,), "8 kv heads do not divide over 16 devices: 8 groups of 2 devices, which split the 32 slots"),
    (3, 2, "prefill", 1, (16, 32), "3 kv heads do not divide over 2 devices: 1 groups of 2 devices, which split a chunk's queries "
                                   "and each hold the working cache"),
])
def test_what_is_printed(kv_heads, devices, role, slots, buckets, words):
    """The rule by which an engine's attention is split."""
    mesh = jax.sharding.AbstractMesh((devices,), ("tp",))
    assert sharding.describe(mesh, kv_heads, role, slots, buckets) == words


@pytest.mark.parametrize("kv_heads, devices, role, slots, buckets, message", [
    (8, 16, "decode", 3, (16,), r"8 kv heads .* config.decode.tp=16 devices; 2 .* config.decode.slots must be a multiple of 2, got 3"),
    (3, 2, "prefill", 4, (16, 33), r"3 kv heads .* config.prefill.tp=2 devices; 2 .* config.buckets must be a multiple of 2, got 33"),
    (3, 4, "decode", 4, (18,), r"3 kv heads .* config.decode.tp=4 devices; 4 .* config.buckets must be a multiple of 4, got 18"),
])
def test_what_is_refused(kv_heads, devices, role, slots, buckets, message):
    """Both numbers, and what would have to divide."""
    with pytest.raises(ValueError, match=message):
        sharding.describe(jax.sharding.AbstractMesh((devices,), ("tp",)), kv_heads, role, slots, buckets)
