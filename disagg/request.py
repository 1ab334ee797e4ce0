"""What a client may ask, in OpenAI's field names, checked at the door; and what the scheduler gets of it."""

import difflib
from typing import Annotated, Literal

import pydantic

from disagg import decode, scheduler
from disagg.text_stream import TextStream

TokenId = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
Count = Annotated[int, pydantic.Field(ge=1, lt=2**31)]
NonEmpty = Annotated[str, pydantic.Field(min_length=1)]
Text = Annotated[str, pydantic.Field(min_length=0)]  # with a constraint pydantic also refuses what is no Unicode
STRICT = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class _Request(pydantic.BaseModel):
    """What both kinds have. Defaults are OpenAI's; top_k, ignore_eos, stop_token_ids, priority and timeout are extensions.

    seed: unset, the front end's rule. stop: one string or up to four; the text ends before the first of them.
    stop_token_ids: in addition to the model's own. priority: requests with a lower one begin first. timeout: seconds after which
    the request ends with an error (unset: none).
    """

    model_config = STRICT

    temperature: Annotated[float, pydantic.Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, pydantic.Field(ge=0, lt=2**31)] = 0
    seed: Annotated[int, pydantic.Field(ge=-2**63, lt=2**63)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], pydantic.Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], pydantic.Field(max_length=decode.MAX_STOP_IDS)] = []
    ignore_eos: bool = False
    priority: Annotated[int, pydantic.Field(ge=-2**31, lt=2**31)] = 0
    timeout: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None = None

    @property
    def stop_strings(self):
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(_Request):
    """What follows a prompt: text, or token ids that are taken as they are."""

    prompt: NonEmpty | Annotated[list[TokenId], pydantic.Field(min_length=1)]
    max_tokens: Count = 16

    def tokens(self, tokenizer):
        return tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt

    @property
    def limit(self):
        return self.max_tokens


class Part(pydantic.BaseModel):
    """A part of a message's content."""

    model_config = STRICT

    type: Literal["text"]
    text: Text


class Message(pydantic.BaseModel):
    """One message of a conversation; its text may be empty, parts are joined."""

    model_config = STRICT

    role: Literal["system", "user", "assistant"]
    content: Text | Annotated[list[Part], pydantic.Field(min_length=1)]

    @property
    def text(self):
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Request):
    """The next answer in a conversation. max_tokens, or max_completion_tokens: unset, what is left of the cache."""

    messages: Annotated[list[Message], pydantic.Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None

    def tokens(self, tokenizer):
        return tokenizer.chat([{"role": m.role, "content": m.text} for m in self.messages])

    @property
    def limit(self):
        return self.max_tokens or self.max_completion_tokens


FIELDS = CompletionRequest.model_fields | ChatRequest.model_fields
OF_TYPE = ("string_type", "list_type")  # pydantic's errors for a value of another type
MAX_PROBLEMS = 4                       # that one line names


def explain(error, fields=()):
    """A pydantic.ValidationError as one line that names each field, what was expected and what came.

    fields: the known ones, to suggest one for a name that is not.
    """
    def one(e):
        where = ".".join(map(_shown, _path(e)))
        what = f"{e['msg'][0].lower()}{e['msg'][1:]}"
        if e["type"] == "model_type":
            what = "input should be an object"
        if e["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(e["loc"][-1]), fields, 1)
            what = f"unknown field (did you mean {near[0]}?)" if near else "unknown field"
        return f"{where or 'request'}: {what}" + ("" if e["type"] == "missing" else f", got {_shown(repr(e['input']))}")

    # Of a field of two types, what one type's rules say of a value, or of a part of it, tells more than that it is not of
    # the other type.
    errors = error.errors()
    telling = {_path(e)[:n] for e in errors for n in range(len(_path(e)) + (e["type"] not in OF_TYPE))}
    lines = list(dict.fromkeys(one(e) for e in errors if e["type"] not in OF_TYPE or _path(e) not in telling))
    more = [f"and {len(lines) - MAX_PROBLEMS} more"] if len(lines) > MAX_PROBLEMS else []
    return "; ".join(lines[:MAX_PROBLEMS] + more)


def _path(error):
    """Where the error is, without pydantic's names for the types of a field of two types."""
    kinds = ("constrained-", "list[", "function-")
    written = len(error["loc"]) - 1 if error["type"] == "extra_forbidden" else None  # a name of the client's
    return tuple(part for i, part in enumerate(error["loc"]) if i == written or not str(part).startswith(kinds))


def _shown(value):
    """At most 80 characters on one line."""
    text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 80 else text[:77] + "..."


def parse(fields):
    """A ChatRequest from a JSON object with messages, a CompletionRequest from any other.

    Raises ValueError in one line that names what is wrong.
    """
    for one, other in (("prompt", "messages"), ("max_tokens", "max_completion_tokens")):
        if one in fields and other in fields:
            raise ValueError(f"{one} and {other}: expected one of them, got both")
    try:
        return (ChatRequest if "messages" in fields else CompletionRequest).model_validate(fields)
    except pydantic.ValidationError as e:
        raise ValueError(explain(e, FIELDS)) from None


def prepare(asked, number, tokenizer, *, cache_length, vocab_size, default_seed):
    """Tokenise and check against the model's limits -> scheduler.Request.

    Raises ValueError: a prompt that leaves no room, a token id outside the vocabulary, too many stop ids, a conversation
    that the model's chat template refuses.
    """
    tokens = asked.tokens(tokenizer)
    for field, ids in (("prompt", tokens), ("stop_token_ids", asked.stop_token_ids)):
        if (unknown := next((t for t in ids if t >= vocab_size), None)) is not None:
            raise ValueError(f"{field}: token id {unknown} is not in the vocabulary of {vocab_size}")
    if not tokens:
        raise ValueError("prompt: it has no tokens")
    limit = asked.limit or max(1, cache_length - len(tokens))
    if len(tokens) + limit > cache_length:
        raise ValueError(f"the prompt's {len(tokens)} tokens and max_tokens={limit} need "
                         f"{len(tokens) + limit} positions; the cache has {cache_length} (config.cache_length)")
    stops = dict.fromkeys((*(() if asked.ignore_eos else tokenizer.stop_ids), *asked.stop_token_ids))
    if len(stops) > decode.MAX_STOP_IDS:
        raise ValueError(f"stop_token_ids: {len(stops)} stop ids with the model's own; at most {decode.MAX_STOP_IDS} are served")
    seed = default_seed if asked.seed is None else asked.seed
    return scheduler.Request(number, tuple(tokens), limit, tuple(stops), (seed, asked.temperature, asked.top_k, asked.top_p), asked.priority,
                             asked.timeout)


def text_stream(asked, prepared, tokenizer):
    """The TextStream of a prepared request's answer: a completion's text goes on from its prompt's, a chat's begins anew."""
    context = prepared.tokens if isinstance(asked, CompletionRequest) else ()
    return TextStream(tokenizer, prepared.stop_ids, asked.stop_strings, context)
