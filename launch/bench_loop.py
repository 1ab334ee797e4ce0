"""The loop benchmark (see launch.bench): started with arguments it is one process of a job."""

import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time

import jax
from absl import logging

from configs import smollm2, tiny
from disagg import cell, compilation_cache, topology
from disagg.control import Control
from disagg.scheduler import Request
from launch import bench_engine, program, supervise

JOBS = {"log": 4, "one": 1, "smollm2": 1}  # name: processes
EMPTY_PLANS = 1000
BARE_SECONDS = {"tiny": 1.0, "smollm2": 5.0}
IDLE_SECONDS = 5.0
KEYS_MS = 600_000  # limit for another process to get as far


def run(repeats):
    """Start the processes of each job; -> arguments of results.record for each figure."""
    log, one, smollm2 = (_start(name, repeats) for name in JOBS)
    params = {"processes": JOBS["log"]}
    return [("empty_plans", params, "plans/s", log["empty"], "key_value_set", log["keys"]),
            ("decode_plans", params | {"steps": 1}, "plans/s", log["plans"], "bare_step", log["bare"]),
            ("idle_cpu", params, "% of a core", log["idle"], None, None),
            ("decode_plans", {"processes": 1, "steps": 1}, "plans/s", one["plans"], "bare_step", one["bare"]),
            ("decode_steps", {"processes": 1, "model": "SmolLM2-135M", "batch": 8}, "steps/s", smollm2["steps"], "bare_step", smollm2["bare"])]


def _start(name, repeats):
    port = topology.free_port()
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        commands = [[sys.executable, "-m", "launch.bench_loop", name, f"127.0.0.1:{port}", str(i), str(repeats), str(out)] for i in range(JOBS[name])]
        if code := supervise.run(commands, env=os.environ | {"JAX_PLATFORMS": "cpu"}):
            raise SystemExit(code)
        return json.loads(out.read_text())


def _config(name):
    """One step a call; every call reads all of the cache, as the bare one does."""
    if name == "smollm2":
        c = smollm2.get_config("135m")
        c.model.dtype, c.cache_length, c.chunk, c.buckets = "float32", 192, 64, (64,)
    else:
        c = tiny.get_config()
    c.reads, c.decode.steps = (), 1
    if name == "log":
        c.prefill.engines = c.decode.engines = 2
    else:
        c.mode = "interleaved"
    return c


def _model(name, config):
    """-> model, load (see cell.run)."""
    if name == "smollm2":
        model, params = bench_engine.random_smollm2()
        return model, lambda shardings: jax.device_put(params, shardings)
    model = program.make_model(config)
    return model, program.loader(config, model)


def _worker(name, coordinator, process, repeats, out):
    config, processes = _config(name), JOBS[name]
    topology.start(config, coordinator=coordinator, num_processes=processes, process=process, cpu_devices=1)
    compilation_cache.enable(config.compilation_cache, process, processes)
    client, topo = topology.coordination_client(), topology.build(config, jax.devices(), process)
    model, load = _model(name, config)
    bare = _Bare("smollm2" if name == "smollm2" else "tiny", config, topo, model, load)
    figures = {"plans": [], "steps": [], "bare": []}
    if name == "log":
        figures["keys"] = [_keys(client, r) for r in range(repeats)] if process == 0 else []
        figures["empty"] = [_empty_plans(config, client, process, f"empty{r}") for r in range(repeats)]
        figures["bare"] = [_together(client, topo, bare, r) for r in range(repeats)]
        threading.Thread(target=_watch_idle, args=(client, process), daemon=True).start()

    def front(leader):
        if name == "log":
            figures["idle"] = _idle(client, processes)
        for _ in range(repeats):
            if name != "log":
                figures["bare"].append(bare.rate())  # in turns, while nothing else runs
            plans, steps = _decode(leader, config)
            figures["plans"].append(plans)
            figures["steps"].append(steps)

    if error := cell.run(config, lambda: (model, load, front), topo, client=client, name="decode"):
        raise RuntimeError(error)
    if process == 0:
        pathlib.Path(out).write_text(json.dumps(figures))


def _keys(client, repeat):
    started = time.monotonic()
    for i in range(EMPTY_PLANS):
        client.key_value_set_bytes(f"keys{repeat}/{i}", b"[]")
    rate = EMPTY_PLANS / (time.monotonic() - started)
    client.key_value_delete(f"keys{repeat}/")
    return rate


def _empty_plans(config, client, process, name):
    """Plans/s from the first one published to the last one read by the last process."""
    control = Control(client, process, JOBS["log"], heartbeat_s=config.control.heartbeat_s,
                      deadline_s=config.control.deadline_s, stall_s=config.control.stall_s, name=name)
    client.wait_at_barrier(name, 60_000)
    started = time.monotonic()
    if process == 0:
        for _ in range(EMPTY_PLANS):
            control.publish([])
    for _ in range(EMPTY_PLANS):
        control.next()
    control.report("done")
    if process == 0:
        waiting = set(range(JOBS["log"]))
        while waiting:
            waiting -= {q for q, message in control.receive(1.0) if message[0] == "done"}
    rate = EMPTY_PLANS / (time.monotonic() - started)
    control.close()
    return rate


class _Bare:
    """The decode program of this process's engine in a plain loop."""

    def __init__(self, model_name, config, topo, model, load):
        self._seconds, self._length, self._engine = BARE_SECONDS[model_name], config.cache_length, None
        if topo.my_decode:
            limits = cell.Limits.of(config, model.config.max_length)
            _, self._engine, _ = cell.load_engines(model, topo, limits, cell.chunk_format(config, model, topo, limits), load)
            jax.block_until_ready(self._engine.run(self._length, 1))

    def rate(self):
        """Steps/s; None where there is no engine."""
        if self._engine is None:
            return None
        started, steps = time.monotonic(), 0
        while time.monotonic() - started < self._seconds:
            jax.block_until_ready(self._engine.run(self._length, 1))
            steps += 1
        return steps / (time.monotonic() - started)


def _together(client, topo, bare, repeat):
    """The mean rate of both decode processes, at once."""
    client.wait_at_barrier(f"bare{repeat}", KEYS_MS)
    if rate := bare.rate():
        client.key_value_set(f"bare/{repeat}/{topo.process}", str(rate))
    client.wait_at_barrier(f"bared{repeat}", KEYS_MS)
    return statistics.mean(float(value) for _, value in client.key_value_dir_get(f"bare/{repeat}/"))


def _watch_idle(client, process):
    """CPU time of this process between two keys."""
    used = []
    for key in ("idle_begin", "idle_end"):
        client.blocking_key_value_get(key, KEYS_MS)
        used.append(time.process_time())
    client.key_value_set(f"idle/{process}", str(100 * (used[1] - used[0]) / IDLE_SECONDS))


def _idle(client, processes):
    """% of a core that each process uses while nothing is asked."""
    time.sleep(1.0)
    client.key_value_set("idle_begin", "")
    time.sleep(IDLE_SECONDS)
    client.key_value_set("idle_end", "")
    return [float(client.blocking_key_value_get(f"idle/{q}", KEYS_MS)) for q in range(processes)]


def _decode(leader, config):
    """Plans/s, and steps/s of one engine, while every slot of every decode engine decodes."""
    answers, tokens = threading.Semaphore(0), config.cache_length - 2
    number = config.decode.slots * config.decode.engines
    begun, made = [threading.Event() for _ in range(number)], [0] * number
    finished = threading.Event()

    def handler(i):
        def handle(kind, *details):
            begun[i].set()
            if kind == "tokens":
                made[i] += len(details[0])
            else:
                finished.set()
                answers.release()
        return handle

    for i in range(number):
        leader.submit(Request(leader.new_id(), (1, 5), tokens, (), (0, 0.0, 0, 1.0)), handler(i))
    for mark in begun:
        mark.wait()
    plans, steps, started = leader.plans, made[-1], time.monotonic()
    finished.wait()
    seconds = time.monotonic() - started
    rates = (leader.plans - plans) / seconds, (made[-1] - steps) / seconds
    for _ in begun:
        answers.acquire()
    return rates


if __name__ == "__main__":
    logging.set_verbosity(logging.ERROR)
    _worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    topology.leave(0)
