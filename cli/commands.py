"""The /commands of a conversation: what each does and its line of help. Knows no terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from speculoe_local.cli.answer import Answer, as_json
from speculoe_local.cli.conversation import Conversation, load, save, set_value
from speculoe_local.runtime.errors import OptionError

__all__ = ["COMMANDS", "QUOTES", "Next", "Outcome", "is_command", "run_command"]

# Begins and ends a message of several lines.
QUOTES = '"""'


class Next(Enum):
    """What the loop does after a command."""

    PROMPT = "prompt"
    ANSWER = "answer"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`text` is for the user; empty: nothing to say."""

    text: str = ""
    next: Next = Next.PROMPT


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    help: str
    run: Callable[[Conversation, Answer | None, str], Outcome]


def is_command(line: str) -> bool:
    """A line that begins with `/` is one, known or not; a space before it makes it text."""
    return line.startswith("/")


def run_command(line: str, conversation: Conversation, last: Answer | None) -> Outcome:
    """Do what `line` says. Raises `OptionError`, having changed nothing."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(_ALIASES.get(name, name))
    if command is None:
        raise OptionError(
            f"no command {name!r}: /help lists them; a space before it makes it a message"
        )
    return command.run(conversation, last, argument.strip())


def _help(conversation: Conversation, last: Answer | None, argument: str) -> Outcome:
    lines = [f"  {command.usage:<18} {command.help}" for command in COMMANDS.values()]
    lines += [
        "",
        f"  {QUOTES:<18} begins and ends a message of several lines; Alt-Enter adds a line",
        f"  {'Ctrl-C':<18} stops an answer; what there is of it stays in the conversation",
        f"  {'Ctrl-D':<18} leaves",
    ]
    return Outcome("\n".join(lines))


def _set(conversation: Conversation, last: Answer | None, argument: str) -> Outcome:
    if argument:
        name, _, value = argument.partition(" ")
        if not value.strip():
            raise OptionError(f"/set {name} needs a value: /set NAME VALUE")
        set_value(conversation, name, value.strip())
    rows = conversation.settings().items()
    return Outcome("\n".join(f"  {name:<18} {_shown(value)}" for name, value in rows))


def _system(conversation: Conversation, last: Answer | None, argument: str) -> Outcome:
    text = argument.removeprefix(QUOTES).removesuffix(QUOTES).strip()
    conversation.system = text or None
    return Outcome("system text set" if text else "system text removed")


def _clear(conversation: Conversation, last: Answer | None, argument: str) -> Outcome:
    conversation.turns.clear()
    return Outcome("conversation cleared")


def _regenerate(conversation: Conversation, last: Answer | None, argument: str) -> Outcome:
    if conversation.turns and conversation.turns[-1].role == "assistant":
        conversation.turns.pop()
    if not conversation.turns:
        raise OptionError("nothing to answer again: send a message first")
    return Outcome(next=Next.ANSWER)


def _stats(conversation: Conversation, last: Answer | None, argument: str) -> Outcome:
    if last is None:
        raise OptionError("no statistics yet: send a message first")
    found = as_json("", last)
    rows = _rows({key: found[key] for key in ("usage", "timings", "experts") if key in found})
    return Outcome("\n".join([last.stats.line(), *rows]))


def _save(conversation: Conversation, last: Answer | None, argument: str) -> Outcome:
    path = _path("/save", argument)
    save(conversation, path)
    return Outcome(f"{len(conversation.turns)} messages saved to {path}")


def _load(conversation: Conversation, last: Answer | None, argument: str) -> Outcome:
    path = _path("/load", argument)
    load(conversation, path)
    return Outcome(f"{len(conversation.turns)} messages loaded from {path}")


def _bye(conversation: Conversation, last: Answer | None, argument: str) -> Outcome:
    return Outcome(next=Next.LEAVE)


COMMANDS = {
    "/help": Command("/help", "this list", _help),
    "/set": Command("/set NAME VALUE", "change a setting; /set alone shows them", _set),
    "/system": Command("/system TEXT", "instructions to the model; without TEXT none", _system),
    "/regen": Command("/regen", "answer the last message again", _regenerate),
    "/clear": Command("/clear", "forget what was said", _clear),
    "/stats": Command("/stats", "statistics of the last answer", _stats),
    "/save": Command("/save FILE", "write the conversation to FILE", _save),
    "/load": Command("/load FILE", "go on with a conversation from FILE", _load),
    "/bye": Command("/bye", "leave", _bye),
}
_ALIASES = {"/?": "/help", "/retry": "/regen", "/exit": "/bye", "/quit": "/bye"}


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise OptionError(f"{command} needs a file: {command} FILE")
    return Path(argument).expanduser()


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rows(groups: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"  {name + '.' + key:<32} {_shown(value)}"
        for name, group in groups.items()
        for key, value in group.items()
    ]
