"""Text to tokens and back, whole and as it streams."""

import json
import shutil

import pytest
from hypothesis import given, settings, strategies as st

from disagg.tokenizer import SentencePieceTokenizer, TextStream

VOCAB = 320  # of the model: some more than the tokenizer has
BYTE = 3     # id of the piece <0x00>

TEXTS = ["the cat sat", " the", "  two  spaces ", " ", "   ", "a_b __c__", "\u2581x\u2581", "<0x41>", "<0x0A>", "</s><s>", "\n\n\t",
         "café ☕", "😀👩‍👩‍👧", "日本語", "\ufffd", "the\ufffd cat", "ȧ", "\u00a0", "\u2047", "x" * 300]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return SentencePieceTokenizer(tokenizer_folder, VOCAB)


def stream(tokenizer, ids, **options):
    """The stream after all ids, and its pieces."""
    s = TextStream(tokenizer, **options)
    pieces = [s.push(t) for t in ids]
    return s, [*pieces, s.finish()]


def ids_of(tokenizer, text):
    """Ids of a text without the beginning-of-sequence token."""
    return tokenizer.encode(text)[1:]


def normal(text):
    """SentencePiece has one character for a space and for U+2581."""
    return text.replace("\u2581", " ")


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    """A prompt begins with the beginning-of-sequence token, and its tokens give the text again, whole and streamed."""
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and 1 not in ids[1:] and 2 not in ids
    assert tokenizer.decode(ids) == normal(text)
    s, pieces = stream(tokenizer, ids)
    assert "".join(pieces) == s.text == normal(text)


@given(st.text(max_size=30))
def test_round_trip_of_any_text(tokenizer, text):
    """Any Unicode text."""
    s, pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == s.text == normal(text)


def test_a_typed_byte_piece_is_text(tokenizer):
    """`<0x41>` in a prompt does not become the byte 0x41."""
    assert BYTE + 0x41 not in tokenizer.encode("<0x41>")
    assert tokenizer.decode([BYTE + 0x41]) == "A"


ANY_IDS = st.lists(st.one_of(
    st.integers(0, VOCAB - 1),                                          # control tokens and ids without a piece among them
    st.integers(BYTE, BYTE + 255),
    st.sampled_from(list("é☕😀".encode())).map(lambda b: BYTE + b),     # bytes of characters, also out of order
    st.integers(259, 299)), max_size=24)


@settings(max_examples=300)
@given(ANY_IDS)
def test_streamed_pieces_joined_are_the_one_shot_decode(tokenizer, ids):
    """Whatever tokens a model makes: split and broken characters, control tokens, spaces."""
    s, pieces = stream(tokenizer, ids)
    assert "".join(pieces) == s.text == tokenizer.decode(ids)
    assert s.ids == ids and not s.stopped


@pytest.mark.parametrize("between", [1, 2, VOCAB - 1])
def test_a_token_without_text_keeps_the_next_ones_space(tokenizer, between):
    """As after an end-of-sequence token that was ignored."""
    ids = [*ids_of(tokenizer, "the"), between, *ids_of(tokenizer, "cat")]
    assert stream(tokenizer, ids)[0].text == "the cat"


def test_an_incomplete_character_is_held_back(tokenizer):
    """No replacement character is streamed while the rest of a character may come."""
    s = TextStream(tokenizer)
    assert [s.push(BYTE + b) for b in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]


def test_a_character_never_completed(tokenizer):
    """At the end what came of it is given as the one-shot decode gives it."""
    s = TextStream(tokenizer)
    assert [s.push(BYTE + b) for b in "a😀".encode()[:3]] == ["a", "", ""]
    assert s.finish() == tokenizer.decode([BYTE + b for b in "a😀".encode()[:3]])[1:]


def test_text_comes_as_early_as_it_is_certain(tokenizer):
    """Without stop strings every token of whole characters gives its text at once."""
    ids = ids_of(tokenizer, "the cat sat on the mat")
    s = TextStream(tokenizer)
    for i, t in enumerate(ids):
        s.push(t)
        assert s.text == tokenizer.decode(ids[:i + 1])


# Stop strings and stop ids.


@settings(max_examples=300)
@given(st.one_of(ANY_IDS.map(lambda ids: (None, ids)), st.text(alphabet="abc ☕", max_size=20).map(lambda t: (t, None))),
       st.lists(st.text(alphabet="abc ☕", min_size=1, max_size=4), min_size=1, max_size=4))
def test_no_stop_string_leaks(tokenizer, answer, stops):
    """The streamed text is the one-shot decode up to a stop string, contains none, and is never taken back."""
    text, ids = answer
    ids = ids_of(tokenizer, text) if ids is None else ids
    whole = tokenizer.decode(ids)
    s, pieces = stream(tokenizer, ids, stop_strings=stops)
    assert "".join(pieces) == s.text
    assert not any(stop in s.text for stop in stops)
    assert s.stopped == any(stop in whole for stop in stops)
    if s.stopped:
        assert whole.startswith(s.text) and any(whole[len(s.text):].startswith(stop) for stop in stops)
    else:
        assert s.text == whole


@pytest.mark.parametrize("stops, expected", [
    (["sat"], "the cat "),
    ([" sat on"], "the cat"),         # spans tokens
    (["dog", "on", "mat"], "the cat sat "),
    (["t"], ""),                      # the first character
    (["the cat sat on the mat"], ""),
    (["mats"], "the cat sat on the mat"),
    (["the cat sat on the mat."], "the cat sat on the mat"),
    (["c"], "the "),
])
def test_stop_strings(tokenizer, stops, expected):
    """The text ends before the first of them, and `stopped` says so; what comes afterwards does not count."""
    ids = ids_of(tokenizer, "the cat sat on the mat")
    s, pieces = stream(tokenizer, ids, stop_strings=stops)
    assert "".join(pieces) == s.text == expected
    assert s.stopped == (expected != "the cat sat on the mat")
    seen = len(s.ids)
    assert s.stopped == (s.push(ids[0]) == "" and len(s.ids) == seen)


def test_two_stop_strings_in_one_token(tokenizer):
    """The one that begins first counts, whatever their order in the request."""
    (the,) = ids_of(tokenizer, "the")
    for stops in (["h", "t"], ["t", "h"]):
        assert stream(tokenizer, [the], stop_strings=stops)[1] == ["", ""]


def test_what_may_become_a_stop_string_is_held_back(tokenizer):
    """And given once it cannot become one."""
    s = TextStream(tokenizer, stop_strings=["abc", "bd"])
    assert [s.push(BYTE + ord(c)) for c in "xabxabd"] == ["x", "", "", "abx", "", "", "a"]
    assert s.stopped and s.finish() == ""


def test_a_stop_id_gives_no_text(tokenizer):
    """Also where it is an ordinary token; it counts as a token."""
    cat = ids_of(tokenizer, "the cat")[-1]
    s, pieces = stream(tokenizer, [*ids_of(tokenizer, "the"), cat], stop_ids=(cat,))
    assert "".join(pieces) == "the" and s.ids[-1] == cat and not s.stopped


def test_only_a_stop_id(tokenizer):
    """An answer of nothing but its stop id is empty."""
    s, pieces = stream(tokenizer, [2], stop_ids=(2,))
    assert pieces == ["", ""] and s.text == "" and s.ids == [2]


# The files.


@pytest.fixture
def folder(tokenizer_folder, tmp_path):
    """A copy of the tokenizer's folder to change."""
    return shutil.copytree(tokenizer_folder, tmp_path / "copy")


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_file_serves_as_well_as_its_folder(tokenizer_folder, tokenizer):
    """The path may be the model file itself."""
    assert SentencePieceTokenizer(tokenizer_folder / "tokenizer.model", VOCAB).encode("the") == tokenizer.encode("the")


def test_no_tokenizer(tmp_path):
    """The path and the file that is looked for are named."""
    with pytest.raises(ValueError, match="no tokenizer at .*empty.tokenizer.model"):
        (tmp_path / "empty").mkdir()
        SentencePieceTokenizer(tmp_path / "empty", VOCAB)
    with pytest.raises(ValueError, match="no tokenizer at .*nowhere"):
        SentencePieceTokenizer(tmp_path / "nowhere", VOCAB)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:len(b) // 2], lambda b: b"version https://git-lfs\n",
                                    lambda b: bytes(200)])
def test_a_corrupt_model(folder, damage):
    """Named as not a SentencePiece model."""
    file = folder / "tokenizer.model"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match="tokenizer.model is not a SentencePiece model"):
        SentencePieceTokenizer(folder, VOCAB)


def test_a_tokenizer_of_another_model(tokenizer_folder):
    """More tokens than the model has embeddings: both numbers."""
    with pytest.raises(ValueError, match="wrong tokenizer: .*tokenizer.model has 300 tokens, the model's vocabulary 299"):
        SentencePieceTokenizer(tokenizer_folder, 299)


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "config"])
@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_corrupt_settings(folder, name, content):
    """A settings file that is no JSON object is named."""
    write(folder, **{name: content})
    with pytest.raises(ValueError, match=f"{name}.json"):
        SentencePieceTokenizer(folder, VOCAB)


def test_wrong_stop_ids(folder):
    """Anything but numbers is refused with the value."""
    write(folder, generation_config={"eos_token_id": "</s>"})
    with pytest.raises(ValueError, match="eos_token_id must be token ids, got .*</s>"):
        SentencePieceTokenizer(folder, VOCAB)


@pytest.mark.parametrize("files, expected", [
    ({}, (2,)),
    ({"config": {"eos_token_id": 5}}, (5,)),
    ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [6, 7]}}, (6, 7)),
    ({"config": {"eos_token_id": 5}, "generation_config": {"temperature": 0.6}}, (5,)),
    ({"generation_config": {"eos_token_id": None}}, ()),
])
def test_stop_ids(folder, files, expected):
    """From generation_config.json, else config.json, else the tokenizer; one or several."""
    write(folder, **files)
    assert SentencePieceTokenizer(folder, VOCAB).stop_ids == expected


def test_without_a_beginning_token(folder):
    """tokenizer_config.json may switch it off."""
    write(folder, tokenizer_config={"add_bos_token": False})
    assert 1 not in SentencePieceTokenizer(folder, VOCAB).encode("the cat")
