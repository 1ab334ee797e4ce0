"""The flags of launch.main and launch.local, defined once."""

import sys

from absl import app, flags
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:variant]; override with --config.x.y=z")
MODE = flags.DEFINE_enum("mode", "batch", ["batch", "chat"], "batch: one request a line of --input, one answer a line of "
                         "--output, progress and a summary on standard error; chat: a conversation at process 0's terminal, or through its standard input and output")
INPUT = flags.DEFINE_string("input", None, "batch: JSON Lines file of requests in OpenAI's field names; '-' is standard "
                            "input")
OUTPUT = flags.DEFINE_string("output", None, "batch: JSON Lines file of answers, in the order of the input; '-' is standard "
                             "output")
SYSTEM = flags.DEFINE_string("system", None, "chat: what the model is told before the conversation")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "chat: limit of an answer (unset: what the conversation leaves of the "
                                  "cache)", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "chat: 0 is greedy", lower_bound=0, upper_bound=2)
TOP_P = flags.DEFINE_float("top_p", 0.95, "chat: sample from the likeliest tokens with this probability together",
                           lower_bound=0, upper_bound=1)
SEED = flags.DEFINE_integer("seed", None, "chat: the same conversation gets the same answers (unset: others every time)")

COORDINATOR = flags.DEFINE_string("coordinator_address", None,
                                  "ip:port of process 0 (unset: found by jax, or one process alone)")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "number of processes (unset: found by jax)", lower_bound=1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "number of this process (unset: found by jax)", lower_bound=0)
CPU_DEVICES = flags.DEFINE_integer("cpu_devices", None, "devices a process when it runs on CPU", lower_bound=1)
SLICE_NAME = flags.DEFINE_string("slice_name", None, "name of this process's slice, for config.prefill.slices and "
                                 "config.decode.slices by name")

flags.mark_flag_as_required("config")
_OF_MODE = {"batch": (INPUT, OUTPUT), "chat": (SYSTEM, MAX_TOKENS, TEMPERATURE, TOP_P, SEED)}


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
    for mode, its in _OF_MODE.items():
        for flag in its:
            if flag.present and mode != MODE.value:
                sys.exit(f"--{flag.name} belongs to --mode={mode}, got --mode={MODE.value}")
    return left


def _one_line(error):
    return " ".join(str(error).strip("\"'").split())
