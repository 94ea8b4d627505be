"""Examples: the notebooks are those of the scripts, and run from the first cell to the last."""

import json
import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
ALONE = EXAMPLES / "4_own_rows.py"
"""The one that installs Toque and needs none of the others."""
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
def test_the_notebooks_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one folder, as a reader would; made shorter by what decides how long they take."""
    nbclient, nbformat = (
        pytest.importorskip("nbclient"),
        pytest.importorskip("nbformat"),
    )
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    for script in SCRIPTS:
        if script == ALONE:
            continue
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


@pytest.mark.slow
def test_the_notebook_for_an_empty_machine_runs_without_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells in their order, with a few updates; no Jupyter is needed."""
    cells = json.loads(ALONE.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (installs,) = [cell for cell in code if '"pip", "install"' in cell]
    assert installs == code[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in code[1:]:
        exec(cell.replace("3 minutes", "4 steps"), names)  # noqa: S102
    printed = capsys.readouterr().out
    for words in (
        "96 rows to train on, 24 held out",
        "4 updates",
        "of 24 answers",
        "compared",
    ):
        assert words in printed
    assert (tmp_path / "work" / "kitchen-exported" / "model.safetensors").is_file()
