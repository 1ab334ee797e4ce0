"""Lines and Ctrl-C from whoever talks to process 0, at a terminal or through a pipe."""

import contextlib
import os
import signal
import sys
import threading

try:
    import readline
    import termios
except ImportError:  # Python can be built without
    readline = None

_CTRL_C = "\x03"


def watch_interrupts(react):
    """Call react() at every SIGINT, at once and in a thread of its own, whatever the main thread is busy with.

    To be called from the main thread. A SIGINT that this program was started to ignore stays ignored.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.signal(signal.SIGINT, lambda *_: None)  # for the wakeup: Python runs it too late, once the main thread is free
    signal.siginterrupt(signal.SIGINT, False)      # C++ libraries do not expect that their system calls fail
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)

    def watch():
        while signals := os.read(readable, 64):
            for _ in range(signals.count(signal.SIGINT)):
                react()

    threading.Thread(target=watch, name="interrupts", daemon=True).start()


class Pipe:
    """Standard input line by line. The prompt is shown, on standard error, only where a terminal is read."""

    def __init__(self, prompt):
        self._prompt = prompt if sys.stdin.isatty() else ""
        self._number = 0

    def read(self):
        """The next line without its end. Raises EOFError at the end of input, ValueError for a line that is not UTF-8."""
        print(self._prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        self._number += 1
        if not line:
            raise EOFError
        return _decoded(line.rstrip(b"\r\n"), f"line {self._number}")

    def close(self):
        pass


class Terminal:
    """Lines edited at a prompt, earlier ones with the arrow keys. In between, keys are kept for the next line, unseen.

    At the prompt Ctrl-C is a key: process 0 is often in another session than the terminal, and Python's input() could
    only be left by a signal if it ran in the main thread. In between Ctrl-C is a signal.
    """

    @classmethod
    def there(cls):
        """Whether standard input and output are a terminal and lines can be edited on it."""
        return readline is not None and sys.stdin.isatty() and sys.stdout.isatty()

    def __init__(self, prompt):
        self._prompt = prompt
        self._settings = termios.tcgetattr(0)
        self._editing = termios.tcgetattr(0)
        self._between = termios.tcgetattr(0)
        self._between[3] &= ~(termios.ICANON | termios.ECHO)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the other processes would take a stopped one for dead
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        readline.set_auto_history(False)
        if "libedit" not in (readline.__doc__ or ""):  # libedit has no such key: there Ctrl-C stays a signal
            self._editing[6][termios.VINTR] = os.fpathconf(0, "PC_VDISABLE").to_bytes(1, "little")
            readline.parse_and_bind(r'"\C-x\C-c": kill-whole-line')
            readline.parse_and_bind(r'"\C-c": "\C-x\C-c\C-v\C-c\C-m"')  # the line becomes a quoted Ctrl-C

    def read(self):
        """The next line. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C, ValueError if it is not UTF-8."""
        self._set(self._editing)
        try:
            line = input(self._prompt)
        finally:
            self._set(self._between)
        if line == _CTRL_C:
            raise KeyboardInterrupt
        if line.strip():
            readline.add_history(line)
        return _decoded(line.encode("utf-8", "surrogateescape"), "the line")

    def close(self):
        """Give the terminal its settings back."""
        self._set(self._settings)

    def _set(self, settings):
        with contextlib.suppress(termios.error):  # the terminal is gone: the next read says so
            termios.tcsetattr(0, termios.TCSADRAIN, settings)


def _decoded(line, name):
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{name} is not UTF-8 ({e.reason} at byte {e.start}): it is left out") from None
