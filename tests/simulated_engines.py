"""A real leader, scheduler and log in this process, over engines without devices that answer every plan as the loop does.

Token i of a request is what `answer(request id, i)` gives, by default 5; an engine has been idle for IDLE_S before every call.
"""

import contextlib
import threading
import time
import types

from disagg.control import Control
from disagg.leader import Leader
from disagg.metrics import Metrics
from disagg.scheduler import Scheduler
from disagg.stages import Stages

CHUNK, SLOTS, STEPS = 16, 4, 2
ROW_BYTES = 10
IDLE_S, BUSY_S = 0.25, 0.75


@contextlib.contextmanager
def leading(answer=lambda request, i: 5, interleaved=False, call_s=0.0, max_queue=100):
    """The Leader of one prefill and one decode engine. call_s: what each decode call takes."""
    control = Control(None, 0, 1, heartbeat_s=1, deadline_s=30, stall_s=30)
    chunk_bytes = {CHUNK: ROW_BYTES * CHUNK}
    scheduler = Scheduler(prefill=[[0]], decode=[[0]], interleaved=interleaved, slots=SLOTS, buckets=(CHUNK,), reads=(1000,), steps=STEPS,
                          prefill_ahead=2, decode_ahead=2, batch=1, chunk_bytes=chunk_bytes, pair_bytes=1000, total_bytes=1000,
                          max_queue=max_queue)
    topology = types.SimpleNamespace(**{role: [types.SimpleNamespace(name=f"{role} 0", processes=[0])] for role in ("prefill", "decode")})
    metrics = Metrics(scheduler, control, 1)
    leader = Leader(control, scheduler, Stages(topology, chunk_bytes, ROW_BYTES, metrics), metrics, max_queue=max_queue, deadline_s=30,
                    stall_s=30)
    leader.start()
    engines = threading.Thread(target=_Engines(control, answer, call_s).run, daemon=True)
    engines.start()
    try:
        yield leader
    finally:
        leader.stop()
        leader.join()
        engines.join()


class _Engines:
    def __init__(self, control, answer, call_s):
        self._control, self._answer, self._call_s = control, answer, call_s
        self._requests = {}        # chunk -> (request, whether it is its last)
        self._slots = [None] * SLOTS  # [request, tokens made, tokens left, stop ids]

    def run(self):
        while True:
            for name, *args in self._control.next()[1]:
                if name == "stop":
                    return
                getattr(self, f"op_{name}", lambda *_: None)(*args)

    def op_prefill(self, p, number, bucket, count, prompts):
        ((request, _, _),) = prompts
        self._computed(number, request, True)

    def op_chunk(self, p, number, request, tokens, start, read, last, sampler):
        self._computed(number, request, last)

    def _computed(self, number, request, last):
        self._requests[number] = request, last
        if last:
            self._control.report("first", number, [[request, self._answer(request, 0), []]])
        else:
            self._control.report("computed", number)

    def op_transfer(self, number, p, d, bucket, request):
        _, last = self._requests[number]
        self._control.report("arrived", number, None, [self._answer(request, 0) if last else -1])

    def op_write(self, d, number, index, length, slot, start, activation):
        if activation:
            request, _ = self._requests[number]
            _, left, stops, _ = activation
            self._slots[slot] = [request, 1, 0 if self._answer(request, 0) in stops else left, stops]

    def op_decode(self, d, read, steps):
        time.sleep(self._call_s)
        rows = [[self._step(slot) for slot in self._slots] for _ in range(steps)]
        self._control.report("tokens", d, rows, [[[] for _ in row] for row in rows], IDLE_S, BUSY_S)

    def _step(self, slot):
        if slot is None or not slot[2]:
            return -1
        token = self._answer(slot[0], slot[1])
        slot[1] += 1
        slot[2] = 0 if token in slot[3] else slot[2] - 1
        return token

    def op_free(self, d, slot):
        self._slots[slot][2] = 0
