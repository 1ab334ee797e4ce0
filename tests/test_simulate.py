"""The scheduler against engines with times: what the simulation checks itself holds for any load, and it shows what it should."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from configs import llama2
from disagg.cell import Limits
from disagg.scheduler import Request
from launch import simulate

MODES = pytest.mark.parametrize("interleaved", [False, True])


def limits(**overrides):
    c = llama2.get_config("7b")
    c.update_from_flattened_dict({"cache_length": 1024, "decode.slots": 4, "max_queue": 10_000} | overrides)
    return Limits.of(c, 4096)


def simulation(interleaved=False, engines=2, speeds=None, **overrides):
    return simulate.Simulation(limits(**overrides), prefill=engines, decode=engines, interleaved=interleaved, speeds=speeds)


def ask(number, prompt=64, limit=64, priority=0, timeout=None):
    return Request(number, (0,) * prompt, limit, (simulate.STOP,), (0, 0.0, 0, 1.0), priority, timeout)


REQUESTS = st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 900), st.integers(1, 100), st.none() | st.floats(0, 0.3),
                              st.none() | st.floats(0.001, 0.5), st.integers(0, 2)), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(REQUESTS, st.booleans(), st.integers(1, 3), st.dictionaries(st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(0, 2)),
                                                                  st.floats(1, 20)))
def test_every_request_ends_once(requests, interleaved, engines, speeds):
    """Whatever comes, is cancelled or timed out when, and however slow an engine is: with its whole answer, or as it was ended."""
    s = simulation(interleaved, engines, speeds)
    for i, (at, prompt, answer, cancelled, timeout, priority) in enumerate(requests):
        s.submit(ask(i, prompt, 100, priority, timeout), answer, at)
        if cancelled is not None:
            s.cancel(i, at + cancelled)
    s.run()
    for i, (_, _, answer, cancelled, timeout, _) in enumerate(requests):
        o = s.outcomes[i]
        assert o.end == "stop" and o.tokens == answer or o.end == "length" and o.tokens == answer == 100 or (
            cancelled is not None and o.end == "cancelled") or (timeout is not None and "timeout" in o.end)


@MODES
def test_equal_runs(interleaved):
    """It is a function of its load: nothing depends on this machine's time."""
    def outcomes():
        s = simulation(interleaved)
        simulate.load(s, requests=200, rate=50.0, prompts=((64, 700), (3, 1)), answers=((5, 40), (1, 1)), limit=64, seed=3)
        s.run()
        return s.outcomes
    assert outcomes() == outcomes()


@pytest.mark.parametrize("role, prompt, answer", [("prefill", 512, 2), ("decode", 64, 64)])
def test_a_slow_engine_gets_less_work(role, prompt, answer):
    """Of more work than both can do, one ten times slower than the other does little, and some."""
    s = simulation(speeds={(role, 0): 10.0}, **{"decode.slots": 8})
    simulate.load(s, requests=400, rate=1000.0, prompts=((prompt,), (1,)), answers=((answer,), (1,)), limit=answer, seed=0)
    s.run()
    done = {i: s.busy[role, i] / s.speeds.get((role, i), 1.0) for i in range(2)}
    assert 0 < done[0] < done[1] / 2, done


def test_a_short_prompt_does_not_wait_for_a_long_one():
    """Its first token comes after one chunk of the long prompt, not after all of them."""
    alone, s = (simulation(engines=1, cache_length=4096) for _ in range(2))
    alone.submit(ask(0, prompt=10), 5, 0.0)
    alone.run()
    s.submit(ask(0, prompt=3584), 5, 0.0)
    s.submit(ask(1, prompt=10), 5, 0.0)
    s.run()
    chunk = s.costs.prefill_call + 512 * s.costs.prefill_position
    # Two chunks are planned ahead before the leader sees the short one.
    assert s.outcomes[1].first < alone.outcomes[0].first + 3 * chunk < s.outcomes[0].first


@MODES
def test_idle_engines_are_used(interleaved):
    """Under overload they compute nearly always."""
    s = simulation(interleaved)
    simulate.load(s, requests=200, rate=1000.0, prompts=((64,), (1,)), answers=((64,), (1,)), limit=64, seed=0)
    s.run()
    assert all(s.busy["decode", d] > 0.85 * s.now for d in range(2)), (s.busy, s.now)


def test_command(tmp_path):
    """Prints and writes its figures; each bad value ends it in one line."""
    def run(*args):
        return subprocess.run([sys.executable, "-m", "launch.simulate", "--config=configs/llama2.py:7b", *args], capture_output=True, text=True,
                              timeout=60)
    out, costs = tmp_path / "out.json", tmp_path / "costs.json"
    assert run("--requests=50", f"--json={out}").returncode == 0
    assert json.loads(out.read_text())["answered"] == 50
    costs.write_text('{"stepp": 1}')
    for bad, named in {"--prompts=64": "64", "--prompts=0:1": "0:1", "--answers=5000:1": "6024", f"--costs={costs}": "stepp",
                       "--costs=/nowhere": "/nowhere"}.items():
        done = run(bad)
        assert done.returncode == 1 and named in done.stderr and "Traceback" not in done.stderr, done.stderr
