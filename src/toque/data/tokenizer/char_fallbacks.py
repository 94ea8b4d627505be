"""Character fallbacks: readable stand-ins for characters that a vocabulary lacks.

T5's 32,100 pieces know no `½`, `{`, `<` or `ñ`: encoded as they stand they become unknown tokens
("1½ cups" turns into "1<unk>2 cups"). A byte-level vocabulary holds everything and needs none.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from tokenizers import Tokenizer

_SLASH = "\u2044"
_FRACTIONS = "".join(
    chr(c)
    for c in (*range(0xBC, 0xBF), *range(0x2150, 0x215F), 0x2189)
    if _SLASH in unicodedata.normalize("NFKD", chr(c))
)
# "1½" is one and a half: without the space its compatibility form would read 11/2.
_MIXED_NUMBER = re.compile(rf"(?<=\d)(?=[{_FRACTIONS}])")
_SAME_FOR: dict[str, str] = {
    "": "^§¿¡",
    "(": "{<[",
    ")": "}>]",
    "/": f"{_SLASH}\\|÷",
    "'": "`´’‘ʼ′‹›",
    '"': "“”″‟«»",
    ",": "‚",
    "-": "‧–—−‐‑•●",
    "x": "×",
    "u": "µμ",
}
"""Stand-in -> the characters that it alone is tried for."""
_LETTERS = "æ:ae Æ:Ae œ:oe Œ:Oe ø:o Ø:O å:a ß:ss ð:d Ð:D þ:th Þ:Th đ:d Đ:D ł:l Ł:L ı:i"
"""Letters, each with its stand-in."""
# Tried in order after the character's own decomposition fails; the first that is held is taken.
_STAND_INS: dict[str, tuple[str, ...]] = {
    **{char: (stand_in,) for stand_in, chars in _SAME_FOR.items() for char in chars},
    **{pair[0]: (pair[2:],) for pair in _LETTERS.split()},
    "_": ("-", " "),
    "~": ("about ", "-"),
    "≈": ("about ",),
    "·": ("-", "."),
    "±": ("+/-",),
    "©": ("(c)",),
    "®": ("(R)",),
    "™": ("TM",),
    "°": (" degrees ",),
    "º": ("°", " degrees "),
    "¢": (" cents",),
}


class Rewriter:
    """Rewrites text into what `tokenizer` can hold; a second pass changes nothing.

    A special token written out in the text ("<|endoftext|>" in a scraped page) gets a space after
    its first character where the tokenizer would otherwise read it as the token itself.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, unk_id: int | None, specials: Iterable[str]
    ) -> None:
        self.tokenizer = tokenizer
        self.unk_id = unk_id
        self._table = _Table(self)
        # Of what folds characters before splitting (NFC, NFKC, a SentencePiece map) Llama's only
        # writes spaces as "▁"; its decoder undoes that, so it is left alone.
        normalizer = tokenizer.normalizer
        self.folds = normalizer is not None and normalizer.normalize_str("a b") == "a b"
        # Private-use characters are in no learnt vocabulary: whoever holds one holds all bytes.
        limited = unk_id is not None and not self.holds("\ue123")
        self._limited = limited
        self._splits_fractions = limited and not self.holds("½")
        self._word = lru_cache(maxsize=1 << 16)(self._rewritten_word)
        # The ASCII characters that need a closer look.
        lacking = [limited and not self.holds(chr(c)) for c in range(128)]
        odd = bytes(c for c in range(128) if c != 10 and (c < 32 or c == 127 or lacking[c]))
        self._ascii_trouble = odd if limited or self.folds else None
        ascii_odd = "".join(map(re.escape, (self._ascii_trouble or b"").decode()))
        self._odd = re.compile(f"[^\\x00-\\x7f]|[{ascii_odd}]" if ascii_odd else r"[^\x00-\x7f]")
        self.misread = sorted(filter(self._misread, specials), key=len, reverse=True)
        misread = "|".join(map(re.escape, self.misread))
        self._specials = re.compile(misread) if misread else None
        self._first_of_specials = {special[0] for special in self.misread}

    def holds(self, text: str) -> bool:
        """True if `text` encodes without an unknown token."""
        return self.unk_id not in self.tokenizer.encode(text, add_special_tokens=False).ids

    def __call__(self, text: str) -> str:
        """`text` with stand-ins for what the vocabulary lacks: "1½ ñ" is "1 1/2 n"."""
        text = self._rewritten(text)
        # Looking for one character costs a hundredth of trying every special at every place.
        if self._specials is not None and any(c in text for c in self._first_of_specials):
            text = self._specials.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return text

    def drops(self, char: str) -> bool:
        """True if no rewritten text holds `char`."""
        return self._limited and self.stand_in(char) == ""

    def gaps(self) -> list[str]:
        """Patterns of the places at which a space is put in before anything else is done."""
        return [_MIXED_NUMBER.pattern] if self._splits_fractions else []

    def stand_ins(self) -> dict[str, list[str]]:
        """Every stand-in with the characters it replaces, of all that Unicode can write."""
        found: dict[str, list[str]] = {}
        for code in range(sys.maxunicode + 1) if self._limited else ():
            if 0xD800 <= code <= 0xDFFF:  # halves of pairs, which no text holds
                continue
            char = chr(code)
            unassigned = unicodedata.category(char) in {"Co", "Cn"}  # most of them, and never held
            stand_in = "" if unassigned else self.stand_in(char)
            if stand_in is not None and stand_in != char:
                found.setdefault(stand_in, []).append(char)
        return found

    def lost(self, texts: Iterable[str]) -> Counter[str]:
        """Counts of each character without a stand-in in texts already rewritten."""
        counts: Counter[str] = Counter()
        for text in texts:
            if self._limited and not self._table.lost.isdisjoint(text):
                counts.update(c for c in text if c in self._table.lost)
        return counts

    def _rewritten(self, text: str) -> str:
        if self._is_plain(text):
            return text
        # Line by line: folding turns a line break into a space in some vocabularies (T5's).
        return "\n".join(
            line if self._is_plain(line) else self._rewritten_line(line)
            for line in text.split("\n")
        )

    def _rewritten_line(self, line: str) -> str:
        """Word by word: few words need it, and they repeat."""
        parts, done = [], 0
        for odd in self._odd.finditer(line):
            if odd.start() < done:
                continue
            start = line.rfind(" ", 0, odd.start()) + 1
            if unicodedata.category(line[start])[0] in "MC":
                return self._word(line)  # a mark or joiner belongs to the space before it
            parts.append(line[done:start])
            done = line.find(" ", start)
            done = len(line) if done < 0 else done
            parts.append(self._word(line[start:done]))
        return "".join(parts) + line[done:]

    def _rewritten_word(self, line: str) -> str:
        if self._splits_fractions:
            line = _MIXED_NUMBER.sub(" ", line)
        line = self._fold(line)
        if not self._limited:
            return line
        rewritten = line.translate(self._table)
        # A stand-in can complete something that folds again (a letter before a combining mark).
        return rewritten if rewritten == line else self._fold(rewritten)

    def _fold(self, line: str) -> str:
        return str(self.tokenizer.normalizer.normalize_str(line)) if self.folds else line

    def _is_plain(self, text: str) -> bool:
        trouble = self._ascii_trouble
        if trouble is None:
            return True
        # Deleting bytes by a table is ten times faster than searching for a class of characters.
        return text.isascii() and len(text.encode().translate(None, trouble)) == len(text)

    def stand_in(self, char: str) -> str | None:
        """Replacement of `char`: itself when held, None when nothing fits."""
        if char.isspace() or self.holds(char):
            return char
        for candidate in _STAND_INS.get(char, ()):
            if candidate == "" or self.holds(candidate):
                return candidate
        if unicodedata.category(char) in {"Cc", "Cf", "Mn", "Co", "Cn"}:
            return ""  # invisible: accents left alone, joiners, soft hyphens, controls
        parts = unicodedata.normalize("NFKD", char)
        if parts == char:
            return None
        held = [stand_in for part in parts if (stand_in := self.stand_in(part)) is not None]
        return "".join(held) if len(held) == len(parts) else None

    def _misread(self, special: str) -> bool:
        token = self.tokenizer.token_to_id(special)
        ids = self.tokenizer.encode(f"a {special} b", add_special_tokens=False).ids
        return len(special) > 1 and token in ids and self._rewritten(special) == special


class _Table(dict[int, str]):
    """`str.translate`'s table, filled as characters are met."""

    def __init__(self, rewriter: Rewriter) -> None:
        super().__init__()
        self._rewriter = rewriter
        self.lost: set[str] = set()

    def __missing__(self, code: int) -> str:
        char = chr(code)
        stand_in = self._rewriter.stand_in(char)
        if stand_in is None:
            self.lost.add(char)
            stand_in = char
        self[code] = stand_in
        return stand_in
