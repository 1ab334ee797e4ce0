"""Prompts computed together, against each of them in chunks: what is handed out, and what becomes of it in a decode cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from disagg import chunk as chunks
from disagg import sampling, sharding
from disagg.chunk import Format
from disagg.decode import DecodeEngine
from disagg.prefill import PrefillEngine
from models import llama

BUCKET, COUNT, CACHE = 8, 4, 64
PROMPTS = [np.random.default_rng(i).integers(3, 96, n).tolist() for i, n in enumerate((8, 1, 5))]
SAMPLERS = [sampling.pack(0, 0.0, 0, 1.0), sampling.pack(7, 1.0, 0, 1.0), sampling.pack(2**40, 0.8, 20, 0.9)]


def engines(devices, kv_heads, kv_cache_dtype):
    model = llama.Llama(llama.Config(vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2 * kv_heads,
                                     num_kv_heads=kv_heads, head_dim=16, max_length=128, kv_cache_dtype=kv_cache_dtype))
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    layout = sharding.tree(sharding.attention_mesh(mesh, kv_heads), model.params_shape(), model.params_axes())
    params = jax.jit(model.init, out_shardings=layout)(jax.random.key(0))
    form = Format(model, devices, 1000, True, COUNT)
    prefill = PrefillEngine(model, params, mesh, form, cache_length=CACHE, buckets=(BUCKET, BUCKET * COUNT), top=3)
    decode = lambda: DecodeEngine(model, params, mesh, slots=4, cache_length=CACHE, top=3)
    return prefill, decode


@pytest.mark.parametrize("devices, kv_heads, kv_cache_dtype", [(1, 2, ""), (2, 4, ""), (2, 3, ""), (2, 4, "int8")])
def test_together_as_alone(devices, kv_heads, kv_cache_dtype):
    """First tokens, their candidates, the cache that is written and the next tokens: each prompt's are those of its own run."""
    prefill, new_decode = engines(devices, kv_heads, kv_cache_dtype)
    together, bests = prefill.run_prompts(PROMPTS, SAMPLERS, BUCKET, COUNT, 5, 11)
    ticket = np.asarray(together["ticket"]).tolist()
    assert ticket[:2] == [5, 11]
    np.testing.assert_array_equal(together["sums"], chunks.sums(chunks.kv(together), devices))
    one, other = new_decode(), new_decode()
    slots = (2, 0, 3)
    for i, (prompt, sampler, slot) in enumerate(zip(PROMPTS, SAMPLERS, slots)):
        alone, best = prefill.run(prompt, 0, BUCKET, True, sampler, 5, 11)
        assert ticket[2 + i] == np.asarray(alone["ticket"])[2]
        np.testing.assert_array_equal(bests[0][i], best[0][0])
        np.testing.assert_allclose(bests[1][i], best[1][0], rtol=1e-5, atol=1e-5)
        one.write(together, slot, 0, i, BUCKET)
        one.activate(together["ticket"], slot, len(prompt), 9, [], sampler, i)
        other.write(alone, slot, 0)
        other.activate(alone["ticket"], slot, len(prompt), 9, [], sampler)
    for got, want in zip(jax.tree.leaves(one._state.cache), jax.tree.leaves(other._state.cache)):
        for slot, prompt in zip(slots, PROMPTS):
            np.testing.assert_allclose(jnp.float32(got)[:, slot, :, :len(prompt)], jnp.float32(want)[:, slot, :, :len(prompt)],
                                       rtol=1e-5, atol=1.01 if kv_cache_dtype else 1e-5)
    for _ in range(3):
        np.testing.assert_array_equal(one.run(32, 1)[0], other.run(32, 1)[0])


def test_a_whole_prompt_leaves_the_cache_of_a_long_one_alone():
    """Between two chunks of a long prompt."""
    prefill, _ = engines(1, 2, "")
    long = np.random.default_rng(9).integers(3, 96, 2 * BUCKET * COUNT).tolist()
    half = BUCKET * COUNT

    def run(between):
        prefill.run(long[:half], 0, half, False, SAMPLERS[0], 1, 1)
        if between:
            prefill.run_prompts(PROMPTS, SAMPLERS, BUCKET, COUNT, 2, 2)
        return prefill.run(long[half:], half, half, True, SAMPLERS[0], 3, 1)
    (alone, _), (between, _) = run(False), run(True)
    jax.tree.map(np.testing.assert_array_equal, alone, between)
