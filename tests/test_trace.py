"""The traced run: what the spans become, and a real one."""

import json
import subprocess
import sys

import pytest

from disagg.trace import Trace
from launch import trace
from tests import cluster


def span(kind, begun, ended, engine=0, **what):
    return {"kind": kind, "engine": engine, "begun": begun, "ended": ended, **what}


# One request of two chunks beside one that decodes: chunk 1 moves from 2.0 to 2.5 while chunk 2 is computed and a step runs.
SPANS = [
    span("prefill", 0.0, 2.0, number=1, request=7, tokens=4, last=False),
    span("prefill", 0.5, 4.0, number=2, request=7, tokens=4, last=True),   # dispatched early: begins at 2.0
    span("transfer", 0.1, 2.5, number=1, request=7, **{"from": 0}),        # waited for from 0.1: moves from 2.0
    span("transfer", 0.6, 4.5, number=2, request=7, **{"from": 0}),
    span("write", 2.6, 3.2, number=1, slot=0, last=False),
    span("write", 4.6, 4.8, number=2, slot=0, last=True),
    span("decode", 1.0, 3.0, read=8, steps=1),
    span("decode", 2.9, 4.4, read=8, steps=1),
    span("decode", 4.7, 5.8, read=8, steps=1),
]


@pytest.fixture
def spans(tmp_path):
    """SPANS as two processes write them, and as they are read again."""
    for process, mine in enumerate([SPANS[:2], SPANS[2:]]):
        kept = Trace(tmp_path, process)
        for s in mine:
            kept.span(**s)
        kept.save()
    return trace.read(tmp_path)


def test_what_is_on_a_device_begins_when_what_was_before_it_has_ended(spans):
    begun = {(s["kind"], s["ended"]): s["begun"] for s in spans}
    assert begun["prefill", 4.0] == 2.0
    assert begun["transfer", 2.5] == 2.0 and begun["transfer", 4.5] == 4.0  # not before its chunk is computed
    assert begun["write", 3.2] == 3.0 and begun["decode", 4.4] == 3.2 and begun["decode", 5.8] == 4.8


def test_figures(spans):
    found = {(name, *params.values()): (values, peers) for name, params, _, values, _, peers in trace.figures(spans)}
    assert found["transfer_overlap", "prefill"][0] == pytest.approx([100, 0])
    assert found["transfer_overlap", "decode"][0] == pytest.approx([100, 80])
    assert found["transfer_time",][0] == pytest.approx([500, 500])
    beside, without = found["decode_step",]
    assert beside == pytest.approx([2000, 1200]) and without == pytest.approx([1000])
    waits, bounds = found["last_chunk_to_decode",]
    assert waits == pytest.approx([800]) and bounds == pytest.approx([1250 * 0.5 + 2 * 1200])  # the call from 3.2 to 4.4 was running


def test_events_are_complete(spans):
    events = trace.events(spans)
    shown = [e for e in events if e["ph"] == "X"]
    assert len(shown) == len(SPANS) and all(e["ts"] >= 0 and e["dur"] > 0 for e in shown)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(threads.values()) == {"prefill chunks", "transfers", "writes", "decode calls"}
    for e in shown:
        assert threads[e["pid"], e["tid"]] == trace.KINDS[e["cat"]]


def test_nothing_is_kept_without_a_folder(tmp_path):
    kept = Trace("", 0)
    kept.span(**SPANS[0])
    kept.save()
    assert not kept._spans and not list(tmp_path.iterdir())


def run(*arguments, timeout=240):
    done = subprocess.run([sys.executable, "-m", "launch.trace", "--config=configs/tiny.py", *arguments], cwd=cluster.ROOT,
                          capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.e2e
def test_a_traced_run(tmp_path):
    """Every chunk, transfer and decode call of a real run is in the trace, once, in an order that can be."""
    code, out, err = run(f"--folder={tmp_path}/new", "--pairs=2", "--new_tokens=8", "--long=200")
    assert code == 0, err
    assert {"transfer_overlap", "transfer_time", "last_chunk_to_decode"} <= {line.split()[0].rstrip(":") for line in out.splitlines()}
    spans = trace.read(tmp_path / "new" / "spans")
    numbers = {kind: sorted(s["number"] for s in spans if s["kind"] == kind) for kind in ("prefill", "transfer", "check", "write")}
    assert numbers["prefill"] == numbers["transfer"] == numbers["check"] == list(range(len(numbers["prefill"])))
    assert len(numbers["write"]) == 2 * (2 + 4) and set(numbers["write"]) == set(numbers["prefill"])  # 200 tokens are four chunks
    assert sum(s["tokens"] for s in spans if s["kind"] == "prefill") == 2 * (2 * 16 + 200)
    of = lambda kind: {s["number"]: s for s in spans if s["kind"] == kind}
    for number, moved in of("transfer").items():
        assert of("prefill")[number]["ended"] <= moved["begun"] + 0.1  # threads of two busy processes look at the clock
        assert moved["ended"] <= of("check")[number]["ended"] <= of("write")[number]["ended"]
    assert any(s["kind"] == "decode" for s in spans)
    made = tmp_path / "new"
    assert len(json.loads((made / "trace.json").read_text())["traceEvents"]) > len(spans)
    assert (made / "trace.png").read_bytes().startswith(b"\x89PNG")
    answers = [json.loads(line) for line in (made / "answers.jsonl").read_text().splitlines()]
    assert [len(a["token_ids"]) for a in answers] == [8] * 6


def test_refused(tmp_path):
    """A prompt that does not fit, and a folder that cannot be made, before anything is started."""
    assert run(f"--folder={tmp_path}", "--long=250")[::2] == (
        2, "trace: --long=250 and --new_tokens=64 do not fit in config.cache_length=256\n")
    (tmp_path / "file").write_text("")
    code, _, err = run(f"--folder={tmp_path}/file/x")
    assert code == 2 and f"{tmp_path}/file/x" in err and err.count("\n") == 1
