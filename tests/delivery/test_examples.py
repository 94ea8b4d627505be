"""Examples: each notebook is its script, and runs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(REPOSITORY / "tools" / "make_notebooks.py"))
SCRIPTS: list[Path] = TOOL["scripts"]()
NAMES = [script.stem for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_a_notebook_is_what_its_script_makes(script: Path):
    made = TOOL["notebook_of"](script.read_text(encoding="utf-8"))
    assert script.with_suffix(".ipynb").read_text(encoding="utf-8") == made, (
        "python tools/make_notebooks.py"
    )


def test_every_example_is_known_and_in_the_list():
    assert {path.stem for path in (REPOSITORY / "examples").glob("*.py")} == set(NAMES)
    assert {path.stem for path in (REPOSITORY / "examples").glob("*.ipynb")} == set(NAMES)
    readme = (REPOSITORY / "examples" / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.py)" in readme and f"({name}.ipynb)" in readme for name in NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one in which the examples are run: each finds what the ones before it made."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute or two each, where nothing else runs
def test_the_notebooks_run_one_after_the_other(folder: Path, monkeypatch: pytest.MonkeyPatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    assert Path(sys.executable).exists()
    written = {}
    for script in SCRIPTS:
        notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
        NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}).execute()
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        written[script.stem] = "".join(output.get("text", "") for output in outputs)
    assert "recipe_score" in written["first_model"]
    assert "runs/adapted" in written["fine_tune_and_compare"]
    assert "the soup is the same as alone" in written["serve_and_call"]
    assert written["serve_and_call"].endswith("ended with 0\n")
