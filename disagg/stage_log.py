"""Log lines of each request's stages, with the engine and slice they ran on; all times on process 0's clock."""

import time

import jax
from absl import logging

from disagg import prefill


class StageLog:
    def __init__(self, model, topology, buckets):
        self._topology = topology
        self._bytes = {b: sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(prefill.chunk_shape(model, b)))
                       for b in buckets}
        self._buckets = buckets
        self._chunks = {}        # number -> [p, request, tokens, planned, computed]
        self._moves = {}         # number -> (p, d, bucket, processes that have not reported it)
        self._free_at = [0.0] * len(topology.prefill)  # when an engine had computed its latest chunk
        self._requests = {}      # request -> its chunks' numbers

    def submitted(self, request):
        logging.info("request %d: %d prompt tokens, up to %d new ones", request.id, len(request.tokens), request.max_tokens)
        self._requests[request.id] = []

    def planned(self, ops):
        now = time.monotonic()
        for name, *args in ops:
            if name == "prefill":
                p, number, request, tokens, *_ = args
                self._chunks[number] = [p, request, len(tokens), now, None]
                self._requests.get(request, []).append(number)
            elif name == "transfer":
                number, p, d, bucket, _ = args
                self._moves[number] = p, d, bucket, set(self._topology.decode[d].processes)
            elif name == "write":
                d, number, slot, start, _ = args
                chunk = self._chunks.get(number)
                if chunk:
                    logging.info("insert on %s: request %d, slot %d, positions %d to %d", self._topology.decode[d].name,
                                 chunk[1], slot, start, start + chunk[2] - 1)
            elif name == "discard":
                self._chunks.pop(args[0], None)
                self._moves.pop(args[0], None)

    def computed(self, number):
        if number not in self._chunks:
            return
        chunk = self._chunks[number]
        p, request, tokens, planned, _ = chunk
        now = chunk[4] = time.monotonic()
        seconds = now - max(planned, self._free_at[p])
        self._free_at[p] = now
        logging.info("prefill on %s: request %d, %d tokens, %.1f ms", self._topology.prefill[p].name, request, tokens,
                     seconds * 1e3)

    def arrived(self, process, number, error):
        """The transfer's time counts from its chunk being computed to its arrival at the last process."""
        if number not in self._moves:
            return
        p, d, bucket, waiting = self._moves[number]
        waiting.discard(process)
        if error or not waiting:
            del self._moves[number]
            chunk = self._chunks.get(number)
            way = f"transfer from {self._topology.prefill[p].name} to {self._topology.decode[d].name}"
            request = chunk[1] if chunk else "?"
            if error:
                logging.error("%s: request %s, %d bytes, failed: %s", way, request, self._bytes[bucket], error)
                return
            seconds = max(time.monotonic() - (chunk[4] or chunk[3]), 1e-6) if chunk else 0.0
            logging.info("%s: request %s, %d bytes, %.1f ms, %.3f GB/s", way, request, self._bytes[bucket], seconds * 1e3,
                         self._bytes[bucket] / seconds / 1e9 if seconds else 0.0)

    def ended(self, request):
        for number in self._requests.pop(request, []):
            self._chunks.pop(number, None)
            self._moves.pop(number, None)

    def lost(self, why):
        logging.error("%s", why)
