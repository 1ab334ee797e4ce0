"""Starts real controllers on this machine for a test, with free ports, a deadline, and SIGKILL for every one of them."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

from disagg.topology import free_port

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Cluster:
    """Processes with a log file each. `wait` for the end; leaving the context kills what is left."""

    def __init__(self, commands, folder, env=None):
        self.folder = pathlib.Path(folder)
        self.logs = [self.folder / f"process{i}.log" for i in range(len(commands))]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | (env or {})
        self.processes = []
        for command, log in zip(commands, self.logs):
            with open(log, "wb") as f:
                self.processes.append(subprocess.Popen(command, stdout=f, stderr=f, stdin=subprocess.DEVNULL, env=env, cwd=ROOT))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for p in self.processes:
            p.kill()
            p.wait()

    def wait(self, seconds):
        """Exit codes of all; a process still there after `seconds` fails the test, with the logs' ends."""
        end = time.monotonic() + seconds
        for p in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(max(0.01, end - time.monotonic()))
        codes = [p.poll() for p in self.processes]
        assert None not in codes, f"processes {[i for i, c in enumerate(codes) if c is None]} hang after {seconds} s\n{self.text()}"
        return codes

    def text(self, process=None, lines=40):
        """The last lines of one log, or of all."""
        which = range(len(self.logs)) if process is None else [process]
        return "\n".join(f"--- process {i}\n" + "\n".join(self.logs[i].read_text(errors="replace").splitlines()[-lines:])
                         for i in which)


def job(folder, cases, *, processes, devices, start=None, base=("tiny",)):
    """A Cluster of tests.worker processes that run these cases: [{"name", "config", "requests" or "front", "faults"}].

    base: module of configs, and its variant if it has any.
    """
    folder = pathlib.Path(folder)
    for case in cases:
        case["input"], case["output"] = (str(folder / f"{case['name']}.{end}.jsonl") for end in ("in", "out"))
        pathlib.Path(case["input"]).write_text("".join(json.dumps(r) + "\n" for r in case.pop("requests", [])))
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"coordinator": f"127.0.0.1:{free_port()}", "num_processes": processes, "cpu_devices": devices,
                                "base": base, "start": start or {}, "cases": cases}))
    return Cluster([[sys.executable, "-m", "tests.worker", str(spec), str(i)] for i in range(processes)], folder)


def answers(folder, name):
    """The output lines of a case."""
    return [json.loads(line) for line in (pathlib.Path(folder) / f"{name}.out.jsonl").read_text().splitlines()]


def end(folder, name):
    """Why the case's cell ended early, or None; raises FileNotFoundError if process 0 never got there."""
    return json.loads((pathlib.Path(folder) / f"{name}.out.jsonl.end").read_text())
