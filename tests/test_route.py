"""What a route delivers between meshes of every layout, against the same in NumPy.

One process owns all devices here, so every call's data is at hand; which calls there are, and which devices take part in
each, follows from the processes that the engines name.
"""

import collections
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from jax.sharding import Mesh

from disagg import chunk as chunks
from disagg.topology import Engine, Topology
from disagg.transfer import Transfers
from tests import hlo

LAYERS, HEADS, DIM, BUCKET = 5, 3, 8, 16  # 48 rows: any number of devices divides them


class Model:
    """As much of a model as a chunk is made from: its cache's arrays."""

    def __init__(self, dtypes):
        self.dtypes = dtypes

    def cache_shape(self, batch, length):
        shape = lambda name: (LAYERS, batch, HEADS, length) + (() if "scale" in name else (DIM,))
        return collections.namedtuple("KV", self.dtypes)(*[jax.ShapeDtypeStruct(shape(n), d) for n, d in self.dtypes.items()])


DTYPES = [{"k": np.float32, "v": np.float32}, {"k": jax.numpy.bfloat16, "v": jax.numpy.bfloat16}, {"k": np.float16, "v": np.float16},
          {"k": np.int8, "v": np.int8, "k_scale": np.float32, "v_scale": np.float32}]
LAYOUTS = st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 3), (3, 1)])  # processes, devices of each


def engine(role, layout, first):
    processes, devices = layout
    mesh = Mesh(np.array(jax.devices()[first:first + processes * devices]), ("tp",))
    return Engine(role, 0, mesh, tuple(range(first, first + processes)), ("slice",))


def transfers(source, destination, dtypes, piece_bytes):
    a, b = engine("prefill", source, 0), engine("decode", destination, 4)
    form = chunks.Format(Model(dtypes), max(a.mesh.size, b.mesh.size), piece_bytes, True)
    return Transfers(form, Topology("disaggregated", 0, 8, (a,), (b,))), a, b


def random_chunk(form, mesh, seed):
    """On the prefill mesh; and the same on the host."""
    rng = np.random.default_rng(seed)
    host = jax.tree.map(lambda s: rng.integers(-120, 120, s.shape).astype(s.dtype), chunks.unsealed(form.shape(BUCKET)))
    return jax.jit(form.sealed, out_shardings=chunks.shardings(mesh, form.shape(BUCKET)))(host), host


@settings(max_examples=25)
@given(LAYOUTS, LAYOUTS, st.sampled_from(DTYPES), st.integers(1, 3000), st.integers(0, 2**32 - 1))
def test_every_layout_delivers_what_numpy_would(source, destination, dtypes, piece_bytes, seed):
    """Every row of every array reaches the device that holds it, in order, and the checksums agree."""
    a, b = (n * m for n, m in (source, destination))
    assume(max(a, b) % min(a, b) == 0)
    ways, prefill, decode = transfers(source, destination, dtypes, piece_bytes)
    route = ways.routes[0, 0]
    sent, host = random_chunk(ways.form, prefill.mesh, seed)
    parts = ways.issue(0, 0, 0, BUCKET, sent)
    assert ways.wrong_sums(parts) == []
    got = route.join(parts)
    for name, want in chunks.kv(host).items():
        for x, whole in zip(got[name], want, strict=True):
            assert x.shape == whole.shape and x.dtype == whole.dtype
            per = whole.shape[1] // b
            for i, device in enumerate(decode.mesh.devices.flat):
                shard, = [s for s in x.addressable_shards if s.device == device]
                np.testing.assert_array_equal(np.asarray(shard.data), whole[:, i * per:(i + 1) * per])
    assert np.asarray(got["ticket"]).tolist() == host["ticket"].tolist()


@pytest.mark.parametrize("source, destination", [((1, 1), (1, 1)), ((1, 1), (1, 4)), ((2, 2), (2, 1)), ((1, 4), (1, 1)), ((2, 1), (2, 2))])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: np.dtype(d["k"]).name)
def test_every_row_moves_once(source, destination, dtypes):
    """What is handed to device_put, all calls together, is the chunk's rows, and beside them some bytes a device."""
    ways, prefill, _ = transfers(source, destination, dtypes, 1000)
    sent, host = random_chunk(ways.form, prefill.mesh, 1)
    put, moved = jax.device_put, []

    def counting(operand, target):
        moved.extend(shard.data.nbytes for x in jax.tree.leaves(operand) for shard in x.addressable_shards)
        return put(operand, target)
    with mock.patch.object(jax, "device_put", counting):
        ways.issue(0, 0, 0, BUCKET, sent)
    rows = sum(x.nbytes for x in jax.tree.leaves(chunks.kv(host)))
    assert rows == BUCKET * ways.form.row_bytes
    assert rows <= ways.form.bytes(BUCKET) <= sum(moved) <= rows + 16 * max(a * b for a, b in (source, destination))


@pytest.mark.parametrize("source, destination", [((1, 1), (1, 1)), ((1, 2), (1, 4)), ((2, 2), (2, 1))])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: np.dtype(d["k"]).name)
@pytest.mark.parametrize("damage", ["a bit", "two rows", "two layers", "zeros"])
def test_damage_is_seen(source, destination, dtypes, damage):
    """One bit of one number, two rows or layers exchanged, a shard of zeros: the checksum is another one."""
    ways, prefill, _ = transfers(source, destination, dtypes, 1)
    sent, _ = random_chunk(ways.form, prefill.mesh, 1)
    rng = np.random.default_rng(2)
    for name in chunks.kv(sent):
        parts = ways.issue(0, 0, 0, BUCKET, sent)
        part = parts[rng.integers(len(parts))]
        pieces = list(part[name])
        i = rng.integers(len(pieces))
        x = pieces[i]
        if damage == "two layers":
            pieces[0], pieces[1] = pieces[1], pieces[0]
        else:
            shards = [np.array(s.data) for s in x.addressable_shards]
            hit = shards[rng.integers(len(shards))]
            if damage == "a bit":
                hit.view(np.uint8).ravel()[rng.integers(hit.nbytes)] ^= 1 << rng.integers(8)
            elif damage == "two rows":
                hit[:, [0, 1]] = hit[:, [1, 0]]
            else:
                hit[:] = 0
            pieces[i] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, [
                jax.device_put(h, s.device) for h, s in zip(shards, x.addressable_shards)])
        part[name] = tuple(pieces)
        assert len(ways.wrong_sums(parts)) >= 1, name


def test_sums_need_no_collective():
    """A process computes the sums of its own devices without waiting for another one."""
    ways, prefill, _ = transfers((1, 4), (1, 4), DTYPES[0], 1000)
    sent, _ = random_chunk(ways.form, prefill.mesh, 1)
    seal = jax.jit(ways.form.sealed, out_shardings=chunks.shardings(prefill.mesh, sent))
    program = hlo.Program(seal.lower(chunks.unsealed(sent)).compile().as_text())
    assert program.collectives(program.entry) == {}
