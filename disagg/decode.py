"""The decode engine: a fixed number of slots, decoded together, filled and emptied while it runs.

All state lives on the devices and is donated to every step. A slot is reserved while its prompt's chunks are written
(`left` = 0: no step reads or writes it), activated with the first token, and ends by itself on the device at a stop id
or at its limit, so that steps can be dispatched ahead of the host's knowledge.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from disagg import chunk, sampling, sharding

MAX_STOP_IDS = 8  # stop ids a request may have on the device


class State(NamedTuple):
    """cache: the model's KV [L,B,K,T,D]. Of each slot [B] int32: token, the last one (not in the cache yet); position,
    the number of positions in the cache; left, tokens still to make (0: inactive); stops [B,MAX_STOP_IDS], -1 where
    unused; sampler, sampling.Sampling."""

    cache: NamedTuple
    token: jax.Array
    position: jax.Array
    left: jax.Array
    stops: jax.Array
    sampler: sampling.Sampling


def init_state(model, slots, length):
    zeros = jnp.zeros(slots, jnp.int32)
    return State(model.init_cache(slots, length), zeros, zeros, zeros,
                 jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32), sampling.empty(slots))


def write_chunk(state, kv, slot, start, index, length):
    """Put a chunk, or the index-th of its prompts, at position `start` of a reserved slot; it must not pass the cache's end.
    length: see chunk.write."""
    return state._replace(cache=chunk.write(state.cache, kv, slot, start, index, length))


def activate(state, ticket, index, slot, position, left, stops, sampler):
    """Start decoding a slot whose `position` prompt positions are written, from the index-th first token of the last chunk's ticket.

    left: tokens still to make after that one. A first token that is a stop id leaves the slot inactive.
    """
    token = ticket[2 + index]
    left = jnp.where(jnp.any(stops == token), 0, left)
    return state._replace(
        token=state.token.at[slot].set(token), position=state.position.at[slot].set(position),
        left=state.left.at[slot].set(left), stops=state.stops.at[slot].set(stops),
        sampler=jax.tree.map(lambda all_, one: all_.at[slot].set(one[0]), state.sampler, sampler))


def free(state, slot):
    return state._replace(left=state.left.at[slot].set(0))


def append(cache, new, at):
    """Write one position of all layers, of each slot at another place: `at` int32 [B], none where it is past the end."""
    L, B, K, T = cache.k.shape[:4]
    index = (jnp.arange(L)[:, None, None], jnp.arange(B)[None, :, None], jnp.arange(K), at[None, :, None])

    def write(c, n):
        if c.ndim == 5:  # a scatter without a copy
            return c.at[index].set(n[:, :, :, 0], mode="drop", unique_indices=True)
        # Of the scales, a scatter would write single numbers, for which XLA for TPU rearranges all of them and back.
        return jnp.where(at[:, None, None] == jnp.arange(T), n, c)
    return jax.tree.map(write, cache, new)


def decode_step(model, on_shards, top, params, state, read):
    """One token for every active slot; none of them has more than `read` positions in the cache.

    -> state and, for each slot, the token made (int32 [B], -1 where inactive) and its `top` best candidates: ids and
    scores [B,top].
    """
    active = state.left > 0
    x, new = model.forward(params, state.token[:, None], jnp.where(active, state.position, 0), state.cache,
                           read=read, on_shards=on_shards)
    # Inactive slots write past the end, where nothing is: a slot that is being filled must not be touched.
    cache = append(state.cache, model.to_cache(new), jnp.where(active, state.position, state.cache.k.shape[3]))
    token, scores = sampling.sample(model.logits(params, x[:, 0]), state.sampler, state.position + 1)
    stopped = jnp.any(state.stops == token[:, None], -1)
    state = state._replace(cache=cache, token=jnp.where(active, token, state.token), position=state.position + active,
                           left=jnp.where(stopped, 0, state.left - active))
    return state, (jnp.where(active, token, -1), *sampling.best(scores, top))


def decode_steps(model, on_shards, top, params, state, read, steps):
    """`steps` decode steps in one program; outputs have a leading axis [steps].

    Unrolled where the layers are a loop: around that a second loop makes XLA for TPU forget the layout in which a weight
    is stored, and copy it into another one first (Llama-2 7B on 8 devices: all of w_down).
    """
    return jax.lax.scan(lambda s, _: decode_step(model, on_shards, top, params, s, read), state, length=steps,
                        unroll=model.config.scan_layers)


class Programs(NamedTuple):
    """The jitted functions of one engine, laid out on its mesh; all but init and mark donate the state they are given."""

    init: Callable
    write: Callable
    activate: Callable
    free: Callable
    mark: Callable
    steps: Callable


def programs(model, mesh, *, slots, cache_length, top):
    split = sharding.attention_mesh(mesh, model.config.num_kv_heads)
    shape = model.cache_shape(slots, cache_length)
    cache = sharding.tree(split, shape, model.axes_of(shape), sharding.DECODE)
    whole = sharding.replicated(mesh)
    shardings = State(cache, whole, whole, whole, whole, sampling.Sampling(*[whole] * 4))
    jit = functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    return Programs(
        init=jax.jit(functools.partial(init_state, model, slots, cache_length), out_shardings=shardings),
        write=jit(write_chunk, static_argnames="length"), activate=jit(activate), free=jit(free),
        mark=jax.jit(lambda state: state.left + 0, out_shardings=whole),
        steps=jax.jit(functools.partial(decode_steps, model, sharding.on_shards(split, sharding.DECODE), top),
                      donate_argnums=1, static_argnames=("read", "steps"), out_shardings=(shardings, whole)))


class DecodeEngine:
    """Holds the sharded parameters and the donated state; every process of the engine makes the same calls in the same order."""

    def __init__(self, model, params, mesh, *, slots, cache_length, top):
        self._params = params
        self._programs = programs(model, mesh, slots=slots, cache_length=cache_length, top=top)
        self._state = self._programs.init()

    def write(self, received, slot, start, index=0, length=None):
        """index, length: of a chunk of several prompts the index-th, each with so many positions."""
        self._state = self._programs.write(self._state, chunk.kv(received), np.int32(slot), np.int32(start), np.int32(index), length=length)

    def activate(self, ticket, slot, position, left, stops, sampler, index=0):
        """Start slot with the index-th token of its last chunk's `ticket`. stops: at most MAX_STOP_IDS token ids."""
        padded = np.full(MAX_STOP_IDS, -1, np.int32)
        padded[:len(stops)] = stops
        self._state = self._programs.activate(self._state, ticket, np.int32(index), np.int32(slot), np.int32(position),
                                              np.int32(left), padded, sampler)

    def free(self, slot):
        self._state = self._programs.free(self._state, np.int32(slot))

    def done(self):
        """An array that is there once all is computed that was dispatched so far."""
        return self._programs.mark(self._state)

    def run(self, read, steps):
        """Dispatch so many steps -> tokens [steps,B], ids and scores [steps,B,top], on the devices.

        read: how much of the cache is read, at least what any active slot has before the last step. For each pair of values a
        program is compiled.
        """
        self._state, out = self._programs.steps(self._params, self._state, read=read, steps=steps)
        return out
