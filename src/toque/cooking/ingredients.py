"""What an ingredient line names, by simple rules: quantity, unit and preparation stripped.

"1 (16 ounce) can black beans, drained and rinsed" names "black beans". Lines are English.
"""

from __future__ import annotations

import re
from functools import lru_cache

FRACTIONS = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_NUMBER = rf"(?:\d+(?:[.,]\d+)?(?:\s*[/⁄]\s*\d+)?|[{FRACTIONS}])"
_WORD_NUMBERS = (
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half|a dozen|dozen|a few|few|"
    "several|a couple of|a|an"
)
_UNITS = (
    "cups?|c|tablespoons?|tbsps?|tbs|tb|tbl|teaspoons?|tsps?|ts|pounds?|lbs?|ounces?|ozs?|fluid "
    "ounces?|fl oz|grams?|gr?|kilograms?|kgs?|milligrams?|mg|milliliters?|millilitres?|ml|cl|dl|"
    "liters?|litres?|l|quarts?|qts?|pints?|pts?|gallons?|gal|inch(?:es)?|cm|sticks?|cloves?|heads?|"
    "stalks?|ribs?|stems?|sprigs?|bunch(?:es)?|leaf|leaves|slices?|strips?|pieces?|chunks?|cubes?|"
    "fillets?|cans?|tins?|jars?|bottles?|packages?|packets?|packs?|pkgs?|bags?|box(?:es)?|"
    "containers?|cartons?|tubs?|envelopes?|loaf|loaves|sheets?|ears?|pinch(?:es)?|dash(?:es)?|"
    "drops?|splash(?:es)?|drizzles?|handfuls?|knobs?|scoops?|squares?|bulbs?|blocks?|balls?|"
    "recipes?|batch(?:es)?|parts?|cup|servings?|wedges?|links?|shots?|jiggers?"
)
_SIZES = (
    "extra-large|extra large|jumbo|large|medium-sized|medium-size|medium|med|small|big|heaping|"
    "heaped|level|scant|rounded|generous|thick|thin|whole|good|about|approximately|approx|around|"
    "roughly|up to|plus|additional|more|extra|optional|packed|loosely|firmly|lightly|well|to|or|x"
)
_PREPARED = (
    "chopped|minced|grated|shredded|sliced|diced|crushed|cubed|melted|softened|beaten|peeled|"
    "cooked|uncooked|toasted|sifted|crumbled|drained|rinsed|thawed|halved|quartered|pitted|seeded|"
    "trimmed|julienned|mashed|finely|coarsely|freshly|thinly|thickly|very|hot|cold|warm|cool|"
    "boiling|lukewarm|chilled|squeezed|cut|torn|packed|frozen|boneless|skinless|unsalted|fresh"
)
_FLAGS = re.IGNORECASE
_SIZED = re.compile(
    rf"[(\[][^)\]]*[)\]]|\b{_NUMBER}[- ]?(?:inch|ounce|oz|pound|lb|g)\b[- ]?", _FLAGS
)
_LEAD = re.compile(
    rf"\A(?:[-*•~\s.,/]+|{_NUMBER}(?:\s*(?:-|–|to|or)\s*{_NUMBER})?\s*[\"”x×+]?\s*"
    rf"|(?:{_WORD_NUMBERS}|{_UNITS}|{_SIZES})\.?(?=[\s,/]|$))+",
    _FLAGS,
)
_OF = re.compile(r"\A(?:of|the)\s+", _FLAGS)
_PREPARED_LEAD = re.compile(
    rf"\A(?:(?:{_PREPARED})(?:\s+and)?[\s,]+|(?:dried|ripe|firm|sweet|bone-in|skin-on),\s*)+(?=\w)",
    _FLAGS,
)
_TRAIL = re.compile(
    r"\s*(?:,|;|\s[-–—]+\s|--|\bto taste\b|\bfor (?:the |garnish|[a-z-]+ing\b)|"
    r"\bor (?:more|to taste|as needed|\d)|\bas needed\b|\bif desired\b|\bplus\b|"
    r"\bcut (?:into|in|up)\b|\bat room temperature\b|\bdivided\b).*$",
    _FLAGS,
)
_PIECES = re.compile(r"(?<=garlic|celery) (?:cloves?|stalks?|ribs?|sticks?)$", _FLAGS)
_DIGIT = re.compile(rf"[\d{FRACTIONS}]")
_QUANTITY_WORDS = {
    "a", "an", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "half", "few", "couple", "several", "some", "bunch", "dozen", "knob",
    "pinch", "pinches", "dash", "dashes", "handful", "handfuls", "splash", "drizzle", "sprig",
    "sprigs",
}  # fmt: skip
_AT_WILL = re.compile(r"\b(?:to taste|as needed|as required)\b", _FLAGS)
_WORD = re.compile(r"[^\W\d_]{2,}")
_WORD_OR_LETTER = re.compile(r"[^\W\d_]+")


@lru_cache(maxsize=65536)
def ingredient_name(line: str) -> str:
    """The food an ingredient line names, without quantity, unit, size and preparation.

    A line of which nothing would be left is returned as it is.

    >>> ingredient_name("1 (16 ounce) can black beans, drained and rinsed")
    'black beans'
    >>> ingredient_name("2 1/2 cups finely chopped red onions")
    'red onions'
    """
    name = _SIZED.sub(" ", line)
    name = _LEAD.sub("", _OF.sub("", _LEAD.sub("", " ".join(name.split()))))
    name = _LEAD.sub("", _PREPARED_LEAD.sub("", name))  # before the commas of "boneless, skinless"
    name = _PIECES.sub("", _TRAIL.sub("", name))
    name = name.strip(" .,;:-*")
    return name if _WORD.search(name) else " ".join(line.split())


def head_noun(name: str) -> str:
    """The word an ingredient's name turns on, in the singular and lower case.

    >>> head_noun("ripe Roma tomatoes"), head_noun("cream of tartar"), head_noun("bay leaves")
    ('tomato', 'cream', 'leaf')
    """
    words = _WORD.findall(re.split(r"\b(?:of|with|in|or|from)\b", name.casefold(), maxsplit=1)[0])
    words = words or _WORD.findall(name.casefold())
    return stem(words[-1]) if words else ""


def stem(word: str) -> str:
    """The singular of a lower-case English noun, near enough to compare two texts.

    >>> [stem(w) for w in ("berries", "tomatoes", "peaches", "couscous", "loaves", "glass")]
    ['berry', 'tomato', 'peach', 'couscous', 'loaf', 'glass']
    """
    if len(word) < 4 or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-3] + "y"
    if word.endswith(("eaves", "oaves", "alves", "elves")):
        return word[:-3] + "f"
    if word.endswith(("oes", "ches", "shes", "sses", "xes")):
        return word[:-2]
    return word.removesuffix("s")


def has_quantity(line: str) -> bool:
    """Whether a line says how much of a food: a number, a fraction or words ("a pinch of salt").

    >>> has_quantity("1/2 cup rice"), has_quantity("salt to taste"), has_quantity("rice")
    (True, True, False)
    """
    words = _WORD_OR_LETTER.findall(line.casefold())
    if not (_DIGIT.search(line) or _AT_WILL.search(line) or not _QUANTITY_WORDS.isdisjoint(words)):
        return False
    return any(len(word) > 1 and word not in _QUANTITY_WORDS for word in words)
