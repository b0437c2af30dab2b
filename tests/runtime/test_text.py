"""Text does not depend on where the bytes or characters were cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.text import StopMatcher, Utf8Stream

# Characters of every length and every mistake: overlong, surrogate, beyond U+10FFFF, cut off.
AWKWARD = [b"a", "é".encode(), "漢".encode(), "🙂".encode(), "👩‍👩‍👧".encode()]
AWKWARD += [
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\x80",
    b"\xff",
    b"\xf0\x9f",
    b"\xe2",
]
byte_texts = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=20).map(lambda text: text.encode()),
    st.lists(st.sampled_from(AWKWARD), max_size=8).map(b"".join),
)


def cut(whole, places):
    """`whole` in pieces, cut at `places` (taken modulo its length), empty pieces included."""
    marks = sorted(place % (len(whole) + 1) for place in places)
    return [whole[a:b] for a, b in zip([0, *marks], [*marks, len(whole)], strict=True)]


def matched(stops, pieces):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return (shown + matcher.flush() if matcher.hit is None else shown), matcher.hit


def first_stop(stops, text):
    """The obvious way: look at every beginning of the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(byte_texts, st.lists(st.integers(0, 200), max_size=8))
def test_bytes_cut_anywhere_give_the_text_of_the_whole(whole, places):
    stream = Utf8Stream()

    assert whole.decode("utf-8", "replace") == "".join(map(stream.feed, cut(whole, places))) + (
        stream.flush()
    )


@given(st.text(max_size=30))
def test_valid_text_fed_byte_by_byte_never_shows_a_broken_character(text):
    stream = Utf8Stream()
    pieces = [stream.feed(bytes([byte])) for byte in text.encode()]

    assert list(text) == [piece for piece in pieces if piece]
    assert "" == stream.flush()


def test_a_character_cut_off_by_the_end_becomes_one_replacement_character():
    stream = Utf8Stream()

    assert "ab" == stream.feed(b"ab\xf0\x9f\x99")
    assert "\ufffd" == stream.flush()
    assert "c" == stream.feed(b"c")


@given(
    st.lists(st.text("abc<|", min_size=1, max_size=5), max_size=4),
    st.text("abc<|", max_size=40),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_the_first_complete_stop_string_ends_the_text_however_it_was_cut(stops, text, places):
    assert first_stop(stops, text) == matched(stops, cut(text, places))


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("ab"))
def test_only_a_tail_that_can_still_become_a_stop_string_is_held_back(stops, text):
    matcher = StopMatcher(stops)
    shown = "".join(map(matcher.feed, text))
    tails = [
        text[-n:]
        for n in range(1, len(text) + 1)
        if any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)
    ]

    if matcher.hit is None:
        assert text == shown + max(tails, key=len, default="")


def test_no_part_of_a_stop_string_cut_over_three_pieces_is_shown():
    matcher = StopMatcher(["<|im_end|>"])

    assert ["Hi", "", "", ""] == [matcher.feed(p) for p in ("Hi<|", "im_e", "nd|>tail", "more")]
    assert "<|im_end|>" == matcher.hit
    assert "" == matcher.flush()


def test_text_that_only_began_like_a_stop_string_is_shown_after_all():
    matcher = StopMatcher(["###"])

    assert ["a", "", "## b"] == [matcher.feed(p) for p in ("a", "##", " b")]
    assert "" == matcher.flush()


def test_a_stop_string_inside_the_beginning_of_another_is_found():
    assert ("a", "bc") == matched(["abcd", "bc"], ["ab", "c", "d"])


@pytest.mark.parametrize("stops", [["", "x"], "###"])
def test_a_stop_list_that_would_end_every_answer_is_refused(stops):
    with pytest.raises(OptionError, match="stop string"):
        StopMatcher(stops)
