"""Prompts for fill-in-the-middle."""

from __future__ import annotations

from typing import cast

import pytest

from speculoe_local.runtime.llama import Fim, Vocabulary
from speculoe_local.server.errors import Unsupported
from speculoe_local.server.prompt.fim import fim_tokens
from tests.server.fake_backend import FakeVocabulary

PRE, SUF, MID, REPO, SEP = 1001, 1002, 1003, 1004, 1005
FILES = [("a.py", "A"), ("b.py", "B")]


def vocabulary(*, files: bool) -> Vocabulary:
    fake = FakeVocabulary()
    fake.fim = Fim(PRE, SUF, MID, -1, REPO if files else -1, SEP if files else -1)
    return cast(Vocabulary, fake)


def shown(tokens: tuple[int, ...]) -> str:
    names = {PRE: "<P>", SUF: "<S>", MID: "<M>", REPO: "<R>", SEP: "<F>"}
    return "".join(names.get(token) or chr(token) for token in tokens)


def test_a_gap_stands_between_its_sides() -> None:
    tokens = fim_tokens(vocabulary(files=False), "ab", "cd", prompt="x", room=100)
    assert "<P>abx<S>cd<M>" == shown(tokens)


def test_other_files_come_first_by_the_models_own_marks() -> None:
    tokens = fim_tokens(vocabulary(files=True), "x", "y", extra=FILES, room=200)
    assert "<R>project\n<F>a.py\nA\n<F>b.py\nB\n<F>filename\n<P>x<S>y<M>" == shown(tokens)
    plain = fim_tokens(vocabulary(files=False), "x", "y", extra=FILES, room=200)
    assert "--- a.py\nA\n--- b.py\nB\n<P>x<S>y<M>" == shown(plain)


def test_what_is_far_from_the_gap_goes_first_when_room_is_short() -> None:
    vocab = vocabulary(files=False)
    near = fim_tokens(vocab, "p" * 30, "s" * 30, extra=FILES, room=43)
    assert "<P>" + "p" * 30 + "<S>" + "s" * 10 + "<M>" == shown(near)
    some = fim_tokens(vocab, "x", "y", extra=FILES, room=18)
    assert "--- b.py\nB\n<P>x<S>y<M>" == shown(some)
    for room in range(3, 60):
        tokens = fim_tokens(
            vocabulary(files=True), "0123456789", "abcdefghi", extra=FILES, room=room
        )
        assert len(tokens) <= room
        text = shown(tokens)
        before, after = text.split("<P>")[1].split("<S>")
        assert "0123456789".endswith(before)
        assert "abcdefghi".startswith(after.removesuffix("<M>"))


def test_control_tokens_in_code_are_text() -> None:
    tokens = fim_tokens(vocabulary(files=False), "<|im_end|>", "", room=100)
    assert "<P><|im_end|><S><M>" == shown(tokens)


def test_a_model_without_the_tokens_says_so() -> None:
    with pytest.raises(Unsupported, match="fill-in-the-middle"):
        fim_tokens(cast(Vocabulary, FakeVocabulary(fim=False)), "a", "b", room=100)
