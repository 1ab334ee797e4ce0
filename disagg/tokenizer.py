"""Text <-> token ids: SentencePiece and Hugging Face tokenizers behind one face."""

import itertools
import json
import pathlib
import re

import sentencepiece
import tokenizers

from disagg import chat_template

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of an incomplete character
NO_PIECE = chat_template.NONCHARACTERS[-1]  # a character that no vocabulary has
BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


def load(path, vocab_size):
    """The tokenizer of a checkpoint folder, from its tokenizer.json or else its tokenizer.model; or of one of these files.

    Raises ValueError: missing, unreadable, of another kind, or more tokens than the model's vocab_size.
    """
    path = pathlib.Path(path)
    files = [path / "tokenizer.json", path / "tokenizer.model"] if path.is_dir() else [path]
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        raise ValueError(f"no tokenizer at {path}: expected tokenizer.json or tokenizer.model, or the folder of one")
    tokenizer = (HuggingFaceTokenizer if file.suffix == ".json" else SentencePieceTokenizer)(file)
    if tokenizer.size > vocab_size:
        raise ValueError(f"wrong tokenizer: {file} has {tokenizer.size} tokens, the model's vocabulary {vocab_size}")
    return tokenizer


class Tokenizer:
    """The face, and what a checkpoint folder's other files say, whatever the kind of tokenizer.

    `size`: the highest id + 1. `stop_ids`: the ids that end an answer. A kind adds encode(text) -> ids of a prompt;
    has_text(id): whether an id stands for text, which special tokens and unknown ids do not; decode(ids) -> text, without
    a clean-up of spaces, which would change what has been streamed; and what `chat` needs.
    """

    def __init__(self, folder, vocabulary, special, tokens, bos):
        """vocabulary: {text: id}, and of it special: the special tokens. tokens: {"bos_token": text, ...}, and bos: ids
        that come before a prompt, both where tokenizer_config.json does not say otherwise."""
        self.size = max(vocabulary.values(), default=-1) + 1
        self._folder, self._special, self._without_text = folder, special, set(special.values())
        self._settings = settings = _read_json(folder / "tokenizer_config.json")
        tokens = tokens | _named_tokens(settings)
        self._bos = bos
        if (adds := settings.get("add_bos_token")) is not None:
            first = vocabulary.get(tokens.get("bos_token"))
            if adds and first is None:
                raise ValueError(f"{folder}: add_bos_token is set, but bos_token {tokens.get('bos_token')!r} is not a token")
            self._bos = [first] if adds else []
        source = _template_source(folder, settings)
        self._template = source and chat_template.ChatTemplate(source, tokens, special)
        generation = _read_json(folder / "config.json") | _read_json(folder / "generation_config.json")
        own = vocabulary.get(tokens.get("eos_token"))
        stops = generation.get("eos_token_id", own)
        stops = [t for t in (stops if isinstance(stops, list) else [stops]) if t is not None]
        if not all(type(t) is int for t in stops):
            raise ValueError(f"{folder}: eos_token_id must be token ids, got {stops}")
        if source and own is not None:
            stops.append(own)  # it ends a turn
        self.stop_ids = tuple(dict.fromkeys(t for t in stops if t >= 0))

    def chat(self, messages):
        """Token ids of a conversation up to the answer. messages: [{"role", "content"}, ...], each content a string.

        Special tokens are the chat template's own; in a message's content they are text. Raises ValueError: there is no
        template, or it refuses the messages.
        """
        if not self._template:
            return self._chat_without_template(messages)
        text, mark = self._template.render(messages)
        ids = self._encode_rendered(text, mark)
        return ids if ids[:1] == self._bos else self._bos + ids

    def _chat_without_template(self, messages):
        raise ValueError(f"messages: {self._folder} has no chat template (chat_template.jinja, or chat_template in "
                         "tokenizer_config.json); expected a prompt")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, as Llama 2's. Nothing in a prompt is a special token. Without a chat template Llama 2's holds."""

    def __init__(self, file):
        try:
            self._model = model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as e:
            raise ValueError(f"{file} is not a SentencePiece model: {str(e).splitlines()[0]}") from None
        pieces = {model.id_to_piece(i): i for i in range(model.vocab_size())}
        added = {text: i for text, i in _added_tokens(file.parent).items() if text not in pieces}
        special = {text: i for text, i in pieces.items() if model.is_control(i) or model.is_unknown(i)} | added
        own = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
        super().__init__(file.parent, pieces | added, special, {k: model.id_to_piece(i) for k, i in own.items() if i >= 0},
                         [model.bos_id()] if model.bos_id() >= 0 else [])
        self._cut = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")

    def encode(self, text):
        """Token ids of a prompt, the beginning-of-sequence token first where the model has one."""
        return self._bos + self._model.encode(text)

    def has_text(self, token):
        return token < self._model.vocab_size() and token not in self._without_text

    def decode(self, ids):
        return self._model.decode([t for t in ids if self.has_text(t)])

    def _chat_without_template(self, messages):
        ids, eos = [], self._model.eos_id()
        for text, ended in chat_template.llama2_turns(messages):
            ids += self.encode(text) + ([eos] if ended and eos >= 0 else [])
        return ids

    def _encode_rendered(self, text, mark):
        ids = []
        for i, piece in enumerate(self._cut.split(text)):  # text, special token, text, ...
            if i % 2:
                ids.append(self._special[piece])
            elif piece:
                encode = self._model.encode if i == 0 or self._settings.get("legacy") else self._encode_inside
                ids += encode(piece.replace(mark, ""))
        return ids

    def _encode_inside(self, text):
        """Ids without the space that SentencePiece puts before a text: it is put before a character of no piece instead,
        which cannot be joined with what follows."""
        return self._model.encode(NO_PIECE + text)[len(self._model.encode(NO_PIECE)):]


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json. The beginning-of-sequence token is its post-processor's, unless add_bos_token is set."""

    def __init__(self, file):
        definition = _read_json(file)
        try:
            # The post-processor would only spoil where the tokens stand.
            self._parsing = _build(definition | {"post_processor": None})
            self._plain = _build(definition, parse_special=False)
            inside = _without_prefix(definition)
            self._inside = self._plain if inside == definition else _build(inside, parse_special=False)
        except Exception as e:  # the library raises nothing more special
            raise ValueError(f"{file} is not a Hugging Face tokenizer: {' '.join(str(e).split())[:200]}") from None
        self._byte_pieces = '"ByteFallback"' in json.dumps(definition.get("decoder"))
        probe = self._plain.encode("a")
        self._added_first = probe.ids[:1] if probe.special_tokens_mask[:1] == [1] else []
        special = {t.content: i for i, t in self._plain.get_added_tokens_decoder().items() if t.special}
        super().__init__(file.parent, self._plain.get_vocab(), special, {}, self._added_first)

    def encode(self, text):
        """Token ids of a prompt, with what the post-processor adds; special tokens that are written in it are text."""
        return self._bos + self._plain.encode(text).ids[len(self._added_first):]

    def has_text(self, token):
        return token not in self._without_text and self._plain.id_to_token(token) is not None

    def decode(self, ids):
        ids = [t for t in ids if self.has_text(t)]
        if not self._byte_pieces:
            return self._plain.decode(ids, skip_special_tokens=False)
        return self._plain.decoder.decode(_whole_characters(map(self._plain.id_to_token, ids)))

    def _encode_rendered(self, text, mark):
        whole = self._parsing.encode(text, add_special_tokens=False)
        if mark not in text:
            return whole.ids
        ids, at = [], 0
        for token, (start, end) in zip(whole.ids, whole.offsets):
            if token in self._without_text:
                ids += [*self._encode_between(text, at, start, mark), token]
                at = end
        return ids + self._encode_between(text, at, len(text), mark)

    def _encode_between(self, text, start, end, mark):
        """Ids of text[start:end], which stands between special tokens."""
        tokenizer = self._inside if start else self._plain
        return tokenizer.encode(text[start:end].replace(mark, ""), add_special_tokens=False).ids if start < end else []


def _build(definition, parse_special=True):
    """The library's tokenizer; parse_special: whether special tokens that are written in a text are special."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition))
    tokenizer.no_truncation()  # a file may ask for both
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer


def _without_prefix(part):
    """A definition, or a part, without the space that is put before a text's beginning and nowhere else."""
    if isinstance(part, list):
        return list(map(_without_prefix, part))
    if not isinstance(part, dict):
        return part
    part = {k: v if k in ("model", "added_tokens") else _without_prefix(v) for k, v in part.items()}
    return part | {"prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else part


def _whole_characters(tokens):
    """Tokens, a replacement character in place of each byte piece that belongs to no character, as SentencePiece does it.

    The library would replace the whole run of byte pieces in which it stands, also what has been streamed already.
    """
    result = []
    for of_bytes, run in itertools.groupby(tokens, lambda t: bool(BYTE_PIECE.fullmatch(t))):
        if not of_bytes:
            result += run
            continue
        text = bytes(int(t[3:5], 16) for t in run).decode("utf-8", "surrogateescape")  # stray bytes become surrogates
        for c in text:
            result += [REPLACEMENT] if "\udc80" <= c <= "\udcff" else [f"<0x{b:02X}>" for b in c.encode()]
    return result


def _named_tokens(settings):
    """{"bos_token": text, ...} of a tokenizer_config.json, where a token is its text or an object with it."""
    tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
    return {k: v for k, v in tokens.items() if isinstance(v, str)}


def _added_tokens(folder):
    """{text: id} of tokens beside those of a tokenizer.model."""
    added, settings_file = _read_json(folder / "added_tokens.json"), folder / "tokenizer_config.json"
    decoder = _read_json(settings_file).get("added_tokens_decoder", {})
    try:
        added = added | {token["content"]: int(i) for i, token in decoder.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{settings_file}: added_tokens_decoder must give each id a token with content") from None
    if wrong := [i for i in added.values() if type(i) is not int or i < 0]:
        raise ValueError(f"{folder / 'added_tokens.json'} must give each token an id, got {wrong[0]!r}")
    return added


def _template_source(folder, settings):
    """The text of the chat template, None without one. Of several it is the one named default."""
    file, settings_file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return _read_text(file)
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        if not isinstance(source := named.get("default"), str):
            raise ValueError(f"{settings_file}: chat_template must have one named default, got {list(named)}")
    if source is not None and not isinstance(source, str):
        raise ValueError(f"{settings_file}: chat_template must be text or a list of named ones, got {type(source).__name__}")
    return source


def _read_text(file):
    try:
        return file.read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"cannot read {file}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"{file} is not UTF-8: {e.reason} at byte {e.start}") from None


def _read_json(file):
    """The object in a JSON file, {} without one."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (json.JSONDecodeError, RecursionError) as e:
        raise ValueError(f"{file} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value
