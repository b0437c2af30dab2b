"""The conversation at a terminal: reads lines, runs commands, shows answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.color_depth import ColorDepth
from prompt_toolkit.shortcuts import CompleteStyle

from speculoe_local.cli.answer import Answer, answer, logits_sha256
from speculoe_local.cli.commands import COMMANDS, QUOTES, Next, is_command, run_command
from speculoe_local.cli.conversation import Conversation
from speculoe_local.cli.engine_thread import EngineThread
from speculoe_local.cli.render import AnswerWriter, note, styles
from speculoe_local.runtime.errors import OptionError, SpeculoeError
from speculoe_local.runtime.placement import describe

if TYPE_CHECKING:
    from speculoe_local.runtime import Engine, ModelInfo

__all__ = ["Repl", "history_path", "message_of"]

LEAVE_HINT = "Use Ctrl-D or /bye to exit; Ctrl-C once more exits too."


class Repl:
    """One conversation. `run` returns the exit code."""

    def __init__(
        self,
        thread: EngineThread,
        engine: Engine,
        conversation: Conversation,
        *,
        stop: Sequence[str],
        logits_hash: bool,
        keep_history: bool,
    ) -> None:
        self._thread = thread
        self._engine = engine
        self._conversation = conversation
        self._stop = stop
        self._logits_hash = logits_hash
        self._last: Answer | None = None
        self._session = _prompt_session(keep_history)

    def run(self) -> int:
        """Talk until the user leaves: 0, or 130 when with Ctrl-C."""
        note(_introduction(self._engine.info))
        interrupted = False
        while True:
            try:
                line = self._session.prompt()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if interrupted:
                    return 130
                interrupted = True
                note(LEAVE_HINT)
                continue
            interrupted = False
            if self._take(line) is Next.LEAVE:
                return 0

    def _take(self, line: str) -> Next:
        """Do what the user typed."""
        if is_command(line):
            try:
                outcome = run_command(line, self._conversation, self._last)
            except OptionError as error:
                note(f"error: {error}")
                return Next.PROMPT
            if outcome.text:
                note(outcome.text)
            if outcome.next is Next.ANSWER:
                self._answer()
            return outcome.next
        message = message_of(line)
        if message:
            self._conversation.say("user", message)
            self._answer()
        return Next.PROMPT

    def _answer(self) -> None:
        """Answer the last message. Without an answer the message is taken back, or the model would
        be asked with two messages in a row."""
        writer = AnswerWriter(markdown=self._conversation.markdown)
        try:
            given = answer(
                self._thread,
                self._engine,
                self._conversation,
                show=writer.feed,
                stop=self._stop,
                logits_hash=self._logits_hash,
            )
        except SpeculoeError as error:
            self._conversation.turns.pop()
            note(f"error: {error}")
            return
        writer.end()
        self._last = given
        if given.text:
            self._conversation.say("assistant", given.text)
        else:
            self._conversation.turns.pop()
        if given.finish_reason == "cancel":
            note("stopped" if given.text else "stopped before the answer began; message taken back")
        elif given.finish_reason == "length":
            note("the answer ends at the limit of tokens: see /set max_tokens, --ctx and /clear")
        if self._conversation.show_stats:
            note(given.stats.line())
        if self._logits_hash:
            note(f"logits_sha256 {logits_sha256(given)}")


def message_of(line: str) -> str:
    """What the user says with `line`: without the quotes of a message of several lines."""
    text = line.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    # Half of a surrogate pair can come from a terminal, but is no text.
    return text.encode("utf-8", "replace").decode("utf-8")


def history_path() -> Path:
    """Where typed lines are kept."""
    return user_state_path("speculoe-local") / "chat-history"


def _introduction(info: ModelInfo) -> str:
    experts = (
        f"{info.n_expert} experts, {info.n_expert_used} used" if info.n_expert else "no experts"
    )
    return (
        f"{info.name} ({info.architecture}, {info.n_layer} layers, {experts}), "
        f"context {info.n_ctx}\n{describe(info.placement).splitlines()[0]}\n"
        "/help lists commands; Ctrl-D leaves."
    )


def _history(keep: bool) -> History:
    """On disk, readable by the user alone; where that cannot be, in memory."""
    if not keep:
        return InMemoryHistory()
    path = history_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        path.chmod(0o600)  # it may be there already, with other rights
    except OSError as error:
        note(f"note: lines are not kept: cannot write {str(path)!r}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(path))


def _open_quotes(text: str) -> bool:
    start = text.lstrip()
    return start.startswith(QUOTES) and QUOTES not in start[len(QUOTES) :]


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def submit(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _open_quotes(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def _prompt_session(keep_history: bool) -> PromptSession[str]:
    def continuation(width: int, line: int, wrapped: int) -> Any:
        return "... "

    # The prompt goes to standard output only where that is the terminal.
    output = create_output(always_prefer_tty=True)
    coloured = styles(sys.stdout if sys.stdout.isatty() else sys.stderr)
    return PromptSession(
        FormattedText([("bold", ">>> ")]),
        output=output,
        color_depth=None if coloured else ColorDepth.DEPTH_1_BIT,
        history=_history(keep_history),
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation=continuation,
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
        placeholder=FormattedText([("fg:ansibrightblack", "Send a message (/help for help)")]),
        enable_suspend=True,
    )
