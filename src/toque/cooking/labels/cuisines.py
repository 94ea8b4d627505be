"""Cuisine labels, from a recipe's own tags; nothing is guessed from its ingredients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_NAMED: Final = {
    "African": "north african; south african; ethiopian; nigerian; west african",
    "American": "u.s.; us; usa; southwestern; tex mex; southern; north american",
    "Australian": "australian and new zealander; new zealand",
    "Cajun": "creole; cajun/creole; cajun creole",
    "Canadian": "",
    "Caribbean": "cuban; jamaican; puerto rican",
    "Chinese": "szechuan; cantonese",
    "Eastern European": "polish; russian; hungarian; czech; ukrainian; eastern european/russian",
    "French": "",
    "German": "austrian; swiss",
    "Greek": "",
    "Indian": "pakistani; south asian",
    "Irish and British": "irish; british; english; scottish; welsh",
    "Italian": "",
    "Japanese": "",
    "Korean": "",
    "Latin American": "south american; central american; brazilian; peruvian; latin; argentinian",
    "Mexican": "",
    "Middle Eastern": "lebanese; israeli; persian; turkish; iranian",
    "Moroccan": "",
    "Scandinavian": "swedish; norwegian; danish; finnish; nordic",
    "Spanish": "portuguese; spanish/portuguese",
    "Thai": "",
    "Vietnamese": "",
}
CUISINES: Final[tuple[str, ...]] = tuple(_NAMED)
"""The classes of the task `cuisine`, in the order of the column's codes."""

_CODES: Final = {
    name.casefold(): code
    for code, (cuisine, others) in enumerate(_NAMED.items())
    for name in (cuisine, *others.split("; "))
    if name
}


def cuisine_of(tags: Iterable[str]) -> int | None:
    """The code of the cuisine that `tags` name; None if they name none or several.

    >>> CUISINES[cuisine_of(["dinner", "Italian"])], cuisine_of(["thai", "french"])
    ('Italian', None)
    """
    names = {tag.casefold().replace("-", " ").strip().removesuffix(" diet") for tag in tags}
    found = {_CODES[name] for name in names if name in _CODES}
    return found.pop() if len(found) == 1 else None
