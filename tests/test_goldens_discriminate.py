"""The goldens must be able to fail: a KV cache that is wrong at one position gives another answer.

Each error is put into the prompt's KV cache, and the golden answer is then given to the model in one forward. As long
as the greedy tokens are the golden ones, a greedy run with the same error goes the same way; so the answer survives the
error exactly when every greedy token of that forward is the golden one.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest

from configs import tiny as tiny_config
from disagg import sharding
from launch import program
from tests import golden

GOLDENS = golden.load()
LONG = [g for g in GOLDENS if len(g["prompt_ids"]) > 1]
CACHE = 256  # slots


@functools.cache
def tiny():
    """The model and a compiled forward of one row."""
    config = tiny_config.get_config()
    model = program.make_model(config)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    params = program.loader(config, model)(sharding.tree(mesh, model.params_shape(), model.params_axes()))

    @jax.jit
    def forward(tokens, length, cache):
        """tokens [S], length [], cache of one row -> greedy tokens [S] and the new KV."""
        x, new = model.forward(params, tokens[None], length[None], cache)
        return model.logits(params, x)[0].argmax(-1), new

    return model, forward


@functools.cache
def prompt_cache(name):
    """The KV cache of one golden's prompt, numpy [L,1,K,CACHE,D], zero beyond the prompt."""
    model, forward = tiny()
    ids = next(g["prompt_ids"] for g in GOLDENS if g["name"] == name)
    tokens = np.zeros(CACHE, np.int32)
    tokens[:len(ids)] = ids
    _, new = forward(tokens, jnp.int32(0), model.init_cache(1, 0))
    used = np.arange(CACHE)[:, None] < len(ids)
    return jax.tree.map(lambda a: np.where(used, a, 0), new)


def survives(golden, error):
    """Whether the answer after its first token is still the golden one.

    `error` maps the prompt's length to (slots [CACHE]: from which slot each slot is filled, -1 for zeros; by how much
    the length that the decoder believes in is wrong).
    """
    _, forward = tiny()
    n = len(golden["prompt_ids"])
    slots, moved = error(n)
    cache = jax.tree.map(lambda a: np.where(slots[:, None] >= 0, a[:, :, :, slots], 0), prompt_cache(golden["name"]))
    answer = golden["token_ids"]
    tokens = np.zeros(64, np.int32)
    tokens[:len(answer)] = answer
    greedy, _ = forward(tokens, jnp.int32(n + moved), cache)
    return greedy[:len(answer) - 1].tolist() == answer[1:]


# Keys carry their position in their rotation, so a shift towards the front only loses the first token, which the answers
# do not need; towards the back it loses the last one.
ERRORS = {
    "slot t holds position t - 1": lambda n: (np.arange(-1, CACHE - 1), 0),
    "last position missing": lambda n: (np.where(np.arange(CACHE) == n - 1, -1, np.arange(CACHE)), 0),
    "position before the last twice": lambda n: (np.where(np.arange(CACHE) == n - 1, n - 2, np.arange(CACHE)), 0),
    "length one too long": lambda n: (np.arange(CACHE), 1),
    "length one too short": lambda n: (np.arange(CACHE), -1),
}


def test_goldens_without_error():
    for golden in LONG:
        assert survives(golden, lambda n: (np.arange(CACHE), 0)), golden["name"]


@pytest.mark.parametrize("error", ERRORS)
def test_most_goldens_notice(error):
    unnoticed = [golden["name"] for golden in LONG if survives(golden, ERRORS[error])]
    print(f"{error}: {len(LONG) - len(unnoticed)} of {len(LONG)} notice; not: {unnoticed}")
    assert len(unnoticed) * 2 < len(LONG)
