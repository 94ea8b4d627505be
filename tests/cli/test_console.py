import io
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from toque.cli.console import ConsoleReporter, standard_streams


def reporter(*, terminal: bool, **how: Any) -> tuple[ConsoleReporter, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=60, color_system=None)
    return ConsoleReporter(console, **how), out


def test_lines_and_notices_go_their_own_ways(capsys):
    told, out = reporter(terminal=False)
    told.line("a result")
    told.notice("[red]name[/red] " + "x" * 80)
    assert capsys.readouterr().out == "a result\n"
    assert (
        out.getvalue() == "[red]name[/red] " + "x" * 80 + "\n"
    )  # no markup, not folded


def test_in_a_pipe_only_kept_progress_is_a_line():
    told, out = reporter(terminal=False)
    told.progress("hashing", done=1, total=2)
    told.progress("step 1")
    told.progress("step 2", keep=True)
    told.progress("")
    with told.working("measuring"):
        pass
    assert out.getvalue() == "step 2\n"


@pytest.mark.parametrize("total", [0, 100])
def test_on_a_terminal_progress_is_drawn_in_one_place(total):
    told, out = reporter(terminal=True)
    for done in (10, 20):
        told.progress("preparing", done=done, total=total)
    told.notice("a source was skipped")
    told.progress("")
    text = out.getvalue()
    assert "\x1b" in text
    assert "preparing" in text
    assert ("10%" in text) is (total > 0)
    assert "a source was skipped" in text
    told.progress("again")  # what is over can begin anew
    told.progress("")
    assert "again" in out.getvalue()


@pytest.mark.parametrize("how", ["progress", "quiet"])
def test_without_progress_what_stays_is_shown_and_quiet_the_result_alone(how, capsys):
    told, out = reporter(terminal=how == "progress", **{how: how == "quiet"})
    told.progress("step 1", keep=True)
    with told.working("measuring"):
        told.line("a result")
    told.notice("warning: look")
    shown = "warning: look\n" if how == "progress" else ""
    assert (capsys.readouterr().out, out.getvalue()) == ("a result\n", shown)


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("ascii", r"\u0416\xe9 \U0001f372 \ud83c"),
        ("latin-1", "\\u0416é \\U0001f372 \\ud83c"),
        ("cp1251", r"Ж\xe9 \U0001f372 \ud83c"),
        ("utf-8", "Жé 🍲 \\ud83c"),
        ("utf-16-le", "Жé 🍲 \\ud83c"),
    ],
)
@pytest.mark.parametrize("working", [True, False])
def test_characters_that_an_output_lacks_are_escaped(
    encoding, printed, working, monkeypatch
):
    outputs = io.BytesIO(), io.BytesIO()
    for name, output in zip(("stdout", "stderr"), outputs, strict=True):
        # Standard error of Python escapes by itself, unless PYTHONIOENCODING names "strict".
        monkeypatch.setattr(
            f"sys.{name}", io.TextIOWrapper(output, encoding, newline="\n")
        )
    text = "Жé 🍲 \ud83c"
    with standard_streams(working=working):
        print(text)
        Console(soft_wrap=True).print(text)
        print(text, file=sys.stderr)
        ConsoleReporter().line(text)
        ConsoleReporter().notice(text)
    assert [output.getvalue().decode(encoding).splitlines() for output in outputs] == [
        [printed] * 3,
        [printed] * 2,
    ]


class Unwritable(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_what_cannot_be_written_is_dropped_and_known(monkeypatch, capsys):
    told = ConsoleReporter()
    told.notice("shown")
    assert told.lost is None
    monkeypatch.setattr("sys.stderr", Unwritable())
    told.notice("dropped")
    told.progress("dropped", keep=True)
    told.line("a result")
    assert told.lost == "No space left on device"
    assert capsys.readouterr().out == "a result\n"


def test_live_progress_on_a_terminal_writes_below_what_rich_puts_there(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    told = ConsoleReporter()
    with told.working("measuring"):
        told.notice("above")
    told.progress("step 1")
    told.progress("")
    assert "above" in terminal.getvalue()
    assert "step 1" in terminal.getvalue()


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_in_a_pipe_a_long_part_is_told_after_two_seconds_and_then_less_and_less():
    clock = Clock()
    told, out = reporter(terminal=False, clock=clock)
    for second in range(100):
        clock.now = float(second)
        told.progress(f"evaluating {second} of 200 examples", done=second, total=200)
    told.progress("")
    assert out.getvalue().splitlines() == [
        "evaluating 2 of 200 examples  1%  3:18 left",
        "evaluating 32 of 200 examples  16%  2:48 left",
        "evaluating 92 of 200 examples  46%  1:48 left",
    ]
    told.progress("writing 0 of 9 texts", total=9)  # another part, short
    clock.now += 1.9
    told.progress("writing 9 of 9 texts", done=9, total=9)
    told.progress("")
    told.progress("choosing for 0 of 9 prompts", total=9)
    clock.now += 8.0
    told.progress("choosing for 8 of 9 prompts", done=8, total=9)  # over in a second
    assert len(out.getvalue().splitlines()) == 3


def test_in_a_pipe_a_line_that_is_printed_puts_progress_off():
    clock = Clock()
    told, out = reporter(terminal=False, clock=clock)
    for second in range(100):
        clock.now = float(second)
        told.progress(f"step {second}")
        if second % 20 == 0:
            told.progress("")  # an evaluation lies between
            told.notice(f"evaluated {second}")
    assert out.getvalue().splitlines() == [
        f"evaluated {n}" for n in (0, 20, 40, 60, 80)
    ]


@pytest.mark.parametrize(("terminal", "columns"), [(True, 60), (False, 120)])
def test_a_text_is_cut_to_the_terminal_and_details_are_for_a_log(terminal, columns):
    told, out = reporter(terminal=terminal)
    told.detail("a detail")
    assert (told.columns, out.getvalue()) == (columns, "")


def test_in_a_pipe_what_is_under_way_for_long_is_said_once():
    told, out = reporter(terminal=False)
    told.patience = 0.0
    with told.working("measuring"):
        for _ in range(10_000):
            if out.getvalue():
                break
            time.sleep(0.001)
    assert out.getvalue() == "measuring ...\n"


def test_in_a_pipe_a_printed_line_puts_long_work_off_too():
    told, out = reporter(terminal=False)
    told.patience = 0.0
    told.notice("preparing first")
    with told.working("loading torch"):
        time.sleep(0.05)
    assert out.getvalue() == "preparing first\n"


def test_a_spinner_takes_the_place_of_what_is_live():
    told, out = reporter(terminal=True)
    told.progress("step 1")
    with told.working("writing"):
        told.notice("a sentence")
    told.progress("step 2")
    told.progress("")
    assert "writing" in out.getvalue()
