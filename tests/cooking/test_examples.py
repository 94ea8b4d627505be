"""What a recipe is turned into, task by task, and through `prepare`."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from toque.config.field_types import TaskName
from toque.cooking.examples import UNCLEAN_NAMES, examples_of
from toque.cooking.labels.origins import CUISINES, cuisine_of
from toque.cooking.prompts import CLASSES, REQUESTS, TASKS, asks_for_a_recipe
from toque.cooking.recipe import Recipe, to_text
from toque.cooking.schemas.reader import RecipeReader
from toque.data.prepare.data_report import Report
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError, DataError
from toque.sources.records import Source

STEPS = tuple(f"Stir pot number {n} with a long spoon." for n in range(1, 8))
SOUP = Recipe(
    "Pea Soup",
    ("2 cups frozen peas", "4 cups vegetable broth", "1 teaspoon salt"),
    STEPS,
    tags=("dinner", "Italian"),
    difficulty="hard",
    nutrition_class="Healthy",
)
READER = RecipeReader()


def asked(task: str, recipe: Recipe = SOUP) -> tuple[str, str] | None:
    found = examples_of(recipe, Counter(), (task,))  # type: ignore[arg-type]
    return None if isinstance(found, str) else (found[0].prompt, found[0].target)


def test_the_configuration_knows_the_same_tasks() -> None:
    assert get_args(TaskName) == TASKS


@pytest.mark.parametrize(
    ("task", "answer"),
    [("nutrition", "Healthy"), ("difficulty", "hard"), ("cuisine", "Italian")],
)
def test_a_class_is_asked_for_with_what_tells_it(task: str, answer: str) -> None:
    prompt, target = asked(task) or ("", "")
    assert target == answer
    assert answer in CLASSES[task]  # type: ignore[index]
    assert "Pea Soup" in prompt
    assert ("2 cups frozen peas" in prompt) == (task == "nutrition")
    assert (STEPS[-1] in prompt) == (task == "difficulty")


def test_the_next_step_follows_the_steps_shown() -> None:
    prompt, target = asked("next_step") or ("", "")
    number, _, step = target.partition(". ")
    at = int(number) - 1
    assert STEPS[at] == step
    assert STEPS[at] not in prompt
    assert prompt.endswith(f"{at}. {STEPS[at - 1]}")
    assert sum(other in prompt for other in STEPS) == min(3, at)
    assert (
        asked("next_step", Recipe("Toast", ("bread",), ("Toast the bread.",))) is None
    )


def test_a_request_is_in_plain_words_and_says_only_what_is_known() -> None:
    prompts = set()
    for n in range(60):
        prompt, target = asked("request", replace(SOUP, title=f"Soup {n}")) or ("", "")
        assert asks_for_a_recipe(prompt)
        assert "{" not in prompt
        assert "people" not in prompt  # nobody said for how many
        prompts.add(prompt.replace(str(n), ""))
    assert len(prompts) == len(REQUESTS) - 2
    assert target == to_text(Recipe("Soup", SOUP.ingredients, SOUP.steps))


def test_the_title_is_not_in_its_own_question() -> None:
    prompt, target = asked("title") or ("", "")
    assert target == "Pea Soup"
    assert "Pea Soup" not in prompt


def test_cuisines_are_those_the_tags_name_and_only_one() -> None:
    assert cuisine_of(["Quick & Easy", "Dinner"]) is None
    assert cuisine_of(["Middle-Eastern", "vegan"]) == CUISINES.index("Middle Eastern")
    assert cuisine_of(["Italian", "French"]) is None
    assert cuisine_of(["Cuban", "Caribbean"]) == CUISINES.index("Caribbean")


def written(path: Path, *, cuisine: bool, n: int = 12) -> Path:
    lines = [
        {
            "title": f"{food} pot {i}",
            "ingredients": [f"{i + 1} cups {food}", "1 lemon", "salt"],
            "directions": [
                f"Rinse the {food} {i} times.",
                "Simmer until soft, then serve warm.",
            ],
        }
        | ({"cuisine": "Thai" if i % 2 else "French"} if cuisine and i % 3 else {})
        for i in range(n)
        for food in ("lentils", "rice")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def stored(tmp_path: Path, source: Path, *tasks: str) -> TokenStore:
    settings = PrepareSettings(
        family_kind="decoder", tokenizer="trained:512", max_prompt_tokens=128,
        max_target_tokens=128, validation_fraction=0.3, tasks=tasks,
    )  # fmt: skip
    return prepare(
        [Source(str(source), READER)], store=tmp_path / "s", settings=settings
    ).store


def test_tasks_of_a_record_lie_side_by_side_and_never_straddle_the_split(
    tmp_path: Path,
) -> None:
    store = stored(
        tmp_path, written(tmp_path / "a.jsonl", cuisine=True), "cuisine", "write"
    )
    numbers, split = store.column("task"), store.split
    starts = store.column("starts_record").astype(bool)
    assert sorted(Counter(numbers.tolist()).items()) == [
        (0, 24),
        (TASKS.index("cuisine"), 16),
    ]
    assert int(starts.sum()) == store.manifest.records.kept == 24
    record = np.cumsum(starts)
    for one in range(1, 25):
        assert len(set(split[record == one].tolist())) == 1
    answers = {
        store.codec().decode(store.target(i))
        for i in np.flatnonzero(numbers == 4).tolist()
    }
    assert answers == {"Thai", "French"}


def test_neighbours_of_one_body_and_of_two_tasks_are_two_records(
    tmp_path: Path,
) -> None:
    """Their tasks rise as those of one record do: any file with them once had "wrong counts"."""
    source = written(tmp_path / "a.jsonl", cuisine=True)
    pie = {"title": "Zorblax Pie", "ingredients": ["1 zorblax"], "directions": [*STEPS]}
    figures = {"calories": "300 kcal", "fatContent": "10 g", "sugarContent": "5 g"}
    with source.open("a") as file:
        for more in ({"nutrition": figures}, {"cuisine": "Thai"}):
            file.write(json.dumps(pie | more) + "\n")
    report = Report.read_from(stored(tmp_path, source, "nutrition", "cuisine").path)
    assert report is not None
    assert report.dropped.get("duplicate", 0) == 0  # each has what the other lacks
    assert report.notes["examples of the task cuisine"] == 17


def test_a_task_without_any_label_is_refused_with_what_is_missing(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        DataError, match=r"has cuisine, but none of the 24 .*no field cuisine"
    ):
        stored(
            tmp_path, written(tmp_path / "a.jsonl", cuisine=False), "write", "cuisine"
        )


def test_records_without_the_label_are_counted_and_no_bad_records(
    tmp_path: Path,
) -> None:
    lines = written(tmp_path / "a.jsonl", cuisine=True).read_text().splitlines()
    few = [line for i, line in enumerate(lines) if "cuisine" not in line or i < 6]
    (tmp_path / "a.jsonl").write_text("\n".join(few))
    store = stored(tmp_path, tmp_path / "a.jsonl", "cuisine")
    assert store.manifest.dropped == {"no label for cuisine": 8}
    assert store.manifest.examples == 4


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown tasks: bake\. Allowed: write"):
        stored(tmp_path, written(tmp_path / "a.jsonl", cuisine=False), "bake")


def test_a_prompt_leaves_out_names_that_are_not_only_a_food() -> None:
    line = "Other common seasonings may include cayenne pepper"
    recipe = replace(SOUP, ingredients=(*SOUP.ingredients, line))
    notes: Counter[str] = Counter()
    found = examples_of(recipe, notes)
    assert not isinstance(found, str)
    assert found[0].prompt == (asked("write") or ("", ""))[0]
    assert line in found[0].target
    assert notes[UNCLEAN_NAMES] == 1
