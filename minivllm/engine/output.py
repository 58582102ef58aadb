"""What comes out of a step: drawn tokens, checked, and their text as it becomes certain.

Knows a detokenizer and stop strings. Must not know how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minivllm.errors import InvariantError, RowError
from minivllm.request import RequestState
from minivllm.step import Detokenizer, ScheduledRow


@dataclass(frozen=True, slots=True)
class Output:
    """What one request got in a step: a token with its text, or an end, or both."""

    request_id: str
    token_id: int | None
    text: str
    end: RequestState | None = None
    error: BaseException | None = None


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


def check_drawn(rows: Sequence[ScheduledRow], drawn: Mapping[str, int | RowError], vocab_size: int) -> None:
    """Raise InvariantError unless there is one good result for each request that draws."""
    if not isinstance(drawn, Mapping):
        raise InvariantError(f"the runner returned {drawn!r}; it must return tokens by request id")
    expected = {request.request_id for row in rows for request in row.sampled}
    failed = {row.request_id for row in rows if isinstance(drawn.get(row.request_id), RowError)}
    if drawn.keys() != expected | failed:
        raise InvariantError(f"the runner drew tokens for {sorted(map(str, drawn))}, not for {sorted(expected)}")
    for name, token in drawn.items():
        is_token = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size
        if not is_token and not isinstance(token, RowError):
            raise InvariantError(
                f"the runner drew {token!r} for request {name!r}; a token id is a whole number from 0 to "
                f"{vocab_size - 1}"
            )
