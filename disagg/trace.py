"""When each engine computed what, and when each chunk moved: one file a process, for launch.trace to draw.

Times are seconds since the epoch, so that files of several hosts can be laid over each other as well as their clocks agree.
"""

import json
import os
import pathlib
import time

now = time.time


class Trace:
    """Takes spans from any thread. What is not traced is not timed either: `enabled` says whether to."""

    def __init__(self, folder, process):
        """folder: made if it is not there; '': nothing is kept. Raises OSError if it cannot be written."""
        self.enabled = bool(folder)
        self._spans = []
        if folder:
            os.makedirs(folder, exist_ok=True)
            self._file = open(pathlib.Path(folder) / f"process{process}.jsonl", "w", encoding="utf-8")

    def span(self, kind, engine, begun, ended, **what):
        """kind: "prefill", "local" (on a decode engine), "transfer", "check", "write" or "decode". engine: its index. begun: when it was dispatched; on a
        device it begins once that has ended which was dispatched before it. what: numbers that tell it from others."""
        if self.enabled:
            self._spans.append({"kind": kind, "engine": engine, "begun": begun, "ended": ended, **what})

    def save(self):
        if self.enabled:
            with self._file as file:
                file.writelines(json.dumps(span) + "\n" for span in self._spans)
