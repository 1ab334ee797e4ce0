"""Conversations as a model was trained on them: templates, what they may do, and special tokens in what people write."""

import datetime
import json
import re
import shutil
import time

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from disagg import chat_template
from disagg.chat_template import ChatTemplate
from disagg.tokenizer import load
from tests.conftest import special_token

VOCAB = 660
SYSTEM, USER, ASSISTANT = ({"role": role, "content": text} for role, text in (
    ("system", "Be short."), ("user", "the cat"), ("assistant", "sat on the mat")))
CONVERSATIONS = [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER]]


def user(text):
    return [{"role": "user", "content": text}]


def render(source, messages=[USER], **tokens):
    return ChatTemplate(source, tokens, []).render(messages)[0]


def copied(folder, target, **files):
    """A copy of a folder with other files: name -> an object, or the text, of NAME.json; with a dot in it, of that file."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    for name, content in files.items():
        name = name.replace("__", ".") if "__" in name else f"{name}.json"
        (target / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return target


def with_template(folder, target, template, **more):
    settings_file = folder / "tokenizer_config.json"
    config = json.loads(settings_file.read_text()) if settings_file.exists() else {}
    return load(copied(folder, target, tokenizer_config=config | {"chat_template": template} | more), VOCAB)


@pytest.fixture(scope="module")
def llama3(llama3_folder):
    return load(llama3_folder, VOCAB)


# What templates use.


@pytest.mark.parametrize("source, expected", [
    ("{% for m in messages %}\n  {% if m.role %}\n{{ m['content'] }}\n  {% endif %}\n{% endfor %}", "the cat\n"),  # lines of blocks
    ("{{ bos_token }}{{ eos_token }}{{ pad_token }}|", "<s></s>|"),
    ("{% if not add_generation_prompt %}no{% endif %}{% if tools is defined and tools is not none %}no{% endif %}yes", "yes"),
    ("{% if date_string is not defined %}{% set date_string = '26 Jul' %}{% endif %}{{ date_string }}", "26 Jul"),
    ("{% for m in messages * 3 %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ loop.index }}{% endfor %}", "13"),
    ("{% for m in messages * 3 %}{% if loop.index == 2 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}", "1"),
    ("{% set ns = namespace(n=0) %}{% for m in messages * 3 %}{% set ns.n = ns.n + loop.index0 %}{% endfor %}{{ ns.n }}", "3"),
    ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "the cat"),
    ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
    ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
    ("{{ messages[0].content.split(' ')[-1] | trim | upper }}{{ messages[1:] | length }}", "CAT0"),
    ("{{ range(3) | list }}{{ 2 ** 3 * 2 }}{{ 'ab' * 2 }}", "[0, 1, 2]16abab"),
    ("{% macro say(m) %}<{{ m.content }}>{% endmacro %}{{ say(messages[0]) }}", "<the cat>"),
])
def test_what_templates_use(source, expected):
    """As Hugging Face renders it."""
    assert render(source, bos_token="<s>", eos_token="</s>") == expected


def test_todays_date():
    """strftime_now gives it in the template's form."""
    before = datetime.date.today()
    day = datetime.date.fromisoformat(render("{{ strftime_now('%Y-%m-%d') }}"))
    assert before <= day <= datetime.date.today()


@pytest.mark.parametrize("source, message", [
    ("{{ raise_exception('Roles must alternate!') }}", "^messages: Roles must alternate!"),
    ("{% for m in messages %}", "line 1: .*end of template"),
    ("\n{% if %}", "line 2: "),
    ("{% nothing %}", "unknown tag 'nothing'"),
    ("{{ messages[0].tools.name }}", "has no attribute 'tools'"),
    ("{{ messages[0].content + 1 }}", "concatenate"),
    ("{{ 1 // 0 }}", "zero"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
    ("{{ ''['__class__'] }}{{ (''|attr('__class__')).__mro__ }}", "unsafe"),
    ("{{ raise_exception.__globals__.items() }}", "unsafe"),
    ("{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ messages[0].update(role='system') }}", "unsafe"),
    ("{% include '/etc/passwd' %}", "no loader"),
    ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 100000 rounds"),
    ("{{ range(10**30) }}", "too large|too large to convert"),
    ("{{ 'x' * 10**9 }}", "too many"),
    ("{{ 10**9 * [1] }}", "too many"),
    ("{{ 10 ** 10**9 }}", "too large"),
    ("{{ raise_exception('x\\n' * 1000) }}", r"^messages: (x ){98}x?\.\.\. "),
])
def test_a_template_that_fails(source, message):
    """One line that says what is wrong and where it comes from, soon, whatever the template does."""
    started = time.monotonic()
    with pytest.raises(ValueError) as e:
        render(source)
    line = str(e.value)
    assert re.search(message, line), line
    assert line.startswith("messages: ") and line.endswith(" (the model's chat template)")
    assert line.isprintable() and len(line) < 300 and time.monotonic() - started < 5


# Special tokens.

LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def llama3_ids(tokenizer, messages):
    """What Llama 3's format is: headers of special tokens around text that knows none."""
    begin, _, start, end, eot = (tokenizer._special[t] for t in LLAMA3_SPECIAL)

    def plain(text):
        return tokenizer.encode(text)[1:]
    ids = [begin]
    for m in messages:
        ids += [start, *plain(m["role"]), end, *plain("\n\n" + m["content"].strip()), eot]
    return [*ids, start, *plain("assistant"), end, *plain("\n\n")]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=len)
def test_llama3(llama3, messages):
    """Several turns, with a beginning-of-sequence token once."""
    assert llama3.chat(messages) == llama3_ids(llama3, messages)


@settings(max_examples=150)
@given(st.lists(st.one_of(st.text(max_size=4), st.sampled_from(LLAMA3_SPECIAL),
                          st.sampled_from(["<|eot", "_id|>", "<tool>", " ", "\ufdd0", "\ufdd1"])), max_size=8).map("".join))
def test_special_tokens_in_a_message_are_text(llama3, content):
    """Whatever is written, the special tokens are those of the template, and the rest is the message's text."""
    messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
    ids = llama3.chat(messages)
    assert ids == llama3_ids(llama3, messages)
    assert llama3.decode(ids) == f"system\n\n{content.strip()}user\n\n{content.strip()}assistant\n\n"


@pytest.mark.parametrize("special, content", [("aa", "aaa"), ("aba", "ababa"), ("<<a>", "<<<a>"), ("<a>", "<a><a>"),
                                              ("<<a>>", "<<a>><a>")])
def test_overlapping_special_tokens(special, content):
    """None is left whole, and without the mark the content is what it was."""
    text, mark = ChatTemplate("{{ messages[0].content }}", {}, [special, "<a>"]).render(user(content))
    assert special not in text and "<a>" not in text and text.replace(mark, "") == content


def test_all_noncharacters():
    """A message that leaves none free is refused."""
    everything = "".join(chat_template.NONCHARACTERS)
    assert render("{{ messages[0].content }}", user(everything[1:])) == everything[1:]
    with pytest.raises(ValueError, match="messages: the content has all 32 noncharacters"):
        render("{{ messages[0].content }}", user(everything))


def test_special_tokens_that_take_the_space_beside_them(llama3_folder, tmp_path):
    """lstrip and rstrip of a template's own special token hold, whatever is written in the messages."""
    folder = copied(llama3_folder, tmp_path / "a")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens([special_token("<|wide|>", lstrip=True, rstrip=True)])
    library.save(str(folder / "tokenizer.json"))
    tokenizer = with_template(folder, tmp_path / "b", "{{ messages[0].content }}  <|wide|>  end")
    plain = [tokenizer.encode(text)[1:] for text in ("the cat", "end", "the <|eot_id|>")]
    begin, wide = tokenizer._special["<|begin_of_text|>"], tokenizer._special["<|wide|>"]
    assert tokenizer.chat(user("the cat")) == [begin, *plain[0], wide, *plain[1]]
    assert tokenizer.chat(user("the <|eot_id|>")) == [begin, *plain[2], wide, *plain[1]]


LLAMA2_TEMPLATE = ("{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
                   "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}")


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizer.json"])
@pytest.mark.parametrize("content", ["the cat", "the <s> cat", "</s>", "<s>the", "a<unk> "])
def test_a_llama2_template(kind, legacy, content, tokenizer_folder, llama2_folders, tmp_path):
    """Both kinds give the same ids: text after a special token has a space before it only where `legacy` is set."""
    folder = tokenizer_folder if kind == "sentencepiece" else llama2_folders[legacy]
    tokenizer = with_template(folder, tmp_path / "folder", LLAMA2_TEMPLATE, legacy=legacy)
    # After a character that joins with nothing the text has no space of its own before it: "_" "<0x0A>" and the text.
    plain = {True: lambda text: tokenizer.encode(text)[1:], False: lambda text: tokenizer.encode("\n" + text)[3:]}[legacy]
    question, answer = plain(f"[INST] {content} [/INST]"), plain(f"[INST] {content} [/INST] sat ")
    assert tokenizer.chat(user(content)) == [1, *question]
    turns = [*user(content), {"role": "assistant", "content": "sat"}, *user(content)]
    assert tokenizer.chat(turns) == [1, *answer, 2, 1, *question]


@pytest.mark.parametrize("template", ["{{ bos_token }}the cat", "the cat"])
def test_the_beginning_of_sequence_token_is_there_once(any_tokenizer, template, tmp_path):
    """Whether or not the template writes it."""
    tokenizer = with_template(any_tokenizer._folder, tmp_path / "folder", template)
    ids = tokenizer.chat(user("x"))
    assert ids[0] == tokenizer.encode("")[0] and ids.count(ids[0]) == 1 and tokenizer.decode(ids).endswith("the cat")
    assert "bos_token" in template or ids == tokenizer.encode("the cat")


def test_a_template_names_the_token_that_ends_a_turn(llama3_folder, tmp_path):
    """A model with two stop ids: what generation_config.json says and, with a chat template, the eos_token."""
    end, eot = (load(llama3_folder, VOCAB)._special[t] for t in ("<|end_of_text|>", "<|eot_id|>"))
    assert load(llama3_folder, VOCAB).stop_ids == (end, eot)
    both = copied(llama3_folder, tmp_path / "both", generation_config={"eos_token_id": [eot, end]})
    assert load(both, VOCAB).stop_ids == (eot, end)
    without = copied(llama3_folder, tmp_path / "without", tokenizer_config={"eos_token": "<|eot_id|>"})
    assert load(without, VOCAB).stop_ids == (end,)


# Without a template.


def test_llama2s_own_format(tokenizer_folder):
    """Every turn begins anew, a whole one is ended; the system message is part of the first question."""
    tokenizer = load(tokenizer_folder, VOCAB)

    def plain(text):
        return tokenizer.encode(text)[1:]
    assert tokenizer.chat(user(" the cat ")) == [1, *plain("[INST] the cat [/INST]")]
    assert tokenizer.chat([SYSTEM, USER, ASSISTANT, USER]) == [
        1, *plain("[INST] <<SYS>>\nBe short.\n<</SYS>>\n\nthe cat [/INST] sat on the mat "), 2,
        1, *plain("[INST] the cat [/INST]")]
    assert tokenizer.chat(user("<s></s>")) == [1, *plain("[INST] <s></s> [/INST]")]
    assert tokenizer.chat([SYSTEM | {"content": ""}, USER]) == tokenizer.chat([USER])


@pytest.mark.parametrize("roles", ["system", "assistant", "user user", "user assistant", "system assistant user",
                                   "user system user", "user assistant assistant user", "system system user", "user " * 10])
def test_llama2s_roles(tokenizer_folder, roles):
    """They alternate and end with the user; the line shows what came."""
    with pytest.raises(ValueError, match="messages: expected user and assistant in turn, .* and the user last; got "
                       + ", ".join(roles.split()[:8])):
        load(tokenizer_folder, VOCAB).chat([{"role": role, "content": "x"} for role in roles.split()])


def test_no_template(llama2_folders):
    """A tokenizer.json without one serves prompts only, and says what it misses."""
    with pytest.raises(ValueError, match="messages: .* has no chat template .*chat_template.jinja.*; expected a prompt"):
        load(llama2_folders[True], VOCAB).chat([USER])


# The files.


def test_a_template_of_several(llama3_folder, tmp_path):
    """The one named default."""
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "the {{ messages[0].content }}"}]
    tokenizer = with_template(llama3_folder, tmp_path / "a", named)
    assert tokenizer.decode(tokenizer.chat(user("x"))) == "the x"
    with pytest.raises(ValueError, match=r"config.json: chat_template must have one named default, got \['tool_use'\]"):
        with_template(llama3_folder, tmp_path / "b", named[:1])


def test_a_template_in_a_file_of_its_own(llama3_folder, tmp_path):
    """It counts before that of tokenizer_config.json."""
    tokenizer = load(copied(llama3_folder, tmp_path / "a", chat_template__jinja="é {{ messages[0].content }}"), VOCAB)
    assert tokenizer.decode(tokenizer.chat(user("x"))) == "é x"
    (tmp_path / "a" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template.jinja is not UTF-8: .* at byte 0"):
        load(tmp_path / "a", VOCAB)


@pytest.mark.parametrize("template, kind", [(5, "int"), ({"default": "x"}, "dict"), (True, "bool")])
def test_a_template_of_a_wrong_type(llama3_folder, tmp_path, template, kind):
    """Named at the start."""
    with pytest.raises(ValueError, match=f"config.json: chat_template must be text or a list of named ones, got {kind}"):
        with_template(llama3_folder, tmp_path / "a", template)


def test_a_broken_template_leaves_prompts_served(llama3_folder, tmp_path):
    """It is refused where a conversation comes."""
    tokenizer = with_template(llama3_folder, tmp_path / "a", "{% if %}")
    assert tokenizer.encode("the cat")
    for _ in range(2):
        with pytest.raises(ValueError, match="messages: line 1: .*chat template"):
            tokenizer.chat([USER])
