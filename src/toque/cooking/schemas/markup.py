"""Markup and characters of scraped texts: tags, entities, control characters, white space.

`notes` counts the repairs for the data report. The codec handles fractions such as "½".
"""

from __future__ import annotations

import html
import re
from collections import Counter
from html.entities import html5
from typing import Final

from toque.cooking.schemas.repairs import SPACED_MARK, TRADEMARKS
from toque.sources.documents import to_nfc
from toque.sources.records import replace_lone_surrogates

_CLEAN = re.compile(r"[ -%'-;=?-Z\\-~]*")  # ASCII without "&", "<", ">" and "["
_LINE_MARKUP = re.compile(
    r"<\s*+(?:/\s*+)?(?:br|p|li|div|ol|ul|tr|h\d)\b[^<>]*>", re.IGNORECASE
)
_MARKUP = re.compile(r"<[a-zA-Z/!][^<>]*>")
# Tags in "<sup>1</sup>&frasl;<sub>2</sub>", which must not become spaces.
_RAISED_FRACTION = re.compile(
    r"<sup[^<>]*>\s*(\d{1,3})\s*</sup>\s*[/⁄∕]\s*(?:<sub[^<>]*>\s*(\d{1,3})\s*</sub>|(\d{1,3}))",
    re.IGNORECASE,
)
_NO_CHARACTER = re.compile(r"&#(?:[xX]0*+[0-9a-fA-F]{7,}+|0*+[0-9]{8,}+);?")
_REMNANT = re.compile(r'"{0,3}(?<![-=])[<>](?! ?[\d=])"{0,3}')  # a part of a tag
# An entity without its "#", with an extra mark or space, or in capitals; excludes "M&M;"
_BROKEN_ENTITY = re.compile(
    r"#?&(?P<number>\d{2,4});{1,2}|&[; ]?(?P<name>amp|deg|nbsp|frac\d\d"
    r"|[a-z](?:acute|grave|circ|uml|cedil|tilde|ring));"
    r"|&(?P<base>[aeiou])[a-z]?(?P<accent>cute|acute|grave|circ|uml|tilde);"
    r"|(?P<degree>&def;(?=[FC]\b))|&(?=[à-ÿ])|&(?P<letter>[a-z]);",
    re.IGNORECASE,
)
_LINK = re.compile(r"!?\[([^\[\]]{0,200})\]\([^()\s]{1,300}\)")
_BLANKS = re.compile(r"[^\S\n]+")
_LINE_ENDS = re.compile(r"\r\n?|[\u2028\u2029\x0b\x0c\x1c-\x1f\x85]")
# Joiners are part of words in Arabic, Indic and related scripts, and of emoji. Others are noise.
_JOINING = (
    "\u0590-\u109f\u1700-\u18af\u1900-\u1cff\ua800-\uabff\ufb1d-\ufdff\ufe70-\ufefc"
    "\U00010a00-\U00011fff\U0001e900-\U0001e95f"
)
_EMOJI = "\u2190-\u2bff\U0001f000-\U0001faff"
# An invisible character. Group 1 matches a joiner that must be kept, with the character before it.
_INVISIBLE = re.compile(
    f"([{_JOINING}][\u200c\u200d]|[{_EMOJI}]\ufe0f?\u200d(?=[{_EMOJI}]))"
    "|[\u00ad\u200b-\u200f\u202a-\u202e\u2060\ufeff\ufe0e\ufe0f\ufffc]"
)
_CONTROLS = re.compile(r"[\x00-\x09\x0e-\x1b\x7f-\x9f]")
# Windows-1252 read as Latin-1 leaves its punctuation among the C1 controls.
_WINDOWS_1252 = {
    0x91: "'",
    0x92: "'",
    0x93: '"',
    0x94: '"',
    0x96: "–",
    0x97: "—",
    0x09: " ",
}
# One U+FFFD per lost byte of UTF-8: the degree sign had two, the apostrophe and the dash three.
_LOST_DEGREE = re.compile(r"(?<=\d)\ufffd{1,2}(?=\s?[FC]\b)")
_LOST_DASH = re.compile(r"(?<=\d)\ufffd{1,3}(?=\d)")
_TRADEMARK = re.compile(r",? ?[®™℠]|(?<=[.!?)]) ?[◊♦](?=\s|\Z)")
_REGISTERED = frozenset("®™℠◊♦")
# The character that an import wrote in place of a fraction.
LOST_FRACTION: Final = re.compile(
    r"(?:[§¤◊¨¦]|\ufffd{1,3})(?= ?(?:cups?|t(?:ea|able)spoons?|tsps?|tbsps?|pounds?|lbs?|ounces?|oz"
    r"|inch(?:es)?|pints?|quarts?|sticks?)\b)|(?<=\d)[§¤◊¨¦]"
)
_LOST_APOSTROPHE = re.compile(
    r"(?<=[^\W\d_])(?:\ufffd{3}|\ufffd)(?=(?:s|t|re|ve|ll|d)\b)"
)


def clean_text(text: str, notes: Counter[str]) -> str:
    r"""Repair a string of a record. Meaningful line breaks remain as "\n"."""
    if _CLEAN.fullmatch(text):
        return " ".join(text.split()) if "  " in text else text.strip()
    text = _repair(text, notes)
    return "\n".join(map(str.strip, _BLANKS.sub(" ", text).split("\n"))).strip()


def _repair(text: str, notes: Counter[str]) -> str:
    """Decode or remove entities, tags, links and damaged characters. Count each kind once."""
    text = _without_markup(_LINE_ENDS.sub("\n", text), notes)
    if text.isascii() and text.isprintable():
        return text
    text = replace_lone_surrogates(text)

    if "\ufffd" in text:
        notes["texts with lost characters (U+FFFD)"] += 1
        text = _restore_lost_characters(text)

    if not _REGISTERED.isdisjoint(text):
        notes[TRADEMARKS] += 1
        text = _TRADEMARK.sub("", text)

    if _CONTROLS.search(text):
        notes["texts with control characters"] += 1
        text = _CONTROLS.sub("", text.translate(_WINDOWS_1252))

    visible = _INVISIBLE.sub(r"\1", text)
    notes["texts with invisible characters"] += visible != text
    return to_nfc(visible)


def _without_markup(text: str, notes: Counter[str]) -> str:
    """Decode HTML entities, and remove HTML tags and the addresses of Markdown links."""
    if "&" in text:
        # Some texts are escaped twice: "&amp;frac12;".
        unescaped = decoded_entities(decoded_entities(text))
        notes["HTML entities decoded"] += unescaped != text
        text = _LINE_ENDS.sub("\n", unescaped)

    if "<" in text or ">" in text:
        plain = _RAISED_FRACTION.sub(r" \1/\2\3 ", text)
        plain = _LINE_MARKUP.sub("\n", plain)
        plain = _REMNANT.sub("", _MARKUP.sub(" ", plain))
        if plain != text:
            notes["HTML tags removed"] += 1
            text = SPACED_MARK.sub(r"\1", plain)

    if "](" in text:
        notes["texts with Markdown"] += 1
        text = _LINK.sub(r"\1", text)
    return text


def _restore_lost_characters(text: str) -> str:
    """Replace U+FFFD by the character that its neighbours imply, or remove it."""
    text = _LOST_DEGREE.sub("°", text)
    text = _LOST_DASH.sub("-", text)
    # The sign marks a lost fraction; `recipe_of` drops its recipe.
    text = LOST_FRACTION.sub("§", text)
    text = _LOST_APOSTROPHE.sub("'", text)
    return text.replace("\ufffd", "")


def decoded_entities(text: str) -> str:
    """Decode the HTML entities of a text, including common misprints."""
    return html.unescape(
        _BROKEN_ENTITY.sub(_repair_entity, _NO_CHARACTER.sub("\ufffd", text))
    )


def _repair_entity(entity: re.Match[str]) -> str:
    """Return the entity that a malformed one stands for, or the character itself."""
    number, name, letter = entity.group("number", "name", "letter")
    base, accent = entity.group("base", "accent")
    if name:
        # "Aacute" is a name, but "NBSP" is not.
        return f"&{name if name + ';' in html5 else name.lower()};"
    if number:
        return f"&#{number};"
    if base:  # "&ocute;" and "&eaacute;"
        return f"&{base}{'acute' if accent == 'cute' else accent};"
    if entity["degree"]:
        return "°"
    return f"&{letter}" if letter else ""
