"""KV chunks from a prefill mesh to a decode mesh, device to device. The only file in which `jax.device_put` reaches another
process.

JAX pairs a send with its receive by a count that every process keeps: one for each (source process, destination
process) pair of a call, whatever the arrays. A process that skipped a call in which it takes no part would from then on
receive other requests' data. Hence the rule: **every process issues every call, in the order of the log, from one
thread.** A receiver calls with a handle, an array without shards here; a bystander with one tiny handle over the same
devices.

Equal meshes whose processes match need one call. Else `regroup` gives the calls: JAX wants equal device counts and
shardings on both sides, and the shards that one source process sends in a call to go to one destination process.
"""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from disagg import prefill, sharding


@dataclasses.dataclass(frozen=True)
class Call:
    """One device_put: position source[i] of the prefill mesh sends to position destination[i] of the decode mesh.

    part: which part of the chunk's rows goes: with fewer source devices the rows are cut in parts, each resharded over the
    whole prefill mesh and sent on its own; with more, the part-th of the pieces that one destination device gets.
    """

    part: int
    source: tuple[int, ...]
    destination: tuple[int, ...]


def regroup(source, destination):
    """The calls that move an array sharded over `source` devices onto `destination` devices.

    source, destination: the process id of each mesh position; the longer must be a multiple of the shorter.
    -> (parts, calls in the order in which all processes issue them). Raises ValueError for counts that do not divide.
    """
    a, b = len(source), len(destination)
    if max(a, b) % min(a, b):
        raise ValueError(f"cannot transfer from {a} to {b} devices: the larger must be a multiple of the smaller")
    parts = max(a, b) // min(a, b)
    calls = []
    for part in range(parts):
        if a <= b:
            pairs = [(i, part * a + i) for i in range(a)]
        else:
            pairs = [(i * parts + part, i) for i in range(b)]
        rounds, seen = {}, {}
        for s, d in pairs:  # the n-th destination process of a source process goes into the n-th call
            to = seen.setdefault(source[s], [])
            if destination[d] not in to:
                to.append(destination[d])
            rounds.setdefault(to.index(destination[d]), []).append((s, d))
        calls += [Call(part, *zip(*pairs)) for _, pairs in sorted(rounds.items())]
    return parts, calls


def _subset(mesh, positions):
    return mesh if len(positions) == mesh.size else Mesh(mesh.devices.flat[list(positions)], mesh.axis_names)


def _handle(shape, dtype, shard):
    """An array of which this process holds no shard."""
    return jax.make_array_from_single_device_arrays(shape, shard, [], dtype=dtype)


class Route:
    """The way from one prefill mesh to one decode mesh, as one process sees it."""

    def __init__(self, model, source, destination, process):
        """source, destination: topology.Engine; process: the own process id."""
        self._model, self._source, self._destination, self._process = model, source.mesh, destination.mesh, process
        owner = lambda mesh: [d.process_index for d in mesh.devices.flat]
        self.parts, self.calls = regroup(owner(source.mesh), owner(destination.mesh))
        self._meshes = {c: (_subset(source.mesh, c.source), _subset(destination.mesh, c.destination)) for c in self.calls}
        self._cut = self._source.size < self._destination.size
        self._send_shardings = prefill.chunk_shardings(source.mesh)
        self._receive_shardings = prefill.chunk_shardings(destination.mesh)
        self._handles = {}
        self._split = jax.jit(self._split_rows, static_argnums=1, out_shardings=self._send_shardings)
        self._join = jax.jit(self._join_rows, out_shardings=self._receive_shardings)

    @property
    def one_call(self):
        return self.parts == 1 and len(self.calls) == 1

    def issue(self, bucket, chunk):
        """Issue every call of one chunk's transfer.

        chunk: the chunk on the prefill mesh (None on a process outside it); it must neither be donated nor deleted
        afterwards, only dropped. -> on a process of the decode mesh a list of `parts` chunks being received, each on the
        decode mesh, for `join`; else None.
        """
        if self.one_call:
            received = jax.device_put(self._operand(self.calls[0], bucket, chunk), self._target(self.calls[0]))
            return [received] if self._receives(self.calls[0]) else None
        pieces = []
        cut = chunk is not None and self._cut
        sources = [self._split(chunk, part) if cut else chunk for part in range(self.parts)]
        for call in self.calls:
            out = jax.device_put(self._operand(call, bucket, sources[call.part]), self._target(call))
            if self._receives(call):
                pieces.append((call.part, out))
        return self._assemble(bucket, pieces) if pieces else None

    def join(self, parts):
        """A received chunk from the list that `issue` gave, on the decode mesh: [L,K*C,D] with the rows in order."""
        return parts[0] if len(parts) == 1 else self._join(parts)

    # The operand of a call on this process: data, a handle, or a bystander's tiny handle.

    def _operand(self, call, bucket, chunk):
        mesh = self._meshes[call][0]
        if chunk is not None and self._owns(mesh):
            return chunk if mesh is self._source else self._shards(chunk, mesh, call, bucket)
        key = (call, bucket if self._receives(call) else None)
        if key not in self._handles:
            if self._receives(call):
                shapes = self._call_shape(call, bucket)
                self._handles[key] = jax.tree.map(lambda s, sh: _handle(s.shape, s.dtype, sh), shapes,
                                                  prefill.chunk_shardings(mesh))
            else:
                self._handles[key] = _handle((mesh.size,), jnp.int32, sharding.named(mesh, ("wire",)))
        return self._handles[key]

    def _target(self, call):
        mesh = self._meshes[call][1]
        if self._receives(call) or self._owns(self._meshes[call][0]):
            return prefill.chunk_shardings(mesh)
        return sharding.named(mesh, ("wire",))

    def _receives(self, call):
        return self._owns(self._meshes[call][1])

    def _owns(self, mesh):
        return any(d.process_index == self._process for d in mesh.devices.flat)

    def _call_shape(self, call, bucket):
        """Shapes of what one call moves: the rows of as many devices as it has."""
        whole = prefill.chunk_shape(self._model, bucket)
        pieces = max(self._source.size, self._destination.size)
        rows = lambda s: jax.ShapeDtypeStruct((s.shape[0], s.shape[1] // pieces * len(call.source), *s.shape[2:]), s.dtype)
        return {name: s if name == "ticket" else rows(s) for name, s in whole.items()}

    def _shards(self, chunk, mesh, call, bucket):
        """The chunk's shards on the devices of `mesh` as arrays over it."""
        devices = set(mesh.devices.flat)
        return jax.tree.map(
            lambda x, s, sh: jax.make_array_from_single_device_arrays(
                s.shape, sh, [p.data for p in x.addressable_shards if p.device in devices], dtype=s.dtype),
            chunk, self._call_shape(call, bucket), prefill.chunk_shardings(mesh))

    def _assemble(self, bucket, pieces):
        """Received pieces, (part, tree over some of the devices), as whole trees over the decode mesh, without a copy."""
        whole = prefill.chunk_shape(self._model, bucket)
        groups = 1 if self._cut else self.parts

        def gather(name, group):
            shape = whole[name]
            data = {p.device: p.data for part, tree in pieces if self._cut or part == group
                    for p in tree[name].addressable_shards}
            dims = shape.shape if name == "ticket" else (shape.shape[0], shape.shape[1] // groups, *shape.shape[2:])
            return jax.make_array_from_single_device_arrays(dims, self._receive_shardings[name], list(data.values()),
                                                            dtype=shape.dtype)
        return [{name: gather(name, g) for name in whole} for g in range(groups)]

    def _split_rows(self, chunk, part):
        cut = lambda x: x[:, part * x.shape[1] // self.parts:(part + 1) * x.shape[1] // self.parts]
        return {name: x if name == "ticket" else cut(x) for name, x in chunk.items()}

    def _join_rows(self, parts):
        """Device t's rows are its parts' one after the other: [L, devices, rows each, D] stacked before the rows."""
        def join(*xs):
            L, rows, D = xs[0].shape
            b = self._destination.size
            return jnp.stack([x.reshape(L, b, rows // b, D) for x in xs], 2).reshape(L, rows * len(xs), D)
        return {name: parts[0][name] if name == "ticket" else join(*[p[name] for p in parts]) for name in parts[0]}


class Transfers:
    """All routes of the job, and the chain of what this process issued, for the comparison in debug mode."""

    def __init__(self, model, topology):
        self.routes = {(p, d): Route(model, topology.prefill[p], topology.decode[d], topology.process)
                       for p, d in topology.pairs}
        self.chain = hashlib.blake2b(digest_size=8)

    def issue(self, transfer, p, d, bucket, chunk):
        """Transfer number `transfer`: see Route.issue."""
        received = self.routes[p, d].issue(bucket, chunk)
        self.chain.update(repr((transfer, p, d, bucket)).encode())
        return received
