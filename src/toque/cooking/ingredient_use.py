"""Scores of how the steps of a recipe use its ingredients. Each is in [0, 1], and 1 is best.

A score that counts mistakes is 1 / (1 + mistakes).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from toque.cooking.ingredients.names import head_of_line, ingredient_name, stem
from toque.cooking.ingredients.vocabulary import ADJECTIVES
from toque.cooking.labels.foods import find_food
from toque.cooking.normalised_words import words_of
from toque.cooking.recipe import ParsedRecipe

_OTHER_WORDS: Final = frozenset(
    """
    all baby bottle brown can container cup extra fat fine free freshly good half halves jar kosher
    low mix of package piece purpose pure purple quality sea semisweet style table taste the to
    virgin with
    """.split()  # noqa: SIM905
)
_DESCRIBING: Final = frozenset(map(stem, ADJECTIVES | _OTHER_WORDS))
"""Stems of words in the name of an ingredient that do not identify it."""
_ADDING: Final = frozenset(
    """
    add arrange beat blend brush coat combine cook cream crumble dissolve dot dredge drizzle dust
    fold fry garnish grate heat incorporate layer melt mix place pour put rub scatter season sift
    spoon spread sprinkle squeeze stir top toss whisk
    """.split()  # noqa: SIM905
)
_ADDING_WITH: Final = frozenset(
    "brush coat cover dot drizzle dust fill garnish rub season sprinkle stuff top".split()  # noqa: SIM905
)
"""Verbs with the added food after "with": "sprinkle the fish with salt"."""
_PREPOSITIONS: Final = frozenset(
    "as at for from in into on onto over so through to until while within".split()  # noqa: SIM905
)
_MIXTURES: Final = frozenset(
    """
    batter cubes dough dressing filling halves liquid marinade mix mixture pieces sauce slice slices
    """.split()  # noqa: SIM905
)
"""Words after the name of a food that has been added: "the flour mixture"."""
_ADDED_AGAIN: Final = re.compile(
    r"\d|\b(?:remaining|half|halves|rest|reserved|more|additional|some|another|other|extra|third"
    r"|each|enough|needed|divided|alternat\w+|again|desired|taste|serve|garnish|tops?|few|part"
    r"|repeat)\b",
    re.IGNORECASE,
)
"""Words in a sentence that may add another part of an ingredient."""
_OFTEN_ADDED: Final = frozenset({"salt", "pepper", "water"})
_ITEM_END: Final = re.compile(r",|\band\b|\bor\b")
_SENTENCE: Final = re.compile(r"(?<=[.!?;])\s+")
_ENOUGH_WORDS: Final = 4.0
"""Words of the steps per ingredient. 95 % of 68,004 recipes have more."""


class _Ingredient(NamedTuple):
    """Stems by which steps may name an ingredient."""

    stems: frozenset[str]
    head: str


@lru_cache(maxsize=1 << 16)
def _ingredient(line: str) -> _Ingredient:
    name, head = ingredient_name(line), head_of_line(line)
    stems = {stem(word) for word in words_of(name) if len(word) > 2} - _DESCRIBING
    food = find_food(name)
    if food is not None:  # the step "cook the pasta" uses "spaghetti"
        stems.add(stem(food.name.rpartition(" ")[2]))
    return _Ingredient(frozenset(stems | {head} if head else stems), head)


def sentences_of(recipe: ParsedRecipe) -> list[str]:
    """Split the steps of a recipe into sentences."""
    parts = [part for step in recipe.steps for part in _SENTENCE.split(step)]
    return [part for part in parts if part.strip()]


def ingredients_named(recipe: ParsedRecipe) -> float | None:
    """Compute the fraction of ingredients that a step names, or None without ingredients.

    Unlike `ingredients_used`, a phrase such as "mix everything" names nothing.
    """
    if not recipe.ingredients:
        return None
    return 1.0 - len(unnamed_ingredients(recipe)) / len(recipe.ingredients)


def unnamed_ingredients(recipe: ParsedRecipe) -> list[str]:
    """List the ingredients that no step names by its head noun or by a word of its own."""
    in_steps = {stem(word) for step in recipe.steps for word in words_of(step)}
    ingredients = [_ingredient(line) for line in recipe.ingredients]
    n_lines = Counter(word for ingredient in ingredients for word in ingredient.stems)
    unnamed = []
    for line, ingredient in zip(recipe.ingredients, ingredients, strict=True):
        own = {word for word in ingredient.stems if n_lines[word] == 1}
        if in_steps.isdisjoint(own | {ingredient.head}):
            unnamed.append(line)
    return unnamed


def added_once(recipe: ParsedRecipe) -> float | None:
    """Score ingredients that are added twice, or None without steps."""
    return 1.0 / (1.0 + len(added_twice(recipe))) if recipe.steps else None


def added_twice(recipe: ParsedRecipe) -> list[str]:
    """List the ingredients that are added twice, although the recipe lists them once.

    Two sentences add them, or one sentence names them twice in a row of items. A sentence with a
    number, or a word such as "remaining", may add another part.
    """
    ingredients = [_ingredient(line) for line in recipe.ingredients]
    n_with_head = Counter(ingredient.head for ingredient in ingredients)
    n_added: Counter[int] = Counter()
    twice: set[int] = set()
    for sentence in sentences_of(recipe):
        added = _added(words_of(sentence), ingredients)
        if not _ADDED_AGAIN.search(sentence):
            for number in added:
                head = ingredients[number].head
                if head not in _OFTEN_ADDED and n_added[number] >= n_with_head[head]:
                    twice.add(number)
        n_added.update(added)
        twice |= _repeated_items(sentence, ingredients)
    return [recipe.ingredients[number] for number in sorted(twice)]


def _added(words: Sequence[str], ingredients: Sequence[_Ingredient]) -> set[int]:
    """Return the numbers of the ingredients that a sentence adds."""
    added: set[int] = set()
    for at in _objects(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        if following in _MIXTURES:
            continue
        number = _named_at(words, at, ingredients)
        if number is not None:
            added.add(number)
    return added


def _repeated_items(sentence: str, ingredients: Sequence[_Ingredient]) -> set[int]:
    """Return the numbers of the ingredients that are two items of a sentence: "egg, oil, egg"."""
    n_items: Counter[int] = Counter()
    for item in _ITEM_END.split(sentence):
        words = words_of(item)
        if words and words[-1] not in _MIXTURES:
            number = _named_at(words, len(words) - 1, ingredients)
            if number is not None and words[-1] not in _OFTEN_ADDED:
                n_items[number] += 1
    return {number for number, count in n_items.items() if count > 1}


def _objects(words: Sequence[str]) -> Iterator[int]:
    """Yield the positions of words that are objects of a verb in `_ADDING`."""
    verb, is_object, is_after_with = "", False, False
    for at, word in enumerate(words):
        if word in _ADDING and (not verb or words[at - 1] in ("and", "then")):
            verb, is_object, is_after_with = word, True, False
        elif word == "with":
            is_object, is_after_with = bool(verb), True
        elif word in _PREPOSITIONS and words[at - 1] != verb:
            is_object = False
        elif is_object and (is_after_with or not _has_with(verb, words[at:])):
            yield at


def _has_with(verb: str, words: Sequence[str]) -> bool:
    """Check whether the food that a verb adds comes after "with"."""
    return verb in _ADDING_WITH and "with" in words


def _named_at(
    words: Sequence[str], at: int, ingredients: Sequence[_Ingredient]
) -> int | None:
    """Return the number of the ingredient that a word names, or None."""
    word = stem(words[at])
    before = stem(words[at - 1]) if at else ""
    after = stem(words[at + 1]) if at + 1 < len(words) else ""
    best, best_rank = None, -1
    for number, ingredient in enumerate(ingredients):
        if word in ingredient.stems:
            # "chicken broth" names the broth, and "brown sugar" the brown one.
            rank = 4 * (after == ingredient.head) + 2 * (before in ingredient.stems)
            rank += word == ingredient.head
            if rank > best_rank:
                best, best_rank = number, rank
    return best


def requested_listed(requested: Sequence[str], recipe: ParsedRecipe) -> float | None:
    """Compute how much of each requested name a line of the list repeats, on average.

    None without requested ingredients. "Chicken oil" repeats half of "chicken broth".
    """
    if not requested:
        return None
    lines = [{stem(word) for word in words_of(line)} for line in recipe.ingredients]
    shares = []
    for name in requested:
        stems = {stem(word) for word in words_of(name)}
        words = stems - _DESCRIBING or stems
        best = max((len(words & line) for line in lines), default=0)
        shares.append(best / len(words) if words else 1.0)
    return sum(shares) / len(shares)


def steps_detailed(recipe: ParsedRecipe) -> float | None:
    """Score the words of the steps per ingredient: 1 from `_ENOUGH_WORDS`.

    A single step that names all ingredients has too few. None without ingredients.
    """
    if not recipe.ingredients:
        return None
    n_words = sum(len(words_of(step)) for step in recipe.steps)
    return min(1.0, n_words / len(recipe.ingredients) / _ENOUGH_WORDS)
