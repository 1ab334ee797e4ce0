"""Batch mode: a file of requests in, a file of answers out, one line each, in order."""

import contextlib
import json
import queue
import sys
import threading

from absl import logging

from disagg import request as request_lib


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
        """Serve every line; -> the number of answers that are errors. Raises OSError if an answer cannot be written.

        A request without a seed gets its line's index, so that a run can be repeated.
        """
        self._done = queue.SimpleQueue()
        self._room = threading.Semaphore(leader.max_queue)  # no more at once than may wait: none is refused
        threading.Thread(target=self._ask, args=(leader,), name="requests", daemon=True).start()
        return self._write()

    def _ask(self, leader):
        try:
            self._submit(leader)
        except Exception as e:  # whatever it is, who waits for the answers must know
            self._done.put(e)

    def _submit(self, leader):
        for index, line in enumerate(self._lines):
            self._room.acquire()
            try:
                asked = request_lib.parse(_json_object(line))
                number = leader.new_id()
                prepared = request_lib.prepare(asked, number, self._tokenizer, default_seed=index, **self._limits)
            except ValueError as e:
                self._done.put({"index": index, "error": {"message": str(e), "type": "invalid_request_error"}})
                continue
            answer = _Answer(index, prepared, request_lib.text_stream(asked, prepared, self._tokenizer), leader, self._done)
            leader.submit(prepared, answer)

    def _write(self):
        ready, written, errors = {}, 0, 0
        while written < len(self._lines):
            answer = self._done.get()
            if isinstance(answer, Exception):
                raise answer
            self._room.release()
            ready[answer["index"]] = answer
            while written in ready:
                answer = ready.pop(written)
                errors += "error" in answer
                try:
                    print(json.dumps(answer, ensure_ascii=False), file=self._output, flush=True)
                except OSError as e:
                    if self._output is not sys.stdout:
                        with contextlib.suppress(OSError):  # what is still buffered cannot be written either
                            self._output.close()
                    raise OSError(e.errno, f"cannot write --output={self._output_path} ({written} of {len(self._lines)} answers "
                                  f"are written): {e.strerror}") from None
                written += 1
        if self._output is not sys.stdout:
            self._output.close()
        logging.info("batch: %d answers, %d of them errors", written, errors)
        return errors


class _Answer:
    """Gathers one answer from the leader's events and puts it, as the output line's object, on a queue."""

    def __init__(self, index, request, stream, leader, done):
        self._index, self._request, self._stream, self._leader, self._done = index, request, stream, leader, done
        self._bests, self._ended = [], False

    def __call__(self, kind, *details):
        if self._ended:
            return  # a stop string has ended it; the leader has not seen the cancellation yet
        if kind == "tokens":
            for token, best in zip(*details):
                self._stream.push(token)
                self._bests.append(best)
                if self._stream.stopped:
                    self._leader.cancel(self._request.id)
                    self._finish("stop")
                    break
        elif kind == "finish":
            self._finish(details[0])
        else:
            self._done.put({"index": self._index, "error": {"message": details[0], "type": "server_error"}})

    def _finish(self, reason):
        self._ended = True
        self._stream.finish()
        answer = {"index": self._index, "text": self._stream.text, "token_ids": self._stream.ids,
                  "finish_reason": "stop" if self._stream.stopped else reason,
                  "usage": {"prompt_tokens": len(self._request.tokens), "completion_tokens": len(self._stream.ids),
                            "total_tokens": len(self._request.tokens) + len(self._stream.ids)}}
        if any(self._bests):
            answer["top_logits"] = self._bests
        self._done.put(answer)


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
