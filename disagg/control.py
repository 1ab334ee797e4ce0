"""The ordered log of plans and the reports that come back, over JAX's coordination service.

Process 0 publishes plan n = 0, 1, 2, ...: a list of operations. Every process reads all of them in order. Every process
sends reports to process 0; each carries its position in the log and serves as heartbeat. Nothing else goes between the
processes, so that this file is all that has to change for another transport.
"""

import contextlib
import json
import queue
import threading
import time

import jax

DIRECTORY = 64  # keys of the store are deleted a directory at a time


class ControlError(RuntimeError):
    """The log cannot go on: its message says which process, and why."""


class Control:
    """One process's end of the log."""

    def __init__(self, client, process, num_processes, *, heartbeat_s, deadline_s, stall_s, name="cell"):
        """client: the coordination service's; name: keeps apart several runs of one job. A process is lost when it is
        silent for deadline_s, or, heartbeats going on, reads no plan for stall_s."""
        self._client, self.process, self.num_processes, self._name = client, process, num_processes, name
        self._heartbeat_s, self._deadline_s, self._stall_s = heartbeat_s, deadline_s, stall_s
        self.position = 0                      # plans taken by this process
        self.published = 0                     # process 0: plans in the log
        self._own_plans = queue.SimpleQueue()  # process 0 reads its own plans without the store
        self._inbox = queue.SimpleQueue()      # process 0: (process, message)
        self._outbox = queue.SimpleQueue()
        self._closed = threading.Event()
        self._members = {}                     # process 0: what is known of each other process
        self._deleted = 0
        now = self._looked = time.monotonic()
        if process == 0:
            self._members = {q: _Member(now) for q in range(1, num_processes)}
            readers = [threading.Thread(target=self._read, args=(q,), daemon=True, name=f"reports of {q}")
                       for q in self._members]
            for t in readers:
                t.start()
        else:
            self._sender = threading.Thread(target=self._send, daemon=True, name="reports")
            self._sender.start()

    # The log.

    def publish(self, ops):
        """Process 0: append a plan (a JSON list of operations)."""
        n, self.published = self.published, self.published + 1
        if self.num_processes > 1:
            self._client.key_value_set_bytes(f"{self._name}/plan/{n // DIRECTORY}/{n}", json.dumps(ops).encode())
        self._own_plans.put(ops)
        self._delete_read_plans()

    def next(self, limit_s=None):
        """The next plan's operations; -> (its number, operations).

        Raises ControlError if none comes within limit_s (default: the deadline): process 0 publishes an empty one
        when it has nothing to say, so silence means that it is gone.
        """
        limit_s = limit_s or self._deadline_s
        n = self.position
        if self.process == 0:
            ops = self._own_plans.get()
        else:
            ops = self._fetch(f"{self._name}/plan/{n // DIRECTORY}/{n}", limit_s)
            if ops is None:
                raise ControlError(f"process {self.process}: no plan {n} from process 0 within {limit_s:.0f} s")
        self.position = n + 1
        if self.position % 32 == 0:
            self._outbox.put(None)  # tells the position
        return n, ops

    def report(self, *message):
        """Send a JSON list to process 0; returns at once."""
        if self.process == 0:
            self._inbox.put((0, message))
        else:
            self._outbox.put(message)

    # What process 0 knows.

    def receive(self, timeout_s):
        """Process 0: all reports there are, (process, message) in order of arrival, waiting up to timeout_s for the first."""
        got = []
        try:
            got.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                got.append(self._inbox.get_nowait())
        except queue.Empty:
            return got

    def wake(self):
        """Process 0: let a waiting receive return."""
        self._inbox.put((0, ("wake",)))

    def lost(self):
        """Process 0: [(process, why)] of those newly silent for the deadline, or stuck at one plan while newer ones wait.

        To be called again and again: a pause of this process itself is not held against the others.
        """
        now, lost = time.monotonic(), []
        paused, self._looked = now - self._looked > self._deadline_s / 2, now
        for q, m in self._members.items():
            if paused:
                m.heard = m.moved = now
            if m.position >= self.published or m.position != m.position_before:
                m.position_before, m.moved = m.position, now
            if m.ended:
                continue
            if now - m.heard > self._deadline_s:
                lost.append((q, f"process {q} was silent for {now - m.heard:.0f} s"))
            elif now - m.moved > self._stall_s:
                lost.append((q, f"process {q} was stuck at plan {m.position} for {now - m.moved:.0f} s"))
        for q, _ in lost:
            self._members[q].ended = True
        return lost

    def forget(self, process):
        """Process 0: wait no longer for this process."""
        if process in self._members:
            self._members[process].ended = True

    def positions(self):
        """Process 0: process -> plans it has taken, of those that live."""
        return {0: self.position} | {q: m.position for q, m in self._members.items() if not m.ended}

    # The end.

    def close(self):
        """Leave in order: the others say goodbye and go, process 0 waits for them up to the deadline and goes last.

        -> on process 0 the processes that have not said goodbye.
        """
        if self.process:
            self._outbox.put(("goodbye",))
            self._closed.set()
            self._sender.join(self._deadline_s)
            return []
        end = time.monotonic() + self._deadline_s
        while any(not m.ended for m in self._members.values()) and time.monotonic() < end:
            time.sleep(0.005)
        self._closed.set()
        if self.num_processes > 1:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_delete(f"{self._name}/")
        return [q for q, m in self._members.items() if not m.ended]

    # Threads and the store.

    def _fetch(self, key, limit_s):
        """The value of a key, waiting for it; None after limit_s or once closed."""
        end = time.monotonic() + limit_s
        while True:
            left = end - time.monotonic()
            if left <= 0 or (self._closed.is_set() and self.process == 0):
                return None
            try:
                return json.loads(self._client.blocking_key_value_get_bytes(key, int(min(left, 1.0) * 1000) + 1))
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise ControlError(f"process {self.process}: the coordination service failed: {str(e).splitlines()[0]}") from e

    def _read(self, q):
        member, i = self._members[q], 0
        while not (member.ended or self._closed.is_set()):
            try:
                batch = self._fetch(f"{self._name}/report/{q}/{i // DIRECTORY}/{i}", 1.0)
            except ControlError as e:
                self._inbox.put((q, ("gone", str(e))))
                return
            if batch is None:
                continue
            i += 1
            member.position, messages = batch
            member.heard = time.monotonic()
            if i % DIRECTORY == 0:
                self._client.key_value_delete(f"{self._name}/report/{q}/{i // DIRECTORY - 1}/")
            for message in messages:
                if message[0] == "goodbye":
                    member.ended = True
                self._inbox.put((q, tuple(message)))

    def _send(self):
        """Sends everything that has gathered as one report; an empty one as heartbeat."""
        i = 0
        while True:
            messages = []
            try:
                messages.append(self._outbox.get(timeout=0.01 if self._closed.is_set() else self._heartbeat_s))
                while True:
                    messages.append(self._outbox.get_nowait())
            except queue.Empty:
                pass
            if not messages and self._closed.is_set():
                return
            body = json.dumps([self.position, [m for m in messages if m is not None]]).encode()
            try:
                self._client.key_value_set_bytes(f"{self._name}/report/{self.process}/{i // DIRECTORY}/{i}", body)
            except jax.errors.JaxRuntimeError:
                if self._closed.is_set():
                    return
                raise  # the coordination service is gone: next() will say so
            i += 1

    def _delete_read_plans(self):
        done = min(self.positions().values()) // DIRECTORY
        while self._deleted < done:
            if self.num_processes > 1:
                self._client.key_value_delete(f"{self._name}/plan/{self._deleted}/")
            self._deleted += 1


class _Member:
    """What process 0 knows of another process."""

    def __init__(self, now):
        self.heard = self.moved = now  # when it last reported, and last advanced
        self.position = self.position_before = 0
        self.ended = False
