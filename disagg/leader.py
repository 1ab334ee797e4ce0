"""What process 0 does beside its engine: it takes requests, schedules, publishes plans and gathers reports.

One thread. Front ends call submit, cancel and stop from any thread; a request's handler is called from this one.
"""

import itertools
import queue
import threading
import time

from absl import logging

from disagg.metrics import Life


class Leader:
    def __init__(self, control, scheduler, stages, metrics, *, max_queue, deadline_s, stall_s):
        """max_queue: requests that may wait. deadline_s: for an arrival, once its chunk is computed. stall_s: for computing a chunk or a decode call."""
        self._control, self._scheduler, self._stages = control, scheduler, stages
        self.metrics = metrics
        self._deadline_s, self._stall_s = deadline_s, stall_s
        self.max_queue = max_queue
        self._idle_s = deadline_s / 5            # an empty plan is published at least this often, as a sign of life
        self._commands = queue.SimpleQueue()     # (method, arguments) of front ends
        self._handlers = {}                      # request id -> handler
        self._numbers = itertools.count()
        self._chains = {}                        # plan -> {process: hash of what it has executed up to it}
        self.corrupted = 0                       # reports of chunks with a wrong checksum
        self.error = None                        # why the cell cannot serve any more
        self._stopped = False                    # the loop below is to end
        self._ended, self._ending = False, threading.Lock()  # it has ended: no command is taken any more
        self._thread = threading.Thread(target=self._run, daemon=True, name="leader")

    def start(self):
        self._thread.start()

    def join(self):
        self._thread.join()

    # Called by front ends.

    @property
    def plans(self):
        """Plans published so far."""
        return self._control.published

    def new_id(self):
        return next(self._numbers)

    def submit(self, request, handler):
        """handler(kind, *details): ("tokens", ids, bests), then once ("finish", reason), ("error", message) or, if the queue
        has no room for it, ("refused", message). -> the request's metrics.Life."""
        life = Life(len(request.tokens), time.monotonic())
        self._command(self._submit, request, handler, life)
        return life

    def cancel(self, request_id, how="cancelled"):
        """No more calls of its handler follow once the leader has seen this. how: what it counts as, one of metrics.ENDS."""
        self._command(self._cancel, request_id, how)

    def stop(self, error=None):
        """End the cell; pending requests get an error."""
        self._command(self._end, error)

    # The thread.

    def _command(self, method, *arguments):
        with self._ending:
            if not self._ended:
                self._commands.put((method, arguments))
                self._control.wake()
                return
        if method == self._submit:
            arguments[1]("error", self._why_ended())

    def _run(self):
        try:
            self._lead()
        except Exception as e:  # nobody else would end the other processes
            logging.exception("the leader failed")
            self.error = self.error or f"the leader failed: {type(e).__name__}: {e}"
        finally:
            logging.info("%s", self._stages.moved())
            self._control.publish([["stop", self.error]])
            with self._ending:
                self._ended = True
            self._take_commands()
            for request_id, handler in self._handlers.items():
                self.metrics.ended(request_id, "error", time.monotonic())
                handler("error", self._why_ended())

    def _why_ended(self):
        return self.error or "the cell has stopped"

    def _take_commands(self):
        while not self._commands.empty():
            method, arguments = self._commands.get()
            method(*arguments)

    def _lead(self):
        timeout, published = self._idle_s, time.monotonic()
        while not self._stopped:
            reports = self._control.receive(timeout)
            for process, message in reports:
                getattr(self, f"on_{message[0]}")(process, *message[1:])
            self._take_commands()
            for process, why in self._control.lost():
                self._lose(process, why)
            for role, index, why in self._stages.overdue(self._deadline_s, self._stall_s):
                self._lose_engine(role, index, why)
            self._scheduler.expire(time.monotonic())
            self._hand_out()
            if self._stopped:
                break
            ops = self._scheduler.plan()
            if ops or time.monotonic() - published >= self._idle_s:
                self._control.publish(ops)
                published = time.monotonic()
                self._stages.planned(ops)
                self.metrics.published()
            self._hand_out()
            # With something planned there may be more to plan at once; else the next report decides.
            timeout = 0 if ops else self._idle_s
            if (end := self._scheduler.next_timeout) is not None:
                timeout = min(timeout, max(0.0, end - time.monotonic()))

    def _submit(self, request, handler, life):
        self._handlers[request.id] = handler
        self.metrics.submitted(request.id, life)
        logging.info("request %d: %d prompt tokens, up to %d new ones", request.id, len(request.tokens), request.max_tokens)
        self._scheduler.submit(request, life.submitted)

    def _cancel(self, request_id, how="cancelled"):
        self._handlers.pop(request_id, None)
        self.metrics.ended(request_id, how, time.monotonic())
        self._scheduler.cancel(request_id)

    def _end(self, error):
        self.error = self.error or error
        self._stopped = True

    def _hand_out(self):
        events, self._scheduler.events = self._scheduler.events, []
        now = time.monotonic()
        self.metrics.made(events, now)
        for kind, request_id, *details in events:
            handler = self._handlers.get(request_id)
            if kind != "tokens":
                self._handlers.pop(request_id, None)
                self.metrics.ended(request_id, details[0] if kind == "finish" else kind, now)
            if handler:
                handler(kind, *details)
        if self._scheduler.broken and not self._scheduler.pending:
            self._end(self.error or "no engine is left to serve requests")

    def _lose(self, process, why):
        logging.error("%s", why)
        self._control.forget(process)
        self.error = self.error or why
        self._scheduler.lose_process(process, why)

    def _lose_engine(self, role, index, why):
        logging.error("%s engine %d is lost: %s", role, index, why)
        self.error = self.error or f"{role} engine {index}: {why}"
        self._scheduler.lose(role, index, why)

    # Reports, by name.

    def on_wake(self, process):
        pass

    def on_goodbye(self, process):
        self._lose(process, f"process {process} left")

    def on_gone(self, process, why):
        self._end(why)

    def on_failed(self, process, why):
        self._lose(process, f"process {process} failed: {why}")

    def on_computed(self, process, number):
        self._stages.computed(number)
        self._scheduler.computed(number)

    def on_first(self, process, number, firsts):
        self._stages.computed(number)
        self._scheduler.computed(number)
        for request_id, token, best in firsts:
            self._scheduler.first(request_id, token, best)

    def on_arrived(self, process, number, error, tokens):
        self._stages.arrived(process, number, error)
        if error:
            self.error = self.error or f"transfer {number} failed: {error}"
        self._scheduler.arrived(process, number, error, tokens)

    def on_corrupt(self, process, number, why):
        self.corrupted += 1
        logging.error("transfer %d: %s", number, why)
        self._scheduler.corrupt(number, f"transfer {number}: {why}")

    def on_tokens(self, process, d, rows, bests, idle, busy):
        self._stages.tokens(d, idle, busy)
        self._scheduler.tokens(d, rows, bests)

    def on_broken(self, process, role, index, why):
        self._lose_engine(role, index, f"it failed on process {process}: {why}")

    def on_out_of_step(self, process, why):
        self._end(f"transfers are out of step: {why}")

    def on_chain(self, process, plan, chains):
        """Compare what the processes have executed and issued, plan by plan; all must have done the same."""
        seen = self._chains.setdefault(plan, {})
        seen[process] = chains
        if not seen.keys() >= self._control.positions().keys():
            return  # with all of them it can be said who is the odd one
        for i, at in enumerate(range(plan - len(chains) + 1, plan + 1)):
            done = {}
            for q, theirs in sorted(seen.items()):
                done.setdefault(theirs[i], []).append(q)
            if len(done) > 1:
                *odd, most = sorted(done.values(), key=len)
                if len(odd[-1]) == len(most):  # with two processes nobody can say which of them it was
                    one, other = sorted((most[0], odd[-1][0]))
                    self._end(f"processes {one} and {other} diverged at plan {at}: they did not issue the same transfers")
                else:
                    self._end(f"process {odd[0][0]} diverged from the others at plan {at}: it did not issue the same transfers")
                return
        for old in [n for n in self._chains if n < plan - 1000]:
            del self._chains[old]
