"""The prefill engine: prompts of up to a chunk whole, several together; longer ones in chunks. What comes of them is handed
out for the transfer.

A whole prompt needs no cache, so that short ones come in between the chunks of a long one. That one's working cache stays here,
unquantised; a chunk attends to it and to itself. Everything is padded to a bucket; a program is compiled for each bucket and
number of prompts, and for each bucket and length of the cache that a chunk reads.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from disagg import chunk, sampling, sharding


def prefill_prompts(model, on_shards, form, top, params, tokens, lengths, sampler, tag):
    """N whole prompts: tokens int32 [N,C], of which `lengths` [N] are valid each. tag int32 [2]: transfer and first request.

    -> a chunk of N * C positions with all first tokens, and of each its n = top best candidates: ids [N,n], scores [N,n].
    """
    N = tokens.shape[0]
    x, new = model.forward(params, tokens, jnp.zeros(N, jnp.int32), model.init_working(N, 1), read=0, on_shards=on_shards)
    token, scores = sampling.sample(model.logits(params, x[jnp.arange(N), lengths - 1]), sampler, lengths)
    return form.pack(model.to_cache(new), tag, token), sampling.best(scores, top)


def prefill_chunk(model, on_shards, form, params, cache, tokens, start, length, tag, read):
    """One chunk of one prompt.

    tokens int32 [C], of which `length` are valid; the cache (KV with batch 1) holds the positions before `start`, a
    multiple of the chunk size, so that start + C never passes the cache's end (dynamic_update_slice would clamp and
    shift the KV in silence), and at most `read`. tag int32 [2]: transfer and request number. form: chunk.Format.
    -> cache, chunk without a token, and the hidden state [1,E] of the last valid position.
    """
    x, new = model.forward(params, tokens[None], start[None], cache, read=read, on_shards=on_shards)
    cache = jax.tree.map(lambda c, n: jax.lax.dynamic_update_slice(c, n, (0, 0, 0, start, 0)), cache, new)
    return cache, form.pack(model.to_cache(new), tag, jnp.zeros(0, jnp.int32)), jax.lax.dynamic_slice_in_dim(x[0], length - 1, 1)


def first_token(model, form, top, params, x, position, sampler, tag):
    """The token after a prompt, from the hidden state x [1,E] of its last position; position int32 scalar: the token's.

    -> ticket, and the n = top best candidates: ids [1,n], scores [1,n].
    """
    token, scores = sampling.sample(model.logits(params, x), sampler, position[None])
    return form.ticket(tag, token), sampling.best(scores, top)


class Programs(NamedTuple):
    """The jitted functions of one engine, laid out on its mesh; chunk donates the cache it is given."""

    init: Callable
    prompts: Callable
    chunk: Callable
    first: Callable


def programs(model, mesh, form, *, cache_length, top):
    split = sharding.attention_mesh(mesh, model.config.num_kv_heads)
    shape = model.working_shape(1, cache_length)
    caches = sharding.tree(split, shape, model.axes_of(shape), sharding.PREFILL)
    whole = sharding.replicated(mesh)
    on_shards, chunks = sharding.on_shards(split, sharding.PREFILL), chunk.shardings(mesh, form.shape(1))
    return Programs(
        init=jax.jit(functools.partial(model.init_working, 1, cache_length), out_shardings=caches),
        prompts=jax.jit(functools.partial(prefill_prompts, model, on_shards, form, top), out_shardings=(chunks, whole)),
        chunk=jax.jit(functools.partial(prefill_chunk, model, on_shards, form), donate_argnums=1, static_argnames="read",
                      out_shardings=(caches, chunks, whole)),
        first=jax.jit(functools.partial(first_token, model, form, top), out_shardings=whole))


class PrefillEngine:
    """Holds the sharded parameters and the working cache of one engine; every process of the engine makes the same calls."""

    def __init__(self, model, params, mesh, form, *, cache_length, buckets, top):
        self.buckets = buckets
        self._params = params
        self._programs = programs(model, mesh, form, cache_length=cache_length, top=top)
        self._cache = self._programs.init()

    def run_prompts(self, prompts, samplers, bucket, count, transfer, request):
        """Dispatch whole prompts together: at most `count` lists of tokens, none longer than bucket; samplers: of the first tokens.

        For each pair of bucket and count a program is compiled. -> chunk, and the first tokens' best candidates, ids and scores
        [count,top], on the devices.
        """
        tokens, lengths = np.zeros((count, bucket), np.int32), np.ones(count, np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, :len(prompt)], lengths[i] = prompt, len(prompt)
        rows = [*samplers, *[samplers[0]] * (count - len(samplers))]
        sampler = jax.tree.map(lambda *x: np.concatenate(x), *rows)
        return self._programs.prompts(self._params, tokens, lengths, sampler, np.array([transfer, request], np.int32))

    def run(self, tokens, start, read, last, sampler, transfer, request):
        """Dispatch one chunk: tokens, a list of at most the largest bucket's length, from position `start`.

        read: how much of the cache is read, at least `start`; for each value a program is compiled. sampler: of the first
        token, which is chosen where `last`, else ignored. -> chunk, and the first token's best candidates (ids and scores
        [1,top]; None unless last), on the devices.
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
