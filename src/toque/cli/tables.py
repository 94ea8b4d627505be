"""Tables on a terminal, or as plain text where there is none: the data report, the crash test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toque.data.prepare.data_report import BEYOND, Report
from toque.reports.page import Grid
from toque.reports.store_page import (
    dropped_grid,
    labels_grid,
    lengths_grid,
    notes_grid,
    sources_grid,
    warnings_of,
)

if TYPE_CHECKING:
    from toque.workflows.doctor.checkup import Checkup
    from toque.workflows.drill.run import DrillResult

_NO_TERMINAL_COLUMNS = 120
"""Wide enough for a path in a log file; rich would guess 80."""


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the report's tables and sentences on standard output."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NO_TERMINAL_COLUMNS)
    for warning in warnings_of(report):
        console.print(Text(f"look at this: {_plain(warning)}", style="yellow"))
    for title, grid in (
        ("Sources", sources_grid(report)),
        ("Dropped", dropped_grid(report)),
        ("Repaired or noted", notes_grid(report)),
        ("Lengths", lengths_grid(report)),
        ("Scores and labels", labels_grid(report)),
    ):
        if grid.rows:
            console.print(_table(title, grid))
            if grid.note:
                console.print(Text(_plain(grid.note), style="dim"))
    beyond = report.dropped.get(BEYOND, 0)
    for sentence in (*report.losses(), report.splitting()):
        console.print(Text(_plain(sentence)))
    console.print(
        Text(
            f"Read {report.read:,} = kept {report.kept:,} + dropped {report.lost:,}"
            f"{f' + beyond max_examples {beyond:,}' if beyond else ''} records. "
            f"{report.examples:,} examples: {report.train:,} to train on, "
            f"{report.validation:,} held out; "
            f"{report.prompt_tokens + report.target_tokens:,} tokens of {_plain(report.tokenizer)}."
        )
    )


def print_drill(result: DrillResult) -> None:
    """Print every fault with what was expected and what happened."""
    table = Table("fault", "what was done", "expected", "what happened", "", show_lines=True)
    for o in result.outcomes:
        table.add_row(o.fault, o.done, o.expected, o.happened, o.verdict)
    Console().print(table, highlight=False)


def print_checkup(checkup: Checkup) -> None:
    """Print everything that was looked at, with what to do about it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NO_TERMINAL_COLUMNS)
    table = Table("", "state", "found", "what to do", box=SIMPLE_HEAD, pad_edge=False)
    styles = {"ok": "green", "warning": "yellow", "failed": "red"}
    for check in checkup.checks:
        state = Text(check.state, style=styles[check.state])
        table.add_row(check.name, state, Text(_plain(check.found)), Text(_plain(check.todo)))
    console.print(table)
    states = [check.state for check in checkup.checks]
    counted = ", ".join(f"{states.count(s)} {s}" for s in styles if s in states)
    console.print(f"{counted}; looked for {checkup.seconds:.0f} s")


def _table(title: str, grid: Grid) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for at, head in enumerate(grid.heads):
        right = at in grid.numeric
        table.add_column(head, justify="right" if right else "left", no_wrap=right)
    for row in grid.rows:
        # As Text: a file's name is not markup, and "[red]" is a possible one.
        table.add_row(*(Text(_plain(cell)) for cell in row))
    return table


def _plain(text: str) -> str:
    """Without control characters: names come from files, and a terminal obeys escapes."""
    return "".join(c if c.isprintable() else "?" for c in text)
