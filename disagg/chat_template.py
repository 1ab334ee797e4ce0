"""A conversation as the text or the turns that a model was trained on."""

import datetime
import functools
import json
import re

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # Unicode gives them no meaning: none should occur in a text
MAX_ROUNDS = 100_000   # of a template's range() loops, together
MAX_REPEATED = 10**6   # characters or items that `*` may make


class ChatTemplate:
    """A checkpoint's chat template: jinja2, with the names and filters that Hugging Face gives to one."""

    def __init__(self, source, tokens, special_tokens):
        """tokens: {"bos_token": "<s>", ...} for the template. special_tokens: all texts that stand for special tokens."""
        self._source, self._tokens = source, tokens
        # A token of one character has no inside to put a mark into.
        longest_first = sorted((t for t in special_tokens if len(t) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._reserved = source + "".join(special_tokens)

    def render(self, messages):
        """messages: [{"role", "content"}], content a string -> (text up to the answer, mark).

        A special token that is written in a message's content has the mark inside, so that only the template's own are
        to be found; without the mark the text is what Hugging Face renders. Raises ValueError: the template is broken
        or refuses the messages.
        """
        written = self._reserved + "".join(m["content"] for m in messages)
        mark = next((c for c in NONCHARACTERS if c not in written), None)
        if mark is None:
            raise ValueError(f"messages: the content has all {len(NONCHARACTERS)} noncharacters U+FDD0 to U+FDEF; "
                             "at least one must be free")
        messages = [m | {"content": self._marked(m["content"], mark)} for m in messages]
        try:
            return self._template.render(**self._tokens, messages=messages, tools=None, documents=None,
                                         add_generation_prompt=True, range=_limited_range()), mark
        except Exception as e:  # a template is a program: anything may go wrong in it
            raise ValueError(f"messages: {_line(e)} (the model's chat template)") from None

    def _marked(self, content, mark):
        while self._special.search(content):  # again, since of tokens that overlap one pass finds the first only
            content = self._special.sub(lambda m: m[0][0] + mark + m[0][1:], content)
        return content

    @functools.cached_property
    def _template(self):
        """Compiled at the first conversation: prompts can be served whatever the template."""
        return _environment().from_string(self._source)


def llama2_turns(messages):
    """Llama 2's own format -> [(text, whether the end-of-sequence token follows)], each after a beginning-of-sequence token.

    Raises ValueError unless user and assistant alternate, after a system message at most, up to one of the user.
    """
    system, rest = ("", messages) if messages[0]["role"] != "system" else (messages[0]["content"], messages[1:])
    expected = ["user", "assistant"] * (len(rest) // 2) + ["user"]
    if [m["role"] for m in rest] != expected:
        raise ValueError("messages: expected user and assistant in turn, after a system message at most, and the user last; "
                         f"got {', '.join(m['role'] for m in messages[:8])}" + (", ..." if len(messages) > 8 else ""))
    said = [m["content"].strip() for m in rest]
    if system:
        said[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{rest[0]['content']}".strip()
    turns = [(f"[INST] {question} [/INST] {answer} ", True) for question, answer in zip(said[::2], said[1::2])]
    return [*turns, (f"[INST] {said[-1]} [/INST]", False)]


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """No access to Python's internals, nothing that a template is given can be changed, and no huge results of `*`."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context, operator, left, right):
        if operator == "**" and not (abs(left) <= MAX_REPEATED and abs(right) <= 64):
            raise jinja2.sandbox.SecurityError(f"{left!r:.40} ** {right!r:.40} is too large")
        for sequence, times in ((left, right), (right, left)):
            if operator == "*" and hasattr(sequence, "__len__") and len(sequence) * times > MAX_REPEATED:
                raise jinja2.sandbox.SecurityError(f"{len(sequence)} characters or items times {times} are too many")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks for training what an assistant said: here only what is inside counts."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment():
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json  # jinja2's own escapes for HTML
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.datetime.now().strftime(form))
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message):
    raise jinja2.TemplateError(message)


def _limited_range():
    """range() for one rendering: loops within loops cannot go on for ever."""
    left = MAX_ROUNDS

    def limited(*arguments):
        nonlocal left
        numbers = range(*arguments)
        left -= len(numbers)
        if left < 0:
            raise jinja2.sandbox.SecurityError(f"more than {MAX_ROUNDS} rounds of range() loops")
        return numbers
    return limited


def _line(error):
    """An exception in one line of bearable length."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, jinja2.TemplateSyntaxError):
        text = f"line {error.lineno}: {text}"
    return text if len(text) <= 200 else text[:197] + "..."
