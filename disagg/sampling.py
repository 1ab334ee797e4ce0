"""Logits -> token ids, with parameters and a seed of its own for every request.

The random numbers of a token depend on the request's seed and the token's position only, so a request gets the same
tokens alone or in a full batch, interleaved or disaggregated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FILTERED = -1e30
COLDEST = 1e-6  # lower temperatures count as 0: the quotients would pass FILTERED, then float32's range


class Sampling(NamedTuple):
    """Parameters of B requests, every field with leading axis [B].

    seed uint32 [B,2] (the 64-bit seed's words); temperature float32 (below COLDEST: greedy); top_k int32 (0: off);
    top_p float32 (1: off).
    """

    seed: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


def pack(seed, temperature, top_k, top_p):
    """One request's parameters as a Sampling of host arrays with B = 1; any Python int is a seed, modulo 2**64."""
    words = [[(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF]]
    return Sampling(np.array(words, np.uint32), np.array([temperature], np.float32),
                    np.array([top_k], np.int32), np.array([top_p], np.float32))


def empty(slots):
    return Sampling(jnp.zeros((slots, 2), jnp.uint32), jnp.zeros(slots), jnp.zeros(slots, jnp.int32), jnp.ones(slots))


def _filter(scaled, top_k, top_p):
    """Mask all but the top_k most likely, and of those all but the smallest set with probability top_p. scaled [B,V].

    Candidates as likely as the last one of the set stay too.
    """
    V = scaled.shape[-1]
    ordered = -jnp.sort(-scaled, axis=-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)[:, None]
    ordered = jnp.where(jnp.arange(V) < k, ordered, FILTERED)
    p = jax.nn.softmax(ordered, -1)
    # The most likely one is kept whatever top_p; with top_p off, rounding of the sum must not cut the tail.
    kept = (jnp.cumsum(p, -1) - p < top_p[:, None]) | (jnp.arange(V) == 0) | (top_p[:, None] >= 1)
    least = jnp.min(jnp.where(kept & (ordered > FILTERED), ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(scaled >= least, scaled, FILTERED)


def sample(logits, sampling, position):
    """Choose one token a request.

    logits float32 [B,V]; position int32 [B], of the token being chosen -> tokens int32 [B], and the scores [B,V] whose
    maximum each is: the logits where greedy, else the filtered logits / temperature plus Gumbel noise (sampling by the
    Gumbel-max identity: Gumbel 1954; Maddison et al. 2014).
    """
    def noisy(_):
        greedy = sampling.temperature < COLDEST
        scaled = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None]
        filters = (sampling.top_k > 0) | (sampling.top_p < 1)
        scaled = jax.lax.cond(jnp.any(filters), lambda s: _filter(s, sampling.top_k, sampling.top_p), lambda s: s, scaled)
        keys = jax.vmap(lambda words, p: jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), p))
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys(sampling.seed, position))
        return jnp.where(greedy[:, None], logits, scaled + noise)

    scores = jax.lax.cond(jnp.any(sampling.temperature > 0), noisy, lambda _: logits, None)
    return jnp.argmax(scores, -1).astype(jnp.int32), scores


def best(scores, n):
    """The n best candidates of each request: ids int32 [B,n] and scores float32 [B,n]."""
    values, ids = jax.lax.top_k(scores, n)
    return ids.astype(jnp.int32), values
