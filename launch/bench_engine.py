"""The engine benchmark (see launch.bench). Started with the argument `peer` it is the process that runs transformers."""

import contextlib
import importlib.util
import json
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from configs import smollm2
from disagg import chunk as chunks
from disagg import sampling
from disagg.decode import DecodeEngine
from disagg.prefill import PrefillEngine
from models import llama

CACHE, USED = 2048, 128  # positions: of a slot, of its prompt
STEPS, CALLS = 4, 2      # decode steps of a call; calls of one measurement
BATCHES, PROMPTS = (1, 8, 32), (128, 512)
PROBE_BYTES = 2**30
GREEDY = sampling.pack(0, 0.0, 0, 1.0)


def run(repeats):
    """-> arguments of results.record for each figure. One process measures at a time, in turns."""
    read = next(n for n in (*smollm2.get_config("135m").reads, CACHE) if n >= USED + STEPS * (CALLS + 1))
    model, params = random_smollm2()
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    memory = _bandwidth(repeats)
    yield "memory_bandwidth", {}, "GB/s", memory, None, None
    with _Peer(model.config) as peer:
        for batch in BATCHES:
            ours, theirs = _in_turns(_decode(model, params, mesh, batch, read), peer, "decode", batch, repeats)
            yield "decode", {"batch": batch}, "tokens/s", ours, peer.name, theirs
            moved = [rate / batch * _step_bytes(model, batch) / 1e9 for rate in ours]
            yield "decode_bandwidth", {"batch": batch}, "GB/s", moved, "memory_bandwidth", memory
        for tokens in PROMPTS:
            ours, theirs = _in_turns(_prefill(model, params, mesh, tokens), peer, "prefill", tokens, repeats)
            yield "prefill", {"tokens": tokens}, "tokens/s", ours, peer.name, theirs


def smollm2_model():
    """SmolLM2-135M in float32."""
    fields = {name: value for name, value in smollm2.get_config("135m").model.to_dict().items() if value is not None}
    return llama.Llama(llama.Config(**fields | {"dtype": "float32"}, scan_layers=jax.default_backend() != "cpu"))


def random_smollm2():
    """... with random weights: model, parameters."""
    model = smollm2_model()
    return model, jax.block_until_ready(jax.jit(model.init)(jax.random.key(0)))


def _in_turns(measure, peer, what, size, repeats):
    """Rates of both, [repeats] each (theirs None without a peer), after one measurement each that is thrown away."""
    rates = [(measure(), peer.measure(what, size)) for _ in range(repeats + 1)][1:]
    ours, theirs = zip(*rates)
    return ours, theirs if peer.name else None


def _bandwidth(repeats):
    """GB/s at which the devices' memory is read, by summing an array."""
    array = jnp.ones(PROBE_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    return [PROBE_BYTES / _seconds(lambda: total(array)) / 1e9 for _ in range(repeats + 1)][1:]


def _step_bytes(model, batch):
    """Bytes of weights (embeddings once, as the head) and of the cache in use that a decode step has to read."""
    size = lambda tree: sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(tree))
    return size(model.params_shape()) + size(model.cache_shape(batch, USED))


def _seconds(work):
    started = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - started


def _decode(model, params, mesh, batch, read):
    """A function that gives tokens/s of a full decode engine, each slot just behind its prompt."""
    engine = DecodeEngine(model, params, mesh, slots=batch, cache_length=CACHE, top=0)
    chunk = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), _form(model).shape(USED))

    def measure():
        for slot in range(batch):
            engine.write(chunk, slot, 0)
            engine.activate(chunk["ticket"], slot, USED, CACHE - USED, [], GREEDY)
        jax.block_until_ready(engine.run(read, STEPS))
        return batch * STEPS * CALLS / _seconds(lambda: [engine.run(read, STEPS) for _ in range(CALLS)])
    return measure


def _prefill(model, params, mesh, tokens):
    """A function that gives tokens/s of one prompt, its first token included."""
    engine = PrefillEngine(model, params, mesh, _form(model), cache_length=CACHE, buckets=(tokens,), top=0)
    return lambda: tokens / _seconds(lambda: engine.run_prompts([[1] * tokens], [GREEDY], tokens, 1, 0, 0))


def _form(model):
    return chunks.Format(model, units=1, piece_bytes=2**62, checksum=False)


class _Peer:
    """Transformers in a process of its own, which waits while the other measures; name is None where it is not installed."""

    def __init__(self, config):
        self.name = "transformers" if all(map(importlib.util.find_spec, ("torch", "transformers"))) else None
        self._config = config

    def __enter__(self):
        if self.name:
            self._process = subprocess.Popen([sys.executable, "-m", "launch.bench_engine", "peer"], text=True,
                                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._ask(_huggingface(self._config))
        return self

    def __exit__(self, *_):
        if self.name:
            self._process.kill()
            self._process.wait()

    def measure(self, what, size):
        return self._ask([what, size]) if self.name else None

    def _ask(self, message):
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), file=self._process.stdin, flush=True)
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the process that runs transformers ended with code {self._process.wait()}")
        return json.loads(answer)


def _huggingface(c):
    """The architecture in the words of config.json."""
    return {"vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
            "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim, "max_position_embeddings": c.max_length, "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": c.rope_theta, "tie_word_embeddings": c.tie_embeddings}


def _peer():
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**json.loads(input()))).float().eval()
    print("null", flush=True)
    caches = {}

    def prompt(batch, tokens):
        return model(torch.ones((batch, tokens), dtype=torch.long), use_cache=True, logits_to_keep=1)

    def decode(batch):
        if batch not in caches:
            caches[batch] = prompt(batch, USED).past_key_values
        if made := caches[batch].get_seq_length() - USED:
            caches[batch].crop(-made)
        token, steps = torch.ones((batch, 1), dtype=torch.long), STEPS * (CALLS + 1)
        for step in range(steps):
            if step == STEPS:  # as many of both before the measurement begins
                started = time.perf_counter()
            token = model(token, past_key_values=caches[batch], use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        return batch * STEPS * CALLS / (time.perf_counter() - started)

    def one_prompt(tokens):
        started = time.perf_counter()
        prompt(1, tokens).logits.argmax(-1)
        return tokens / (time.perf_counter() - started)

    with torch.no_grad():
        for line in sys.stdin:
            what, size = json.loads(line)
            print((decode if what == "decode" else one_prompt)(size), flush=True)


if __name__ == "__main__":
    _peer()
