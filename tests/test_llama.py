"""The model: against transformers where it is installed, and against itself in the forms in which the engines run it."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from disagg import sharding
from disagg.weights import Checkpoint
from models import llama, llama_weights

CONFIG = llama.Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8, num_kv_heads=4,
                      head_dim=8, max_length=64)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 24)).astype(np.int32)
NONE = np.zeros(2, np.int32)  # nothing in the cache


def make(**fields):
    """A model and random parameters, large enough that attention is far from even."""
    model, rng = llama.Llama(dataclasses.replace(CONFIG, **fields)), np.random.default_rng(1)

    def random(path, s):
        x = rng.normal(size=s.shape)
        return jnp.asarray(1 + 0.2 * x if "norm" in jax.tree_util.keystr(path) else 2 * s.shape[-1] ** -0.5 * x, s.dtype)
    return model, jax.tree_util.tree_map_with_path(random, model.params_shape())


@pytest.fixture(scope="module")
def default():
    return make()


@functools.cache
def compiled(config):
    """Two functions: logits [B,S,V] of whole sequences without a cache; and of new tokens, with the cache they belong in."""
    model = llama.Llama(config)

    def whole(params, tokens):
        x, _ = model.forward(params, tokens, jnp.zeros(len(tokens), jnp.int32), model.init_cache(len(tokens), 0))
        return model.logits(params, x)

    def step(params, cache, tokens, lengths):
        x, new = model.forward(params, tokens, lengths, cache)
        rows = jnp.arange(tokens.shape[0])[:, None]
        at = lengths[:, None] + jnp.arange(tokens.shape[1])
        put = lambda c, n: c.at[:, rows, :, at].set(n.transpose(1, 3, 0, 2, 4), mode="drop")
        return model.logits(params, x), jax.tree.map(put, cache, new)
    return jax.jit(whole), jax.jit(step)


def one_shot(model, params, tokens):
    return np.asarray(compiled(model.config)[0](params, tokens))


def assert_close(got, want, relative=1e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=relative * np.abs(want).max())


# Against transformers.

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}


@pytest.mark.parametrize("fields", [
    dict(num_key_value_heads=4),
    dict(num_key_value_heads=8, tie_word_embeddings=True),
    dict(num_key_value_heads=1, head_dim=6, rms_norm_eps=1e-2),
    dict(num_key_value_heads=4, rope_scaling=LLAMA3 | {"rope_theta": 50.0}),
], ids=["grouped", "multi-head, tied", "one kv head, narrow heads", "llama3 rope"])
def test_equal_to_transformers(tmp_path, fields):
    """Logits of a random model saved by transformers, loaded as a checkpoint."""
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra goldens)")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra goldens)")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        max_position_embeddings=64, initializer_range=0.3, **fields)).float().eval()
    theirs.save_pretrained(tmp_path)
    model = llama.Llama(llama.Config(**llama_weights.architecture(tmp_path)))
    tied = model.config.tie_embeddings
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    shardings = sharding.tree(mesh, model.params_shape(), model.params_axes())
    params = Checkpoint(tmp_path, llama_weights.tensors(tied), model.params_shape(), model.config.num_layers,
                        llama_weights.ignored(tied)).load(shardings)
    with torch.no_grad():
        want = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert want.std() > 0.5
    assert_close(one_shot(model, params, TOKENS), want, 1e-4)


def test_llama3_frequencies():
    """High frequencies are kept, low ones divided by the factor, those between lie between."""
    config = dataclasses.replace(CONFIG, head_dim=64, rope_type="llama3", rope_factor=8.0, rope_low_freq_factor=1.0,
                                 rope_high_freq_factor=4.0, rope_original_length=1024)
    plain = np.asarray(llama.rope_frequencies(dataclasses.replace(config, rope_type="default")))
    ratio = np.asarray(llama.rope_frequencies(config)) / plain
    turns = 1024 * plain / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns >= 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns <= 1], 1 / 8, rtol=1e-6)
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) and np.all((between > 1 / 8) & (between < 1)) and np.all(np.diff(between) < 0)


# Against itself.


class Cached:
    """Runs a model step by step with a cache, as the engines do."""

    def __init__(self, model, params, batch=2, length=32):
        self.params, self.cache, self._step = params, model.init_cache(batch, length), compiled(model.config)[1]

    def __call__(self, tokens, lengths):
        """Logits of new tokens after `lengths` positions of each sequence."""
        logits, self.cache = self._step(self.params, self.cache, tokens, np.asarray(lengths, np.int32))
        return np.asarray(logits)


@pytest.mark.parametrize("fields", [{}, dict(num_kv_heads=8, query_rows=8, tie_embeddings=True, rope_type="llama3",
                                             rope_factor=4.0, rope_original_length=16)])
def test_chunks_and_cached_decode_equal_one_shot(fields):
    """Two chunks of 8, then token by token."""
    model, params = make(**fields)
    want = one_shot(model, params, TOKENS)
    cached = Cached(model, params)
    got = [cached(TOKENS[:, i:i + 8], [i, i]) for i in (0, 8)]
    got += [cached(TOKENS[:, i:i + 1], [i, i]) for i in range(16, 24)]
    assert_close(np.concatenate(got, 1), want)


def test_sequences_of_different_lengths_in_one_step(default):
    """Each at its own position, as in a decode batch."""
    want = one_shot(*default, TOKENS)
    cached = Cached(*default)
    for i in (0, 8):
        cached(TOKENS[:, i:i + 8], [i, i])
    got = cached(np.stack([TOKENS[0, 3:4], TOKENS[1, 15:16]]), [3, 15])
    assert_close(got[:, 0], np.stack([want[0, 3], want[1, 15]]))


def test_padding_changes_nothing(default):
    """Neither the tokens after a prompt's end nor what lies in the cache beyond its length, bit for bit."""
    rng = np.random.default_rng(1)
    clean, dirty = Cached(*default), Cached(*default)
    dirty.cache = jax.tree.map(lambda c: jnp.full_like(c, 1e3), dirty.cache)
    for start, valid in ((0, 8), (8, 5)):  # the second chunk has three tokens of padding
        tokens = TOKENS[:, start:start + 8].copy()
        a = clean(tokens, [start, start])[:, :valid]
        tokens[:, valid:] = rng.integers(0, 64, (2, 8 - valid))
        b = dirty(tokens, [start, start])[:, :valid]
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(clean(TOKENS[:, 13:14], [13, 13]), dirty(TOKENS[:, 13:14], [13, 13]))


def test_padding_is_overwritten(default):
    """The token after a padded chunk goes where its padding was."""
    want = one_shot(*default, TOKENS)
    cached = Cached(*default)
    padded = TOKENS[:, :8].copy()
    padded[:, 5:] = 0
    cached(padded, NONE)
    assert_close(np.concatenate([cached(TOKENS[:, i:i + 1], [i, i]) for i in range(5, 10)], 1), want[:, 5:10])


def test_padded_query_rows_change_nothing(default):
    """A decode step whose kv heads have two query rows each, padded to eight."""
    model, params = default
    plain, wide = Cached(model, params), Cached(llama.Llama(dataclasses.replace(model.config, query_rows=8)), params)
    plain(TOKENS[:, :8], NONE)
    wide.cache = plain.cache
    assert_close(wide(TOKENS[:, 8:9], [8, 8]), plain(TOKENS[:, 8:9], [8, 8]))


@pytest.mark.parametrize("devices", [2, 4])
def test_tensor_parallel(default, devices):
    """Parameters and cache laid out by the sharding table: the same logits, from tokens and from the cache."""
    model, params = default
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    one, many = Cached(model, params), Cached(model, params)
    many.params = jax.device_put(params, sharding.tree(mesh, model.params_shape(), model.params_axes()))
    many.cache = jax.device_put(many.cache, sharding.tree(mesh, model.cache_shape(2, 32), model.axes_of(model.cache_shape(2, 32))))
    assert many.params["layers"]["wqkv"].addressable_shards[0].data.shape[1] == 4 // devices
    assert many.cache.k.addressable_shards[0].data.shape[2] == 4 // devices
    for start in (0, 8):
        tokens, lengths = TOKENS[:, start:start + 8], [start, start]
        assert_close(many(tokens, lengths), one(tokens, lengths))


def test_an_axis_that_the_mesh_does_not_divide():
    """Refused with the array, the axis and both sizes, before anything is loaded."""
    model = llama.Llama(dataclasses.replace(CONFIG, intermediate_size=46))
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    with pytest.raises(ValueError, match=r"\['layers'\]\['w_.*'\]: axis 'mlp' of size 46 does not divide over .* of size 4"):
        sharding.tree(mesh, model.params_shape(), model.params_axes())


def test_layers_one_after_the_other_equal_scanned_ones(default):
    """The same weights as arrays of their own: in one shot and from the cache."""
    model, params = default
    loose = llama.Llama(dataclasses.replace(model.config, scan_layers=False))
    apart = params | {"layers": {i: {name: w[i] for name, w in params["layers"].items()} for i in range(2)}}
    assert jax.tree.structure(apart) == jax.tree.structure(loose.params_shape())
    assert_close(one_shot(loose, apart, TOKENS), one_shot(model, params, TOKENS))
    a, b = Cached(model, params), Cached(loose, apart)
    for start, stop in ((0, 8), (8, 16), (16, 17)):
        tokens, lengths = TOKENS[:, start:stop], [start, start]
        assert_close(b(tokens, lengths), a(tokens, lengths))


@pytest.mark.parametrize("scanned", [True, False])
def test_reading_a_part_of_the_cache(default, scanned):
    """The part that is in use is enough; what lies beyond it is not looked at."""
    model = llama.Llama(dataclasses.replace(default[0].config, scan_layers=scanned))
    params = default[1] if scanned else default[1] | {
        "layers": {i: {name: w[i] for name, w in default[1]["layers"].items()} for i in range(2)}}
    cached = Cached(model, params)
    cached(TOKENS[:, :8], NONE)
    tokens, lengths = TOKENS[:, 8:9], np.array([8, 8], np.int32)
    want, _ = model.forward(params, tokens, lengths, cached.cache)
    poisoned = jax.tree.map(lambda c: c.at[:, :, :, 8:].set(jnp.nan), cached.cache)
    got, _ = model.forward(params, tokens, lengths, poisoned, read=8)
    assert_close(got, want)
    less, _ = model.forward(params, tokens, lengths, cached.cache, read=7)
    assert np.abs(less - want).max() > 1e-3, "the last position is not needed: the test proves nothing"


def test_a_sequence_without_any_visible_position(default):
    """An empty slot of a batch gives finite numbers."""
    assert np.all(np.isfinite(Cached(*default)(TOKENS[:, :1], NONE)))


def test_low_precision(default):
    """Weights, hidden state and cache have the dtype, logits are float32 and near those of float32."""
    (model, params), dtype = default, "bfloat16"
    low = llama.Llama(dataclasses.replace(model.config, dtype=dtype))
    params = jax.tree.map(lambda x: x / 2, params)  # less far from even, so that rounding stays small
    params16 = jax.tree.map(lambda x: x.astype(dtype), params)
    assert {x.dtype for x in jax.tree.leaves(low.params_shape())} == {x.dtype for x in jax.tree.leaves(low.cache_shape(1, 1))} == {jnp.dtype(dtype)}
    got = one_shot(low, params16, TOKENS)
    assert got.dtype == np.float32
    assert_close(got, one_shot(model, params, TOKENS), 0.1)


def test_trees_agree():
    """Parameters and their axis names are trees of one form, tied or not."""
    for tied in (False, True):
        model = llama.Llama(dataclasses.replace(CONFIG, tie_embeddings=tied))
        shapes, axes = model.params_shape(), model.params_axes()
        assert jax.tree.map(lambda x: x.ndim, shapes) == jax.tree.map(len, axes, is_leaf=lambda a: isinstance(a, tuple))
        assert ("head" in shapes) == (not tied)


# Config.


@pytest.mark.parametrize("fields, message", [
    (dict(num_kv_heads=3), r"num_heads \(8\) must be a multiple of model.num_kv_heads \(3\)"),
    (dict(head_dim=7), "head_dim must be even for RoPE, got 7"),
    (dict(num_layers=0), "num_layers must be positive, got 0"),
    (dict(vocab_size=-1), "vocab_size must be positive, got -1"),
    (dict(rms_norm_eps=0.0), "rms_norm_eps must be positive, got 0.0"),
    (dict(rope_theta=-1.0), "rope_theta must be positive, got -1.0"),
    (dict(rope_type="yarn"), "rope_type must be 'default' or 'llama3', got 'yarn'"),
    (dict(dtype="int8"), "dtype must be float32, bfloat16 or float16, got 'int8'"),
])
def test_config_errors(fields, message):
    """The field, and what it is."""
    with pytest.raises(ValueError, match=f"model.{message}"):
        dataclasses.replace(CONFIG, **fields)


def test_config_is_frozen_and_knows_its_fields():
    """A misspelt field and a later change are errors."""
    with pytest.raises(TypeError, match="num_layer"):
        llama.Config(**json.loads(json.dumps(dataclasses.asdict(CONFIG))), num_layer=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.num_layers = 3


def test_the_cache_stays_finite():
    """A model whose projections overflow hands out no inf or NaN for the cache: a slot's next request must not meet one."""
    model = llama.Llama(llama.Config(vocab_size=16, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2,
                                     num_kv_heads=1, head_dim=8, max_length=32, dtype="float16"))
    params = model.init(jax.random.key(0))
    params["layers"]["wqkv"] = params["layers"]["wqkv"].at[:, :, -2].multiply(1e30).at[:, :, -1].multiply(6e4)
    _, new = model.forward(params, jnp.ones((1, 4), jnp.int32), jnp.zeros(1, jnp.int32), model.init_cache(1, 8))
    assert all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(new))
