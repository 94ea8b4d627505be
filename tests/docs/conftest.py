"""One folder as the pages have it, made once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.kitchens import tiny_config
from fixtures.pages import blocks
from toque.cli import main
from toque.config.dump import to_yaml
from toque.cooking.cookbook.recipes import write_cookbook

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`--strict` fails on a broken link or anchor, and on a page that the navigation forgot.

    Not with `--quiet`, which hides the warnings that it counts.
    """
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=REPOSITORY, env=quiet, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="session")
def untouched_kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the pages have it: recipes, my.yaml, stores/my, runs/my; to be copied."""
    folder = tmp_path_factory.mktemp("kitchen")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_cookbook(folder / "my-recipes.jsonl.gz", n=60, seed=3)
        sources = {"sources": [{"path": "my-recipes.jsonl.gz"}], "store": "stores/my"}
        data = {
            **sources,
            "tasks": ["write", "nutrition", "difficulty", "next_step", "title"],
        }
        mine = tiny_config(run_dir="runs/my", data=data, evaluation={"generate": 1})
        (folder / "my.yaml").write_text(to_yaml(mine))
        for name, page in (
            ("mymodule", "evaluate-and-compare.md"),
            ("mywatch", "callbacks-and-trackers.md"),
        ):
            own = [block.text for block in blocks("python") if block.page.name == page]
            (folder / f"{name}.py").write_text("\n".join(own))
        assert main(["prepare", "my.yaml"]) == 0
        assert main(["train", "my.yaml"]) == 0
    return folder


@pytest.fixture(scope="module")
def kitchen(untouched_kitchen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it to work in."""
    return Path(
        shutil.copytree(untouched_kitchen, tmp_path_factory.mktemp("docs") / "kitchen")
    )
