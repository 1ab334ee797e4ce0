"""Batch mode: a file of requests in, a file of answers out, one line each, in order."""

import contextlib
import functools
import json
import queue
import sys
import threading
import time

from absl import logging

from disagg import request as request_lib
from launch import summary
from launch.progress import Progress

ERRORS = {"invalid": "invalid_request_error", "error": "server_error"}  # how an answer ends without tokens, and its type


class Batch:
    """Reads the requests of one input file and writes their answers as soon as all earlier ones are written."""

    def __init__(self, input_path, output_path, tokenizer, cache_length, vocab_size):
        """Opens both. Raises ValueError that names the path if that fails; '-' is standard input or output."""
        if not input_path or not output_path:
            raise ValueError(f"--mode=batch needs --input and --output, got {input_path!r} and {output_path!r}")
        self._tokenizer, self._limits = tokenizer, {"cache_length": cache_length, "vocab_size": vocab_size}
        try:
            self._lines = (sys.stdin.buffer if input_path == "-" else open(input_path, "rb")).read().splitlines()
        except OSError as e:
            raise ValueError(f"--input={input_path}: {e.strerror}") from None
        try:
            self._output = sys.stdout if output_path == "-" else open(output_path, "w", encoding="utf-8")
            self._output.reconfigure(encoding="utf-8")  # the standard output too, whatever the locale
        except OSError as e:
            raise ValueError(f"--output={output_path}: {e.strerror}") from None
        self._output_path = output_path

    def __call__(self, leader):
        """Serve every line and say on standard error what that took; -> the number of answers that are errors. Raises OSError if
        an answer cannot be written.

        A request without a seed gets its line's index, so that a run can be repeated. The leader's thread only puts its
        events on a queue; this one makes text of them.
        """
        self._events = queue.SimpleQueue()  # (answer, kind, *details): of a handler, or "bad" lines; an exception if asking has failed
        self._room = threading.Semaphore(leader.max_queue)  # no more at once than may wait: none is refused
        self._lives, self._ends, self._new_tokens, began = [], [], 0, time.monotonic()
        asking = threading.Thread(target=self._ask, args=(leader,), name="requests", daemon=True)
        with Progress(len(self._lines), leader.metrics) as progress:
            asking.start()
            self._write(leader, progress)
        asking.join()  # else the last life may not be there
        text = summary.table(self._ends, self._lives, leader.metrics, time.monotonic() - began, self._new_tokens)
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(text, file=sys.stderr, flush=True)
        return sum(end in ERRORS for end in self._ends)

    def _ask(self, leader):
        try:
            self._submit(leader)
        except Exception as e:  # whatever it is, who waits for the answers must know
            self._events.put(e)

    def _submit(self, leader):
        for index, line in enumerate(self._lines):
            self._room.acquire()
            try:
                asked = request_lib.parse(_json_object(line))
                number = leader.new_id()
                prepared = request_lib.prepare(asked, number, self._tokenizer, default_seed=index, **self._limits)
            except ValueError as e:
                self._events.put((_Answer(index), "bad", str(e)))
                continue
            answer = _Answer(index, prepared, request_lib.text_stream(asked, prepared, self._tokenizer))
            self._lives.append(leader.submit(prepared, functools.partial(_put, self._events, answer)))

    def _write(self, leader, progress):
        """Each answer as soon as all earlier ones are written."""
        ready, written = {}, 0
        while written < len(self._lines):
            answer = self._next(leader, progress)
            progress.show()
            if answer is None:
                continue
            ready[answer["index"]] = answer
            while written in ready:
                try:
                    with progress.above():
                        print(json.dumps(ready.pop(written), ensure_ascii=False), file=self._output, flush=True)
                except OSError as e:
                    if self._output is not sys.stdout:
                        with contextlib.suppress(OSError):  # what is still buffered cannot be written either
                            self._output.close()
                    raise OSError(e.errno, f"cannot write --output={self._output_path} ({written} of {len(self._lines)} answers "
                                  f"are written): {e.strerror}") from None
                written += 1
        if self._output is not sys.stdout:
            self._output.close()
        logging.info("batch: %d answers, %d of them errors", written, sum(end in ERRORS for end in self._ends))

    def _next(self, leader, progress):
        """The output line's object of an answer that the next event ends; None if it ends none, or none comes for a while."""
        try:
            event = self._events.get(timeout=progress.every)
        except queue.Empty:
            return None
        if isinstance(event, Exception):
            raise event
        answer, kind, *details = event
        if answer.end:
            return None  # a stop string has ended it; the leader had not seen the cancellation yet
        if kind == "tokens":
            progress.add(tokens=len(details[0]))
        line = answer.take(kind, *details)
        if answer.end:
            if answer.stopped:
                leader.cancel(answer.request.id, "stop")
            self._room.release()
            self._ends.append(answer.end)
            self._new_tokens += answer.tokens
            progress.add(answers=1)
        return line


def _put(events, answer, *event):
    events.put((answer, *event))


class _Answer:
    """Gathers one answer from the leader's events."""

    def __init__(self, index, request=None, stream=None):
        self.request, self._index, self._stream = request, index, stream
        self._bests = []
        self.end = None      # a finish reason or one of ERRORS
        self.tokens = 0      # of the answer, once it has ended

    @property
    def stopped(self):
        """Whether a stop string has ended it."""
        return self._stream is not None and self._stream.stopped

    def take(self, kind, *details):
        """One event; -> the output line's object if it ends the answer."""
        if kind == "tokens":
            for token, best in zip(*details):
                self._stream.push(token)
                self._bests.append(best)
                if self._stream.stopped:
                    return self._finish("stop")
            return None
        if kind == "finish":
            return self._finish(details[0])
        self.end = "invalid" if kind == "bad" else "error"
        return {"index": self._index, "error": {"message": details[0], "type": ERRORS[self.end]}}

    def _finish(self, reason):
        self._stream.finish()
        self.end, self.tokens = "stop" if self._stream.stopped else reason, len(self._stream.ids)
        answer = {"index": self._index, "text": self._stream.text, "token_ids": self._stream.ids, "finish_reason": self.end,
                  "usage": {"prompt_tokens": len(self.request.tokens), "completion_tokens": self.tokens,
                            "total_tokens": len(self.request.tokens) + self.tokens}}
        if any(self._bests):
            answer["top_logits"] = self._bests
        return answer


def _json_object(line):
    """Raises ValueError unless the line is UTF-8 and a JSON object."""
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise ValueError(f"the line is not UTF-8: {e.reason} at byte {e.start}") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"the line is not JSON: {e}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"the line must be a JSON object, got {type(fields).__name__}")
    return fields
