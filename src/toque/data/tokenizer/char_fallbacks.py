"""Character fallbacks: readable stand-ins for characters that are not in a vocabulary.

T5's 32,100 pieces do not include `½`, `{`, `<` and `ñ`. Without stand-ins they become unknown
tokens: T5 reads "1½ cups" as "1<unk>2 cups". A byte-level vocabulary has all characters and needs
no stand-in.
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
# "1½" is one and a half. Without a space, NFKD turns it into "11/2".
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
"""Stand-in -> characters that it replaces."""
_LETTERS = "æ:ae Æ:Ae œ:oe Œ:Oe ø:o Ø:O å:a ß:ss ð:d Ð:D þ:th Þ:Th đ:d Đ:D ł:l Ł:L ı:i"
"""Letters and their stand-ins, as "letter:stand-in"."""
_PRIVATE = "\ue123"  # a character of private use
# Candidates for the stand-in of a character. The first one in the vocabulary is used.
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
    """Replacement of characters that are not in a vocabulary. Applying it twice changes nothing.

    If the tokenizer would read "<|endoftext|>" in a scraped page as the special token, a space is
    inserted after its first character.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, unk_id: int | None, specials: Iterable[str]
    ) -> None:
        self.tokenizer = tokenizer
        self.unk_id = unk_id
        self._table = _Table(self)
        # Most normalizers fold characters (NFC, NFKC, a SentencePiece map). Llama's only writes
        # spaces as "▁", and its decoder reverts that, so its normalizer need not be applied.
        normalizer = tokenizer.normalizer
        self.folds = normalizer is not None and normalizer.normalize_str("a b") == "a b"
        # A learnt vocabulary has no character of private use, unless it has all bytes.
        self._is_limited = unk_id is not None and not self._can_encode(_PRIVATE)
        self._splits_fractions = self._is_limited and not self._can_encode("½")
        self._word = lru_cache(maxsize=1 << 16)(self._rewrite_word)

        ascii_chars = set(map(chr, range(128)))
        odd = self._odd_characters(ascii_chars - {"\n"})
        self._odd_ascii = "".join(odd).encode()
        plain = "".join(sorted(ascii_chars - odd))
        self._odd = re.compile(f"[^{re.escape(plain)}]")

        self.misread = sorted(filter(self._is_misread, specials), key=len, reverse=True)
        pattern = "|".join(map(re.escape, self.misread))
        self._specials = re.compile(pattern) if pattern else None
        self._first_of_specials = {special[0] for special in self.misread}

    def _odd_characters(self, chars: set[str]) -> set[str]:
        """Select the characters that rewriting may change."""
        odd = set[str]()
        if self._is_limited or self.folds:
            odd |= {char for char in chars if not char.isprintable()}
        if self._is_limited:
            odd |= {char for char in chars if not self._can_encode(char)}
        return odd

    def _can_encode(self, text: str) -> bool:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.unk_id not in ids

    def __call__(self, text: str) -> str:
        """Replace characters that are not in the vocabulary: "1½ ñ" becomes "1 1/2 n"."""
        text = self._rewrite(text)
        if self._specials is None:
            return text
        # Searching for one character takes a hundredth of the pattern's time.
        if any(char in text for char in self._first_of_specials):
            text = self._specials.sub(
                lambda match: f"{match[0][0]} {match[0][1:]}", text
            )
        return text

    def drops(self, char: str) -> bool:
        """Check if rewriting removes `char` from every text."""
        return self._is_limited and self.stand_in(char) == ""

    def gaps(self) -> list[str]:
        """List patterns of the positions where rewriting first inserts a space."""
        return [_MIXED_NUMBER.pattern] if self._splits_fractions else []

    def stand_ins(self) -> dict[str, list[str]]:
        """List the Unicode characters that rewriting replaces, by stand-in."""
        chars_of_stand_in: dict[str, list[str]] = {}
        if not self._is_limited:
            return chars_of_stand_in
        for code in range(sys.maxunicode + 1):
            if 0xD800 <= code <= 0xDFFF:  # half of a surrogate pair, which is not text
                continue
            char = chr(code)
            # Most code points are unassigned or private, and no vocabulary has them.
            has_no_use = unicodedata.category(char) in {"Co", "Cn"}
            stand_in = "" if has_no_use else self.stand_in(char)
            if stand_in is not None and stand_in != char:
                chars_of_stand_in.setdefault(stand_in, []).append(char)
        return chars_of_stand_in

    def lost(self, texts: Iterable[str]) -> Counter[str]:
        """Count the characters without a stand-in in rewritten texts."""
        lost_chars = self._table.lost
        counts: Counter[str] = Counter()
        for text in texts:
            # Most texts have no such character, which `isdisjoint` detects fast.
            if not lost_chars.isdisjoint(text):
                counts.update(char for char in text if char in lost_chars)
        return counts

    def _rewrite(self, text: str) -> str:
        """Rewrite a text, except for special tokens."""
        if self._is_plain(text):
            return text
        # Some vocabularies (T5's) fold a line break into a space, so fold each line alone.
        return "\n".join(
            line if self._is_plain(line) else self._rewrite_line(line)
            for line in text.split("\n")
        )

    def _rewrite_line(self, line: str) -> str:
        """Rewrite the words of a line that have odd characters.

        Few words need rewriting, and they repeat, so each rewritten word is cached.
        """
        parts = []
        end = 0
        for odd in self._odd.finditer(line):
            if odd.start() < end:
                continue
            start = line.rfind(" ", 0, odd.start()) + 1
            if unicodedata.category(line[start])[0] in "MC":
                # A mark or joiner combines with the space before it.
                return self._word(line)
            parts.append(line[end:start])
            end = line.find(" ", start)
            if end < 0:
                end = len(line)
            parts.append(self._word(line[start:end]))
        return "".join(parts) + line[end:]

    def _rewrite_word(self, word: str) -> str:
        """Fold a word, and replace its characters that are not in the vocabulary."""
        if self._splits_fractions:
            word = _MIXED_NUMBER.sub(" ", word)
        word = self._fold(word)
        if not self._is_limited:
            return word
        rewritten = word.translate(self._table)
        # A stand-in may be a letter that composes with the combining mark after it, so fold again.
        return rewritten if rewritten == word else self._fold(rewritten)

    def _fold(self, line: str) -> str:
        if not self.folds:
            return line
        return str(self.tokenizer.normalizer.normalize_str(line))

    def _is_plain(self, text: str) -> bool:
        """Check if rewriting certainly does not change a text."""
        odd = self._odd_ascii
        if not odd:
            return True
        # Deleting bytes by a table is ten times faster than searching for a class of characters.
        return text.isascii() and len(text.encode().translate(None, odd)) == len(text)

    def stand_in(self, char: str) -> str | None:
        """Find the stand-in of `char`. A character in the vocabulary is its own stand-in.

        Return None for a character without a stand-in.
        """
        if char.isspace() or self._can_encode(char):
            return char
        for candidate in _STAND_INS.get(char, ()):
            if candidate == "" or self._can_encode(candidate):
                return candidate
        if unicodedata.category(char) in {"Cc", "Cf", "Mn", "Co", "Cn"}:
            return ""  # invisible: separate accents, joiners, soft hyphens, controls
        parts = unicodedata.normalize("NFKD", char)
        if parts == char:
            return None
        stand_ins = [self.stand_in(part) for part in parts]
        if None in stand_ins:
            return None
        return "".join(filter(None, stand_ins))

    def _is_misread(self, special: str) -> bool:
        """Check if the tokenizer reads a special token's text as the special token."""
        token = self.tokenizer.token_to_id(special)
        ids = self.tokenizer.encode(f"a {special} b", add_special_tokens=False).ids
        return len(special) > 1 and token in ids and self._rewrite(special) == special


class _Table(dict[int, str]):
    """Translation table for `str.translate`, filled on demand."""

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
