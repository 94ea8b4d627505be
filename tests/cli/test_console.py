from __future__ import annotations

import io

import pytest
from rich.console import Console

from toque.cli.console import ConsoleReporter


def reporter(*, terminal: bool) -> tuple[ConsoleReporter, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=60, color_system=None)
    return ConsoleReporter(console), out


def test_lines_and_notices_go_their_own_ways(capsys):
    told, out = reporter(terminal=False)
    told.line("a result")
    told.notice("[red]name[/red] " + "x" * 80)
    assert capsys.readouterr().out == "a result\n"
    assert out.getvalue() == "[red]name[/red] " + "x" * 80 + "\n"  # no markup, not folded


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
