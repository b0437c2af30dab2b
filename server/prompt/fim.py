"""Prompts for fill-in-the-middle: what stands before and after a gap, as tokens with the model's marks.

Knows vocabularies, no dialect. The order prefix, suffix, middle is what models with these tokens are
trained on (Qwen2.5-Coder, its descendants, StarCoder, Granite).
"""

from __future__ import annotations

from collections.abc import Sequence

from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.server.errors import Unsupported

__all__ = ["fim_tokens"]


def fim_tokens(
    vocab: Vocabulary,
    prefix: str,
    suffix: str,
    *,
    prompt: str = "",
    extra: Sequence[tuple[str, str]] = (),
    room: int,
) -> tuple[int, ...]:
    """At most `room` tokens: `prompt` continues the prefix, `extra` are (file name, text) of other places.

    What does not fit is left out where it matters least: other files first, then the suffix's end and
    the prefix's begin, so that of what is left three quarters are prefix. Raises Unsupported where the
    model has no such tokens.
    """
    fim = vocab.fim
    if not fim.complete:
        raise Unsupported("the model has no fill-in-the-middle tokens; use a model trained for it")
    before = _plain(vocab, prefix) + _plain(vocab, prompt)
    after = _plain(vocab, suffix)
    lead = [vocab.bos] if vocab.adds_bos and vocab.bos >= 0 else []
    space = max(room - len(lead) - 3, 0)
    share = max(space // 4, space - len(before))
    after = after[: min(len(after), share)]
    keep = space - len(after)
    before = before[-keep:] if keep else []
    files = _files(vocab, extra, space - len(before) - len(after))
    return (*lead, *files, fim.prefix, *before, fim.suffix, *after, fim.middle)


def _files(vocab: Vocabulary, extra: Sequence[tuple[str, str]], room: int) -> list[int]:
    """Other files, the last ones where not all fit: clients list what is nearest last."""
    fim = vocab.fim
    marked = fim.repository >= 0 and fim.separator >= 0
    head = [fim.repository, *_plain(vocab, "project\n")] if marked and extra else []
    found: list[int] = []
    for name, text in reversed(extra):
        if marked:
            one = [fim.separator, *_plain(vocab, f"{name}\n{text}\n")]
        else:
            one = _plain(vocab, f"--- {name}\n{text}\n")
        if len(head) + len(one) + len(found) > room:
            break
        found = one + found
    here = [fim.separator, *_plain(vocab, "filename\n")] if marked and found else []
    if not found or len(head) + len(found) + len(here) > room:
        return found if not marked else []
    return head + found + here


def _plain(vocab: Vocabulary, text: str) -> list[int]:
    return vocab.tokenize(text, special=False, add_bos=False) if text else []
