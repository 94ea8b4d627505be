"""Removal of credits and notices from scraped steps. Each removal is counted with its reason.

A page prints them next to its steps: "Photograph by ...", a title and an author on separate
lines, "Serves 6.", "Wine: ...", "Watch Now", nutrition facts. Every pattern is anchored at the
beginning of a line or a sentence, and every repetition in it is bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

from toque.cooking.normalised_words import ACTION_VERBS, has_action_verb, words_of

CREDITS: Final = "credits among the steps removed"
NOTICES: Final = "notices of the page among the steps removed"
NUTRITION: Final = "nutrition facts among the steps removed"
SHOPPING: Final = "shopping notes among the steps removed"
YIELDS: Final = "yields among the steps removed"
WINES: Final = "notes on wine among the steps removed"
NOTES: Final = "notes and tips among the steps removed"

STORIES: Final = "texts about the dish among the steps removed"
# Verbs of instructions, too general for `ACTION_VERBS`.
MORE_VERBS: Final = frozenset(
    """
    alternate blacken bury churn cooking deep dehydrate dump ensure fire follow get give go grab
    load massage order pan pass pile pop prep push rehydrate select slip smear start stick store
    submerge switch take team throw toss wait watch whack whizz
    """.split()  # noqa: SIM905
)

MOST_CHARS: Final = 300  # longest credit or note; longer lines are not changed
_OPEN: Final = r"[\W_]{0,4}"
_CREDIT: Final = re.compile(
    rf"{_OPEN}(?:notes?: )?(?:"
    r"(?:photo(?:s|graphs?|graphy)?|images?|pictures?|illustrations?|text|video)"
    r"(?: and (?:recipe|photos?|photographs?|text|styling))?"
    r"(?: credits?\b| courtesy\b|s? copyright\b| by\b|s? ?:| ?©)"
    r"|(?:food |prop |set )?(?:styling|stylists?|styled) ?(?:by\b|:)"
    r"|recipes? (?:courtesy|credits?|source|by|from|copyright|adapted|reprinted|excerpted|inspired"
    r"|created|contributed|submitted|provided|developed|shared|posted|©)\b(?! hand\b)"
    r"|(?:\w{1,20} ){0,3}adapted from\b"
    r"|(?:this |the |these )?(?:recipes? )?(?:is |was |were |has been )?"
    r"(?:slightly |loosely |freely |very )?"
    r"(?:adapted (?:slightly |loosely |with permission )?from|adapted by|reprinted (?:from|with|by)"
    r"|excerpted (?:from|with)|reproduced (?:from|with|by)|inspired by"
    r"|originally (?:published|printed|appeared))\b"
    r"|(?:this|it)(?: recipe)? is an? (?:\w{1,20} ){0,2}(?:fork|adaptation|remix|modification) of\b"
    r"|(?:this |the )recipe (?:\w{1,20} ){0,6}(?:courtesy|permission|adapted|reprinted|contributed"
    r"|submitted|provided|appeared|comes from|comes to us"
    r"|was (?:created|developed|given|written))\b"
    r"|rec(?:eta|ette|eita|ept) (?:de|von|van|uit) (?-i:[A-Z])|courtesy (?:of\b|:)"
    r"|(?-i:Courtesy [A-Z])"
    r"|from the (?:kitchens?|files?|recipe box|cookbook|book|blog|archives?|pages?) of\b"
    r"|from (?:the )?(?:cook)?book\b|(?:recipe )?source ?:|credits? ?:|credit (?:belongs|goes)\b"
    r"|(?:источник|fuente|quelle|fonte|bron|zdroj|źródło|forrás|källa|kilde) ?:"
    r"|(?:recipe )?author ?:"
    r"|copyright\b|©|\(c\) ?\d{4}|all rights reserved|published (?:by|in)\b"
    r"|printed (?:in|from|with permission)\b|(?:submitted|contributed|posted) by\b"
    r")",
    re.IGNORECASE,
)
# The end of a sentence before a credit that continues to the end of the step.
_WITHIN: Final = re.compile(
    r"[.!?)\"”’] (?=(?:Photo(?:graph(?:s|y)?|s)? (?:by|courtesy|credit)"
    r"|Recipes? (?:courtesy|by|adapted|reprinted) |Adapted from |Reprinted (?:from|with) "
    r"|Excerpted from |Courtesy of |Copyright |©|From the (?:kitchen|book|cookbook) of ))"
)
_NOTE_WITHIN: Final = re.compile(r"[.!?)] (?=(?:Notes?|NOTES?|Tips?|TIPS?) ?:)")
# A note with instructions, and its object, as in "Note: To toast the pecans, heat ..."
_TASK_OF_NOTE: Final = re.compile(
    r"\W*(?:notes?|tips?) ?: to [a-z]+ (?:the |your )?([a-z]{3,})", re.IGNORECASE
)
# The author of a book after a line with its title.
_AUTHOR: Final = re.compile(
    rf"{_OPEN}by (?:[A-Z][\w.'’-]{{1,20}},? ?){{2,4}}(?:(?:and|with|&) .{{2,60}})?"
    r"(?:\W{0,3}\Z|\()"
)
_PUBLISHED: Final = re.compile(r"\([^\W\d][^()]{2,60}[,:;]? (?:19|20)\d\d\)\W{0,3}\Z")
_GOES_ON: Final = re.compile(
    rf"{_OPEN}(?:by|from|in|and|with|of)\b(?! the\b)", re.IGNORECASE
)
_YIELD: Final = re.compile(
    rf"{_OPEN}(?:(?:(?:this|the|each) )?(?:(?:entire |whole )?(?:recipe|batch) )?(?:will )?"
    r"(?:serves|makes|yields?|feeds)"
    r"|(?:yield|servings?|serving size|number of servings) ?[:=-](?: ?(?:serves|makes))?)"
    r"(?: (?:about|approximately|approx\.?|around|roughly|at least|up to|over|from|a total of))?"
    r" ?(?:\d|[½¼¾⅓⅔]|(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve|several|enough"
    r"|an? (?:\w{1,9} ){0,2}(?:dozen|cup|pint|quart|gallon|pound|batch))\b)"
    r"(?:[^.!?]|\.(?! [A-Z])){0,90}[.!]?\W{0,3}",
    re.IGNORECASE,
)
_WINE: Final = re.compile(
    rf"{_OPEN}(?:(?:suggested |recommended |our )?(?:wine|beverage|drink|beer)s?(?: (?:pairing"
    r"|suggestion|recommendation|match|note|choice|selection|tip)s?)? ?[:–—]|(?:what )?to drink ?:"
    r"|(?:wine|beverage|drink) (?:pairing|suggestion|recommendation|match)s?\b)",
    re.IGNORECASE,
)
_WINE_WORDS: Final = frozenset(
    """
    beer beers beverage beverages blanc brut cabernet champagne chardonnay chianti drink drinks
    estate gewürztraminer grigio merlot noir pinot prosecco riesling rioja sauvignon shiraz syrah
    vineyard vineyards wine winery wines zinfandel
    """.split()  # noqa: SIM905
)
# A vintage or a price.
_BOTTLE: Final = re.compile(
    r"[12'’$](?:(?:(?<=\b1)9[5-9]|(?<=\b2)0[0-4]|(?<=['’])\d)\d\b|(?<=\$)\d)"
)
_VINTAGE: Final = re.compile(
    r"(?:[A-Z][\w.'’-]{0,24} ){1,8}(?:['’]\d\d|(?:19|20)\d\d)\W?"
)
_NOTICE: Final = re.compile(
    rf"{_OPEN}(?:(?:[\w'-]{{1,20}} ){{0,4}}(?:dish|recipe|meal|cocktail|dessert|drink|tip) of the "
    r"(?:day|week|month|year)\b.{0,40}"
    r"|(?:how to (?:make|prepare|cook)|c[oó]mo (?:preparar|hacer|fazer)|comment (?:faire|préparer))"
    r" [^.!?:]{3,60}|watch (?:now|the video|this video|video|how to make.{0,80})"
    r"|(?:print|save|rate|share|pin)(?: this| the)? recipe|pin it|read more|view recipe"
    r"|(?:country|cuisine|region) ?: ?[A-Z].{1,50}"
    r"|(?:difficulty|skill level|precision|time|active time|ready in|course|category|keywords?"
    r"|level)"
    r" ?: ?.{1,60}|(?:step by step |full |detailed )?(?:instructions|recipe|method) (?:at"
    r"|on) \S{4,60}"
    r"|get (?:the|this) recipe|advertisement|click here.{0,80}|your nightly specials"
    r"|/?epi-\w+>?|myrecipes is working with .{0,240}|tags? ?:.{0,80}|per serving"
    r"|(?:prep\w{0,9}|cook\w{0,9}|total) times? ?(?::|does|do|may|can|will|varies|depends).{0,60}"
    r"|\d{1,2} (?:w\.?w\.? |weight watchers )?points?(?: plus)?(?: per serving)?"
    r"|(?:notes? ?: ?)?nutrition(?:al)? (?:analysis|info\w{0,9}) (?:is|are) .{0,60}"
    r"|(?:(?:see|find|visit|continue|read|refer|please|detailed|full|more|for|check|photos?"
    r"|video|recipe)\b"
    r"[^:]{0,80}:? )?(?:https?://|www\.)\S{1,150})[\W_]{0,4}",
    re.IGNORECASE,
)
_ADVERT: Final = re.compile(
    rf"{_OPEN}(?:(?:please |you can |be sure to |make sure to |don't forget to )?"
    r"(?:visit|check out|follow|subscribe|find|get|read|view|go to|pix at|photos? at) "
    r"(?:.{0,80}\b(?:my|our|me|us)\b.{0,30}\b(?:blog|web ?sites?|page|site|channel|posts?|instagram"
    r"|facebook|youtube|pinterest|book)\b"
    r"|(?:more|the (?:full|detailed|complete|original|entire)|full|detailed|all my)\b.{0,40}"
    r"\b(?:recipes?|instructions|directions|posts?|details|photos)\b|(?:me|us) on\b|(?:https?:"
    r"|www\.))"
    r"|(?:see|visit) (?:my|our) (?:blog|web ?sites?|page|site|channel)\b"
    r"|for more (?:recipes|info\w{0,9}|details|photos|ideas|pictures)\b|go here for\b"
    r"|thanks? (?:you )?for (?:reading|watching|visiting|looking)\b"
    r"|(?:i )?hope (?:you|that you) (?:enjoy|like|love)\b).{0,160}",
    re.IGNORECASE,
)
# Words of a paid recommendation.
_DISCLOSURE: Final = re.compile(
    r"[dDaAsSrRpPcC](?:(?<=\b.)(?:isclosure\b|ffiliate (?:link|program)|ponsored\b"
    r"|eceived (?:a |free )sample|romo code|oupon code))"
)
_PRAISE: Final = (
    r"(?:(?:also|so|very|really|truly|especially|always|just|such|quite|absolutely|a|an|the|our|my"
    r"|most) ){0,3}(?:good|great|delicious|tasty|yummy|wonderful|perfect|excellent|hit|favou?rite"
    r"|amazing|awesome|fantastic|popular|easy|quick|must)\b"
)
_OPINION: Final = re.compile(
    rf"{_OPEN}(?:(?:this|these|it|they)(?: [\w'-]+){{0,4}}? (?:is|are|was|were|tastes?|makes?|goes"
    rf" (?:really )?well) {_PRAISE}|(?:this|these|it|they|goes)(?: goes?)? (?:really "
    rf"|very )?well with\b"
    r"|(?:also )?(?:delicious|great|yummy|wonderful|excellent|tasty) (?:on|with|for|as|in|over"
    r"|served)\b|also good\b|good (?:with|on|for)\b"
    r"|(?=\D*\Z)(?:i|we)(?:(?: (?:also|really|just|usually|always|often|sometimes|personally"
    r"|actually))? "
    r"(?:love[ds]?|like[ds]?(?! to\b)|prefer(?:red)?|used|made|got|found|hope|think"
    r"|bought|buy|have|had|was|am|forgot|didn[’']t|don[’']t|absolutely|almost)\b|[’'](?:ve|m|d)\b)"
    r"|my (?:family|kids|husband|wife|mother|mom|grandm\w{2,8}|sons?|daughters?|friends?"
    r"|children)\b"
    r"|(?:this|it|these|they )?can also (?:use this|be used (?:as|for|in|on))\b"
    r"|for (?:an? )?(?:[\w-]{3,12} )?(?:variation|version)s?\b)"
    r"(?:[^.!?]|[.!?](?=\d)){0,200}[.!]{0,3}[)\"]?",
    re.IGNORECASE,
)  # a sentence that praises the dish or describes the writer, not a step
# A sentence such as "She has been making this her entire life."
_ANECDOTE: Final = re.compile(
    rf"{_OPEN}(?:(?:[\w'’-]{{1,20}},? ){{1,8}}?(?:has|have)|(?:i|we|he|she|they)[’'](?:ve|s)) been"
    r" (?:making|baking|cooking|serving|eating)(?: (?:this|these|it|them|my|our))\b"
    r"(?:[^.!?]|[.!?](?=\d)){0,200}[.!]{0,3}\Z",
    re.IGNORECASE,
)
# A note on the recipe, of any length; "*Peas" is a footnote.
_NOTE: Final = re.compile(
    r"(?:cook|chef)s?['’]?s?['’]? notes? (?-i:[A-Z])"
    rf"|\*{{1,3}}(?=[^\W\d_])|{_OPEN}(?:(?!(?:for|to|make|the)\b)[\w'’-]{{1,16}} ){{0,2}}"
    r"(?:notes?|tips?|tipps?|(?:do|make)[ -]ahead|hints?|nota|dicas?|astuces?|hinweis|consejos?"
    r"|variations?|substitutions?|storage"
    r"|suggestions?|p\.? ?s\.?|good to know)"
    r"(?: (?:notes?|tips?|\d))? ?(?::|[–—-] |-(?=[A-Z]))",
    re.IGNORECASE,
)
# A sentence of the writer among the ingredients.
_SPEAKER: Final = re.compile(
    r"(?:I|We|You|It)(?:['’](?:ve|m|d|re|ll|s))? [^\d].{20,280}[.!]\W{0,2}"
)
_BEFORE_AMOUNT: Final = re.compile(r"[^,;:(\d]{0,70}")
_TELLING: Final = (" can ", " is ", " are ", " you'll ", " we ")
_NUTRITION: Final = re.compile(
    rf"{_OPEN}(?:(?:one|each|per|a|1) serving(?: contains| provides| has)?\b|(?:it )?contains \d"
    r"|(?:carbo\w{0,10}|protein|fat|sodium|fib(?:er|re)|cholesterol)(?: rating)?(?: ?[:=])? ?\d"
    r"|(?:the )?(?:skinny )?"
    r"nutrition(?:al)?(?: (?:info|information|facts|analysis|content|values?|data))?\b|amount per"
    r"|approximate (?:analysis|nutrition)|(?:about |approximately )?\d{2,4} (?:calories|kcal|cal)\b"
    r"|(?:this|each|one) [^.\d]{3,40} (?:is|has|contains) (?:only |about )?\d"
    r"|calories(?: per \w{1,12})? ?[:(=]? ?\d|per (?:cookie|slice|piece|muffin|portion)\b)",
    re.IGNORECASE,
)
_FIGURE: Final = re.compile(
    r"\d ?(?:g|mg|grams?|kcal|cal|(?:optional )?calories|points?|%)\b"
    r"|(?:calories|cholesterol|sodium|fat|carbo\w{0,10}(?: rating)?) ?[:(]? ?\d",
    re.IGNORECASE,
)
_FOR_SALE: Final = re.compile(
    r"(?-i:[aAfFsSſ])(?:(?<=\ba)vailable|(?<=\bs)old|(?<=\bf)ound) (?:[a-z]{2,12} ){0,4}?"
    r"(?:at|in|from|by mail|online|through)\b",
    re.IGNORECASE,
)
# An instruction, or the beginning of a sentence that may contain one.
_TELLS_HOW: Final = re.compile(
    r"\A\W*(?:in|on|with|for|to|when|while|if|after|before|meanwhile|using|place|until)\b"
    r"|(?:\A\W*|[.;:,!)] |\b(?:and|then) )"
    rf"(?:{'|'.join(sorted(ACTION_VERBS - {'can', 'cream'}))})\b(?! of\b)",
    re.IGNORECASE,
)
# An instruction that `_TELLS_HOW` misses, for texts in which a miss would remove a step.
_ORDER: Final = re.compile(
    r"\b(?:\w{2,}ly|just|to|please|first|first of all|next|always|also|you'll) "
    rf"(?:{'|'.join(sorted(ACTION_VERBS | MORE_VERBS))})\b"
    rf"|(?:\A\W*|[.;:,!)] |\b(?:and|then) )(?:{'|'.join(sorted(MORE_VERBS))})\b",
    re.IGNORECASE,
)
_ENGLISH: Final = frozenset(
    "and are be can for from have is it my of that the this was will with you your".split()  # noqa: SIM905
)
_MIN_ENGLISH: Final = 2  # minimum distinct words of `_ENGLISH` in an English text
# The beginning of a text about a dish, or a word about its writer.
_STORY: Final = re.compile(
    rf"\A{_OPEN}(?:(?:this|these|it|i|we|my|our|here|thanks|tried|originally|entertaining"
    r"|there)\b|an? )"
    r"|\b(?:i|i['’](?:m|ve|d)|my|we['’](?:re|ve)|is a (?:great|good)|[a-z]+ says)\b",
    re.IGNORECASE,
)
_WRITER: Final = re.compile(
    r"\b(?:i|i['’](?:m|ve|d)|my|thanks|we['’](?:re|ve))\b"
    rf"|\A{_OPEN}(?:p\.? ?s\b|comments?:)",
    re.IGNORECASE,
)
_STORY_CHARS: Final = 200
"""Characters at the beginning of a step that are searched for words of its writer."""
_MOST_STORIES: Final = 3  # maximum steps removed from each end
_INFO: Final = re.compile(rf"{_OPEN}ingredient (?:info|tips?|notes?) ?:", re.IGNORECASE)
_OPENS_NOTE: Final = re.compile(
    rf"\*|{_OPEN}(?:an? [^.:,;\d]{{3,60}};? )?(?:available|sold|found) ", re.IGNORECASE
)
_SHORT: Final = 40
_MAX_NAME_WORDS: Final = 6  # maximum words of a wine or a writer
_MAX_TITLE_WORDS: Final = 12  # maximum words of a book's title
_SMALL: Final = frozenset({"and", "by", "de", "del", "di", "of", "the", "von", "&"})
_DIGIT: Final = re.compile(r"\d")
_LONG_WORD: Final = re.compile(r"\A[^\W\d_]+|[^\W\d_]{5,}")
_STOPS: Final = frozenset('.!?)]…"”')
_ENDS: Final = (". ", "! ", "? ", ".) ")


def is_credit(line: str) -> bool:
    """Return whether an entire line names the writer, cook or photographer of something."""
    return len(line) <= MOST_CHARS and _CREDIT.match(line) is not None


def is_shopping_note(line: str, *, within: bool = False) -> bool:
    """Return whether a line only names a shop for a food.

    `within` steps, other words may precede the shop.
    """
    if len(line) > MOST_CHARS:
        return False
    if _INFO.match(line):  # "Ingredient info: Harissa is a hot paste."
        return True
    if _FOR_SALE.search(line) is None:
        return False
    if _OPENS_NOTE.match(line):  # "*Available at Asian markets"
        return True
    # "A chili paste sold at Asian markets."
    if within:
        return _TELLS_HOW.search(line) is None
    return line[-1:] == "." and not line[:1].isdigit()


def is_note(line: str) -> bool:
    """Return whether an ingredient line is a note, a yield or a sentence."""
    return (
        _is_sentence(line)
        or _SPEAKER.fullmatch(line) is not None
        or _NOTE.match(line) is not None
        or _YIELD.fullmatch(line) is not None
    )


def _is_sentence(line: str) -> bool:
    """Return whether a line has a verb such as "is" before its amount, and ends like a sentence."""
    opening = _BEFORE_AMOUNT.match(line)
    if opening is None or len(line) > MOST_CHARS:
        return False
    if line[-1] not in (")" if line[0] == "(" else ".!"):
        return False
    # A subject of at least 4 characters precedes the verb: "Masa harina is a flour."
    return any(opening[0].find(word, 4) >= 0 for word in _TELLING)


def without_credits(steps: tuple[str, ...], notes: Counter[str]) -> tuple[str, ...]:
    """Remove credits and notices from clean steps and count them in `notes`."""
    if not steps:
        return steps
    steps = (*steps[:-1], _without_note_within(steps[-1], notes))
    steps = tuple(
        step if _why_removed(step) else _without_end(step, notes) for step in steps
    )
    reasons = _reasons(steps)
    notes.update(why for why in reasons if why)
    steps = tuple(step for step, why in zip(steps, reasons, strict=True) if not why)
    return _without_stories(steps, notes)


@lru_cache(maxsize=1 << 8)  # the first and the last step are checked twice
def tells_how(step: str) -> bool:
    """Return whether a text contains an instruction. Assume so in other languages."""
    if _TELLS_HOW.search(step) or _ORDER.search(step):
        return True
    return len(_ENGLISH.intersection(words_of(step))) < _MIN_ENGLISH


def _without_stories(steps: tuple[str, ...], notes: Counter[str]) -> tuple[str, ...]:
    """Remove texts about the dish or its writer from the beginning and end of the steps."""
    start, end = 0, len(steps)
    while start < min(end - 1, _MOST_STORIES) and _is_story(steps[start], _STORY):
        start += 1
    while end > max(start + 1, len(steps) - _MOST_STORIES) and _is_story(
        steps[end - 1], _WRITER
    ):
        end -= 1
    notes[STORIES] += start + len(steps) - end
    return steps[start:end]


def _is_story(step: str, words: re.Pattern[str]) -> bool:
    """Return whether a step contains these words of its writer and no instruction."""
    if step[-1:] == ":" or words.search(step, 0, _STORY_CHARS) is None:
        return False
    return not tells_how(step)


def _reasons(steps: tuple[str, ...]) -> list[str]:
    """Return the reason for removing each step, or ""."""
    reasons = [_why_removed(step) for step in steps]
    _mark_rest_of_notes(steps, reasons)
    # A name is a credit if all other steps are sentences.
    *others, last = steps
    are_sentences = bool(others) and all(step[-1:] in _STOPS for step in others)
    if are_sentences and not reasons[-1] and _is_name(last):
        reasons[-1] = CREDITS
    _mark_end(steps, reasons)
    return reasons


def _mark_end(steps: tuple[str, ...], reasons: list[str]) -> None:
    """Mark the lines near a credit or wine at the end of the steps, such as book titles."""
    start = len(steps)
    while start and (reasons[start - 1] or _may_be_title(steps[start - 1])):
        start -= 1
    for i in range(start, len(steps)):
        if reasons[i]:
            continue
        if i + 1 < len(steps) and _AUTHOR.match(steps[i + 1]):
            reasons[i] = CREDITS
        elif i and reasons[i - 1] in {CREDITS, WINES}:
            reasons[i] = reasons[i - 1]


def _mark_rest_of_notes(steps: tuple[str, ...], reasons: list[str]) -> None:
    """Mark the sentences that continue a note in a text split into sentences.

    The note continues as long as the next sentence names the same food.
    """
    food = ""  # food of a note that may continue in the next line
    for i, step in enumerate(steps):
        task = _TASK_OF_NOTE.match(step) if reasons[i] == NOTES else None
        if task:
            # A note of several sentences is complete.
            is_complete = any(end in step for end in _ENDS)
            food = "" if is_complete else task[1].casefold()
        elif food and food in step.casefold():
            reasons[i] = reasons[i] or NOTES
        else:
            food = ""


def _is_name(step: str) -> bool:
    """Return whether a final line is a name of a wine or a writer, not a sentence."""
    words = [word for word in step.split() if word not in _SMALL]
    if step[-1:] in _STOPS or not 2 <= len(words) <= _MAX_NAME_WORDS:
        return False
    if not all(word[0].isupper() for word in words):
        return False
    return not (has_action_verb(step) or _DIGIT.search(step))


def _may_be_title(step: str) -> bool:
    """Return whether a line is or continues a title or a name. Its long words are capitalised."""
    words = words_of(step)
    if (
        not 0 < len(words) <= _MAX_TITLE_WORDS
        or len(step) > 2 * _SHORT
        or words[0] in ACTION_VERBS
    ):
        return False
    if _GOES_ON.match(step):  # "from Ann's kitchen", not "and serve"
        return not has_action_verb(step)
    return all(word[0].isupper() for word in _LONG_WORD.findall(step))


@lru_cache(maxsize=1 << 10)  # each step of a recipe is checked at least twice
def _why_removed(step: str) -> str:
    """Return the note on a step that is a credit or a notice, or "" for an instruction."""
    kinds = _KINDS_OF_LONG_STEPS if len(step) > MOST_CHARS else _KINDS
    return next((why for why, is_of_kind in kinds if is_of_kind(step)), "")


def _without_note_within(step: str, notes: Counter[str]) -> str:
    """Remove a note, which may have several sentences, from the end of the last step."""
    note = _NOTE_WITHIN.search(step) if ":" in step else None
    if note is None or len(step) - note.end() > MOST_CHARS:
        return step
    notes[NOTES] += 1
    return step[: note.start() + 1]


def _without_end(step: str, notes: Counter[str]) -> str:
    """Remove unrelated sentences from the end of a step."""
    match = _WITHIN.search(step, max(0, len(step) - MOST_CHARS))
    if match:
        notes[CREDITS] += 1
        step = step[: match.start() + 1]
    end = len(step)
    while start := _start_of_last_sentence(step, end):
        why = _why_removed(step[start:end].lstrip(") "))
        if not why:
            break
        notes[why] += 1
        end = start
    bracket = ")" if step.startswith(")", end) else ""
    return step[:end] + bracket


def _start_of_last_sentence(step: str, end: int) -> int:
    """Return the index after the full stop before a step's last sentence, or 0."""
    start = max(0, end - MOST_CHARS)
    return 1 + max(step.rfind(mark, start, end) for mark in _ENDS)


def _names_source(step: str) -> bool:
    """Return whether a line names its cook ("Recipe by Ann Lee"), author or book."""
    return bool(_CREDIT.match(step) or _AUTHOR.match(step) or _PUBLISHED.search(step))


def _is_notice(step: str) -> bool:
    """Return whether a line is part of the page: "Watch now", "Visit my blog", "Sponsored"."""
    is_line_of_page = _NOTICE.fullmatch(step) or _ADVERT.fullmatch(step)
    return bool(is_line_of_page or _DISCLOSURE.search(step))


def _is_opinion(step: str) -> bool:
    """Return whether a sentence praises the dish ("This is so good!") or is about the writer."""
    if _OPINION.fullmatch(step):
        return True
    return " been " in step and _ANECDOTE.match(step) is not None


def _states_nutrition(step: str) -> bool:
    """Return whether a line begins with a nutrient or a serving and has an amount of it."""
    return bool(_NUTRITION.match(step) and _FIGURE.search(step))


def _is_on_wine(step: str) -> bool:
    """Return whether a step recommends or names a wine and begins with no action."""
    opener = _WINE.match(step)
    has_bottle = _BOTTLE.search(step) is not None
    is_named = has_bottle and not _WINE_WORDS.isdisjoint(words_of(step))
    if not (opener or is_named or _VINTAGE.fullmatch(step)):
        return False
    first_word = words_of(step[opener.end() if opener else 0 :])[:1]
    return ACTION_VERBS.isdisjoint(first_word)


_Kinds = tuple[tuple[str, Callable[[str], object]], ...]
# Kinds of steps that are removed, with their predicates. The first predicate that is true counts.
# Notes come last, because a credit may begin with "Note:".
_KINDS: Final[_Kinds] = (
    (CREDITS, _names_source),
    (NOTICES, _is_notice),
    (NOTES, _is_opinion),
    (NUTRITION, _states_nutrition),
    (YIELDS, _YIELD.fullmatch),
    (WINES, _is_on_wine),
    (SHOPPING, partial(is_shopping_note, within=True)),
    (NOTES, _NOTE.match),
)
# Kinds of steps that may be longer than `MOST_CHARS`.
_KINDS_OF_LONG_STEPS: Final[_Kinds] = (
    (NOTICES, _DISCLOSURE.search),
    (NOTES, _NOTE.match),
)
