"""Examples: the notebooks are those of the scripts, and run from the first cell to the last."""

import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
MAKER = runpy.run_path(str(REPOSITORY / "tools" / "make_notebooks.py"))


def test_there_are_some() -> None:
    assert len(SCRIPTS) >= 2


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_notebook_is_made_from_its_script(script: Path, *, regenerate: bool) -> None:
    made = MAKER["notebook"](script.read_text(encoding="utf-8"))
    if regenerate:
        script.with_suffix(".ipynb").write_text(made, encoding="utf-8")
    held = script.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert held == made, "make it with: python tools/make_notebooks.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("default")  # the kernel's own
def test_the_notebooks_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, as a reader would; made shorter by what decides how long they take."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    for script in SCRIPTS:
        text = script.with_suffix(".ipynb").read_text(encoding="utf-8")
        shorter = (
            ("2 minutes", "20 steps"),
            ("n=4000", "n=300"),
            ("100 steps", "4 steps"),
            ("50 steps", "2 steps"),
        )
        for long, short in shorter:
            text = text.replace(long, short)
        run = nbformat.reads(text, as_version=4)
        nbclient.NotebookClient(
            run, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
        printed = [out for cell in run.cells for out in cell.get("outputs", [])]
        assert printed, script.name
