"""Which request goes where, and when. Pure Python: a function of submissions, reports and deaths; it reads no clock.

A request: queued -> a slot is reserved on a decode engine and a prefill engine starts its chunks -> each chunk is sent,
and written into the reserved slot once every process of the decode engine has reported it -> with the last chunk the
slot is activated -> decode steps -> finished, and the slot is free again. In interleaved mode a chunk is written where
it was computed, at once. First come, first served; the least loaded engine is taken.

`plan` gives the operations of the next plan (see loop.py) and `events` what became of requests:
("tokens", request id, [token ids], [best candidates of each]), ("finish", id, reason), ("error", id, message).
"""

import collections
import dataclasses


@dataclasses.dataclass(frozen=True)
class Request:
    """What the engines need to know of a request. sampler: (seed, temperature, top_k, top_p)."""

    id: int
    tokens: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...]
    sampler: tuple[int, float, int, float]


@dataclasses.dataclass
class _Chunk:
    number: int            # of the transfer
    sequence: object       # its _Sequence; None when that has ended before the chunk arrived
    p: int
    d: int
    start: int
    length: int
    last: bool
    bytes: int             # on their way
    waiting: set           # processes that have not reported it arrived


@dataclasses.dataclass
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


class _Prefill:
    def __init__(self, processes):
        self.processes, self.alive, self.current, self.in_flight = processes, True, None, 0
        self.planned = 0                        # prompt tokens in total: evens out equally loaded engines


class _Decode:
    def __init__(self, processes, slots):
        self.processes, self.alive = processes, True
        self.free = list(range(slots))
        self.active = {}                        # slot -> sequence
        self.steps = collections.deque()        # of each call not reported yet: who was in which slot


def read_length(reads, positions):
    """How much of the cache a call reads that needs `positions` of it: nothing, or the least compiled length that will do."""
    return next(n for n in (0, *reads) if n >= positions)


class Scheduler:
    def __init__(self, *, prefill, decode, interleaved, slots, buckets, reads, steps, prefill_ahead, decode_ahead, chunk_bytes,
                 pair_bytes, total_bytes):
        """prefill, decode: the process ids of each engine. buckets: ascending, the last is the chunk size. reads: lengths of
        the cache that calls are compiled to read, ascending, the last is all of it. steps: decode steps a call.
        prefill_ahead, decode_ahead: chunks and calls an engine may have planned that are not reported. chunk_bytes: what a
        chunk of each bucket moves; pair_bytes, total_bytes: what may be on its way from one engine to another, and in all."""
        self._prefill = [_Prefill(p) for p in prefill]
        self._decode = [_Decode(p, slots) for p in decode]
        self._interleaved, self._buckets, self._chunk, self._reads = interleaved, buckets, buckets[-1], reads
        self._steps, self._prefill_ahead, self._decode_ahead = steps, prefill_ahead, decode_ahead
        self._queue = collections.deque()
        self._running = {}                      # request id -> _Sequence
        self._chunk_bytes, self._pair_bytes, self._total_bytes = chunk_bytes, pair_bytes, total_bytes
        self._chunks = {}                       # transfer number -> _Chunk, neither written nor discarded yet
        self._moving = collections.Counter()    # (p, d) -> bytes sent that not all of the receiver's processes have reported
        self._transfers = 0
        self._computing = {}                    # interleaved: transfer number -> prefill engine
        self._ops = []                          # decided between plans: free, discard, drop
        self.events = []

    def submit(self, request):
        self._queue.append(request)
        self._fail_if_nothing_lives()

    def cancel(self, request_id):
        """Forget a request in whatever stage it is; no event follows. Unknown and finished ones are ignored."""
        for i, request in enumerate(self._queue):
            if request.id == request_id:
                del self._queue[i]
                return
        if request_id in self._running:
            self._release(self._running[request_id])

    @property
    def idle(self):
        return not (self._queue or self._running or self._ops)

    @property
    def pending(self):
        """Request ids queued or running."""
        return [r.id for r in self._queue] + list(self._running)

    # Reports.

    def computed(self, number):
        """The prefill engine has computed a chunk. Where nothing is transferred this bounds what it has planned."""
        if self._interleaved:
            self._prefill[self._computing.pop(number)].in_flight -= 1

    def first(self, request_id, token, best):
        """The prefill engine's first token of a request."""
        sequence = self._running.get(request_id)
        if sequence is not None and not sequence.made:
            held, sequence.held = sequence.held, []
            for tokens, bests in [([token], [best]), *held]:
                if request_id in self._running:
                    self._made(sequence, tokens, bests)

    def arrived(self, process, number, error, token):
        """A process of the decode engine has a chunk with this token in its ticket, or (error, a string) never will."""
        chunk = self._chunks.get(number)
        if chunk is None:
            return
        if error:
            self.lose("prefill", chunk.p, f"transfer {number} from it failed: {error}")
        elif process in chunk.waiting:
            chunk.waiting.discard(process)
            if not chunk.waiting:
                self._moving[chunk.p, chunk.d] -= chunk.bytes
                if chunk.sequence is None:
                    self._discard(chunk)
                    return
                self._prefill[chunk.p].in_flight -= 1
                if chunk.last:
                    chunk.sequence.first = token

    def corrupt(self, number, why):
        """A chunk has arrived with wrong values: its request cannot go on."""
        chunk = self._chunks.get(number)
        if chunk is not None and chunk.sequence is not None:
            request = chunk.sequence.request
            self._release(chunk.sequence)
            self.events.append(("error", request.id, why))

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
        if self._interleaved:
            self._prefill[index].alive = self._decode[index].alive = False
        message = f"{role} engine {index} is lost: {why}"
        for s in list(self._running.values()):
            needs_prefill = s.next < len(s.request.tokens) or any(c.waiting for c in s.chunks)
            if s.d == index if role == "decode" or self._interleaved else s.p == index and needs_prefill:
                self._release(s)
                self.events.append(("error", s.request.id, message))
            elif s.p == index and role == "prefill" and not s.made and s.first is not None:
                self.first(s.request.id, s.first, [])  # its own report may never come
        for chunk in [c for c in self._chunks.values() if c.sequence is None and index == (c.p if role == "prefill" else c.d)]:
            self._moving[chunk.p, chunk.d] -= chunk.bytes  # it will not arrive any more
            self._discard(chunk)
        self._fail_if_nothing_lives(message)

    def lose_process(self, process, why):
        for role, engines in (("prefill", self._prefill), ("decode", self._decode)):
            for i, engine in enumerate(engines):
                if process in engine.processes:
                    self.lose(role, i, why)

    @property
    def broken(self):
        """True when no request can be served any more."""
        return not (any(e.alive for e in self._prefill) and any(e.alive for e in self._decode))

    # The plan.

    def plan(self):
        """The next plan's operations; an empty list when there is nothing to do until the next report."""
        prefills = self._prefill_ops()
        ops, self._ops = self._ops + prefills, []
        for s in list(self._running.values()):
            ops += self._write_ops(s)
        for d, engine in enumerate(self._decode):
            if engine.alive and len(engine.steps) < self._decode_ahead:
                ops += self._decode_ops(d, engine)
        return ops

    def _decode_ops(self, d, engine):
        """One call of decode steps, if a sequence needs it. The last step finds in the cache, of each sequence, its prompt
        and a token for every step before it."""
        lengths = [len(s.request.tokens) + min(s.planned + self._steps, s.request.max_tokens - 1) - 1
                   for s in engine.active.values() if s.planned < s.request.max_tokens - 1]
        if not lengths:
            return []
        for s in engine.active.values():
            s.planned += self._steps
        engine.steps.append(dict(engine.active))
        return [["decode", d, read_length(self._reads, max(lengths))]]

    def _prefill_ops(self):
        """The next chunk of every prefill engine that may have one more on its way: of the request it has begun, or of the
        next in the queue. Where the whole job has no room for a chunk, no younger request takes what room there is."""
        ops = []
        able = [p for p, e in enumerate(self._prefill) if e.alive and e.in_flight < self._prefill_ahead]
        begun = [p for p in able if self._prefill[p].current]
        for p in sorted(begun, key=lambda p: self._prefill[p].current.request.id):
            s = self._prefill[p].current
            size = self._size(s.request, s.next)
            if self._moving.total() + size > self._total_bytes:
                return ops
            if self._moving[p, s.d] + size <= self._pair_bytes:
                ops += self._chunk_ops(s)
        while self._queue:
            size = self._size(self._queue[0], 0)
            if self._moving.total() + size > self._total_bytes:
                return ops
            ways = [(-len(decode.free), self._prefill[p].in_flight, self._prefill[p].planned, p, d)
                    for p in able if self._prefill[p].current is None and self._prefill[p].in_flight < self._prefill_ahead
                    for d, decode in enumerate(self._decode) if decode.alive and decode.free
                    if (p == d if self._interleaved else self._moving[p, d] + size <= self._pair_bytes)]
            if not ways:
                return ops
            *_, p, d = min(ways)
            request = self._queue.popleft()
            s = self._running[request.id] = self._prefill[p].current = _Sequence(request, p, d, self._decode[d].free.pop(0))
            ops += self._chunk_ops(s)
        return ops

    def _size(self, request, start):
        """Bytes that the chunk from this position moves."""
        length = min(len(request.tokens) - start, self._chunk)
        return 0 if self._interleaved else self._chunk_bytes[self._bucket(length)]

    def _bucket(self, length):
        return next(b for b in self._buckets if b >= length)

    def _chunk_ops(self, s):
        """The next chunk of a sequence, and its transfer."""
        engine = self._prefill[s.p]
        part = s.request.tokens[s.next:s.next + self._chunk]
        number, self._transfers = self._transfers, self._transfers + 1
        last = s.next + len(part) == len(s.request.tokens)
        chunk = _Chunk(number, s, s.p, s.d, s.next, len(part), last, self._size(s.request, s.next),
                       set() if self._interleaved else set(self._decode[s.d].processes))
        s.chunks.append(chunk)
        self._chunks[number] = chunk
        self._moving[s.p, s.d] += chunk.bytes
        s.next += len(part)
        engine.planned += len(part)
        if last:
            engine.current = None
        engine.in_flight += 1
        read = read_length(self._reads, chunk.start)
        ops = [["prefill", s.p, number, s.request.id, list(part), chunk.start, read, last, s.request.sampler]]
        if self._interleaved:
            self._computing[number] = s.p
        else:
            ops.append(["transfer", number, s.p, s.d, self._bucket(len(part)), s.request.id])
        return ops

    def _discard(self, chunk):
        del self._chunks[chunk.number]
        self._ops.append(["discard", chunk.number])

    def _write_ops(self, s):
        """Write the chunks that have arrived, in order; activate with the last one."""
        ops = []
        while s.chunks and not s.chunks[0].waiting:
            chunk = s.chunks.popleft()
            del self._chunks[chunk.number]
            activation = None
            if chunk.last:
                self._decode[s.d].active[s.slot] = s
                activation = [len(s.request.tokens), s.request.max_tokens - 1, list(s.request.stop_ids), s.request.sampler]
            ops.append(["write", s.d, chunk.number, s.slot, chunk.start, activation])
        return ops

    # Ends.

    def _made(self, s, tokens, bests):
        """Tokens of a sequence, in order; decides by the device's own rule whether it has ended."""
        s.made += len(tokens)
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
        if prefill.current is s:
            prefill.current = None
        for chunk in s.chunks:
            chunk.sequence = None
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
            while self._queue:
                self.events.append(("error", self._queue.popleft().id, why))
