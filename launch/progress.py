"""How far a batch is: a bar on a terminal, else a line in the log now and then."""

import collections
import contextlib
import sys
import time

import tqdm
from absl import logging

BAR_S = 0.25    # seconds between two looks of the bar
LINE_S = 5.0    # ... and between two lines
WINDOW_S = 5.0  # over which the rate of tokens is taken


class Progress:
    """To be told of every answer and of tokens as they come, by one thread, and called again and again: shows what has changed.

    While it is entered, log lines and, through `above`, other writes come above the bar.
    """

    def __init__(self, total, metrics):
        self._total, self._metrics = total, metrics
        self._bar = tqdm.tqdm(total=total, desc="batch", unit=" requests", leave=False, disable=not sys.stderr.isatty(), file=sys.stderr)
        self.every = LINE_S if self._bar.disable else BAR_S
        self._answers = self._tokens = 0
        self._shown = 0, 0                                                 # answers and tokens
        self._next = time.monotonic() + self.every
        self._counts = collections.deque([(time.monotonic(), 0)])          # (time, tokens) of the latest looks
        self._log = None

    def __enter__(self):
        handler = logging.get_absl_handler().python_handler
        if not self._bar.disable and handler.stream is sys.stderr:
            self._log = handler
            handler.setStream(_Above(self))
        return self

    def __exit__(self, *_):
        self._bar.close()
        if self._log:
            self._log.setStream(sys.stderr)

    def add(self, answers=0, tokens=0):
        self._answers += answers
        self._tokens += tokens

    def show(self):
        """Cheap, unless it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.every
        rate = self._rate(now)
        shown, self._shown = self._shown, (self._answers, self._tokens)
        if shown == self._shown:
            return
        running, queued = (int(self._metrics.value(f"disagg_requests_{what}")) for what in ("running", "queued"))
        what = f"{rate:,.1f} tokens/s, {running} running, {queued} queued"
        if self._bar.disable:
            logging.info("batch: %d of %d requests answered, %s", self._answers, self._total, what)
        else:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(self._answers - shown[0])
            self._bar.refresh()

    def above(self):
        """Entered to write on the terminal's lines above the bar."""
        return contextlib.nullcontext() if self._bar.disable else tqdm.tqdm.external_write_mode(file=sys.stderr)

    def _rate(self, now):
        while len(self._counts) > 1 and now - self._counts[0][0] > WINDOW_S:
            self._counts.popleft()
        before, tokens = self._counts[0]
        self._counts.append((now, self._tokens))
        return (self._tokens - tokens) / (now - before)


class _Above:
    """Standard error for the log."""

    def __init__(self, progress):
        self._progress = progress

    def write(self, text):
        with self._progress.above():
            sys.stderr.write(text)

    def flush(self):
        sys.stderr.flush()
