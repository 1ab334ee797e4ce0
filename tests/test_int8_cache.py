"""The cache in int8: what it holds, what attention makes of it, and what it takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disagg.chunk import Format
from models import llama

CONFIG = llama.Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=8, num_kv_heads=4,
                      head_dim=16, max_length=64, kv_cache_dtype="int8")
B, T, S = 2, 24, 5


def random_kv(seed, shape=(3, B, 4, T, 16)):
    """Positions whose sizes differ a hundredfold, one of them zero."""
    rng = np.random.default_rng(seed)
    k, v = (rng.normal(size=shape) * rng.uniform(0.1, 10, shape[:-1])[..., None] for _ in range(2))
    k[:, :, :, 3] = v[:, :, :, 3] = 0
    return llama.KV(jnp.float32(k), jnp.float32(v))


def restored(kv):
    return llama.KV(kv.k * kv.k_scale[..., None], kv.v * kv.v_scale[..., None])


def test_quantize():
    """Each value is within half a step, the largest of a position's head exact; zero stays zero."""
    kv = random_kv(1)
    held = llama.quantize(kv)
    assert {x.dtype for x in held} == {jnp.dtype("int8"), jnp.dtype("float32")} and held.k_scale.shape == kv.k.shape[:-1]
    for whole, again, scale in zip(kv, restored(held), (held.k_scale, held.v_scale)):
        assert np.all(np.abs(whole - again) <= scale[..., None] * 0.501)
        largest = np.abs(whole).argmax(-1)[..., None]
        np.testing.assert_allclose(np.take_along_axis(again, largest, -1), np.take_along_axis(whole, largest, -1), rtol=1e-6)
    assert not np.any(restored(held).k[:, :, :, 3]) and np.all(np.isfinite(restored(held).k))


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("tokens", [1, S])
def test_attention_over_it_is_that_over_the_restored_values(scan, tokens):
    """Scales on scores and probabilities do what they would on keys and values."""
    model = llama.Llama(dataclasses.replace(CONFIG, scan_layers=scan))
    params = model.init(jax.random.key(0))
    held = llama.quantize(random_kv(2))
    run = lambda cache: model.forward(params, jnp.arange(B * tokens).reshape(B, tokens), jnp.array([20, 7]), cache, read=21)
    (x, new), (x_again, new_again) = run(held), run(restored(held))
    np.testing.assert_allclose(x, x_again, atol=2e-5, rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), new, new_again)
    assert new.k_scale is None and new.k.dtype == jnp.float32  # what prompts go on with
    other = run(held._replace(k_scale=held.k_scale * 1.01))[0]
    assert np.abs(other - x).max() > 1e-4


def test_what_it_takes():
    """A quarter of float32, and the scales: in the cache and on the way."""
    plain = dataclasses.replace(CONFIG, kv_cache_dtype="")
    size = lambda shape: sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shape))
    of_cache = [size(llama.Llama(c).cache_shape(B, T)) for c in (plain, CONFIG)]
    moved = [Format(llama.Llama(c), 4, 2**20, False).bytes(T) - 12 for c in (plain, CONFIG)]  # 12: the ticket
    for whole, held in (of_cache, moved):
        assert held / whole == (16 + 4) / (16 * 4)


def test_refused():
    with pytest.raises(ValueError, match="kv_cache_dtype must be '' .* or 'int8', got 'int4'"):
        dataclasses.replace(CONFIG, kv_cache_dtype="int4")
