"""Text from tokens as they come."""

from disagg.tokenizer import REPLACEMENT

# Of an answer only its last tokens are decoded again. A character has up to 4 bytes and each of these tokens at least
# one, so that what a cut spoils, a character it splits and a leading space, lies well before the text not yet given.
KEPT = 16
UNCERTAIN = 3  # bytes at the end that may yet become a character; each is at most one replacement character


class TextStream:
    """A request's answer as text, token by token, up to its stop ids and stop strings.

    `push` gives the text that is certain: bytes of an incomplete character and what may become a stop string are held
    back, so that the pieces joined, with `finish`, are the tokens' text. context: the ids before the answer, whose text
    is not part of it but decides whether it begins with a space; a character that begins there and ends in the answer
    belongs to the answer.
    """

    def __init__(self, tokenizer, stop_ids=(), stop_strings=(), context=()):
        self._tokenizer, self._stop_ids, self._stops = tokenizer, stop_ids, stop_strings
        self.ids = []
        self.stopped = False  # a stop string has come: tokens after it do not count
        self._given = []
        self._pending = ""    # certain, but perhaps the beginning of a stop string
        self._tail = _last_with_text(tokenizer, context)  # decoded again with each token
        self._before = self._decoded = tokenizer.decode(self._tail)
        self._known = len(self._before)                   # how many characters of the tail's text are not to come any more

    @property
    def text(self):
        """What has been given so far."""
        return "".join(self._given)

    def push(self, token):
        """Add one token; -> new text that will not change. Ignored once stopped."""
        if self.stopped:
            return ""
        self.ids.append(token)
        if token not in self._stop_ids and self._tokenizer.has_text(token):
            self._tail.append(token)
            self._decoded = self._tokenizer.decode(self._tail)
            if self._before is not None:
                self._known = _common(self._before, self._decoded)
            self._take(len(self._decoded) - _replacements(self._decoded))
            if len(self._tail) == 2 * KEPT:
                self._cut()
        return self._give(self._held())

    def finish(self):
        """The rest of the text."""
        if not self.stopped:
            self._take(len(self._decoded))
        return self._give(0)

    def _take(self, end):
        """Make the tail's text up to `end` certain."""
        if end <= self._known:
            return
        self._pending += self._decoded[self._known:end]
        self._known, self._before = end, None
        found = [at for at in map(self._pending.find, self._stops) if at >= 0]
        if found:
            self._pending, self.stopped = self._pending[:min(found)], True

    def _cut(self):
        to_come = len(self._decoded) - self._known
        self._tail = self._tail[-KEPT:]
        self._decoded = self._tokenizer.decode(self._tail)
        self._known, self._before = len(self._decoded) - to_come, None

    def _held(self):
        """How many characters at the end may be the beginning of a stop string."""
        if self.stopped:
            return 0
        return max((n for s in self._stops for n in range(1, min(len(s), len(self._pending) + 1))
                    if self._pending.endswith(s[:n])), default=0)

    def _give(self, held):
        at = len(self._pending) - held
        new, self._pending = self._pending[:at], self._pending[at:]
        self._given.append(new)
        return new


def _last_with_text(tokenizer, ids):
    """The last KEPT ids that stand for text."""
    found = []
    for token in reversed(ids):
        if tokenizer.has_text(token):
            found.append(token)
            if len(found) == KEPT:
                break
    return found[::-1]


def _replacements(text):
    """How many characters at the end may be of an incomplete one."""
    return next((n for n in range(UNCERTAIN) if not text[:len(text) - n].endswith(REPLACEMENT)), UNCERTAIN)


def _common(a, b):
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
