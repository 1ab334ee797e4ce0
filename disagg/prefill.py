"""The prefill engine: prompts in chunks, each chunk's KV handed out for the transfer.

The working cache of the prompt stays here, unquantised; a chunk attends to it and to itself. A chunk is padded to a bucket and reads
one of a few lengths of the cache; one program is compiled for each pair.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from disagg import chunk, sampling, sharding

def prefill_chunk(model, on_shards, form, params, cache, tokens, start, length, tag, read):
    """One chunk of one prompt.

    tokens int32 [C], of which `length` are valid; the cache (KV with batch 1) holds the positions before `start`, a
    multiple of the chunk size, so that start + C never passes the cache's end (dynamic_update_slice would clamp and
    shift the KV in silence), and at most `read`. tag int32 [2]: transfer and request number. form: chunk.Format.
    -> cache, chunk without a token, and the hidden state [1,E] of the last valid position.
    """
    x, new = model.forward(params, tokens[None], start[None], cache, read=read, on_shards=on_shards)
    cache = jax.tree.map(lambda c, n: jax.lax.dynamic_update_slice(c, n, (0, 0, 0, start, 0)), cache, new)
    return cache, form.pack(model.to_cache(new), tag), jax.lax.dynamic_slice_in_dim(x[0], length - 1, 1)


def first_token(model, top, params, x, position, sampler, tag):
    """The token after a prompt, from the hidden state x [1,E] of its last position; position int32 scalar: the token's.

    -> ticket int32 [3], and the n = top best candidates: ids [n], scores [n].
    """
    token, scores = sampling.sample(model.logits(params, x), sampler, position[None])
    ids, values = sampling.best(scores, top)
    return jnp.concatenate([token, tag]), (ids[0], values[0])


class Programs(NamedTuple):
    """The jitted functions of one engine, laid out on its mesh; chunk donates the cache it is given."""

    init: Callable
    chunk: Callable
    first: Callable


def programs(model, mesh, form, *, cache_length, top):
    split = sharding.attention_mesh(mesh, model.config.num_kv_heads)
    shape = model.working_shape(1, cache_length)
    caches = sharding.tree(split, shape, model.axes_of(shape), sharding.PREFILL)
    whole = sharding.replicated(mesh)
    return Programs(
        init=jax.jit(functools.partial(model.init_working, 1, cache_length), out_shardings=caches),
        chunk=jax.jit(functools.partial(prefill_chunk, model, sharding.on_shards(split, sharding.PREFILL), form), donate_argnums=1,
                      static_argnames="read", out_shardings=(caches, chunk.shardings(mesh, form.shape(1)), whole)),
        first=jax.jit(functools.partial(first_token, model, top), out_shardings=whole))


class PrefillEngine:
    """Holds the sharded parameters and the working cache of one engine; every process of the engine makes the same calls."""

    def __init__(self, model, params, mesh, form, *, cache_length, buckets, top):
        self.buckets = buckets
        self._params = params
        self._programs = programs(model, mesh, form, cache_length=cache_length, top=top)
        self._cache = self._programs.init()

    def run(self, tokens, start, read, last, sampler, transfer, request):
        """Dispatch one chunk: tokens, a list of at most the largest bucket's length, from position `start`.

        read: how much of the cache is read, at least `start`; for each value a program is compiled. sampler: of the first
        token, which is chosen where `last`, else ignored. -> chunk, and the first token's best candidates (ids, scores; None
        unless last), on the devices.
        """
        bucket = next(b for b in self.buckets if b >= len(tokens))
        padded = np.zeros(bucket, np.int32)
        padded[:len(tokens)] = tokens
        tag = np.array([transfer, request], np.int32)
        self._cache, made, x = self._programs.chunk(self._params, self._cache, padded, np.int32(start),
                                                     np.int32(len(tokens)), tag, read=read)
        if not last:
            return made, None
        ticket, best = self._programs.first(self._params, x, np.int32(start + len(tokens)), sampler, tag)
        return made | {"ticket": ticket}, best
