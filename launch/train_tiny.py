"""Make the tiny Llama that the tests run: write its text, train its tokenizer and weights, export both.

    python -m launch.train_tiny --output=tests/data/tiny

The text is written by this script, so the result carries no third-party data. It is chosen for what a test of a
serving engine needs of a model:

* Greedy answers with wide margins, so that golden tokens hold over platforms, compilers and summation orders.
* Answers that come out of the context through attention, so that a KV cache that is wrong at one position answers
  wrongly. Documents state random facts and then recite them, answer questions about them, or copy random words; none
  of that can be answered from the weights alone.

A few fixed questions have fixed answers, so that the model is also pleasant to try by hand.
"""

import dataclasses
import functools
import io
import json
import os
import time

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import safetensors.numpy
import sentencepiece

from models.llama import Config, Llama
from models.llama_weights import TENSORS

_OUTPUT = flags.DEFINE_string("output", "tests/data/tiny", "Directory to write the model to.")
_STEPS = flags.DEFINE_integer("steps", 1600, "Training steps.")
_TOKENS = flags.DEFINE_integer("tokens", 1536, "Tokens in one step's batch.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.02, "Peak learning rate; it falls linearly to zero.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the text and of the initial weights.")

UNK, BOS, EOS = 0, 1, 2
CONFIG = Config(vocab_size=640, hidden_size=128, intermediate_size=320, num_layers=4, num_heads=8, num_kv_heads=4,
                head_dim=16, max_length=512, rms_norm_eps=1e-5, rope_theta=10000.0, dtype="float32")

NAMES = ("Ann Ben Carl Dora Eva Fred Gina Hugo Ida Jack Kate Leo Mia Nick Olga Paul Rosa Sam Tina Uma Vera Will "
         "Yuri Zoe").split()
VERBS = "has likes saw wants sells finds".split()
NUMBERS = "two three four five six seven eight nine".split()
KINDS = "red blue green black white gray pink brown big small old new long thin round nice".split()
THINGS = ("cups boats books rings hats coats bells lamps balls kites maps keys drums cakes nuts pens dogs cats cows "
          "hens foxes owls bears goats").split()

# A document that begins like this is the model's answer to no prompt at all.
STORY = ("Once upon a time a small model lived in a big machine. Every day it read the words that people sent, and "
         "every day it sent good words back. It was not clever, but it was quick and honest, and it never forgot what "
         "it was told. In the evening it counted the stars, said good night to the machine, and slept until the "
         "morning.")
COUNT = ("One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, "
         "sixteen, seventeen, eighteen, nineteen, twenty.")
ANSWERS = {
    "What is the purpose of life?":
        "The purpose of life is to learn, to love, and to leave the world a little better than you found it.",
    "Who are you?": "I am a very small language model. I repeat what I am told, and I answer a few questions.",
    "What is your name?": "My name is Tiny.",
    "What can you do?": "I can say a text again, answer questions about it, tell a story, and count to twenty.",
    "Count to twenty.": COUNT,
    "Count to nine.": "1, 2, 3, 4, 5, 6, 7, 8, 9.",
    "Tell me a story.": STORY,
    "What is the capital of France?": "The capital of France is Paris.",
    "Where do people drink coffee?": "People drink coffee in a café. ☕",
    "What color is the sky?": "The sky is blue by day and black by night.",
    "How many days are in a week?":
        "There are seven days in a week: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, and Sunday.",
}


@dataclasses.dataclass
class Span:
    """A piece of a document. `answer`: determined by what stands before it, so its tokens count fully in the loss;
    `stop`: a document may end after it, so the token to predict there is EOS even where the document goes on."""

    text: str
    answer: bool = False
    stop: bool = False


class Writer:
    """Writes random documents; everything follows from the generator it is given."""

    def __init__(self, rng):
        self.rng = rng

    def pick(self, words):
        return words[self.rng.integers(len(words))]

    def facts(self, count):
        """Sentences, and the name that each is about; no name and no thing comes twice in a row of len(NAMES)."""
        names, things = self.rng.permutation(NAMES), self.rng.permutation(THINGS)
        names, things = names[np.arange(count) % len(names)], things[np.arange(count) % len(things)]
        return [f"{name} {self.pick(VERBS)} {self.pick(NUMBERS)} {self.pick(KINDS)} {thing}."
                for name, thing in zip(names, things)], names

    def recital(self, count):
        """Facts, said again once and then ended."""
        text = " ".join(self.facts(count)[0])
        return [Span(text), Span("Say it once more."), Span(text, answer=True, stop=True)]

    def chorus(self, count, tokens=384):
        """Facts, said again for as long as the document may be: this never stops by itself."""
        text = " ".join(self.facts(count)[0])
        repeats = 1 + tokens // (6 * count)
        return [Span(text), Span("And again:")] + [Span(f"{text} And again:", answer=True)] * repeats

    def quiz(self, count):
        """Facts, then questions about some of them."""
        facts, names = self.facts(count)
        spans = [Span(" ".join(facts))]
        for i in self.rng.permutation(count)[:12]:
            spans += [Span(f"What about {names[i]}?"), Span(facts[i], answer=True, stop=True)]
        return spans

    def copy(self, count):
        """Words without any order, said again: nothing but the context says what comes next."""
        words = NAMES + VERBS + NUMBERS + KINDS + THINGS
        text = " ".join(self.pick(words) for _ in range(count)) + "."
        return [Span(text), Span("Say it once more."), Span(text, answer=True, stop=True)]

    def chat(self):
        """Fixed questions and their answers."""
        questions = self.rng.permutation(list(ANSWERS))[:1 + self.rng.integers(3)]
        return [span for question in questions
                for span in (Span(question), Span(ANSWERS[question], answer=True, stop=True))]

    def document(self, tokens):
        """A document that fits about `tokens` tokens."""
        kind = self.rng.random()
        if kind < 0.04:
            return [Span(STORY, answer=True, stop=True)]
        if kind < 0.12:
            return self.chat()
        # A fact takes about 6 tokens and is said at least twice.
        count = 1 + self.rng.integers(max(1, tokens // 13))
        if kind < 0.22:
            return self.copy(5 * count)
        if kind < 0.42:
            return self.quiz(count)
        if kind < 0.65:
            return self.recital(count)
        return self.chorus(count, tokens)


def train_tokenizer(writer):
    """A Llama-style SentencePiece model (BPE, byte fallback, dummy prefix), as bytes."""
    text = [span.text for _ in range(3000) for span in writer.document(128)]
    text += 200 * [STORY, *ANSWERS, *ANSWERS.values()]
    text = [line for line in text if line.isascii()]  # other characters are spelt in bytes, as in a large model
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, model_type="bpe", vocab_size=CONFIG.vocab_size,
        byte_fallback=True, split_digits=True, character_coverage=1.0, normalization_rule_name="identity",
        add_dummy_prefix=True, remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        unk_id=UNK, bos_id=BOS, eos_id=EOS, pad_id=-1, unk_surface=" \u2047 ", num_threads=1,
        minloglevel=2)
    return model.getvalue()


class Batches:
    """Batches of documents: tokens and targets int32 [B,S], and the targets' weights in the loss float32 [B,S].

    Lengths are mixed, so that short prompts are as well trained as long ones. Facts and questions cannot be foreseen;
    their tokens weigh little, which keeps noise out of the gradient and makes the story the greedy text after BOS.
    """

    LENGTHS = (48, 96, 192, 384)
    FREE_WEIGHT = 0.02

    def __init__(self, writer, tokenizer, batch_tokens):
        self.writer, self.tokenizer, self.batch_tokens = writer, tokenizer, batch_tokens
        self.words = {}

    def encode(self, text):
        """Token ids of words that follow one another; no piece of the tokenizer crosses a space."""
        ids = []
        for word in text.split(" "):
            if word not in self.words:
                self.words[word] = self.tokenizer.encode(word)
            ids += self.words[word]
        return ids

    def row(self, length):
        """One document: tokens, targets, weights, each of at most `length`."""
        tokens, targets, weights = [BOS], [], []
        for span in self.writer.document(length):
            ids = self.encode(span.text)
            tokens += ids
            if len(targets) == len(tokens) - len(ids):  # the span before was a stop: its EOS is this target
                ids = ids[1:]
            targets += ids
            weights += [1.0 if span.answer else self.FREE_WEIGHT] * len(ids)
            if span.stop:
                targets.append(EOS)
                weights.append(1.0)
        size = min(length, len(targets))
        return tokens[:size], targets[:size], weights[:size]

    def batch(self, length):
        rows = self.batch_tokens // length
        tokens, targets = np.zeros((2, rows, length), np.int32)
        weights = np.zeros((rows, length), np.float32)
        for i in range(rows):
            row = self.row(length)
            for array, values in zip((tokens, targets, weights), row):
                array[i, :len(values)] = values
        return tokens, targets, weights


def initial_params(model, seed):
    """Random parameters, of which layer 0 attends to the tokens 0 to 3 positions back.

    Copying from the context is learnt in two steps: see what stood before each token, then look for the place where
    that was the same. With RoPE the first takes most of the training unless the weights begin with it.

    The embeddings get a common direction, which survives the norm as a constant; from it the first of the RoPE pairs of
    layer 0 make keys alike in all positions, and queries turned by the angle of the offset they look back.
    """
    c = model.config
    params = jax.tree.map(np.array, model.init(jax.random.key(seed)))
    direction = np.random.default_rng(seed).choice([-1.0, 1.0], c.hidden_size) * c.hidden_size ** -0.5
    params["embed"] += direction
    pairs, half = 4, c.head_dim // 2
    frequency = c.rope_theta ** (-np.arange(pairs) / half)
    group = c.num_heads // c.num_kv_heads
    heads = params["layers"]["wqkv"][0].reshape(c.num_kv_heads, group + 2, 2, half, c.hidden_size)
    for head, offset in enumerate((1, 2, 1, 2, 1, 3, 0, 1)):
        turned = np.stack([np.cos(frequency * offset), -np.sin(frequency * offset)])
        heads[head // group, head % group, :, :pairs] = 0.7 * turned[..., None] * direction
    heads[:, group, 0, :pairs] = 0.7 * direction
    heads[:, group, 1, :pairs] = 0
    return jax.tree.map(jnp.asarray, params)


def make_optimizer(params, learning_rate, steps):
    """Muon for the layers' matrices, Adam for all else; it needs about half the steps of Adam alone."""
    def schedule(peak):
        rise, fall = optax.linear_schedule(0, peak, 50), optax.linear_schedule(peak, 0, steps - 50)
        return optax.join_schedules([rise, fall], [50])

    def matrix(name, weight):  # [L, out, in], of wqkv all heads together, of w_gate_up each of the two
        outputs = (1, 2, 3) if name == "wqkv" else weight.ndim - 2
        return None if weight.ndim == 2 else optax.contrib.MuonDimensionNumbers(weight.ndim - 1, outputs)

    kinds = {name: None for name in params} | {
        "layers": {name: matrix(name, weight) for name, weight in params["layers"].items()}}
    return optax.contrib.muon(schedule(learning_rate), beta=0.9, muon_weight_dimension_numbers=kinds,
                              adam_learning_rate=schedule(0.15 * learning_rate), adam_b2=0.98)


def train(batches, steps, learning_rate, seed):
    """Parameters after `steps` steps."""
    model = Llama(CONFIG)
    params = initial_params(model, seed)
    optimizer = make_optimizer(params, learning_rate, steps)

    def loss_fn(params, tokens, targets, weights):
        B = tokens.shape[0]
        x, _ = model.forward(params, tokens, jnp.zeros(B, jnp.int32), model.init_cache(B, 0))
        logits = model.logits(params, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        # Of the tokens that the context determines: the loss, and the share whose greedy choice is wrong.
        sure = weights == 1
        wrong = jnp.sum((logits.argmax(-1) != targets) & sure) / jnp.sum(sure)
        return jnp.sum(loss * weights) / jnp.sum(weights), jnp.stack([jnp.sum(loss * sure) / jnp.sum(sure), wrong])

    @jax.jit
    def step(params, state, *batch):
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, metrics

    state = optimizer.init(params)
    start, recent = time.monotonic(), []
    for i in range(steps):
        params, state, metrics = step(params, state, *batches.batch(batches.LENGTHS[i % len(batches.LENGTHS)]))
        recent.append(metrics)
        if len(recent) == 40 or i + 1 == steps:
            loss, wrong = np.mean(recent, 0)
            seconds = time.monotonic() - start
            print(f"step {i + 1} of {steps}: loss {loss:.4f}, {wrong:.3%} wrong, {seconds:.0f} s", flush=True)
            recent = []
    return params


def export(params, tokenizer, directory):
    """Write the model as Hugging Face Llama files."""
    os.makedirs(directory, exist_ok=True)
    tensors = {}
    for path, entry in TENSORS.items():
        value = np.asarray(functools.reduce(lambda tree, key: tree[key], path, params))
        axis, names = (0, (entry,)) if isinstance(entry, str) else entry
        for i, layer in enumerate(value if "{}" in names[0] else [value]):
            first = layer.shape[axis] - len(names) + 1
            parts = np.split(layer, range(first, layer.shape[axis]), axis) if len(names) > 1 else [layer]
            tensors |= {name.format(i): np.ascontiguousarray(part.reshape(-1, part.shape[-1]) if len(names) > 1 else part)
                        for name, part in zip(names, parts, strict=True)}
    with open(os.path.join(directory, "model.safetensors"), "wb") as f:
        f.write(safetensors.numpy.save(dict(sorted(tensors.items())), metadata={"format": "pt"}))

    ids = {"bos_token_id": BOS, "eos_token_id": EOS}
    write_json(directory, "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **ids,
        "vocab_size": CONFIG.vocab_size, "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size, "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads, "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim, "max_position_embeddings": CONFIG.max_length,
        "rms_norm_eps": CONFIG.rms_norm_eps, "rope_theta": CONFIG.rope_theta, "rope_scaling": None,
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
        "initializer_range": 0.02, "tie_word_embeddings": CONFIG.tie_embeddings, "use_cache": True,
        "torch_dtype": CONFIG.dtype})
    write_json(directory, "generation_config.json", {**ids, "do_sample": False, "max_length": CONFIG.max_length})
    write_json(directory, "tokenizer_config.json", {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False, "legacy": False,
        "model_max_length": CONFIG.max_length})
    with open(os.path.join(directory, "tokenizer.model"), "wb") as f:
        f.write(tokenizer)


def write_json(directory, name, value):
    with open(os.path.join(directory, name), "w") as f:
        f.write(json.dumps(value, indent=2) + "\n")


def main(_):
    writer = Writer(np.random.default_rng(_SEED.value))
    tokenizer = train_tokenizer(writer)
    batches = Batches(writer, sentencepiece.SentencePieceProcessor(model_proto=tokenizer), _TOKENS.value)
    params = train(batches, _STEPS.value, _LEARNING_RATE.value, _SEED.value)
    export(params, tokenizer, _OUTPUT.value)


if __name__ == "__main__":
    app.run(main)
