"""From token ids to text, for one request, as the tokens come.

Knows a detokenizer and stop strings. Must not know how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.step import Detokenizer


class TextStream:
    """The text of one request. Never lets out a stop string, nor a part of one that may still become whole."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._kept_back = ""
        self.stopped = False

    def add(self, token_id: int) -> str:
        """Take a token and return the text that is now certain. Sets ``stopped`` at a stop string."""
        self._detokenizer.add_token(token_id)
        return self._let_out(self._detokenizer.last_segment)

    def finish(self) -> str:
        """No more tokens: return what was kept back."""
        if self.stopped:
            return ""
        self._detokenizer.finalize()
        text = self._let_out(self._detokenizer.last_segment)
        if self.stopped:
            return text
        text, self._kept_back = text + self._kept_back, ""
        return text

    def _let_out(self, piece: str) -> str:
        text = self._kept_back + piece
        if not self._stop:
            return text
        ends = [place for place in map(text.find, self._stop) if place >= 0]
        if ends:
            self.stopped = True
            self._kept_back = ""
            return text[: min(ends)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        cut = len(text) - keep
        self._kept_back = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
