"""Notebooks of examples/, made from the scripts of the same names, which own the text.

    python tools/make_notebooks.py            writes examples/*.ipynb

A script is cells: `# %%` begins one of code, `# %% [markdown]` one of text in comments.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat import v4

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MARKDOWN = "[markdown]"


def notebook_of(script: str) -> str:
    r"""The notebook of a script's text, as it stands in its file.

    >>> notebook = notebook_of("# %% [markdown]\n# # Title\n\n# %%\nprint(1)\n")
    >>> [cell.source for cell in nbformat.reads(notebook, as_version=4).cells]
    ['# Title', 'print(1)']
    """
    cells = []
    for number, part in enumerate(re.split(r"(?m)^# %%", script)[1:], start=1):
        kind, _, body = part.partition("\n")
        name = f"cell-{number}"  # nbformat draws one at random, and the file would always differ
        if kind.strip() == MARKDOWN:
            text = re.sub(r"(?m)^# ?", "", body.strip())
            cells.append(v4.new_markdown_cell(text, id=name))
        else:
            cells.append(v4.new_code_cell(body.strip(), id=name))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    return f"{nbformat.writes(notebook)}\n"


def scripts() -> list[Path]:
    """The examples, in an order in which each finds what it needs."""
    return [
        EXAMPLES / f"{name}.py"
        for name in ("first_model", "fine_tune_and_compare", "serve_and_call")
    ]


if __name__ == "__main__":
    for path in scripts():
        path.with_suffix(".ipynb").write_text(notebook_of(path.read_text("utf-8")), "utf-8")
