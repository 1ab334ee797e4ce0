"""What every process does: read a plan, execute its operations that concern it, report.

The operations, JSON lists:
  ["prefill", p, number, bucket, count, prompts]                  compute whole prompts together on prefill engine p, at most
                                                                  count: [[request, tokens, sampler], ...]
  ["local", d, number, bucket, count, prompts]                    the same on decode engine d, where they will be decoded
  ["chunk", p, number, request, tokens, start, read, last, sampler]   compute a part of a longer one, which reads so many
                                                                  positions of the engine's cache
  ["transfer", number, p, d, bucket, request]                     send either to decode engine d: every process issues this
  ["write", d, number, index, length, slot, start, activation]    put the index-th prompt of so many positions, or all where
                                                                  length is null, into a reserved slot; activation is null,
                                                                  or, with the prompt's end, [position, left, stop ids, sampler]
  ["decode", d, read, steps]                                      so many decode steps in one call, which read so many positions
  ["free", d, slot]                                               end a slot before its limit
  ["discard", number]                                             forget what was computed: all is written that will be
  ["drop", role, index, why]                                      the engine is dead: its processes leave
  ["stop", error]                                                 the end; error is null or the reason

The reports:
  ["computed", number]  ["first", number, [[request, token, best], ...]]   from the leader of the engine that computed it
  ["arrived", number, error, tokens]                              from every process of the receiving engine
  ["corrupt", number, why]                                        before it, if the values are not those that were sent
  ["tokens", d, rows, bests, idle, busy]                          from a decode engine's leader: of a call; since the call before it
                                                                  the device had so many seconds nothing to do, and something
  ["broken", role, index, why]                                    an engine's computation failed
  ["out_of_step", why]                                            a transfer brought what another one should have
  ["chain", plan, hashes]                                         debug: what this process had executed and issued after each
                                                                  of the last plans up to this one

Three threads: this one reads the log and is the only one to dispatch programs and transfers, one polls for arrivals, one
reads results from the devices. Nothing here depends on anything that is not in the log.
"""

import collections
import hashlib
import json
import queue
import threading
import time

import jax
import numpy as np
from absl import logging

from disagg import sampling
from disagg.trace import now

CHAIN_EVERY = 8  # plans of one report in debug mode
POLL_S = 0.0005, 0.004  # between two looks at what is to arrive: at least and at most, else 2% of the time waited so far


class Stopped(Exception):
    """The log has ended this process early; says why."""


class Loop:
    def __init__(self, topology, control, transfers, prefill, decode, local, trace, *, hash_chain):
        """prefill, decode: this process's PrefillEngine and DecodeEngine, None where it has none; local: a PrefillEngine on the
        mesh of the latter, or None. trace: trace.Trace."""
        self._topology, self._control, self._transfers = topology, control, transfers
        self._prefill, self._decode, self._local, self._trace = prefill, decode, local, trace
        mine = topology.my_prefill, topology.my_decode
        self._p, self._d = (e.index if e else None for e in mine)
        self._leads_prefill, self._leads_decode = (e is not None and e.leader == topology.process for e in mine)
        self._hash_chain = hash_chain
        self._chunks = {}      # number -> chunk computed here or joined, not sent or discarded yet
        self._received = {}    # number -> (prefill engine, parts) received here, not joined or discarded yet
        self._arriving = collections.OrderedDict()  # number -> (prefill engine, request, parts, when issued)
        self._lock = threading.Condition()          # of the two above
        self._running = True
        self._chain = hashlib.blake2b(digest_size=8)
        self._results = queue.SimpleQueue()         # (what to report, arrays to read for it, what to trace)
        self._used = [0.0, 0.0]                     # seconds without and with something to compute, since the last decode call
        self._done_at = now()                       # when the latest result was read

    def run(self):
        """Until the log says stop. Raises Stopped if for a failure, ControlError if the log ends."""
        threads = [threading.Thread(target=self._guard, args=(t,), daemon=True, name=t.__name__) for t in (self._watch, self._read)]
        for t in threads:
            t.start()
        chains = []  # after each plan since the last comparison
        try:
            while True:
                n, ops = self._control.next()
                for name, *args in ops:
                    if name == "stop":
                        if args[0]:
                            raise Stopped(args[0])
                        return
                    getattr(self, f"op_{name}")(*args)
                if self._hash_chain:
                    self._chain.update(json.dumps(ops).encode() + self._transfers.chain.digest())
                    chains.append(self._chain.hexdigest())
                    if len(chains) == CHAIN_EVERY:
                        self._control.report("chain", n, chains)
                        chains = []
        finally:
            self._results.put(None)
            with self._lock:
                self._running = False
                self._lock.notify()
            for t in threads:
                t.join()

    # Operations.

    def op_prefill(self, p, number, bucket, count, prompts):
        if p == self._p:
            self._whole_prompts("prefill", p, self._prefill, self._leads_prefill, number, bucket, count, prompts)

    def op_local(self, d, number, bucket, count, prompts):
        if d == self._d:
            self._whole_prompts("local", d, self._local, self._leads_decode, number, bucket, count, prompts)

    def _whole_prompts(self, kind, index, engine, leads, number, bucket, count, prompts):
        begun = now()
        requests, tokens, samplers = zip(*prompts)
        chunk, best = engine.run_prompts(tokens, [sampling.pack(*s) for s in samplers], bucket, count, number, requests[0])
        self._chunks[number] = chunk
        if leads:
            self._results.put((("first", number, requests), _to_host(chunk["ticket"], *best), (kind, index, begun, {
                "number": number, "request": requests[0], "prompts": len(prompts), "tokens": sum(map(len, tokens)), "last": True})))

    def op_chunk(self, p, number, request, tokens, start, read, last, sampler):
        if p != self._p:
            return
        begun = now()
        chunk, best = self._prefill.run(tokens, start, read, last, sampling.pack(*sampler), number, request)
        self._chunks[number] = chunk
        if self._leads_prefill:
            what = ("first", number, [request]) if last else ("computed", number)
            self._results.put((what, _to_host(chunk["ticket"], *(best or ())),
                               ("prefill", p, begun, {"number": number, "request": request, "tokens": len(tokens), "last": last})))

    def op_transfer(self, number, p, d, bucket, request):
        begun = now()
        parts = self._transfers.issue(number, p, d, bucket, self._chunks.pop(number, None))
        if parts is not None:
            with self._lock:
                self._arriving[number] = p, request, parts, begun
                self._lock.notify()

    def op_write(self, d, number, index, length, slot, start, activation):
        if d != self._d:
            return
        begun = now()
        if number not in self._chunks:
            with self._lock:
                p, parts = self._received.pop(number)
            self._chunks[number] = self._transfers.routes[p, d].join(parts)
        chunk = self._chunks[number]
        self._decode.write(chunk, slot, start, index, length)
        if activation:
            position, left, stops, sampler = activation
            self._decode.activate(chunk["ticket"], slot, position, left, stops, sampling.pack(*sampler), index)
        if self._trace.enabled and self._leads_decode:
            self._results.put((None, [self._decode.done()],
                               ("write", d, begun, {"number": number, "slot": slot, "last": bool(activation)})))

    def op_decode(self, d, read, steps):
        if d == self._d:
            begun = now()
            out = self._decode.run(read, steps)
            if self._leads_decode:
                self._results.put((("tokens", d), _to_host(*out), ("decode", d, begun, {"read": read, "steps": steps})))

    def op_free(self, d, slot):
        if d == self._d:
            self._decode.free(slot)

    def op_discard(self, number):
        self._chunks.pop(number, None)
        with self._lock:
            self._arriving.pop(number, None)
            self._received.pop(number, None)

    def op_drop(self, role, index, why):
        if index == (self._p if role == "prefill" else self._d):
            if self._topology.process:
                raise Stopped(f"{role} engine {index}, to which process {self._topology.process} belongs, is lost: {why}")
            self._p, self._d = (None, self._d) if role == "prefill" else (self._p, None)  # process 0 keeps the log

    # The other threads.

    def _guard(self, target):
        try:
            target()
        except Exception as e:  # nobody would wait for this thread: the leader must know
            logging.exception("%s failed", target.__name__)
            self._control.report("failed", f"{type(e).__name__}: {e}")

    def _watch(self):
        """Report every chunk that has arrived here, or failed to."""
        while True:
            with self._lock:
                while self._running and not self._arriving:
                    self._lock.wait()
                if not self._running:
                    return
                waiting = list(self._arriving.items())
            done = [self._arrived(*item) for item in waiting if all(a.is_ready() for a in jax.tree.leaves(item[1][2]))]
            if not done:
                waited = now() - min(begun for _, (*_, begun) in waiting)
                time.sleep(min(max(0.02 * waited, POLL_S[0]), POLL_S[1]))

    def _arrived(self, number, entry):
        p, request, parts, begun = entry
        error = tokens = None
        try:
            jax.block_until_ready(parts)  # a failed receive is ready too, and raises here
            arrived = now()
            for part in parts:
                ticket = np.asarray(part["ticket"].addressable_data(0)).tolist()
                tag, tokens = ticket[:2], ticket[2:]
                if tag != [number, request]:
                    self._control.report("out_of_step", f"process {self._topology.process} waited for transfer {number} "
                                         f"of request {request} and received transfer {tag[0]} of request {tag[1]}")
                    error = "out of step"
            if not error and (wrong := self._transfers.wrong_sums(parts)):
                device, sent, found = wrong[0]
                self._control.report("corrupt", number, f"what arrived at {device} is not what was sent: its checksum is "
                                     f"{found:08x}, not {sent:08x}")
            if self._leads_decode:
                what = {"number": number, "request": request, "from": p}
                self._trace.span("transfer", self._d, begun, arrived, **what)
                self._trace.span("check", self._d, arrived, now(), **what)
        except jax.errors.JaxRuntimeError as e:
            error = f"process {self._topology.process}: {str(e).splitlines()[0]}"
        with self._lock:
            if self._arriving.pop(number, None) is not None and not error:
                self._received[number] = p, parts
        self._control.report("arrived", number, error, tokens)

    def _read(self):
        """Read results from the devices, in the order in which they were dispatched, and report them."""
        while (item := self._results.get()) is not None:
            what, arrays, (kind, engine, begun, details) = item
            try:
                first, *best = (np.asarray(a).tolist() for a in arrays)  # of a call or of a chunk's ticket
                self._note_use(begun, ended := now())
                self._trace.span(kind, engine, begun, ended, **details)
            except jax.errors.JaxRuntimeError as e:
                role = "prefill" if kind == "prefill" else "decode"
                self._control.report("broken", role, self._d if role == "decode" else self._p, str(e).splitlines()[0])
                continue
            if what is None:
                continue
            if what[0] == "tokens":
                self._control.report(*what, first, [[list(zip(i, v)) for i, v in zip(*step)] for step in zip(*best)],
                                     *(round(seconds, 6) for seconds in self._used))
                self._used = [0.0, 0.0]
            elif what[0] == "first":
                bests = zip(*best)  # of each prompt: ids, scores
                self._control.report("first", what[1], [[request, token, list(zip(*of))] for request, token, of in zip(what[2], first[2:], bests)])
            else:
                self._control.report(*what)

    def _note_use(self, begun, ended):
        """Results come in the order of dispatch: what was dispatched after the result before was read found the device idle."""
        self._used[0] += max(0.0, begun - self._done_at)
        self._used[1] += max(0.0, ended - max(begun, self._done_at))
        self._done_at = ended


def _to_host(*arrays):
    """This process's copies of replicated arrays, on their way to the host."""
    local = [a.addressable_data(0) for a in arrays]
    for a in local:
        a.copy_to_host_async()
    return local
