"""Words and keys of recipe texts, fast for ASCII; and the verbs of cooking."""

from __future__ import annotations

import re
import string
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

_LETTERS: Final = bytes(
    ord(chr(code).lower()) if chr(code) in string.ascii_letters else 32 for code in range(256)
)  # bytes of ASCII: letters in lower case, everything else a blank
_LOWER: Final = bytes(code + 32 if 65 <= code <= 90 else code for code in range(256))
_NOT_ALPHANUMERIC: Final = bytes(
    code for code in range(128) if chr(code) not in string.ascii_letters + string.digits
)
_SIGNS: Final = re.compile("[°½¼¾⅓⅔⅛⅜⅝⅞⅙⅚⅕⅖⅗⅘–—‑’‘“”®™©…×•·⁄\u00a0´″]")
_WORD: Final = re.compile(r"[^\W\d_]+")
_FOREIGN: Final = re.compile(r"[^\x00-\x7f]+")
_PARTING: Final = re.compile(r"\b(?:with|and|in|on|over|of|for|from)\b|[&,:;(/-]", re.IGNORECASE)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case: runs of letters. A fraction such as "½" is no word."""
    if text.isascii():  # most texts are, and bytes are faster than a pattern
        return text.encode().translate(_LETTERS).decode().split()
    return _WORD.findall(_SIGNS.sub(" ", text).lower())


def normalised(text: str) -> bytes:
    """Key of a text for finding duplicates: its letters and digits, case-folded, in UTF-8.

    >>> normalised("1½ Cups -- Crème!").decode()
    '1½cupscrème'
    """
    if not text.isascii():
        text = _FOREIGN.sub(lambda run: "".join(filter(str.isalnum, run[0])), text.casefold())
    return text.encode().translate(_LOWER, _NOT_ALPHANUMERIC)


def parts_of_title(title: str) -> list[str]:
    """The dish of a title, then what it is with, in, on or from.

    >>> parts_of_title("Soup of Beans")
    ['Soup ', ' Beans']
    """
    return _PARTING.split(title)


def share(good: Iterable[bool]) -> float:
    """Share of what is True; 0.0 of nothing."""
    found = list(good)
    return sum(found) / len(found) if found else 0.0


def share_different(items: Sequence[Hashable]) -> float:
    """Number of different items among all of them; 1.0 of nothing."""
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
    """.split()  # noqa: SIM905  # a block of words can be read; a list of 270 strings cannot
)  # cooking verbs, in the imperative

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


VERB_FORMS: frozenset[str] = _verb_forms()  # every verb in each of its regular forms


def has_action_verb(step: str) -> bool:
    """True if a step contains one of `ACTION_VERBS`, in any of its regular forms."""
    return not VERB_FORMS.isdisjoint(words_of(step))
