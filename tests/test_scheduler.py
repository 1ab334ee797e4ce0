"""Which request goes where and when; `simulated_cell` checks each operation, the tests what comes of them."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from tests.simulated_cell import Cell, expected, request

MODES = pytest.mark.parametrize("interleaved", [False, True])


def names(ops):
    return [op[0] for op in ops]


def prefills(cell):
    """(engine, request) of everything computed: the prompts of a chunk, or the part of one."""
    return [(op[1], i) for op in cell.ops if op[0] in ("prefill", "chunk")
            for i in ([i for i, *_ in op[5]] if op[0] == "prefill" else [op[3]])]


def computed(cell):
    """How many chunks."""
    return sum(op[0] in ("prefill", "chunk") for op in cell.ops)


@MODES
def test_one_request(interleaved):
    """Chunks of the prompt in order, the answer, one end."""
    cell = Cell(interleaved=interleaved)
    cell.submit(request(0, length=9, max_tokens=6))
    cell.finish()
    assert [op[5] for op in cell.ops if op[0] == "chunk"] == [0, 4, 8]
    assert names(cell.ops).count("write") == 3 and cell.ended == {0: "length"}


@MODES
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12])
@pytest.mark.parametrize("max_tokens, stop_at", [(1, None), (2, None), (7, None), (7, 0), (7, 1), (7, 6), (1, 0)])
def test_lengths_and_ends(interleaved, length, max_tokens, stop_at):
    """Every prompt length around the chunk size; the first, a middle and the last token a stop id; no more calls than needed."""
    cell = Cell(interleaved=interleaved)
    cell.submit(request(0, length, max_tokens, stop_at))
    cell.finish()
    made = len(expected(cell.requests[0])[0])
    assert names(cell.ops).count("decode") <= -(-(max_tokens - 1) // cell.steps)
    if stop_at is None:
        assert names(cell.ops).count("decode") == -(-(made - 1) // cell.steps)


@MODES
def test_first_come_first_served(interleaved):
    """More requests than slots: they start in the order in which they came."""
    cell = Cell(interleaved=interleaved, prefill=(1, 1), decode=(1, 1), slots=2)
    cell.submit(*[request(i, length=1 + i % 7) for i in range(20)])
    cell.finish()
    assert sorted(cell.started) == list(range(20))


@MODES
@pytest.mark.parametrize("engines, requests", [(1, 5), (3, 1), (3, 2), (4, 9)])
def test_one_slot_an_engine(interleaved, engines, requests):
    """Also with fewer requests than engines."""
    cell = Cell(interleaved=interleaved, prefill=(1,) * engines, decode=(1,) * engines, slots=1)
    cell.submit(*[request(i) for i in range(requests)])
    cell.finish()
    assert set(cell.ended.values()) == {"length"}


def test_load_is_spread():
    """Of free engines the least loaded is taken, on both sides."""
    cell = Cell(prefill=(1, 1), decode=(1, 1), slots=4)
    cell.submit(*[request(i, length=4) for i in range(4)])
    cell.run("none")
    assert sorted(prefills(cell)) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    assert sorted(cell.sent_to.values()) == [0, 0, 1, 1]


def test_not_all_send_to_the_emptiest_engine():
    """While a whole chunk is on its way to the decode engine with most free slots, the next goes to another one."""
    cell = Cell(prefill=(1, 1), decode=(1, 1), slots=8, batch=1)
    first = [request(i, length=2, max_tokens=50) for i in range(8)]
    cell.submit(*first)
    cell.run("arrived")
    for r in first:
        if cell.sent_to[r.id] == 0:
            cell.cancel(r.id)
    cell.submit(request(8, length=4), request(9, length=4))
    cell.plan()
    assert [cell.sent_to[8], cell.sent_to[9]] == [0, 1]  # 8 and 4 slots are free


def test_a_fast_prefill_engine_gets_more_work():
    """What a slow engine has not delivered keeps it from getting more."""
    cell = Cell(prefill=(1, 1), slots=8)
    cell.submit(*[request(i, length=4, max_tokens=50) for i in range(8)])
    for _ in range(20):  # nothing that engine 0 has computed arrives
        cell.run("none")
        for key in cell.waiting_reports("arrived"):
            if cell.chunks[key[2]].p == 1:
                cell.deliver(key)
    by_engine = [p for p, _ in prefills(cell)]
    assert by_engine.count(0) <= 3 and by_engine.count(1) >= 5


def test_a_chunk_is_written_only_when_all_processes_have_it():
    """Two processes on the decode side, whatever the order; and in the order of the prompt."""
    cell = Cell(decode=(3,), prefill_ahead=3)
    cell.submit(request(0, length=9))
    cell.run("none")
    arrivals = cell.waiting_reports("arrived")
    assert len(arrivals) == 9
    for key in arrivals[1:]:  # all but the first chunk's first process, the later chunks complete
        cell.deliver(key)
        assert "write" not in names(cell.plan())
    cell.deliver(arrivals[0])
    ops = cell.plan()
    assert [op[6] for op in ops if op[0] == "write"] == [0, 4, 8]
    assert [op[7] is not None for op in ops if op[0] == "write"] == [False, False, True]


def test_transfers_in_flight_are_bounded():
    """A prefill engine computes no more than it may have on the way."""
    cell = Cell(prefill_ahead=2)
    cell.submit(request(0, length=20))
    cell.run("results")
    assert computed(cell) == 2


def moving(cell):
    """Transfers planned whose chunks are neither written nor given up."""
    return sum((op[0] == "transfer") - (op[0] == "discard") for op in cell.ops)


@pytest.mark.parametrize("limit", ["pair_bytes", "total_bytes"])
def test_bytes_on_their_way_are_bounded(limit):
    """Three chunks of 40 bytes where 100 are allowed: the third waits until one has arrived at all of its processes."""
    cell = Cell(prefill=(1,), decode=(2,), prefill_ahead=5, **{limit: 100})
    cell.submit(request(0, length=12))
    cell.run("results")
    assert names(cell.ops).count("transfer") == 2
    cell.deliver(("arrived", cell.decode[0][0], 0))
    cell.run("results")
    assert names(cell.ops).count("transfer") == 2
    cell.deliver(("arrived", cell.decode[0][1], 0))
    cell.run("results")
    assert names(cell.ops).count("transfer") == 3
    cell.finish()


def test_one_pair_at_its_limit_leaves_the_others_alone():
    cell = Cell(prefill=(1, 1), decode=(1,), slots=4, prefill_ahead=5, pair_bytes=40)
    cell.submit(request(0, length=12), request(1, length=12))
    cell.run("results")
    assert [op[2:4] for op in cell.ops if op[0] == "transfer"] == [[0, 0], [1, 0]]
    cell.finish()


def test_no_younger_request_takes_the_room_of_an_older_one():
    """80 of 100 bytes are in use: a chunk of 20 bytes would fit, but an older request waits for 40."""
    cell = Cell(prefill=(1, 1), decode=(1,), slots=4, prefill_ahead=5, total_bytes=100)
    cell.submit(request(0, length=12))
    cell.run("results")
    cell.submit(request(1, length=2))
    cell.run("results")
    assert prefills(cell) == [(0, 0), (0, 0)]
    cell.finish()
    assert cell.ended == {0: "length", 1: "length"}


def test_a_cancelled_request_is_charged_until_its_chunks_have_arrived():
    """Its slot is free at once; its bytes are not, and its chunks are forgotten only when they are there."""
    cell = Cell(slots=1, prefill_ahead=5, pair_bytes=80)
    cell.submit(request(0, length=12), request(1, length=3))
    cell.run("results")
    cell.cancel(0)
    cell.run("results")
    assert prefills(cell) == [(0, 0), (0, 0)] and "discard" not in names(cell.ops)
    cell.deliver(("arrived", cell.decode[0][0], 1))  # in any order
    assert cell.plan()[0] == ["discard", 1]
    assert prefills(cell) == [(0, 0), (0, 0), (0, 1)]
    cell.finish()
    assert sorted(op[1] for op in cell.ops if op[0] == "discard") == [0, 1, 2]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_never_arrives_is_charged_until_its_sender_or_receiver_is_lost(role):
    """A cancelled request's chunks do not arrive; then one end dies, and the others have all the room."""
    cell = Cell(prefill=(1, 1), decode=(1, 1), slots=1, prefill_ahead=5, total_bytes=80)
    cell.submit(request(0, length=12))
    cell.plan(), cell.plan()
    for key in [k for k in cell.reports if k[0] == "arrived"]:
        del cell.reports[key]
    cell.cancel(0)
    cell.submit(request(1, length=9))
    cell.run()
    assert moving(cell) == 2 and 1 not in cell.started
    cell.lose(role, 0)
    cell.finish()
    assert cell.ended[1] == "length" and moving(cell) == 0


def test_a_corrupt_chunk_ends_its_request_only():
    """One of two processes finds wrong values; the slot is given to the next request, the bytes are free on arrival."""
    cell = Cell(decode=(2,), slots=1)
    cell.submit(request(0, length=7), request(1, length=3))
    cell.run("results")
    cell.corrupt(("arrived", cell.decode[0][1], 1), "wrong sum")
    assert cell.ended == {0: "error: wrong sum"}
    cell.finish()
    assert cell.ended[1] == "length" and moving(cell) == 0


def test_interleaved_prefill_is_bounded_by_what_is_computed():
    """Nothing is transferred there; the reports of computed chunks count."""
    cell = Cell(interleaved=True, prefill_ahead=2)
    cell.submit(request(0, length=20))
    cell.run("none")
    assert computed(cell) == 2
    cell.deliver(cell.waiting_reports("results")[0])
    cell.run("none")
    assert computed(cell) == 3


def test_decode_calls_are_bounded():
    """No more calls planned than may be ahead of the reports."""
    cell = Cell(decode_ahead=3)
    cell.submit(request(0, max_tokens=100))
    cell.run("arrived")
    assert names(cell.ops).count("decode") == 3


def test_the_first_token_after_those_of_the_decode_engine():
    """Its report may come last: the others wait for it, and the answer is in order."""
    cell = Cell()
    cell.submit(request(0, length=3, max_tokens=4))
    cell.run("arrived")
    first, decoded = ("results", cell.prefill[0][0]), ("results", cell.decode[0][0])
    while decoded in cell.reports:
        cell.deliver(decoded)
        cell.run("arrived")
    assert cell.tokens[0] == [] and not cell.ended
    cell.deliver(first)
    assert cell.ended == {0: "length"}


def test_the_first_token_is_given_before_the_transfer_arrives():
    """Streaming does not wait for the decode engine; an answer of one token ends there and frees its slot."""
    cell = Cell(slots=1)
    cell.submit(request(0, length=3, max_tokens=1), request(1))
    cell.run("results")
    assert cell.ended == {0: "length"} and cell.started == [0, 1]
    cell.finish()


def test_a_freed_slot_is_used_again_at_once():
    """While the other slot's request goes on."""
    cell = Cell(slots=2)
    cell.submit(request(0, max_tokens=60), request(1, max_tokens=2), request(2, max_tokens=2), request(3, max_tokens=2))
    cell.finish()
    slots = {cell.chunks[op[2]].requests[op[3]]: op[5] for op in cell.ops if op[0] == "write"}
    assert slots[1] == slots[2] == slots[3] != slots[0]


@MODES
def test_short_prompts_come_in_between_the_chunks_of_a_long_one(interleaved):
    """In turns, while there are any; also past another long prompt, which no engine can begin yet."""
    cell = Cell(interleaved=interleaved, slots=8, prefill_ahead=1, batch=1)
    cell.submit(request(0, length=12), request(1, length=9), request(2, length=3), request(3, length=3), request(4, length=4))
    cell.finish()
    assert [i for _, i in prefills(cell)] == [0, 2, 0, 3, 0, 1, 4, 1, 1] or [i for _, i in prefills(cell)] == [0, 2, 0, 3, 0, 4, 1, 1, 1]


@MODES
def test_a_long_prompt_is_not_passed_where_it_could_begin(interleaved):
    """Short ones that came later do not take the slot that it would get."""
    cell = Cell(interleaved=interleaved, slots=1)
    cell.submit(request(0, length=2), request(1, length=9), request(2, length=2), request(3, length=2))
    cell.finish()
    assert cell.started == [0, 1, 2, 3]


@MODES
def test_short_prompts_are_computed_together(interleaved):
    """As many as the buckets and free slots allow, with the padding of the longest; each goes to its own slot."""
    cell = Cell(interleaved=interleaved, chunk=16, batch=4, slots=8)
    cell.buckets = cell.scheduler._buckets
    cell.submit(request(0, length=7), request(1, length=8), request(2, length=3), request(3, length=16), request(4, length=2))
    cell.finish()
    assert [(op[3], op[4], [i for i, *_ in op[5]]) for op in cell.ops if op[0] == "prefill"] == [
        (8, 2, [0, 1]), (8, 1, [2]), (16, 1, [3]), (8, 1, [4])]
    assert [op[3:5] for op in cell.ops if op[0] == "write" and op[2] == 0] == [[0, 8], [1, 8]]


def test_free_engines_share_short_prompts():
    """Each gets its part at once instead of one all of them."""
    cell = Cell(prefill=(1, 1), slots=8)
    cell.submit(*[request(i, length=2) for i in range(2)])
    cell.run("none")
    assert prefills(cell) == [(0, 0), (1, 1)]
    cell = Cell(prefill=(1, 1), slots=8)
    cell.submit(*[request(i, length=2) for i in range(4)])
    cell.run("none")
    assert prefills(cell) == [(0, 0), (0, 1), (1, 2), (1, 3)]


def locals_of(cell):
    """(decode engine, its requests) of what is computed where it is decoded."""
    return [(op[1], [i for i, *_ in op[5]]) for op in cell.ops if op[0] == "local"]


def test_short_prompts_where_they_are_decoded():
    """Up to the length nothing is sent; a longer one goes the usual way. Together no more than one of that length would take."""
    cell = Cell(decode=(1, 2), slots=8, local_length=2, batch=2)
    cell.submit(request(0, length=2), request(1, length=3), request(2, length=1), request(3, length=2))
    cell.run("none")
    assert locals_of(cell) == [(0, [0]), (1, [2]), (0, [3])]
    assert prefills(cell) == [(0, 1)] and names(cell.ops).count("transfer") == 1
    cell.finish()
    assert set(cell.ended.values()) == {"length"}


def test_short_prompts_of_a_decode_engine_that_has_enough_are_sent():
    cell = Cell(slots=8, local_length=4, prefill_ahead=1, batch=1)
    cell.submit(request(0, length=4), request(1, length=4), request(2, length=4))
    cell.run("none")
    assert locals_of(cell) == [(0, [0])] and prefills(cell) == [(0, 1)]


def test_short_prompts_where_they_are_decoded_pass_those_that_wait_for_a_prefill_engine():
    cell = Cell(slots=8, local_length=2, prefill_ahead=1)
    cell.submit(request(0, length=12), request(1, length=12), request(2, length=4), request(3, length=2))
    cell.run("none")
    assert prefills(cell) == [(0, 0)] and locals_of(cell) == [(0, [3])]
    cell.finish()


def test_a_decode_engine_that_prefills_is_lost():
    """Who is computed or decoded there ends with an error, the others go on."""
    cell = Cell(decode=(1, 1), slots=4, local_length=2)
    cell.submit(request(0, length=2), request(1, length=2))
    cell.plan()
    cell.lose("decode", 1)
    cell.submit(request(2, length=2), request(3, length=2))
    cell.finish()
    assert [cell.ended[i].split(":")[0] for i in range(4)] == ["length", "error", "length", "length"]
    assert {d for d, _ in locals_of(cell)[2:]} == {0}


@MODES
def test_steps_of_a_call(interleaved):
    """Several while nobody is about to join, one while somebody is and when fewer are left."""
    cell = Cell(interleaved=interleaved, slots=4, steps=3, decode_ahead=1, prefill_ahead=1)
    steps = lambda: [op[3] for op in cell.ops if op[0] == "decode"]
    cell.submit(request(0, length=2, max_tokens=9))
    cell.finish()
    assert steps() == [3, 3, 1, 1]
    cell.ops.clear()
    cell.submit(request(1, length=2, max_tokens=50))
    cell.run("arrived")
    cell.submit(request(2, length=9, max_tokens=50))
    while 2 not in [s.request for s in cell.slots[0] if s.left]:
        if not cell.plan():
            cell.deliver(cell.waiting_reports("results", "arrived")[0])
    joined = len(steps())
    assert steps()[0] == 3 and 1 in steps()
    cell.finish()
    assert steps()[joined] == 3


@pytest.mark.parametrize("how", ["cancel", "corrupt"])
def test_prompts_that_were_computed_together(how):
    """One is cancelled on the way: the other goes on. Wrong values end both."""
    cell = Cell(slots=2, decode=(2,))
    cell.submit(request(0, length=2), request(1, length=2), request(2, length=2))
    cell.run("results")
    assert prefills(cell) == [(0, 0), (0, 1)]
    if how == "cancel":
        cell.cancel(0)
        cell.finish()
        assert cell.ended == {0: "cancelled", 1: "length", 2: "length"}
    else:
        cell.corrupt(("arrived", cell.decode[0][0], 0), "wrong sum")
        cell.finish()
        assert cell.ended == {0: "error: wrong sum", 1: "error: wrong sum", 2: "length"}
    assert moving(cell) == 0


@MODES
def test_priorities(interleaved):
    """Those of a lower number begin first, in order among equals; what has begun goes on."""
    cell = Cell(interleaved=interleaved, slots=1, prefill_ahead=1)
    cell.submit(request(0), request(1), request(2, priority=5))
    cell.plan()
    cell.submit(request(3, priority=-1), request(4, priority=-1), request(5), request(6, priority=5))
    cell.finish()
    assert cell.started == [0, 3, 4, 1, 5, 2, 6]


def test_the_queue_is_bounded():
    """One too many is refused at once, with the numbers; those that wait are served, and there is room again afterwards."""
    cell = Cell(slots=1, max_queue=2)
    cell.submit(request(0))
    cell.plan()
    cell.submit(request(1), request(2), request(3))
    assert cell.ended == {3: "refused: the queue is full: 2 requests wait, config.max_queue is 2"}
    cell.cancel(1)
    cell.submit(request(4))
    cell.finish()
    assert [cell.ended[i] for i in (0, 2, 4)] == ["length"] * 3


def test_the_decode_engine_with_fewer_tokens_to_make():
    """Of two with as many free slots; what is made or cancelled is owed no more."""
    cell = Cell(decode=(1, 1), slots=4, prefill_ahead=8)
    cell.submit(request(0, max_tokens=90), request(1, max_tokens=3), request(2), request(3))
    cell.run("none")
    assert [cell.sent_to[i] for i in range(4)] == [0, 1, 1, 0]
    for i in range(4):
        cell.cancel(i)
    cell.finish()
    assert [e.owed for e in cell.scheduler._decode] == [0, 0]


def test_the_prefill_engine_with_fewer_tokens_to_compute():
    """A prompt of one chunk is on each of two engines, one of them four times as long."""
    cell = Cell(prefill=(1, 1), slots=8, chunk=8, prefill_ahead=4)
    cell.submit(request(0, length=8), request(1, length=2), request(2, length=2), request(3, length=2), request(4, length=2))
    cell.run("none")
    assert [p for p, _ in prefills(cell)] == [0, 1, 1, 1, 1]


STAGED = {"queued": "waiting in the queue", "prefilling": "being prefilled, 8 of its 9 prompt tokens so far",
          "in transfer": "being prefilled or moved", "decoding": "being decoded, 0 of up to 40 tokens so far"}


@pytest.mark.parametrize("where", STAGED)
def test_timeout(where):
    """In every stage the request ends with an error that says where it was; the others go on, and nothing is left of it."""
    cell = stage(where, slots=1, timeout=5.0)
    assert cell.scheduler.next_timeout == 5.0
    cell.expire(4.9)
    assert not cell.ended
    cell.expire(5.0)
    assert cell.ended == {0: f"error: the request was not done within its timeout of 5 s: it was {STAGED[where]}"}
    assert cell.scheduler.next_timeout is None
    cell.finish()
    assert [cell.ended[i] for i in (1, 2, 3)] == ["length"] * 3


def test_done_before_its_timeout():
    cell = Cell()
    cell.submit(request(0, timeout=5.0), now=10.0)
    cell.finish()
    cell.expire(100.0)
    assert cell.ended == {0: "length"}


# Cancelling.


def stage(name, timeout=None, **options):
    """A cell whose request 0 (three chunks, 40 tokens) is in a stage, with requests 1 to 3 behind it."""
    cell = Cell(prefill_ahead=2, **options)
    if name == "queued":
        cell.submit(request(0, length=9, max_tokens=40, timeout=timeout), *[request(i) for i in (1, 2, 3)])
        return cell
    cell.submit(request(0, length=9, max_tokens=40, timeout=timeout))
    if name == "prefilling":
        cell.plan()
    elif name == "in transfer":
        cell.run("results")  # the third chunk waits until the first has arrived
        if not cell.interleaved:
            cell.deliver(cell.waiting_reports("arrived")[0])
            cell.run("results")
    elif name == "decoding":
        cell.run(*(["results"] if cell.interleaved else ["arrived"]))
        for _ in range(3):
            cell.deliver(cell.waiting_reports("results")[-1])
            cell.plan()
    cell.submit(*[request(i) for i in (1, 2, 3)])
    return cell


STAGES = pytest.mark.parametrize("where", ["queued", "prefilling", "in transfer", "decoding"])


@STAGES
def test_cancel(where):
    """In every stage: no more events of it, all that it held is free for the next ones, of which none is disturbed."""
    cell = stage(where, slots=1)
    cell.cancel(0)
    cell.finish()
    assert cell.ended == {0: "cancelled", 1: "length", 2: "length", 3: "length"}
    assert (0 in cell.started) == (where != "queued")


def test_cancel_while_interleaved_prefill():
    """Chunks that are computed but not reported do not keep the engine from the next request."""
    cell = Cell(interleaved=True, slots=1)
    cell.submit(request(0, length=20), request(1))
    cell.plan()
    cell.cancel(0)
    cell.finish()
    assert cell.ended == {0: "cancelled", 1: "length"}


def test_cancel_of_unknown_and_ended_requests():
    """Nothing happens."""
    cell = Cell()
    cell.submit(request(0))
    cell.finish()
    cell.scheduler.cancel(0)
    cell.scheduler.cancel(7)
    assert cell.scheduler.idle and not cell.scheduler.events


def test_dead_work_does_not_delay():
    """Ten long prompts cancelled in all stages: the next short one starts in the next plan."""
    cell = Cell(prefill=(1,), decode=(1,), slots=4, prefill_ahead=2)
    cell.submit(*[request(i, length=40) for i in range(10)])
    cell.plan()
    for i in range(10):
        cell.cancel(i)
    cell.submit(request(10, length=2))
    cell.plan()
    assert prefills(cell)[-1] == (0, 10)
    cell.finish()
    assert cell.ended[10] == "length"


# Losing engines.


@STAGES
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_lose_one_of_two_engines(role, where):
    """The requests that need it end with an error that says so; all others are served by the other one."""
    cell = stage(where, prefill=(1, 1), decode=(1, 1))
    cell.lose(role, 0)
    needed = where != "queued" and not (role == "prefill" and where == "decoding")
    assert cell.ended == ({0: f"error: {role} engine 0 is lost: gone"} if needed else {})
    cell.finish()
    assert [cell.ended[i] for i in (1, 2, 3)] == ["length"] * 3
    assert needed or cell.ended[0] == "length"
    assert [op for op in cell.ops if op[0] == "drop"] == [["drop", role, 0, "gone"]]


@STAGES
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_lose_the_only_engine(role, where):
    """Every request ends, those that no longer need it with their answer; later ones end at once."""
    cell = stage(where)
    cell.lose(role, 0)
    assert cell.scheduler.broken
    cell.finish()
    served = role == "prefill" and where == "decoding"
    assert cell.ended[0] == ("length" if served else f"error: {role} engine 0 is lost: gone")
    assert all(cell.ended[i].startswith("error") for i in (1, 2, 3))
    cell.submit(request(4))
    assert cell.ended[4] == "error: no engine is left"


def test_lose_a_prefill_engine_between_arrival_and_first_report():
    """All of the prompt has arrived: the request goes on with the first token that came with it."""
    cell = Cell()
    cell.submit(request(0, length=3, max_tokens=3))
    cell.run("none")
    cell.deliver(cell.waiting_reports("arrived")[0])
    cell.lose("prefill", 0)
    assert cell.tokens[0] == [0]
    cell.finish()  # the report comes all the same, and is not counted twice
    assert cell.ended == {0: "length"}


def test_a_failed_transfer_loses_its_sender():
    """The request ends with an error that says so; another engine's goes on."""
    cell = Cell(prefill=(1, 1), slots=4)
    cell.submit(request(0, length=3), request(1, length=3))
    cell.run("results")
    cell.fail(("arrived", cell.decode[0][0], 0), "reset by peer")
    assert cell.ended == {0: "error: prefill engine 0 is lost: transfer 0 from it failed: reset by peer"}
    cell.finish()
    assert cell.ended[1] == "length"


def test_lose_an_interleaved_engine():
    """It is both: its requests end, the other engine goes on."""
    cell = Cell(interleaved=True, decode=(1, 1), slots=1)
    cell.submit(request(0), request(1), request(2))
    cell.plan()
    cell.kill(cell.decode[0][0])
    cell.finish()
    assert cell.ended[0].startswith("error") and cell.ended[1] == cell.ended[2] == "length"


def test_lose_a_process_of_two():
    """A process takes its whole engine with it."""
    cell = Cell(prefill=(2,), decode=(2, 2))
    cell.submit(request(0), request(1))
    cell.plan()
    cell.kill(cell.decode[0][1])
    cell.run("lost")
    assert cell.ended == {0: "error: decode engine 0 is lost: killed"} and cell.dropped == {("decode", 0)}
    cell.finish()
    assert cell.ended[1] == "length"


# Anything in any order.


@st.composite
def cells(draw):
    choose = lambda options: draw(st.sampled_from(list(options)))
    sizes = st.lists(st.integers(1, 2), min_size=1, max_size=3)
    return Cell(prefill=draw(sizes), decode=draw(sizes), slots=draw(st.integers(1, 3)), steps=draw(st.integers(1, 3)),
                prefill_ahead=draw(st.integers(1, 3)), decode_ahead=draw(st.integers(1, 3)), batch=draw(st.integers(1, 2)), local_length=draw(st.integers(0, 4)), interleaved=draw(st.booleans()),
                pair_bytes=draw(st.integers(40, 100)), total_bytes=draw(st.integers(40, 200)),
                choose=choose)


REQUESTS = st.lists(st.tuples(st.integers(1, 13), st.integers(1, 7), st.none() | st.integers(0, 6), st.integers(0, 1),
                              st.none() | st.integers(0, 30)), min_size=1, max_size=8)


def play(data, cell, requests, actions):
    """Requests come, reports are delivered, requests are cancelled and processes die, in any order; then it runs out."""
    coming = [request(i, *r) for i, r in enumerate(requests)]
    for now in itertools.count():
        if not coming:
            break
        action = data.draw(st.sampled_from(actions))
        if action == "submit":
            cell.submit(coming.pop(0), now=now)
        elif action == "expire":
            cell.expire(now)
        elif action == "plan":
            cell.plan()
        elif action == "report" and cell.reports:
            cell.deliver(cell.choose(cell.waiting_reports()))
        elif action == "corrupt" and (arrivals := cell.waiting_reports("arrived")):
            cell.corrupt(cell.choose(arrivals), "wrong sum")
        elif action == "cancel" and cell.requests:
            cell.cancel(cell.choose(list(cell.requests)))
        elif action == "kill":
            alive = [p for p in {q for e in (*cell.prefill, *cell.decode) for q in e} if p not in cell.dead]
            if alive:
                cell.kill(cell.choose(alive))
    cell.finish()


@settings(max_examples=150)
@given(st.data(), cells(), REQUESTS)
def test_any_order(data, cell, requests):
    """Without deaths every request that is not cancelled gets its whole answer, and afterwards every slot can be used."""
    play(data, cell, requests, ["submit", "plan", "plan", "report", "report", "report", "cancel", "expire"])
    assert all(end in ("stop", "length", "cancelled") or "timeout" in end for end in cell.ended.values())
    slots = [slot for engine in cell.slots for slot in engine]
    cell.submit(*[request(100 + i, length=9, max_tokens=500) for i in range(len(slots))])
    while not all(slot.left for slot in slots):
        if not cell.plan():
            cell.deliver(cell.waiting_reports()[0])
    for i in range(len(slots)):
        cell.cancel(100 + i)
    cell.finish()


@settings(max_examples=150)
@given(st.data(), cells(), REQUESTS)
def test_any_order_with_deaths(data, cell, requests):
    """Every request ends exactly once, those that can be served with their answer."""
    play(data, cell, requests, ["submit", "plan", "plan", "report", "report", "report", "cancel", "expire", "corrupt", "kill"])
    if not cell.dead:
        assert not any(e.startswith("error") and e != "error: wrong sum" and "timeout" not in e for e in cell.ended.values())
