"""The largest anonymous memory of a process while a block of code runs. Pages of mapped files are not in it."""

import threading


def anonymous(pid):
    """RssAnon of a process ("self": this one), in bytes; 0 once it is gone."""
    try:
        with open(f"/proc/{pid}/status") as f:
            return next((int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


class Watch:
    """`peak`: the largest seen so far, in bytes, by a thread that looks every few milliseconds."""

    def __init__(self, pid, every=0.002):
        self.peak, self._pid, self._every, self._end = 0, pid, every, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self):
        while not self._end.wait(self._every):
            self.peak = max(self.peak, anonymous(self._pid))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous(self._pid))
