"""When a row ends: EOS and stop ids, stop strings, the token limit. It knows no tokenizer.

Next: hybrid/decode/step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybrid.params import SamplingParams

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"  # what a decoder prints for the first bytes of a character


class TextStream:
    """Turns tokens into text as it becomes final, and finds stop strings across token borders.

    Text that could still become a stop string, or half of a character, is held back; the pieces
    handed out always add up to the final text.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        """Keep `decode` (ids to text, special tokens left out) and the stop strings."""
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        self._start = 0  # context that the decoder needs to place spaces
        self._read = 0  # tokens whose text is already in _pending
        self._pending = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that became final. Sets `stopped` at a stop string."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if text.endswith(_INCOMPLETE) or len(text) <= len(known):
            return ""
        self._pending += text[len(known) :]
        self._start, self._read = self._read, len(self._tokens)
        return self._release()

    def flush(self) -> str:
        """Return the text still held back; call it once, at the end."""
        if not self.stopped:
            known = self._decode(self._tokens[self._start : self._read])
            self._pending += self._decode(self._tokens[self._start :])[len(known) :]
            self._read = len(self._tokens)
            out = self._release()
            out, self._pending = out + self._pending, ""
            return out
        return ""

    def _release(self) -> str:
        hits = [at for s in self._stop if (at := self._pending.find(s)) >= 0]
        if hits:
            self.stopped = True
            out, self._pending = self._pending[: min(hits)], ""
            return out
        held = max((_overlap(self._pending, s) for s in self._stop), default=0)
        cut = len(self._pending) - held
        out, self._pending = self._pending[:cut], self._pending[cut:]
        return out


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class StopRule:
    """Decides token by token whether a row ends; keeps the row's text when somebody reads it."""

    def __init__(
        self, params: SamplingParams, eos_token_ids: Sequence[int], decode: Decode | None = None
    ) -> None:
        """Build the rule; `decode` None means that nobody needs text while decoding."""
        self._stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= frozenset(eos_token_ids)
        self._max_new_tokens = params.max_new_tokens
        self._count = 0
        self._text = TextStream(decode, params.stop) if decode is not None else None
        self.pieces: list[str] = []

    @property
    def keeps_text(self) -> bool:
        """Whether `take_pieces` gives text."""
        return self._text is not None

    def is_stop_id(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` is an id that ends the row."""
        return bool(tokens) and tokens[-1] in self._stop_ids

    def push(self, token: int) -> str | None:
        """Count a committed token and return the finish reason if the row ends with it."""
        self._count += 1
        reason = None
        if token in self._stop_ids:
            reason = "stop"
        if self._text is not None:
            # The text of a stop id is not part of the answer.
            piece = self._text.push(token) if reason is None else ""
            if self._text.stopped:
                reason = "stop"
            elif reason is None and self._count >= self._max_new_tokens:
                reason = "length"
            if reason is not None:
                piece += self._text.flush()
                # The last characters may complete a stop string that was held back.
                reason = "stop" if self._text.stopped else reason
            self.pieces.append(piece)
        elif reason is None and self._count >= self._max_new_tokens:
            reason = "length"
        return reason

    def take_pieces(self) -> list[str]:
        """Return the text of each token pushed since the last call."""
        pieces, self.pieces = self.pieces, []
        return pieces
