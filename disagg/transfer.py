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
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from disagg import chunk as chunks
from disagg import sharding


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

    def __init__(self, form, source, destination, process):
        """form: chunk.Format; source, destination: topology.Engine; process: the own process id."""
        self._form, self._source, self._destination, self._process = form, source.mesh, destination.mesh, process
        self.parts, self.calls = regroup(source.owners, destination.owners)
        self._meshes = {c: (_subset(source.mesh, c.source), _subset(destination.mesh, c.destination)) for c in self.calls}
        self._cut = self._source.size < self._destination.size
        shardings = functools.partial(chunks.shardings, chunk=form.shape(1))
        self._on_source, self._on_destination = shardings(source.mesh), shardings(destination.mesh)
        self._on_call = {c: tuple(map(shardings, meshes)) for c, meshes in self._meshes.items()}
        self._handles = {}
        self._split = jax.jit(self._split_rows, static_argnums=1, out_shardings=self._on_source)
        self._join = jax.jit(self._join_rows, out_shardings=self._on_destination)

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
        received = []
        cut = chunk is not None and self._cut
        sources = [self._split(chunk, part) if cut else chunk for part in range(self.parts)]
        for call in self.calls:
            out = jax.device_put(self._operand(call, bucket, sources[call.part]), self._target(call))
            if self._receives(call):
                received.append((call.part, out))
        return self._assemble(bucket, received) if received else None

    def join(self, parts):
        """A received chunk from the list that `issue` gave, on the decode mesh, with the rows in order."""
        return parts[0] if len(parts) == 1 else self._join(parts)

    # The operand of a call on this process: data, a handle, or a bystander's tiny handle.

    def _operand(self, call, bucket, chunk):
        mesh = self._meshes[call][0]
        if chunk is not None and self._owns(mesh):
            return chunk if mesh is self._source else self._shards(chunk, call, bucket)
        key = (call, bucket if self._receives(call) else None)
        if key not in self._handles:
            if self._receives(call):
                self._handles[key] = {name: jax.tree.map(lambda s: _handle(s.shape, s.dtype, self._on_call[call][0][name]), shape)
                                      for name, shape in self._call_shape(call, bucket).items()}
            else:
                self._handles[key] = _handle((mesh.size,), jnp.int32, sharding.named(mesh, ("wire",)))
        return self._handles[key]

    def _target(self, call):
        if self._receives(call) or self._owns(self._meshes[call][0]):
            return self._on_call[call][1]
        return sharding.named(self._meshes[call][1], ("wire",))

    def _receives(self, call):
        return self._owns(self._meshes[call][1])

    def _owns(self, mesh):
        return any(d.process_index == self._process for d in mesh.devices.flat)

    def _rows_shape(self, bucket, devices):
        """Shapes of what so many devices send or get in a call."""
        rows = lambda s: jax.ShapeDtypeStruct((s.shape[0], s.shape[1] * devices // self._form.units, *s.shape[2:]), s.dtype)
        return chunks.map_rows(rows, self._form.shape(bucket))

    def _call_shape(self, call, bucket):
        return self._rows_shape(bucket, len(call.source))

    def _shards(self, chunk, call, bucket):
        """The chunk's shards on the devices of a call's source as arrays over them."""
        mesh, shapes = self._meshes[call][0], self._call_shape(call, bucket)
        devices = set(mesh.devices.flat)
        return {name: jax.tree.map(
            lambda x, s: jax.make_array_from_single_device_arrays(
                s.shape, self._on_call[call][0][name], [p.data for p in x.addressable_shards if p.device in devices], dtype=s.dtype),
            chunk[name], shapes[name]) for name in shapes}

    def _assemble(self, bucket, received):
        """What the calls brought, (part, tree over some of the devices), as whole trees over the decode mesh, without a copy."""
        groups = range(1 if self._cut else self.parts)
        shapes = self._form.shape(bucket) if self._cut else self._rows_shape(bucket, self._destination.size)

        def gather(name, group):
            got = [tree[name] for part, tree in received if self._cut or part == group]
            def one(s, *arrays):
                data = {p.device: p.data for a in arrays for p in a.addressable_shards}
                return jax.make_array_from_single_device_arrays(s.shape, self._on_destination[name], list(data.values()), dtype=s.dtype)
            return jax.tree.map(one, shapes[name], *got)
        return [{name: gather(name, g) for name in shapes} for g in groups]

    def _split_rows(self, chunk, part):
        return chunks.map_rows(lambda x: x[:, part * x.shape[1] // self.parts:(part + 1) * x.shape[1] // self.parts], chunk)

    def _join_rows(self, parts):
        """Device t's rows are its parts' one after the other: [l, devices, rows each, ...] stacked before the rows."""
        def join(*xs):
            l, rows, *rest = xs[0].shape
            b = self._destination.size
            return jnp.stack([x.reshape(l, b, rows // b, *rest) for x in xs], 2).reshape(l, rows * len(xs), *rest)
        return chunks.map_rows(join, *parts)


class Transfers:
    """All routes of the job, and the chain of what this process issued, for the comparison in debug mode."""

    def __init__(self, form, topology):
        self.form = form
        self.routes = {(p, d): Route(form, topology.prefill[p], topology.decode[d], topology.process)
                       for p, d in topology.pairs}
        self.chain = hashlib.blake2b(digest_size=8)
        self._sums_here = jax.jit(functools.partial(chunks.sums, units=1))

    def issue(self, transfer, p, d, bucket, chunk):
        """Transfer number `transfer`: see Route.issue."""
        received = self.routes[p, d].issue(bucket, chunk)
        self.chain.update(repr((transfer, p, d, bucket)).encode())
        return received

    def wrong_sums(self, parts):
        """Of a chunk that has arrived, [(device, sum as sent, sum of what is there)] where the two differ, on this
        process's devices.

        Each device runs a program of its own, so that no process has to wait for another: any thread may call this.
        """
        if not self.form.checksum:
            return []
        checks = []
        for part in parts:
            for i, shard in enumerate(part["sums"].addressable_shards):
                here = jax.tree.map(lambda x: x.addressable_data(i), chunks.kv(part))
                checks.append((shard.device, shard.data, self._sums_here(here)))
        read = [(str(device), np.asarray(sent).item(), np.asarray(found).item()) for device, sent, found in checks]
        return [check for check in read if check[1] != check[2]]
