"""A real byte-level BPE tokenizer of about 300 tokens: any byte string round-trips.

Knows the metadata keys llama.cpp reads for a vocabulary; knows nothing about layers.
"""

from __future__ import annotations

from typing import Final

BOS: Final = "<|endoftext|>"
EOS: Final = "<|im_end|>"
SPECIALS: Final = (BOS, "<|im_start|>", EOS)

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Ordered: an earlier merge wins, and each side must be a byte or the result of an earlier merge.
MERGES: Final = (
    *("Ġ t", "h e", "i n", "r e", "a n", "Ġ a", "o n", "Ġt he", "e r", "i s", "o u", "a t"),
    *("e n", "Ġ w", "Ġ s", "in g", "o r", "an d", "Ġ and", "e s", "l l", "Ġ o", "Ġ c", "Ġ b"),
    *("Ġ f", "Ġ p", "Ġ m", "i t", "a l", "Ġ in", "Ġo f", "e d", "Ġt o", "a r", "Ġ is", "Ġ h"),
    *("h at", "Ġ d", "Ġ l", "Ġ re"),
)

_NORMAL: Final = 1  # llama.cpp token types: LLAMA_TOKEN_TYPE_NORMAL and _CONTROL
_CONTROL: Final = 3


def byte_tokens() -> list[str]:
    """Return GPT-2's 256 printable stand-ins, indexed by byte (openai/gpt-2, encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in printable else next(hidden)) for byte in range(256)]


def tokens() -> list[str]:
    """Return the vocabulary in id order: bytes, merges, specials."""
    return [*byte_tokens(), *(merge.replace(" ", "") for merge in MERGES), *SPECIALS]


def metadata() -> dict[str, str | int | bool | list[str] | list[int]]:
    """Return the `tokenizer.*` keys of the vocabulary, with a ChatML template."""
    names = tokens()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [_CONTROL if t in SPECIALS else _NORMAL for t in names],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": names.index(BOS),
        "tokenizer.ggml.eos_token_id": names.index(EOS),
        "tokenizer.ggml.padding_token_id": names.index(BOS),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
