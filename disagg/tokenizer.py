"""Text <-> token ids, and text from tokens as they come."""

import json
import pathlib

import sentencepiece

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of an incomplete character


class SentencePieceTokenizer:
    """A SentencePiece model in a checkpoint folder, with the folder's rule for the beginning-of-sequence token."""

    def __init__(self, path, vocab_size):
        """path: a folder with tokenizer.model, or that file. Raises ValueError if it is missing, unreadable or does not
        fit a model with vocab_size embeddings."""
        path = pathlib.Path(path)
        file = path / "tokenizer.model" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"no tokenizer at {file}: expected a SentencePiece tokenizer.model")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as e:
            raise ValueError(f"{file} is not a SentencePiece model: {str(e).splitlines()[0]}") from None
        if self._model.vocab_size() > vocab_size:
            raise ValueError(f"wrong tokenizer: {file} has {self._model.vocab_size()} tokens, the model's vocabulary {vocab_size}")
        settings = _read_json(file.parent / "tokenizer_config.json")
        generation = _read_json(file.parent / "config.json") | _read_json(file.parent / "generation_config.json")
        self._bos = [self._model.bos_id()] if settings.get("add_bos_token", True) and self._model.bos_id() >= 0 else []
        eos = generation.get("eos_token_id", self._model.eos_id())
        eos = [t for t in (eos if isinstance(eos, list) else [eos]) if t is not None]
        if not all(isinstance(t, int) for t in eos):
            raise ValueError(f"{file.parent}: eos_token_id must be token ids, got {eos}")
        self.stop_ids = tuple(t for t in eos if t >= 0)

    def encode(self, text):
        """Token ids of a prompt, the beginning-of-sequence token first where the model has one."""
        return self._bos + self._model.encode(text)

    def decode(self, ids):
        """Text of ids; control tokens and ids without a piece give none."""
        return self._model.decode([t for t in ids if t < self._model.vocab_size()])


def _read_json(file):
    """The object in a JSON file, {} without one."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{file} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


class TextStream:
    """A request's answer as text, token by token, up to its stop ids and stop strings.

    `push` gives the text that is certain: bytes of an incomplete character and what may become a stop string are held
    back, so that the pieces joined, with `finish`, are `text`.
    """

    def __init__(self, tokenizer, stop_ids=(), stop_strings=()):
        self._tokenizer, self._stop_ids, self._stops = tokenizer, stop_ids, stop_strings
        self.ids = []
        self.stopped = False     # a stop string has come: tokens after it do not count
        self.text = ""
        self._given = 0
        self._start = self._end = 0  # ids[start:end] are decoded and in text; decoding restarts at start for its context

    def push(self, token):
        """Add one token; -> new text that will not change. Ignored once stopped."""
        if self.stopped:
            return ""
        self.ids.append(token)
        if token not in self._stop_ids:
            before = self._tokenizer.decode(self.ids[self._start:self._end])
            after = self._tokenizer.decode(self.ids[self._start:])
            if not after.endswith(REPLACEMENT):
                self._add(after[len(before):])
                if len(after) > len(before):  # a token without text gives the next one no context for its leading space
                    self._start, self._end = self._end, len(self.ids)
        return self._give(self._held())

    def finish(self):
        """The rest of the text."""
        if not self.stopped:
            ids = [t for t in self.ids if t not in self._stop_ids]
            before = self._tokenizer.decode(ids[self._start:self._end])
            self._add(self._tokenizer.decode(ids[self._start:])[len(before):])
        return self._give(0)

    def _add(self, piece):
        searched = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += piece
        found = [at for at in (self.text.find(s, searched) for s in self._stops) if at >= 0]
        if found:
            self.text, self.stopped = self.text[:min(found)], True

    def _held(self):
        """How many characters at the end may be the beginning of a stop string."""
        if self.stopped:
            return 0
        return max((n for s in self._stops for n in range(1, len(s)) if self.text.endswith(s[:n])), default=0)

    def _give(self, held):
        new = self.text[self._given:len(self.text) - held]
        self._given += len(new)
        return new
