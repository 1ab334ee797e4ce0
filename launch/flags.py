"""The flags of launch.main and launch.local, defined once."""

import sys

from absl import app, flags
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:variant]; override with --config.x.y=z")
MODE = flags.DEFINE_enum("mode", "batch", ["batch"], "batch: one request a line of --input, one answer a line of --output")
INPUT = flags.DEFINE_string("input", None, "JSON Lines file of requests in OpenAI's field names; '-' is standard input")
OUTPUT = flags.DEFINE_string("output", None, "JSON Lines file of answers, in the order of the input; '-' is standard output")

COORDINATOR = flags.DEFINE_string("coordinator_address", None,
                                  "ip:port of process 0 (unset: found by jax, or one process alone)")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "number of processes (unset: found by jax)", lower_bound=1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "number of this process (unset: found by jax)", lower_bound=0)
CPU_DEVICES = flags.DEFINE_integer("cpu_devices", None, "devices a process when it runs on CPU", lower_bound=1)
SLICE_NAME = flags.DEFINE_string("slice_name", None, "name of this process's slice, for config.prefill.slices and "
                                 "config.decode.slices by name")

flags.mark_flag_as_required("config")


def run(main):
    """app.run with errors in the config's name, fields and values as one line, and leftover arguments refused."""
    app.run(main, flags_parser=_parse)


def _parse(argv):
    try:
        left = app.parse_flags_with_usage(argv)
        CONFIG.value.mode  # a file that cannot be loaded says so only when it is used
    except AttributeError as e:
        sys.exit(f"the config has no such field: {_one_line(e)}")
    except (KeyError, TypeError, ValueError, OSError) as e:
        sys.exit(f"the config cannot be used: {_one_line(e)}")
    if len(left) > 1:
        sys.exit(f"arguments not understood: {' '.join(left[1:])}")
    return left


def _one_line(error):
    return " ".join(str(error).strip("\"'").split())
