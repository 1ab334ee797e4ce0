"""JAX on eight CPU devices in the test process, reproducible property tests, and what several test files share."""

import io
import json
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"  # also for the processes that tests start
# Machine code that is less optimised, for the same programs: compiling takes most of the tests' time.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=1 " + os.environ.get("XLA_FLAGS", "")

import hypothesis
import jax
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from disagg import tokenizer as tokenizer_lib

jax.config.update("jax_num_cpu_devices", 8)
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("default")


TINY = pathlib.Path(__file__).parent / "data" / "tiny"
WORDS = "the cat saw a red dog and the dog sat on the mat with one big hat stop or go on".split()
SENTENCES = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]
LLAMA3_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' ~ message.content | trim ~ '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}")


def special_token(text, **options):
    return tokenizers.AddedToken(text, special=True, normalized=False, **options)


@pytest.fixture(scope="session")
def llama3_folder(tmp_path_factory):
    """A folder with a small tokenizer.json as Llama 3's: bytes, special tokens behind the vocabulary, two stop ids."""
    model = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.train_from_iterator([*SENTENCES, *["日本語 café ☕"] * 20], trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "python_tag"]
    model.add_special_tokens([special_token(f"<|{name}|>") for name in names])
    model.add_tokens([tokenizers.AddedToken("<tool>", special=False, normalized=False)])  # text, as a token of its own
    begin = ("<|begin_of_text|>", model.token_to_id("<|begin_of_text|>"))
    model.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])])
    folder = tmp_path_factory.mktemp("llama3")
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin[0], "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": True, "chat_template": LLAMA3_TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [model.token_to_id("<|end_of_text|>")]}))
    return folder


def llama2_tokenizer(pieces, legacy):
    """SentencePiece's pieces as Llama 2's tokenizer.json: byte fallback, a space before a text (legacy: also after a
    special token)."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = [(piece[:at], piece[at:]) for piece in pieces[259:] for at in range(1, len(piece))
              if piece[:at] in ids and piece[at:] in ids]
    model = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    model.add_special_tokens([special_token(piece) for piece in pieces[:3]])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return model


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A folder with a small SentencePiece model as Llama's: BPE, byte fallback, dummy prefix; 300 pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, model_type="bpe", vocab_size=300, byte_fallback=True,
        normalization_rule_name="identity", add_dummy_prefix=True, remove_extra_whitespaces=False,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2)
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


@pytest.fixture(scope="session")
def llama2_folders(tokenizer_folder, tmp_path_factory):
    """{legacy: a folder with the pieces of tokenizer_folder as a tokenizer.json}."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_folder / "tokenizer.model"))
    pieces = [pieces.id_to_piece(i) for i in range(pieces.vocab_size())]
    folders = {}
    for legacy in (True, False):
        folders[legacy] = folder = tmp_path_factory.mktemp("llama2")
        llama2_tokenizer(pieces, legacy).save(str(folder / "tokenizer.json"))
        eos = {"__type": "AddedToken", "content": "</s>"} | dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
        (folder / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": eos, "unk_token": "<unk>",
            "add_bos_token": True, "add_eos_token": False, "legacy": legacy}))
    return folders


@pytest.fixture(scope="session", params=["sentencepiece", "tiny", "llama3", "llama2-legacy", "llama2-metaspace"])
def any_tokenizer(request, tokenizer_folder, llama3_folder, llama2_folders):
    """Each kind of tokenizer, for a model with some more embeddings than it has tokens."""
    folder = {"sentencepiece": tokenizer_folder, "tiny": TINY, "llama3": llama3_folder,
              "llama2-legacy": llama2_folders[True], "llama2-metaspace": llama2_folders[False]}[request.param]
    return tokenizer_lib.load(folder, 660)
