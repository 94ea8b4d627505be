"""Notebooks of `examples/`, generated from the scripts with the same names.

    python tools/make_notebooks.py            # write every examples/*.ipynb

`# %%` starts a code cell, `# %% [markdown]` a text cell of comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_CELL = re.compile(r"^# %%(?P<kind> \[markdown\])?$", re.MULTILINE)


def cells(script: str) -> Iterator[tuple[str, str]]:
    r"""Yield the kind and text of every cell.

    >>> list(cells("# %% [markdown]\n# # Soup\n\n# %%\nprint(1)\n"))
    [('markdown', '# Soup'), ('code', 'print(1)')]
    """
    marks = list(_CELL.finditer(script))
    for mark, after in zip(marks, [*marks[1:], None], strict=True):
        text = script[mark.end() : None if after is None else after.start()].strip("\n")
        if mark["kind"]:
            yield "markdown", re.sub(r"(?m)^# ?", "", text)
        else:
            yield "code", text


def notebook(script: str) -> str:
    """Return a notebook without outputs, in the format of Jupyter."""
    made = [
        {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.splitlines(True),
        }
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, text) in enumerate(cells(script), start=1)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": made,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all notebooks."""
    for script in sorted(EXAMPLES.glob("*.py")):
        made = notebook(script.read_text(encoding="utf-8"))
        script.with_suffix(".ipynb").write_text(made, encoding="utf-8")
        print(script.with_suffix(".ipynb").name)


if __name__ == "__main__":
    main()
