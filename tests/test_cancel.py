"""Cancelled work is given up at once, in whatever stage it is: what comes next does not wait for it."""

import json

import pytest

from tests import cancels, cluster

pytestmark = pytest.mark.e2e

MODES = {"disaggregated": {"prefill.engines": 2, "decode.engines": 2}, "interleaved": {"mode": "interleaved", "decode.engines": 4}}
CONFIG = {"chunk": 16, "buckets": [16], "reads": [], "debug.hash_chain": True}


def stages(mode):
    return [stage for stage in cancels.STAGES if mode == "disaggregated" or stage != "moving"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """mode -> its lines."""
    folder = tmp_path_factory.mktemp("cancels")
    cases = [{"name": mode, "config": CONFIG | config | ({"decode.slots": 2} if mode == "interleaved" else {}),
              "front": ["cancels", {"stages": stages(mode), "count": 10, "long": 180, "short": 10}]} for mode, config in MODES.items()]
    with cluster.job(folder, cases, processes=4, devices=1) as job:
        codes = job.wait(200)
        assert codes == [0] * 4, job.text()
    return {mode: cluster.answers(folder, mode)[1:] for mode in MODES}


@pytest.mark.parametrize("mode,stage", [(mode, stage) for mode in MODES for stage in stages(mode)])
def test_ten_long_prompts_cancelled(runs, mode, stage):
    """The short prompt is next, and nothing is computed, moved or decoded for the cancelled ones any more."""
    idle, = [line for line in runs[mode] if line["stage"] == "idle"]
    line, = [line for line in runs[mode] if line["stage"] == stage]
    print(f"{mode}, {stage}: first token after {line['first_s'] * 1e3:.1f} ms, on an idle cluster {idle['first_s'] * 1e3:.1f} ms")
    assert len(line["tokens"]) == 4 and line["tokens"] == idle["tokens"]
    # Interleaved engines first compute what they have been given already.
    began = [n for n, ops in enumerate(line["plans"]) for op in ops if op[0] == "prefill"]
    assert len(began) == 1 and (began == [0] or mode == "interleaved")
    numbers = {op[2] for ops in line["plans"] for op in ops if op[0] == "prefill"}
    for name, *args in (op for ops in line["plans"] for op in ops):
        if name in ("transfer", "write"):
            assert args[name == "write"] in numbers, (name, args)
        assert name not in ("chunk", "stop", "drop"), (name, args)
    decoded = sum(op[3] for ops in line["plans"] for op in ops if op[0] == "decode")
    assert decoded <= 3 + 2 * 2, "steps for nobody"
