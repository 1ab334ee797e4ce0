"""The benchmarks that start processes of their own, at sizes at which they say nothing about speed."""

import json
import subprocess
import sys

import pytest

from launch import bench_load
from tests import cluster


def run(*arguments, timeout=600):
    return subprocess.run([sys.executable, "-m", "launch.bench", *arguments], cwd=cluster.ROOT, capture_output=True, text=True,
                          timeout=timeout)


@pytest.mark.e2e
@pytest.mark.slow
def test_transfer(tmp_path):
    """Every size over every layout, beside every peer that it can have; printed, drawn and written."""
    files = tmp_path / "out.json", tmp_path / "out.png"
    done = run("transfer", "--repeats=1", "--sizes=32768,131072", f"--json={files[0]}", f"--plot={files[1]}")
    assert done.returncode == 0, done.stderr
    records = json.loads(files[0].read_text())
    assert len(records) == sum(line.startswith(("transfer", "bystander", "decode")) for line in done.stdout.splitlines())
    peers = {}
    for r in records:
        assert r["value"] > 0 or r["name"] == "decode_meanwhile"
        assert r["peer"] is None or r["ratio"] == pytest.approx(r["value"] / r["peer_value"])
        if r["name"] == "transfer":
            peers.setdefault((r["params"]["bytes"], r["params"]["from"], r["params"]["to"]), set()).add(r["peer"])
    alike, other = {"sum", "host", "tcp", "memcpy"}, {"tcp", "memcpy"}
    assert peers == {(size, a, b): alike if a == b and "+" not in a else other for size in (32768, 131072)
                     for a, b in [("1", "1"), ("2", "2"), ("1", "2"), ("2", "1"), ("1+1", "1+1")]}
    assert {r["name"] for r in records} == {"transfer", "transfer_latency", "transfer_checked", "bystander", "decode_meanwhile"}
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
@pytest.mark.slow
def test_load(tmp_path):
    """Both modes at every rate and seed; printed, drawn and written."""
    files = tmp_path / "out.json", tmp_path / "out.png"
    done = run("load", "--model=tiny", "--rates=0.02,0.2", "--seconds=0.5", "--repeats=2", f"--json={files[0]}", f"--plot={files[1]}")
    assert done.returncode == 0, done.stderr
    records = json.loads(files[0].read_text())
    rates = sorted({r["params"]["rate"] for r in records if "rate" in r["params"]})
    assert len(rates) == 2 and rates[1] == pytest.approx(10 * rates[0])
    for rate in rates:
        of = {}
        for r in records:
            if r["params"].get("rate") == rate:
                assert r["params"]["mode"] == "disaggregated" and r["peer"] == "interleaved"
                of.setdefault(r["name"], []).append(r)
        assert set(of) == {"ttft", "itl", "itl_normalised", "itl_normalised_from_third", "attainment", "tokens_per_s"}
        for side in ("value", "peer_value"):
            for name in ("ttft", "itl", "itl_normalised", "itl_normalised_from_third"):
                values = [r[side] for r in of[name]]
                assert values == sorted(values) and 0 <= values[0] and 0 < values[-1]
            assert 0 <= of["attainment"][0][side] <= 1 and of["tokens_per_s"][0][side] > 0
    assert [r["params"] for r in records if r["name"] == "goodput"] == [{"mode": "disaggregated"}]
    assert {r["params"]["tokens"] for r in records if r["name"] == "bare_prompt"} == {16, 160}
    assert all(r["value"] > 0 < r["peer_value"] for r in records if r["name"] == "bare_step")
    table = [line.split()[1] for line in done.stdout.splitlines() if line.split()[1:2] in (["disaggregated"], ["interleaved"])]
    assert table == ["disaggregated", "interleaved"] * 2
    assert files[1].read_bytes().startswith(b"\x89PNG")


BARE = bench_load.Bare(prefills=[[64, 0.1], [1024, 2.0]], steps=[[192, 1, 0.04], [192, 3, 0.06], [1152, 1, 0.08], [1152, 3, 0.1]], beside=[])
LOAD = bench_load.Load(rates=(0.5,), seconds=100.0, ttft_limit=5.0, itl_limit=3.0, model="smollm2")


def test_load_arrivals():
    """Poisson, of the mixture, and the same at another rate but for the time."""
    one, twice = bench_load.arrivals(LOAD, 20.0, seed=1), bench_load.arrivals(LOAD, 40.0, seed=1)
    assert one == bench_load.arrivals(LOAD, 20.0, seed=1) != bench_load.arrivals(LOAD, 20.0, seed=2)
    assert len(one) == pytest.approx(2000, rel=0.1) and sum(n == 64 for _, n in one) / len(one) == pytest.approx(0.75, abs=0.05)
    assert all(a == pytest.approx(2 * b) and n == m for (a, n), (b, m) in zip(one, twice))
    waits = [b - a for (a, _), (b, _) in zip(one, one[1:])]
    assert sum(w * w for w in waits) / len(waits) == pytest.approx(2 / 20.0**2, rel=0.2)  # as of an exponential distribution


def test_load_gaps():
    """A gap over the step of those that decoded together, at what the longest of them had read; first tokens are no step's."""
    short = {"prompt": 64, "at": 0.0, "times": [1.0, 2.0, 3.0, 5.0]}
    long = {"prompt": 1024, "at": 0.0, "times": [2.0, 3.001, 4.0]}
    steps = [0.04, 0.09, 0.04, 0.09, 0.08]
    assert bench_load._gaps(BARE, [short, long]) == [(pytest.approx(a), pytest.approx(b)) for a, b in zip([1, 1, 2, 1.001, 0.999], steps)]


def test_load_goodput():
    figures = {rate: {"attainment": [share]} for rate, share in [(1.0, 1.0), (2.0, 0.9), (3.0, 0.8), (4.0, 1.0)]}
    assert bench_load._goodput(figures, 0) == 2.0
    assert bench_load._goodput({1.0: {"attainment": [0.5]}}, 0) == 0.0


@pytest.mark.parametrize("arguments, message", [
    (["transfer", "--sizes=1000"], "multiples of 32768 bytes, got 1000"),
    (["transfer", "--sizes=1M"], "'1M'"),
    (["load", "--rates=0.5,0"], "--rates must be positive, got 0.5, 0.0"),
    (["transferr"], "name one benchmark: loop, engine, transfer, load; got ['transferr']"),
    (["transfer", "--json=/nowhere/out.json"], "/nowhere/out.json"),
], ids=lambda v: v if isinstance(v, str) else "")
def test_refused(arguments, message):
    """At once, in a line."""
    done = run(*arguments, timeout=60)
    assert done.returncode == 1 and message in done.stdout + done.stderr and "Traceback" not in done.stderr
