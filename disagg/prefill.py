"""The prefill engine: prompts in chunks, each chunk's KV handed out for the transfer.

The working cache of the prompt stays here; a chunk attends to it and to itself. A chunk is padded to a bucket and reads
one of a few lengths of the cache; one program is compiled for each pair.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from disagg import sampling, sharding

# What a chunk is on its way to a decode engine: k, v [L,K*C,D], head after head, cut over all devices of an engine whether
# they divide the heads or not; and the ticket, int32 [3]: the token sampled after the chunk's last valid position, the
# number of the transfer and of the request. The receiver checks the last two.
CHUNK_AXES = {"k": ("layers", "wire", "head_dim"), "v": ("layers", "wire", "head_dim")}


def chunk_shape(model, bucket):
    """Tree of jax.ShapeDtypeStruct of a chunk of this bucket."""
    L, _, K, _, D = model.cache_shape(1, 1).k.shape
    kv = jax.ShapeDtypeStruct((L, K * bucket, D), model.cache_shape(1, 1).k.dtype)
    return {"k": kv, "v": kv, "ticket": jax.ShapeDtypeStruct((3,), jnp.int32)}


def chunk_shardings(mesh):
    return {name: sharding.named(mesh, axes) for name, axes in CHUNK_AXES.items()} | {"ticket": sharding.replicated(mesh)}


def prefill_chunk(model, on_shards, params, cache, tokens, start, length, tag, read):
    """One chunk of one prompt.

    tokens int32 [C], of which `length` are valid; the cache (KV with batch 1) holds the positions before `start`, a
    multiple of the chunk size, so that start + C never passes the cache's end (dynamic_update_slice would clamp and
    shift the KV in silence), and at most `read`. tag int32 [2]: transfer and request number.
    -> cache, chunk (see CHUNK_AXES) without a token (-1), and the hidden state [1,E] of the last valid position.
    """
    x, new = model.forward(params, tokens[None], start[None], cache, read=read, on_shards=on_shards)
    cache = jax.tree.map(lambda c, n: jax.lax.dynamic_update_slice(c, n, (0, 0, 0, start, 0)), cache, new)
    flat = lambda x: x.reshape(x.shape[0], -1, x.shape[-1])
    chunk = {"k": flat(new.k), "v": flat(new.v), "ticket": jnp.concatenate([jnp.array([-1]), tag])}
    return cache, chunk, jax.lax.dynamic_slice_in_dim(x[0], length - 1, 1)


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


def programs(model, mesh, *, cache_length, top):
    split = sharding.attention_mesh(mesh, model.config.num_kv_heads)
    caches = sharding.tree(split, model.cache_shape(1, cache_length), model.cache_axes(), sharding.PREFILL)
    whole = sharding.replicated(mesh)
    return Programs(
        init=jax.jit(functools.partial(model.init_cache, 1, cache_length), out_shardings=caches),
        chunk=jax.jit(functools.partial(prefill_chunk, model, sharding.on_shards(split, sharding.PREFILL)), donate_argnums=1,
                      static_argnames="read",
                      out_shardings=(caches, chunk_shardings(mesh), whole)),
        first=jax.jit(functools.partial(first_token, model, top), out_shardings=whole))


class PrefillEngine:
    """Holds the sharded parameters and the working cache of one engine; every process of the engine makes the same calls."""

    def __init__(self, model, params, mesh, *, cache_length, buckets, top):
        self.buckets = buckets
        self._params = params
        self._programs = programs(model, mesh, cache_length=cache_length, top=top)
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
        self._cache, chunk, x = self._programs.chunk(self._params, self._cache, padded, np.int32(start),
                                                     np.int32(len(tokens)), tag, read=read)
        if not last:
            return chunk, None
        ticket, best = self._programs.first(self._params, x, np.int32(start + len(tokens)), sampler, tag)
        return chunk | {"ticket": ticket}, best
