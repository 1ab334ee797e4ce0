"""Chat mode: a conversation with the model, answers shown as they come. Standard output carries the answers only."""

import contextlib
import os
import queue
import random
import re
import signal
import sys
import time

from disagg import request as request_lib
from launch.terminal import Pipe, Terminal, watch_interrupts

PROMPT = "> "
HELP = """\
/reset begins a new conversation    /help shows this    /exit or Ctrl-D ends
Every other line goes to the model, with the conversation before it. A line that is to begin with / takes a space first.
Ctrl-C ends the answer that is being given; what has been said of it stays in the conversation."""
LEAVE = "/exit or Ctrl-D ends the chat"


class Chat:
    """One conversation, whose every turn is a request of its own with all turns before it."""

    def __init__(self, tokenizer, cache_length, vocab_size, *, system, seed, **sampling):
        """To be called from the main thread. system: the system prompt, or None. seed: of every answer, None for a new
        one each. sampling: max_tokens, temperature, top_p; None for request.parse's own.

        Raises ValueError if a conversation cannot begin: a value out of range, a tokenizer without a chat format, a
        system prompt that leaves no room.
        """
        if sys.stdin is None or sys.stdout is None:
            raise ValueError("--mode=chat needs standard input and output, one of them is closed")
        self._tokenizer, self._limits = tokenizer, {"cache_length": cache_length, "vocab_size": vocab_size}
        self._seed, self._sampling = seed, {name: value for name, value in sampling.items() if value is not None}
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._history = list(self._beginning)
        try:
            self._request(0, "?")
        except ValueError as e:
            raise ValueError(f"--mode=chat: no conversation can begin: {e}") from None
        sys.stdout.reconfigure(encoding="utf-8")
        self._input = Terminal(PROMPT) if Terminal.there() else Pipe(PROMPT)
        self._events = None  # of the answer that is being given: ("interrupt",) and a handler's, each after its time
        self._ready = False
        watch_interrupts(self._interrupt)
        self._started = time.monotonic()
        _say("loading ...")

    def __call__(self, leader):
        """Talk until /exit or the end of input. Raises OSError if an answer cannot be written."""
        _say(f"ready in {time.monotonic() - self._started:.1f} s; /help lists the commands")
        self._ready = True
        try:
            while True:
                try:
                    line = self._input.read()
                except EOFError:
                    return
                except KeyboardInterrupt:
                    _say(LEAVE)
                    continue
                except ValueError as e:
                    _say(e)
                    continue
                if line.rstrip() == "/exit":
                    return
                if line.startswith("/"):
                    self._command(line.rstrip())
                elif line.strip():
                    self._turn(leader, line.strip())
        finally:
            self._input.close()

    def _interrupt(self):
        """In a thread of its own."""
        events = self._events
        if events is not None:
            events.put((time.monotonic(), "interrupt"))
        elif self._ready:
            _say(LEAVE)
        else:
            _say("interrupted while loading")
            os._exit(128 + signal.SIGINT)  # nothing has begun that would have to end in order

    def _command(self, line):
        if line == "/reset":
            self._history = list(self._beginning)
            _say("a new conversation")
        elif line == "/help":
            _say(HELP)
        else:
            _say(f"unknown command {line}; /help lists the commands")

    def _request(self, number, question):
        """-> (the checked request, what the leader gets of it). Raises ValueError."""
        asked = request_lib.parse({"messages": [*self._history, {"role": "user", "content": question}]} | self._sampling)
        seed = random.SystemRandom().getrandbits(63) if self._seed is None else self._seed
        return asked, request_lib.prepare(asked, number, self._tokenizer, default_seed=seed, **self._limits)

    def _turn(self, leader, question):
        events = self._events = queue.SimpleQueue()
        try:
            self._answer(leader, question, events)
        except ValueError as e:
            begun = self._history != self._beginning
            _say(f"{e}; the conversation is as before" + (", /reset begins a new one" if begun else ""))
        finally:
            self._events = None

    def _answer(self, leader, question, events):
        """Show one answer and add the turn to the history. Raises ValueError if it cannot be given."""
        asked, prepared = self._request(leader.new_id(), question)
        stream = request_lib.text_stream(asked, prepared, self._tokenizer)
        times, end, started = [], None, time.monotonic()
        leader.submit(prepared, lambda *event: events.put((time.monotonic(), *event)))
        while end is None:
            now, kind, *details = events.get()
            if kind == "tokens":
                _write("".join(map(stream.push, details[0])))
                times += [now] * (len(stream.ids) - len(times))
                end = "stop" if stream.stopped else None
            else:
                end = details[0] if kind == "finish" else kind
        if end == "interrupt" or stream.stopped:
            leader.cancel(prepared.id, "stop" if stream.stopped else "cancelled")
        rest = stream.finish()
        _write(rest + "\n" if stream.text or end != "error" else "")
        if end == "error":
            raise ValueError(details[0])
        if stream.text:
            self._history += [{"role": "user", "content": question}, {"role": "assistant", "content": stream.text}]
        _say(_figures(len(prepared.tokens), [t - started for t in times], end, bool(stream.text)))


def _figures(prompt, seconds, end, said):
    """seconds: of every new token, since the request."""
    parts = [f"{prompt} prompt tokens", f"{len(seconds)} new"]
    if seconds:
        parts.append(f"first after {1000 * seconds[0]:.0f} ms")
    if seconds and seconds[-1] > seconds[0]:
        parts.append(f"{(len(seconds) - 1) / (seconds[-1] - seconds[0]):.1f} tokens/s")
    if end in ("length", "interrupt"):
        parts.append({"length": "at the length limit", "interrupt": "cut short"}[end])
    if not said:
        parts.append("nothing said: the question is forgotten")
    return f"[{', '.join(parts)}]"


def _write(text):
    if sys.stdout.isatty():
        text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)  # no orders to the terminal
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as e:
        raise OSError(e.errno, f"cannot write to standard output: {e.strerror}") from None


def _say(text):
    """To the person: on standard error."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stderr.write(f"{text}\n")  # in one piece: the log writes there too
        sys.stderr.flush()
