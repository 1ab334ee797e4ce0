"""Benchmarks, each beside what it is measured against in the same run.

  python -m launch.bench loop|engine [--repeats=5] [--json=FILE]

engine: one engine on this machine's device, SmolLM2-135M in float32 with random weights, beside Hugging Face transformers in
a process of its own where that is installed (the extra goldens).
  memory_bandwidth  GB/s of reading an array
  decode            tokens/s at a batch size, 128 positions of a cache of 2,048 in use; peer: transformers
  decode_bandwidth  GB/s of weights and cache in use that these steps read; peer: memory_bandwidth
  prefill           tokens/s of one prompt, up to its first token; peer: transformers

loop: the cost of the ordered log with 4 processes on this machine (2 prefill and 2 decode engines, the tiny model).
  empty_plans   plans/s that all processes read; peer: keys/s that process 0 alone writes to the key-value store
  decode_plans  plans/s of one decode step while every slot decodes; peer: steps/s of the decode engines' bare program

--json writes a list of {name, params, value, unit, peer, peer_value, ratio}; value and peer_value are medians, ratio is
value / peer_value. Without a peer the last three are null.
"""

import json
import statistics

from absl import app, flags

from launch import bench_engine, bench_loop

_JSON = flags.DEFINE_string("json", None, "file for the results as JSON")
_REPEATS = flags.DEFINE_integer("repeats", 5, "measurements of each figure", lower_bound=1)
BENCHMARKS = {"loop": bench_loop.run, "engine": bench_engine.run}


def record(name, params, unit, values, peer, peer_values):
    """One result, with the spread as printed: median (least to largest)."""
    shown = lambda values: f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
    value, peer_value, ratio = statistics.median(values), None, None
    line = " ".join([name, *(f"{k} {v}" for k, v in params.items())]) + f": {shown(values)} {unit}"
    if peer:
        peer_value = statistics.median(peer_values)
        ratio = value / peer_value
        line += f"; {peer}: {shown(peer_values)}; ratio {ratio:.3f}"
    print(line, flush=True)
    return {"name": name, "params": params, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value, "ratio": ratio}


def main(argv):
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        raise app.UsageError(f"name one benchmark: {', '.join(BENCHMARKS)}; got {argv[1:]}")
    records = [record(*r) for r in BENCHMARKS[argv[1]](_REPEATS.value)]
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as f:
            json.dump(records, f, indent=2)


if __name__ == "__main__":
    app.run(main)
