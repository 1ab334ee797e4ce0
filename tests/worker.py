"""One process of a test cluster: joins once, then runs several cells one after the other in the same job.

  python -m tests.worker SPEC.json PROCESS_ID

SPEC: {"coordinator", "num_processes", "cpu_devices", "base" (module of configs, its variant or none), "start" (config
overrides for joining), "cases": [{"name", "config" (overrides), "input", "output" (paths), "faults": [[name, ...]], "front" (name,
arguments)}]}. A front end of FRONTS takes the place of the requests, and every process writes its samples to output + ".watch" +
its number. A case's end is written by process 0 to output + ".end". Runs the program's own code; only the reading of device memory is
watched, and faults are put in where asked.
"""

import contextlib
import functools
import importlib
import json
import pathlib
import sys

import jax
from absl import logging

from disagg import compilation_cache, topology
from launch import program
from launch.batch import Batch
from tests import cancels, faults, host_reads, soak

FRONTS = {"soak": soak.Soak, "cancels": cancels.Cancels}


def run(spec, process):
    config = configured(spec["base"], spec.get("start", {}))
    topology.start(config, coordinator=spec["coordinator"], num_processes=spec["num_processes"], process=process,
                   cpu_devices=spec["cpu_devices"])
    compilation_cache.enable(config.compilation_cache, process, spec["num_processes"])
    host_reads.forbid(64 * 1024)
    failed = False
    for case in spec["cases"]:
        config = configured(spec["base"], spec.get("start", {}) | case["config"])
        topo = topology.build(config, jax.devices(), process)
        client, front, watch = topology.coordination_client(), functools.partial(Batch, case["input"], case["output"]), None
        if "front" in case:
            kind, arguments = case["front"]
            front = lambda *_: FRONTS[kind](case["output"], **arguments)
            watch = soak.Watch(f"{case['output']}.watch{process}", client, case["name"], process)
        with faults.injected(case.get("faults", []), process), watch or contextlib.nullcontext():
            error = program.serve(config, front, topo, client=client, name=case["name"])
        if process == 0:
            pathlib.Path(case["output"] + ".end").write_text(json.dumps(error))
        if error:
            logging.error("process %d: %s", process, error)
            failed = True
            break  # a cell that ended early may have left the processes out of step
    return failed


def configured(base, overrides):
    module, *variant = base
    config = importlib.import_module(f"configs.{module}").get_config(*variant)
    for key, value in overrides.items():
        node, *path = config, *key.split(".")
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = tuple(value) if isinstance(value, list) else value
    return config


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    code = 1
    try:
        code = int(run(json.loads(pathlib.Path(sys.argv[1]).read_text()), int(sys.argv[2])))
    except Exception:
        logging.exception("worker failed")
    finally:
        topology.leave(code)
