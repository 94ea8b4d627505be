"""Augmented on tokens: the ids of the changed text, in prompt and target alike."""

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from toque.config.schema_methods import AugmentationConfig
from toque.cooking.augmentation import edits_of
from toque.cooking.cookbook.recipes import write_cookbook
from toque.cooking.prompts import write_prompt
from toque.cooking.recipe import Recipe, parse_text, to_text
from toque.cooking.schemas.normalize import recipe_of
from toque.cooking.schemas.reader import RecipeReader
from toque.cooking.substitutions import apply_edits, join_words, splice, words_of
from toque.data.tokenizer.codec import Codec, load_codec
from toque.data.tokenizer.tokenizer_training import train_codec
from toque.keyed_random import key_of

ALL = AugmentationConfig(
    prompt_formats=True, instructions=0.7, paraphrase=0.9, substitute=1.0, tips=0.5
)
FOODS = ("2 cups flour", "1 cup walnuts, chopped", "1 teaspoon salt")
STEPS = ("Mix the flour and salt. Add the walnuts; mix.",
         "Bake until a walnut on top is dark (walnuts burn).")  # fmt: skip
SOUP = Recipe("Walnut Bread", FOODS, STEPS)


def both(recipe: Recipe) -> tuple[str, str]:
    return write_prompt(recipe.title, recipe.ingredients), to_text(recipe)


def words(text: str) -> list[str]:
    return text.replace("\n", " \n ").split(" ") if text else []


def augmented(
    prompt: str, target: str, key: int, rules: AugmentationConfig = ALL
) -> tuple[str, str]:
    """On text, the slow and plain way."""
    p, t = [w for w in words(prompt) if w], [w for w in words(target) if w]
    of_prompt, of_target = edits_of(rules, p, t, key=key, is_complete=True)
    return join_words(apply_edits(p, of_prompt)), join_words(apply_edits(t, of_target))


def check(codec: Codec, pairs: Iterator[tuple[str, str]]) -> Counter[str]:
    """Splicing ids against tokenising augmented text."""
    seen = Counter[str]()
    for number, pair in enumerate(pairs):
        prompt, target = map(codec.normalise, pair)
        ids = [np.array(codec.encode(text), np.uint16) for text in (prompt, target)]
        read = [words_of(codec, side) for side in ids]
        key = key_of(number, 1)
        edits = edits_of(ALL, read[0], read[1], key=key, is_complete=True)
        expected = augmented(prompt, target, key)
        for side, own, text in zip(ids, edits, expected, strict=True):
            assert splice(codec, side, own).tolist() == codec.encode(text), text
        seen["changed"] += bool(edits[0] or edits[1])
        seen["examples"] += 1
        seen["swapped"] += any(edit.start > 3 for edit in edits[0])
    return seen


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    path = tmp_path_factory.mktemp("cookbook") / "a.jsonl"
    write_cookbook(path, n=150, seed=2)
    (block,) = RecipeReader().blocks(path)
    return [
        both(r)
        for _, r, _ in RecipeReader().recipes(block, Counter())
        if isinstance(r, Recipe)
    ]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_spliced_ids_are_those_of_the_augmented_text(
    kind: str, cookbook: list[tuple[str, str]]
) -> None:
    codec = train_codec(
        [text for pair in cookbook for text in pair], vocab_size=700, kind=kind
    )  # type: ignore[arg-type]
    seen = check(codec, iter(cookbook))
    assert seen["changed"] > 100
    assert seen["swapped"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "gpt2", "gpt_neox"])
def test_spliced_ids_are_those_of_the_augmented_text_of_real_recipes(
    name: str, shared: Path
) -> None:
    with gzip.open(
        shared / "data/recipes/allrecipes_epicurious_as_is.jsonl.gz"
    ) as file:
        lines = random.Random(1).sample(file.readlines(), 1050)
    recipes = (recipe_of(json.loads(line), Counter()) for line in lines)
    pairs = (both(recipe) for recipe in recipes if isinstance(recipe, Recipe))
    seen = check(load_codec(shared / "tokenizers" / name), pairs)
    assert seen["examples"] >= 1000
    assert seen["changed"] > 800


def test_a_swap_is_made_everywhere_or_not_at_all() -> None:
    rules = AugmentationConfig(substitute=1.0)
    prompt, target = augmented(*both(SOUP), 1, rules)
    assert (
        prompt
        == "Generate recipe for: Pecan Bread using ingredients: flour, pecans, salt"
    )
    assert "walnut" not in target.casefold()
    assert parse_text(target).ingredients[1] == "1 cup pecans, chopped"
    assert (
        parse_text(target).steps[1]
        == "Bake until a pecan on top is dark (pecans burn)."
    )
    for more in (
        "Serve with walnut-flavored cream.",
        "Drizzle with walnut oil.",
        "Or use pecans.",
    ):
        unsafe = Recipe(SOUP.title, SOUP.ingredients, (*SOUP.steps, more))
        kept = augmented(*both(unsafe), 1, rules)
        assert kept == both(unsafe), more


def test_verbs_change_only_where_they_begin_a_sentence_of_the_steps() -> None:
    texts = {
        augmented(*both(SOUP), key, AugmentationConfig(paraphrase=1.0))[1]
        for key in range(40)
    }
    first = {parse_text(text).steps[0] for text in texts}
    assert first == {
        f"{mix} the flour and salt. {add} the walnuts; mix."
        for mix in ("Mix", "Combine", "Stir together")
        for add in ("Add", "Put in")
    }


def test_formats_and_instructions_are_all_met_and_tips_end_a_whole_text() -> None:
    formats = AugmentationConfig(prompt_formats=True)
    prompts = {augmented(*both(SOUP), key, formats)[0] for key in range(99)}
    assert len(prompts) == 8
    assert "Walnut Bread using ingredients: flour, walnuts, salt" in prompts
    others = {
        augmented(*both(SOUP), key, AugmentationConfig(instructions=1.0))[0]
        for key in range(99)
    }
    assert len(others) == 6
    tipped = augmented(*both(SOUP), 3, AugmentationConfig(tips=1.0))[1]
    assert tipped.startswith(both(SOUP)[1] + "\nTip: ")
    cut = [w for w in words(both(SOUP)[1]) if w]
    assert edits_of(
        AugmentationConfig(tips=1.0), [], cut, key=3, is_complete=False
    ) == ([], [])


def test_other_tasks_and_texts_are_left_alone() -> None:
    for target in ("Healthy", "3. Mix the flour.", ""):
        assert (
            augmented("Rate how healthy this recipe is: Walnut Bread", target, 1)[1]
            == target
        )


def test_probabilities_are_those_of_examples() -> None:
    rules = AugmentationConfig(tips=0.25)
    tipped = sum("Tip:" in augmented(*both(SOUP), key, rules)[1] for key in range(2000))
    assert 430 < tipped < 570
