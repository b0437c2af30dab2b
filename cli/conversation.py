"""A conversation and its settings: what was said, how to sample, how it is saved.

Knows nothing of engines or terminals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculoe_local.runtime.errors import OptionError

if TYPE_CHECKING:
    from speculoe_local.runtime import Message, Sampling

__all__ = ["Conversation", "load", "save", "set_value"]

FORMAT = "speculoe-local conversation 1"
MAX_FILE_BYTES = 64 << 20

# What /set takes: type, smallest and largest value. Those but max_tokens are fields of Sampling.
_NUMBERS: dict[str, tuple[type, float, float]] = {
    "temp": (float, 0.0, 100.0),
    "top_k": (int, 0, 2**31 - 1),
    "top_p": (float, 0.0, 1.0),
    "min_p": (float, 0.0, 1.0),
    "repeat_penalty": (float, 0.0, 100.0),
    "seed": (int, 0, 2**32 - 1),
    "max_tokens": (int, 1, 2**31 - 1),
}
_SWITCHES = {"stats": "show_stats", "markdown": "markdown"}
_CAN_BE_NONE = {"seed", "max_tokens"}


@dataclass(slots=True)
class Conversation:
    """Mutable. `turns` alternates user and assistant; the system text stands apart."""

    sampling: Sampling
    max_tokens: int | None = None
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    show_stats: bool = True
    markdown: bool = True

    def messages(self) -> list[Message]:
        """What the model is asked with."""
        from speculoe_local.runtime import Message

        first = [Message("system", self.system)] if self.system else []
        return [*first, *self.turns]

    def say(self, role: str, content: str) -> None:
        from speculoe_local.runtime import Message

        self.turns.append(Message(role, content))

    def settings(self) -> dict[str, Any]:
        """What `/set` can change, by name."""
        numbers = {
            name: self.max_tokens if name == "max_tokens" else getattr(self.sampling, name)
            for name in _NUMBERS
        }
        return {**numbers, **{name: getattr(self, at) for name, at in _SWITCHES.items()}}


def set_value(conversation: Conversation, name: str, text: str) -> None:
    """Change one setting; raises `OptionError` for an unknown name or an unusable value."""
    name = name.replace("-", "_")
    if name in _SWITCHES:
        if text not in ("on", "off"):
            raise OptionError(f"{name} {text!r} is not understood: say on or off")
        setattr(conversation, _SWITCHES[name], text == "on")
        return
    if name not in _NUMBERS:
        known = ", ".join([*_NUMBERS, *_SWITCHES])
        raise OptionError(f"no setting {name!r}: there are {known}")
    value: float | None
    if text == "none" and name in _CAN_BE_NONE:
        value = None
    else:
        kind, least, most = _NUMBERS[name]
        try:
            value = kind(text)
        except ValueError:
            raise OptionError(f"{name} {text!r} is no number: give {least} to {most}") from None
        if not least <= value <= most:  # also refuses nan
            raise OptionError(f"{name} {text} is out of range: give {least} to {most}")
    if name == "max_tokens":
        conversation.max_tokens = None if value is None else int(value)
    else:
        changed: dict[str, Any] = {name: value}
        conversation.sampling = dataclasses.replace(conversation.sampling, **changed)


def save(conversation: Conversation, path: Path) -> None:
    """Write it as JSON, whole or not at all, readable by the user alone.

    Overwrites only a conversation saved before; raises `OptionError` otherwise.
    """
    if path.exists():
        try:
            _read(path)
        except OptionError:
            raise OptionError(
                f"{str(path)!r} exists and is no saved conversation: choose another name"
            ) from None
    saved = {
        "format": FORMAT,
        "system": conversation.system,
        "messages": [{"role": turn.role, "content": turn.content} for turn in conversation.turns],
    }
    temporary = None
    try:
        # mkstemp makes it 0600: conversations are private.
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogatepass") as file:
            json.dump(saved, file, indent=1)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror}") from error


def load(conversation: Conversation, path: Path) -> None:
    """Replace what was said by what `save` wrote; raises `OptionError` and changes nothing."""
    from speculoe_local.runtime import Message

    saved = _read(path)
    system, messages = saved.get("system"), saved.get("messages")
    turns = []
    for message in messages if isinstance(messages, list) else [None]:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ("user", "assistant") or not isinstance(content, str):
            raise OptionError(f"{str(path)!r} is damaged: its messages cannot be read")
        turns.append(Message(role, content))
    if system is not None and not isinstance(system, str):
        raise OptionError(f"{str(path)!r} is damaged: its system text is no text")
    conversation.system, conversation.turns = system, turns


def _read(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise OptionError(f"{str(path)!r} has {size} bytes, more than {MAX_FILE_BYTES}")
        saved = json.loads(path.read_bytes())
    except OSError as error:
        raise OptionError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise OptionError(f"{str(path)!r} is no saved conversation: /save FILE makes one")
    return saved
