"""The loop benchmark (see launch.bench): started without arguments it runs itself as the processes of one cell."""

import json
import os
import pathlib
import sys
import tempfile
import threading
import time

import jax
from absl import logging

from configs import tiny
from disagg import cell, compilation_cache, topology
from disagg.control import Control
from disagg.scheduler import Request
from launch import program
from launch import supervise

PROCESSES = 4
EMPTY_PLANS = 1000
BARE_SECONDS = 1.0


def run(repeats):
    """Start the processes; -> arguments of results.record for each figure."""
    port = topology.free_port()
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        commands = [[sys.executable, "-m", "launch.bench_loop", f"127.0.0.1:{port}", str(i), str(repeats), str(out)]
                    for i in range(PROCESSES)]
        if code := supervise.run(commands, env=os.environ | {"JAX_PLATFORMS": "cpu"}):
            raise SystemExit(code)
        figures = json.loads(out.read_text())
    params = {"processes": PROCESSES}
    return [("empty_plans", params, "plans/s", figures["empty"], "key_value_set", figures["keys"]),
            ("decode_plans", params | {"steps": 1}, "plans/s", figures["decode"], "bare_step", figures["bare"])]


def _config():
    c = tiny.get_config()
    c.prefill.engines = c.decode.engines = 2
    c.decode.steps = 1
    return c


def _worker(coordinator, process, repeats, out):
    config = _config()
    topology.start(config, coordinator=coordinator, num_processes=PROCESSES, process=process, cpu_devices=1)
    compilation_cache.enable(config.compilation_cache, process, PROCESSES)
    client = topology.coordination_client()
    topo = topology.build(config, jax.devices(), process)
    figures = {"keys": [_keys(client, r) for r in range(repeats)] if process == 0 else []}
    figures["empty"] = [_empty_plans(config, client, process, f"empty{r}") for r in range(repeats)]
    figures["bare"] = _bare_steps(config, client, topo, repeats)
    figures["decode"] = []

    def open_front(tokenizer, cache_length, vocab_size):
        return lambda leader: figures["decode"].extend(_decode_plans(leader, config) for _ in range(repeats))

    if error := program.serve(config, open_front, topo, client=client, name="decode"):
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
    control = Control(client, process, PROCESSES, heartbeat_s=config.control.heartbeat_s,
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
        waiting = set(range(PROCESSES))
        while waiting:
            waiting -= {q for q, message in control.receive(1.0) if message[0] == "done"}
    rate = EMPTY_PLANS / (time.monotonic() - started)
    control.close()
    return rate


def _bare_steps(config, client, topo, repeats):
    """Steps/s of the decode program in a plain loop on both decode processes at once; reported by their mean rate."""
    model = program.make_model(config)
    limits = cell.Limits.of(config, model.config.max_length)
    engine, rates = None, []
    if topo.my_decode:
        form = cell.chunk_format(config, model, topo, limits)
        _, engine = cell.load_engines(model, topo, limits, form, program.loader(config, model))
        jax.block_until_ready(engine.run(limits.cache_length, 1))
    for r in range(repeats):
        client.wait_at_barrier(f"bare{r}", 60_000)
        if engine:
            started, steps = time.monotonic(), 0
            while time.monotonic() - started < BARE_SECONDS:
                jax.block_until_ready(engine.run(limits.cache_length, 1))
                steps += 1
            client.key_value_set(f"bare/{r}/{topo.process}", str(steps / (time.monotonic() - started)))
        client.wait_at_barrier(f"bared{r}", 60_000)
        given = [float(value) for _, value in client.key_value_dir_get(f"bare/{r}/")]
        rates.append(sum(given) / len(given))
    return rates


def _decode_plans(leader, config):
    """Plans/s while every slot of every decode engine decodes."""
    answers, tokens = threading.Semaphore(0), config.cache_length - 2
    number = config.decode.slots * config.decode.engines
    begun = [threading.Event() for _ in range(number)]
    finished = threading.Event()

    def handler(mark):
        def handle(kind, *_):
            mark.set()
            if kind != "tokens":
                finished.set()
                answers.release()
        return handle

    for mark in begun:
        leader.submit(Request(leader.new_id(), (1, 5), tokens, (), (0, 0.0, 0, 1.0)), handler(mark))
    for mark in begun:
        mark.wait()
    plans, started = leader.plans, time.monotonic()
    finished.wait()
    rate = (leader.plans - plans) / (time.monotonic() - started)
    for _ in begun:
        answers.acquire()
    return rate


if __name__ == "__main__":
    logging.set_verbosity(logging.ERROR)
    _worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    topology.leave(0)
