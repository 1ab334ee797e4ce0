"""What process 0 counts and times, for prometheus_client: every request's times, what its stages took, and what engines and log do.

All of it is told by the leader's thread, which must not wait for it: a request's stages are counted once, at its end, what is so at
the moment is asked only when somebody reads the registry, and gaps that are equal, those of sequences decoded together, are counted
together. Times are of time.monotonic() on process 0, unless said otherwise.
"""

import array
import bisect
import collections
import dataclasses
import itertools

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)
BYTES = tuple(4**n for n in range(8, 18))  # 64 KiB to 16 GiB
ENDS = "stop", "length", "cancelled", "refused", "error"
STAGES = "queue", "prefill", "transfer", "activation", "decode"


@dataclasses.dataclass(slots=True, eq=False)
class Life:
    """The times of one request; None for what it did not come to. Filled in by the leader's thread, for anyone to read."""

    prompt: int                     # tokens
    submitted: float
    begun: float | None = None      # its first chunk was planned
    computed: float | None = None   # its latest chunk was reported as computed
    arrived: float | None = None    # its latest chunk was reported by the last process that gets a part of it
    activated: float | None = None  # the write of its last chunk was planned, after which it is decoded
    first: float | None = None      # its first token was handed out
    last: float | None = None       # its latest tokens were
    ended: float | None = None
    tokens: int = 0
    moved: float = 0.0              # bytes; of a chunk of several requests each has an equal share
    gaps: array.array = dataclasses.field(default_factory=lambda: array.array("d"))  # seconds between two reports of its tokens

    @property
    def ttft(self):
        """Seconds to the first token."""
        return _between(self.submitted, self.first)

    @property
    def tpot(self):
        """Seconds a token after the first one."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def total(self):
        """Seconds to the end."""
        return _between(self.submitted, self.ended)

    def stages(self):
        """stage -> its seconds. In the order of STAGES they follow each other and, where all are there, make up `total`; transfer is
        only what is not hidden behind computation. None where the stage was not gone through, or the request made no token."""
        seconds = dict.fromkeys(STAGES) | {"queue": _between(self.submitted, self.begun)}
        if self.first is not None and self.computed is not None:
            seconds["prefill"] = _between(self.begun, self.computed)
            if self.activated is not None:
                there = self.computed if self.arrived is None else max(self.computed, self.arrived)
                begun = max(there, self.activated)  # where nothing is transferred the write is planned before it is computed
                seconds |= {"activation": begun - there, "decode": _between(begun, self.ended),
                            "transfer": None if self.arrived is None else there - self.computed}
        return seconds


def _between(begin, end):
    return None if begin is None or end is None else max(0.0, end - begin)


class Metrics:
    def __init__(self, scheduler, control, engines):
        """engines: number of decode engines."""
        self.registry = registry = CollectorRegistry()
        self._lives = {}                                    # request id -> Life, of those that have not ended
        self._engine = {}                                   # request id -> decode engine, of those that are active
        self._active = collections.Counter()                # decode engine -> how many those are
        self._paused = set(range(engines))                  # decode engines that had none at some time since their latest call
        self._control, self._lag = control, {}              # process -> the most that it was behind
        self._requests = Counter("disagg_requests", "Requests by how they ended.", ["end"], registry=registry)
        self._prompts = Counter("disagg_prompt_tokens", "Prompt tokens of the requests that were begun.", registry=registry)
        self._tokens = Counter("disagg_generated_tokens", "Tokens handed out.", registry=registry)
        self._moved = Counter("disagg_moved_bytes", "Bytes of KV caches sent from prefill to decode engines.", registry=registry)
        self._idle = Counter("disagg_decode_idle_seconds", "Time in which a decode engine had active slots and its device nothing to do, "
                             "from one call's result to the next dispatch.", ["engine"], registry=registry)
        self._busy = Counter("disagg_decode_busy_seconds", "Time in which a decode engine's device had calls to compute.", ["engine"],
                             registry=registry)
        self._ttft = Histogram("disagg_time_to_first_token_seconds", "From a request's submission to its first token.", buckets=LONG_S,
                               registry=registry)
        self._gaps = _Histogram("disagg_inter_token_seconds", "Between two reports of a request's tokens, each of up to "
                                "config.decode.steps tokens.", SHORT_S)
        self._tpot = Histogram("disagg_time_per_output_token_seconds", "A request's time from its first to its last token, by the tokens "
                               "after the first.", buckets=SHORT_S, registry=registry)
        self._total = Histogram("disagg_request_seconds", "From a request's submission to its end, of those that made a token.",
                                buckets=LONG_S, registry=registry)
        self._stage = Histogram("disagg_request_stage_seconds", "A request's time in each stage, which follow each other: queue, prefill, "
                                "transfer (what is not hidden behind prefill), activation (the wait for it) and decode.", ["stage"],
                                buckets=LONG_S, registry=registry)
        self._bytes = Histogram("disagg_request_moved_bytes", "Bytes moved for a request, of those that were moved.", buckets=BYTES,
                                registry=registry)
        for child, values in ((self._requests, ENDS), (self._stage, STAGES), (self._idle, range(engines)), (self._busy, range(engines))):
            for value in values:
                child.labels(value)  # there from the start, as 0
        registry.register(self._gaps)
        registry.register(_Now(scheduler, control, self._lag))

    def value(self, name, **labels):
        """A metric's value now, by the name and labels with which it is exposed; from any thread."""
        return self.registry.get_sample_value(name, {key: str(value) for key, value in labels.items()})

    def values(self, name, label):
        """{value of its one label: the metric's value now}; from any thread."""
        return {s.labels[label]: s.value for family in self.registry.collect() for s in family.samples if s.name == name}

    # Requests. Those that have ended are ignored.

    def submitted(self, request_id, life):
        self._lives[request_id] = life

    def begun(self, requests, now):
        for life in self._of(requests):
            if life.begun is None:
                life.begun = now
                self._prompts.inc(life.prompt)

    def computed(self, requests, now):
        for life in self._of(requests):
            life.computed = now

    def moved(self, requests, size):
        """A chunk of so many bytes is sent."""
        self._moved.inc(size)
        for life in self._of(requests):
            life.moved += size / len(requests)

    def arrived(self, requests, now):
        for life in self._of(requests):
            life.arrived = now

    def activated(self, request_id, d, now):
        for life in self._of([request_id]):
            life.activated = now
            self._engine[request_id] = d
            self._active[d] += 1

    def made(self, events, now):
        """The scheduler's events that are handed out at this moment, of which those of tokens count."""
        made, gaps = 0, {}
        for event in events:
            if event[0] == "tokens" and (life := self._lives.get(event[1])):
                made += (count := len(event[2]))
                life.tokens += count
                if life.last is None:
                    life.first = now
                    self._ttft.observe(now - life.submitted)
                else:
                    gap = now - life.last
                    life.gaps.append(gap)
                    gaps[gap] = gaps.get(gap, 0) + 1
                life.last = now
        if made:
            self._tokens.inc(made)
        for gap, count in gaps.items():
            self._gaps.add(gap, count)

    def ended(self, request_id, how, now):
        """how: one of ENDS."""
        life = self._lives.pop(request_id, None)
        if life is None:
            return
        life.ended = now
        d = self._engine.pop(request_id, None)
        if d is not None:
            self._active[d] -= 1
            if not self._active[d]:
                self._paused.add(d)
        self._requests.labels(how).inc()
        if life.first is not None:
            self._total.observe(life.total)
        if (tpot := life.tpot) is not None:
            self._tpot.observe(tpot)
        for stage, seconds in life.stages().items():
            if seconds is not None:
                self._stage.labels(stage).observe(seconds)
        if life.moved:
            self._bytes.observe(life.moved)

    def _of(self, requests):
        return [self._lives[i] for i in requests if i in self._lives]

    # Engines and the log.

    def decoding_on(self, d):
        """Whether engine d, for which a decode call is planned, has had an active slot ever since this was last asked."""
        paused = d in self._paused
        self._paused.discard(d)
        return not paused

    def called(self, d, idle, busy):
        """A decode call has ended: seconds in which the device had nothing to do before it, with active slots, and had."""
        self._idle.labels(d).inc(idle)
        self._busy.labels(d).inc(busy)

    def published(self):
        for process, lag in _lags(self._control):
            if lag > self._lag.get(process, -1):
                self._lag[process] = lag


def _lags(control):
    """(process, plans that it has not taken, as far as process 0 has been told), of those that live."""
    published = control.published
    return [(process, published - position) for process, position in control.positions().items()]


class _Now:
    """What is known at any time, and read only when it is asked for."""

    def __init__(self, scheduler, control, lag):
        self._scheduler, self._control, self._lag = scheduler, control, lag

    def collect(self):
        yield GaugeMetricFamily("disagg_requests_queued", "Requests that wait to begin.", self._scheduler.queued)
        yield GaugeMetricFamily("disagg_requests_running", "Requests that hold a slot.", self._scheduler.running)
        used = GaugeMetricFamily("disagg_slots_used", "Slots of a decode engine that are reserved or decoded.", labels=["engine"])
        slots = GaugeMetricFamily("disagg_slots", "Slots of a decode engine.", labels=["engine"])
        for d, (reserved, all_) in enumerate(self._scheduler.slots):
            used.add_metric([str(d)], reserved)
            slots.add_metric([str(d)], all_)
        yield from (used, slots)
        yield CounterMetricFamily("disagg_plans", "Plans published.", self._control.published)
        lag = GaugeMetricFamily("disagg_plan_lag", "Plans that a process has not taken, as far as it has said, which it does with every "
                                "report and every 32 plans.", labels=["process"])
        most = GaugeMetricFamily("disagg_plan_lag_max", "The most that this was when a plan was published.", labels=["process"])
        for family, lags in ((lag, _lags(self._control)), (most, list(self._lag.items()))):
            for process, plans in lags:
                family.add_metric([str(process)], plans)
            yield family


class _Histogram:
    """A histogram to which several equal values are added at once, as the library's own cannot."""

    def __init__(self, name, text, buckets):
        self._name, self._text, self._bounds = name, text, buckets
        self._counts, self._sum = [0] * (len(buckets) + 1), 0.0

    def add(self, value, count):
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self):
        bounds = [*(str(float(b)) for b in self._bounds), "+Inf"]
        yield HistogramMetricFamily(self._name, self._text, list(zip(bounds, itertools.accumulate(self._counts))), self._sum)
