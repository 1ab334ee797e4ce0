"""Many requests through one running cell, cancelled at any time: nothing is left, on any process."""

import json
import statistics

import pytest

from tests import cluster

pytestmark = pytest.mark.e2e

# Chunks so small and limits so narrow that every prompt goes in parts and waits for room.
CONFIG = {"chunk": 16, "buckets": [16], "reads": [], "decode.slots": 4, "decode.steps": 1, "prefill.engines": 1, "decode.engines": 2,
          "prefill.ahead": 4, "debug.hash_chain": True, "transfer.pair_bytes": 80_000, "transfer.total_bytes": 130_000}
PROCESSES = 3


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_is_left(tmp_path, count):
    """Every request ends as it should, the last as quickly as the first; arrays, memory and keys do not grow; at the end the store is
    empty."""
    case = {"name": "soak", "config": CONFIG, "front": ["soak", {"count": count, "width": 24, "cancel": 0.5, "patience_s": 0.1, "longest": 100}]}
    with cluster.job(tmp_path, [case], processes=PROCESSES, devices=1) as job:
        codes = job.wait(60 + count / 10)
        assert codes == [0] * PROCESSES, job.text()
    begun, *results = [json.loads(line) for line in (tmp_path / "soak.out.jsonl").read_text().splitlines()]
    cancelled = [r for r in results if r["end"] == "cancelled"]
    assert len(results) == count and count / 10 < len(cancelled) < count * 0.6
    for r in results:
        assert r["end"] == "cancelled" or (r["end"], r["tokens"]) == ("finish: length", r["asked"]), r
    rates = [len(part) / (part[-1]["time"] - part[0]["time"]) for part in (results[:count // 3], results[-count // 3:])]
    print(f"requests/s of the first and the last third: {rates[0]:.1f}, {rates[1]:.1f}")
    assert rates[1] > rates[0] / 2, "it becomes slower"
    for process in range(PROCESSES):
        samples = json.loads((tmp_path / f"soak.out.jsonl.watch{process}").read_text())
        served = [s for s in samples[:-1] if s["time"] > begun]
        early, late = (served[len(served) * a // 3:len(served) * (a + 1) // 3] for a in (0, 2))
        arrays, rss = ([statistics.median(s[of] for s in part) for part in (early, late)] for of in ("arrays", "rss"))
        print(f"process {process}: arrays {arrays}, RssAnon {[f'{r / 2**20:.1f} MiB' for r in rss]}, "
              f"keys at most {max(s['keys'] for s in samples)}")
        assert arrays[1] <= arrays[0] + 24, "arrays are left over"
        assert rss[1] <= rss[0] + 16 * 2**20, "memory is left over"
        assert max(s["keys"] for s in samples) < 64 * 2 * (PROCESSES + 1) + 200
        assert process or samples[-1]["keys"] == 0
