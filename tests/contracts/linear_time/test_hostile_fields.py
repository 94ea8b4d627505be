"""Texts made to take long, through the functions that read strangers' records (fault 55)."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.hostile_texts import HUGE, LARGEST, superlinear
from toque.cooking.ingredients.names import has_quantity, ingredient_name
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.labels.difficulty import estimate_difficulty
from toque.cooking.labels.features import line_facts, read_features
from toque.cooking.labels.nutrition import nutrition_of
from toque.cooking.labels.quality import quality_of
from toque.cooking.recipe import Recipe, parse_text
from toque.cooking.recipe_scores import text_metrics
from toque.cooking.schemas.cleaning import clean_ingredients, clean_steps, clean_title
from toque.cooking.schemas.normalize import recipe_of
from toque.cooking.schemas.reader import RecipeReader
from toque.cooking.schemas.repairs import rejoin_sentences
from toque.cooking.schemas.repetitions import without_repeat
from toque.data.tokenizer.tokenizer_training import train_codec
from toque.errors import DataError
from toque.sources.documents import TextReader
from toque.sources.records import Block

UNITS = (
    "1", "1 ", "1,", "1,000", "1/", "(", "((1 ", "a (", "[", ")", "a", "a ", "A. ", "A.B", "** a",
    "**a ", "__", " ", "\n", "\t", "\n \n", "-", "- ", "--", "• ", ". ", ".", "..", ", ", ",", ";",
    ": ", "&", "&#", "&#1", "&#x1", "&amp;", "<", "<a", "<a ", "< ", "</", "<br", "<p ", "</p>",
    "for the ", "for thh", "let rise ", "1 to ", "1 or 1", "1-", "hours ", "1 h", "1 m", "finely ",
    "large ", "lean ", "or ", "and 1/2 ", "half a ", "plus 1 ", "x 1 ", "fl ", "of ", "salt, ",
    "Step 1", "2. ", "2) ", "Ingredients: ", "ingredients ", "é", "½", "°", "\u200b",
    "\u0301\u0323", "\u0f73", "\ufffd", "\ufffd1", "'", '"', "['", "\\", "c(", "{", "MMMMM",
    "-----", "MMMMM-- a", "----- a ", "Title: ", "*** START OF ", "***", "*** ", "\r", "\x85",
)  # fmt: skip
"""Of U+0301 U+0323 the canonical order is the other one; U+0F73 is made of two marks."""
ENDS = ("", "x")


def on_recipe(label: Callable[[Any], object]) -> Callable[[str], object]:
    return lambda text: label(
        read_features(Recipe(text, (text, "1 egg"), (text, "Boil the egg.")))
    )


def record(text: str) -> object:
    raw = {"title": text, "ingredients": [text], "directions": [text], "tags": text}
    return recipe_of({**raw, "minutes": text}, Counter())


FUNCTIONS: dict[str, Callable[[str], object]] = {
    "clean_title": lambda text: clean_title(text, Counter()),
    "clean_ingredients": lambda text: clean_ingredients([text], Counter()),
    "clean_steps": lambda text: clean_steps([text], Counter()),
    "many steps": lambda text: clean_steps(text.split(" "), Counter()),
    "rejoin_sentences": lambda text: rejoin_sentences(
        ["A.", *text.split(" ")], Counter()
    ),
    "without_repeat": lambda text: without_repeat(text.split(" "), Counter()),
    "recipe_of": record,
    "parse_line": parse_line.__wrapped__,
    "ingredient_name": ingredient_name.__wrapped__,
    "has_quantity": has_quantity.__wrapped__,
    "line_facts": line_facts.__wrapped__,
    "quality": on_recipe(quality_of),
    "difficulty": on_recipe(estimate_difficulty),
    "nutrition": on_recipe(nutrition_of),
    "parse_text": parse_text,
    "scores of a text": lambda text: text_metrics(
        "Generate recipe for: Egg using ingredients: egg",
        f"Ingredients:\n- 1 {text}\n\nSteps:\n{text}",
    ),
    "plain text": lambda text: TextReader().examples(
        Block(0, "f", 1, text.encode("utf-8", "replace"))
    ),
}


def slow_growth(
    work: Callable[[str], object], unit: str, end: str = "", *, largest: int = LARGEST
) -> str:
    def text_of(size: int) -> str:
        return unit * (size // len(unit)) + end

    return superlinear(work, text_of, largest=largest, noise_seconds=0.02)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fault_55_every_field_takes_linear_time(name: str) -> None:
    work = FUNCTIONS[name]
    assert [
        g for unit in UNITS for end in ENDS if (g := slow_growth(work, unit, end))
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_fault_55_every_field_takes_linear_time_when_it_is_long(name: str) -> None:
    work = FUNCTIONS[name]
    assert [g for unit in UNITS if (g := slow_growth(work, unit, largest=HUGE))] == []


def page(text: str) -> str:
    node = {
        "@type": "Recipe",
        "name": text,
        "recipeIngredient": [text],
        "recipeInstructions": text,
    }
    return (
        f"<html><script type='application/ld+json'>{json.dumps(node)}</script>"
        f"<div>{text}</div></html>"
    )


LINES = (
    "\n a", "\n\n", "\n1 x", "<li>", "<!--", "<script", "</script>", "<style ",
    "application/ld+json", "<script type=", "<meta ", '<a "', "<a ' ", "<meta charset",
    ',"a":[', '{"', '["a",', "[[",
)  # fmt: skip
FILES: dict[str, Callable[[str], str]] = {
    "page": page,
    "JSON lines": lambda text: (
        json.dumps({"title": "a", "ingredients": text, "directions": text})
        + "\n"
        + text
    ),
    "JSON": lambda text: (
        "["
        + json.dumps({"title": "a", "ingredients": [text], "steps": text})
        + ","
        + text
    ),
    "object": lambda text: (
        "{" + text + '"title": "a", "ingredients": "b", "steps": "c"}'
    ),
    "table": lambda text: f'title,ingredients,steps\na,b,c\n"{text}",b,c\n{text}\n',
    "printed lists": lambda text: (
        f"title\tingredients\tsteps\na\t[{text}\tc({text})\n".replace("\n\n", "")
    ),
}


def read_whole(path: Path, text: str) -> None:
    path.write_text(text, errors="replace")
    reader = RecipeReader()
    try:
        for block in reader.blocks(path):
            reader.examples(block)
    except DataError:
        return


@pytest.mark.parametrize("form", FILES)
def test_fault_55_every_file_takes_linear_time(form: str, tmp_path: Path) -> None:
    def work(text: str) -> None:
        read_whole(tmp_path / "file", FILES[form](text))

    assert [g for unit in (*UNITS, *LINES) if (g := slow_growth(work, unit))] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)  # 104 texts, some eight seconds each
@pytest.mark.parametrize("form", FILES)
def test_fault_55_every_file_takes_linear_time_when_it_is_long(
    form: str, tmp_path: Path
) -> None:
    def work(text: str) -> None:
        read_whole(tmp_path / "file", FILES[form](text))

    assert [
        g for u in (*UNITS, *LINES) if (g := slow_growth(work, u, largest=HUGE))
    ] == []


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_fault_55_a_word_of_a_megabyte_is_cut_where_a_tokenizer_learns(
    kind: Any,
) -> None:
    words = ["hello world of recipes and more words"] * 50
    long = [
        "a" * (1 << 20),
        "é" * 2000,
        "\xa0" * (1 << 20),
    ]  # the last are blanks to Python
    codec = train_codec([*words, *long], vocab_size=400, kind=kind)
    assert codec.settings["toque_words_cut"] == 3
    assert (
        "toque_words_cut" not in train_codec(words, vocab_size=400, kind=kind).settings
    )
