"""Form scores of a generated recipe: four rules, their mean, and ingredient coverage.

Definitions (each score in [0, 1]; a recipe without any ingredient or step scores 0 there):

* ingredient_coherence: well-formatted ingredient lines / all. Well formatted means an item of
  the ingredient section that holds a quantity (number, fraction or words) and names something.
* instruction_quality: steps with a cooking verb / all steps.
* completeness: 0.33 for an ingredient section, 0.33 for an instruction section, 0.34 for a
  length of 100 to 2000 characters.
* format_correctness: 0.5 for an "Ingredients" header, 0.5 for "Instructions" or "Steps".
* overall_quality: the mean of the four.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from toque.cooking.ingredients.names import forms_in_line, has_quantity
from toque.cooking.recipe import ParsedRecipe, parse_text
from toque.cooking.text_keys import words_of

MIN_CHARS = 100
MAX_CHARS = 2000

ACTION_VERBS: frozenset[str] = frozenset(
    """
    add adjust allow apply arrange assemble bake barbecue baste beat blanch blend blitz bloom boil
    braise bread break brine bring broil brown brush build butter can caramelize carve char check
    chill chop clean coat combine continue cook cool core cover cream crack crimp crisp crumble
    crush cube cure cut decorate deglaze devein dice dilute dip discard dissolve distribute divide
    dot drain dredge dress drizzle drop dry dust emulsify enjoy evaporate fill filter finish flake
    flambe flatten flip flour fluff fold form freeze frost fry garnish gather glaze grate grease
    grill grind halve hang heat hold hull incorporate infuse insert invert juice julienne keep
    knead ladle lay layer leave let lift light line loosen lower macerate make marinate mash
    measure melt microwave mince mix moisten mound nestle oil open pack parboil pat peel pierce
    pinch pipe pit place plate poach pop pound pour prepare preheat press prick process proof
    pulse pull punch puree purée push put quarter raise reduce refrigerate reheat remove repeat
    reserve rest return rinse rise roast roll rotate rub salt sauté saute scald scatter scoop score
    scramble scrape scrub seal sear season seed separate serve set shake shape shave shred shuck
    sieve sift simmer skewer skim slice slide smash smoke smooth soak soften spoon spray spread
    sprinkle squeeze stack stand steam steep stew stir strain stretch stuff sweat swirl taste tear
    temper tenderize thaw thicken thin thread tilt tip toast top toss transfer trim truss turn
    twist uncover unmold unroll unwrap use warm wash weigh whip whirl whisk wilt wipe work wrap zest
    """.split()  # noqa: SIM905  # a block of words can be read; a list of 270 strings cannot
)
"""Cooking verbs, in the imperative."""

_WORD = re.compile(r"[^\W\d_]+")
_VOWELS = "aeiou"


def _verb_forms() -> frozenset[str]:
    """Every verb with its -s, -ed and -ing forms, spelling doubled or shortened as English does."""
    forms = set(ACTION_VERBS)
    for verb in ACTION_VERBS:
        root = verb.removesuffix("e")
        if verb.endswith("y") and verb[-2] not in _VOWELS:
            forms |= {verb[:-1] + "ies", verb[:-1] + "ied", verb + "ing"}
            continue
        doubled = len(verb) > 2 and verb[-1] in "bgmnprt" and verb[-2] in _VOWELS
        if doubled and verb[-3] not in _VOWELS:
            forms |= {verb + verb[-1] + "ed", verb + verb[-1] + "ing"}
        forms |= {verb + "s", verb + "es", root + "ed", root + "ing"}
    return frozenset(forms)


VERB_FORMS: frozenset[str] = _verb_forms()
"""Every verb in each of its regular forms."""


def has_action_verb(step: str) -> bool:
    """Whether a step contains one of `ACTION_VERBS`, in any of its regular forms."""
    return any(word[0] in VERB_FORMS for word in _WORD.finditer(step.casefold()))


def _share(items: Sequence[str], good: Sequence[bool]) -> float:
    return sum(good) / len(items) if items else 0.0


def ingredient_coherence(recipe: ParsedRecipe) -> float:
    """Share of ingredient lines that hold a quantity and name something."""
    lines = recipe.ingredients
    return _share(lines, [has_quantity(line) for line in lines])


def instruction_quality(recipe: ParsedRecipe) -> float:
    """Share of steps that hold a cooking verb."""
    return _share(recipe.steps, [has_action_verb(step) for step in recipe.steps])


def completeness(recipe: ParsedRecipe, n_chars: int) -> float:
    """0.33 with ingredients, 0.33 with steps, 0.34 when the text has 100 to 2000 characters."""
    whole = 33 * bool(recipe.ingredients) + 33 * bool(recipe.steps)
    return (whole + 34 * (MIN_CHARS <= n_chars <= MAX_CHARS)) / 100


def format_correctness(recipe: ParsedRecipe) -> float:
    """0.5 for each of the two headers."""
    return 0.5 * recipe.has_ingredients_header + 0.5 * recipe.has_instructions_header


def evaluate_recipe(text: str) -> dict[str, float]:
    r"""All five scores of a recipe's text, title not included.

    >>> evaluate_recipe("Ingredients:\n- 2 eggs\n\nInstructions:\n1. Boil the eggs.")
    ... # doctest: +NORMALIZE_WHITESPACE
    {'ingredient_coherence': 1.0, 'instruction_quality': 1.0, 'completeness': 0.66,
     'format_correctness': 1.0, 'overall_quality': 0.915}
    """
    return evaluate_parsed(parse_text(text), len(text.strip()))


def evaluate_parsed(recipe: ParsedRecipe, n_chars: int) -> dict[str, float]:
    """The same scores of a parsed recipe; `n_chars` is the length of its text."""
    scores = {
        "ingredient_coherence": ingredient_coherence(recipe),
        "instruction_quality": instruction_quality(recipe),
        "completeness": completeness(recipe, n_chars),
        "format_correctness": format_correctness(recipe),
    }
    return scores | {"overall_quality": sum(scores.values()) / 4}


def ingredient_coverage(ingredients: Sequence[str], text: str) -> float:
    """Share of the requested ingredients whose head noun occurs in the text, singular or plural.

    Args:
        ingredients: names or whole ingredient lines, as in the prompt.
        text: the model's output.

    Returns:
        1.0 if none was requested.
    """
    if not ingredients:
        return 1.0
    return share_named(ingredients, text)


def share_named(ingredients: Sequence[str], text: str) -> float:
    """Share of ingredient lines whose head noun occurs in a text; at least one line."""
    words = set(words_of(text))
    return sum(not forms_in_line(line).isdisjoint(words) for line in ingredients) / len(ingredients)
