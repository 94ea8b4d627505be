import gzip
import json
import random
from pathlib import Path

import pytest

Pairs = tuple[list[str], list[str]]


def text_of(ingredients: list[str], steps: list[str]) -> str:
    listed = "\n".join(f"- {line}" for line in ingredients)
    numbered = "\n".join(f"{n}. {step}" for n, step in enumerate(steps, start=1))
    return f"Ingredients:\n{listed}\n\nInstructions:\n{numbered}"


@pytest.fixture(scope="session")
def real_pairs(shared: Path) -> Pairs:
    """1,000 predictions and references: a recipe with words and lines changed, or another one."""
    rng, recipes = random.Random(5), []
    source = shared / "data" / "recipes" / "allrecipes_epicurious_as_is.jsonl.gz"
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["ingredients"] and record["directions"]:
                recipes.append((record["ingredients"], record["directions"]))
            if len(recipes) == 2000:
                break
    words = [
        word for _, steps in recipes[:300] for step in steps for word in step.split()
    ]

    def changed(line: str) -> str:
        kept = [word for word in line.split() if rng.random() > 0.1]
        return " ".join(
            rng.choice(words) if rng.random() < 0.12 else word for word in kept
        )

    predictions, references = [], []
    for (ingredients, steps), other in zip(recipes[:1000], recipes[1000:], strict=True):
        references.append(text_of(ingredients, steps))
        lines = [changed(line) for line in ingredients if rng.random() > 0.1]
        new = text_of(lines, [changed(step) for step in steps if rng.random() > 0.1])
        predictions.append(text_of(*other) if rng.random() < 0.3 else new)
    return predictions, references
