"""Table of the crash test, or the same as JSON."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from toque.workflows.drill.run import DrillResult


def print_drill(result: DrillResult, *, as_json: bool) -> None:
    """Print every fault with what was expected and what happened."""
    if as_json:
        print(json.dumps(result.record(), indent=1))
        return
    table = Table("fault", "what was done", "expected", "what happened", "", show_lines=True)
    for o in result.outcomes:
        table.add_row(o.fault, o.done, o.expected, o.happened, o.verdict)
    Console().print(table, highlight=False)
