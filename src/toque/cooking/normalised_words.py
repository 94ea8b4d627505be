"""Normalised words of recipe texts, keys for finding duplicates, and cooking verbs."""

from __future__ import annotations

import re
import string
from collections.abc import Hashable, Iterable, Sequence

_LETTERS = bytes(
    ord(chr(code).lower()) if chr(code) in string.ascii_letters else 32
    for code in range(256)
)
"""Translation table for ASCII: letters to lower case, other characters to spaces."""
_LOWER = bytes(code + 32 if 65 <= code <= 90 else code for code in range(256))
_NOT_ALPHANUMERIC = bytes(
    code for code in range(128) if chr(code) not in string.ascii_letters + string.digits
)
_SIGNS = re.compile("[°½¼¾⅓⅔⅛⅜⅝⅞⅙⅚⅕⅖⅗⅘–—‑’‘“”®™©…×•·⁄\u00a0´″]")
_WORD = re.compile(r"[^\W\d_]+")
_FOREIGN = re.compile(r"[^\x00-\x7f]+")
_PARTING = re.compile(
    r"\b(?:with|and|in|on|over|of|for|from)\b|[&,:;(/-]", re.IGNORECASE
)


def words_of(text: str) -> list[str]:
    """Split a text into words in lower case. Numbers and fractions are left out."""
    if text.isascii():  # faster than a pattern, and most texts are ASCII
        return text.encode().translate(_LETTERS).decode().split()
    return _WORD.findall(_SIGNS.sub(" ", text).lower())


def duplicate_key(text: str) -> bytes:
    """Compute a key for finding duplicates: the case-folded letters and digits in UTF-8.

    >>> duplicate_key("1½ Cups -- Crème!").decode()
    '1½cupscrème'
    """
    if not text.isascii():
        text = _FOREIGN.sub(
            lambda match: "".join(filter(str.isalnum, match[0])), text.casefold()
        )
    return text.encode().translate(_LOWER, _NOT_ALPHANUMERIC)


def parts_of_title(title: str) -> list[str]:
    """Split a title at words such as "with" and "in". The first part names the dish.

    >>> parts_of_title("Soup of Beans")
    ['Soup ', ' Beans']
    """
    return _PARTING.split(title)


def share_true(values: Iterable[bool]) -> float:
    """Compute the fraction of true values, or 0.0 without values."""
    verdicts = list(values)
    return sum(verdicts) / len(verdicts) if verdicts else 0.0


def share_distinct(items: Sequence[Hashable]) -> float:
    """Compute the fraction of distinct items, or 1.0 without items."""
    return len(set(items)) / len(items) if items else 1.0


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
    """.split()  # noqa: SIM905  # more readable than a list of 270 strings
)
"""Cooking verbs in the imperative."""

_VOWELS = "aeiou"


def _forms_of_verb(verb: str) -> set[str]:
    """Return a verb with its regular forms in -s, -ed and -ing."""
    if verb.endswith("y") and verb[-2] not in _VOWELS:  # "dry", "dries", "dried"
        return {verb, verb[:-1] + "ies", verb[:-1] + "ied", verb + "ing"}
    root = verb.removesuffix("e")
    forms = {verb, verb + "s", verb + "es", root + "ed", root + "ing"}
    may_double = len(verb) > 2 and verb[-1] in "bgmnprt" and verb[-2] in _VOWELS
    if may_double and verb[-3] not in _VOWELS:  # "chop", "chopped", "chopping"
        forms |= {verb + verb[-1] + "ed", verb + verb[-1] + "ing"}
    return forms


VERB_FORMS: frozenset[str] = frozenset(
    form for verb in ACTION_VERBS for form in _forms_of_verb(verb)
)
"""Cooking verbs in all regular forms."""


def has_action_verb(step: str) -> bool:
    """Check whether a step contains a cooking verb in any regular form."""
    return not VERB_FORMS.isdisjoint(words_of(step))
