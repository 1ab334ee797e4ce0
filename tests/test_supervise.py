"""The launcher's promises about processes, checked with real ones.

Each case runs `supervise.run` in a launcher process of its own, because it
takes over signals, stdin, stdout and stderr.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEADLINE = 15

LAUNCHER = """
import json, signal, sys
from launch import supervise
signal.signal(signal.SIGINT, signal.default_int_handler)
programs, options = json.loads(sys.argv[1])
commands = [[sys.executable, '-c', p] if isinstance(p, str) else p
            for p in programs]
sys.exit(supervise.run(commands, **options))
"""

OK = "pass"
SAY = "import sys; sys.stderr.write('{}\\n')"
SLEEP = "import time; time.sleep(20)"
IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
PID = 'import os, sys; sys.stderr.write(f"pid {os.getpid()}\\n");'  # one write: nothing comes in between
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_lines_and_a_bar_share_a_terminal():
    """Process 0 has the launcher's stderr; a line of another process clears the line that the cursor is in."""
    _, _, err = supervised([SAY.format("bar"), SAY.format("line")], shared_terminal=True)
    assert "bar\n" in err and "[0]" not in err and "\r\x1b[K[1] line\n" in err


def launcher(programs, **options):
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, json.dumps([programs, options])],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def supervised(programs, stdin=b"", **options):
    """Runs a launcher to its end; returns its code, stdout and stderr."""
    options = {"grace": 30.0, "failure_grace": 0.2} | options
    with launcher(programs, **options) as process:
        try:
            out, err = process.communicate(stdin, timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err.decode()


def last_line(err):
    return err.splitlines()[-1]


@contextlib.contextmanager
def started(programs, **options):
    """A running launcher and the ids of its children, which all run PID."""
    options = {"grace": 30.0, "failure_grace": 0.2} | options
    pids = {}
    with launcher(programs, **options) as process:
        try:
            while len(pids) < len(programs):
                line = process.stderr.readline()
                assert line, "the launcher ended early"
                if found := re.search(rb"(?:\[(\d+)\] )?pid (\d+)", line):
                    pids[int(found[1] or 0)] = int(found[2])
            yield process, [pids[i] for i in range(len(programs))]
        finally:
            process.kill()
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


def alive(pid):
    """Whether a process runs. One that ended but was not waited for does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_gone(pids, seconds=5):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; only Linux ends orphans")


def test_all_succeed():
    code, out, err = supervised(['print("answer")', OK, OK])
    assert (code, out, err) == (0, b"answer\n", "")


def test_one_fails():
    code, _, err = supervised([SLEEP, "raise SystemExit(3)", SLEEP])
    assert code == 3
    assert last_line(err) == "local: process 1 exited with code 3; ended the other 2"


def test_only_process_fails():
    code, _, err = supervised(["raise SystemExit(3)"])
    assert (code, err) == (3, "local: process 0 exited with code 3\n")


def test_one_is_killed():
    code, _, err = supervised([SLEEP, SLEEP, KILLED, SLEEP])
    assert code == 128 + signal.SIGKILL
    assert last_line(err) == ("local: process 2 was killed by SIGKILL; ended the other 3")


def test_others_report_their_own_errors_first():
    """The others' own words about a lost peer come before any SIGTERM."""
    slow = 'import time; time.sleep(1); raise SystemExit("lost process 1")'
    code, _, err = supervised([slow, KILLED], failure_grace=10)
    assert code == 128 + signal.SIGKILL
    assert err.splitlines() == [
        "[0] lost process 1",
        "local: process 1 was killed by SIGKILL; the other ended by itself",
    ]


def test_stubborn_child_is_killed():
    fail = "import time; time.sleep(1.5); raise SystemExit(3)"
    code, _, err = supervised([IGNORE + PID + SLEEP, fail], grace=0.5)
    assert code == 3
    assert "[0] pid" in err
    assert last_line(err) == "local: process 1 exited with code 3; ended the other"


def test_others_outlive_process_0():
    code, _, err = supervised([OK, SLEEP, OK], linger=0.3)
    assert code == 1
    assert last_line(err) == (
        "local: process 0 ended but 1 process still ran 0.3 s later (number 1);" " ended them"
    )


def test_others_may_end_after_process_0():
    code, _, err = supervised([OK, "import time; time.sleep(0.5)"])
    assert (code, err) == (0, "")


def test_keep_going():
    work = 'import time; time.sleep(0.7); print("finished")'
    code, out, err = supervised([work, "raise SystemExit(3)", work], keep_going=True)
    assert (code, out) == (3, b"finished\n")
    assert err.splitlines() == [
        "[2] finished",
        "local: process 1 exited with code 3; the other 2 ended by themselves",
    ]


def test_keep_going_ends_with_process_0():
    fail = "import time; time.sleep(1.2); raise SystemExit(4)"
    code, _, err = supervised([fail, KILLED, SLEEP], keep_going=True)
    assert code == 128 + signal.SIGKILL
    assert last_line(err) == ("local: process 1 was killed by SIGKILL; ended 1 of the other 2")


def test_command_that_does_not_start():
    code, _, err = supervised([SLEEP, ["./no-such-program"]])
    assert code == 127
    assert "process 1 did not start" in last_line(err)
    assert "./no-such-program" in last_line(err)


def test_stdin_reaches_process_0_only():
    data = bytes(range(256)) * 1000
    echo = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    count = "import sys; print(len(sys.stdin.buffer.read()))"
    code, out, err = supervised([echo, count], stdin=data)
    assert (code, out, err) == (0, data, "[1] 0\n")


def test_lines_stay_whole():
    """Lines written in two pieces come out whole, also the last, unended one."""
    talk = (
        "import sys, time\n"
        "for n in range(200):\n"
        '  for piece in ("a" * 3000, "b" * 3000 + "\\n"):\n'
        "    sys.stderr.write(piece); sys.stderr.flush()\n"
        "    time.sleep(0.0005)\n"
        'sys.stderr.write("the\\rend")\n'
    )
    code, out, err = supervised([talk, talk, talk])
    assert (code, out) == (0, b"")
    lines = err.split("\n")
    assert lines.pop() == ""
    for i in range(3):
        mine = [line for line in lines if line.startswith(f"[{i}] ")]
        assert mine.count(f"[{i}] " + "a" * 3000 + "b" * 3000) == 200
        assert mine[200:] == [f"[{i}] the\rend"]
    assert len(lines) == 3 * 201


def test_output_before_a_failure_is_kept():
    """What a failed process wrote last is printed, and before the verdict."""
    fail = 'import sys; print("x" * 100000); print("why"); raise SystemExit(3)'
    _, _, err = supervised([SLEEP, fail])
    assert err.splitlines()[-2:] == [
        "[1] why",
        "local: process 1 exited with code 3; ended the other",
    ]


@needs_proc
def test_sigkill_of_the_launcher_leaves_no_orphan():
    with started([PID + SLEEP, IGNORE + PID + SLEEP, PID + SLEEP]) as (process, pids):
        process.kill()
        process.wait(timeout=DEADLINE)
        assert wait_gone(pids)


@needs_proc
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM])
def test_stopping_the_launcher_ends_the_children(signum):
    with started([PID + SLEEP, PID + SLEEP]) as (process, pids):
        process.send_signal(signum)
        _, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 128 + signum
        assert last_line(err.decode()) == (f"local: stopped by {signum.name}; ended 2 processes")
        assert wait_gone(pids)


@needs_proc
def test_second_interrupt_does_not_wait():
    with started([IGNORE + PID + SLEEP, PID + SLEEP], grace=60) as (process, pids):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert alive(pids[0]) and process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE)
        assert process.returncode == 128 + signal.SIGINT
        assert wait_gone(pids)


COUNT = (
    "import signal, sys, time\n"
    "def count(*_):\n"
    '  sys.stderr.write("interrupted\\n")\n'
    "signal.signal(signal.SIGINT, count)\n"
)


@needs_proc
def test_interrupts_are_process_0s():
    """SIGINT goes to an interactive process 0 alone and ends nothing; its stderr is the launcher's own."""
    leave = "sys.stdin.read()"
    with started([COUNT + PID + leave, PID + SLEEP], interactive=True, linger=0.1) as (process, pids):
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == b"interrupted\n"  # no number before it
            time.sleep(1.1)
        assert all(map(alive, pids)) and process.poll() is None
        process.communicate(timeout=DEADLINE)  # closes its stdin: it ends
        assert process.returncode == 1  # since the other one goes on
        assert wait_gone(pids)


@needs_proc
@pytest.mark.parametrize("signum, times", [(signal.SIGINT, 3), (signal.SIGQUIT, 1), (signal.SIGTERM, 1)])
def test_interactive_process_0_that_does_not_react(signum, times):
    """Three SIGINT in quick succession, or one of the other signals, end everything also when process 0 is stopped."""
    with started([COUNT + PID + SLEEP, PID + SLEEP], interactive=True, grace=0.3) as (process, pids):
        os.kill(pids[0], signal.SIGSTOP)
        for n in range(times):
            assert process.poll() is None and all(map(alive, pids)), n
            process.send_signal(signum)
            time.sleep(0.2)
        _, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 128 + signum
        assert last_line(err.decode()) == f"local: stopped by {signum.name}; ended 2 processes"
        assert wait_gone(pids)


@needs_proc
def test_whole_group_is_killed():
    """A process that a child started does not outlive it."""
    parent = (
        "import subprocess, sys\n"
        f'child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])\n'
        'print("child", child.pid, file=sys.stderr)\n'
        "raise SystemExit(3)\n"
    )
    code, _, err = supervised([SLEEP, parent])
    assert code == 3
    assert wait_gone([int(re.search(r"\] child (\d+)", err)[1])])
