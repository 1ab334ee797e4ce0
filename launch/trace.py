"""Runs a mixed load on this machine and draws what every engine did when.

  python -m launch.trace --folder=trace --config=configs/tiny.py
  python -m launch.trace --folder=trace --config=configs/smollm2.py:135m --config.model.dtype=float32 \
      --config.checkpoint=$(python -m launch.smollm2) --config.cache_length=2560 --long=2048

Short prompts begin first and go on decoding while long ones, of several chunks, are prefilled and moved. In the folder:
  trace.png      lanes of each engine's prefill chunks, transfers, checksums, writes and decode calls (needs the extra plots)
  trace.json     the same for ui.perfetto.dev or chrome://tracing
  figures.json   what is printed, as a list of {name, params, value, unit, peer, peer_value, ratio}
The folder also keeps the requests, the answers and the spans that each process wrote (config.debug.trace).
"""

import collections
import importlib.util
import json
import pathlib
import random
import statistics
import subprocess
import sys

from absl import flags

from disagg import roles
from launch import flags as launch_flags
from launch.results import record

_FOLDER = flags.DEFINE_string("folder", None, "where everything goes; made if it is not there")
_SHORT = flags.DEFINE_integer("short", 16, "tokens of a short prompt", lower_bound=1)
_LONG = flags.DEFINE_integer("long", None, "tokens of a long prompt (unset: all that the cache holds beside the new tokens)", lower_bound=1)
_NEW = flags.DEFINE_integer("new_tokens", 64, "tokens made for each prompt", lower_bound=2)
_PAIRS = flags.DEFINE_integer("pairs", 3, "long prompts, and as many pairs of short ones", lower_bound=1)
flags.mark_flag_as_required("folder")

KINDS = {"prefill": "prefill chunks", "local": "prefill of short prompts", "transfer": "transfers", "check": "checksums", "write": "writes", "decode": "decode calls"}


def requests(vocab_size, long, seed=0):
    """Input lines: after two short prompts always a long one, each of other tokens."""
    draw = random.Random(seed)
    prompt = lambda n: [draw.randrange(3, vocab_size) for _ in range(n)]
    return [{"prompt": prompt(n), "max_tokens": _NEW.value, "temperature": 0, "ignore_eos": True}
            for _ in range(_PAIRS.value) for n in (_SHORT.value, _SHORT.value, long)]


def read(folder):
    """The spans of all processes, with `begun` when the device, or the chunk's way, really began with it."""
    spans = [json.loads(line) for file in sorted(pathlib.Path(folder).glob("process*.jsonl")) for line in file.open()]
    spans.sort(key=lambda s: s["ended"])
    free = collections.defaultdict(float)
    for s in spans:
        device = {"prefill": "prefill", "local": "decode", "write": "decode", "decode": "decode"}.get(s["kind"])
        if device:
            s["begun"] = max(s["begun"], free[device, s["engine"]])
            free[device, s["engine"]] = s["ended"]
    computed = {s["number"]: s["ended"] for s in spans if s["kind"] == "prefill"}
    for s in spans:
        if s["kind"] == "transfer":  # a receiver may wait for a chunk before it is computed
            s["begun"] = min(max(s["begun"], computed.get(s["number"], 0)), s["ended"])
    return spans


def figures(spans):
    """Arguments of results.record.

    transfer_overlap      how much of each transfer's time its engines also computed
    transfer_time         from the chunk's computation to its arrival
    decode_step           of the calls during which a chunk moved, beside the others
    last_chunk_to_decode  of the longest prompts: from the end of the last chunk's computation to the first decode call with it,
                          beside 1.25 transfers of such a chunk and twice a decode call of that time
    """
    of = lambda kind: [s for s in spans if s["kind"] == kind]
    chunks, transfers, calls = of("prefill"), of("transfer"), of("decode")
    length = lambda s: s["ended"] - s["begun"]
    records = []
    if not transfers:
        return records
    moving = [(s["begun"], s["ended"]) for s in transfers]
    for kind, others in (("prefill", chunks), ("decode", calls)):
        busy = _union([(s["begun"], s["ended"]) for s in others])
        shared = [100 * sum(_shared(m, b) for b in busy) / max(m[1] - m[0], 1e-9) for m in moving]
        records.append(("transfer_overlap", {"with": kind}, "% of a transfer's time", shared, None, None))
    records.append(("transfer_time", {}, "ms", [1e3 * length(s) for s in transfers], None, None))
    apart = lambda call: not any(_shared((call["begun"], call["ended"]), m) for m in moving)
    alone, beside = ([1e3 * length(c) / c["steps"] for c in calls if apart(c) == a] for a in (True, False))
    if alone and beside:
        records.append(("decode_step", {}, "ms while a chunk moves", beside, "without", alone))

    written = {s["number"]: s for s in of("write") if s["last"]}
    tokens = {c["number"]: c["tokens"] for c in chunks}
    parts = collections.Counter(c["request"] for c in chunks)
    waits, bounds = [], []
    for chunk in chunks:
        if not chunk["last"] or chunk["number"] not in written or parts[chunk["request"]] < max(parts.values()):
            continue
        write = written[chunk["number"]]
        first = next((c for c in calls if c["engine"] == write["engine"] and c["begun"] >= write["ended"]), None)
        if first:
            same = [length(t) for t in transfers if t["engine"] == write["engine"] and tokens[t["number"]] == chunk["tokens"]]
            wait = chunk["ended"], first["begun"]
            running = [length(c) for c in calls if c["engine"] == write["engine"] and _shared((c["begun"], c["ended"]), wait)]
            waits.append(1e3 * (wait[1] - wait[0]))
            bounds.append(1e3 * (1.25 * statistics.median(same) + 2 * statistics.median(running or [length(first)])))
    if waits:
        records.append(("last_chunk_to_decode", {}, "ms", waits, "1.25 transfers and 2 decode calls", bounds))
    return records


def _union(intervals):
    merged = []
    for begun, ended in sorted(intervals):
        if merged and begun <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], ended)
        else:
            merged.append([begun, ended])
    return merged


def _shared(a, b):
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def _lanes(spans):
    """(engine, kind) -> its spans, each with the name it is shown by; the lanes from the prompts' side to the tokens'."""
    lanes = collections.defaultdict(list)
    for s in spans:
        role = "prefill" if s["kind"] == "prefill" else "decode"
        lanes[role, s["engine"], s["kind"]].append(s)
    order = lambda key: (key[0] == "decode", key[1], list(KINDS).index(key[2]))
    return {key: lanes[key] for key in sorted(lanes, key=order)}


def _label(s):
    if s["kind"] == "decode":
        return f"read {s['read']}"
    return f"request {s['request']}, chunk {s['number']}" if "request" in s else f"chunk {s['number']}, slot {s['slot']}"


def events(spans):
    """The spans as Chrome trace events: a process an engine, a thread a kind; times in microseconds from the first."""
    begin, made, engines = min(s["begun"] for s in spans), [], {}
    for (role, engine, kind), lane in _lanes(spans).items():
        pid, tid = engines.setdefault((role, engine), len(engines) + 1), list(KINDS).index(kind)
        made.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{role} {engine}"}})
        made.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": KINDS[kind]}})
        for s in lane:
            made.append({"ph": "X", "name": _label(s), "cat": kind, "pid": pid, "tid": tid, "ts": 1e6 * (s["begun"] - begin),
                         "dur": 1e6 * (s["ended"] - s["begun"]),
                         "args": {k: v for k, v in s.items() if k not in ("kind", "engine", "begun", "ended")}})
    return made


def plot(spans, file):
    """All of the run; the way of the longest prompt, from its first chunk to its first decode calls; that of its last chunk."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lanes, begin = _lanes(spans), min(s["begun"] for s in spans)
    requests = {s["number"]: s["request"] for s in spans if "request" in s}
    chunks = collections.defaultdict(list)
    for s in spans:
        if s["kind"] == "prefill":
            chunks[s["request"]].append(s)
    longest = max(chunks.values(), key=len)
    margin = 0.15 * (longest[-1]["ended"] - longest[0]["begun"])
    there = max(s["ended"] for s in spans if s.get("number") == longest[-1]["number"])
    tail = there - longest[-1]["ended"]
    windows = [(begin, max(s["ended"] for s in spans)), (longest[0]["begun"] - margin, there + margin),
               (longest[-1]["ended"] - 2 * tail, there + 4 * tail)]
    figure, panels = plt.subplots(3, 1, figsize=(15, 2 + 1.3 * len(lanes)), layout="constrained")
    for axes, (left, right) in zip(panels, windows):
        for row, lane in enumerate(lanes.values()):
            bars = [(s["begun"] - begin, s["ended"] - s["begun"]) for s in lane]
            colors = ["0.6" if s["kind"] == "decode" else f"C{requests.get(s['number'], 0) % 10}" for s in lane]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colors, edgecolor="white", linewidth=0.3)
        axes.set(xlim=(left - begin, right - begin), xlabel="seconds", yticks=range(len(lanes)),
                 yticklabels=[f"{role} {engine}: {KINDS[kind]}" for role, engine, kind in lanes])
        axes.invert_yaxis()
    panels[0].set_title("the whole run; a color a request")
    panels[1].set_title("the longest prompt")
    panels[2].set_title("its last chunk")
    figure.savefig(file, dpi=120)


def main(argv):
    from launch import program  # jax and the model only once the flags are right

    config = launch_flags.CONFIG.value
    folder = pathlib.Path(_FOLDER.value)
    try:
        roles.of(config)
        room = config.cache_length - _NEW.value
        if (long := room if _LONG.value is None else _LONG.value) > room:
            raise ValueError(f"--long={long} and --new_tokens={_NEW.value} do not fit in config.cache_length={config.cache_length}")
        vocab_size = program.make_model(config).config.vocab_size
        folder.mkdir(parents=True, exist_ok=True)
        for old in (folder / "spans").glob("process*.jsonl"):
            old.unlink()
        (folder / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests(vocab_size, long)))
    except (ValueError, OSError) as e:
        print(f"trace: {e}", file=sys.stderr)
        return 2
    given = [a for a in sys.argv[1:] if a.lstrip("-").startswith("config")]
    code = subprocess.call([sys.executable, "-m", "launch.local", *given, f"--config.debug.trace={folder / 'spans'}",
                            f"--input={folder / 'requests.jsonl'}", f"--output={folder / 'answers.jsonl'}"])
    if code:
        return code
    spans = read(folder / "spans")
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events(spans), "displayTimeUnit": "ms"}))
    records = [record(*r) for r in figures(spans)]
    (folder / "figures.json").write_text(json.dumps(records, indent=2))
    if importlib.util.find_spec("matplotlib"):
        plot(spans, folder / "trace.png")
    else:
        print("trace: no trace.png: matplotlib is not installed (the extra plots)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    launch_flags.run(main)
