"""The load benchmark (see launch.bench): started with arguments it is one process of a cell, pinned to a core of its own."""

import os
import sys

if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})  # before jax is there, so that all its threads are born on this core

import collections
import dataclasses
import functools
import itertools
import json
import pathlib
import random
import statistics
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from configs import smollm2, tiny
from disagg import cell, compilation_cache, topology
from disagg.scheduler import Request, read_length
from launch import bench_engine, program, supervise

MODES = ("disaggregated", "interleaved")
PERCENTILES = (1, *range(5, 100, 5), 98, 99, 100)
# model: prompt's tokens and their weights, tokens of an answer. tiny is for tests.
MIXTURES = {"smollm2": ({64: 3, 1024: 1}, 64), "tiny": ({16: 3, 160: 1}, 8)}
SHOWN = (50, 90, 99, 100)  # of them, in the table
ATTAINED = 0.9             # share of requests within the limits that goodput asks for: DistServe (arXiv:2401.09670), section 2
THREADS = 2                # of XLA's pool, on one core: in a pool of one thread a transfer was seen never to arrive
STEPS = 12                 # bare decode steps of a batch, after two that are not counted
BURST_S = 0.005            # tokens of one decode step are handed out within it; no step is as short


@dataclasses.dataclass(frozen=True)
class Load:
    """rates: shares of the capacity. seconds: of arrivals at a rate. ttft_limit, itl_limit: multiples of the unloaded engine's.
    model: of MIXTURES."""

    rates: tuple[float, ...]
    seconds: float
    ttft_limit: float
    itl_limit: float
    model: str

    def __post_init__(self):
        if not self.rates or min(self.rates) <= 0:
            raise ValueError(f"--rates must be positive, got {', '.join(map(str, self.rates))}")

    @property
    def prompts(self):
        return MIXTURES[self.model][0]

    @property
    def tokens(self):
        return MIXTURES[self.model][1]

    def config(self, mode):
        """Of a cell of two engines with a core each. A step is a call, so that every token is reported by itself."""
        c = tiny.get_config() if self.model == "tiny" else smollm2.get_config("135m")
        if self.model == "smollm2":
            c.model.dtype = "float32"
            c.cache_length, c.chunk, c.buckets = 1152, 128, (64, 128)
            c.decode.slots, c.decode.ahead = 8, 1
        c.mode, c.decode.steps = mode, 1
        c.decode.engines = 2 if mode == "interleaved" else 1
        return c


def run(repeats, load):
    """-> arguments of results.record for each figure, after the table. Raises ValueError where there is one core alone."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise ValueError("load needs two cores, one for each engine")
    given = {mode: None for mode in MODES}
    bare = None
    for mode in MODES:
        job = {"load": dataclasses.asdict(load), "mode": mode, "repeats": repeats, "bare": bare}
        given[mode] = _start(job, cores)
        bare = given[mode]["bare"]
    bare = Bare(**bare)
    figures = {mode: _figures(load, bare, given[mode]["runs"]) for mode in MODES}
    _print(load, bare, figures)
    return _results(bare, figures)


def _start(job, cores):
    with tempfile.TemporaryDirectory() as folder:
        job |= {"port": topology.free_port(), "out": str(pathlib.Path(folder) / "out.json")}
        commands = [[sys.executable, "-m", "launch.bench_load", str(core), str(i), json.dumps(job)] for i, core in enumerate(cores)]
        if code := supervise.run(commands, env=os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": str(THREADS)}):
            raise SystemExit(code)
        return json.loads(pathlib.Path(job["out"]).read_text())


# What the unloaded engines need.


@dataclasses.dataclass(frozen=True)
class Bare:
    """Seconds of one engine on its core. prefills: [[prompt's tokens, s]] while the other core is idle. steps: [[positions read,
    slots in use, s]], the same; beside: while the other core computes prompts."""

    prefills: list
    steps: list
    beside: list

    def prefill(self, tokens):
        return dict(self.prefills)[tokens]

    def step(self, read, batch):
        """Between the batches that were measured, in a straight line."""
        batches, seconds = zip(*[(n, s) for r, n, s in self.steps if r == read])
        return float(np.interp(batch, batches, seconds))

    @property
    def reads(self):
        return sorted({read for read, *_ in self.steps})

    @property
    def slots(self):
        return max(n for _, n, _ in self.steps)

    def capacity(self, load):
        """Requests/s at which both cores would never wait, with nothing to do but prompts and decode steps of full batches, each of
        which has a longest request in it."""
        prefill = sum(w * self.prefill(n) for n, w in load.prompts.items()) / sum(load.prompts.values())
        step = self.step(read_length(self.reads, max(load.prompts) + load.tokens - 1), self.slots)
        return 2 / (prefill + (load.tokens - 1) * step / self.slots)


def _measure_bare(load, config, model, client, topo):
    """-> Bare, on every process."""
    limits = cell.Limits.of(config, model.config.max_length)
    form = cell.chunk_format(config, model, topo, limits)
    prefill, decode, _ = cell.load_engines(model, topo, limits, form, _random(model))
    stop, found = [], {}
    prompts = {n: functools.partial(_prompt, prefill, limits, n) for n in load.prompts}
    if prefill:
        found["prefills"] = [[n, _median(work, 3)] for n, work in prompts.items()]
    client.wait_at_barrier("prefilled", 600_000)
    if decode:
        found["steps"] = _steps(decode, limits)
    client.wait_at_barrier("stepped", 600_000)
    if decode:
        found["beside"] = _steps(decode, limits)
        client.key_value_set("beside/done", "1")
    elif prefill:
        while not client.key_value_dir_get("beside/"):
            prompts[max(prompts)]()
    for name, value in found.items():
        client.key_value_set(f"bare/{name}", json.dumps(value))
    return Bare(**{name: json.loads(client.blocking_key_value_get(f"bare/{name}", 600_000)) for name in ("prefills", "steps", "beside")})


def _random(model):
    """load(shardings) of random weights: see cell.run."""
    return lambda shardings: jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))


def _prompt(engine, limits, tokens):
    """Compute one prompt, alone, as the scheduler has it done."""
    bucket = next((b for b in limits.buckets if b >= tokens), None)
    if bucket:
        return jax.block_until_ready(engine.run_prompts([[1] * tokens], [bench_engine.GREEDY], bucket, 1, 0, 0))
    for start in range(0, tokens, limits.buckets[-1]):
        part = min(limits.buckets[-1], tokens - start)
        out = engine.run([1] * part, start, read_length(limits.reads, max(start, 1)), start + part == tokens, bench_engine.GREEDY, 0, 0)
    return jax.block_until_ready(out)


def _steps(engine, limits):
    """[[positions read, slots in use, seconds of a step]]."""
    ticket, found = jnp.zeros(3, jnp.int32), []
    for read, batch in itertools.product(limits.reads, sorted({1, -(-limits.slots // 2), limits.slots})):
        for slot in range(limits.slots):
            engine.activate(ticket, slot, read // 2, limits.cache_length if slot < batch else 0, [], bench_engine.GREEDY)
        found.append([read, batch, _median(lambda: np.asarray(engine.run(read, 1)[0]), STEPS, untimed=2)])
    return found


def _median(work, times, untimed=1):
    seconds = []
    for _ in range(untimed + times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[untimed:])


# One process of a cell.


def _worker(process, job):
    load = Load(**job["load"])
    config = load.config(job["mode"])
    topology.start(config, coordinator=f"127.0.0.1:{job['port']}", num_processes=2, process=process, cpu_devices=1)
    compilation_cache.enable(config.compilation_cache, process, 2)
    client = topology.coordination_client()
    topo = topology.build(config, jax.devices(), process)
    model = bench_engine.smollm2_model() if load.model == "smollm2" else program.make_model(config)
    bare = Bare(**job["bare"]) if job["bare"] else _measure_bare(load, config, model, client, topo)
    runs, rates = [], [rate * bare.capacity(load) for rate in load.rates]

    def front(leader):
        _offer(leader, load, rates[0], 0, 2, model.config.vocab_size)  # what a first request costs is no part of the load
        for repeat, rate in itertools.product(range(job["repeats"]), rates):
            runs.append({"rate": rate, "repeat": repeat, "requests": _offer(leader, load, rate, repeat, None, model.config.vocab_size)})

    if error := cell.run(config, lambda: (model, _random(model), front), topo, client=client):
        raise RuntimeError(error)
    if (found := (_pool_threads(), len(os.sched_getaffinity(0)))) != (THREADS, 1):
        raise RuntimeError(f"process {process} is to compute in {THREADS} threads on one core, not {found[0]} on {found[1]}")
    if process == 0:
        pathlib.Path(job["out"]).write_text(json.dumps({"bare": dataclasses.asdict(bare), "runs": runs}))


def _pool_threads():
    return sum(task.read_text().startswith("tf_XLAEigen") for task in pathlib.Path("/proc/self/task").glob("*/comm"))


def arrivals(load, rate, seed):
    """[(s, prompt's tokens)] of Poisson arrivals, at least one. A seed gives the same at each rate, only faster."""
    draw, at, found = random.Random(seed), 0.0, []
    while True:
        at += draw.expovariate(1.0) / rate
        if at >= load.seconds and found:
            return found
        found.append((at, draw.choices(*zip(*load.prompts.items()))[0]))


def _offer(leader, load, rate, seed, most, vocabulary):
    """Submit the arrivals (the first `most`), each at its time, and wait for all answers; -> of each {"prompt": tokens, "at": when it
    should arrive, "times": when each token was there}, in seconds of one clock."""
    ended, requests, begun = threading.Semaphore(0), [], time.monotonic()
    for at, tokens in arrivals(load, rate, seed)[:most]:
        number, draw = leader.new_id(), random.Random(f"{seed} {len(requests)}")
        made = {"prompt": tokens, "at": begun + at, "times": [], "end": None}
        requests.append(made)
        prompt = tuple(draw.choices(range(vocabulary), k=tokens))

        def handle(kind, *details, made=made):
            if kind == "tokens":
                made["times"] += [time.monotonic()] * len(details[0])
            else:
                made["end"] = kind, *details
                ended.release()
        time.sleep(max(0.0, made["at"] - time.monotonic()))
        leader.submit(Request(number, prompt, load.tokens, (), (0, 0.0, 0, 1.0)), handle)
    for _ in requests:
        ended.acquire()
    if failed := [r["end"] for r in requests if r["end"][0] != "finish"]:
        raise RuntimeError(f"{len(failed)} requests were not answered, the first: {failed[0]}")
    return requests


# The figures.


def _figures(load, bare, runs):
    """{rate: {name: [values of a run] for each of the runs at it}}, lists of a request's or a gap's values, in seconds."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for r in runs:
        for name, values in _of_run(load, bare, r["requests"]).items():
            found[r["rate"]][name].append(values)
    return found


def _of_run(load, bare, requests):
    """itl: of all tokens after the first. normalised: the same in bare steps of what was decoding. later: normalised, without the
    second token, which has waited for the chunk's way and its writing, too."""
    first = [r["times"][0] - r["at"] for r in requests]
    mean = [(r["times"][-1] - r["times"][0]) / (load.tokens - 1) for r in requests]
    within = [ttft <= load.ttft_limit * bare.prefill(r["prompt"]) and itl <= load.itl_limit * _unloaded_step(load, bare, r["prompt"])
              for r, ttft, itl in zip(requests, first, mean)]
    gaps, steps = zip(*_gaps(bare, requests))
    normalised = [gap / step for gap, step in zip(gaps, steps)]
    later = [n for i, n in enumerate(normalised) if i % (load.tokens - 1)]
    end = max(r["times"][-1] for r in requests)
    return {"ttft": first, "itl": gaps, "normalised": normalised, "later": later, "attainment": sum(within) / len(within),
            "tokens_per_s": load.tokens * len(requests) / (end - min(r["at"] for r in requests))}


def _unloaded_step(load, bare, prompt):
    return bare.step(read_length(bare.reads, prompt + load.tokens - 1), 1)


def _gaps(bare, requests):
    """[(s, seconds of a bare step)] of every token after the first, request by request. Which engine made it nobody says, but
    the tokens of one step are handed out at once: those are its batch, and the longest of them says what it has read."""
    made = sorted((at, i, n) for i, r in enumerate(requests) for n, at in enumerate(r["times"]) if n)
    steps, burst = {}, []

    def close():
        read = read_length(bare.reads, max(requests[i]["prompt"] + n - 1 for _, i, n in burst))
        steps.update({(i, n): bare.step(read, len(burst)) for _, i, n in burst})
    for token in made:
        if burst and (token[0] - burst[-1][0] > BURST_S or token[1] in {i for _, i, _ in burst}):
            close()
            burst = []
        burst.append(token)
    close()
    return [(b - a, steps[i, n]) for i, r in enumerate(requests) for n, (a, b) in enumerate(itertools.pairwise(r["times"]), 1)]


def _goodput(figures, repeat):
    """The highest rate up to which the share of requests within the limits was enough; 0 where it never was."""
    enough = itertools.takewhile(lambda rate: figures[rate]["attainment"][repeat] >= ATTAINED, sorted(figures))
    return max(enough, default=0.0)


def _percentile(runs, percentile):
    return [float(np.percentile(values, percentile)) for values in runs]


def _print(load, bare, figures):
    """The table; percentiles are medians over the repeats."""
    print("bare, ms: " + ", ".join([f"prompt of {n} {1e3 * s:.0f}" for n, s in bare.prefills] + [
        f"step of {batch} reading {read} {1e3 * s:.1f} ({1e3 * beside:.1f} beside prompts)"
        for (read, batch, s), (*_, beside) in zip(bare.steps, bare.beside)]) + f"; capacity {bare.capacity(load):.3f} requests/s")
    columns = (("ttft", "TTFT, s", 1, ".2f"), ("itl", "ITL, ms", 1e3, ".0f"), ("normalised", "ITL, steps", 1, ".2f"),
               ("later", "from the third token", 1, ".2f"))
    print(f"{'':24}" + "".join(f"{title:>28}" for _, title, *_ in columns))
    print(f"{'requests/s':>10} {'mode':13}" + f"{'p50':>7}{'p90':>7}{'p99':>7}{'max':>7}" * len(columns) + "  within  tokens/s")
    for rate, mode in itertools.product(sorted(figures[MODES[0]]), MODES):
        of = figures[mode][rate]
        cells = [f"{statistics.median(_percentile(of[name], p)) * scale:7{form}}" for name, _, scale, form in columns for p in SHOWN]
        print(f"{rate:10.3f} {mode:13}" + "".join(cells) + f"{statistics.median(of['attainment']):8.0%}{statistics.median(of['tokens_per_s']):10.1f}")
    print(f"within: TTFT up to {load.ttft_limit:g} x the bare prompt's and a request's mean ITL up to {load.itl_limit:g} x a bare step of one", flush=True)


def _results(bare, figures):
    ours, theirs = (figures[mode] for mode in MODES)
    names = {"ttft": ("ttft", 1e3, "ms"), "itl": ("itl", 1e3, "ms"), "normalised": ("itl_normalised", 1, "bare steps"),
             "later": ("itl_normalised_from_third", 1, "bare steps")}
    for read, batch, seconds in bare.steps:
        beside = next(s for *what, s in bare.beside if what == [read, batch])
        yield "bare_step", {"read": read, "batch": batch}, "ms", [1e3 * seconds], "beside_prompts", [1e3 * beside], False
    for tokens, seconds in bare.prefills:
        yield "bare_prompt", {"tokens": tokens}, "ms", [1e3 * seconds], None, None, False
    for rate in sorted(ours):
        params = {"mode": MODES[0], "rate": rate}
        for (of, (name, scale, unit)), p in itertools.product(names.items(), PERCENTILES):
            values = ([scale * v for v in _percentile(figures[rate][of], p)] for figures in (ours, theirs))
            yield name, params | {"percentile": p}, unit, next(values), MODES[1], next(values), p == 99
        for name, unit in (("attainment", "of requests"), ("tokens_per_s", "tokens/s")):
            yield name, params, unit, ours[rate][name], MODES[1], theirs[rate][name], False
    repeats = range(len(ours[min(ours)]["attainment"]))
    goodput = [[_goodput(of, repeat) for repeat in repeats] for of in (ours, theirs)]
    yield "goodput", {"mode": MODES[0]}, "requests/s", goodput[0], MODES[1], goodput[1]


def plot(records, file):
    """Draw the latencies' distributions and, over the rate, the share within the limits, as an image in the format of the file's name."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt, ticker

    figure, axes = plt.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    panels = dict(zip(("ttft", "itl_normalised", "attainment"), axes))
    rates = sorted({r["params"]["rate"] for r in records if "rate" in r["params"]})
    colour = {rate: plt.cm.viridis(i / max(1, len(rates) - 1)) for i, rate in enumerate(rates)}
    for value, mode, style in (("value", MODES[0], "-"), ("peer_value", MODES[1], "--")):
        of = lambda name, rate: [r for r in records if r["name"] == name and r["params"]["rate"] == rate]
        for name, rate in itertools.product(("ttft", "itl_normalised"), rates):
            line = of(name, rate)
            panels[name].plot([r[value] for r in line], [r["params"]["percentile"] for r in line], style, color=colour[rate],
                              label=f"{rate:.2f}/s {mode}")
        shares = [of("attainment", rate)[0][value] * 100 for rate in rates]
        panels["attainment"].plot(rates, shares, style, color="black", marker="o", label=mode)
    panels["attainment"].axhline(100 * ATTAINED, color="grey", linewidth=0.8)
    for name, title, label in (("ttft", "time to first token", "ms"), ("itl_normalised", "between tokens", "bare decode steps"),
                               ("attainment", "requests within the limits", "requests/s")):
        panels[name].set(title=title, xlabel=label, ylabel="%")
        if name != "attainment":
            panels[name].set_xscale("log")
            panels[name].xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            panels[name].xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            panels[name].xaxis.set_minor_formatter(ticker.NullFormatter())
        panels[name].grid(alpha=0.3)
        panels[name].legend(fontsize=7)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    logging.set_verbosity(logging.ERROR)
    _worker(int(sys.argv[2]), json.loads(sys.argv[3]))
    topology.leave(0)
