"""A conversation at a real (pseudo-)terminal, over an engine without a model."""

from __future__ import annotations

import json
import os
import stat

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def test_a_message_is_answered_with_statistics_and_ctrl_d_leaves_with_0(terminal):
    chat = terminal()
    chat.see("fake (fakemoe, 2 layers, 8 experts, 2 used), context 4096")
    chat.see("resident: everything fits")
    chat.ready()
    chat.enter("hello")
    chat.see("You said 'hello'")
    chat.see("1 tokens, 12.5 tokens/s")
    chat.ready()
    chat.press("\x04")

    assert 0 == chat.leaves()


def test_markdown_is_styled_and_its_markers_are_gone(terminal):
    chat = terminal()
    chat.ready()
    chat.enter("markdown")
    chat.see("bold and code")
    chat.ready()

    assert b"\x1b[1mbold\x1b[0m and \x1b[36mcode\x1b[0m" in chat.raw


@pytest.mark.parametrize(("arguments", "more"), [(["--raw"], {}), ([], {"NO_COLOR": "1"})])
def test_raw_and_no_color_show_markdown_as_it_is(terminal, arguments, more):
    chat = terminal(*arguments, **more)
    chat.ready()
    chat.enter("markdown")
    chat.see("**bold** and `code`")
    chat.ready()

    assert b"\x1b[36m" not in chat.raw


def test_an_answer_cannot_send_codes_to_the_terminal(terminal):
    chat = terminal()
    chat.ready()
    chat.enter("control")
    chat.see("a]0;titleb[2Jc")
    chat.see("fake (fakemoe")


def test_ctrl_c_stops_the_answer_and_keeps_what_there_is_of_it(terminal):
    chat = terminal()
    chat.ready()
    chat.enter("endless")
    chat.see("w9 ")
    chat.press("\x03")
    chat.see("stopped")
    chat.ready()
    chat.enter("previous")
    chat.see("'endless'|'w0 w1 w2")
    chat.ready()
    chat.enter("/bye")

    assert 0 == chat.leaves()


def test_ctrl_c_on_an_empty_line_hints_and_the_second_leaves_with_130(terminal):
    chat = terminal()
    chat.ready()
    chat.press("\x03")
    chat.see("Use Ctrl-D or /bye to exit")
    chat.ready()
    chat.press("\x03")

    assert 130 == chat.leaves()


def test_ctrl_c_on_a_typed_line_only_clears_it(terminal):
    chat = terminal()
    chat.ready()
    chat.press("nonsense")
    chat.see("nonsense")
    chat.press("\x03")
    chat.ready()
    chat.enter("roles")
    chat.see("user")

    assert not any("Use Ctrl-D" in line for line in chat.lines())


def test_ctrl_c_twice_leaves_also_when_the_engine_does_not_come_back(terminal):
    chat = terminal()
    chat.ready()
    chat.enter("stuck")
    chat.see("begun")
    chat.press("\x03")
    chat.see("^C")
    chat.press("\x03")
    chat.see("^C^C")
    chat.press("\x03")

    assert 130 == chat.leaves()


def test_triple_quotes_make_a_message_of_several_lines(terminal):
    chat = terminal()
    chat.ready()
    chat.enter('"""one')
    chat.see("...")
    chat.enter("two")
    chat.enter('three"""')
    chat.see(r"You said 'one\ntwo\nthree'")


def test_pasted_lines_are_not_sent_before_enter(terminal):
    chat = terminal()
    chat.ready()
    chat.press("\x1b[200~first\rsecond\n\x1b[201~")
    chat.see("second")
    chat.press("third")
    chat.see("third")

    assert not any("You said" in line for line in chat.lines())
    chat.press("\r")
    chat.see(r"You said 'first\nsecond\nthird'")


def test_a_failed_answer_is_one_line_and_the_conversation_goes_on_without_its_message(terminal):
    chat = terminal()
    chat.ready()
    chat.enter("overflow")
    chat.see("error: prompt has 9 tokens, the context 4: raise --ctx")
    chat.ready()
    chat.enter("roles")
    chat.see("user")

    assert not any("user user" in line for line in chat.lines())


def test_system_text_clear_and_regen_change_what_the_model_is_asked(terminal):
    chat = terminal("--system", "Be brief.", "--no-stats")
    chat.ready()
    chat.enter("roles")
    chat.see("system user")
    chat.ready()
    chat.enter("roles")
    chat.see("system user assistant user")
    chat.ready()
    chat.enter("/regen")
    chat.see("system user assistant user")
    chat.ready()
    chat.enter("/clear")
    chat.see("conversation cleared")
    chat.ready()
    chat.enter("/system")
    chat.see("system text removed")
    chat.ready()
    chat.enter("roles")
    chat.ready()

    assert 3 == sum(line.startswith("system user") for line in chat.lines())
    assert "user" in chat.lines()
    assert not any("tokens/s" in line for line in chat.lines())


def test_set_changes_sampling_and_refuses_nonsense(terminal):
    chat = terminal("--temp", "0.5")
    chat.ready()
    chat.enter("/set seed 7")
    chat.see("seed               7")
    chat.ready()
    chat.enter("/set temp hot")
    chat.see("error: temp 'hot' is no number")
    chat.ready()
    chat.enter("sampling")
    chat.see("temp=0.5 seed=7 max=None")
    chat.ready()
    chat.enter("/nonsense")
    chat.see("error: no command '/nonsense'")


def test_help_lists_every_command_and_stats_shows_the_last_answer(terminal):
    chat = terminal()
    chat.ready()
    chat.enter("/help")
    chat.see("/load FILE")
    chat.ready()
    chat.enter("/stats")
    chat.see("error: no statistics yet")
    chat.ready()
    chat.enter("hi")
    chat.ready()
    chat.enter("/stats")
    chat.see("experts.hit_rate                 0.5")


def test_a_saved_conversation_is_private_and_can_be_loaded(terminal, tmp_path):
    chat = terminal()
    chat.ready()
    chat.enter("first words")
    chat.see("You said")
    chat.ready()
    chat.enter("/save ~/kept.json")
    chat.see("2 messages saved")
    saved = tmp_path / "kept.json"

    assert 0o600 == stat.S_IMODE(saved.stat().st_mode)
    assert "first words" == json.loads(saved.read_text())["messages"][0]["content"]
    chat.ready()
    chat.enter("/bye")
    assert 0 == chat.leaves()

    again = terminal()
    again.ready()
    again.enter(f"/load {saved}")
    again.see("2 messages loaded")
    again.ready()
    again.enter("previous")
    again.see("'first words'|")


def test_typed_lines_are_kept_for_the_user_alone_even_in_a_file_that_was_open_to_all(
    terminal, tmp_path
):
    kept = tmp_path / "state" / "speculoe-local" / "chat-history"
    kept.parent.mkdir(parents=True)
    kept.touch()
    os.chmod(kept, 0o644)  # noqa: PTH101 - as another program may have left it
    chat = terminal()
    chat.ready()
    chat.enter("remember me")
    chat.see("You said")
    chat.ready()
    chat.press("\x04")

    assert 0 == chat.leaves()
    assert 0o600 == stat.S_IMODE(kept.stat().st_mode)
    assert "+remember me" in kept.read_text()

    again = terminal()
    again.ready()
    again.press("\x1b[A")
    again.see("remember me")


@pytest.mark.parametrize(
    ("arguments", "more"), [(["--no-history"], {}), ([], {"SPECULOE_HISTORY": "0"})]
)
def test_without_history_no_file_is_made(terminal, tmp_path, arguments, more):
    chat = terminal(*arguments, **more)
    chat.ready()
    chat.enter("secret")
    chat.see("You said")
    chat.ready()
    chat.enter("/bye")

    assert 0 == chat.leaves()
    assert not (tmp_path / "state").exists()


def test_loading_shows_a_bar_that_is_gone_afterwards(terminal, tmp_path):
    large = tmp_path / "large.gguf"
    large.touch()
    chat = terminal(model=large)
    chat.see("Loading large.gguf █")
    chat.ready()

    assert not any("Loading" in line for line in chat.lines())


def test_ctrl_c_while_loading_leaves_with_130(terminal, tmp_path):
    large = tmp_path / "large.gguf"
    large.touch()
    chat = terminal(model=large)
    chat.see("Loading large.gguf")
    chat.press("\x03")

    assert 130 == chat.leaves()


def test_a_model_without_template_is_noted(terminal, tmp_path):
    bare = tmp_path / "bare.gguf"
    bare.touch()
    chat = terminal(model=bare)
    chat.see("note: the GGUF has no chat template")
