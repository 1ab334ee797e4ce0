"""Discrete-event simulation: the scheduler itself, against engines whose times come from a table of costs.

  python -m launch.simulate --config=configs/llama2.py:7b --config.prefill.engines=4 --config.decode.engines=4 --rate=100

It shows what a job of any size would do with a load, in what order things happen, and what the scheduler costs: nothing is
computed, no device is needed. --costs=FILE.json replaces costs by name (see Costs), --prompts and --answers are mixtures of
lengths with weights, arrivals are Poisson. Times are the simulation's own; `plan` and `scheduler` are this machine's.
"""

import collections
import dataclasses
import heapq
import itertools
import json
import random
import statistics
import time

from absl import flags

from disagg.cell import Limits
from disagg.scheduler import Request
from launch import flags as launch_flags
from launch.results import JSON

_REQUESTS = flags.DEFINE_integer("requests", 1000, "requests in all", lower_bound=1)
_RATE = flags.DEFINE_float("rate", 10.0, "requests a second", lower_bound=1e-6)
_PROMPTS = flags.DEFINE_list("prompts", ["64:3", "1024:1"], "tokens of prompts, each with its weight")
_ANSWERS = flags.DEFINE_list("answers", ["64:1"], "tokens of answers, each with its weight")
_LIMIT = flags.DEFINE_integer("limit", None, "max_tokens of the requests, which the scheduler sees (unset: the longest answer)", lower_bound=1)
_LOAD_SEED = flags.DEFINE_integer("load_seed", 0, "of arrivals and lengths")
_COSTS = flags.DEFINE_string("costs", None, "JSON file: an object of costs")

TOKEN, STOP = 1, 2  # what simulated engines make


@dataclasses.dataclass(frozen=True)
class Costs:
    """What engines and the log take, in seconds but for row_bytes.

    The defaults are worked out, not measured, for Llama 2 7B in bfloat16 on 8 TPU v5e from their published peaks (197 Tflop/s and
    819 GB/s a chip): weights of 13.5 GB read once a call, 13.5 Gflop a prompt token at half of the peak, 512 KiB of KV a position.
    """

    prefill_call: float = 2.1e-3      # of one prefill call, for its weights
    prefill_position: float = 17e-6   # ... and for each position that it computes, with padding
    step: float = 2.1e-3              # of one decode step, for its weights
    step_position: float = 80e-9      # ... and for each position of each slot that it reads
    write: float = 100e-6             # of one chunk or prompt into its slot
    transfer: float = 1e-3            # of one chunk's way
    byte: float = 100e-12             # ... and for each byte, on either engine's side one chunk after the other
    row_bytes: int = 524288           # of one position of the cache
    log: float = 500e-6               # from a plan to the engines; from an engine's result to the leader
    plan: float = 500e-6              # from one plan to the next at least

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(f"cost {name} must be a number, at least 0, got {value!r}")


@dataclasses.dataclass
class Outcome:
    """Of one request; times in seconds from its submission, gaps between two reports of its tokens."""

    submitted: float
    tokens: int = 0
    first: float | None = None
    last: float | None = None
    gap: float = 0.0               # the longest
    end: str | None = None         # finish reason, or what else became of it


class _Slot:
    def __init__(self):
        self.request, self.left, self.made = None, 0, 0


class Simulation:
    """submit requests and cancellations, then run; `outcomes` has what became of each request, `busy` the seconds that each engine
    computed, `now` the time."""

    def __init__(self, limits, *, prefill, decode, interleaved=False, costs=Costs(), speeds=None):
        """prefill, decode: numbers of engines; interleaved: of the second. speeds: {(role, index): factor} of slower ones (over 1)."""
        engines = range(decode), range(decode if interleaved else prefill)
        self.decode = [[d] for d in engines[0]]
        self.prefill = self.decode if interleaved else [[decode + p] for p in engines[1]]
        self.interleaved, self.limits, self.costs, self.speeds = interleaved, limits, costs, speeds or {}
        self._bytes = {bucket: bucket * costs.row_bytes for bucket in limits.buckets}
        self.scheduler = limits.scheduler(self.prefill, self.decode, interleaved, self._bytes)
        self.now, self.outcomes, self.busy = 0.0, {}, collections.Counter()
        self.plan_s, self.report_s, self.plans = [], 0.0, 0
        self._coming, self._order = [], itertools.count()
        self._lengths = {}                        # request id -> tokens of its answer
        self._slots = [[_Slot() for _ in range(limits.slots)] for _ in self.decode]
        self._free = collections.Counter()        # device or side of a link -> when it is free
        self._chunks = {}                         # transfer -> (when computed, its requests, whether they end in it)
        self._next_plan, self._planning = 0.0, False

    def submit(self, request, answer, at):
        """answer: tokens that the model makes, the last of them STOP, if the request's limit lets it."""
        self._lengths[request.id] = answer
        self._at(at, self._submit, request)

    def cancel(self, request_id, at):
        self._at(at, self._cancel, request_id)

    def run(self):
        """To the end. Raises AssertionError if a request has not ended, or ended twice, or not with its answer."""
        while self._coming:
            self.now = self._coming[0][0]
            began = time.perf_counter()
            while self._coming and self._coming[0][0] <= self.now:
                *_, what, args = heapq.heappop(self._coming)
                what(*args)
            self.report_s += time.perf_counter() - began
            self.scheduler.expire(self.now)
            self._hand_out()
            if self.now >= self._next_plan:
                self._plan()
            elif not self._planning:
                self._planning = True
                self._at(self._next_plan, lambda: None)
        assert self.scheduler.idle and all(o.end for o in self.outcomes.values()), "requests are left"

    def _at(self, when, what, *args):
        heapq.heappush(self._coming, (when, next(self._order), what, args))

    # The leader.

    def _submit(self, request):
        self.outcomes[request.id] = Outcome(self.now)
        self.scheduler.submit(request, self.now)
        if request.timeout is not None:
            self._at(self.now + request.timeout, lambda: None)

    def _cancel(self, request_id):
        self.scheduler.cancel(request_id)
        if not self.outcomes[request_id].end:
            self.outcomes[request_id].end = "cancelled"

    def _plan(self):
        began = time.perf_counter()
        ops = self.scheduler.plan()
        self.plan_s.append(time.perf_counter() - began)
        self._planning = bool(ops)
        self._hand_out()
        if ops:
            self.plans += 1
            self._next_plan = self.now + self.costs.plan
            self._at(self._next_plan, lambda: None)
            for name, *args in ops:
                getattr(self, f"op_{name}")(self._next_plan + self.costs.log, *args)

    def _hand_out(self):
        events, self.scheduler.events = self.scheduler.events, []
        for kind, request_id, *details in events:
            o, since = self.outcomes[request_id], self.now - self.outcomes[request_id].submitted
            assert o.end is None, f"{kind} of request {request_id} after its end: {o.end}"
            if kind == "tokens":
                o.tokens += len(details[0])
                assert o.tokens <= self._lengths[request_id]
                if o.first is None:
                    o.first = since
                else:
                    o.gap = max(o.gap, since - o.last)
                o.last = since
            elif kind == "finish":
                assert o.tokens == self._lengths[request_id] or details[0] == "length"
                o.end = details[0]
            else:
                o.end = f"{kind}: {details[0]}"

    # The engines.

    def _compute(self, role, index, begin, seconds):
        """Time of an engine from `begin` on, after what it has to do before; -> when it is done."""
        device = ("decode" if self.interleaved else role, index)
        seconds *= self.speeds.get(device, 1.0)
        self._free[device] = max(begin, self._free[device]) + seconds
        self.busy[device] += seconds
        return self._free[device]

    def _prefilled(self, at, role, index, number, positions, read, requests, last):
        cost = self.costs
        done = self._compute(role, index, at, cost.prefill_call + cost.prefill_position * positions + cost.step_position * read)
        self._chunks[number] = done, requests, last
        self._at(done + cost.log, self._computed, number, requests if last else [])

    def _computed(self, number, requests):
        self.scheduler.computed(number)
        for request_id in requests:
            self.scheduler.first(request_id, self._token(request_id, 1), [])

    def op_prefill(self, at, p, number, bucket, count, prompts):
        self._prefilled(at, "prefill", p, number, bucket * count, 0, [i for i, *_ in prompts], True)

    def op_local(self, at, d, number, bucket, count, prompts):
        self._prefilled(at, "decode", d, number, bucket * count, 0, [i for i, *_ in prompts], True)

    def op_chunk(self, at, p, number, request_id, tokens, start, read, last, sampler):
        bucket = next(b for b in self.limits.buckets if b >= len(tokens))
        self._prefilled(at, "prefill", p, number, bucket, read, [request_id], last)

    def op_transfer(self, at, number, p, d, bucket, request_id):
        done, requests, last = self._chunks[number]
        tokens = [self._token(i, 1) if last else -1 for i in requests]
        sides = ("from", p), ("to", d)
        end = max(at, done, *(self._free[s] for s in sides)) + self.costs.transfer + self.costs.byte * self._bytes[bucket]
        for side in sides:
            self._free[side] = end
        for process in self.decode[d]:
            self._at(end + self.costs.log, self.scheduler.arrived, process, number, None, tokens)

    def op_write(self, at, d, number, index, length, slot, start, activation):
        self._compute("decode", d, at, self.costs.write)
        if activation:
            s = self._slots[d][slot]
            s.request, s.made, s.left = self._chunks[number][1][index], 1, activation[1]
            if self._token(s.request, 1) == STOP:
                s.left = 0

    def op_decode(self, at, d, read, steps):
        slots, rows = self._slots[d], [[-1] * self.limits.slots for _ in range(steps)]
        for i, s in enumerate(slots):
            for row in rows[:s.left]:
                s.made, s.left = s.made + 1, s.left - 1
                row[i] = self._token(s.request, s.made)
                if row[i] == STOP:
                    s.left = 0
                    break
        done = self._compute("decode", d, at, steps * (self.costs.step + self.costs.step_position * self.limits.slots * read))
        self._at(done + self.costs.log, self.scheduler.tokens, d, rows, rows)

    def op_free(self, at, d, slot):
        self._slots[d][slot].left = 0

    def op_discard(self, at, number):
        del self._chunks[number]

    def _token(self, request_id, number):
        return STOP if number == self._lengths[request_id] else TOKEN


# The command.


def mixture(texts):
    """["64:3", "1024:1"] -> lengths, weights. Raises ValueError."""
    try:
        lengths, weights = zip(*((int(n), float(w)) for n, w in (t.split(":") for t in texts)))
    except ValueError:
        raise ValueError(f"expected LENGTH:WEIGHT,..., got {','.join(texts)!r}") from None
    if min(lengths) < 1 or min(weights) < 0 or not sum(weights):
        raise ValueError(f"lengths must be at least 1 and weights not negative nor all 0, got {','.join(texts)!r}")
    return lengths, weights


def load(simulation, *, requests, rate, prompts, answers, limit, seed):
    """Submit Poisson arrivals. Raises ValueError where a request does not fit the cache."""
    longest = max(prompts[0]) + limit
    if longest > simulation.limits.cache_length:
        raise ValueError(f"the longest prompt and max_tokens need {longest} positions; config.cache_length is {simulation.limits.cache_length}")
    draw, at = random.Random(seed), 0.0
    for i in range(requests):
        at += draw.expovariate(rate)
        prompt, answer = (draw.choices(*m)[0] for m in (prompts, answers))
        simulation.submit(Request(i, (0,) * prompt, limit, (STOP,), (0, 0.0, 0, 1.0)), min(answer, limit), at)


def figures(simulation):
    """{name: value}: seconds, counts and rates."""
    done = [o for o in simulation.outcomes.values() if o.end in ("stop", "length")]
    result = {"requests": len(simulation.outcomes), "answered": len(done), "refused": sum(o.end.startswith("refused") for o in simulation.outcomes.values()),
              "seconds": simulation.now, "tokens_per_s": sum(o.tokens for o in done) / simulation.now}
    for name, values in {"ttft": [o.first for o in done], "tpot": [(o.last - o.first) / (o.tokens - 1) for o in done if o.tokens > 1],
                         "longest_gap": [o.gap for o in done if o.tokens > 1]}.items():
        result |= _percentiles(name, values)
    for role in ("prefill", "decode"):
        if busy := [s / simulation.now for (of, _), s in simulation.busy.items() if of == role]:
            result[f"{role}_busy"] = statistics.mean(busy)
    return result | _percentiles("plan", simulation.plan_s) | {
        "plans": simulation.plans, "scheduler_per_plan": (sum(simulation.plan_s) + simulation.report_s) / max(1, simulation.plans)}


def _percentiles(name, values):
    values = sorted(values)
    return {f"{name}_p{q}": values[min(len(values) - 1, len(values) * q // 100)] for q in (50, 90, 99)} if values else {}


def main(argv):
    config = launch_flags.CONFIG.value
    interleaved = config.mode == "interleaved"
    try:
        costs = Costs(**(json.load(open(_COSTS.value)) if _COSTS.value else {}))
        limits = Limits.of(config, config.model.max_length or config.cache_length)
        simulation = Simulation(limits, prefill=config.prefill.engines, decode=config.decode.engines, interleaved=interleaved, costs=costs)
        prompts, answers = mixture(_PROMPTS.value), mixture(_ANSWERS.value)
        load(simulation, requests=_REQUESTS.value, rate=_RATE.value, prompts=prompts, answers=answers, limit=_LIMIT.value or max(answers[0]),
             seed=_LOAD_SEED.value)
    except (ValueError, TypeError, OSError) as e:
        raise SystemExit(f"simulate: {e}") from None
    simulation.run()
    result = figures(simulation)
    for name, value in result.items():
        print(f"{name:20} {value:.6g}")
    if JSON.value:
        with open(JSON.value, "w", encoding="utf-8") as out:
            json.dump(result, out, indent=2)


if __name__ == "__main__":
    launch_flags.run(main)
