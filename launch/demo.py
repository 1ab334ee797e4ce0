"""Answers one question twice on this machine's CPU: interleaved (one process) and disaggregated (one process prefills,
another decodes). Shows both answers as they are there, where the second one's stages ran, and whether the two are equal.

  python -m launch.demo "QUESTION"

The model is SmolLM2-135M-Instruct (launch/smollm2.py), or the small one of the checkout where that cannot be fetched.
launch/demo.sh sets up what this needs.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from launch import smollm2

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_TOKENS = 64
# One question is asked: one slot, and as little as can be to compile, which is most of the first run's time.
SMOLLM2 = ["--config=configs/smollm2.py:135m", "--config.model.dtype=float32", "--config.decode.slots=1",
           "--config.decode.steps=1", "--config.cache_length=1024", "--config.chunk=64", "--config.buckets=(64,)",
           "--config.reads=()"]
STAGE = re.compile("(prefill on|transfer from|insert on) .*")


def main():
    parser = argparse.ArgumentParser(prog="launch.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--started", type=float, default=time.time(),
                        help="when the command was given, in seconds of Unix time")
    parser.add_argument("question")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")
    config, request = _model(arguments.question)
    print(f"\nquestion:      {arguments.question}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        (scratch / "request.jsonl").write_text(json.dumps(request | {"max_tokens": MAX_TOKENS, "temperature": 0}) + "\n")
        answers, started, since = {}, arguments.started, "the command"
        for mode in ("interleaved", "disaggregated"):
            answer, first, stages = _run(mode, config, scratch)
            print(f"\n{mode + ':':15}{answer['text']}")
            print(f"{'':15}(first token {first - started:.1f} s after {since})", flush=True)
            answers[mode], started, since = answer, time.time(), "the start of its run"
    print("\nstages of the disaggregated run:", *stages, sep="\n  ")
    same = all(len({json.dumps(answer[field]) for answer in answers.values()}) == 1 for field in ("text", "token_ids"))
    print(f"\nidentical: {'yes' if same else 'no'}")
    sys.exit(not same)


def _model(question):
    """(flags of the config, the request without its limits) for a question."""
    try:
        folder = smollm2.fetch()
    except smollm2.NotFetchedError as e:
        _say(f"{e}. The small model of the checkout answers instead.")
        return ["--config=configs/tiny.py"], {"prompt": question}
    except (ValueError, OSError) as e:
        sys.exit(f"demo: {e}")
    return [*SMOLLM2, f"--config.checkpoint={folder}"], {"messages": [{"role": "user", "content": question}]}


def _run(mode, config, scratch):
    """-> (the answer, when its first token came in seconds of Unix time, log lines of the stages)."""
    _say(f"Running {mode} ...")
    output, log, stages, first = scratch / f"{mode}.jsonl", [], [], 0.0
    command = [sys.executable, "-m", "launch.local", *config, f"--config.mode={mode}", "--mode=batch",
               f"--input={scratch}/request.jsonl", f"--output={output}"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          errors="replace") as job:
        for line in job.stderr:
            log.append(line)
            if stage := STAGE.search(line):
                stages.append(stage[0])
                if stage[1] == "prefill on":  # the last chunk is logged with the first token
                    first = time.time()
    if job.returncode:
        _say("".join(log) + (output.read_text(encoding="utf-8") if output.is_file() else ""))
        sys.exit(f"The {mode} run failed.")
    answer = json.loads(output.read_text(encoding="utf-8"))
    return answer, first, stages


def _say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
