"""Twelve random Llamas of different shapes: logits of prefill and decode steps, as transformers computes them in float32.

The models, and how their weights are made, are in tests/random_llamas.py; so are the logits by transformers, which the
tests read where it is not installed.
"""

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
from tests import random_llamas
from tests.random_llamas import MODELS, PROMPTS, STEPS

LENGTH = 32  # of the cache
NAMES = [f"{m}: {c['num_attention_heads']} over {c['num_key_value_heads']} heads of {c['head_dim']}"
         f"{', tied' * c['tie_word_embeddings']}{', llama3' * ('factor' in c['rope_parameters'])}" for m, c in enumerate(MODELS)]
every_model = pytest.mark.parametrize("m", range(len(MODELS)), ids=NAMES)


@functools.cache
def compiled(config):
    """A call of new tokens with the cache they belong in -> logits, and the cache with them written."""
    model = llama.Llama(config)

    def step(params, cache, tokens, lengths):
        x, new = model.forward(params, tokens, lengths, cache)
        at = lengths[:, None] + jnp.arange(tokens.shape[1])
        put = lambda c, n: c.at[:, jnp.arange(2)[:, None], :, at].set(n.transpose(1, 3, 0, 2, 4), mode="drop")
        return model.logits(params, x), jax.tree.map(put, cache, new)
    # Optimising the machine code of so little work takes longer than the work.
    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})


def our_logits(folder, m):
    """float32 [2][prompt + STEPS, vocabulary]: the prompts in one padded call, then step by step, from a checkpoint."""
    model = llama.Llama(llama.Config(**llama_weights.architecture(folder)))
    tied, shapes = model.config.tie_embeddings, model.params_shape()
    layout = sharding.tree(Mesh(np.array(jax.devices()[:1]), ("tp",)), shapes, model.params_axes())
    params = Checkpoint(folder, llama_weights.tensors(tied), shapes, model.config.num_layers,
                        llama_weights.ignored(tied)).load(layout)
    tokens, lengths, step = random_llamas.tokens(m), np.array(PROMPTS, np.int32), compiled(model.config)
    prompt = np.where(np.arange(max(PROMPTS)) < lengths[:, None], tokens[:, :max(PROMPTS)], 0)
    prefill, cache = step(params, model.init_cache(2, LENGTH), prompt, np.zeros(2, np.int32))
    steps = []
    for i in range(STEPS):
        logits, cache = step(params, cache, np.take_along_axis(tokens, lengths[:, None] + i, 1), lengths + i)
        steps.append(np.asarray(logits)[:, 0])
    return [np.concatenate([np.asarray(prefill)[b, :n], np.stack(steps)[:, b]]) for b, n in enumerate(PROMPTS)]


@every_model
def test_as_transformers_computed(tmp_path, m):
    """The checkpoint written here, against the logits in the file: within 1e-4 of the largest logit."""
    want = json.loads(random_llamas.FILE.read_text())[m]
    random_llamas.write(m, tmp_path)
    got = np.array(random_llamas.kept(our_logits(tmp_path, m)))
    assert got.std(axis=-1).min() > 0.3, "flat logits would prove little"
    np.testing.assert_allclose(got, np.array(want["logits"]), rtol=0, atol=1e-4 * want["largest"])


@every_model
def test_as_transformers_computes(tmp_path, m):
    """The checkpoint written by transformers, against all of its logits; the file has the same."""
    pytest.importorskip("torch", reason="torch is not installed (the extra goldens)")
    pytest.importorskip("transformers", reason="transformers is not installed (the extra goldens)")
    theirs = random_llamas.theirs(m)
    theirs.save_pretrained(tmp_path)
    want = random_llamas.their_logits(theirs, m)
    largest = max(np.abs(x).max() for x in want)
    for ours, other in zip(our_logits(tmp_path, m), want, strict=True):
        np.testing.assert_allclose(ours, other, rtol=0, atol=1e-4 * largest)
    np.testing.assert_allclose(np.array(json.loads(random_llamas.FILE.read_text())[m]["logits"]),
                               np.array(random_llamas.kept(want)), rtol=0, atol=1e-4 * largest)


def test_the_models_differ():
    """All of what varies between Llamas is there, in every combination of group size and head dim."""
    shapes = {(c["num_attention_heads"] // c["num_key_value_heads"], c["head_dim"]) for c in MODELS}
    assert shapes == {(g, d) for g in (1, 2, 4, 8) for d in (64, 80, 128)}
    assert {(c["tie_word_embeddings"], c["rope_parameters"]["rope_type"]) for c in MODELS} == {
        (tied, rope) for tied in (False, True) for rope in ("default", "llama3")}
    assert all(c["hidden_size"] != c["num_attention_heads"] * c["head_dim"] for c in MODELS)
    assert len({c["rms_norm_eps"] for c in MODELS}) >= 4 and len({c["rope_parameters"]["rope_theta"] for c in MODELS}) >= 4
