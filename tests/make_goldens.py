"""Make tests/golden/tiny.json: greedy answers of tests/data/tiny by Hugging Face transformers in float32.

    python -m tests.make_goldens

Needs torch and transformers, which nothing else in this project does; run it only to remake the goldens after the
tiny model has changed.

The prompts of an exact token length are cut out of random documents of the kind the model was trained on. Of many
candidates the one is taken whose answer has wide margins, says what the document says, and changes when the KV cache
is wrong at one position.
"""

import itertools
import json
import os

from absl import app, flags
import numpy as np
import sentencepiece
import torch
from transformers import LlamaForCausalLM

from launch.train_tiny import BOS, EOS, Batches, Writer
from tests.greedy import greedy

_MODEL = flags.DEFINE_string("model", "tests/data/tiny", "Directory of the tiny model.")
_GOLDENS = flags.DEFINE_string("goldens", "tests/golden/tiny.json", "File to write.")
_CANDIDATES = flags.DEFINE_integer("candidates", 8, "Candidates for each prompt of an exact length.")

NEW_TOKENS = 64
LENGTHS = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192)
QUESTIONS = ("What is the purpose of life?", "Who are you?", "What is your name?", "Count to twenty.",
             "Count to nine.", "Where do people drink coffee?")


@torch.no_grad()
def logits_of(model, ids, hidden=None, position_ids=None):
    """Logits [S,V] of a sequence; `hidden` (query, key) bool [S,S] hides keys beyond the causal mask."""
    size = len(ids)
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    if hidden is not None:
        visible &= ~hidden
    mask = torch.zeros(size, size).masked_fill(~visible, torch.finfo(torch.float32).min)
    return model(torch.tensor([ids]), attention_mask=mask[None, None], position_ids=position_ids).logits[0]


def cache_errors(model, prompt, answer):
    """Which errors of one position in the prompt's KV cache change the greedy answer.

    The answer is given to the model in one forward: as long as its tokens are the greedy ones, the greedy run with the
    same error goes the same way.
    """
    ids, n = prompt + answer[:-1], len(prompt)

    def changes(missing=None, moved=0):
        hidden = torch.zeros(len(ids), len(ids), dtype=torch.bool)
        if missing is not None:
            hidden[n:, missing] = True
        positions = torch.arange(len(ids))
        positions[n:] += moved
        return logits_of(model, ids, hidden, positions[None])[n - 1:].argmax(-1).tolist() != answer

    return {"first": changes(missing=0), "last": changes(missing=n - 1), "before_last": changes(missing=n - 2),
            "late": changes(moved=1), "early": changes(moved=-1)}


def exact_prompts(tokenizer, length):
    """(text, ids, continuation) of random documents cut after `length` tokens, without end.

    A cut stands in the first repetition of the document's facts, so that the answer is in the prompt once; the text
    encodes to exactly those ids.
    """
    rng = np.random.default_rng(length)
    writer = Writer(rng)
    batches = Batches(writer, tokenizer, 0)
    while True:
        spans = writer.chorus(1 + rng.integers(max(1, length // 6)), 2 * length + 2 * NEW_TOKENS)
        parts = [batches.encode(span.text) for span in spans]
        ids = [BOS] + sum(parts, [])
        start = 1 + len(parts[0]) + len(parts[1])
        if not start <= length < start + len(parts[0]):
            continue
        prompt, continuation = ids[:length], ids[length:length + NEW_TOKENS]
        text = tokenizer.decode(prompt)
        if [BOS] + tokenizer.encode(text) != prompt:
            continue
        yield text, prompt, continuation


def main(_):
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(_MODEL.value, dtype=torch.float32).eval()
    tokenizer = sentencepiece.SentencePieceProcessor(os.path.join(_MODEL.value, "tokenizer.model"))
    goldens = []

    def add(name, prompt, prompt_ids, ignore_eos):
        record = greedy(model, prompt_ids, () if ignore_eos else (EOS,), NEW_TOKENS)
        goldens.append({"name": name, "prompt": prompt, "prompt_ids": prompt_ids, **record})
        errors = cache_errors(model, prompt_ids, record["token_ids"]) if len(prompt_ids) > 1 else {}
        print(f"{name}: min gap {min(record['gaps']):.2f}, median {np.median(record['gaps']):.2f}, "
              f"{len(record['token_ids'])} tokens, {record['finish_reason']}; not noticed: "
              f"{[e for e, noticed in errors.items() if not noticed]}\n   {prompt!r} -> "
              f"{tokenizer.decode(record['token_ids'])!r}", flush=True)

    add("length_1", None, [BOS], ignore_eos=True)
    for length in LENGTHS:
        best = None
        for text, prompt, continuation in itertools.islice(exact_prompts(tokenizer, length), _CANDIDATES.value):
            answer = greedy(model, prompt, (), NEW_TOKENS)
            noticed = sum(cache_errors(model, prompt, answer["token_ids"]).values())
            gap = min(answer["gaps"])
            score = gap > 1, answer["token_ids"] == continuation, noticed, gap
            if best is None or score > best[0]:
                best = score, text, prompt
        add(f"length_{length}", best[1], best[2], ignore_eos=True)
    for question in QUESTIONS:
        add(question, question, [BOS] + tokenizer.encode(question), ignore_eos=False)

    os.makedirs(os.path.dirname(_GOLDENS.value), exist_ok=True)
    with open(_GOLDENS.value, "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(golden) for golden in goldens) + "\n]\n")


if __name__ == "__main__":
    app.run(main)
