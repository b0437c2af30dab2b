"""Markdown on a terminal loses no text and never depends on how it arrived."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculoe_local.cli.markdown import (
    BOLD,
    CODE,
    DIM,
    HEADING,
    ITALIC,
    MAX_HELD,
    RESET,
    MarkdownStream,
)

marked = st.text("a1 \n*_`#->~é", max_size=60)


def rendered(*pieces):
    stream = MarkdownStream()
    return "".join(map(stream.feed, pieces)) + stream.flush()


def visible(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("plain\n", "plain\n"),
        ("a **b c** d", f"a {BOLD}b c{RESET} d"),
        ("*i* _j_", f"{ITALIC}i{RESET} {ITALIC}j{RESET}"),
        ("***x***", f"{BOLD}{ITALIC}x{RESET}"),
        ("run `a*b*c` now", f"run {CODE}a*b*c{RESET} now"),
        ("# Title\nx", f"{HEADING}Title{RESET}\nx"),
        ("- one\n  * two\n", "• one\n  • two\n"),
        ("> said", f"{DIM}│ {RESET}said"),
        ("---\n", f"{DIM}---{RESET}\n"),
        ("2 * 3 * 4, 2*3*4, snake_case_name", "2 * 3 * 4, 2*3*4, snake_case_name"),
        ("def f(*args, **kwargs):", "def f(*args, **kwargs):"),
        ("#hashtag\n-5\n", "#hashtag\n-5\n"),
        ("**never closed\nnext", "**never closed\nnext"),
        ("1. **First**: x", f"1. {BOLD}First{RESET}: x"),
        ("**a `b` c**", f"{BOLD}a {RESET}{BOLD}{CODE}b{RESET}{BOLD} c{RESET}"),
    ],
)
def test_markdown_becomes_styles(source, expected):
    assert expected == rendered(source)
    assert expected == rendered(*source)


def test_a_code_block_is_shown_as_it_is_between_dim_fences():
    source = "```python\n# x **y**\n- `z`\n  ```\nafter **b**"
    shown = rendered(source)

    assert source.replace("**b**", "b") == visible(shown)
    assert f"{DIM}```python{RESET}\n" in shown
    assert shown.endswith(f"after {BOLD}b{RESET}")


@given(marked, st.lists(st.integers(0, 60), max_size=6))
def test_the_result_does_not_depend_on_the_cuts(text, places):
    marks = sorted(place % (len(text) + 1) for place in places)
    pieces = [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]

    assert rendered(text) == rendered(*pieces)


@given(marked)
def test_nothing_but_markers_is_ever_lost(text):
    markers = "*_`#->~•│ "
    kept = [character for character in visible(rendered(text)) if character not in markers]

    assert [character for character in text if character not in markers] == kept


@given(st.text("ab ,.\n", max_size=80))
def test_text_without_markers_is_shown_at_once(text):
    stream = MarkdownStream()
    shown = "".join(map(stream.feed, text))

    # Only the indentation of a line is waited for.
    assert text == shown + (stream.flush())
    assert len(text.rstrip(" ")) <= len(shown)


def test_an_unclosed_marker_holds_back_no_more_than_its_limit():
    stream = MarkdownStream()
    text = "see **" + "word " * 100

    assert len(text) - len(stream.feed(text)) <= MAX_HELD
