"""A cell without devices: carries out the scheduler's plans as the loop and the engines do, and checks every operation.

Reports wait until `deliver` is called, in any order of the processes: those about results in the order of each engine,
arrivals in any order. Token i of request r is 1000 * r + i.
"""

import collections
import dataclasses
import itertools

from disagg.scheduler import Request, Scheduler

READS = (3, 8, 1000)  # how much of the cache a call may read


def request(number, length=5, max_tokens=4, stop_at=None, priority=0, timeout=None):
    """stop_at: index of the token that is the request's stop id."""
    stops = () if stop_at is None else (1000 * number + stop_at,)
    return Request(number, tuple(range(length)), max_tokens, stops, (number, 0.0, 0, 1.0), priority, timeout)


def expected(r):
    """The tokens of a request's whole answer, and the reason of its end."""
    tokens = [1000 * r.id + i for i in range(r.max_tokens)]
    for i, token in enumerate(tokens):
        if token in r.stop_ids:
            return tokens[:i + 1], "stop"
    return tokens, "length"


@dataclasses.dataclass
class Chunk:
    p: int
    d: int | None
    requests: list                                         # of its prompts, in order
    lengths: list                                          # their tokens in it
    positions: int                                         # with padding
    start: int
    last: bool
    arrived: set = dataclasses.field(default_factory=set)  # processes whose report the scheduler has
    written: set = dataclasses.field(default_factory=set)  # of the requests
    gone: bool = False                                     # discarded


@dataclasses.dataclass
class Slot:
    request: int | None = None
    filled: int = 0
    left: int = 0
    made: int = 0


class Cell:
    def __init__(self, *, prefill=(1,), decode=(1,), slots=2, chunk=4, steps=2, prefill_ahead=2, decode_ahead=2,
                 batch=2, pair_bytes=1000, total_bytes=1000, max_queue=100, local_length=0, interleaved=False, choose=lambda options: options[0]):
        """prefill, decode: processes of each engine. A position is 10 bytes. choose: what happens where anything may, of a
        list of options."""
        ids = iter(range(100))
        self.decode = [[next(ids) for _ in range(n)] for n in decode]
        self.prefill = self.decode if interleaved else [[next(ids) for _ in range(n)] for n in prefill]
        self.interleaved, self.buckets, self.steps, self.choose = interleaved, (chunk // 2, chunk), steps, choose
        self.batch = batch
        self.ahead = {"prefill": prefill_ahead, "decode": decode_ahead}
        self.chunk_bytes = {b: 10 * b for b in self.buckets}
        self.local_length = 0 if interleaved else local_length
        self.limits = {"pair": pair_bytes, "total": total_bytes}
        self.scheduler = Scheduler(prefill=self.prefill, decode=self.decode, interleaved=interleaved, slots=slots,
                                   buckets=self.buckets, reads=READS, steps=steps, prefill_ahead=prefill_ahead, decode_ahead=decode_ahead, batch=batch,
                                   chunk_bytes=self.chunk_bytes, pair_bytes=pair_bytes, total_bytes=total_bytes, max_queue=max_queue, local_length=local_length)
        self.dead, self.dropped = set(), set()
        self.requests, self.tokens, self.ended = {}, {}, {}   # by request id; ended: how
        self.started, self.sent_to = [], {}
        self.chunks = {}
        self.at = {}                                          # prefill engine -> (request, next position)
        self.slots = [[Slot() for _ in range(slots)] for _ in decode]
        self.reports = {}                                     # who and what -> reports waiting, in order, each numbered
        self.made = itertools.count()                         # their numbers
        self.unreported = collections.Counter()               # of each engine: chunks (interleaved) or calls
        self.ops = []                                         # all there were

    # What a front end does.

    def submit(self, *requests, now=0.0):
        for r in requests:
            self.requests[r.id], self.tokens[r.id] = r, []
            self.scheduler.submit(r, now)
            self._take_events()

    def expire(self, now):
        self.scheduler.expire(now)
        self._take_events()

    def cancel(self, number):
        self.scheduler.cancel(number)
        self.ended.setdefault(number, "cancelled")
        self._take_events()

    # What the leader does.

    def plan(self):
        """One plan, carried out; -> its operations."""
        ops = self.scheduler.plan()
        for name, *args in ops:
            getattr(self, f"op_{name}")(*args)
        self.ops += ops
        self._take_events()
        self._check_bounds()
        if not ops:
            self._check_no_engine_is_idle()
        return ops

    def waiting_reports(self, *kinds):
        """The queues of reports, those with the oldest report first."""
        return sorted((key for key in self.reports if not kinds or key[0] in kinds), key=lambda key: self.reports[key][0][0])

    def deliver(self, key):
        """The oldest report of a queue."""
        queue = self.reports[key]
        _, name, *args = queue.popleft()
        if not queue:
            del self.reports[key]
        if name == "arrived":
            process, number, error, _ = args
            if not error:
                self.chunks[number].arrived.add(process)
        elif name == "tokens":
            self.unreported["decode", args[0]] -= 1
        if name in ("computed", "first"):
            self.unreported[self._computes(self.chunks[args[0]])] -= 1
            self.scheduler.computed(args[0])
            for first in args[1] if name == "first" else ():
                self.scheduler.first(*first)
        else:
            getattr(self.scheduler, name)(*args)
        self._take_events()

    def fail(self, key, error):
        """Deliver an arrival as failed."""
        n, name, process, number, _, tokens = self.reports[key].popleft()
        self.reports[key].appendleft((n, name, process, number, error, tokens))
        self.deliver(key)

    def corrupt(self, key, why):
        """Deliver an arrival of wrong values: see loop."""
        self.scheduler.corrupt(self.reports[key][0][3], why)
        self._take_events()
        self.deliver(key)

    def run(self, *kinds):
        """Plan and deliver until nothing more can happen; with kinds, deliver only such reports."""
        for _ in range(10000):
            if not self.plan():
                if not (keys := self.waiting_reports(*kinds)):
                    return
                self.deliver(self.choose(keys))
        raise AssertionError("it does not end")

    def lose(self, role, index):
        self.scheduler.lose(role, index, "gone")
        self._take_events()

    def finish(self):
        """Run to the end, where every request has ended and the scheduler is empty."""
        self.run()
        assert self.scheduler.idle and not self.scheduler.pending
        assert self.ended.keys() == self.requests.keys()

    def kill(self, process):
        """The process computes and sends no more. Of its reports on the way any may be lost, and what it sends may fail
        or be missing; the scheduler is told at some time."""
        self.dead.add(process)
        for key in list(self.reports):
            if key[0] == "arrived" and key[1] == process or key == ("results", process):
                for _ in range(self.choose(range(len(self.reports[key]) + 1))):
                    self.reports[key].pop()
                if not self.reports[key]:
                    del self.reports[key]
            elif key[0] == "arrived" and process in self.prefill[self.chunks[key[2]].p]:
                del self.reports[key]
                self._arrival(key[1], key[2])
        for role, engines in (("prefill", self.prefill), ("decode", self.decode)):
            for i, members in enumerate(engines):
                if process in members and not self.dead.issuperset(members) and self.choose([False, True]):
                    self._report(("broken", role, i), "lose", role, i, "broken")
        self._report(("lost", process), "lose_process", process, "killed")

    # Operations.

    def op_prefill(self, p, number, bucket, count, prompts):
        assert not self._whole_prompts(bucket, count, prompts, self.buckets[-1]) or not self._idle(), "a long prompt could have begun"
        self._compute(p, number, [i for i, *_ in prompts], [len(tokens) for _, tokens, _ in prompts], bucket * count, 0, True)

    def op_local(self, d, number, bucket, count, prompts):
        assert bucket * count <= self._bucket(self.local_length), "more than the longest prompt would take"
        self._whole_prompts(bucket, count, prompts, self.local_length)
        self._compute(None, number, [i for i, *_ in prompts], [len(tokens) for _, tokens, _ in prompts], bucket * count, 0, True, d)

    def _whole_prompts(self, bucket, count, prompts, longest):
        """They begin; -> the requests that they pass, none of which is up to `longest` tokens long."""
        assert 1 <= len(prompts) <= count <= self.batch and bucket * count in self.buckets
        assert not any(n * bucket in self.buckets for n in range(len(prompts), count)), "more padding than needed"
        assert bucket == self._bucket(max(len(tokens) for _, tokens, _ in prompts))
        for request_id, tokens, sampler in prompts:
            r = self.requests[request_id]
            assert tuple(tokens) == r.tokens and sampler == r.sampler
            passed = self._waiting()[:self._waiting().index(request_id)]
            assert all(len(self.requests[i].tokens) > longest for i in passed), "not first come, first served"
            self.started.append(request_id)
        return passed

    def op_chunk(self, p, number, request_id, tokens, start, read, last, sampler):
        r = self.requests[request_id]
        assert len(r.tokens) > self.buckets[-1], "a short prompt needs no cache"
        if start == 0:
            assert request_id == self._waiting()[0], "not first come, first served"
            assert p not in self._begun(), "the working cache holds another prompt"
            self.started.append(request_id)
        else:
            assert self.at[p] == (request_id, start), "the working cache holds another prompt"
        self.at[p] = request_id, start + len(tokens)
        assert tuple(tokens) == r.tokens[start:start + len(tokens)] and sampler == r.sampler
        assert read == min(n for n in READS if n >= start), "not the least that holds what is in the cache"
        assert last == (start + len(tokens) == len(r.tokens)) and (last or len(tokens) == self.buckets[-1])
        self._compute(p, number, [request_id], [len(tokens)], self._bucket(len(tokens)), start, last)

    def _compute(self, p, number, requests, lengths, positions, start, last, d=None):
        """p: the prefill engine; None: decode engine d computes it."""
        on = ("prefill", p) if d is None else ("decode", d)
        assert on not in self.dropped and number not in self.chunks and not self.ended.keys() & set(requests)
        where = p if self.interleaved else d
        chunk = self.chunks[number] = Chunk(p, where, requests, lengths, positions, start, last)
        if where is not None:
            self.sent_to |= dict.fromkeys(requests, where)
            chunk.arrived |= set(self.decode[where])
        self.unreported[self._computes(chunk)] += 1
        processes = self.prefill[p] if d is None else self.decode[d]
        if not self.dead.intersection(processes):
            what = ("first", number, [[i, 1000 * i, []] for i in requests]) if last else ("computed", number)
            self._report(("results", processes[0]), *what)

    def _computes(self, chunk):
        return ("local", chunk.d) if chunk.p is None else ("prefill", chunk.p)

    def op_transfer(self, number, p, d, bucket, request_id):
        chunk = self.chunks[number]
        assert not self.interleaved and chunk.d is None and (chunk.p, chunk.requests[0]) == (p, request_id)
        assert ("prefill", p) not in self.dropped and ("decode", d) not in self.dropped
        assert bucket == chunk.positions
        for i in chunk.requests:
            assert self.sent_to.setdefault(i, d) == d, "one request's chunks go to two engines"
        chunk.d = d
        for process in self.decode[d]:
            if process not in self.dead:
                self._arrival(process, number)

    def op_write(self, d, number, index, length, slot_number, start, activation):
        chunk, slot = self.chunks[number], self.slots[d][slot_number]
        request_id = chunk.requests[index]
        r = self.requests[request_id]
        assert ("decode", d) not in self.dropped and chunk.d == d and not chunk.gone and request_id not in self.ended
        if length is None:
            assert len(chunk.requests) == 1 and chunk.positions == self._bucket(chunk.lengths[0])
        else:
            assert length >= max(chunk.lengths) and length * len(chunk.requests) <= chunk.positions and chunk.positions % length == 0
        assert chunk.arrived == set(self.decode[d]), "written before all processes have it"
        assert slot.left == 0, "the slot is being decoded"
        if slot.request != request_id:
            assert slot.request is None or slot.request in self.ended, "the slot is another request's"
            assert not any(s.request == request_id for s in self.slots[d]), "the request has two slots"
            slot.request, slot.filled = request_id, 0
        assert chunk.start == start == slot.filled, "a hole in the prompt"
        slot.filled += chunk.lengths[index]
        chunk.written.add(request_id)
        assert (activation is not None) == chunk.last
        if activation:
            assert activation == [len(r.tokens), r.max_tokens - 1, list(r.stop_ids), r.sampler]
            assert slot.filled == len(r.tokens)
            slot.made = 1
            slot.left = 0 if 1000 * r.id in r.stop_ids else r.max_tokens - 1

    def op_decode(self, d, read, steps):
        assert ("decode", d) not in self.dropped
        running = [s for s in self.slots[d] if s.left]
        if self._joining(d):
            assert steps == 1, "who is about to join waits for several steps"
        elif not self.interleaved and max((s.left for s in running), default=0) >= self.steps:
            assert steps == self.steps, "single steps for nobody"
        assert steps in (1, self.steps)
        needed = max((s.filled + s.made - 1 + min(steps, s.left) - 1 for s in running), default=0)
        assert needed <= read in READS, "a step would not see all of its sequence"
        if running and not any(self.requests[s.request].stop_ids for s in self.slots[d] if s.request is not None):
            assert read == min(n for n in READS if n >= needed), "more is read than needed"
        rows = [[self._step(slot) for slot in self.slots[d]] for _ in range(steps)]
        self.unreported["decode", d] += 1
        if not self.dead.intersection(self.decode[d]):
            self._report(("results", self.decode[d][0]), "tokens", d, rows, [[[] for _ in row] for row in rows])

    def _joining(self, d):
        """Whether the end of a prompt is on its way to engine d, computed or not."""
        return any(c.d == d and c.last and i not in self.ended and i not in c.written for c in self.chunks.values() for i in c.requests)

    def _step(self, slot):
        if slot.left == 0:
            return -1
        token = 1000 * slot.request + slot.made
        slot.made += 1
        slot.left = 0 if token in self.requests[slot.request].stop_ids else slot.left - 1
        return token

    def op_free(self, d, slot_number):
        slot = self.slots[d][slot_number]
        assert slot.request in self.ended
        slot.left = 0

    def op_discard(self, number):
        chunk = self.chunks[number]
        assert not chunk.gone and all(i in chunk.written or i in self.ended for i in chunk.requests)
        chunk.gone = True
        assert (chunk.arrived == set(self.decode[chunk.d])
                or {("prefill", chunk.p), ("decode", chunk.d)} & self.dropped), "forgotten while it is on its way"
        for process in self.decode[chunk.d]:
            self.reports.pop(("arrived", process, number), None)  # the loop forgets it

    def op_drop(self, role, index, why):
        assert (role, index) not in self.dropped
        self.dropped |= {("prefill", index), ("decode", index)} if self.interleaved else {(role, index)}

    # Inside.

    def _arrival(self, process, number):
        """A chunk on its way to a living process: it arrives, or fails or is missing if its sender is dead."""
        chunk = self.chunks[number]
        outcomes = ["ok", "error", None] if self.dead.intersection(self.prefill[chunk.p]) else ["ok"]
        outcome = self.choose(outcomes)
        if outcome:
            tokens = [1000 * i if chunk.last else -1 for i in chunk.requests]
            self._report(("arrived", process, number), "arrived", process, number, outcome if outcome == "error" else None, tokens)

    def _report(self, key, *report):
        self.reports.setdefault(key, collections.deque()).append((next(self.made), *report))

    def _take_events(self):
        events, self.scheduler.events = self.scheduler.events, []
        for kind, number, *details in events:
            assert number not in self.ended, f"{kind} of request {number} after its end: {self.ended[number]}"
            whole, why = expected(self.requests[number])
            if kind == "tokens":
                tokens, bests = details
                assert tokens and len(tokens) == len(bests)
                self.tokens[number] += tokens
                assert self.tokens[number] == whole[:len(self.tokens[number])]
            elif kind == "finish":
                assert self.tokens[number] == whole and details == [why]
                self.ended[number] = why
            else:
                self.ended[number] = f"{kind}: {details[0]}"

    def _waiting(self):
        """Requests in the queue, in the order in which they are to begin."""
        return sorted((i for i in self.requests if i not in self.started and i not in self.ended),
                      key=lambda i: self.requests[i].priority)

    def _begun(self):
        """prefill engine -> the long request that it has begun and not yet planned to the end."""
        return {p: i for p, (i, position) in self.at.items() if i not in self.ended and position < len(self.requests[i].tokens)}

    def _able(self):
        """Prefill engines that may have another chunk on its way."""
        return [p for p in self._alive("prefill", self.prefill) if self._in_flight(p) < self.ahead["prefill"]]

    def _idle(self):
        """Those of them that may begin a long prompt."""
        return [p for p in self._able() if p not in self._begun()]

    def _in_flight(self, p):
        """Chunks that prefill engine p has computed (interleaved) or sent, not for nothing, that have not been reported."""
        return self.unreported["prefill", p] if self.interleaved else sum(
            c.p == p and not self.ended.keys() >= set(c.requests) for c in self._moving())

    def _moving(self):
        """Chunks of which a living engine may still report the arrival."""
        return [c for c in self.chunks.values() if not c.gone and c.arrived != set(self.decode[c.d])]

    def _bytes(self, p=None, d=None):
        """On their way: from p to d, or all."""
        return sum(self.chunk_bytes[c.positions] for c in self._moving() if p is None or (c.p, c.d) == (p, d))

    def _bucket(self, length):
        return min(b for b in self.buckets if b >= length)

    def _alive(self, role, engines):
        return [i for i in range(len(engines)) if (role, i) not in self.dropped]

    def _check_bounds(self):
        for p in self._alive("prefill", self.prefill):
            assert self._in_flight(p) <= self.ahead["prefill"]
        for d in self._alive("decode", self.decode):
            assert self.unreported["decode", d] <= self.ahead["decode"] and self.unreported["local", d] <= self.ahead["prefill"]
            assert all(self._bytes(p, d) <= self.limits["pair"] for p in self._alive("prefill", self.prefill))
        assert self._bytes() <= self.limits["total"]

    def _check_no_engine_is_idle(self):
        """What is owed adds up; no request waits while a prefill engine could go on with it and, if it begins, a slot is free."""
        running = [i for i in self.started if i not in self.ended]
        for role, engines in (("prefill", self.scheduler._prefill), ("decode", self.scheduler._decode)):
            if not running and not any(self.unreported.values()):
                assert not any(engine.owed for i, engine in enumerate(engines) if (role, i) not in self.dropped)
        held = collections.Counter(self.sent_to[i] for i in running)
        able, begun, idle = self._able(), self._begun(), self._idle()
        free = [d for d in self._alive("decode", self.decode) if held[d] < len(self.slots[d])]
        local = [d for d in free if self.local_length and self.unreported["local", d] < self.ahead["prefill"]]
        assert not local or all(len(self.requests[i].tokens) > self.local_length for i in self._waiting()), f"{local} could prefill"
        next_ones = [(i, [(p, self.sent_to[i])], self.at[p][1]) for p, i in begun.items() if p in able]
        for i in self._waiting():
            if engines := able if len(self.requests[i].tokens) <= self.buckets[-1] else idle:
                ways = [(p, d) for p in engines for d in free if p == d or not self.interleaved]
                next_ones.append((i, ways, 0))
                break
        sizes = [0 if self.interleaved else self.chunk_bytes[self._bucket(min(len(self.requests[i].tokens) - position, self.buckets[-1]))]
                 for i, _, position in next_ones]
        if any(ways and self._bytes() + size > self.limits["total"] for (_, ways, _), size in zip(next_ones, sizes)):
            return  # it waits for room, and no younger one takes what there is
        for (i, ways, position), size in zip(next_ones, sizes):
            idle_ways = [(p, d) for p, d in ways if self._bytes(p, d) + size <= self.limits["pair"]]
            assert not idle_ways, f"request {i} waits at position {position}, {idle_ways} are idle"
