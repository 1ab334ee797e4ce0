"""Benchmarks, each beside what it is measured against in the same run.

  python -m launch.bench loop|engine|transfer [--repeats=5] [--json=FILE] [--plot=FILE] [--sizes=BYTES,...]

engine: one engine on this machine's device, SmolLM2-135M in float32 with random weights, beside Hugging Face transformers in
a process of its own where that is installed (the extra goldens).
  memory_bandwidth  GB/s of reading an array
  decode            tokens/s at a batch size, 128 positions of a cache of 2,048 in use; peer: transformers
  decode_bandwidth  GB/s of weights and cache in use that these steps read; peer: memory_bandwidth
  prefill           tokens/s of one prompt, up to its first token; peer: transformers

loop: the cost of the ordered log, with 4 processes on this machine (2 prefill and 2 decode engines, the tiny model) and with one
(interleaved, the tiny model and SmolLM2-135M in float32 with random weights).
  empty_plans   plans/s that all processes read; peer: keys/s that process 0 alone writes to the key-value store
  decode_plans  plans/s of one decode step while every slot decodes; peer: steps/s of the decode engines' bare program
  decode_steps  steps/s while every slot decodes; peer: the same
  idle_cpu      % of a core that a process uses while nothing is asked; the values are those of the processes

transfer: chunks of 64 KiB to 1 GiB (or --sizes) between two engines of CPU processes on this machine, by devices of each
process on either side (1 to 1, 2 to 2, 1 to 2, 2 to 1, and two processes of one device to two). From the source's call until
all is there; every process is told to begin at once. --plot draws it (the extra plots).
  transfer          GB/s; peers, in turns in the same processes: sum, a program that adds the chunk to zeros over the joined mesh;
                    host, to NumPy, to every process and onto the devices; tcp, one raw Python stream; memcpy
  transfer_latency  ms of the same
  transfer_checked  GB/s until the receiver has computed and compared the checksums, too; peer: unchecked
  bystander         us of a call in a process that takes no part
  decode_meanwhile  ms that SmolLM2-135M's decode steps take longer in total while the chunks of a 2,048-token prompt arrive; peer:
                    CPU ms of both processes for moving the same while nothing else runs

--json writes a list of {name, params, value, unit, peer, peer_value, ratio}; value and peer_value are medians, ratio is
value / peer_value. Without a peer the last three are null.
"""

import json

from absl import app, flags

from launch import bench_engine, bench_loop, bench_transfer
from launch.results import JSON, record

_REPEATS = flags.DEFINE_integer("repeats", 5, "measurements of each figure", lower_bound=1)
_SIZES = flags.DEFINE_list("sizes", [str(n) for n in bench_transfer.SIZES], "transfer: bytes of the chunks")
_PLOT = flags.DEFINE_string("plot", None, "transfer: file for the plot, .png or .svg")
BENCHMARKS = {"loop": lambda: bench_loop.run(_REPEATS.value), "engine": lambda: bench_engine.run(_REPEATS.value),
              "transfer": lambda: bench_transfer.run(_REPEATS.value, [int(n) for n in _SIZES.value])}


def main(argv):
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        raise app.UsageError(f"name one benchmark: {', '.join(BENCHMARKS)}; got {argv[1:]}")
    try:
        out = JSON.value and open(JSON.value, "w", encoding="utf-8")
        results = BENCHMARKS[argv[1]]()
    except (ValueError, OSError) as e:
        raise app.UsageError(str(e)) from None
    records = [record(*r) for r in results]
    if out:
        with out:
            json.dump(records, out, indent=2)
    if _PLOT.value:
        bench_transfer.plot(records, _PLOT.value)


if __name__ == "__main__":
    app.run(main)
