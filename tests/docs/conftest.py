"""One folder as the pages have it, made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fixtures.pages import blocks
from toque.cli import main
from toque.cooking.cookbook.recipes import write_cookbook

MY_YAML = """
run_dir: runs/mine
model: {family: gpt2, tokenizer: "trained:512",
  shape: {n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512}}
data: {sources: [{path: my-recipes.jsonl.gz}], store: stores/mine, max_prompt_tokens: 64,
  max_target_tokens: 256, tasks: [write, nutrition, difficulty]}
optim: {warmup: "1 steps"}
train: {stop_after: "3 steps", batch: "1024 tokens", precision: float32}
evaluation: {max_examples: 4, generate: 1}
"""


@pytest.fixture(scope="session")
def untouched_kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the pages have it: recipes, my.yaml, stores/mine, runs/mine; to be copied."""
    folder = tmp_path_factory.mktemp("kitchen")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_cookbook(folder / "my-recipes.jsonl.gz", n=60, seed=3)
        (folder / "my.yaml").write_text(MY_YAML)
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
    return Path(shutil.copytree(untouched_kitchen, tmp_path_factory.mktemp("docs") / "kitchen"))
