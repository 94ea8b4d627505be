"""Small tokenizers learnt once, and a source of our own."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from toque.data import sources
from toque.data.learn import train_codec
from toque.data.settings import PrepareSettings

LINE = "stir the soup and add salt pepper flour butter sugar 2 eggs cups of milk until smooth warm"
WORDS = LINE.split()
# `line_reader` and `store_checks` by name, here and (spawn hands on sys.path) in the workers.
sys.path.append(str(Path(__file__).parent))


def recipe_text(rng: random.Random) -> str:
    items = "\n".join(f"- {' '.join(rng.choices(WORDS, k=3))}" for _ in range(3))
    steps = "\n".join(f"{i}. {' '.join(rng.choices(WORDS, k=8))}." for i in (1, 2))
    return f"Ingredients:\n{items}\n\nInstructions:\n{steps}"


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few records a shard, so that there are several."""
    monkeypatch.setattr(sources, "GROUP_BYTES", 2000)


@pytest.fixture(scope="session")
def tokenizers_at(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a learnt tokenizer by family kind."""
    rng = random.Random(0)
    texts = [recipe_text(rng) for _ in range(200)]
    folders = {}
    for family, kind in (("decoder", "bpe"), ("encoder-decoder", "unigram")):
        folders[family] = tmp_path_factory.mktemp("tokenizers") / kind
        train_codec(texts, vocab_size=400, kind=kind).save(folders[family])
    return folders


@pytest.fixture
def settings_for(tokenizers_at: dict[str, Path]) -> Callable[..., PrepareSettings]:
    def make(family_kind: str = "decoder", **changes: object) -> PrepareSettings:
        base = {
            "family_kind": family_kind,
            "tokenizer": str(tokenizers_at[family_kind]),
            "max_prompt_tokens": 40,
            "max_target_tokens": 400,
            "validation_fraction": 0.2,
        }
        return PrepareSettings(**(base | changes))

    return make


@pytest.fixture
def lines_file(tmp_path: Path) -> Path:
    """Thirty distinct records, one duplicate and two lines that are no JSON."""
    rng = random.Random(1)
    records = [
        {"id": i, "prompt": f"Dish {i}", "target": recipe_text(rng), "quality": i / 30}
        for i in range(30)
    ]
    lines = [json.dumps(record) for record in records]
    lines.insert(7, "{broken")
    lines.insert(20, lines[3])
    lines.append("nonsense")
    path = tmp_path / "recipes.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path
