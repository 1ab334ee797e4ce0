"""What a client may ask, in OpenAI's field names, checked at the door; and what the scheduler gets of it."""

import difflib
from typing import Annotated

import pydantic

from disagg import decode, scheduler

TokenId = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
NonEmpty = Annotated[str, pydantic.Field(min_length=1)]


class CompletionRequest(pydantic.BaseModel):
    """One completion. Defaults are OpenAI's; top_k, ignore_eos and stop_token_ids are common extensions.

    prompt: text, or token ids that are taken as they are. seed: unset, the front end's rule. stop: one string or up to
    four; the text ends before the first of them. stop_token_ids: in addition to the model's own.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    prompt: NonEmpty | Annotated[list[TokenId], pydantic.Field(min_length=1)]
    max_tokens: Annotated[int, pydantic.Field(ge=1, lt=2**31)] = 16
    temperature: Annotated[float, pydantic.Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, pydantic.Field(ge=0, lt=2**31)] = 0
    seed: Annotated[int, pydantic.Field(ge=-2**63, lt=2**63)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], pydantic.Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], pydantic.Field(max_length=decode.MAX_STOP_IDS)] = []
    ignore_eos: bool = False

    @property
    def stop_strings(self):
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def explain(error, fields=()):
    """A pydantic.ValidationError as one line that names each field, what was expected and what came.

    fields: the known ones, to suggest one for a name that is not.
    """
    def one(e):
        where = ".".join(_shown(part) for part in e["loc"] if not str(part).startswith(("constrained-", "list[", "function-")))
        what = f"{e['msg'][0].lower()}{e['msg'][1:]}"
        if e["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(e["loc"][-1]), fields, 1)
            what = f"unknown field (did you mean {near[0]}?)" if near else "unknown field"
        return f"{where or 'request'}: {what}" + ("" if e["type"] == "missing" else f", got {_shown(repr(e['input']))}")

    # Of a field of two types, what one type's rules say of a value tells more than that it is not of the other type.
    errors = error.errors()
    telling = {e["loc"][:1] for e in errors if e["type"] not in ("string_type", "list_type")}
    return "; ".join(dict.fromkeys(one(e) for e in errors
                                   if e["type"] not in ("string_type", "list_type") or e["loc"][:1] not in telling))


def _shown(value):
    """At most 80 characters on one line."""
    text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 80 else text[:77] + "..."


def parse(fields):
    """A CompletionRequest from a JSON object. Raises ValueError in one line that names what is wrong."""
    try:
        return CompletionRequest.model_validate(fields)
    except pydantic.ValidationError as e:
        raise ValueError(explain(e, CompletionRequest.model_fields)) from None


def prepare(request, number, tokenizer, *, cache_length, vocab_size, default_seed):
    """Tokenise and check against the model's limits -> scheduler.Request.

    Raises ValueError: a prompt that leaves no room, a token id outside the vocabulary, too many stop ids.
    """
    tokens = tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
    for field, ids in (("prompt", tokens), ("stop_token_ids", request.stop_token_ids)):
        if (unknown := next((t for t in ids if t >= vocab_size), None)) is not None:
            raise ValueError(f"{field}: token id {unknown} is not in the vocabulary of {vocab_size}")
    if not tokens:
        raise ValueError("prompt: it has no tokens")
    if len(tokens) + request.max_tokens > cache_length:
        raise ValueError(f"the prompt's {len(tokens)} tokens and max_tokens={request.max_tokens} need "
                         f"{len(tokens) + request.max_tokens} positions; the cache has {cache_length} (config.cache_length)")
    stops = dict.fromkeys((*(() if request.ignore_eos else tokenizer.stop_ids), *request.stop_token_ids))
    if len(stops) > decode.MAX_STOP_IDS:
        raise ValueError(f"stop_token_ids: {len(stops)} stop ids with the model's own; at most {decode.MAX_STOP_IDS} are served")
    seed = default_seed if request.seed is None else request.seed
    return scheduler.Request(number, tuple(tokens), request.max_tokens, tuple(stops),
                             (seed, request.temperature, request.top_k, request.top_p))
