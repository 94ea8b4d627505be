"""Repairs of defects from the scraping of a collection. Each repair is counted.

Repairs of characters and markup are in `toque.cooking.schemas.markup` and run after these.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from itertools import pairwise

from toque.cooking.normalised_words import has_action_verb

BOILERPLATE = frozenset((  # buttons and notices that scrapers read as an ingredient or a step
    "Add all ingredients to list", "Add all ingredients to shopping list", "Watch Now",
    "Add ingredients to shopping list", "Add to shopping list", "ADVERTISEMENT", "Advertisement",
    "Print Recipe", "Save Recipe",
))  # fmt: skip

# Words after the hyphen of an unfinished word: "short- or long-grain rice"
CONJUNCTIONS = (
    "and|or|und|oder|bzw|sowie|bis|och|eller|og|nebo|anebo|alebo|lub|albo|oraz|vagy|ili|sau|tai|ja"
    "|en|of|et|ou"
)

_ENDS_SENTENCE = re.compile(r"[.!?:;)\]\"'’”…*]\s*\Z")
_LOWER = re.compile(r"\s*+[a-zß-öø-ÿ]")
_GOES_ON = re.compile(
    r"\s*+(?:(?:and|or|until|to|with|of|in|into|at|about|from|for|by(?! [A-Z]))\b(?! the\b)|[fc]\b)"
)
# Ends of unfinished lines ("bone-in" is complete); a number may precede its unit.
_HANGS = re.compile(
    r"(?<![\w-])(?:a|an|and|about|approx|at|by|deg|for|from|if|in|into|med|no\.?|of|on|or|over"
    r"|than|the|then|to|until"
    r"|when|with|your|\d++)\s*+\Z",
    re.IGNORECASE,
)
# After such a line the rest of an unfinished sentence is missing.
_OPENS_SENTENCE = re.compile(
    r"\s*+(?:(?:About|After|Before|Once|When|While|If|Then|Next|Now|Meanwhile)\b|In an?\b)"
)
_SURELY_HANGS = re.compile(r"\b(?:a|an|and|(?<!courtesy )of|than|the|with|your)\s*+\Z")
# "an" can end a German sentence ("Braten Sie es an"), "a" a French sentence ("il y en a")
_CUT_OFF = re.compile(
    r"(?<=[a-z] )(?:(?<! y )(?<! en )a|and|or|than|the|until|when|your|(?:in|into|on|with) an"
    r"|bottom of"
    r"|on how|for (?:about|another) \d{1,2}|(?:mix|mixture|this) is)\Z"
)
_REST_OF_SENTENCE = re.compile(
    r"[a-z]{4}(?<!approx)\. and (?:[a-z]+ ){0,3}[a-z]+\.(?: [A-Z]|\Z)"
)
_SHORTENED = re.compile(
    r"(?<![^\W_])(?:sec|min|hr|oz|lb|tsp|tbsp|pkg|qt|pt|approx|in|temp|deg)s?\.\s*+\Z",
    re.IGNORECASE,
)
_UNITS = (
    r"(?:cups?|c\.|teaspoons?|tsps?|tablespoons?|tbsps?|ounces?|oz|pounds?|lbs?|k?g|m?l"
    r"|lit(?:er|re)s?|quarts?|qts?|inch(?:es)?|[cm]m|hours?|hrs?|minutes?|mins?|seconds?|degrees?)"
)
_MEASURE = re.compile(rf"\s*+(?P<decimal>\d{{1,2}} ?)?(?:{_UNITS}\b|x ?\d)")
_MEASURES = re.compile(
    rf"(?:[\d\W]*+(?:{_UNITS}|servings?|each|about|or|to|x)\b)+[\d\W]*", re.IGNORECASE
)
_DECIMALS = {"5", "25", "75"}
_LISTED = re.compile(r"\d++[.)](?!\d)")
_ENDS_REMARK = re.compile(r"\d{1,3}\)(?:\Z|[.,;]| (?![A-ZÀ-Þ]))")
_UNFINISHED = re.compile(r"(?<![\d/.,-])(?<!gas mark )\d{1,2}\.?\Z")
# Maximum characters of a heading or list item; a small letter may follow it.
_HEADING_CHARS = 40
# Characters at the end of a step that may contain the end of its sentence.
_END_CHARS = 24
_BRACKET_LINES = 3  # maximum lines up to the closing bracket
_SPACES = "recipes with spaces before punctuation"
_FRACTIONS = "recipes with fractions mended"
LOST_SPACES = "recipes with lost spaces restored"
TRADEMARKS = "texts with trademark signs or ornaments"
_DOUBLED = "recipes with doubled words or full stops"
_EMPHASIS = "texts with Markdown"
_SMILEYS = "recipes with smileys removed"
_ACCENTS = {
    "saut": "sauté", "sauted": "sautéed", "jalapeo": "jalapeño", "jalapeos": "jalapeños",
    "crme": "crème", "brle": "brûlée", "frache": "fraîche", "pured": "puréed", "gruyre": "gruyère",
    "nioise": "niçoise", "consomm": "consommé", "souffl": "soufflé", "souffls": "soufflés",
    "flamb": "flambé", "provenal": "provençal", "habaero": "habañero", "habaeros": "habañeros",
    "apptit": "appétit", "chvre": "chèvre", "crpe": "crêpe", "crpes": "crêpes",
}  # fmt: skip  # words that lost an accented letter; none of them is another word
# "see cooks' note", if the text of a recipe does not contain the note.
_NOTE_ELSEWHERE = (
    r"\b(?i:see|refer to) (?:an? |the |our |my |this )?(?:related )?(?:\* ?)?"
    r"(?i:(?:(?:cook|chef|baker|editor|author|recipe|kitchen|test[- ]kitchen|grilling|cutting)"
    r"s?['’]?s?['’]? )?(?:(?:foot|head)?notes?|tips?|below|above|recipes?|pages?|procedures?"
    r"|formula"
    r"|methods?|links?|videos?|(?:blog )?posts?|blog|guides?|glossary|sources?|sidebar|box|charts?"
    r"|how to|here|instructions?|directions?|variations?|explanation|photos?|pictures?))\b"
)
_RECIPE_ELSEWHERE = (
    r"(?i:(?:recipes?|procedures?|instructions?) (?:follows?|below|above|at right))\b"
)
_SHOP = (
    r"(?:also |both |often |usually |widely )?(?:available|sold)\b(?: [\w-]{1,20}){0,5}?"
    r" (?:at|in|from|by|through|online|on)\b"
)
_ELSEWHERE = "recipes with references to notes and shops removed"
# Rare characters. Each one is searched once, before all signs that contain it.
_RARE = "*^$&\"/:'’()[\\@½¼¾⅓⅔¹²³⁴⁵†‡"
# Pairs of numbers that lost the dash between them: "cook 3 5 minutes"
_RANGES = {
    "1": "2", "2": "3|4", "3": "4|5|6", "4": "5|6", "5": "6|7|8|10", "6": "7|8", "7": "8|10",
    "8": "9|10|12", "10": "12|15|20", "12": "14|15", "15": "18|20", "18": "20", "20": "25|30",
    "25": "30|35", "30": "35|40|45", "35": "40|45", "40": "45|50", "45": "50|55|60", "50": "60",
}  # fmt: skip
_LOST_DASH = "|".join(
    rf"{low}(?<![\d./,½¼¾⅓⅔-]{low})(?= {{1,2}}(?:{high}) )"
    for low, high in _RANGES.items()
)
# A footnote of a page glued into a sentence: "SiftYou can use a sieve for this. the flour"
_GLUED_FOOTNOTE = (
    "(?:" + "|".join(
        rf"{word}(?<=[a-z]{word})" for word in ("You", "I", "It", "This", "If", "The", "My")
    ) + r") [a-z](?:(?![.!?] )[^\n]){8,160}[.!?] (?=[a-z])"
)  # fmt: skip
# A pattern that begins with a letter or a character set is searched several times faster than a
# pattern that begins with "\b" or a look-behind.
_MISPRINTS = [  # signs for a 40 times faster search, pattern, repair, note
    (
        [(next(filter(_RARE.__contains__, sign), ""), sign) for sign in signs],
        re.compile(pattern, re.MULTILINE), right, what,
    )
    for signs, pattern, right, what in (
        (("epi:",), r" ?/?epi:recipe[Ll]ink(?: id=\"?\d*\"?)? ?/?[<>]?(?:\d<)?", " ",
         "HTML tags removed"),
        ((":)", ";)", ":-", ";-", ":D", ":("),
         r" ?(?<![(\w])[:;]-?[)(D](?=[\s.,!]|$)", "", _SMILEYS),
        (("\\",), r"(?:\\[rn]){1,8}(?= |$)|\\$", "", "texts with control characters"),
        (("()", "( )", "(,)"), r" ?\( ?,? ?\)", "", "recipes with empty brackets"),
        (("[1]",), r" ?\[\d{1,2}\]", "", "recipes with numbers of pictures"),
        ((".(", "!(", "?(", ".)", "!)"),
         r"(?<=[a-z][.!?])(?=\([A-Z])|(?<=[.!?]\))(?=[A-Z][a-z])", " ", LOST_SPACES),
        ((" w / ",), r"(?<= w) / ", "/ ", _SPACES),
        (("-inch",), r"(?<=\d-inch)(?=(?!es\b)[a-z])", " ", LOST_SPACES),
        ((" ,", " ."), r"(?<=[^\s\d.,]) +([,.])(?=\s(?!\.)|\Z)", r"\1", _SPACES),
        ((" ,",), r" ,(?=[a-z])", ", ", _SPACES),
        ((" .",), r"([.!?)](?<! .)) \.(?=\s(?!\.)|\Z)", r"\1", _DOUBLED),
        ((" * ", " ** "), r"(?<=[^\d\s] )\*{1,2} (?=[\w½¼¾])", "", _EMPHASIS),
        (("(",), r"\((?: ?[,;] ?| (?:- (?=\d))?)(?=\S)", "(", _SPACES),
        ((" )",), r"(?<=[\w.,;!?)\"'”’®%]) \)", ")", _SPACES),
        ((",",), r",(?<=[a-z],)(?=[a-z]{2})", ", ", LOST_SPACES),
        (("(",), r"\((?<=[a-z]{2}\()(?=optional\)|[a-z]{2,12} )", " (", LOST_SPACES),
        ((")",), r"(\((?:R|packed|about|[^()\n]{0,40}[\d ][^()\n]{0,40})\))(?=[A-Za-z]{2})", r"\1 ",
         LOST_SPACES),
        (("..", ",."), r"(?<=[^\s.])(?:,\.(?=\s|\Z)|\.\.(?![./\\]))", ".", _DOUBLED),
        ((" the the ", " and and ", " of of ", " in in ", " to to ", " for for ", " with with ",
          " a a ", " into into "),
         r" (the|and|of|in|to|for|with|a|into)(?= \1 )", "", _DOUBLED),
        (("*", "_"), r"(?<![\w*_])(\*{1,3}|_{1,3})(?=[^\s*_])([^*_\n]{1,300}+)(?<!\s)\1(?![\w*_])",
         r"\2", _EMPHASIS),
        (("*F", "* F", "^F", "^f", "0*", "5*"),
         r"(?<=\d)[*^] ?(?=[Ff]\b)|(?<=\b[1-5]\d[05])\*(?=[\s.,]|\Z)", "°",
         "recipes with signs for degrees"),
        (("u0026",), r"\bu0026(?=\s)", "&", "HTML entities decoded"),
        ((" /", "/ "), r"(?<=\d)(?: /|/(?= )) ?(?=\d)", "/", _FRACTIONS),
        ((" ⁄", "⁄ "), r"(?<=\d)(?: ⁄|⁄(?= )) ?(?=\d)", "⁄", _FRACTIONS),
        # Example: "11/2"
        (("malls ", "ediums ", "arges "), r"(?<=\d )(small|medium|large)s(?= [a-z])", r"\1",
         _SPACES),
        (("((",), r"\(\(([^()\n]*)\)\)", r"(\1)", _DOUBLED),
        (("nt ", "nt,"),
         (r"nt\b(?:(?<=\b(?i:do|is)nt)|(?<=\b(?i:are|did|had|has|was)nt)"
          r"|(?<=\b(?i:does|have|were)nt)|(?<=\b(?i:could|would)nt)|(?<=\b(?i:should)nt))"),
         "n't", "recipes with lost apostrophes"),
        (("ou", "hey", "here"),
         (r"[uUyYeE](?:(?=(?:ll|re|ve)\b)(?:(?<=\b(?i:you))|(?<=\b(?i:they)))"
          r"|(?=s\b)(?<=\b(?i:there)))"), r"\g<0>'", "recipes with lost apostrophes"),
        (("/",), r"\d(?=(?:1/[2348]|[23]/[34])(?![\d/]))(?<![\d/.,].)", r"\g<0> ", _FRACTIONS),
        # "12 cup" and "1 12 cups": an import into RecipeNLG dropped the slash.
        (("12 ", "13 ", "14 ", "18 ", "23 ", "34 "),
         (r"(?:(?m:^)|(?<=[a-z)] or ))(\d )?(1(?=[2348] )|2(?=3 )|3(?=4 ))(\d)"
          r"(?= (?:cup|teaspoon|tablespoon|pint|quart|gallon)(?(1)s?)\b)"), r"\1\2/\3", _FRACTIONS),
        ((" minutes", " mins", " min.", " hours"),
         rf"({_LOST_DASH}) {{1,2}}(?=\d\d? (?:min(?:utes|s|\.)|hours)(?![^\W_]))", r"\1-",
         "recipes with lost dashes"),
        (("You ", "I ", "It ", "This ", "If ", "The ", "My "), _GLUED_FOOTNOTE, " ",
         "recipes with footnotes removed"),
        ((" tsp", " tbsp", "spoon teaspoon", "spoon tablespoon"),
         r"(teaspoons? )(?:tsps?|teaspoons?)\b\.? |(tablespoons? )(?:tbsps?|tablespoons?)\b\.? ",
         r"\1\2", _DOUBLED),
        (("-=OR=-",), r",? ?-=OR=-", "", "recipes with marks of Meal-Master"),
        ((" -",), r" -(?=[A-Z][a-z]{2})(?<=\d (?:pkt|pkg|tsp) -)", " ",
         "recipes with marks of Meal-Master"),
        ((" to1", " to2", " to3", " to4", " to5", " to6"), r" to(?=[1-6]\d? (?:min|hour|in))",
         " to ", LOST_SPACES),
        # Examples: 'the"lid', 'salt& oil'
        (("& ", '"'), r'(?<=[a-z])(&(?= )|"(?=\w[^"\n]{0,60}"))', r" \1", _SPACES),
        (("recipe", "cup", "spoon", "tsp", "tbsp"),
         (r"\d(?: (?:recipe|cup|tablespoon|teaspoon)s?(?=[A-Z][a-z])"
          r"|(?=(?:cups?|teaspoons?|tablespoons?|tsps?|tbsps?)\b))"), r"\g<0> ", LOST_SPACES),
        (("($",), r" ?\(\$\d{1,3}\.\d\d\)", "", "recipes with prices"),
        (("'S", "’S"), r"(?<=[a-z]['’])S\b", "s", "recipes with a capital after an apostrophe"),
        ((" thru ",),
         r" [A-Z][\w']+ (?:\d+ (?:\w+ )?For \$\d+\.\d\d|Buy \d+ Get .{1,12}) thru \d+/\d+", "",
         "recipes with offers of a shop"),
        (("see ", "See ", "efer to "),
         (rf" ?[(\[]{{1,3}}(?:\* ?)?(?:[Pp]lease )?{_NOTE_ELSEWHERE}[^()\[\]\n]{{0,120}}[)\]]+"
         rf"|[ ,;:*–—-]{{0,3}}[,;:*–—-] ?\*?{_NOTE_ELSEWHERE}[^.;()\[\]!?\n]{{0,80}}(?=[.;)\]!?]|$)"
         rf"|(?:(?<=\()|(?<=\)) |(?<=[a-z]) (?=[^()\n]{{0,90}}\))){_NOTE_ELSEWHERE}"
         r"[^.;()\[\]!?\n]{0,80}(?=[.;)\]!?]|$)"
         rf"|(?:(?<=[.!?)] )|^)(?:\* ?)?(?:Please )?{_NOTE_ELSEWHERE}[^.!?\n]{{0,120}}(?:[.!?] ?"
         rf"|$)"),
         "", _ELSEWHERE),
        (("ecipe", "rocedure", "nstruction"),
         (rf" ?\((?:[Hh]ome ?made |[Mm]y |[Tt]he )?{_RECIPE_ELSEWHERE}(?! or )[^()\n]{{0,120}}\)"
         rf"|[,;] {_RECIPE_ELSEWHERE}(?=[);,.]|$)|(?<=\(){_RECIPE_ELSEWHERE} or "), "", _ELSEWHERE),
        (("available ", "sold "),
         (rf" ?\({_SHOP}[^()\n]{{0,160}}\)|[ ,;–—-]{{0,3}}[,;–—-] ?{_SHOP}[^()\n]{{0,160}}(?=\))"
         r"|[,;] available (?:at|in|from) [^,;()\n]{0,120}(?=[,;(]|$)"), "", _ELSEWHERE),
        # Example: "cup ¼ of raisins"
        (("½", "¼", "¾", "⅓", "⅔"),
         r"^(cup|teaspoon|tablespoon)s? ([½¼¾⅓⅔])(?: -| of)? (?=[A-Za-z])",
         r"\2 \1 ", "recipes with a unit before its amount"),
        (("inthe ", "tothe ", "withthe ", "inhalf"),
         r"\b(in|to|with)(?=(?:the|half)\b)", r"\1 ", LOST_SPACES),
        (("- ",),
         (r"\b([Aa]ll|[Ll]ow|[Hh]igh|[Nn]on|[Mm]edium|[Ee]xtra|[Ss]elf|[Hh]alf|\d)- "
          rf"(?=(?!(?:to|by|{CONJUNCTIONS})\b)[a-z])"), r"\1-", _SPACES),
        (("auce- ", "able- ", "ea- "),
         r"\b([Ss]auce|[Tt]able|[Tt]ea)- (?=(?:pan|spoon)s?\b)", r"\1", _SPACES),
        ((":F", ":C"), r"(?<=\b[1-5]\d[05]):(?=[FC]\b)", "°", "recipes with signs for degrees"),
        (("@",), r"(?<=[a-z]) ?@ ?(?=\d)", " at ", _SPACES),
        ((" l ",), r"(?<= )l(?= (?:hour|cup|teaspoon|tablespoon|inch|minute|pound)\b)", "1",
         _FRACTIONS),
        ((" TM", "(R)", "(TM)", "(tm)"), r",? ?\((?:R|TM|tm)\)|,? TM\b", "", TRADEMARKS),
        # The note for "flour**" is elsewhere. "**Mix**" is Markdown.
        (("*", "¹", "²", "³", "⁴", "⁵", "†", "‡"),
         (r"((?<!\S)\*+\w[^*\n]{0,200}\*+)|(?:(?<=[A-Za-z.,;)])\*{1,4}|(?<=[a-z]{3})[¹²³⁴⁵†‡]"
          r"|(?<=[.,;)])[¹²³⁴⁵†‡])(?=[\s,.;:)]|\Z)"), r"\1", "recipes with marks of footnotes"),
        *(((wrong[1:],),
           rf"{wrong[1:]}\b(?<=\b[{wrong[0]}{wrong[0].upper()}]{wrong[1:]})[´`]?(?![$¿])",
           right[1:], "recipes with lost accents") for wrong, right in _ACCENTS.items()),
    )
]  # fmt: skip
_BLANK_APOSTROPHE = re.compile(
    r"(?<=[a-z]{2}) (?=s(?: |\Z))"
    r"|(?:(?<=\b(?:can|don|won|ain|isn))|(?<=\b(?:didn|aren|wasn|hasn))|(?<=\b(?:doesn|haven))"
    r"|(?<=\b(?:couldn|wouldn))|(?<=\b(?:shouldn))) (?=t\b)"
    r"|(?<=\bi) (?=(?:m|ve|ll|d)\b)|(?:(?<=\bwe)|(?<=\byou)|(?<=\bthey)) (?=(?:re|ve|ll)\b)"
)
SPACED_MARK = re.compile(r"(?<=\S) +([,;:.!?)])(?=\s|\Z)")
_TWO_COMMAS = re.compile(r",(?:\s*+,)++")
_LINK_OPENERS = frozenset(
    "please find see get view read click visit check go head for full complete".split()  # noqa: SIM905
)
_ONLY_A_LINK = re.compile(
    rf"\W*(?:(?:please )?(?:{'|'.join(sorted(_LINK_OPENERS - {'please'}))})\b)"
    r"[^.]{0,80}\b(?:recipes?|instructions?|directions?|method|website|blog|site|link|here)\b"
    r"[^.]{0,60}[.!]?\W*\Z",
    re.IGNORECASE,
)
_LINK_CHARS = 1000  # maximum characters of steps that may only be a link
_TAGS = re.compile(r"<[^<>]*>")


def without_boilerplate(lines: list[str], notes: Counter[str]) -> list[str]:
    """Return the lines without buttons and notices of the web page."""
    content_lines = [line for line in lines if line not in BOILERPLATE]
    notes["boilerplate lines"] += len(lines) - len(content_lines)
    if "ADVERTISEMENT" in "\n".join(content_lines):
        notes["boilerplate lines"] += 1
        content_lines = [
            line.replace("ADVERTISEMENT", "").strip() for line in content_lines
        ]
    return content_lines


def rejoin_sentences(
    steps: list[str], notes: Counter[str], *, anywhere: bool = False
) -> list[str]:
    """Join steps that were split within a sentence: after an abbreviation or at a decimal point.

    RecipeNLG's scraper split `anywhere`, other scrapers split within long lines. A recipe without
    capitals and full stops is joined only if no other reading is possible.
    """
    if len(steps) < 2:
        return steps
    cased = steps[0][:1].isupper() and any(
        _ENDS_SENTENCE.search(step[-_END_CHARS:]) for step in steps
    )
    step_parts = [[steps[0]]]
    # Remaining lines up to the closing bracket
    n_bracket_lines = _lines_in_bracket(steps, 0)
    for at, (before, step) in enumerate(pairwise(steps), start=1):
        may_be_split = anywhere or len(before) > _HEADING_CHARS
        glue = _glue(before[-_END_CHARS:], step, cased=cased, anywhere=may_be_split)
        if n_bracket_lines:
            n_bracket_lines -= 1
            glue = glue or " "
        else:
            n_bracket_lines = _lines_in_bracket(steps, at)

        if glue is None:
            step_parts.append([step])
            continue
        notes["sentences split in the middle rejoined"] += 1
        parts = step_parts[-1]
        # A decimal point replaces the full stop before it.
        parts[-1] = parts[-1].rstrip(" ." if glue == "." else None)
        parts += (glue, step.lstrip())
    return list(map("".join, step_parts))


def is_cut_off(step: str) -> bool:
    """Return whether a step lacks a part of a sentence.

    It ends in the middle of a sentence ("let them sit in a", "up to 3/"), or a sentence begins in
    the middle ("Prepare the topping. and sea salt.").
    """
    if ". and " in step and _REST_OF_SENTENCE.search(step):
        return True
    if step[-1:] in "/(":
        return "://" not in step
    if not step[-1:].isalnum():
        return False
    return _CUT_OFF.search(step, max(0, len(step) - _END_CHARS)) is not None


def _lines_in_bracket(steps: list[str], at: int) -> int:
    """Return how many lines after step `at` belong to a bracket that the step leaves open.

    "6) Bake" is a step, but "6)" ends the remark of a bracket without a number: "(gas mark".
    """
    start = steps[at].rfind("(")
    if start <= steps[at].rfind(")"):
        return 0
    has_number = any(map(str.isdigit, steps[at][start:]))
    following = steps[at + 1 : at + 1 + _BRACKET_LINES]
    for n, step in enumerate(following, start=1):
        close = step.find(")")
        may_end_remark = n == 1 and not has_number
        ends_remark = may_end_remark and _ENDS_REMARK.match(step) is not None
        if "(" in step[:close] or (_LISTED.match(step) and not ends_remark):
            break
        if close >= 0:
            return n
    return 0


def _glue(before: str, step: str, *, cased: bool, anywhere: bool) -> str | None:
    """Return the text between a step and the previous step, or None if its sentence has ended.

    Args:
        before: End of the previous step.
        step: The step.
        cased: Whether the recipe's sentences begin with capitals and end with full stops.
        anywhere: Whether the text may have been split between any two words.
    """
    has_ended = _ENDS_SENTENCE.search(before) is not None
    glue = _glue_of_measure(before, step, has_ended=has_ended)
    if glue is not None:
        return glue

    continues = _continues(before, step, cased=cased, ends=has_ended)
    is_lower = _LOWER.match(step) is not None
    if has_ended:
        # The full stop of a unit need not end the sentence: "Add 2 tbsp." "sugar."
        may_continue = continues or (is_lower and cased)
        return " " if may_continue and _SHORTENED.search(before) else None
    if continues:  # "Stir the rice" "with a fork."
        return " "
    if _hangs(before, cased=cased):
        # "Simmer for about" "20 minutes." and "Chop the onion," "leek and garlic."
        is_number = step[:1].isdigit() and _LISTED.match(step) is None
        is_joined = is_lower or (is_number and before[-1:] != ",")
    else:
        is_joined = is_lower and cased and anywhere  # "Simmer the soup" "slowly."
    return " " if is_joined else None


def _glue_of_measure(before: str, step: str, *, has_ended: bool) -> str | None:
    """Return the text between a number and the rest of its measure, or None for any other step.

    >>> _glue_of_measure("Add 2", "cups milk.", has_ended=False)
    ' '
    >>> _glue_of_measure("Roast for 1.", "5 hours.", has_ended=True)
    '.'
    >>> _glue_of_measure("See step 1.", "3 cups milk.", has_ended=True)
    """
    measure = _MEASURE.match(step)
    if measure is None:
        return None
    decimal = measure["decimal"]
    if not decimal:
        return " " if before[-1:].isdigit() else None
    # After a full stop, only common decimals such as "5" are the rest of a number.
    may_be_decimal = decimal.strip() in _DECIMALS or not has_ended
    return "." if may_be_decimal and _UNFINISHED.search(before) else None


def _continues(before: str, step: str, *, cased: bool, ends: bool) -> bool:
    """Return whether the words at the end of a line or the start of a step need each other."""
    goes_on = _GOES_ON.match(step) is not None  # "Stir the rice" "with a fork."
    # Without capitals, "with a spoon, stir" may be a step.
    if goes_on and (cased or step.startswith("of ") or not has_action_verb(step)):
        return True
    # "Grease the" "9-inch pan."
    if not cased or ends or not _SURELY_HANGS.search(before):
        return False
    return _OPENS_SENTENCE.match(step) is None


def _hangs(before: str, *, cased: bool) -> bool:
    """Return whether a line without a full stop is unfinished."""
    if before[-1:].isdigit():  # "Bake 20" may be complete, a line "20" is not
        return before.strip().isdigit()
    if not cased and before.endswith((" in", " on", " over")):
        return False  # "leave the lid on" is complete
    return before[-1:] == "," or _HANGS.search(before) is not None


def only_measures(line: str) -> bool:
    """Return whether an ingredient line names no food."""
    return _MEASURES.fullmatch(line) is not None


@lru_cache(maxsize=1 << 12)
def _possible_misprints(rare: str) -> list[tuple[list[str], re.Pattern[str], str, str]]:
    """Return the misprints that a text may contain if it has only these characters of `_RARE`."""
    misprints = (
        ([sign for mark, sign in signs if mark in rare], pattern, right, what)
        for signs, pattern, right, what in _MISPRINTS
    )
    return [misprint for misprint in misprints if misprint[0]]


def without_misprints(lines: list[str], notes: Counter[str]) -> list[str]:
    """Return lines without the misprints of `_MISPRINTS`, and count each kind of repair once."""
    text = "\n".join(lines)
    repairs: set[str] = set()
    rare = "".join(filter(text.__contains__, _RARE))
    for signs, pattern, right, what in _possible_misprints(rare):
        # A loop is faster than `any`, because a generator costs more than the check.
        for sign in signs:
            if sign in text:
                break
        else:
            continue
        if pattern.search(text):
            corrected_lines = [pattern.sub(right, line) for line in lines]
            if corrected_lines != lines:
                repairs.add(what)
            lines = corrected_lines
    notes.update(repairs)
    return lines


def untokenised(lines: list[str], notes: Counter[str]) -> list[str]:
    """Remove the spaces before punctuation that Food.com's export added."""
    repaired_lines = [
        _TWO_COMMAS.sub(",", SPACED_MARK.sub(r"\1", line)).replace("( ", "(")
        for line in lines
    ]
    notes[_SPACES] += repaired_lines != lines
    return without_misprints(repaired_lines, notes)


def with_apostrophes(title: str, notes: Counter[str]) -> str:
    """Restore apostrophes in a title that Food.com's export replaced with spaces.

    >>> with_apostrophes("i can t resist momma s peas", Counter())
    "i can't resist momma's peas"
    """
    restored_title = _BLANK_APOSTROPHE.sub("'", title)
    notes["recipes with lost apostrophes"] += restored_title != title
    return restored_title


def only_a_link(steps: list[str]) -> bool:
    """Return whether the steps only contain a link to the steps."""
    if not steps or sum(map(len, steps)) > _LINK_CHARS:
        return False
    first = steps[0].partition(" ")[0]
    if first.isascii() and first.isalpha() and first.lower() not in _LINK_OPENERS:
        return False
    text = " ".join(_TAGS.sub(" ", " ".join(steps)).split())
    return bool(text) and _ONLY_A_LINK.match(text) is not None
