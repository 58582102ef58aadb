"""Words that several pictures share.

Knows the values of events. Must not know states, lanes or how anything is drawn. The page says the same in
``words.js``.
"""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.request import ExtraKey, ExtraKeys


def keys_words(extra_keys: ExtraKeys) -> str:
    """Return what keeps a request's blocks apart: "adapter a, multimodal cat at tokens 4 to 9, cache salt b"."""
    return ", ".join(map(_key_words, extra_keys))


def new_keys_words(extra_keys: ExtraKeys, index: int, block_size: int) -> str:
    """Return the same for the keys that logical block ``index`` is the first of its chain to have."""
    return keys_words(tuple(key for key in extra_keys if _first_token(key) // block_size == index))


def _first_token(key: ExtraKey) -> int:
    return key[2] if len(key) == 4 else 0


def _key_words(key: ExtraKey) -> str:
    words = f"{key[0].replace('_', ' ')} {key[1]}"
    if len(key) == 4:
        words += f" at token {key[2]}" if key[3] == 1 else f" at tokens {key[2]} to {key[2] + key[3] - 1}"
    return words


def plural(count: int, word: str) -> str:
    """Return "1 block", "2 blocks"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def count_range(first: int, last: int, word: str) -> str:
    """Return "block 3", "blocks 3 to 5"."""
    return f"{word} {first:,}" if first == last else f"{word}s {first:,} to {last:,}"


def listed(words: Iterable[str]) -> str:
    """Return "a", "a or b", "a, b or c"."""
    chosen = list(words)
    return " or ".join(filter(None, [", ".join(chosen[:-1]), *chosen[-1:]]))
