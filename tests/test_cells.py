"""Whole cells against the goldens of transformers: interleaved, and disaggregated over meshes of every size.

One group of processes runs many cells, each with engines of its own on submeshes of its devices. In every process host
reads above 64 KiB raise (tests/worker.py), so the KV cannot go through host memory, and the debug comparison of what the
processes executed is on.
"""

import random

import pytest

from tests import cluster, golden
from tests.equality import assert_close_logits, assert_same_tokens

pytestmark = pytest.mark.e2e

BASE = {"top_logits": 5, "debug.hash_chain": True, "reads": []}
READS = {"reads": [64, 128]}  # on top: every program is compiled for each


def role(name, engines, processes, tp):
    return {f"{name}.engines": engines, f"{name}.processes": processes, f"{name}.tp": tp}


def disaggregated(prefill, decode):
    """Config of prefill and decode, each (engines, processes an engine, tp)."""
    return BASE | role("prefill", *prefill) | role("decode", *decode)


def interleaved(engines, processes, tp):
    return BASE | {"mode": "interleaved"} | role("decode", engines, processes, tp)


def run_group(folder, cells, *, processes, devices, seconds):
    """Run cells, {name: (config, requests)}; -> {name: answers}."""
    cases = [{"name": name, "config": config, "requests": requests} for name, (config, requests) in cells.items()]
    with cluster.job(folder, cases, processes=processes, devices=devices) as job:
        codes = job.wait(seconds)
        assert not any(codes), f"exit codes {codes}\n{job.text()}"
    return {name: cluster.answers(folder, name) for name in cells}


def mixed_requests():
    """100 requests of mixed lengths, three of which fill the cache, half of them sampling with parameters and seeds of their own, some with stop ids."""
    rng = random.Random(7)
    goldens = golden.load()
    requests = []
    for i in range(100):
        ids = rng.choice(goldens)["prompt_ids"]
        sampling = [{"temperature": 0}, {"temperature": 1.0, "seed": i}, {"temperature": 0.7, "top_p": 0.9, "seed": 2**40 + i},
                    {"temperature": 1.3, "top_k": 12, "top_p": 0.95, "seed": i}][i % 4]
        requests.append({"prompt": ids[:rng.randint(1, len(ids))], "max_tokens": rng.randint(1, 60), "ignore_eos": i % 3 > 0, **sampling})
    for i, length in ((20, 255), (60, 192), (80, 200)):  # with the new tokens all of the cache
        ids = (goldens[i % len(goldens)]["prompt_ids"] * 256)[:length]
        requests[i] |= {"prompt": ids, "max_tokens": 256 - length}
    return requests


GOLDENS = [golden.request(g) for g in golden.load()]
TPS = (1, 2, 4)
TWO = {f"interleaved tp {tp}": (interleaved(2, 1, tp), GOLDENS) for tp in TPS}
OTHERS = {f"prefill tp {a} decode tp {b}": (disaggregated((1, 1, a), (1, 1, b)), GOLDENS) for a in TPS for b in TPS}
TWO |= {f"prefill {name}": OTHERS.pop(f"prefill {name}") for name in ("tp 1 decode tp 1", "tp 1 decode tp 4", "tp 4 decode tp 2")}
INT8 = {"kv_cache_dtype": "int8"}
TWO |= {"int8, interleaved tp 2": (interleaved(2, 1, 2) | INT8, GOLDENS), "int8, tp 1 to 4": (disaggregated((1, 1, 1), (1, 1, 4)) | INT8, GOLDENS)}
TWO |= {"prefill tp 1 decode tp 2, reading parts": (disaggregated((1, 1, 1), (1, 1, 2)) | READS, GOLDENS)}
SOLO = interleaved(4, 1, 1) | {"decode.slots": 1}  # a slot an engine: every request is decoded alone
FOUR = {
    "two processes a side, tp 2 to 2": (disaggregated((1, 2, 2), (1, 2, 2)), GOLDENS),
    "two processes a side, tp 2 to 4": (disaggregated((1, 2, 2), (1, 2, 4)), GOLDENS),
    "one process to two, tp 4 to 4": (disaggregated((2, 1, 4), (1, 2, 4)), GOLDENS),
    "two processes to one, tp 4 to 2": (disaggregated((1, 2, 4), (2, 1, 2)), GOLDENS),
    "solo": (SOLO, mixed_requests()),
    "2 prefill 2 decode": (disaggregated((2, 1, 1), (2, 1, 1)) | READS, mixed_requests()),
    "2 prefill 2 decode, short ones where they are decoded": (disaggregated((2, 1, 1), (2, 1, 1)) | {"decode.prefill_up_to": 32}, mixed_requests()),
    "4 interleaved": (interleaved(4, 1, 1), mixed_requests()),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_group(tmp_path_factory.mktemp("two"), TWO, processes=2, devices=4, seconds=500)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return run_group(tmp_path_factory.mktemp("others"), OTHERS, processes=2, devices=4, seconds=500)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_group(tmp_path_factory.mktemp("four"), FOUR, processes=4, devices=4, seconds=500)


def check_goldens(answers, atol=1e-4):
    for g, got in zip(golden.load(), answers, strict=True):
        want = golden.answer(g)
        assert_same_tokens(want, got, g["name"])
        assert_close_logits(want, got, atol, g["name"])
        assert got["finish_reason"] == g["finish_reason"], g["name"]
        assert got["usage"] == {"prompt_tokens": len(g["prompt_ids"]), "completion_tokens": len(got["token_ids"]),
                                "total_tokens": len(g["prompt_ids"]) + len(got["token_ids"])}


@pytest.mark.parametrize("name", [name for name in TWO if "int8" not in name])
def test_goldens(two, name):
    """Tokens and logits are transformers', at every tensor-parallel size of either side."""
    check_goldens(two[name])


def test_an_int8_cache(two):
    """The tokens are still those of transformers; the logits, not quite those of float32, are the same in either mode."""
    one, other = (two[name] for name in TWO if "int8" in name)
    check_goldens(one, 0.5)
    for g, got, again in zip(golden.load(), one, other, strict=True):
        assert_same_tokens(got, again, g["name"])
        assert_close_logits(got, again, 0.05, g["name"])
    with pytest.raises(AssertionError):
        check_goldens(one)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_goldens_over_the_other_sizes(others, name):
    """... which the bytes themselves say too, in less time: see test_route."""
    check_goldens(others[name])


@pytest.mark.parametrize("name", [name for name, (_, requests) in FOUR.items() if requests is GOLDENS])
def test_goldens_over_processes(four, name):
    """... and with engines of several processes, also unequal numbers of them."""
    check_goldens(four[name])


@pytest.mark.parametrize("name", [name for name in FOUR if "2 prefill" in name] + ["4 interleaved"])
def test_each_equals_its_solo_run(four, name):
    """100 mixed requests over 4 slots an engine: each has the tokens of its run alone, sampling included."""
    for i, (alone, got) in enumerate(zip(four["solo"], four[name], strict=True)):
        assert_same_tokens(alone, got, f"request {i}")
        assert got["finish_reason"] == alone["finish_reason"] or got["token_ids"] != alone["token_ids"]
