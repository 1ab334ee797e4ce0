"""What a client may ask, and what it is told where it may not."""

import io
import json
import re
import sys
import threading
import types

import pytest
from absl import logging

from disagg import decode, request
from disagg import tokenizer as tokenizer_lib
from disagg.metrics import Life, Metrics
from launch import summary
from launch.batch import Batch
from launch.progress import Progress
from tests.simulated_engines import leading

VOCAB, CACHE = 320, 64
NAN, INFINITY = float("nan"), float("inf")


def one_line(raised):
    """The error's text, which must be one line of bearable length."""
    line = str(raised.value)
    assert line.isprintable() and len(line) < 500
    return line


def problem(**fields):
    """What parse says of a request with these fields."""
    with pytest.raises(ValueError) as e:
        request.parse({"prompt": "the"} | fields)
    return one_line(e)


# One bad value a case: the field, the value, and what the line says of them.
BAD = [
    ("max_tokens", 0, "greater than or equal to 1, got 0"),
    ("max_tokens", -1, "greater than or equal to 1, got -1"),
    ("max_tokens", 10**30, "less than 2147483648, got 10000"),
    ("max_tokens", True, "valid integer, got True"),
    ("max_tokens", 2.0, "valid integer, got 2.0"),
    ("max_tokens", "2", "valid integer, got '2'"),
    ("max_tokens", None, "valid integer, got None"),
    ("max_tokens", NAN, "valid integer, got nan"),
    ("max_tokens", [1], r"valid integer, got \[1\]"),
    ("temperature", 5, "less than or equal to 2, got 5"),
    ("temperature", -0.1, "greater than or equal to 0, got -0.1"),
    ("temperature", NAN, "got nan"),
    ("temperature", INFINITY, "got inf"),
    ("temperature", -INFINITY, "got -inf"),
    ("temperature", True, "valid number, got True"),
    ("temperature", "1", "valid number, got '1'"),
    ("top_p", 0, "greater than 0, got 0"),
    ("top_p", 1.5, "less than or equal to 1, got 1.5"),
    ("top_p", NAN, "got nan"),
    ("top_p", False, "valid number, got False"),
    ("top_k", -1, "greater than or equal to 0, got -1"),
    ("top_k", 2**31, "less than 2147483648, got 2147483648"),
    ("top_k", 1.5, "valid integer, got 1.5"),
    ("seed", 2**63, "less than 9223372036854775808, got 9223372036854775808"),
    ("seed", -2**63 - 1, "greater than or equal to -9223372036854775808"),
    ("seed", 10**4000, r"got 1000.*\.\.\."),
    ("seed", 1.0, "valid integer, got 1.0"),
    ("seed", True, "valid integer, got True"),
    ("seed", "7", "valid integer, got '7'"),
    ("ignore_eos", 1, "valid boolean, got 1"),
    ("ignore_eos", "true", "valid boolean, got 'true'"),
    ("prompt", "", "at least 1 character, got ''"),
    ("prompt", [], r"at least 1 item .*, got \[\]"),
    ("prompt", None, "got None"),
    ("prompt", 5, "got 5"),
    ("prompt", {"text": "the"}, "got {'text': 'the'}"),
    ("prompt", "\ud800", r"unicode string, got '\\ud800'"),
    ("prompt.0", [""], "got ''"),
    ("prompt.0", ["the"], "valid integer, got 'the'"),
    ("prompt.0", [[5, 6]], r"valid integer, got \[5, 6\]"),
    ("prompt.1", [5, -1], "greater than or equal to 0, got -1"),
    ("prompt.1", [5, True], "valid integer, got True"),
    ("prompt.1", [5, 6.0], "valid integer, got 6.0"),
    ("prompt.1", [5, None], "valid integer, got None"),
    ("prompt.1", [5, 10**40], "less than 2147483648, got 1000"),
    ("stop", "", "at least 1 character, got ''"),
    ("stop", 3, "got 3"),
    ("stop", list("abcde"), "at most 4 items .*, got"),
    ("stop.1", ["a", ""], "at least 1 character, got ''"),
    ("stop.0", [3], "valid string, got 3"),
    ("stop_token_ids", 3, "valid list, got 3"),
    ("stop_token_ids", None, "valid list, got None"),
    ("stop_token_ids", list(range(9)), "at most 8 items .*, got"),
    ("stop_token_ids.0", [-1], "greater than or equal to 0, got -1"),
    ("stop_token_ids.0", ["2"], "valid integer, got '2'"),
    ("n", 100000, "unknown field, got 100000"),
    ("logprobs", 5, "unknown field, got 5"),
]


@pytest.mark.parametrize("where, value, what", BAD, ids=[f"{w}-{str(v)[:12]!r}" for w, v, _ in BAD])
def test_a_bad_value(where, value, what):
    """One line that names the field and the value."""
    assert re.search(f"(^|; ){re.escape(where)}: [^;]*{what}", problem(**{where.split(".")[0]: value}))


def test_a_misspelt_field():
    """The nearest known one is suggested."""
    assert problem(max_token=3) == "max_token: unknown field (did you mean max_tokens?), got 3"


@pytest.mark.parametrize("name", ["a\nb", "x" * 10000, "\u2028", "", "list[x", "constrained-str"])
def test_a_field_with_an_odd_name(name):
    """One short line all the same."""
    assert "unknown field, got 1" in problem(**{name: 1})


def test_a_missing_prompt():
    """The one field without a default is asked for."""
    with pytest.raises(ValueError, match="^prompt: field required$"):
        request.parse({})


def test_several_problems():
    """Each is named, up to a few."""
    line = problem(max_tokens=0, temperature="hot", n=2)
    assert all(f"{field}: " in line for field in ("max_tokens", "temperature", "n"))
    assert problem(prompt=["the"] * 1000).endswith("; and 996 more")


def test_a_huge_value_is_not_repeated():
    """The line stays short."""
    problem(prompt=[["x" * 10**6]], n="x" * 10**6)


def test_good_values():
    """The edges of every range, and whole numbers where fractions are allowed."""
    r = request.parse({"prompt": [0, 5], "max_tokens": 1, "temperature": 2, "top_p": 1, "top_k": 0, "seed": -2**63, "stop": "x",
                       "ignore_eos": True})
    assert (r.prompt, r.temperature, r.seed, r.stop_strings) == ([0, 5], 2.0, -2**63, ["x"])
    r = request.parse({"prompt": " ", "temperature": 0, "top_p": 1e-9, "top_k": 2**31 - 1, "seed": 2**63 - 1, "stop": ["a", "b"],
                       "stop_token_ids": []})
    assert (r.max_tokens, r.stop_strings, r.seed) == (16, ["a", "b"], 2**63 - 1)
    assert request.parse({"prompt": "the"}).stop_strings == []


# Conversations.


def chat_problem(**fields):
    """What parse says of a chat request with these fields."""
    with pytest.raises(ValueError) as e:
        request.parse({"messages": [{"role": "user", "content": "the"}]} | fields)
    return one_line(e)


def message(**fields):
    return [{"role": "user", "content": "the"} | fields]


BAD_CHAT = [
    ("messages", [], r"at least 1 item .*, got \[\]"),
    ("messages", None, "valid list, got None"),
    ("messages", "the", "valid list, got 'the'"),
    ("messages", {"role": "user", "content": "the"}, "valid list, got {"),
    ("messages.0", ["the"], "input should be an object, got 'the'"),
    ("messages.0.role", [{"content": "the"}], "field required$"),
    ("messages.0.content", [{"role": "user"}], "field required$"),
    ("messages.0.role", message(role="tool"), "'system', 'user' or 'assistant', got 'tool'"),
    ("messages.0.role", message(role="User"), "'system', 'user' or 'assistant', got 'User'"),
    ("messages.0.role", message(role=None), "got None"),
    ("messages.1.role", message() + message(role=5), "got 5"),
    ("messages.0.content", message(content=None), "valid string, got None"),
    ("messages.0.content", message(content=5), "valid string, got 5"),
    ("messages.0.content", message(content={"type": "text", "text": "the"}), "valid string, got {"),
    ("messages.0.content", message(content=[]), "at least 1 item"),
    ("messages.0.content", message(content="\ud800"), "unicode string"),
    ("messages.0.content.0", message(content=["the"]), "input should be an object, got 'the'"),
    ("messages.0.content.0.type", message(content=[{"type": "image_url", "text": "x"}]), "'text', got 'image_url'"),
    ("messages.0.content.0.text", message(content=[{"type": "text"}]), "field required$"),
    ("messages.0.content.0.text", message(content=[{"type": "text", "text": 5}]), "valid string, got 5"),
    ("messages.0.name", message(name="Ann"), "unknown field, got 'Ann'"),
    ("max_tokens", 0, "greater than or equal to 1, got 0"),
    ("max_tokens", "2", "valid integer, got '2'"),
    ("max_completion_tokens", 0, "greater than or equal to 1, got 0"),
    ("max_completion_tokens", True, "valid integer, got True"),
    ("max_new_tokens", 2, "unknown field"),
]


@pytest.mark.parametrize("where, value, what", BAD_CHAT, ids=[f"{w}-{str(v)[:40]!r}" for w, v, _ in BAD_CHAT])
def test_a_bad_value_in_a_chat(where, value, what):
    """One line that names the field and the value, and nothing else."""
    line = chat_problem(**{where.split(".")[0]: value})
    assert re.search(f"(^|; ){re.escape(where)}: [^;]*{what}", line)
    assert all(problem.startswith(where) for problem in line.split("; "))


def test_a_prompt_and_messages():
    """One of them, and one limit."""
    assert chat_problem(prompt="the") == "prompt and messages: expected one of them, got both"
    line = chat_problem(max_tokens=1, max_completion_tokens=1)
    assert line == "max_tokens and max_completion_tokens: expected one of them, got both"
    with pytest.raises(ValueError, match="^prompt: field required; message: unknown field .did you mean messages"):
        request.parse({"message": []})
    assert "unknown field" in problem(max_completion_tokens=5)


def test_good_chats(tokenizer):
    """All roles, contents of one or several parts, empty ones; limits under both names."""
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": ""}, {"type": "text", "text": "cat"}]
    one = chat(tokenizer, [{"role": "user", "content": parts}], max_tokens=3)
    assert one == chat(tokenizer, message(content="the cat"), max_completion_tokens=3) and one.max_tokens == 3
    assert one.tokens == tuple(tokenizer.chat([{"role": "user", "content": "the cat"}]))
    assert chat(tokenizer, message(content="")).tokens == tuple(tokenizer.chat([{"role": "user", "content": ""}]))
    assert chat(tokenizer, message(), max_tokens=None, temperature=0, seed=5).sampler == (5, 0.0, 0, 1.0)


def chat(tokenizer, messages, cache_length=CACHE, **fields):
    asked = request.parse({"messages": messages} | fields)
    return request.prepare(asked, 3, tokenizer, cache_length=cache_length, vocab_size=VOCAB, default_seed=17)


def test_a_chat_may_fill_the_cache(tokenizer):
    """Without a limit the answer has what is left, at least one token; else the numbers are named."""
    length = len(chat(tokenizer, message()).tokens)
    assert chat(tokenizer, message()).max_tokens == CACHE - length
    assert chat(tokenizer, message(), cache_length=length + 1).max_tokens == 1
    for full in (length, length - 1):
        with pytest.raises(ValueError, match=f"{length} tokens and max_tokens=1 need {length + 1} .* the cache has {full}"):
            chat(tokenizer, message(), cache_length=full)
    with pytest.raises(ValueError, match=f"max_tokens={CACHE} need {CACHE + length} positions"):
        chat(tokenizer, message(), max_tokens=CACHE)


def test_a_conversation_that_the_template_refuses(tokenizer):
    """What the template says."""
    with pytest.raises(ValueError, match="messages: expected user and assistant in turn"):
        chat(tokenizer, message(role="assistant"))


def test_two_stop_ids(llama3_folder):
    """A Llama-3-like model stops at the end of a turn and at the end of the text, unless they are ignored."""
    tokenizer = tokenizer_lib.load(llama3_folder, VOCAB)
    assert len(tokenizer.stop_ids) == 2
    for ask in ({"prompt": "the"}, {"messages": message()}):
        for ignored, expected in ((False, tokenizer.stop_ids), (True, ())):
            asked = request.parse(ask | {"ignore_eos": ignored})
            ready = request.prepare(asked, 3, tokenizer, cache_length=CACHE, vocab_size=VOCAB, default_seed=17)
            assert ready.stop_ids == expected
    for stop in tokenizer.stop_ids:
        ids = [*tokenizer.encode("the")[1:], stop]
        stream = request.text_stream(asked, ready, tokenizer)
        assert "".join(map(stream.push, ids)) + stream.finish() == "the"


def test_the_text_of_an_answer(tokenizer):
    """A completion goes on from its prompt, with the space between them; a chat's answer begins anew. Stops hold in both."""
    cat = tokenizer.encode("the cat sat")[2:]
    for ask, expected in (({"prompt": "the"}, " cat "), ({"prompt": tokenizer.encode("the")}, " cat "),
                          ({"messages": message()}, "cat ")):
        asked = request.parse(ask | {"stop": "sa"})
        ready = request.prepare(asked, 3, tokenizer, cache_length=CACHE, vocab_size=VOCAB, default_seed=17)
        stream = request.text_stream(asked, ready, tokenizer)
        assert "".join(map(stream.push, cat)) == stream.text == expected and stream.stopped
        stream = request.text_stream(asked, ready, tokenizer)
        assert stream.push(2) == "" and stream.ids == [2]


@pytest.mark.parametrize("prompt", [" ", "   ", "\n", "\u3000"])
def test_a_prompt_of_only_spaces(any_tokenizer, prompt):
    """It is served as it is."""
    asked = request.parse({"prompt": prompt})
    ready = request.prepare(asked, 3, any_tokenizer, cache_length=CACHE, vocab_size=660, default_seed=17)
    assert list(ready.tokens) == any_tokenizer.encode(prompt) and len(ready.tokens) >= 2


# Against the model's limits.


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return tokenizer_lib.load(tokenizer_folder, VOCAB)


def prepared(tokenizer, **fields):
    return request.prepare(request.parse(fields), 3, tokenizer, cache_length=CACHE, vocab_size=VOCAB, default_seed=17)


def test_prepare(tokenizer):
    """What the scheduler gets: token ids with the beginning-of-sequence token, the model's stop ids first, a seed."""
    r = prepared(tokenizer, prompt="the cat", max_tokens=4, temperature=0.5, top_k=3, top_p=0.9, stop_token_ids=[9, 2])
    assert (r.id, r.tokens, r.max_tokens, r.stop_ids) == (3, tuple(tokenizer.encode("the cat")), 4, (2, 9))
    assert r.sampler == (17, 0.5, 3, 0.9)
    assert prepared(tokenizer, prompt="the", seed=0).sampler[0] == 0


def test_ids_are_taken_as_they_are(tokenizer):
    """A prompt of token ids gets no beginning-of-sequence token; ignore_eos leaves only the request's own stop ids."""
    r = prepared(tokenizer, prompt=[7, 319], ignore_eos=True, stop_token_ids=[5])
    assert (r.tokens, r.stop_ids) == ((7, 319), (5,))


@pytest.mark.parametrize("length, room", [(1, 63), (62, 2), (63, 1)])
def test_prompts_up_to_the_cache_length(tokenizer, length, room):
    """Prompt and new tokens may fill the cache; one more is refused with the numbers."""
    assert prepared(tokenizer, prompt=[5] * length, max_tokens=room).max_tokens == room
    with pytest.raises(ValueError, match=rf"{length} tokens and max_tokens={room + 1} need {CACHE + 1} positions; the cache has {CACHE}"):
        prepared(tokenizer, prompt=[5] * length, max_tokens=room + 1)


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_prompts_without_room_for_a_token(tokenizer, length):
    """Never truncated: the prompt's length and the cache's are named."""
    with pytest.raises(ValueError, match=f"the prompt's {length} tokens .* the cache has {CACHE}"):
        prepared(tokenizer, prompt=[5] * length, max_tokens=1)


@pytest.mark.parametrize("fields, message", [
    (dict(prompt=[5, VOCAB]), f"prompt: token id {VOCAB} is not in the vocabulary of {VOCAB}"),
    (dict(prompt="the", stop_token_ids=[2, 5000]), f"stop_token_ids: token id 5000 is not in the vocabulary of {VOCAB}"),
    (dict(prompt="the", stop_token_ids=list(range(10, 18))), f"stop_token_ids: 9 stop ids .* at most {decode.MAX_STOP_IDS}"),
])
def test_ids_beyond_the_limits(tokenizer, fields, message):
    """The field, the id and the limit."""
    with pytest.raises(ValueError, match=message):
        prepared(tokenizer, **fields)


# Lines of a batch's input.


class Echo:
    """Stands in for the leader: answers each request with the events that `answer` gives, at once."""

    max_queue = 2

    def __init__(self, answer=lambda r: [("tokens", [5], [[]]), ("finish", "length")]):
        self._answer, self._ids, self.cancelled = answer, iter(range(1000)), []
        self.metrics = Metrics(types.SimpleNamespace(queued=0, running=0, slots=[]), types.SimpleNamespace(published=0, positions=dict), 0)

    def new_id(self):
        return next(self._ids)

    def submit(self, r, handler):
        for event in self._answer(r):
            handler(*event)
        return Life(len(r.tokens), 0.0)

    def cancel(self, number, how):
        self.cancelled.append(number)


def run_batch(tokenizer, tmp_path, data, leader=None):
    """The answers to an input file's bytes."""
    (tmp_path / "in").write_bytes(data)
    errors = Batch(str(tmp_path / "in"), str(tmp_path / "out"), tokenizer, CACHE, VOCAB)(leader or Echo())
    answers = [json.loads(line) for line in (tmp_path / "out").read_text(encoding="utf-8").splitlines()]
    assert [a["index"] for a in answers] == list(range(len(answers)))
    assert errors == sum("error" in a for a in answers)
    return answers


@pytest.mark.parametrize("line, message", [
    (b'{"prompt": "the"', "the line is not JSON: "),
    (b"", "the line is not JSON: "),
    (b"the cat", "the line is not JSON: "),
    (b'{"prompt": "\xff"}', "the line is not UTF-8: invalid start byte at byte 12"),
    (b'["the"]', "the line must be a JSON object, got list"),
    (b"null", "the line must be a JSON object, got NoneType"),
    (b"[" * 100000, "the line is not JSON: "),
    (b'{"prompt": "the", "seed": ' + b"1" * 5000 + b"}", "the line is not JSON: "),
    (b'{"prompt": "the", "temperature": NaN}', "temperature: .*got nan"),
    (b'{"prompt": "the", "top_p": 1e999}', "top_p: .*got inf"),
    (b'{"prompt": "the", "max_tokens": -Infinity}', "max_tokens: .*got -inf"),
    (b'{"prompt": "\\ud800"}', "prompt: .*got '.*ud800'"),
    (b'{"prompt": "the", "\\ud800": 1}', "ud800"),
    (b'{"prompt": "' + b"the " * 10**5 + b'"}', "prompt's .* tokens .* the cache has 64"),
    (b'{"messages": []}', "messages: .*at least 1 item"),
    (b'{"messages": [{"role": "user", "content": "the"}], "prompt": "the"}', "expected one of them, got both"),
    (b'{"messages": [{"role": "assistant", "content": "the"}]}', "expected user and assistant in turn"),
    (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', r"messages\.0\.content: "),
])
def test_a_bad_line(tokenizer, tmp_path, line, message):
    """It gets an error in its place, and the lines around it their answers."""
    good = b'{"prompt": "the"}'
    first, bad, last = run_batch(tokenizer, tmp_path, b"\n".join([good, line, good]) + b"\n")
    assert bad["error"]["type"] == "invalid_request_error"
    assert re.search(message, bad["error"]["message"]) and len(bad["error"]["message"]) < 400
    assert first["token_ids"] == last["token_ids"] == [5]


def test_default_seeds_are_the_lines_indices(tokenizer, tmp_path):
    """A request without a seed gets its line's index."""
    seeds = []
    leader = Echo(lambda r: seeds.append(r.sampler[0]) or [("finish", "length")])
    run_batch(tokenizer, tmp_path, b'{"prompt": "the"}\n{"prompt": "the", "seed": -9}\n{"prompt": "the"}\n', leader)
    assert seeds == [0, -9, 2]


def test_prompts_and_chats_in_one_file(tokenizer, tmp_path):
    """A completion's text keeps the space after its prompt, and a chat's answer has none before it."""
    cat, asked = tokenizer.encode("the cat")[2:], []
    leader = Echo(lambda r: asked.append(r) or [("tokens", cat, [[]] * len(cat)), ("finish", "length")])
    line = b'{"messages": [{"role": "system", "content": "the mat"}, {"role": "user", "content": "the"}]}\n'
    first, second = run_batch(tokenizer, tmp_path, b'{"prompt": "the"}\n' + line, leader)
    assert (first["text"], second["text"]) == (" cat", "cat")
    assert asked[1].tokens == tuple(tokenizer.chat(json.loads(line)["messages"]))
    assert (asked[0].max_tokens, asked[1].max_tokens) == (16, CACHE - len(asked[1].tokens))
    assert second["usage"] == {"prompt_tokens": len(asked[1].tokens), "completion_tokens": len(cat),
                               "total_tokens": len(asked[1].tokens) + len(cat)}


def test_events_after_a_stop_string(tokenizer, tmp_path):
    """A stop string ends the answer: the request is cancelled, and nothing that comes afterwards changes it."""
    a, b, c = (3 + ord(x) for x in "abc")
    leader = Echo(lambda r: [("tokens", [a, b, c], [[]] * 3), ("tokens", [c], [[]]), ("error", "lost")])
    submit, waiting = leader.submit, []

    def both_at_once(r, handler):
        waiting.append((r, handler))
        if len(waiting) == 2:
            for w in waiting[::-1]:
                submit(*w)
        return Life(len(r.tokens), 0.0)
    leader.submit = both_at_once
    for answer in run_batch(tokenizer, tmp_path, b'{"prompt": "the", "stop": "b"}\n' * 2, leader):
        assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("a", [a, b], "stop")
        assert answer["usage"]["completion_tokens"] == 2
    assert sorted(leader.cancelled) == [0, 1]


def test_an_empty_answer(tokenizer, tmp_path):
    """The stop id alone: no text, reason `stop`, one token."""
    leader = Echo(lambda r: [("tokens", [2], [[]]), ("finish", "stop")])
    (answer,) = run_batch(tokenizer, tmp_path, b'{"prompt": "the"}', leader)
    assert (answer["text"], answer["finish_reason"], answer["usage"]["completion_tokens"]) == ("", "stop", 1)


def test_no_requests(tokenizer, tmp_path):
    """An empty input gives an empty output."""
    assert run_batch(tokenizer, tmp_path, b"") == []


def test_more_lines_than_the_queue_holds(tokenizer, tmp_path):
    """No more are asked at once than may wait, so that none is refused, whatever the order of the answers."""
    class Later(Echo):
        max_queue, open = 3, []

        def submit(self, r, handler):
            self.open.append(handler)
            assert len(self.open) <= self.max_queue
            threading.Timer(0.01, lambda: self.open.pop()("finish", "length")).start()  # the latest first
            return Life(len(r.tokens), 0.0)
    answers = run_batch(tokenizer, tmp_path, b'{"prompt": "the"}\n' * 20, Later())
    assert [a["finish_reason"] for a in answers] == ["length"] * 20


def test_a_failure_between_the_lines_ends_the_batch(tokenizer, tmp_path):
    """Whoever waits for the answers hears of it."""
    class Failing(Echo):
        def submit(self, r, handler):
            raise ZeroDivisionError("of its own")
    with pytest.raises(ZeroDivisionError, match="of its own"):
        run_batch(tokenizer, tmp_path, b'{"prompt": "the"}', Failing())


def test_text_is_made_outside_of_the_leaders_thread(tokenizer, tmp_path, monkeypatch):
    """Over a real leader: stop strings of several tokens end answers, none leaks, and no thread but the batch's own decodes."""
    threads = set()
    push = request.TextStream.push
    monkeypatch.setattr(request.TextStream, "push", lambda self, token: threads.add(threading.current_thread().name) or push(self, token))
    a, b, c = (3 + ord(x) for x in "abc")
    line = {"prompt": "the", "max_tokens": 40, "ignore_eos": True}
    with leading(lambda r, i: (a, a, b, c)[i % 4], call_s=0.01) as leader:
        lines = [json.dumps(line | {"stop": stop}).encode() for stop in ("bca", "cx", ["x", "abc"])]
        answers = run_batch(tokenizer, tmp_path, b"\n".join(lines), leader)
        value = leader.metrics.value
        leader.stop()
        leader.join()
    assert [(x["text"], x["finish_reason"], len(x["token_ids"])) for x in answers] == [
        ("aa", "stop", 5), ("aabc" * 10, "length", 40), ("a", "stop", 4)]
    assert threads == {threading.main_thread().name}
    assert [value("disagg_requests_total", end=how) for how in ("stop", "length", "cancelled")] == [2, 1, 0]


def test_the_summary_agrees_with_the_metrics(tokenizer, tmp_path, capsys):
    """Counts, tokens and percentiles of the batch's own requests; on standard error."""
    good = [json.dumps({"prompt": "the", "max_tokens": n, "ignore_eos": True}).encode() for n in (1, 9, 17)]
    with leading(call_s=0.002) as leader:
        run_batch(tokenizer, tmp_path, b"\n".join([*good, b"{}"]), leader)
        value = leader.metrics.value
        said = capsys.readouterr().err
        prompts, moved, first = (value(f"disagg_{name}") for name in ("prompt_tokens_total", "moved_bytes_total", "time_to_first_token_seconds_sum"))
    assert re.search(r"requests +4 in [\d.]+ s: 3 length, 1 invalid\n", said)
    assert re.search(rf"tokens +{prompts:.0f} of prompts, 27 new, [\d.,]+ new ones/s\n", said) and value("disagg_generated_tokens_total") == 27
    assert f"{moved:,.0f} bytes" in said
    p50, p90, p99 = (float(ms) for ms in re.search(r"first token +([\d.]+) ms +([\d.]+) ms +([\d.]+) ms", said).groups())
    assert p50 <= p90 == p99 and p50 + p99 <= 1e3 * first + 0.1
    assert re.search(r"between tokens +[\d.]+ ms", said) and re.search(r"a token +[\d.]+ ms", said) and re.search("whole request +", said)
    assert re.search(r"stages, p50 +queue [\d.]+ ms, prefill [\d.]+ ms, transfer [\d.]+ ms, activation [\d.]+ ms, decode [\d.]+ ms\n", said)
    assert re.search(r"decode 0 +device idle [\d.]+% of [\d.]+ s with active slots\n", said)
    assert re.search(r"plans +\d+; behind at most: process 0 \d+\n", said)


@pytest.mark.parametrize("values, expected", [([7.0], [7, 7, 7]), (range(1, 101), [50, 90, 99]), ([3, 1, 2], [2, 3, 3])])
def test_percentiles(values, expected):
    assert [summary.percentile(values, q) for q in (50, 90, 99)] == expected


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_and_log_lines_do_not_mix(monkeypatch):
    """On a terminal a log line stands alone, above the bar; the log is as before afterwards."""
    handler = logging.get_absl_handler().python_handler
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    monkeypatch.setattr(handler, "stream", terminal)
    monkeypatch.setattr("launch.progress.BAR_S", 0.0)
    with Progress(3, Echo().metrics) as progress:
        progress.add(answers=1, tokens=10)
        progress.show()
        handler.stream.write("a line of the log\n")
        handler.stream.flush()
    assert handler.stream is terminal
    shown = terminal.getvalue()
    assert re.search(r"batch: +33%.*1/3 .*tokens/s, 0 running, 0 queued", shown)
    (line,) = [line for line in shown.split("\n") if "a line" in line]
    assert line.split("\r")[-1] == "a line of the log"


def test_lines_where_there_is_no_terminal(monkeypatch, caplog):
    """One every few seconds, only where something has changed."""
    monkeypatch.setattr("launch.progress.LINE_S", 0.0)
    with Progress(3, Echo().metrics) as progress, caplog.at_level("INFO", "absl"):
        progress.show()
        progress.add(answers=1, tokens=10)
        progress.show()
        progress.show()
    (record,) = caplog.records
    assert re.match(r"batch: 1 of 3 requests answered, [\d.,]+ tokens/s, 0 running, 0 queued", record.getMessage())


def test_a_refused_request_is_an_error_line(tokenizer, tmp_path):
    answers = run_batch(tokenizer, tmp_path, b'{"prompt": "the"}', Echo(lambda r: [("refused", "the queue is full")]))
    assert answers == [{"index": 0, "error": {"message": "the queue is full", "type": "server_error"}}]


@pytest.mark.parametrize("fields", [{"priority": 1.5}, {"priority": 2**31}, {"timeout": 0}, {"timeout": -1}, {"timeout": "soon"}])
def test_priority_and_timeout_that_cannot_be(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        request.parse({"prompt": "the"} | fields)


def test_priority_and_timeout(tokenizer):
    asked = request.parse({"prompt": "the", "priority": -3, "timeout": 2.5})
    prepared = request.prepare(asked, 1, tokenizer, cache_length=CACHE, vocab_size=VOCAB, default_seed=0)
    assert (prepared.priority, prepared.timeout) == (-3, 2.5)


def test_standard_output_is_utf8_in_any_locale(tokenizer, tmp_path, monkeypatch):
    """A coffee cup does not end the batch."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    (tmp_path / "in").write_bytes(b'{"prompt": "the"}')
    cup = [3 + b for b in "☕".encode()]
    leader = Echo(lambda r: [("tokens", cup, [[]] * 3), ("finish", "length")])
    Batch(str(tmp_path / "in"), "-", tokenizer, CACHE, VOCAB)(leader)
    assert json.loads(raw.getvalue().decode())["text"] == "☕"


@pytest.mark.parametrize("source, target, message", [
    ("nowhere", "out", "--input=.*nowhere: No such file"),
    ("in", "nowhere/out", "--output=.*nowhere/out: No such file"),
    ("", "out", "needs --input and --output"),
])
def test_files_that_cannot_be_opened(tokenizer, tmp_path, source, target, message):
    """The flag and the path are named."""
    (tmp_path / "in").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        Batch(source and str(tmp_path / source), str(tmp_path / target), tokenizer, CACHE, VOCAB)
