"""Chat as a person has it: real programs at a pseudo-terminal, and through pipes."""

import contextlib
import fcntl
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid

import pytest

from configs import tiny
from disagg import tokenizer
from tests.cluster import ROOT

pytestmark = pytest.mark.e2e

SHORT, OTHER = "What is the purpose of life?", "Who are you?"
LONG = "Say it once more."  # greedily the model then repeats itself until the cache is full
CACHE = 512  # as much as the model has, so that an answer lasts: near a second
FIGURES = r"\[(\d+) prompt tokens, (\d+) new(?:, first after (\d+) ms)?(?:, [\d.]+ tokens/s)?([^\]]*)\]\n"
LEAVE = "/exit or Ctrl-D ends the chat"
CTRL_C, CTRL_D, UP = b"\x03", b"\x04", b"\x1b[A"

# Started so, a program ignores no signal and leaves the processor to the test, which has to be in time for its answers.
PLAIN = ("import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.nice(19); "
         "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
OWN_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); " + PLAIN  # that of its standard input


def command(prologue, program, *arguments):
    return [sys.executable, "-c", prologue, "-m", program, "--config=configs/tiny.py", "--mode=chat", "--temperature=0",
            f"--config.cache_length={CACHE}", *arguments]


class Started:
    """A program in a session of its own, with whatever it starts: `left` finds them by an environment variable."""

    def __init__(self, argv, **popen):
        self._mark = f"DISAGG_TEST_CHAT={uuid.uuid4()}"
        name, value = self._mark.split("=")
        self.process = subprocess.Popen(argv, cwd=ROOT, start_new_session=True, **popen,
                                        env=os.environ | {"JAX_PLATFORMS": "cpu", "TERM": "xterm", name: value})

    def left(self):
        """process id -> command line, of those that live."""
        found = {}
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return found

    def code(self, seconds=20):
        """The exit code; nothing that it started outlives it."""
        code = self.process.wait(seconds)
        end = time.monotonic() + 5
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.02)
        assert not left, left
        return code

    def kill(self):
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


class AtTerminal(Started):
    """A program at a pseudo-terminal: what it shows is read here, without the terminal's control sequences."""

    def __init__(self, program, *arguments):
        self._ours, self._its = pty.openpty()
        fcntl.ioctl(self._its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 2000, 0, 0))
        self.settings = termios.tcgetattr(self._its)
        self._shown, self._seen = "", 0
        super().__init__(command(OWN_TERMINAL, program, *arguments), stdin=self._its, stdout=self._its, stderr=self._its)

    def type(self, keys):
        os.write(self._ours, keys.encode() if isinstance(keys, str) else keys)

    def expect(self, pattern, seconds=60):
        """Wait until what is shown after the last match has this; -> the match."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self._shown[self._seen:], re.S)):
            ready, _, _ = select.select([self._ours], [], [], min(0.5, max(0, end - time.monotonic())))
            if not ready:
                running = self.process.poll() is None and time.monotonic() < end
                assert running, f"no {pattern!r} in {self._shown[self._seen:]!r}"
                continue
            new = os.read(self._ours, 1 << 16).decode(errors="replace")
            self._shown = re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\r+(?=\n)", "", self._shown + new)
        self._seen += found.end()
        return found

    def prompt(self):
        self.expect(r"(?:^|\n)> ")

    def said(self, end=""):
        """-> (the answer's text, its prompt's tokens, its tokens), with nothing else shown before the next prompt.

        end: what the figures end with.
        """
        found = self.expect(r"\A([^\n]*)\n" + FIGURES + "> ")
        assert found[5].endswith(end), found[0]
        return found[1], int(found[2]), int(found[3])

    def ask(self, question, end=""):
        self.type(question + "\r")
        self.expect(re.escape(question) + r"\n")
        return self.said(end)

    def reset(self):
        self.type("/reset\r")
        self.expect("a new conversation\n> ")

    def settings_now(self):
        return termios.tcgetattr(self._its)

    def kill(self):
        super().kill()
        os.close(self._ours)
        os.close(self._its)


@contextlib.contextmanager
def started(make, *arguments, **popen):
    it = make(*arguments, **popen)
    try:
        yield it
    finally:
        it.kill()


@pytest.fixture(scope="module")
def prompt_tokens():
    """(turns) -> how many tokens the model is given; turns: what user and assistant have said in turn."""
    its = tokenizer.load(tiny.get_config().checkpoint, 640)
    return lambda *turns: len(its.chat([{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]))


@pytest.fixture(scope="module")
def shared():
    """launch.local with a prefill and a decode process, at the prompt, for all tests of this file."""
    with started(AtTerminal, "launch.local") as it:
        it.expect(r"loading \.\.\.\n.*ready in [\d.]+ s", 120)
        it.prompt()
        yield it


@pytest.fixture
def chat(shared):
    """The shared chat with a new conversation."""
    shared.reset()
    return shared


def test_two_turns(chat, prompt_tokens):
    """The second question goes with the first and its answer before it, and is answered otherwise than alone."""
    first, tokens, _ = chat.ask(SHORT)
    assert first and tokens == prompt_tokens(SHORT)
    second, tokens, _ = chat.ask(OTHER)
    assert tokens == prompt_tokens(SHORT, first, OTHER)
    chat.reset()
    alone, tokens, _ = chat.ask(OTHER)
    assert tokens == prompt_tokens(OTHER) and alone != second


def test_interrupted_answer(chat, prompt_tokens):
    """An answer is shown while it comes, ends at once at Ctrl-C, and stays in the conversation as far as it was said."""
    chat.type(LONG + "\r")
    chat.expect(re.escape(LONG) + r"\n(?=.{20})")
    chat.type(CTRL_C)
    pressed = time.monotonic()
    said, _, new = chat.said(end="cut short")
    assert time.monotonic() - pressed < 2 and said and new < 450
    following, tokens, _ = chat.ask(SHORT)
    assert following and tokens == prompt_tokens(LONG, said, SHORT)


def test_interrupt_at_the_prompt(chat, prompt_tokens):
    """Ctrl-C clears the line and says how to leave; several in a row do not leave."""
    chat.type("half of a quest")
    for _ in range(4):
        chat.type(CTRL_C)
        chat.expect(re.escape(LEAVE) + "\n> ")
    assert chat.ask(OTHER)[1] == prompt_tokens(OTHER)


def test_commands_and_lines(chat, prompt_tokens):
    """/help explains, an unknown command and an empty line do nothing, earlier lines come back with the arrow key."""
    chat.type("/help\r")
    chat.expect("/reset begins a new conversation.*stays in the conversation.*> ")
    chat.type("/nonsense\r")
    chat.expect("unknown command /nonsense; /help lists the commands\n> ")
    chat.type("  \r")
    chat.prompt()
    first, tokens, _ = chat.ask(SHORT)
    assert tokens == prompt_tokens(SHORT)
    chat.type(UP + b"\r")
    chat.expect(re.escape(SHORT) + r"\n")
    assert chat.said()[1] == prompt_tokens(SHORT, first, SHORT)


def test_keys_typed_during_an_answer(chat):
    """What is typed while an answer comes is not shown in it and is the next line."""
    chat.type(LONG + "\r")
    chat.expect(re.escape(LONG) + r"\n(?=.{20})")
    chat.type(OTHER + "\r")
    chat.said(end="at the length limit")
    chat.expect(re.escape(OTHER) + r"\nthe prompt's \d+ tokens .*; the cache has 512 .*, /reset begins a new one\n> ")


def test_too_long_a_history(chat, prompt_tokens):
    """A question that the cache cannot hold is refused, and the conversation goes on without it."""
    first, _, _ = chat.ask(SHORT)
    chat.type("hat " * 500 + "\r")
    refused = chat.expect(r"the prompt's (\d+) tokens [^\n]* the cache has 512 [^\n]*; the conversation is as before, /r")
    assert int(refused[1]) == prompt_tokens(SHORT, first, "hat " * 500)
    chat.prompt()
    assert chat.ask(OTHER)[1] == prompt_tokens(SHORT, first, OTHER)


def test_ctrl_d_ends(chat):
    """Ctrl-D ends all processes in order and gives the terminal its settings back."""
    chat.type(CTRL_D)
    assert chat.code() == 0
    assert chat.settings_now() == chat.settings


def test_one_process_of_its_own(prompt_tokens):
    """launch.main at a terminal reacts to Ctrl-C like launch.local; /exit ends it, and gives the settings back."""
    with started(AtTerminal, "launch.main", "--config.mode=interleaved", "--system=Be brief.") as it:
        it.expect(r"ready in [\d.]+ s", 120)
        it.prompt()
        it.type(b"half" + CTRL_C)
        it.expect(re.escape(LEAVE) + "\n> ")
        it.type(LONG + "\r")
        it.expect(re.escape(LONG) + r"\n(?=.{20})")
        it.type(CTRL_C)
        said, tokens, _ = it.said(end="cut short")
        assert tokens > prompt_tokens(LONG)  # the system prompt is before it
        it.ask(SHORT)
        it.type("/exit\r")
        assert it.code() == 0
        assert it.settings_now() == it.settings


def test_interrupt_while_loading():
    """Ctrl-C before the prompt ends everything."""
    with started(AtTerminal, "launch.local", "--config.mode=interleaved") as it:
        it.expect(r"loading \.\.\.\n", 60)
        it.type(CTRL_C)
        assert it.code() == 128 + signal.SIGINT


def test_lost_engine():
    """When the decode process dies during an answer the chat says so, and the program ends with the terminal restored."""
    with started(AtTerminal, "launch.local", "--keep_going", "--config.control.deadline_s=3") as it:
        it.expect(r"ready in [\d.]+ s", 120)
        it.prompt()
        it.type(LONG + "\r")
        it.expect(re.escape(LONG) + r"\n(?=.{20})")
        [decode] = [pid for pid, line in it.left().items() if "--process_id=1" in line]
        os.kill(decode, signal.SIGKILL)
        it.expect(r"\n[^\n]*process 1[^\n]*; the conversation is as before\n")
        assert it.code(30) not in (0, None)
        assert it.settings_now() == it.settings


def test_pipes(prompt_tokens):
    """Each line of standard input is a turn, answered at once; only answers are on standard output; bad lines are named."""
    argv = command(PLAIN, "launch.local", "--config.mode=interleaved")
    with started(Started, argv, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as it:
        stdin, stdout = it.process.stdin, it.process.stdout
        answers = []
        for question in (SHORT, OTHER):
            stdin.write(f"{question}\n".encode())
            answers.append(stdout.readline().decode().rstrip("\n"))
        stdin.write(f"/reset\n{LONG}\n".encode())
        said = stdout.read(20)
        it.process.send_signal(signal.SIGINT)
        said = (said + stdout.readline()).decode().rstrip("\n")
        stdin.write(b"\n/nonsense\ncaf\xe9\n" + OTHER.encode())
        stdin.close()
        rest = stdout.read().decode()
        notes = it.process.stderr.read().decode()
        assert it.code() == 0, notes
    assert all(answers) and len(said) < 1000 and re.fullmatch(r"[^\n]+\n", rest), (answers, said, rest)
    assert [int(n) for n, *_ in re.findall(FIGURES, notes)] == [
        prompt_tokens(SHORT), prompt_tokens(SHORT, answers[0], OTHER), prompt_tokens(LONG), prompt_tokens(LONG, said, OTHER)]
    assert "cut short" in notes and "unknown command /nonsense" in notes and "line 7 is not UTF-8" in notes
    assert "> " not in notes


@pytest.mark.parametrize("arguments, message", [
    (["--input=x"], "--input belongs to --mode=batch, got --mode=chat"),
    (["--mode=batch"], "--temperature belongs to --mode=chat, got --mode=batch"),
    (["--config.mode=interleaved", "--top_p=0"], "no conversation can begin: top_p: input should be greater than 0, got 0"),
])
def test_refused_at_the_start(arguments, message):
    """A chat that cannot work ends at the start, with the reason in one line."""
    argv = command(PLAIN, "launch.local", *arguments)
    done = subprocess.run(argv, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and message in done.stderr and not done.stdout, done.stderr
    assert "Traceback" not in done.stderr
