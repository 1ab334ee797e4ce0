"""One process of the cell: the same program on every host.

  python -m launch.main --config=configs/tiny.py --mode=batch --input=prompts.jsonl --output=out.jsonl \
      --coordinator_address=10.0.0.2:8476 --num_processes=2 --process_id=0

With --mode=chat process 0 talks with a person, the others serve.
"""

import functools
import signal

import jax
from absl import flags as absl_flags
from absl import logging

from disagg import compilation_cache, topology
from launch import flags
from launch.batch import Batch
from launch.chat import Chat
from launch.program import serve
from launch.supervise import restored_terminal


def main(argv):
    config, process = flags.CONFIG.value, flags.PROCESS_ID.value
    topology.start(config, coordinator=flags.COORDINATOR.value, num_processes=flags.NUM_PROCESSES.value, process=process,
                   cpu_devices=flags.CPU_DEVICES.value)
    process = jax.process_index()
    compilation_cache.enable(config.compilation_cache, process, jax.process_count())
    topo = topology.build(config, jax.devices(), process)
    for engine in (*topo.prefill, *topo.decode):
        logging.info("%s: processes %s, %d devices", engine.name, engine.processes, engine.mesh.size)
    return serve(config, front_end(), topo, client=topology.coordination_client())


def front_end():
    """How process 0 opens what takes the requests: see program.serve."""
    if flags.MODE.value == "batch":
        return functools.partial(Batch, flags.INPUT.value, flags.OUTPUT.value)
    return functools.partial(Chat, system=flags.SYSTEM.value, seed=flags.SEED.value, max_tokens=flags.MAX_TOKENS.value,
                             temperature=flags.TEMPERATURE.value, top_p=flags.TOP_P.value)


def run(argv):
    """main with its errors as one clear line, and an exit that waits for no other process."""
    if flags.MODE.value == "chat":
        if not absl_flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # a log would run through the conversation
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the chat takes it over: at once, without a traceback
    try:
        with restored_terminal():
            error = main(argv)
    except (ValueError, OSError, RuntimeError) as e:
        error = f"process {flags.PROCESS_ID.value or 0}: {e}"
    if error:
        logging.error("%s", error)
    topology.leave(1 if error else 0)


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    flags.run(run)
