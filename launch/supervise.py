"""Runs the processes of one program on this machine and never leaves one behind.

A multi-process JAX program whose peer has died often waits forever instead of
failing, so whoever starts the processes must notice the first death, give the
others a moment to say what they saw, and end them. This module only knows
commands and processes; it imports nothing of JAX and nothing of the project.
"""

import contextlib
import ctypes
import math
import os
import selectors
import signal
import subprocess
import sys
import time

_POLL = 0.02  # seconds between two looks at the children
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
_CLEAR_LINE = b"\r\x1b[K"
_PRESSES, _PRESS_TIME = 3, 2.0  # so many Ctrl-C within so many seconds stop everything

# Loaded here because nothing may be loaded between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def run(
    commands: list[list[str]],
    *,
    env: dict[str, str] | None = None,
    grace: float = 5.0,
    failure_grace: float = 2.0,
    linger: float = 30.0,
    keep_going: bool = False,
    interactive: bool = False,
    shared_terminal: bool = False,
) -> int:
    """Runs every command at once, waits for all of them, returns an exit code.

    Process 0 has this program's stdin and stdout. Every line of any process's
    stderr, and of the other processes' stdout, goes to this program's stderr with
    `[index] ` before it. SIGINT, SIGQUIT, SIGTERM or SIGHUP to this program ends all
    the processes; a second one ends them at once. Call it from the main thread,
    the one that gets signals.

    Args:
      commands: the command of each process; its index is the process's number.
      env: the processes' whole environment; None for this program's own.
      grace: seconds from SIGTERM to SIGKILL; JAX may catch SIGTERM.
      failure_grace: seconds that the others have, once one has failed, to report
        their own errors and end by themselves.
      linger: seconds that the others may run on after process 0 has ended well.
      keep_going: whether the others go on without a failed process until process
        0 ends.
      interactive: whether process 0 talks with a person: it has this program's
        stderr too, and is told of SIGINT, which ends the processes only if it comes
        three times within two seconds, and of the terminal's size. Ctrl-Z is
        ignored, since process 0 would go on reading the terminal.
      shared_terminal: whether process 0 has this program's stderr, a terminal, on
        whose last line it may keep a progress bar: a line from another process
        takes that line's place, and the bar comes again below.

    Returns:
      0 if all ended with 0; the exit code of the first that failed, or 128 + the
      signal that killed it; 128 + the signal that stopped this program; 127 if a
      command could not be started; 1 if processes outlived process 0.
    """
    children: list[subprocess.Popen] = []
    relay = _Relay(_CLEAR_LINE if shared_terminal else b"")
    with _caught_signals(interactive) as (caught, passed), restored_terminal():
        try:
            for i, command in enumerate(commands):
                try:
                    own_stderr = (interactive or shared_terminal) and i == 0
                    children.append(_start(i, command, env, own_stderr))
                except OSError as e:
                    code, message = 127, f"process {i} did not start: {e}"
                    break
                relay.add(i, children[i])
            else:
                code, message = _watch(
                    children, relay, caught, passed, grace, failure_grace, linger, keep_going
                )
        finally:
            for child in children:
                if child.returncode is None:
                    _signal_group(child, signal.SIGKILL)
                    child.wait()
            relay.close()
    if message:
        _write(f"local: {message}\n".encode())
    return code


def _start(
    index: int, command: list[str], env: dict[str, str] | None, own_stderr: bool
) -> subprocess.Popen:
    """Starts one process in a session of its own.

    Its own session keeps a terminal's Ctrl-C away from it, so that only the
    launcher decides how processes end, and gives it a process group to kill.
    """
    launcher = os.getpid()

    def die_with_launcher():
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the request was in force
            os._exit(1)

    return subprocess.Popen(
        command,
        env=env,
        stdin=None if index == 0 else subprocess.DEVNULL,
        stdout=None if index == 0 else subprocess.PIPE,
        stderr=None if own_stderr else subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_launcher if _LIBC else None,
    )


def _watch(
    children, relay, caught, passed, grace, failure_grace, linger, keep_going
) -> tuple[int, str]:
    """Relays output until every child has ended; returns exit code and message."""
    running = dict(enumerate(children))
    failure = None  # index and return code of the first child that failed
    ended: list[int] = []  # the children that were sent SIGTERM
    presses: list[float] = []  # when SIGINT came for process 0
    term_at = kill_at = math.inf
    while running:
        relay.pump(_POLL)
        now = time.monotonic()
        while passed:
            signum = passed.pop(0)
            if signum == signal.SIGINT:
                presses = [t for t in presses if now - t < _PRESS_TIME] + [now]
                if caught or 0 not in running or len(presses) >= _PRESSES:
                    caught.append(signum)
            if 0 in running:
                _signal_group(running[0], signum)
        for i, code in _reap(running):
            if code and not ended and not caught:
                failure = failure or (i, code)
                if not keep_going or 0 not in running:
                    term_at = min(term_at, now + failure_grace)
            elif i == 0:
                term_at = min(term_at, now + linger)
        if caught:
            term_at = min(term_at, now)
            if len(caught) > 1:
                kill_at = now
        if now >= term_at and running and not ended:
            ended = list(running)
            kill_at = min(kill_at, now + grace)
            for child in running.values():
                _signal_group(child, signal.SIGTERM)
        if now >= kill_at:
            for child in running.values():
                _signal_group(child, signal.SIGKILL)
    if caught:
        name = signal.Signals(caught[0]).name
        return 128 + caught[0], f"stopped by {name}; ended {_count(len(ended))}"
    if failure:
        i, code = failure
        if code < 0:
            how, code = f"was killed by {_signal_name(-code)}", 128 - code
        else:
            how = f"exited with code {code}"
        fate = _fate(len(children) - 1, len(ended))
        return code, f"process {i} {how}{fate}"
    if ended:
        return 1, (
            f"process 0 ended but {_count(len(ended))} still ran {linger:g} s"
            f' later (number {", ".join(map(str, ended))}); ended them'
        )
    return 0, ""


def _reap(running: dict[int, subprocess.Popen]) -> list[tuple[int, int]]:
    """Takes the ended children out of `running`; returns their return codes.

    What an ended child left in its process group is killed. Of children that
    ended within one look, those killed by a signal come first: they are the
    likelier cause, the others only noticed.
    """
    done = []
    for i, child in list(running.items()):
        code = child.poll()
        if code is not None:
            del running[i]
            _signal_group(child, signal.SIGKILL)
            done.append((i, code))
    return sorted(done, key=lambda item: (item[1] >= 0, item[0]))


def _signal_group(child: subprocess.Popen, signum: int) -> None:
    """Signals a child's process group, which has the child's id; it may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)


def _fate(others: int, ended: int) -> str:
    """Says what became of the processes other than the one that failed."""
    if not others:
        return ""
    them = "the other" if others == 1 else f"the other {others}"
    if not ended:
        return f'; {them} ended by {"itself" if others == 1 else "themselves"}'
    return f'; ended {them if ended == others else f"{ended} of {them}"}'


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def _count(n: int) -> str:
    return f"{n} process" if n == 1 else f"{n} processes"


class _Relay:
    """Copies whole lines from the children's pipes to stderr.

    One loop in one thread writes every line in one piece, so lines of different
    processes never mix.
    """

    def __init__(self, before):
        """before: is written before what is copied at once."""
        self._selector, self._before = selectors.DefaultSelector(), before

    def add(self, index: int, child: subprocess.Popen) -> None:
        for pipe in (child.stdout, child.stderr):
            if pipe:
                data = (b"[%d] " % index, bytearray())
                self._selector.register(pipe, selectors.EVENT_READ, data)

    def pump(self, timeout: float) -> bool:
        """Copies what is there, waiting up to `timeout`; says if there was any."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            prefix, rest = key.data
            data = os.read(key.fd, 1 << 16)
            rest += data
            if not data:
                self._selector.unregister(key.fileobj)
                key.fileobj.close()
                if rest:
                    rest += b"\n"
            *lines, rest[:] = rest.split(b"\n")
            if lines:
                _write(self._before + b"".join(prefix + line + b"\n" for line in lines))
        return bool(ready)

    def close(self) -> None:
        """Copies what ended children left in their pipes and closes the pipes.

        A pipe may never end, if a process that left the group holds it, so this
        takes what is there, for at most a second.
        """
        deadline = time.monotonic() + 1.0
        while self.pump(0) and time.monotonic() < deadline:
            pass
        for key in list(self._selector.get_map().values()):
            prefix, rest = key.data
            if rest:
                _write(prefix + bytes(rest) + b"\n")
            key.fileobj.close()
        self._selector.close()


def _write(data: bytes) -> None:
    """Writes to stderr. If nobody reads it any more the program still goes on."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(sys.stderr.fileno(), data) :]


@contextlib.contextmanager
def _caught_signals(interactive):
    """Collects the signals that ask this program to stop, instead of stopping.

    Yields them and, apart from them, those that are process 0's to react to. A
    signal that whoever started this program had it ignore (nohup, a shell's
    background job) stays ignored.
    """
    caught: list[int] = []
    passed: list[int] = []
    lists = dict.fromkeys(_STOP_SIGNALS, caught)
    if interactive:
        lists |= dict.fromkeys((signal.SIGINT, signal.SIGWINCH), passed)
    before = {s: signal.getsignal(s) for s in (*lists, signal.SIGTSTP)}
    for signum, seen in lists.items():
        if before[signum] != signal.SIG_IGN:
            signal.signal(signum, lambda signum, frame, seen=seen: seen.append(signum))
    if interactive:
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield caught, passed
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def restored_terminal():
    """Gives stdin's terminal its settings back after process 0.

    Process 0 reads the terminal in a line editor's mode, without echo, and may be
    killed there. Only the terminal's foreground program may set it.
    """
    if not _in_foreground():
        yield
        return
    import termios  # not there, and not needed, where there is no terminal

    settings = termios.tcgetattr(0)
    try:
        yield
    finally:
        if _in_foreground():
            termios.tcsetattr(0, termios.TCSADRAIN, settings)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # stdin is no terminal, or not the one that controls us
        return False
