"""A front end for tests: long prompts cancelled all at once in one stage after the other, and what the leader plans then."""

import json
import queue
import time

from disagg.metrics import Life
from disagg.scheduler import Request

# Of the scheduler, when the plan is about to be made: whether the long prompts have come so far.
STAGES = {
    "queued": lambda s: len(s._queue) == len(s.pending),
    "prefilling": lambda s: any(0 < q.next < len(q.request.tokens) for q in s._running.values()),
    "moving": lambda s: any(c.waiting and c.number not in s._computing for c in s._chunks.values()),
    "waiting for a slot": lambda s: len(s._queue) > 0 and not any(d.free for d in s._decode),
    "decoding": lambda s: any(q.made > 1 for d in s._decode for q in d.active.values()),
}


class Cancels:
    """For each of `stages`: `count` prompts of `long` tokens; when they are there all are cancelled and a short one is submitted.

    Writes lines {"stage", "cancelled", "short" (ids), "plans" (operations of each plan since, until the short one's end), "tokens",
    "first_s" (until its first token)}; before them one of stage "idle", without others.
    """

    def __init__(self, output, *, stages, count, long, short):
        self._output, self._stages, self._count, self._long, self._short = output, stages, count, long, short

    def __call__(self, leader):
        with open(self._output, "w") as output:
            for stage in ("idle", "idle", *self._stages):  # the first one of all warms up
                output.write(json.dumps(self._run(leader, stage)) + "\n")

    def _run(self, leader, stage):
        scheduler, plan, events = leader._scheduler, leader._scheduler.plan, queue.SimpleQueue()
        ids = [leader.new_id() for _ in range(0 if stage == "idle" else self._count)]
        short = Request(leader.new_id(), tuple(range(3, 3 + self._short)), 4, (), (1, 0.0, 0, 1.0))
        plans, begun = [], None

        def watched():
            """In the leader's thread, between its reports and the plan."""
            nonlocal begun
            if begun is None and (stage == "idle" or STAGES[stage](scheduler)):
                for i in ids:
                    leader._cancel(i)
                leader._submit(short, lambda *event: events.put((time.monotonic(), *event)), Life(self._short, time.monotonic()))
                begun = time.monotonic()
            ops = plan()
            if begun is not None:
                plans.append(ops)
            return ops

        def submit():
            scheduler.plan = watched
            for i in ids:
                prompt = tuple(3 + (7 * i + n) % 400 for n in range(self._long))
                leader._submit(Request(i, prompt, 60, (), (i, 0.0, 0, 1.0)), lambda *event: None, Life(self._long, time.monotonic()))
        leader._command(submit)
        tokens, first = [], None
        while True:
            now, kind, *details = events.get()
            if kind != "tokens":
                break
            first = first or now
            tokens += details[0]
        leader._command(setattr, scheduler, "plan", plan)
        assert kind == "finish", details
        return {"stage": stage, "cancelled": ids, "short": short.id, "plans": plans, "tokens": tokens, "first_s": first - begun}
