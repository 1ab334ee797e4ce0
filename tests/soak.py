"""A front end for tests: many small requests through one cell, some of them cancelled at any time; and a watch over memory."""

import json
import pathlib
import random
import threading
import time

import jax

from disagg.scheduler import Request

WATCH_S = 0.25


class Soak:
    """Keeps `width` requests under way until `count` have ended. `cancel`: the share that is cancelled, after up to
    `patience_s`. Keeps nothing: writes when it began to `output`, then a line for each, {"id", "end", "tokens", "asked", "time"}."""

    def __init__(self, output, *, count, width, cancel, patience_s, longest):
        self._output, self._count, self._width, self._cancel = output, count, width, cancel
        self._patience_s, self._longest = patience_s, longest
        self._rng = random.Random(5)

    def __call__(self, leader):
        with open(self._output, "w") as output:
            output.write(f"{time.time()}\n")
            self._serve(leader, output)

    def _serve(self, leader, output):
        room, lock, timers = threading.Semaphore(self._width), threading.Lock(), []

        def end(result, how):
            with lock:
                if result["end"] is None:
                    result["end"], result["time"] = how, time.time()
                    output.write(json.dumps(result) + "\n")
                    room.release()

        for _ in range(self._count):
            room.acquire()
            number = leader.new_id()
            result = {"id": number, "end": None, "tokens": 0}

            def handler(kind, *details, result=result):
                if kind == "tokens":
                    result["tokens"] += len(details[0])
                else:
                    end(result, f"{kind}: {details[0]}")

            def cancel(number=number, result=result):
                leader.cancel(number)
                end(result, "cancelled")
            length = self._rng.randint(1, self._longest)
            result["asked"] = self._rng.randint(1, 8)
            leader.submit(Request(number, tuple(self._rng.randint(3, 400) for _ in range(length)), result["asked"], (),
                                  (number, self._rng.choice([0.0, 1.0]), 0, 1.0)), handler)
            if self._rng.random() < self._cancel:
                timers = [t for t in timers if t.is_alive()]
                timers.append(threading.Timer(self._rng.random() * self._patience_s, cancel))
                timers[-1].start()
        for _ in range(self._width):
            room.acquire()
        for timer in timers:
            timer.join()


class Watch:
    """Samples this process's memory while it is entered: [{"time", "rss", "arrays", "keys"}], written at the end.

    keys: of the log in the coordination service's store, counted on process 0 alone.
    """

    def __init__(self, path, client, name, process):
        self._path, self._client, self._name, self._process = path, client, name, process
        self._stop, self._samples = threading.Event(), []

    def __enter__(self):
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self._sample()
        pathlib.Path(self._path).write_text(json.dumps(self._samples))

    def _run(self):
        while not self._stop.wait(WATCH_S):
            self._sample()

    def _sample(self):
        arrays = jax.live_arrays()
        keys = len(self._client.key_value_dir_get_bytes(f"{self._name}/")) if self._process == 0 else 0
        self._samples.append({"time": time.time(), "rss": _rss(), "arrays": len(arrays), "keys": keys})


def _rss():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssAnon")) * 1024
