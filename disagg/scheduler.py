"""Which request goes where, and when. Pure Python: a function of submissions, reports, deaths and of the time that it is told.

A request: queued -> a slot is reserved on a decode engine and a prefill engine starts its chunks -> each chunk is sent,
and written into the reserved slot once every process of the decode engine has reported it -> with the last chunk the
slot is activated -> decode steps -> finished, and the slot is free again. In interleaved mode a chunk is written where
it was computed, at once.

First come, first served among those of one priority. A prompt goes to the prefill engine with the fewest prompt tokens still
to compute, and to the decode engine to which least is on its way, in whole chunks (else many would send to the emptiest one at
once, over one link), with the most free slots and, of those, the fewest tokens still to make. Prompts of up
to a chunk are short: they are computed whole, those that wait together as far as the buckets allow. A longer one is computed in
chunks; an engine has one such at a time, and between its chunks short ones get their turn, also those that came after another
long one, which no engine can begin yet. Prompts below a length may be computed where they are decoded (local_length): then nothing
moves, but decode steps wait for them.

`plan` gives the operations of the next plan (see loop.py) and `events` what became of requests:
("tokens", request id, [token ids], [best candidates of each]), ("finish", id, reason), ("error", id, message),
("refused", id, message) for one that the queue has no room for.
"""

import collections
import dataclasses
import heapq
import itertools

from disagg.waiting import Waiting


@dataclasses.dataclass(frozen=True)
class Request:
    """What the engines need to know of a request. sampler: (seed, temperature, top_k, top_p). priority: those with a lower one
    begin first. timeout: seconds from its submission to its end at most; None: no limit."""

    id: int
    tokens: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...]
    sampler: tuple[int, float, int, float]
    priority: int = 0
    timeout: float | None = None


@dataclasses.dataclass(eq=False)
class _Chunk:
    number: int            # of the transfer
    sequences: list        # of its prompts, in order; None for one that is written or has ended
    p: int
    d: int
    start: int             # of a long prompt's part
    length: int | None     # of each of several prompts, with its padding
    last: bool
    bytes: int             # on their way
    waiting: set           # processes that have not reported it arrived


@dataclasses.dataclass(eq=False)
class _Sequence:
    request: Request
    p: int
    d: int
    slot: int
    next: int = 0          # first prompt position not planned yet
    made: int = 0          # tokens reported
    first: int | None = None  # the first token as the decode engine received it
    held: list = dataclasses.field(default_factory=list)  # later tokens, reported before the first one
    planned: int = 0       # decode steps planned since activation
    chunks: collections.deque = dataclasses.field(default_factory=collections.deque)  # not written yet

    @property
    def stage(self):
        if self.next < len(self.request.tokens):
            return f"being prefilled, {self.next} of its {len(self.request.tokens)} prompt tokens so far"
        if self.chunks:
            return "being prefilled or moved"
        return f"being decoded, {self.made} of up to {self.request.max_tokens} tokens so far"


class _NoRoom(Exception):
    """Too much is on its way in the whole job for the next chunk in order."""


class _Prefill:
    def __init__(self, processes, own=None):
        """own: the decode engine that it is as well; None: what it computes is sent."""
        self.processes, self.alive, self.current, self.in_flight, self.own = processes, True, None, 0, own
        self.short_next = False                 # short prompts have their turn, if there are any
        self.owed = 0                           # prompt tokens planned and not reported as computed
        self.planned = 0                        # ... in total: evens out equally loaded engines


class _Decode:
    def __init__(self, processes, slots):
        self.processes, self.alive = processes, True
        self.free = list(range(slots))
        self.active = {}                        # slot -> sequence
        self.owed = 0                           # tokens that its sequences may still make
        self.moving = 0                         # bytes on their way to it
        self.steps = collections.deque()        # of each call not reported yet: who was in which slot
        self.coming = set()                     # request ids: the end of the prompt is planned, it is not active yet


def read_length(reads, positions):
    """How much of the cache a call reads that needs `positions` of it: nothing, or the least compiled length that will do."""
    return next(n for n in (0, *reads) if n >= positions)


def batch_sizes(buckets, most):
    """bucket -> how many prompts of it may be computed together: the numbers up to `most` whose positions together are a bucket, too."""
    return {b: [n for n in range(1, most + 1) if n * b in buckets] for b in buckets}


class Scheduler:
    def __init__(self, *, prefill, decode, interleaved, slots, buckets, reads, steps, prefill_ahead, decode_ahead, batch,
                 chunk_bytes, pair_bytes, total_bytes, max_queue, local_length=0):
        """prefill, decode: the process ids of each engine. buckets: ascending, the last is the chunk size. reads: lengths of
        the cache that calls are compiled to read, ascending, the last is all of it. steps: decode steps of one call
        while nothing waits to join them; else there is one.
        prefill_ahead, decode_ahead: chunks and calls an engine may have planned that are not reported. batch: short prompts
        computed together at most. chunk_bytes: what a
        chunk of each bucket moves; pair_bytes, total_bytes: what may be on its way from one engine to another, and in all.
        max_queue: requests that may wait. local_length: prompts of up to so many tokens are computed on the decode engine, if
        one has room for them; together as many as are no more positions than the longest of them."""
        self._senders = len(prefill)            # prefill engines; behind them in the list the decode engines that prefill, too
        self._local_length, local = local_length, decode if local_length and not interleaved else []
        self._prefill = [*(_Prefill(p, i if interleaved else None) for i, p in enumerate(prefill)),
                         *(_Prefill(p, own=d) for d, p in enumerate(local))]
        self._decode = [_Decode(p, slots) for p in decode]
        self._interleaved, self._buckets, self._chunk, self._reads = interleaved, buckets, buckets[-1], reads
        self._batch_sizes = batch_sizes(buckets, batch)
        self._steps, self._prefill_ahead, self._decode_ahead = steps, prefill_ahead, decode_ahead
        self._slots = slots
        self._queue, self._max_queue = Waiting(self._chunk), max_queue
        self._timeouts = []                     # heap of (when, request id)
        self._running = {}                      # request id -> _Sequence
        self._chunk_bytes, self._pair_bytes, self._total_bytes = chunk_bytes, pair_bytes, total_bytes
        self._chunks = {}                       # transfer number -> _Chunk, neither written nor discarded yet
        self._moving = collections.Counter()    # (p, d) -> bytes sent that not all of the receiver's processes have reported
        self._largest = max(1, chunk_bytes[self._chunk])
        self._moving_total = 0                  # ... of all pairs
        self._writable = {}                     # request id -> None, of those of which a chunk has arrived since the last plan
        self._transfers = 0
        self._computing = {}                    # transfer number -> (prefill engine, prompt tokens)
        self._ops = []                          # decided between plans: free, discard, drop
        self.events = []

    def submit(self, request, now=0.0):
        if len(self._queue) >= self._max_queue:
            self.events.append(("refused", request.id, f"the queue is full: {len(self._queue)} requests wait, config.max_queue is "
                                f"{self._max_queue}"))
            return
        self._queue.add(request)
        if request.timeout is not None:
            heapq.heappush(self._timeouts, (now + request.timeout, request.id))
        self._fail_if_nothing_lives()

    def expire(self, now):
        """End the requests whose time is over."""
        while self._timeouts and self._timeouts[0][0] <= now:
            _, request_id = heapq.heappop(self._timeouts)
            request = self._queue.get(request_id)
            sequence = self._running.get(request_id)
            if request or sequence:
                timeout = (request or sequence.request).timeout
                stage = sequence.stage if sequence else "waiting in the queue"
                self.cancel(request_id)
                self.events.append(("error", request_id, f"the request was not done within its timeout of {timeout:g} s: it was {stage}"))

    @property
    def next_timeout(self):
        """When the next request's time is over, or None."""
        return self._timeouts[0][0] if self._timeouts else None

    def cancel(self, request_id):
        """Forget a request in whatever stage it is; no event follows. Unknown and finished ones are ignored."""
        if self._queue.get(request_id):
            self._queue.remove(request_id)
        elif request_id in self._running:
            self._release(self._running[request_id])

    @property
    def idle(self):
        return not (self._queue or self._running or self._ops)

    @property
    def pending(self):
        """Request ids queued or running."""
        return [r.id for r in self._queue] + list(self._running)

    @property
    def queued(self):
        return len(self._queue)

    @property
    def running(self):
        return len(self._running)

    @property
    def slots(self):
        """Of each decode engine (slots that are reserved or active, all)."""
        return [(self._slots - len(e.free), self._slots) for e in self._decode]

    # Reports.

    def computed(self, number):
        """The prefill engine has computed a chunk. Where nothing is transferred this bounds what it has planned."""
        p, tokens = self._computing.pop(number)
        self._prefill[p].owed -= tokens
        if self._prefill[p].own is not None:
            self._prefill[p].in_flight -= 1

    def first(self, request_id, token, best):
        """The prefill engine's first token of a request."""
        sequence = self._running.get(request_id)
        if sequence is not None and not sequence.made:
            held, sequence.held = sequence.held, []
            for tokens, bests in [([token], [best]), *held]:
                if request_id in self._running:
                    self._made(sequence, tokens, bests)

    def arrived(self, process, number, error, tokens):
        """A process of the decode engine has a chunk with these tokens in its ticket, or (error, a string) never will."""
        chunk = self._chunks.get(number)
        if chunk is None:
            return
        if error:
            self.lose("prefill", chunk.p, f"transfer {number} from it failed: {error}")
        elif process in chunk.waiting:
            chunk.waiting.discard(process)
            if not chunk.waiting:
                self._charge(chunk, -chunk.bytes)
                if not any(chunk.sequences):
                    self._discard(chunk)
                    return
                self._prefill[chunk.p].in_flight -= 1
                self._note_writable(chunk)
                if chunk.last:
                    for sequence, token in zip(chunk.sequences, tokens):
                        if sequence:
                            sequence.first = token

    def corrupt(self, number, why):
        """A chunk has arrived with wrong values: its requests cannot go on."""
        chunk = self._chunks.get(number)
        for sequence in list(filter(None, chunk.sequences)) if chunk else ():
            self._release(sequence)
            self.events.append(("error", sequence.request.id, why))

    def tokens(self, d, rows, bests):
        """The oldest unreported decode call of engine d. rows: [steps][slots] token ids, -1 where none was made."""
        engine = self._decode[d]
        if not engine.alive:
            return
        owners = engine.steps.popleft()
        for slot, sequence in owners.items():
            made = [i for i, row in enumerate(rows) if row[slot] >= 0]
            if made and sequence.request.id in self._running:
                news = [rows[i][slot] for i in made], [bests[i][slot] for i in made]
                if sequence.made:
                    self._made(sequence, *news)
                else:
                    sequence.held.append(news)  # the first token is still on its way from the prefill engine

    def lose(self, role, index, why):
        """An engine is dead: requests that need it end with an error, the others go on."""
        engine = (self._prefill if role == "prefill" else self._decode)[index]
        if not engine.alive:
            return
        engine.alive = False
        self._ops.append(["drop", role, index, why])
        for e in self._prefill:
            if e.own is not None and index == e.own and (role == "decode" or self._interleaved):
                e.alive = self._decode[index].alive = False
        message = f"{role} engine {index} is lost: {why}"
        for s in list(self._running.values()):
            needs_prefill = s.next < len(s.request.tokens) or any(c.waiting for c in s.chunks)
            if s.d == index if role == "decode" or self._interleaved else s.p == index and needs_prefill:
                self._release(s)
                self.events.append(("error", s.request.id, message))
            elif s.p == index and role == "prefill" and not s.made and s.first is not None:
                self.first(s.request.id, s.first, [])  # its own report may never come
        for chunk in [c for c in self._chunks.values() if not any(c.sequences) and index == (c.p if role == "prefill" else c.d)]:
            self._charge(chunk, -chunk.bytes)  # it will not arrive any more
            self._discard(chunk)
        self._fail_if_nothing_lives(message)

    def lose_process(self, process, why):
        for role, engines in (("prefill", self._prefill[:self._senders]), ("decode", self._decode)):
            for i, engine in enumerate(engines):
                if process in engine.processes:
                    self.lose(role, i, why)

    @property
    def broken(self):
        """True when no request can be served any more."""
        return not (any(e.alive for e in self._prefill[:self._senders]) and any(e.alive for e in self._decode))

    # The plan.

    def plan(self):
        """The next plan's operations; an empty list when there is nothing to do until the next report."""
        prefills = self._prefill_ops()
        ops, self._ops = self._ops + prefills, []
        writable, self._writable = self._writable, {}
        for request_id in writable:
            if s := self._running.get(request_id):
                ops += self._write_ops(s)
        for d, engine in enumerate(self._decode):
            if engine.alive and len(engine.steps) < self._decode_ahead:
                ops += self._decode_ops(d, engine)
        return ops

    def _decode_ops(self, d, engine):
        """One call of decode steps, if a sequence needs it. The last step finds in the cache, of each sequence, its prompt
        and a token for every step before it."""
        left = [s.request.max_tokens - 1 - s.planned for s in engine.active.values()]
        if max(left, default=0) <= 0:
            return []
        joining = engine.coming or self._interleaved and self._prefill[d].current
        steps = 1 if joining or max(left) < self._steps else self._steps
        longest = max(len(s.request.tokens) + s.planned + min(n, steps) for s, n in zip(engine.active.values(), left) if n > 0)
        for s in engine.active.values():
            s.planned += steps
        engine.steps.append(dict(engine.active))
        return [["decode", d, read_length(self._reads, longest - 1), steps]]

    def _prefill_ops(self):
        """What the prefill engines that may have one more chunk on its way compute next, the least loaded first. Where the whole
        job has no room for a chunk, no younger request takes what room there is."""
        ops = []
        try:
            while more := self._next_prefill():
                ops += more
        except _NoRoom:
            pass
        while more := self._begin_local():
            ops += more
        return ops

    def _next_prefill(self):
        """One engine's next chunk and its transfer; None where no engine can have one."""
        able = [p for p in range(self._senders) if self._able(p)]
        able.sort(key=lambda p: (self._prefill[p].owed, self._prefill[p].in_flight, self._prefill[p].planned, p))
        begun = sorted((p for p in able if self._prefill[p].current), key=lambda p: self._prefill[p].current.request.id)
        roomy = [p for p in begun if self._has_room(p, self._prefill[p].current.d, self._next_bucket(p))]
        for p in roomy:
            if not self._prefill[p].short_next:
                return self._next_chunk(p)
        if ops := self._begin(able):
            return ops
        return self._next_chunk(roomy[0]) if roomy else None

    def _able(self, p):
        return self._prefill[p].alive and self._prefill[p].in_flight < self._prefill_ahead

    def _next_chunk(self, p):
        """The next part of the long prompt that engine p has begun."""
        s, bucket = self._prefill[p].current, self._next_bucket(p)
        part = s.request.tokens[s.next:s.next + self._chunk]
        start, s.next = s.next, s.next + len(part)
        last = s.next == len(s.request.tokens)
        engine = self._prefill[p]
        engine.short_next = True
        if last:
            engine.current = None
        chunk = self._plan_chunk([s], p, s.d, start, None, last, bucket, len(part))
        op = ["chunk", p, chunk.number, s.request.id, list(part), start, read_length(self._reads, max(start, 1)), last, s.request.sampler]
        return [op, *self._transfer_ops(chunk, bucket)]

    def _next_bucket(self, p):
        s = self._prefill[p].current
        return self._bucket(min(len(s.request.tokens) - s.next, self._chunk))

    def _begin(self, able):
        """Begin the next request of the queue, if it is a short one together with others; None where none can begin."""
        idle = [p for p in able if self._prefill[p].current is None]
        request = self._queue.first(long=bool(idle))  # where every engine has a long one, short ones pass those that wait
        if request is None:
            return None
        if len(request.tokens) <= self._local_length and (ops := self._begin_local()):
            return ops
        if not able:
            return None
        short = len(request.tokens) <= self._chunk
        way = self._way(able if short else idle, self._bucket(min(len(request.tokens), self._chunk)))
        if way is None:
            return None
        if short:
            return self._begin_short(self._queue.short_ones(long=bool(idle)), *way, len(able), self._chunk)
        self._queue.remove(request.id)
        p, d = way
        self._prefill[p].current = self._admit(request, p, d)
        return self._next_chunk(p)

    def _begin_local(self):
        """Begin the first request that is short enough on the decode engine with most room, with those behind it that are, too;
        None where none can. It may pass others, which have to wait for a prefill engine."""
        able = [p for p in range(self._senders, len(self._prefill)) if self._able(p) and self._decode[self._prefill[p].own].free]
        waiting = (r for r in self._queue.short_ones(long=False) if len(r.tokens) <= self._local_length) if able else ()
        if (first := next(iter(waiting), None)) is None:
            return None
        p = min(able, key=lambda p: (self._prefill[p].in_flight, *self._room(self._prefill[p].own)))
        return self._begin_short(itertools.chain([first], waiting), p, self._prefill[p].own, len(able), self._bucket(self._local_length))

    def _room(self, d):
        """Sorts decode engines, the one with most room first."""
        return self._decode[d].moving // self._largest, -len(self._decode[d].free), self._decode[d].owed

    def _way(self, engines, bucket):
        """(p, d): the decode engine with most room to which one of these prefill engines, in order of preference, may send a
        chunk of so many positions; None where there is none."""
        free = (d for d, decode in enumerate(self._decode) if decode.alive and decode.free)
        if self._interleaved:
            return min(((p, p) for p in engines if self._decode[p].free), key=lambda way: self._room(way[1]), default=None)
        return next(((p, d) for d in sorted(free, key=self._room) for p in engines if self._has_room(p, d, bucket)), None)

    def _begin_short(self, waiting, p, d, engines, limit):
        """The first of the waiting requests and those behind it, as many as fit in `limit` positions: a fair share of them,
        where several engines are free."""
        waiting = list(itertools.islice(waiting, engines * self._batch_sizes[self._buckets[0]][-1]))
        most = min(-(-len(waiting) // engines), len(self._decode[d].free))
        taken, bucket, count = waiting[:1], self._bucket(len(waiting[0].tokens)), 1
        for request in waiting[1:most]:
            wider = max(bucket, self._bucket(len(request.tokens)))
            fitting = next((n for n in self._batch_sizes[wider] if n > len(taken)), None)
            if fitting is None or wider * fitting > limit or not self._fits(p, d, wider * fitting):
                break
            taken.append(request)
            bucket, count = wider, fitting
        for request in taken:
            self._queue.remove(request.id)
        sequences = [self._admit(request, p, d) for request in taken]
        for s in sequences:
            s.next = len(s.request.tokens)
        self._prefill[p].short_next = False
        chunk = self._plan_chunk(sequences, p, d, 0, bucket if count > 1 else None, True, bucket * count, sum(s.next for s in sequences))
        prompts = [[s.request.id, list(s.request.tokens), s.request.sampler] for s in sequences]
        on = ["prefill", p] if p < self._senders else ["local", d]
        return [[*on, chunk.number, bucket, count, prompts], *self._transfer_ops(chunk, bucket * count)]

    def _admit(self, request, p, d):
        decode = self._decode[d]
        decode.owed += request.max_tokens
        s = self._running[request.id] = _Sequence(request, p, d, decode.free.pop(0))
        return s

    def _plan_chunk(self, sequences, p, d, start, length, last, bucket, tokens):
        """Note a chunk of so many positions, with padding, and prompt tokens."""
        number, self._transfers = self._transfers, self._transfers + 1
        engine = self._prefill[p]
        chunk = self._chunks[number] = _Chunk(number, list(sequences), p, d, start, length, last, self._size(p, bucket),
                                              set(self._decode[d].processes) if engine.own is None else set())
        for s in sequences:
            s.chunks.append(chunk)
            if last:
                self._decode[d].coming.add(s.request.id)
        self._charge(chunk, chunk.bytes)
        if engine.own is not None:
            self._note_writable(chunk)
        self._computing[number] = p, tokens
        engine.planned += tokens
        engine.owed += tokens
        engine.in_flight += 1
        return chunk

    def _charge(self, chunk, number):
        """More bytes on their way, or fewer."""
        self._moving[chunk.p, chunk.d] += number
        self._moving_total += number
        self._decode[chunk.d].moving += number

    def _note_writable(self, chunk):
        self._writable |= {s.request.id: None for s in chunk.sequences if s}

    def _transfer_ops(self, chunk, bucket):
        request = next(s.request.id for s in chunk.sequences if s)
        return [] if self._prefill[chunk.p].own is not None else [["transfer", chunk.number, chunk.p, chunk.d, bucket, request]]

    def _size(self, p, bucket):
        """Bytes that a chunk of so many positions from engine p moves."""
        return self._chunk_bytes[bucket] if self._prefill[p].own is None else 0

    def _bucket(self, length):
        return next(b for b in self._buckets if b >= length)

    def _fits(self, p, d, bucket):
        size = self._size(p, bucket)
        return self._moving_total + size <= self._total_bytes and self._moving[p, d] + size <= self._pair_bytes

    def _has_room(self, p, d, bucket):
        """Whether a chunk of so many positions may go from p to d now. Raises _NoRoom where it may go nowhere."""
        if self._moving_total + self._size(p, bucket) > self._total_bytes:
            raise _NoRoom
        return self._fits(p, d, bucket)

    def _discard(self, chunk):
        del self._chunks[chunk.number]
        self._ops.append(["discard", chunk.number])

    def _write_ops(self, s):
        """Write the chunks that have arrived, in order; activate with the last one."""
        ops = []
        while s.chunks and not s.chunks[0].waiting:
            chunk = s.chunks.popleft()
            index = chunk.sequences.index(s)
            activation = None
            if chunk.last:
                self._decode[s.d].active[s.slot] = s
                self._decode[s.d].coming.discard(s.request.id)
                activation = [len(s.request.tokens), s.request.max_tokens - 1, list(s.request.stop_ids), s.request.sampler]
            ops.append(["write", s.d, chunk.number, index, chunk.length, s.slot, chunk.start, activation])
            chunk.sequences[index] = None
            if not any(chunk.sequences):
                del self._chunks[chunk.number]
                ops.append(["discard", chunk.number])
        return ops

    # Ends.

    def _made(self, s, tokens, bests):
        """Tokens of a sequence, in order; decides by the device's own rule whether it has ended."""
        s.made += len(tokens)
        self._decode[s.d].owed -= len(tokens)
        self.events.append(("tokens", s.request.id, tokens, bests))
        if tokens[-1] in s.request.stop_ids:
            self._finish(s, "stop")
        elif s.made >= s.request.max_tokens:
            self._finish(s, "length")

    def _finish(self, s, reason):
        self._release(s, ended=True)
        self.events.append(("finish", s.request.id, reason))

    def _release(self, s, ended=False):
        """Give back all that a sequence holds, exactly once. ended: the device has ended it by itself.

        What is still on its way to it keeps the next chunk from being sent only by its bytes: until it has arrived, or
        until its sender or receiver is lost.
        """
        del self._running[s.request.id]
        prefill, decode = self._prefill[s.p], self._decode[s.d]
        decode.owed -= s.request.max_tokens - s.made
        decode.coming.discard(s.request.id)
        if prefill.current is s:
            prefill.current = None
        for chunk in s.chunks:
            chunk.sequences[chunk.sequences.index(s)] = None
            if any(chunk.sequences):
                continue  # others need it
            if chunk.waiting:
                prefill.in_flight -= 1
            else:
                self._discard(chunk)
        if decode.active.pop(s.slot, None) and not ended:
            self._ops.append(["free", s.d, s.slot])
        if decode.alive:
            decode.free.append(s.slot)

    def _fail_if_nothing_lives(self, why="no engine is left"):
        if self.broken:
            for request in list(self._queue):
                self._queue.remove(request.id)
                self.events.append(("error", request.id, why))
