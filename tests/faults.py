"""Deliberate faults for tests, put into one process from outside: the program itself has no such hooks."""

import contextlib
import os
import signal
import subprocess
import unittest.mock as mock

from disagg import decode, transfer


@contextlib.contextmanager
def injected(faults, process):
    """faults: [[name, process, ...], ...]; those of this process (or of all, process null) are active inside."""
    with contextlib.ExitStack() as stack:
        for name, where, *args in faults:
            if where in (None, process):
                stack.enter_context(globals()[name](*args))
        yield


def _on_transfer(number, action):
    """Replace Transfers.issue: `action(issue, args)` is called for this transfer instead."""
    issue = transfer.Transfers.issue

    def patched(self, n, *args):
        return action(self, issue, n, *args) if n == number else issue(self, n, *args)
    return mock.patch.object(transfer.Transfers, "issue", patched)


def skip(number):
    """The process does not issue this transfer."""
    return _on_transfer(number, lambda self, issue, n, p, d, bucket, chunk: None)


def kill(number):
    """The process dies by SIGKILL when it should issue this transfer."""
    return _on_transfer(number, lambda *args: os.kill(os.getpid(), signal.SIGKILL))


def kill_at_write(count):
    """The process dies by SIGKILL at its count-th write of a chunk."""
    write, seen = decode.DecodeEngine.write, []

    def patched(self, *args):
        seen.append(1)
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *args)
    return mock.patch.object(decode.DecodeEngine, "write", patched)


def stop(number, seconds):
    """The process is stopped (SIGSTOP) before it issues this transfer, and continued after some seconds."""
    def action(self, issue, n, *args):
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return issue(self, n, *args)
    return _on_transfer(number, action)


def swap(number):
    """The process sends the chunk of an earlier transfer, another request's, in place of this one's."""
    issue, sent = transfer.Transfers.issue, {}

    def patched(self, n, p, d, bucket, chunk):
        if n == number:
            chunk = sent[bucket]
        sent[bucket] = chunk
        return issue(self, n, p, d, bucket, chunk)
    return mock.patch.object(transfer.Transfers, "issue", patched)


def shift_kv(by):
    """Chunks are written `by` positions too late in the decode cache."""
    write = decode.DecodeEngine.write
    return mock.patch.object(decode.DecodeEngine, "write", lambda self, chunk, slot, start: write(self, chunk, slot, start + by))
