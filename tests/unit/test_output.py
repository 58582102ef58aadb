"""The text of one request as its tokens come: never a stop string, nor a part of one that may become whole."""

from __future__ import annotations

import pytest

from minivllm.engine.output import TextStream
from minivllm.runners.virtual import VirtualTokenizer


class Pieces:
    """A detokenizer whose token i is the i-th piece of text; the last ``held`` characters come with the end."""

    def __init__(self, *pieces: str, held: str = "") -> None:
        self._pieces = pieces
        self._held = held
        self._text = ""

    def add_token(self, token: int) -> None:
        self._text += self._pieces[token]

    def finalize(self) -> None:
        self._text += self._held
        self._held = ""

    @property
    def last_segment(self) -> str:
        text, self._text = self._text, ""
        return text


def streamed(*pieces: str, stop: tuple[str, ...] = (), held: str = "") -> tuple[list[str], bool]:
    """Return what came out for each piece (up to the stop) and at the end, and whether it stopped."""
    stream = TextStream(Pieces(*pieces, held=held), stop)
    out = []
    for token in range(len(pieces)):
        out.append(stream.add(token))
        if stream.stopped:
            break
    out.append(stream.finish())
    return out, stream.stopped


def test_without_stop_strings_everything_comes_out_at_once() -> None:
    assert streamed("a", "bc", "") == (["a", "bc", "", ""], False)


def test_what_the_detokenizer_kept_comes_out_at_the_end() -> None:
    assert streamed("a", held="é") == (["a", "é"], False)
    assert streamed("a", held="é", stop=("x",)) == (["a", "é"], False)


def test_a_stop_string_within_one_piece_cuts_the_text_before_it() -> None:
    assert streamed("one END two", "three", stop=("END",)) == (["one ", ""], True)


def test_a_stop_string_over_several_pieces_is_never_let_out_in_part() -> None:
    assert streamed("one E", "N", "D two", stop=("END",)) == (["one ", "", "", ""], True)


def test_a_beginning_that_does_not_become_a_stop_string_comes_out_later() -> None:
    assert streamed("one E", "N", "Q", stop=("END",)) == (["one ", "", "ENQ", ""], False)


def test_a_beginning_that_stays_one_comes_out_at_the_end() -> None:
    assert streamed("one EN", stop=("END",)) == (["one ", "EN"], False)


def test_a_stop_string_that_only_the_end_completes_cuts_too() -> None:
    assert streamed("one EN", held="D!", stop=("END",)) == (["one ", ""], True)


def test_a_stop_string_that_repeats_itself_is_found_after_a_false_start() -> None:
    assert streamed("a", "a", "a", "b", stop=("aab",)) == (["", "", "a", "", ""], True)


def test_of_several_stop_strings_the_one_that_begins_first_cuts() -> None:
    assert streamed("x two one", stop=("one", "two")) == (["x ", ""], True)


def test_the_stop_string_that_is_whole_first_wins_over_one_that_began_before() -> None:
    """At "abcd" nobody can know whether "ef" would have come; the request ends there."""
    assert streamed("ab", "cd", "ef", stop=("abcdef", "cd")) == (["", "ab", ""], True)


def test_a_stop_string_at_the_very_beginning_leaves_no_text() -> None:
    assert streamed("END", "more", stop=("END",)) == (["", ""], True)


def test_after_a_stop_nothing_more_comes() -> None:
    stream = TextStream(Pieces("END tail", held="more"), ("END",))
    assert stream.add(0) == ""
    assert stream.stopped
    assert stream.finish() == ""


@pytest.mark.parametrize("text", ["größe", "日本語", "a🙂b"])
def test_a_character_of_several_tokens_comes_out_whole(text: str) -> None:
    tokenizer = VirtualTokenizer()
    stream = TextStream(tokenizer.detokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert all(piece in text and "\ufffd" not in piece for piece in pieces)


def test_half_a_character_at_the_end_is_shown_as_one_that_cannot_be_read() -> None:
    tokenizer = VirtualTokenizer()
    stream = TextStream(tokenizer.detokenizer)
    first, second = tokenizer.encode("é")
    assert stream.add(first) == ""
    assert stream.finish() == "\ufffd"
    assert bytes([first, second]).decode() == "é"
