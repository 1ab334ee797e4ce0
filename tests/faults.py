"""Deliberate faults for tests, put into one process from outside: the program itself has no such hooks."""

import contextlib
import os
import signal
import subprocess
import time
import unittest.mock as mock

import jax
import numpy as np

from disagg import chunk as chunks
from disagg import decode, leader, prefill, scheduler, sharding, transfer


@contextlib.contextmanager
def injected(faults, process):
    """faults: [[name, process, ...], ...]; those of this process (or of all, process null) are active inside."""
    with contextlib.ExitStack() as stack:
        for name, where, *args in faults:
            if where in (None, process):
                stack.enter_context(globals()[name](*args))
        yield


def _on_call(kind, count, action):
    """Replace the process's count-th Transfers.issue of a kind ("send", "receive" or "pass", a bystander's) after the
    self-test by `action(issue)`."""
    issue, seen = transfer.Transfers.issue, []

    def patched(self, number, p, d, bucket, chunk):
        route = self.routes[p, d]
        mine = "send" if chunk is not None else "receive" if any(map(route._receives, route.calls)) else "pass"
        if number >= 0 and mine == kind:
            seen.append(number)
            if len(seen) == count:
                return action(lambda: issue(self, number, p, d, bucket, chunk))
        return issue(self, number, p, d, bucket, chunk)
    return mock.patch.object(transfer.Transfers, "issue", patched)


def skip(kind, count):
    """The process does not issue this call."""
    return _on_call(kind, count, lambda issue: None)


def kill(kind, count):
    """The process dies by SIGKILL when it should issue this call."""
    return _on_call(kind, count, lambda issue: os.kill(os.getpid(), signal.SIGKILL))


def stop(kind, count, seconds):
    """The process is stopped (SIGSTOP) before it issues this call, and continued after some seconds."""
    def action(issue):
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return issue()
    return _on_call(kind, count, action)


def kill_at_write(count):
    """The process dies by SIGKILL at its count-th write of a chunk."""
    write, seen = decode.DecodeEngine.write, []

    def patched(self, *args):
        seen.append(1)
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *args)
    return mock.patch.object(decode.DecodeEngine, "write", patched)


def swap(count):
    """At its count-th send the process sends the chunk before it, another request's."""
    issue, sent = transfer.Transfers.issue, []

    def patched(self, number, p, d, bucket, chunk):
        if number >= 0 and chunk is not None:
            sent.append(chunk)
            if len(sent) == count:
                chunk = sent[-2]
        return issue(self, number, p, d, bucket, chunk)
    return mock.patch.object(transfer.Transfers, "issue", patched)


def exchange(count):
    """The process sends its count-th chunk only after the next one."""
    issue, sent, held = transfer.Transfers.issue, [], []

    def patched(self, number, p, d, bucket, chunk):
        if number >= 0 and chunk is not None:
            sent.append(number)
            if len(sent) == count:
                held.append((number, p, d, bucket, chunk))
                return None
        result = issue(self, number, p, d, bucket, chunk)
        if held:
            issue(self, *held.pop())
        return result
    return mock.patch.object(transfer.Transfers, "issue", patched)


def extra(count, what):
    """Before its count-th chunk the process sends something else to the same devices, behind the program's back: "a chunk",
    the one that it sends next once more, or "a number" of each device."""
    issue, sent = transfer.Transfers.issue, []

    def patched(self, number, p, d, bucket, chunk):
        if number >= 0 and chunk is not None:
            sent.append(number)
            if len(sent) == count:
                route = self.routes[p, d]
                source, destination = (sharding.named(mesh, ("wire",)) for mesh in (route._source, route._destination))
                numbers = jax.make_array_from_callback((route._source.size,), source, lambda at: np.zeros(1, np.int32))
                if what == "a chunk":
                    jax.device_put(self.routes[p, d]._operand(route.calls[0], bucket, chunk), route._target(route.calls[0]))
                else:
                    jax.device_put(numbers, destination)
        return issue(self, number, p, d, bucket, chunk)
    return mock.patch.object(transfer.Transfers, "issue", patched)


def corrupt(count):
    """One number of the process's count-th chunk changes after its checksum is computed, before it is sent."""
    issue, sent = transfer.Transfers.issue, []
    change = jax.jit(lambda x: x.at[-1, -1, -1].add(1))

    def patched(self, number, p, d, bucket, chunk):
        if number >= 0 and chunk is not None:
            sent.append(number)
            if len(sent) == count:
                chunk = chunk | {"v": (change(chunk["v"][0]), *chunk["v"][1:])}
        return issue(self, number, p, d, bucket, chunk)
    return mock.patch.object(transfer.Transfers, "issue", patched)


def cancel_at_arrival(request, count):
    """The leader cancels a request when the count-th of its chunks has arrived everywhere; its front end hears an error."""
    on_arrived, arrivals = leader.Leader.on_arrived, []

    def patched(self, process, number, error, token):
        chunk = self._stages._chunks.get(number)
        on_arrived(self, process, number, error, token)
        if chunk is not None and request in chunk.requests:
            arrivals.append(number)
            if len(arrivals) == count:
                handler = self._handlers[request]
                self._cancel(request)
                handler("error", f"cancelled with {count} chunks there")
    return mock.patch.object(leader.Leader, "on_arrived", patched)


def gather(count):
    """Nothing is planned before so many requests wait."""
    plan, began = scheduler.Scheduler.plan, []

    def patched(self):
        if not began and len(self._queue) < count:
            return []
        began.append(True)
        return plan(self)
    return mock.patch.object(scheduler.Scheduler, "plan", patched)


def slow_decode(seconds):
    """Every decode call takes so much longer."""
    run = decode.DecodeEngine.run

    def patched(self, read, steps):
        time.sleep(seconds)
        return run(self, read, steps)
    return mock.patch.object(decode.DecodeEngine, "run", patched)


def slow_prefill(seconds):
    """Every chunk and every call for short prompts takes so much longer."""
    run, run_prompts = prefill.PrefillEngine.run, prefill.PrefillEngine.run_prompts
    stack = contextlib.ExitStack()
    for name, original in {"run": run, "run_prompts": run_prompts}.items():
        def patched(self, *args, original=original):
            time.sleep(seconds)
            return original(self, *args)
        stack.enter_context(mock.patch.object(prefill.PrefillEngine, name, patched))
    return stack


def shift_kv(by):
    """Chunks are written `by` positions too late in the decode cache."""
    write = decode.DecodeEngine.write
    return mock.patch.object(decode.DecodeEngine, "write", lambda self, chunk, slot, start, *of: write(self, chunk, slot, start + by, *of))
