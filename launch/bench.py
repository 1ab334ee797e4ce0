"""Benchmarks, each beside what it is measured against in the same run.

  python -m launch.bench loop [--repeats=5] [--json=FILE]

loop: the cost of the ordered log with 4 processes on this machine (2 prefill and 2 decode engines, the tiny model).
  empty_plans   plans/s that all processes read; peer: keys/s that process 0 alone writes to the key-value store
  decode_plans  plans/s of one decode step while every slot decodes; peer: steps/s of the decode engines' bare program

--json writes a list of {name, params, value, unit, peer, peer_value, ratio}; value and peer_value are medians, ratio is
value / peer_value.
"""

import json
import statistics

from absl import app, flags

from launch import bench_loop

_JSON = flags.DEFINE_string("json", None, "file for the results as JSON")
_REPEATS = flags.DEFINE_integer("repeats", 5, "measurements of each figure", lower_bound=1)
BENCHMARKS = {"loop": bench_loop.run}


def record(name, params, unit, values, peer, peer_values):
    """One result, with the spread as printed: median (least to largest)."""
    value, peer_value = statistics.median(values), statistics.median(peer_values)
    print(f"{name} {params}: {value:.0f} {unit} ({min(values):.0f} to {max(values):.0f}); {peer}: {peer_value:.0f} "
          f"({min(peer_values):.0f} to {max(peer_values):.0f}); ratio {value / peer_value:.3f}")
    return {"name": name, "params": params, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value,
            "ratio": value / peer_value}


def main(argv):
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        raise app.UsageError(f"name one benchmark: {', '.join(BENCHMARKS)}; got {argv[1:]}")
    records = [record(*r) for r in BENCHMARKS[argv[1]](_REPEATS.value)]
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as f:
            json.dump(records, f, indent=2)


if __name__ == "__main__":
    app.run(main)
