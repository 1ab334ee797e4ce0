"""The programs as a user starts them: answers, and one clear error for each kind of bad input, with no process left."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests import cluster

pytestmark = pytest.mark.e2e

REQUESTS = [
    {"prompt": "Who are you?", "max_tokens": 24, "temperature": 0},
    {"prompt": "Who are you?", "max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 3, "ignore_eos": True},
    {"prompt": [1, 5, 6], "max_tokens": 1},
]
BAD = [b"", b"nonsense", b"[1]", b'{"prompt": "caf\xe9"}', b'{"prompt": ""}', b'{"prompt": "x", "max_tokens": 0}',
       b'{"prompt": "x", "max_token": 3}', b'{"prompt": "x", "max_tokens": 10000}', b'{"prompt": [99999]}']


def launch(program, *arguments, seconds=180, **popen):
    """Run a program of the checkout to its end; -> (exit code, standard output, standard error)."""
    process = start(program, *arguments, **popen)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out.decode(), err.decode()


def start(program, *arguments, **popen):
    command = [sys.executable, "-m", program, "--config=configs/tiny.py", *map(str, arguments)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, cwd=cluster.ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **popen)


@pytest.fixture
def batch(tmp_path):
    """Arguments for a batch of good and bad lines, and the output's path."""
    lines = [json.dumps(r).encode() for r in REQUESTS] + BAD
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return [f"--input={tmp_path}/in.jsonl", f"--output={tmp_path}/out.jsonl"], tmp_path / "out.jsonl"


def left_over(marker):
    """Command lines of processes that still name `marker`."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(marker) in command and entry.parent.name != str(os.getpid()):
            found.append(command)
    return found


def test_batch_is_equal_in_both_modes(batch):
    """Good lines are answered, alike in both modes; each bad line gives an error line; stages name engine and slice."""
    arguments, output = batch
    answers = {}
    for mode in ("interleaved", "disaggregated"):
        code, _, err = launch("launch.local", f"--config.mode={mode}", *arguments)
        assert code == 0, err
        answers[mode] = [json.loads(line) for line in output.read_text().splitlines()]
    assert answers["interleaved"] == answers["disaggregated"]
    got = answers["disaggregated"]
    assert [a["index"] for a in got] == list(range(len(REQUESTS) + len(BAD)))
    assert got[0]["finish_reason"] in ("stop", "length") and got[0]["text"]
    assert len(got[1]["token_ids"]) == 24 and got[1]["finish_reason"] == "length"
    assert got[2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    for bad, answer in zip(BAD, got[len(REQUESTS):]):
        assert answer["error"]["type"] == "invalid_request_error", bad
    for stage in ("prefill on prefill 0 (slice 0)", "transfer from prefill 0 (slice 0) to decode 0 (slice 1)", "insert on decode 0 (slice 1)"):
        assert stage in err
    bytes_, chunks, total, padding, rest = re.search(
        r"([\d,]+) bytes moved in (\d+) chunks: ([\d.]+) x the prompts' own rows of the cache, of which padding to buckets is ([\d.]+) x "
        r"and all else ([\d.]+) x", err).groups()
    assert int(chunks) >= 2 and int(bytes_.replace(",", "")) > 1000
    assert "[0] requests        12 in " in err and re.search(r"\[0\] requests .*: .*9 invalid", err)
    made = sum(len(a["token_ids"]) for a in got[:len(REQUESTS)])
    assert re.search(rf"\[0\] tokens +\d+ of prompts, {made} new, ", err), err
    assert re.search(rf"\[0\] moved +{bytes_} bytes\n", err), err
    for row in ("first token .*ms", "between tokens .*ms", "whole request .*ms", "stages, p50 .*queue .*prefill .*transfer .*activation .*decode ",
                r"decode 0 +device idle [\d.]+% of [\d.]+ s", r"plans +\d+; behind at most: process 0 \d+, process 1 \d+"):
        assert re.search(rf"\[0\] {row}", err), (row, err)
    assert float(rest) < 1.02 and abs(float(total) - float(padding) * float(rest)) < 0.002


@pytest.mark.parametrize("overrides, message", [
    (["--config.checkpoint=/nowhere/at/all"], "no checkpoint folder at /nowhere/at/all"),
    (["--config.tokenizer=setup.cfg"], "setup.cfg is not a SentencePiece model"),
    (["--config.decode.tp=3"], "4 kv heads do not divide over config.prefill.tp=3 devices"),
    (["--config.model.num_layers=7"], "model.num_layers: config 7, checkpoint"),
    (["--config.cache_length=250"], "config.cache_length (250) must be a multiple of config.chunk (64)"),
    (["--output=/dev/full"], "No space left on device"),
    (["--output=/nowhere/out.jsonl"], "--output=/nowhere/out.jsonl"),
    (["--input=/nowhere/in.jsonl"], "--input=/nowhere/in.jsonl"),
])
def test_bad_start_ends_everywhere(batch, overrides, message):
    """A start that cannot work ends soon on all processes, with the reason, and leaves none behind."""
    arguments, output = batch
    code, _, err = launch("launch.local", *arguments, *overrides)
    assert code != 0 and message in err, err
    assert "Traceback" not in err, err
    assert not left_over(output.parent)


@pytest.mark.parametrize("argument, message", [
    ("--config.no_such_field=1", "no_such_field"),
    ("--config.cache_lengt=1", "cache_length"),
    ("--config.prefill.engines=0", "config.prefill.engines must be at least 1, got 0"),
    ("--config.mode=both", "config.mode must be one of disaggregated, interleaved, got 'both'"),
    ("--config.chunk=many", "many"),
    ("leftover", "arguments not understood: leftover"),
])
def test_bad_arguments(batch, argument, message):
    """Arguments that cannot work are refused by the launcher before any process starts."""
    code, _, err = launch("launch.local", *batch[0], argument, seconds=30)
    assert code != 0 and message in err, err


def test_transfer_port_in_use(batch):
    """The process that cannot take transfers on its port names it, though the other program's socket would share it."""
    arguments, output = batch
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        code, _, err = launch("launch.local", f"--config.transfer.port={port - 1}", *arguments)
    assert code == 1 and f"process 1: [Errno 98] config.transfer.port: transfers cannot be taken on 127.0.0.1:{port}" in err, err
    assert not left_over(output.parent)


def test_port_in_use(batch):
    """Process 0 names the coordinator address that it cannot listen on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        address = f"127.0.0.1:{s.getsockname()[1]}"
        code, _, err = launch("launch.main", *batch[0], f"--coordinator_address={address}", "--num_processes=2", "--process_id=0")
    assert code == 1 and f"cannot listen on coordinator address {address}: Address already in use" in err, err


def test_a_process_never_joins(batch):
    """The processes that wait for one that never comes end within the limit, and say so."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    code, _, err = launch("launch.main", *batch[0], f"--coordinator_address={address}", "--num_processes=2", "--process_id=0",
                          "--config.control.start_s=5", seconds=40)
    assert code == 1 and "not all of the job's 2 processes joined" in err, err


def test_no_orphan_when_the_launcher_is_killed(batch):
    """SIGKILL of the launcher in the middle of a run ends every process."""
    arguments, output = batch
    launcher = start("launch.local", *arguments)
    try:
        end = time.monotonic() + 60
        while len(left_over(output.parent)) < 3 and time.monotonic() < end:  # the launcher and two processes
            time.sleep(0.05)
        assert len(left_over(output.parent)) == 3
        time.sleep(2)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    end = time.monotonic() + 10
    while left_over(output.parent) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left_over(output.parent)
