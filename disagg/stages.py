"""The life of every chunk and decode call, as process 0 sees it: log lines of the stages, what is overdue, and what the metrics of
requests are made of.

All times are on process 0's clock, taken when it plans an operation or gets a report.
"""

import collections
import dataclasses
import time

from absl import logging


@dataclasses.dataclass
class _Chunk:
    p: int | None               # None: decode engine d computes it
    d: int
    requests: tuple[int, ...]
    tokens: int
    bucket: int | None          # None: not transferred
    planned: float
    computed: float | None = None
    done: bool = False          # written, or never will be
    waiting: set = dataclasses.field(default_factory=set)  # processes that have not reported it arrived

    @property
    def what(self):
        return ("request " if len(self.requests) == 1 else "requests ") + ", ".join(map(str, self.requests))


class Stages:
    def __init__(self, topology, chunk_bytes, row_bytes, metrics):
        """chunk_bytes: what a chunk of each bucket moves. row_bytes: what one position of the cache takes. metrics: metrics.Metrics."""
        self._topology, self._bytes, self._row_bytes, self._metrics = topology, chunk_bytes, row_bytes, metrics
        self._moved = collections.Counter()            # chunks, bytes; rows: prompt positions; padded: positions with padding
        self._chunks = {}                              # number -> _Chunk, until it is discarded and computed
        self._free_at = collections.defaultdict(float)  # engine -> when it had computed its latest chunk
        self._calls = [collections.deque() for _ in topology.decode]  # each unreported decode call: (when planned, whether slots were active since the last)

    def planned(self, ops):
        now = time.monotonic()
        for name, *args in ops:
            if name in ("prefill", "local"):
                index, number, _, _, prompts = args
                self._begin(_Chunk(index if name == "prefill" else None, index, tuple(request for request, *_ in prompts),
                                   sum(len(tokens) for _, tokens, _ in prompts), None, now), number)
            elif name == "chunk":
                p, number, request, tokens, *_ = args
                self._begin(_Chunk(p, p, (request,), len(tokens), None, now), number)
            elif name == "transfer":
                number, p, d, bucket, _ = args
                chunk = self._chunks[number]
                chunk.d, chunk.bucket, chunk.waiting = d, bucket, set(self._topology.decode[d].processes)
                self._moved.update(chunks=1, bytes=self._bytes[bucket], rows=chunk.tokens, padded=bucket)
                self._metrics.moved(chunk.requests, self._bytes[bucket])
            elif name == "write":
                d, number, index, _, slot, start, activation = args
                chunk = self._chunks[number]
                end = activation[0] if activation else start + chunk.tokens
                logging.info("insert on %s: request %d, slot %d, positions %d to %d", self._topology.decode[d].name,
                             chunk.requests[index], slot, start, end - 1)
                if activation:
                    self._metrics.activated(chunk.requests[index], d, now)
            elif name == "discard":
                if args[0] in self._chunks:  # unless its engine is lost
                    self._chunks[args[0]].done = True
                    self._forget(args[0])
            elif name == "decode":
                self._calls[args[0]].append((now, self._metrics.decoding_on(args[0])))
            elif name == "drop":
                role, index, _ = args
                if role == "decode":
                    self._calls[index].clear()
                self._chunks = {n: c for n, c in self._chunks.items() if index != (c.p if role == "prefill" else c.d)}

    def _begin(self, chunk, number):
        self._chunks[number] = chunk
        self._metrics.begun(chunk.requests, chunk.planned)

    def computed(self, number):
        chunk = self._chunks.get(number)
        if chunk is None:
            return
        now = chunk.computed = time.monotonic()
        engine = self._topology.decode[chunk.d].name if chunk.p is None else self._topology.prefill[chunk.p].name
        seconds = now - max(chunk.planned, self._free_at[engine])
        self._free_at[engine] = now
        self._metrics.computed(chunk.requests, now)
        logging.info("prefill on %s: %s, %d tokens, %.1f ms", engine, chunk.what, chunk.tokens, seconds * 1e3)
        self._forget(number)

    def arrived(self, process, number, error):
        """The transfer's time counts from its chunk being computed to its arrival at the last process."""
        chunk = self._chunks.get(number)
        if chunk is None or process not in chunk.waiting:
            return
        chunk.waiting.discard(process)
        way, size = f"transfer {self._way(chunk)}: {chunk.what}", self._bytes[chunk.bucket]
        if error:
            logging.error("%s, %d bytes, failed: %s", way, size, error)
        elif not chunk.waiting:
            now = time.monotonic()
            self._metrics.arrived(chunk.requests, now)
            seconds = max(now - (chunk.computed or chunk.planned), 1e-6)
            logging.info("%s, %d bytes, %.1f ms, %.3f GB/s", way, size, seconds * 1e3, size / seconds / 1e9)

    def tokens(self, d, idle, busy):
        """A decode call's result; idle, busy: see loop.py. No time of a device counts as idle in which nothing was to be decoded."""
        if self._calls[d]:
            _, decoding = self._calls[d].popleft()
            self._metrics.called(d, idle if decoding else 0.0, busy)

    def moved(self):
        """What all transfers so far have moved, beside the least: the cache's rows of the prompts' own positions. A line."""
        m = self._moved
        if not m["chunks"]:
            return "nothing was transferred"
        least = m["rows"] * self._row_bytes
        return (f"{m['bytes']:,} bytes moved in {m['chunks']:,} chunks: {m['bytes'] / least:.3f} x the prompts' own rows of the cache, of which "
                f"padding to buckets is {m['padded'] / m['rows']:.3f} x and all else {m['bytes'] / (m['padded'] * self._row_bytes):.4f} x")

    def overdue(self, arrival_s, compute_s):
        """[(role, index, why)] of engines whose chunk has not arrived arrival_s after it was computed, or whose chunk or
        decode call is not computed compute_s after it was planned."""
        now, late = time.monotonic(), []
        for number, chunk in self._chunks.items():
            if chunk.computed is None and now - chunk.planned > compute_s:
                late.append((*(("decode", chunk.d) if chunk.p is None else ("prefill", chunk.p)), f"chunk {number} of {chunk.what} was not computed within {compute_s:.0f} s"))
            elif chunk.computed is not None and chunk.waiting and now - chunk.computed > arrival_s:
                late.append(("prefill", chunk.p, f"transfer {number} of {chunk.what} {self._way(chunk)} did not arrive at "
                             f"processes {sorted(chunk.waiting)} within {arrival_s:.0f} s"))
        for d, calls in enumerate(self._calls):
            if calls and now - calls[0][0] > compute_s:
                late.append(("decode", d, f"a decode call was not computed within {compute_s:.0f} s"))
        return late

    def _way(self, chunk):
        return f"from {self._topology.prefill[chunk.p].name} to {self._topology.decode[chunk.d].name}"

    def _forget(self, number):
        """A chunk that is discarded and computed is done with; the two come in either order."""
        chunk = self._chunks[number]
        if chunk.computed is not None and chunk.done:
            del self._chunks[number]
