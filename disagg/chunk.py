"""What a chunk of KV is on its way from a prefill engine to a decode engine.

A dict: for each array of the cache (k, v, and their scales where the cache is quantised) a tuple of pieces, groups of layers
[l,K*C] or [l,K*C,D], head after head; the rows, axis 1, are cut over all devices of an engine, whether they divide the heads
or not. Several arrays of one call travel over several streams, and the engines make and take them without a copy.

A chunk is a part of one long prompt, or several whole prompts of one length with their padding: position after position, prompt
after prompt.

"ticket", int32 [2 + n]: the number of the transfer and of its first request, which the receiver checks; then for each prompt that
ends in the chunk the token sampled after it (-1: none). n: the most prompts that a chunk of this job has.

"sums", uint32 [1,units], where checksums are on: of each unit of rows, the least that goes from one device to one other.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from disagg import sharding

ROWS = ("layers", "wire")


@dataclasses.dataclass(frozen=True)
class Format:
    """The same on all processes of a job. units: devices of the largest engine. piece_bytes: what goes in one array from
    one device to another should have at least this size."""

    model: object
    units: int
    piece_bytes: int
    checksum: bool
    prompts: int = 1  # in one chunk, at most

    def shape(self, bucket):
        """Tree of jax.ShapeDtypeStruct of a chunk of this bucket."""
        cache = self.model.cache_shape(1, bucket)

        def pieces(s):
            _, _, K, C, *rest = s.shape
            return tuple(jax.ShapeDtypeStruct((b - a, K * C, *rest), s.dtype) for a, b in self._groups(s))
        shapes = {name: pieces(s) for name, s in _arrays(cache)} | {"ticket": jax.ShapeDtypeStruct((2 + self.prompts,), jnp.int32)}
        return shapes | ({"sums": jax.ShapeDtypeStruct((1, self.units), jnp.uint32)} if self.checksum else {})

    def bytes(self, bucket):
        """Of all that moves."""
        return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(self.shape(bucket)))

    @property
    def row_bytes(self):
        """Of one position of the cache, in all layers."""
        return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(self.model.cache_shape(1, 1)))

    def _groups(self, s):
        """(first, last + 1) of each group of layers; s: the shape of one array of the cache."""
        each = s.size * s.dtype.itemsize // self.units
        count = min(s.shape[0], max(1, each // self.piece_bytes))
        ends = [round(i * s.shape[0] / count) for i in range(count + 1)]
        return list(zip(ends, ends[1:]))

    def pack(self, new, tag, tokens):
        """The cache's arrays of a chunk's positions [L,N,K,C,...] of N prompts -> a chunk. tag int32 [2]: transfer, request.
        tokens int32 [<= N]: the first ones."""
        def pieces(x):
            L, N, K, C, *rest = x.shape
            flat = x.swapaxes(1, 2).reshape(L, K * N * C, *rest)
            return tuple(flat[a:b] for a, b in self._groups(x))
        kv = {name: pieces(x) for name, x in _arrays(new)}
        return self.sealed(kv | {"ticket": self.ticket(tag, tokens)})

    def ticket(self, tag, tokens):
        return jnp.concatenate([tag, tokens, jnp.full(self.prompts - tokens.size, -1, jnp.int32)])

    def sealed(self, chunk):
        """A chunk with the sums of its arrays, where they are on. To be jitted: with the program that makes the arrays, which
        are then still in the CPU's caches."""
        return chunk | ({"sums": sums(kv(chunk), self.units)} if self.checksum else {})


def _arrays(cache):
    """(name, array) of each array of a cache."""
    return [(name, x) for name, x in cache._asdict().items() if x is not None]


def write(cache, kv, slot, start, index, length):
    """Put a chunk's arrays (without ticket and sums) into the slot of a cache [L,B,K,T,...], from position `start`. length: of one
    of the prompts of which the index-th is written; None: all of the chunk.

    dynamic_update_slice into the donated cache; an indexed `.at[:, slot].set` would gather a sharded cache.
    """
    def put(whole, pieces):
        layer = 0
        for x in pieces:
            new = x.reshape(x.shape[0], 1, whole.shape[2], -1, *x.shape[2:])
            if length is not None:
                new = jax.lax.dynamic_slice_in_dim(new, index * length, length, 3)
            whole = jax.lax.dynamic_update_slice(whole, new, (layer, slot, 0, start, *[0] * (new.ndim - 4)))
            layer += x.shape[0]
        return whole
    return cache._replace(**{name: put(getattr(cache, name), pieces) for name, pieces in kv.items()})


def kv(chunk):
    """A chunk's arrays of the cache alone."""
    return {name: x for name, x in chunk.items() if name not in ("ticket", "sums")}


def unsealed(chunk):
    """A chunk without its sums."""
    return {name: x for name, x in chunk.items() if name != "sums"}


def shardings(mesh, chunk):
    """NamedShardings for a chunk on an engine's flat mesh, for each of its names one."""
    return {name: sharding.replicated(mesh) if name == "ticket" else sharding.named(mesh, ROWS) for name in chunk}


def map_rows(function, *chunks):
    """A chunk of function(arrays of the same place in each chunk), the first chunk's ticket as it is."""
    return {name: x if name == "ticket" else jax.tree.map(function, x, *(c[name] for c in chunks[1:]))
            for name, x in chunks[0].items()}


# The checksum: words of 32 bits, each times an odd number of its place, added modulo 2**32, so that no change of one word and
# hardly any exchange of two goes unnoticed. The sum over layers comes first: it is what XLA for CPU does at the memory's speed.

def sums(kv, units):
    """uint32 [1,units] of a chunk's arrays, of each unit of their rows."""
    total, layer = jnp.zeros(units, jnp.uint32), 0
    for name in sorted(kv):
        words = [_words(x) for x in kv[name]]  # each [l,rows,words]
        over_layers = jnp.zeros(words[0].shape[1:], jnp.uint32)
        for x in words:
            weights = _odd(layer + jnp.arange(x.shape[0], dtype=jnp.uint32))
            over_layers += jnp.sum(x * weights[:, None, None], 0, dtype=jnp.uint32)
            layer += x.shape[0]
        place = over_layers.reshape(units, -1, over_layers.shape[1])
        index = jax.lax.broadcasted_iota(jnp.uint32, place.shape, 1) * np.uint32(place.shape[2]) + jax.lax.broadcasted_iota(
            jnp.uint32, place.shape, 2)
        total += jnp.sum(place * _odd(index), (1, 2), dtype=jnp.uint32)
    return total[None]


def _words(x):
    """[l,rows] or [l,rows,D] of any dtype -> uint32 [l,rows,words]; a row's bytes that do not fill a word count as words."""
    x = x.reshape(*x.shape[:2], -1)
    each = 4 // x.dtype.itemsize
    if each > 1 and x.shape[2] % each == 0:
        x = x.reshape(*x.shape[:2], -1, each)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize if x.ndim == 3 else 4]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _odd(index):
    """An odd number for each index, uint32, as if by chance."""
    mixed = index * np.uint32(2654435761)
    return (mixed ^ (mixed >> 15)) * np.uint32(2246822519) | np.uint32(1)
