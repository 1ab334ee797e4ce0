"""The benchmarks that start processes of their own, at sizes at which they say nothing about speed."""

import json
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("arguments, message", [
    (["transfer", "--sizes=1000"], "multiples of 32768 bytes, got 1000"),
    (["transfer", "--sizes=1M"], "'1M'"),
    (["transferr"], "name one benchmark: loop, engine, transfer; got ['transferr']"),
    (["transfer", "--json=/nowhere/out.json"], "/nowhere/out.json"),
], ids=lambda v: v if isinstance(v, str) else "")
def test_refused(arguments, message):
    """At once, in a line."""
    done = run(*arguments, timeout=60)
    assert done.returncode == 1 and message in done.stdout + done.stderr and "Traceback" not in done.stderr
