"""Text from tokens as they come: the pieces joined are the text of all tokens at once."""

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import pre_tokenizers

from disagg import text_stream
from disagg.text_stream import TextStream
from disagg.tokenizer import load

VOCAB = 660  # of the model: some more than any tokenizer here has
BYTE = 3     # id of the piece <0x00> in a SentencePiece vocabulary


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load(tokenizer_folder, VOCAB)


def stream(tokenizer, ids, **options):
    """The stream after all ids, and its pieces."""
    s = TextStream(tokenizer, **options)
    pieces = [s.push(t) for t in ids]
    return s, [*pieces, s.finish()]


def ids_of(tokenizer, text):
    """Ids of a text without the beginning-of-sequence token."""
    return tokenizer.encode(text)[1:]


def normal(tokenizer, text):
    """What a tokenizer keeps of a text. SentencePiece has one character for a space and for U+2581, and so has what is
    made from it; Metaspace puts no space before a text that begins with one, and takes it for the one it puts."""
    if tokenizer.encode("\u2581") == tokenizer.encode(" "):
        text = text.replace("\u2581", " ")
    return text[text.startswith(" "):] if tokenizer.encode(" a") == tokenizer.encode("a") else text


def byte_ids(tokenizer):
    """The ids of the 256 byte pieces."""
    if tokenizer.decode([BYTE + ord("A")]) == "A" and tokenizer.decode([BYTE + ord("b")]) == "b":
        return range(BYTE, BYTE + 256)
    # A byte-level vocabulary has the printable ones as they are, then the others in order from U+0100.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(b if b in printable else next(others)) for b in range(256)]
    ordered = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [ordered.index(letter) for letter in letters]


# An answer as a list of things that a tokenizer turns into ids: an id, a byte, a text.
A_BYTE = st.one_of(st.integers(0, 255), st.sampled_from([0x20, 0x80, 0xBF, 0xED, 0xFF, *"é☕😀\ufffd".encode()]))
PARTS = st.lists(st.one_of(
    st.tuples(st.just("id"), st.one_of(st.integers(0, VOCAB - 1), st.integers(250, 310))),
    st.tuples(st.just("byte"), A_BYTE),
    st.tuples(st.just("bytes"), st.sampled_from(["é", "☕", "😀", "\ufffd", "▁"])),
    st.tuples(st.just("text"), st.text(max_size=3)),
    st.tuples(st.just("text"), st.sampled_from([" the", " ", "👩‍👩‍👧", "e\u0301", "  ", "日本語"]))), max_size=40)


def as_ids(tokenizer, parts):
    of_byte, ids = byte_ids(tokenizer), []
    for kind, value in parts:
        ids += {"id": lambda v: [v], "byte": lambda v: [of_byte[v]], "bytes": lambda v: [of_byte[b] for b in v.encode()],
                "text": lambda v: ids_of(tokenizer, v) if v else []}[kind](value)
    return ids


@settings(max_examples=150)
@given(PARTS)
def test_pieces_joined_are_the_one_shot_decode(any_tokenizer, parts):
    """Whatever tokens a model makes: split and broken characters, special tokens, unknown ids, spaces."""
    ids = as_ids(any_tokenizer, parts)
    s, pieces = stream(any_tokenizer, ids)
    assert "".join(pieces) == s.text == any_tokenizer.decode(ids)
    assert s.ids == ids and not s.stopped


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_any_text(any_tokenizer, text):
    """A text's tokens give the text again, whole and streamed."""
    ids = any_tokenizer.encode(text)
    s, pieces = stream(any_tokenizer, ids)
    assert "".join(pieces) == s.text == any_tokenizer.decode(ids) == normal(any_tokenizer, text)


@settings(max_examples=150)
@given(PARTS, PARTS)
def test_an_answer_goes_on_from_its_prompt(any_tokenizer, prompt, answer):
    """Its text is what the whole has more than the prompt; a character that the prompt only begins is the answer's."""
    prompt, answer = as_ids(any_tokenizer, prompt), as_ids(any_tokenizer, answer)
    before, whole = any_tokenizer.decode(prompt), any_tokenizer.decode(prompt + answer)
    begun = next((n for n in range(min(3, len(before)) + 1) if whole.startswith(before[:len(before) - n])), None)
    s, pieces = stream(any_tokenizer, answer, context=prompt)
    assert "".join(pieces) == s.text == whole[len(before) - begun:]
    assert s.ids == answer


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=80), st.text(max_size=80))
def test_an_answer_goes_on_from_a_prompt_of_text(any_tokenizer, prompt, answer):
    """Decoded after its prompt's tokens, to the letter, also where one begins or ends with a space."""
    prompt, answer = any_tokenizer.encode(prompt), ids_of(any_tokenizer, answer)
    text = stream(any_tokenizer, answer, context=prompt)[0].text
    assert text == any_tokenizer.decode(prompt + answer)[len(any_tokenizer.decode(prompt)):]


def test_the_space_before_an_answer(any_tokenizer):
    """It is there after a prompt, and not where a text begins, which byte-level tokenizers know no difference of."""
    prompt, cat = any_tokenizer.encode("the"), any_tokenizer.encode("the cat")[len(any_tokenizer.encode("the")):]
    assert stream(any_tokenizer, cat, context=prompt)[0].text == " cat"
    assert stream(any_tokenizer, cat)[0].text == (" cat" if any_tokenizer.decode(cat) == " cat" else "cat")


def test_the_cost_of_a_token_is_bounded(any_tokenizer):
    """However long an answer is, of text, of broken bytes or of special tokens, and however long its prompt."""
    class Counting:
        has_text, sizes = any_tokenizer.has_text, []

        def decode(self, ids):
            self.sizes.append(len(ids))
            return any_tokenizer.decode(ids)

    stray, begun, special = byte_ids(any_tokenizer)[0xFF], byte_ids(any_tokenizer)[0xEF], any_tokenizer.encode("the")[0]
    for ids in (ids_of(any_tokenizer, "the cat 日本語 " * 40), [stray] * 300, [begun] * 300, [special] * 300):
        counting = Counting()
        counting.sizes.clear()
        s, _ = stream(counting, ids, context=ids)
        assert s.text == any_tokenizer.decode([*ids, *ids])[len(any_tokenizer.decode(ids)):]
        assert max(counting.sizes) <= 2 * text_stream.KEPT and len(counting.sizes) <= 1.2 * len(ids) + 2


@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize("between", [1, 2, VOCAB - 1])
def test_tokens_without_text_keep_the_next_ones_space(tokenizer, between, times):
    """As after an end-of-sequence token that was ignored, in the answer or at the prompt's end."""
    before, after = [*ids_of(tokenizer, "the"), *[between] * times], ids_of(tokenizer, "cat")
    assert stream(tokenizer, before + after)[0].text == "the cat"
    assert stream(tokenizer, after, context=before)[0].text == " cat"


def test_an_incomplete_character_is_held_back(any_tokenizer):
    """No replacement character is streamed while the rest of a character may come."""
    s, of_byte = TextStream(any_tokenizer), byte_ids(any_tokenizer)
    assert [s.push(of_byte[b]) for b in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]


def test_a_character_never_completed(any_tokenizer):
    """At the end what came of it is given as the one-shot decode gives it; so it is before other text, and at once."""
    s, of_byte = TextStream(any_tokenizer), byte_ids(any_tokenizer)
    ids = [of_byte[b] for b in "a😀".encode()[:3]]
    assert [s.push(t) for t in ids] == ["a", "", ""]
    assert s.finish() == any_tokenizer.decode(ids)[1:]
    s = TextStream(any_tokenizer)
    assert [s.push(t) for t in [*ids, of_byte[ord("b")]]] == ["a", "", "", any_tokenizer.decode(ids)[1:] + "b"]


def test_broken_bytes_come_while_they_do(any_tokenizer):
    """An endless run of bytes that are no text is not held back for ever, and does not undo the text before it."""
    s, of_byte = TextStream(any_tokenizer), byte_ids(any_tokenizer)
    pieces = [s.push(of_byte[b]) for b in ["é".encode()[0], "é".encode()[1]] + [0xFF] * 50]
    assert "".join(pieces[:2]) == "é" and len("".join(pieces)) >= 1 + 50 - text_stream.UNCERTAIN


def test_text_comes_as_early_as_it_is_certain(any_tokenizer):
    """Without stop strings every token of whole characters gives its text at once."""
    ids = ids_of(any_tokenizer, "the cat sat on the mat")
    s = TextStream(any_tokenizer)
    for i, t in enumerate(ids):
        s.push(t)
        assert s.text == any_tokenizer.decode(ids[:i + 1])


# Stop strings and stop ids.


@settings(max_examples=150)
@given(st.one_of(PARTS, st.text(alphabet="abc ☕", min_size=1, max_size=20).map(lambda t: [("text", t)])),
       st.lists(st.text(alphabet="abc ☕", min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
def test_no_stop_string_leaks(any_tokenizer, parts, stops, context):
    """The streamed text is the one-shot decode up to the first stop string, contains none, and is never taken back."""
    ids = as_ids(any_tokenizer, parts)
    context = any_tokenizer.encode("ab" * context)
    whole = any_tokenizer.decode(context + ids)[len(any_tokenizer.decode(context)):]
    s, pieces = stream(any_tokenizer, ids, stop_strings=stops, context=context)
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
def test_stop_strings(any_tokenizer, stops, expected):
    """The text ends before the first of them, and `stopped` says so; what comes afterwards does not count."""
    ids = ids_of(any_tokenizer, "the cat sat on the mat")
    s, pieces = stream(any_tokenizer, ids, stop_strings=stops)
    assert "".join(pieces) == s.text == expected
    assert s.stopped == (expected != "the cat sat on the mat")
    seen = len(s.ids)
    assert s.stopped == (s.push(ids[0]) == "" and len(s.ids) == seen)


def test_two_stop_strings_in_one_token(tokenizer):
    """The one that begins first counts, whatever their order in the request."""
    (the,) = ids_of(tokenizer, "the")
    for stops in (["h", "t"], ["t", "h"]):
        assert stream(tokenizer, [the], stop_strings=stops)[1] == ["", ""]


def test_what_may_become_a_stop_string_is_held_back(any_tokenizer):
    """And given once it cannot become one."""
    s, of_byte = TextStream(any_tokenizer, stop_strings=["abc", "bd"]), byte_ids(any_tokenizer)
    assert [s.push(of_byte[ord(c)]) for c in "xabxabd"] == ["x", "", "", "abx", "", "", "a"]
    assert s.stopped and s.finish() == ""


def test_the_prompts_text_is_no_part_of_a_stop_string(tokenizer):
    """A stop string that begins in the prompt does not stop an answer."""
    s, _ = stream(tokenizer, ids_of(tokenizer, "cat"), stop_strings=["the cat"], context=tokenizer.encode("the"))
    assert s.text == " cat" and not s.stopped


def test_a_stop_id_gives_no_text(tokenizer):
    """Also where it is an ordinary token; it counts as a token."""
    cat = ids_of(tokenizer, "the cat")[-1]
    s, pieces = stream(tokenizer, [*ids_of(tokenizer, "the"), cat], stop_ids=(cat,))
    assert "".join(pieces) == "the" and s.ids[-1] == cat and not s.stopped


def test_only_a_stop_id(any_tokenizer):
    """An answer of nothing but a stop id is empty, whichever it is of several."""
    for stop in any_tokenizer.stop_ids:
        s, pieces = stream(any_tokenizer, [stop], stop_ids=any_tokenizer.stop_ids)
        assert pieces == ["", ""] and s.text == "" and s.ids == [stop]
