"""Origins of a recipe: its cuisine from its own tags, and its language from common words."""

from __future__ import annotations

from collections.abc import Iterable

from toque.cooking.labels.features import Reading

_CUISINE_NAMES = {  # cuisines, with other names of theirs in tags
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
CUISINES: tuple[str, ...] = tuple(_CUISINE_NAMES)
"""Cuisines. The index of a cuisine is its code in the column `cuisine`."""

_CODES = {
    name.casefold(): code
    for code, (cuisine, others) in enumerate(_CUISINE_NAMES.items())
    for name in (cuisine, *others.split("; "))
    if name
}
"""Codes of cuisines by name in lower case."""


def cuisine_of(tags: Iterable[str]) -> int | None:
    """Return the code of the cuisine that the tags name, or None for no or several cuisines."""
    names = {
        tag.casefold().replace("-", " ").strip().removesuffix(" diet") for tag in tags
    }
    codes = {_CODES[name] for name in names if name in _CODES}
    return codes.pop() if len(codes) == 1 else None


_WORDS = {
    "English": "the and of to in with a until for on into or it is from add over at minutes",
    "German": "der die das und mit den in zu auf ein eine dem im für aus bei nach minuten etwas",
    "French": "le la les et de du des un une dans avec à en au sur pendant pour vous minutes puis",
    "Spanish": "el la los las y de en con un una que por se al del hasta para lo minutos sal",
    "Italian": "il la le e di in con un una per che gli del della al nel fino poi minuti lo",
    "Portuguese": "o a os as e de em com um uma que por até da do no na para minutos ao",
    "Dutch": "de het een en van in met op je voor tot er aan uit dan minuten bij en doe snijd",
    "Swedish": "och i en ett med på av till det som för den ca låt tills så minuter rör ner",
    "Danish": "og i en et med på af til det som for den ca lad indtil så minutter hæld dem kom",
    "Norwegian": "og i en et med på av til det som for den ca la så minutter ha rør deg ut",
    "Finnish": "ja on sekä noin kun se niin anna lisää minuuttia sekaan päälle uunissa kunnes",
    "Polish": "i w na z do się po przez lub ok oraz jest minut dodaj nie od aż można około",
    "Czech": "a v na s do se po si nebo je minut přidáme pak ve které až z k necháme asi",
    "Hungarian": "a az és egy hogy majd ha meg is nem percig bele jól el vagy hozzá rá össze",
    "Turkish": "ve bir ile için da de kadar sonra dakika bu üzerine ekleyin daha olarak su ince",
    "Romanian": "și si in cu de la se o pe un din pentru minute sau apoi până ce peste le am",
    "Indonesian": "dan di hingga dengan yang lalu ke dalam api tambahkan masukkan aduk rata menit",
}
_COMMON = {name: frozenset(words.split()) for name, words in _WORDS.items()}
"""Common words in recipes, by language."""
_SCRIPTS = (
    ("\u0370", "\u03ff", "Greek"),
    ("\u0400", "\u04ff", "a Cyrillic script"),
    ("\u0590", "\u05ff", "Hebrew"),
    ("\u0600", "\u06ff", "an Arabic script"),
    ("\u0900", "\u0d7f", "an Indian script"),
    ("\u0e00", "\u0e7f", "Thai"),
    ("\u3040", "\u30ff", "Japanese"),
    ("\u4e00", "\u9fff", "Chinese characters"),
    ("\uac00", "\ud7af", "Korean"),
)
"""First and last letter of each script, and the script's name in reports."""
_MAX_CHARS = 300
"""Number of characters of the steps that are searched for a script."""
MIN_SHARE = 0.04
"""Minimum fraction of a language's common words to recognise it."""


def language_of(reading: Reading) -> str:
    """Return the language of a recipe's steps, or "English" if no other language is recognised."""
    if script := _script_of(reading.text[:_MAX_CHARS]):
        return script
    words = reading.words
    counts = {
        name: sum(map(common.__contains__, words)) for name, common in _COMMON.items()
    }
    best = max(counts, key=counts.__getitem__)
    if counts[best] == counts["English"] or counts[best] < MIN_SHARE * len(words):
        return "English"
    return best


def _script_of(text: str) -> str:
    """Return the script of most letters in a text, or "" for a Latin or another script."""
    if text.isascii():
        return ""
    letters = [letter for letter in text if letter.isalpha()]
    for first, last, script in _SCRIPTS:
        n_of_script = sum(first <= letter <= last for letter in letters)
        if n_of_script > len(letters) / 2:
            return script
    return ""
