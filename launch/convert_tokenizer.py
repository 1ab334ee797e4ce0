"""A GGUF file's byte-level BPE tokenizer -> tokenizer.json and tokenizer_config.json."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types


def write(metadata, folder):
    """Write both files; metadata: a convert.Metadata. -> {"vocab_size", "bos_token_id", ...}, ids None where not given.

    Raises ValueError for another kind of tokenizer, and for a vocabulary, merge or id that does not fit.
    """
    metadata.expect("tokenizer.ggml.model", str, "gpt2")
    metadata.expect("tokenizer.ggml.pre", str, "smollm")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        metadata.expect(f"tokenizer.ggml.{key}", bool, False, default=False)
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", list)
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id", int, None)
           for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()}
    for name, number in ids.items():
        if number is not None and not 0 <= number < len(tokens):
            raise ValueError(f"{metadata.file}: the id of the {name} token is {number}, there are {len(tokens)} tokens")
    _tokenizer(metadata, tokens, types).save(str(folder / "tokenizer.json"))

    settings = {f"{name}_token": None if number is None else tokens[number] for name, number in ids.items()}
    settings |= {"model_max_length": metadata.get("llama.context_length", int), "add_prefix_space": False,
                 "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    if template := metadata.get("tokenizer.chat_template", str, None):
        settings["chat_template"] = template
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return {"vocab_size": len(tokens)} | {f"{name}_token_id": number for name, number in ids.items()}


def _tokenizer(metadata, tokens, types):
    """The tokenizer as SmolLM2 publishes it: every digit alone, then GPT-2's rule over bytes."""
    file, vocabulary = metadata.file, {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{file}: {len(tokens) - len(vocabulary)} of the {len(tokens)} tokens come twice")
    if len(types) != len(tokens):
        raise ValueError(f"{file} has {len(types)} token types for {len(tokens)} tokens")
    if unknown := set(types) - {NORMAL, CONTROL, USER_DEFINED}:
        raise ValueError(f"{file}: not supported: token type {min(unknown)}")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", list)]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise ValueError(f"{file}: the merge {' '.join(merge)!r} is not of two tokens into a third")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [token for token, t in zip(tokens, types) if t == kind]
        tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False) for token in chosen])
    return tokenizer
