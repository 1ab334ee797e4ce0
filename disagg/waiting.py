"""The requests that wait to begin: by priority, then as they came. Short and long ones are kept apart, so that a short one behind
many long ones is found at once."""

import bisect
import heapq
import itertools


class Waiting:
    def __init__(self, chunk):
        """chunk: prompt tokens of the longest short one."""
        self._chunk = chunk
        self._short, self._long = [], []  # (priority, arrival, request), ascending
        self._entries = {}                # request id -> its entry
        self._arrivals = itertools.count()

    def __len__(self):
        return len(self._entries)

    def __iter__(self):
        return (request for *_, request in heapq.merge(self._short, self._long))

    def add(self, request):
        entry = self._entries[request.id] = request.priority, next(self._arrivals), request
        bisect.insort(self._of(request), entry)

    def get(self, request_id):
        """The request, or None if it does not wait."""
        return self._entries[request_id][2] if request_id in self._entries else None

    def remove(self, request_id):
        entry = self._entries.pop(request_id)
        requests = self._of(entry[2])
        del requests[bisect.bisect_left(requests, entry)]

    def first(self, long):
        """The first one; long: may it be a long one? None where there is none."""
        firsts = [requests[0] for requests in (self._short, self._long if long else []) if requests]
        return min(firsts)[2] if firsts else None

    def short_ones(self, long):
        """Short ones in order; long: up to the first long one."""
        end = self._long[0] if long and self._long else None
        for entry in self._short:
            if end and entry > end:
                return
            yield entry[2]

    def _of(self, request):
        return self._short if len(request.tokens) <= self._chunk else self._long
