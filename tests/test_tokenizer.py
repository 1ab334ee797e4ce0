"""Text to tokens and back, and the files that say how."""

import json
import shutil

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from disagg.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, load

VOCAB = 320  # of the model: some more than the tokenizers have
BYTE = 3     # id of the piece <0x00>

TEXTS = ["the cat sat", " the", "  two  spaces ", " ", "   ", "a_b __c__", "\u2581x\u2581", "<0x41>", "<0x0A>", "</s><s>",
         "\n\n\t", "café ☕", "😀👩‍👩‍👧", "日本語", "\ufffd", "the\ufffd cat", "ȧ", "\u00a0", "\u2047", "x" * 300,
         "<|eot_id|>", "<|begin_of_text|>the", "<tool>"]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load(tokenizer_folder, VOCAB)


@pytest.fixture(scope="module")
def llama3(llama3_folder):
    return load(llama3_folder, VOCAB)


def special_ids(folder):
    """{text: id} of the special tokens of a folder's tokenizer.json."""
    decoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_added_tokens_decoder()
    return {token.content: i for i, token in decoder.items() if token.special}


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    """A prompt begins with the beginning-of-sequence token, which nothing in the text becomes, and gives the text again;
    SentencePiece has one character for a space and for U+2581."""
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and 1 not in ids[1:] and 2 not in ids
    assert tokenizer.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_of_bytes(llama3, llama3_folder, text):
    """The same of a byte-level tokenizer.json, to the letter."""
    ids, special = llama3.encode(text), special_ids(llama3_folder)
    assert ids[0] == special["<|begin_of_text|>"] and not set(ids[1:]) & set(special.values())
    assert llama3.decode(ids) == text


def test_an_added_token_that_is_text(llama3):
    """What the file adds to the vocabulary without calling it special is one token, and is decoded."""
    assert len(llama3.encode("<tool>")) == 2 and llama3.decode(llama3.encode("a<tool>")) == "a<tool>"


@pytest.mark.parametrize("text", TEXTS)
def test_a_tokenizer_json_as_its_sentencepiece_model(tokenizer, llama2_folders, text):
    """Llama 2's two files give the same ids. Metaspace alone puts no space before a text that begins with one."""
    assert load(llama2_folders[True], VOCAB).encode(text) == tokenizer.encode(text)
    if text != " ":
        expected = tokenizer.encode(text[1:] if text[0] in " \u2581" else text)
        assert load(llama2_folders[False], VOCAB).encode(text) == expected


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(0, VOCAB - 1), st.integers(BYTE, BYTE + 255),
                          st.sampled_from(list("é☕😀▁".encode())).map(lambda b: BYTE + b)), max_size=16))
def test_both_kinds_decode_alike(tokenizer, llama2_folders, ids):
    """Also bytes that are no text, for which the library alone gives up their whole run."""
    ids = [265, *ids]  # "the" first: alone the two differ in what a byte piece for a space is at the beginning
    for folder in llama2_folders.values():
        assert load_once(folder).decode(ids) == tokenizer.decode(ids)


LOADED = {}


def load_once(folder):
    return LOADED.setdefault(folder, load(folder, VOCAB))


def test_a_typed_byte_piece_is_text(tokenizer):
    """`<0x41>` in a prompt does not become the byte 0x41."""
    assert BYTE + 0x41 not in tokenizer.encode("<0x41>")
    assert tokenizer.decode([BYTE + 0x41]) == "A"


def test_special_and_unknown_ids_have_no_text(any_tokenizer):
    """Wherever they stand."""
    the, first = any_tokenizer.encode("the cat"), any_tokenizer.encode("the")[0]
    without = [first, *any_tokenizer.stop_ids, 655, 10**6]
    assert any_tokenizer.decode([*without, *the[1:], *without]) == "the cat"
    assert not any(map(any_tokenizer.has_text, without)) and all(map(any_tokenizer.has_text, the[1:]))


def test_as_transformers(llama2_folders, llama3_folder, tokenizer_folder, tmp_path):
    """Prompts and conversations give the ids that AutoTokenizer gives."""
    transformers = pytest.importorskip("transformers")
    settings_file = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
                     "add_bos_token": True, "chat_template": "{% for m in messages %}{{ bos_token + '[INST] ' + m.content "
                                                             "+ ' [/INST]' + eos_token }}{% endfor %}"}
    folders = [llama2_folders[True], llama2_folders[False], llama3_folder]
    for legacy in (True, False):
        folders.append(shutil.copytree(tokenizer_folder, tmp_path / str(legacy)))
        write(folders[-1], tokenizer_config=settings_file | {"legacy": legacy}, config={"model_type": "llama"})
    for folder in folders:
        ours, theirs = load(folder, VOCAB), transformers.AutoTokenizer.from_pretrained(folder)
        for text in ("the cat", "the  cat ", "x 日本語 <|a ☕", "", "\n\nthe"):
            assert ours.encode(text) == theirs.encode(text), (folder, text)
        if theirs.chat_template:
            messages = [{"role": "user", "content": text} for text in ("the  cat", "café\n")]
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            assert ours.chat(messages) == expected, folder


# The files.


@pytest.fixture
def folder(tokenizer_folder, tmp_path):
    """A copy of the SentencePiece model's folder to change."""
    return shutil.copytree(tokenizer_folder, tmp_path / "copy")


@pytest.fixture
def json_folder(llama3_folder, tmp_path):
    """A copy of a tokenizer.json's folder to change."""
    return shutil.copytree(llama3_folder, tmp_path / "json")


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))


def change(folder, **fields):
    """Change fields of a folder's tokenizer.json."""
    write(folder, tokenizer=json.loads((folder / "tokenizer.json").read_text()) | fields)


def test_a_file_serves_as_well_as_its_folder(tokenizer_folder, tokenizer, llama3_folder, llama3):
    """The path may be the file itself; the other files are those beside it."""
    assert load(tokenizer_folder / "tokenizer.model", VOCAB).encode("the") == tokenizer.encode("the")
    one = load(llama3_folder / "tokenizer.json", VOCAB)
    assert (one.encode("the"), one.stop_ids) == (llama3.encode("the"), llama3.stop_ids)


def test_a_folder_with_both(folder, llama3_folder):
    """tokenizer.json counts, as with Hugging Face."""
    shutil.copy(llama3_folder / "tokenizer.json", folder)
    assert isinstance(load(folder, VOCAB), HuggingFaceTokenizer)
    assert isinstance(load(folder / "tokenizer.model", VOCAB), SentencePieceTokenizer)


def test_no_tokenizer(tmp_path):
    """The path, and what is looked for."""
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        with pytest.raises(ValueError, match=f"no tokenizer at .*{name}: expected tokenizer.json or tokenizer.model"):
            load(tmp_path / name, VOCAB)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:len(b) // 2], lambda b: b"version https://git-lfs\n",
                                    lambda b: bytes(200)])
def test_a_corrupt_model(folder, damage):
    """Named as not a SentencePiece model."""
    file = folder / "tokenizer.model"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match="tokenizer.model is not a SentencePiece model"):
        load(folder, VOCAB)


@pytest.mark.parametrize("damage, message", [
    (lambda b: b"", "tokenizer.json is not JSON"),
    (lambda b: b[:len(b) // 2], "tokenizer.json is not JSON"),
    (lambda b: b"version https://git-lfs\n", "tokenizer.json is not JSON"),
    (lambda b: b"\xff\xfe", "tokenizer.json is not UTF-8"),
    (lambda b: b"[1]", "tokenizer.json must hold a JSON object, got list"),
    (lambda b: b"{}", "tokenizer.json is not a Hugging Face tokenizer: "),
    (lambda b: b'{"model_type": "llama", "vocab_size": 5}', "tokenizer.json is not a Hugging Face tokenizer: "),
    (lambda b: b.replace(b'"type": "BPE"', b'"type": "None"', 1), "tokenizer.json is not a Hugging Face tokenizer: "),
])
def test_a_corrupt_tokenizer_json(json_folder, damage, message):
    """One line that names the file and what it is not."""
    file = json_folder / "tokenizer.json"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=message) as e:
        load(json_folder, VOCAB)
    assert str(e.value).isprintable()


@pytest.mark.parametrize("kind, file, size", [("tokenizer_folder", "tokenizer.model", 300),
                                              ("llama3_folder", "tokenizer.json", 307)])
def test_a_tokenizer_of_another_model(request, kind, file, size):
    """More tokens than the model has embeddings: both numbers."""
    folder = request.getfixturevalue(kind)
    assert load(folder, size).size == size
    with pytest.raises(ValueError, match=f"wrong tokenizer: .*{file} has {size} tokens, the model's vocabulary {size - 1}"):
        load(folder, size - 1)


@pytest.mark.parametrize("kind", ["folder", "json_folder"])
@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "config"])
@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_corrupt_settings(request, kind, name, content):
    """A settings file that is no JSON object is named."""
    folder = request.getfixturevalue(kind)
    write(folder, **{name: content})
    with pytest.raises(ValueError, match=f"{name}.json"):
        load(folder, VOCAB)


@pytest.mark.parametrize("eos", ["</s>", [2, "3"], True, 2.0])
def test_wrong_stop_ids(folder, eos):
    """Anything but numbers is refused with the value."""
    write(folder, generation_config={"eos_token_id": eos})
    with pytest.raises(ValueError, match="eos_token_id must be token ids, got "):
        load(folder, VOCAB)


@pytest.mark.parametrize("files, expected", [
    ({}, (2,)),
    ({"config": {"eos_token_id": 5}}, (5,)),
    ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [6, 7]}}, (6, 7)),
    ({"config": {"eos_token_id": 5}, "generation_config": {"temperature": 0.6}}, (5,)),
    ({"generation_config": {"eos_token_id": None}}, ()),
    ({"tokenizer_config": {"eos_token": "<s>"}}, (1,)),
    ({"tokenizer_config": {"eos_token": {"content": "<s>"}}, "config": {"eos_token_id": [2]}}, (2,)),
    ({"tokenizer_config": {"eos_token": "<s>", "chat_template": "x"}, "config": {"eos_token_id": [2]}}, (2, 1)),
    ({"tokenizer_config": {"eos_token": "<end>", "chat_template": "x"}, "added_tokens": {"<end>": 310},
      "config": {"eos_token_id": 2}}, (2, 310)),
    ({"tokenizer_config": {"eos_token": "\u2581the"}}, (265,)),  # an ordinary piece
])
def test_stop_ids(folder, files, expected):
    """From generation_config.json, else config.json, else the tokenizer; of a chat model also what ends a turn."""
    write(folder, **files)
    assert load(folder, VOCAB).stop_ids == expected


@pytest.mark.parametrize("adds, begins", [(True, True), (False, False), (None, True)])
def test_the_beginning_token(folder, json_folder, llama3_folder, adds, begins):
    """tokenizer_config.json may switch it on and off; else it is there where the model has one or the file adds it."""
    write(folder, tokenizer_config={"add_bos_token": adds})
    assert (1 in load(folder, VOCAB).encode("the cat")) == begins
    config = json.loads((llama3_folder / "tokenizer_config.json").read_text()) | {"add_bos_token": adds}
    first = special_ids(llama3_folder)["<|begin_of_text|>"]
    for change_to in ({}, {"post_processor": None}):
        shutil.copy(llama3_folder / "tokenizer.json", json_folder)
        write(json_folder, tokenizer_config=config)
        change(json_folder, **change_to)
        tokenizer = load(json_folder, VOCAB)
        expected = begins if adds is not None or not change_to else False
        for text in ("", "the cat", "<|begin_of_text|>"):
            assert tokenizer.encode(text).count(first) == expected == (tokenizer.encode(text)[:1] == [first])
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_beginning_token_that_is_none(json_folder):
    """add_bos_token without a token to add."""
    write(json_folder, tokenizer_config={"add_bos_token": True, "bos_token": "<nothing>"})
    with pytest.raises(ValueError, match="add_bos_token is set, but bos_token '<nothing>' is not a token"):
        load(json_folder, VOCAB)


def test_truncation_and_padding_of_the_file_are_off(json_folder, llama3):
    """A tokenizer.json that was saved with them cuts no prompt and pads none."""
    change(json_folder, truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
           padding={"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                    "pad_token": "!"})
    changed = load(json_folder, VOCAB)
    for text in ("the cat sat on the mat", "a"):
        assert changed.encode(text) == llama3.encode(text)
        messages = [{"role": "user", "content": text}]
        assert changed.chat(messages) == llama3.chat(messages)


@pytest.mark.parametrize("files, message", [
    ({"added_tokens": {"<x>": "5"}}, "added_tokens.json must give each token an id, got '5'"),
    ({"added_tokens": {"<x>": -1}}, "added_tokens.json must give each token an id, got -1"),
    ({"added_tokens": {"<x>": 500}}, "has 501 tokens, the model's vocabulary 320"),
    ({"tokenizer_config": {"added_tokens_decoder": {"5": "<x>"}}}, "added_tokens_decoder must give each id a token"),
    ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<x>"}}}}, "added_tokens_decoder must give each id a"),
    ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "added_tokens_decoder must give each id a token with content"),
])
def test_wrong_added_tokens(folder, files, message):
    """Of a tokenizer.model's folder."""
    write(folder, **files)
    with pytest.raises(ValueError, match=message):
        load(folder, VOCAB)
