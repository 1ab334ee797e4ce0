"""What the leader counts and times, with a real one over simulated engines."""

import statistics
import threading
import time
import types

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from disagg.control import Control
from disagg.loop import Loop
from disagg.metrics import ENDS, STAGES, Life, Metrics
from disagg.scheduler import Request
from tests.simulated_engines import BUSY_S, CHUNK, IDLE_S, ROW_BYTES, SLOTS, STEPS, leading


def request(number, length=5, max_tokens=8, **fields):
    return Request(number, tuple(range(length)), max_tokens, (2,), (0, 0.0, 0, 1.0), **fields)


class Handler:
    """Keeps a request's events and the moment of each."""

    def __init__(self):
        self.events, self.ended = [], threading.Event()

    def __call__(self, *event):
        self.events.append((time.monotonic(), *event))
        if event[0] != "tokens":
            self.ended.set()


def served(leader, *requests):
    """-> the Life and the Handler of each, when all have ended."""
    handlers = [Handler() for _ in requests]
    lives = [leader.submit(*asked) for asked in zip(requests, handlers)]
    for handler in handlers:
        assert handler.ended.wait(10)
    return lives, handlers


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_requests_life(interleaved):
    """Times are those at which its handler is called; the stages, one after the other, are all of it."""
    with leading(interleaved=interleaved, call_s=0.005) as leader:
        (life, other), (handler, _) = served(leader, request(0, length=3 * CHUNK), request(1))
    at = [when for when, *_ in handler.events]
    assert (life.prompt, life.tokens, other.tokens) == (3 * CHUNK, 8, 8)
    assert life.first == pytest.approx(at[0], abs=0.02) and life.ttft == life.first - life.submitted
    assert life.ended == pytest.approx(at[-1], abs=0.02) and len(life.gaps) == sum(e[1] == "tokens" for e in handler.events) - 1
    assert sum(life.gaps) == pytest.approx(life.last - life.first) and life.tpot == pytest.approx(sum(life.gaps) / 7)
    stages = life.stages()
    assert tuple(stages) == STAGES and (stages["transfer"] is None) == interleaved
    assert sum(seconds or 0 for seconds in stages.values()) == pytest.approx(life.total)
    assert stages["decode"] > 3 * 0.005  # 7 tokens, two a call
    assert life.moved == (0 if interleaved else 3 * CHUNK * ROW_BYTES)


def test_the_registry_agrees_with_the_lives():
    """Every sum and count that is exposed is that of the requests' own times."""
    with leading(call_s=0.001) as leader:
        lives, _ = served(leader, *(request(i, length=1 + 7 * i, max_tokens=1 + i % 7) for i in range(20)))
        value = leader.metrics.value
        assert value("disagg_requests_total", end="length") == 20 == value("disagg_time_to_first_token_seconds_count")
        assert value("disagg_generated_tokens_total") == sum(life.tokens for life in lives) == sum(1 + i % 7 for i in range(20))
        assert value("disagg_prompt_tokens_total") == sum(life.prompt for life in lives)
        assert value("disagg_moved_bytes_total") == sum(life.moved for life in lives) == value("disagg_request_moved_bytes_sum")
        assert value("disagg_requests_queued") == value("disagg_requests_running") == value("disagg_slots_used", engine=0) == 0
        assert value("disagg_slots", engine=0) == SLOTS and value("disagg_plans_total") == leader.plans
        for name, values in {"time_to_first_token": [life.ttft for life in lives], "request": [life.total for life in lives],
                             "inter_token": [gap for life in lives for gap in life.gaps],
                             "time_per_output_token": [life.tpot for life in lives if life.tokens > 1]}.items():
            assert value(f"disagg_{name}_seconds_sum") == pytest.approx(sum(values)), name
            assert value(f"disagg_{name}_seconds_count") == len(values), name
        for stage in STAGES:
            seconds = [s for life in lives if (s := life.stages()[stage]) is not None]
            assert value("disagg_request_stage_seconds_sum", stage=stage) == pytest.approx(sum(seconds)), stage
            assert value("disagg_request_stage_seconds_count", stage=stage) == len(seconds), stage


def test_every_end_is_counted_once():
    """Also of those that a front end cancels, that find no room, whose time is over, and that the cell's end cuts off."""
    with leading(call_s=0.01, max_queue=1) as leader:
        served(leader, request(0, max_tokens=2))
        lives, _ = served(leader, request(1, max_tokens=200, timeout=0.05))
        for number, how in ((2, "cancelled"), (3, "stop")):
            began = Handler()
            lives.append(leader.submit(request(number, max_tokens=200), began))
            until(lambda: began.events)
            leader.cancel(number, how)
            leader.cancel(number)
        running = []
        for number in range(4, 4 + SLOTS):
            running.append(leader.submit(request(number, max_tokens=400), Handler()))
            until(lambda: running[-1].first)
        leader.submit(request(10), Handler())
        served(leader, request(11))  # refused
        value = leader.metrics.value
        assert value("disagg_requests_running") == value("disagg_slots_used", engine=0) == SLOTS and value("disagg_requests_queued") == 1
    assert {how: value("disagg_requests_total", end=how) for how in ENDS} == {
        "stop": 1, "length": 1, "cancelled": 1, "refused": 1, "error": 1 + SLOTS + 1}
    assert all(life.ended and life.tokens for life in lives + running)


def test_idle_time_counts_only_while_something_is_decoded():
    """Of the calls of a request all but the first; none for the time in which there was nothing to decode."""
    with leading() as leader:
        value = leader.metrics.value
        for number in range(3):
            served(leader, request(number, max_tokens=1 + 4 * STEPS))
        until(lambda: value("disagg_decode_busy_seconds_total", engine=0) >= 12 * BUSY_S)
        assert value("disagg_decode_busy_seconds_total", engine=0) == pytest.approx(12 * BUSY_S)
        assert value("disagg_decode_idle_seconds_total", engine=0) == pytest.approx(9 * IDLE_S)


def test_idle_time_as_the_loop_measures_it():
    """From a result to the next dispatch, where that comes later; what is dispatched earlier waits on the device."""
    control = Control(None, 0, 1, heartbeat_s=1, deadline_s=1, stall_s=1)
    loop = Loop(types.SimpleNamespace(my_prefill=None, my_decode=None, process=0), control, None, None, None, None, None, hash_chain=False)
    loop._done_at = 10.0
    for begun, ended in ((9.0, 12.0), (12.5, 13.0), (12.9, 14.0)):
        loop._note_use(begun, ended)
    assert loop._used == pytest.approx([0.5, 2.0 + 0.5 + 1.0]) and loop._done_at == 14.0


def test_plan_lag():
    """Of every process that lives, now and at its most."""
    control = types.SimpleNamespace(published=10, positions=lambda: {0: 9, 1: 4})
    metrics = Metrics(types.SimpleNamespace(queued=0, running=0, slots=[]), control, 0)
    metrics.published()
    control.published, control.positions = 12, lambda: {0: 12, 1: 11}
    metrics.published()
    assert [metrics.value("disagg_plan_lag", process=q) for q in (0, 1)] == [0, 1]
    assert [metrics.value("disagg_plan_lag_max", process=q) for q in (0, 1)] == [1, 6]


def test_exposition():
    """The registry's text can be parsed, and every histogram's buckets add up."""
    with leading() as leader:
        served(leader, *(request(i) for i in range(3)))
        families = {f.name: f for f in text_string_to_metric_families(generate_latest(leader.metrics.registry).decode())}
    assert {f.name.removeprefix("disagg_") == f.name for f in families.values()} == {False}
    for name in ("disagg_inter_token_seconds", "disagg_time_to_first_token_seconds"):
        buckets = [s.value for s in families[name].samples if s.name.endswith("_bucket")]
        count, = (s.value for s in families[name].samples if s.name.endswith("_count"))
        assert buckets == sorted(buckets) and buckets[-1] == count > 0


def test_what_a_plan_costs_the_leader():
    """A report of 8 tokens, handed out, and all that is told of a plan: far less than a plan takes."""
    control = types.SimpleNamespace(published=0, positions=lambda: {0: 0, 1: 0})
    metrics = Metrics(types.SimpleNamespace(queued=0, running=0, slots=[]), control, 1)
    for number in range(8):
        metrics.submitted(number, Life(5, 0.0))
    events, times = [("tokens", number, [5, 6], [[], []]) for number in range(8)], []
    for plan in range(2000):
        began = time.perf_counter()
        metrics.decoding_on(0)
        metrics.called(0, 0.0, 0.1)
        metrics.made(events, plan / 100)
        metrics.published()
        times.append(time.perf_counter() - began)
    print(f"{1e6 * statistics.median(times):.1f} us a plan")
    assert statistics.median(times) < 20e-6
