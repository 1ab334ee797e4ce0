"""The calls of a transfer between meshes of unequal layout."""

import collections

import pytest
from hypothesis import given, strategies as st

from disagg.transfer import regroup

LAYOUTS = st.tuples(st.integers(1, 4), st.integers(1, 4))  # processes, devices of each


def mesh(layout, first):
    """The process of each mesh position; processes are numbered from `first`."""
    processes, devices = layout
    return [first + p for p in range(processes) for _ in range(devices)]


def divides(pair):
    a, b = (processes * devices for processes, devices in pair)
    return max(a, b) % min(a, b) == 0


@given(st.tuples(LAYOUTS, LAYOUTS).filter(divides))
def test_every_piece_goes_once_from_where_it_is_to_where_it_belongs(layouts):
    """With the heads cut into as many pieces as the larger mesh has devices, piece i leaves the source device that holds
    it after the reshard and reaches the destination device that has it in its shard; nothing else moves."""
    source, destination = mesh(layouts[0], 0), mesh(layouts[1], 10)
    a, b = len(source), len(destination)
    pieces = max(a, b)
    parts, calls = regroup(source, destination)
    assert parts * min(a, b) == pieces
    received = []
    for call in calls:
        for s, d in zip(call.source, call.destination, strict=True):
            # Cut: part by part, each spread over all source devices. Joined: device s holds the one piece s.
            piece = call.part * a + s if a <= b else s
            assert d == piece * b // pieces
            if a > b:
                assert call.part == piece % parts, "a destination device joins its pieces in the order of the parts"
            received.append(piece)
    assert sorted(received) == list(range(pieces))


@given(st.tuples(LAYOUTS, LAYOUTS).filter(divides))
def test_what_jax_asks_of_one_call(layouts):
    """In a call a source process sends to one destination process, and a device takes part once on each side."""
    source, destination = mesh(layouts[0], 0), mesh(layouts[1], 10)
    for call in regroup(source, destination)[1]:
        assert len(call.source) == len(call.destination) > 0
        assert len(set(call.source)) == len(call.source) and len(set(call.destination)) == len(call.destination)
        reached = collections.defaultdict(set)
        for s, d in zip(call.source, call.destination):
            reached[source[s]].add(destination[d])
        assert all(len(processes) == 1 for processes in reached.values())


@given(LAYOUTS)
def test_equal_meshes_need_one_call(layout):
    """The same layout on both sides is one call in the order of the mesh."""
    source = mesh(layout, 0)
    everything = tuple(range(len(source)))
    parts, (call,) = regroup(source, mesh(layout, 10))
    assert (parts, call.part, call.source, call.destination) == (1, 0, everything, everything)


@given(st.tuples(LAYOUTS, LAYOUTS).filter(divides))
def test_no_more_calls_than_needed(layouts):
    """A part takes as many calls as its busiest source process has destination processes."""
    source, destination = mesh(layouts[0], 0), mesh(layouts[1], 10)
    parts, calls = regroup(source, destination)
    for part in range(parts):
        mine = [c for c in calls if c.part == part]
        reached = collections.defaultdict(set)
        for call in mine:
            for s, d in zip(call.source, call.destination):
                reached[source[s]].add(destination[d])
        assert len(mine) == max(map(len, reached.values()))


@pytest.mark.parametrize("a, b", [(2, 3), (3, 2), (4, 6), (16, 12)])
def test_counts_that_do_not_divide(a, b):
    """Refused with both numbers."""
    with pytest.raises(ValueError, match=f"from {a} to {b} devices"):
        regroup([0] * a, [1] * b)
