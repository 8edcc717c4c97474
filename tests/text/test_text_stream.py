"""Text as it streams: what is shown is never taken back, and stop strings end it exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twofold.text.tokenizer.text_stream import TextStream


class Letters:
    """A detokenizer of one character per token."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def stream(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    out = TextStream(Letters(), stop)
    shown = []
    for letter in text:
        shown.append(out.push(ord(letter)))
        if out.stopped:
            break
    return [*shown, out.flush()], out.stopped


def test_without_stop_strings_everything_passes_at_once():
    assert stream("tale", ()) == (["t", "a", "l", "e", ""], False)


def test_a_stop_string_is_held_back_and_dropped():
    assert stream("a tale.END more", ("END",)) == (["a", " ", "t", "a", "l", "e", ".", "", "", "", ""], True)


def test_a_false_start_is_shown_when_it_proves_false():
    assert stream("xEEND", ("END",)) == (["x", "", "E", "", "", ""], True)


def test_half_a_stop_string_at_the_end_is_flushed():
    assert stream("so EN", ("END",)) == (["s", "o", " ", "", "", "EN"], False)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_equals_cutting_the_whole_text(text, stops):
    """Reference: the earliest end of any stop string ends the answer; of those the earliest begin cuts it."""
    shown, stopped = stream(text, tuple(stops))
    cut = None
    for end in range(1, len(text) + 1):
        begins = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if begins:
            cut = min(begins)
            break
    assert stopped == (cut is not None)
    assert "".join(shown) == (text if cut is None else text[:cut])
