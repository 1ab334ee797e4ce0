"""Runs launch.main on this machine, as many processes as the config needs, on CPU devices.

  python -m launch.local --config=configs/tiny.py --input=requests.jsonl --output=answers.jsonl
  python -m launch.local --config=configs/tiny.py --mode=chat

It takes the flags of launch.main, gives every process its number, the address of process 0 and its CPU devices, and
ends all of them when one fails. Process 0 has the standard input and output; the lines of the others, and all logs,
come on standard error with the process's number before them. Where that is a terminal process 0 has it itself, for its
progress bar, and its lines have no number. In chat mode it always has it, and Ctrl-C as well; should it not react any
more, three Ctrl-C within two seconds or one Ctrl-\\ end everything.
"""

import os
import re
import socket
import sys

from absl import flags

from disagg import roles
from launch import flags as launch_flags
from launch import supervise

_KEEP_GOING = flags.DEFINE_boolean("keep_going", False, "when a process dies, go on with the others until process 0 "
                                   "ends (otherwise end them all)")
_OWN = (launch_flags.COORDINATOR, launch_flags.NUM_PROCESSES, launch_flags.PROCESS_ID, launch_flags.CPU_DEVICES)

for _flag in flags.FLAGS.get_key_flags_for_module(launch_flags):
    if _flag.name not in {own.name for own in _OWN}:
        flags.declare_key_flag(_flag.name)  # so that --help lists it


def main(argv):
    for flag in _OWN:
        if flag.present:
            return _refuse(f"--{flag.name} is set by launch.local itself")
    try:
        num_processes, cpu_devices = roles.local_processes(launch_flags.CONFIG.value)
    except ValueError as e:
        return _refuse(e)
    arguments = [a for a in sys.argv[1:] if not re.fullmatch("--?(no)?keep_going(=.*)?", a)]
    port = _free_port()
    commands = [[sys.executable, "-m", "launch.main", *arguments, f"--coordinator_address=127.0.0.1:{port}",
                 f"--num_processes={num_processes}", f"--process_id={i}", f"--cpu_devices={cpu_devices}"]
                for i in range(num_processes)]
    chat = launch_flags.MODE.value == "chat"
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"} if chat else {}  # XLA's warnings stay out of the conversation
    return supervise.run(commands, env={**quiet, **os.environ, "JAX_PLATFORMS": "cpu"}, keep_going=_KEEP_GOING.value,
                         interactive=chat, shared_terminal=not chat and sys.stderr.isatty())


def _refuse(why):
    print(f"local: {why}", file=sys.stderr)
    return 2


def _free_port():
    """A port that was free a moment ago; process 0 says so if another program takes it first."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    launch_flags.run(main)
