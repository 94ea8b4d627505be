"""Free requests: the dish and the ingredients in what a person types, however it is worded."""

from __future__ import annotations

import re
from typing import Final

_POLITE: Final = r"(?:please |can you |could you |would you |will you |kindly ){0,4}"
_VERB: Final = (
    r"(?:create|make|write|generate|cook|prepare|bake|give|show|suggest|invent|design|tell|find)"
)
_FOR_WHOM: Final = r"(?: me| us)?"
_WISH: Final = r"i(?: want| need| would like|'d like)(?: to (?:make|cook|bake|prepare|eat|have))?"
_ARTICLE: Final = r"(?:an?|the|some)"
_DETAIL: Final = r"(?:(?:simple|detailed|good|easy|quick|complete|full|new) ){0,4}"
_OPENINGS: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # "Write me a detailed recipe for pancakes", "Recipe: pancakes"
        (
            rf"{_POLITE}(?:(?:{_VERB}{_FOR_WHOM}|{_WISH}|what is) )?(?:{_ARTICLE} )?{_DETAIL}"
            rf"recipe(?: for:?|:)(?: {_ARTICLE})? (?P<dish>.+)"
        ),
        r"(?:make a dish with|cooking instructions): (?P<dish>.+)",
        # "How do I make pancakes", "Tell me how to cook a simple pasta dish"
        (
            rf"{_POLITE}(?:tell{_FOR_WHOM} |show{_FOR_WHOM} )?how (?:do (?:i|you|we)|to|can i) "
            rf"(?:make|cook|bake|prepare)(?: {_ARTICLE})?:? (?P<dish>.+)"
        ),
        # "Create a simple pasta dish". Without an article it may be a name: "Make-Ahead Lasagna"
        rf"{_POLITE}(?:{_VERB}{_FOR_WHOM}|{_WISH}) {_ARTICLE} (?P<dish>.+)",
        rf"(?:please |(?:can|could|would|will) you ){_POLITE}{_VERB}{_FOR_WHOM} (?P<dish>.+)",
        rf"{_WISH} (?P<dish>.+)",
    )
)
_END: Final = " .!?"
_SENTENCE: Final = re.compile(r"[.!?] ")


def dish_and_foods(request: str) -> tuple[str, tuple[str, ...]]:
    """The dish a person asks for, and the ingredients after a colon.

    What is not understood as a request is the name of a dish.

    >>> dish_and_foods("Create a simple pasta dish"), dish_and_foods("Make a healthy breakfast!")
    (('simple pasta dish', ()), ('healthy breakfast', ()))
    >>> dish_and_foods("Give me a recipe for lentil soup: lentils, cumin")
    ('lentil soup', ('lentils', 'cumin'))
    >>> dish_and_foods("Make-Ahead Lasagna")
    ('Make-Ahead Lasagna', ())
    """
    words = " ".join(request.split())
    found = next(filter(None, (opening.fullmatch(words) for opening in _OPENINGS)), None)
    words = request.strip() if found is None else found["dish"].rstrip(_END)
    title, _, listed = words.partition(":")
    if found is not None:
        title = _SENTENCE.split(title)[0]  # "How do I make pancakes? I have eggs."
    foods = tuple(food.strip() for food in listed.split(",") if food.strip())
    return title.strip(), foods
