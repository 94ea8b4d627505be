"""Growth of texts in a tokenizer: what a `tokenizer.json` may make of a few characters.

The file may be anyone's. Its steps follow one another, so that thirty-four which each double a
letter make 16 GiB of it, and the tokenizers library ends the process that has no room for them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import Replace

_MOST: Final = 1 << 16
"""Bytes that one byte may become; in T5's file, as it is written for transformers, 15,246."""
_MOST_TEXT: Final = 256
"""Characters that a step puts in; usually a space or a mark."""
_MOST_ENTRY: Final = 1 << 14
"""Characters of an entry, which is written for every token of an answer."""
_WIDENING: Final = ("BertNormalizer", "ByteLevel", "NFC", "NFD", "NFKC", "NFKD")
_WIDEST: Final = 11.0
"""Bytes that NFKC, the worst of those, makes of one."""
_ORDINARY: Final = [chr(code) for code in (*range(32, 127), *range(161, 256))]
_MOST_ORDINARY: Final = 32
_ONE_OF: Final = re.compile(r"\[[^\[\]]+\]")
"""An expression that finds single characters, whatever stands around them."""
_CHARSMAP: Final = "precompiled_charsmap"


class Model(msgspec.Struct):
    """The part of a tokenizer's model that gives ids and puts texts in."""

    vocab: dict[str, int] | list[Any] = []
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class Parts(msgspec.Struct):
    """The parts of a `tokenizer.json` that change texts."""

    model: Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    added_tokens: Any = None


def harm(parts: Parts) -> str | None:
    """What a tokenizer does that could take all memory; None where nothing does."""
    sides = (parts.normalizer, parts.pre_tokenizer, parts.decoder)
    try:
        growth, steps = max(map(_growth, sides)), [step for side in sides for step in _steps(side)]
        if growth > _MOST:
            return f"may make {growth:,.0f} bytes of one, where {_MOST:,} are allowed"
        texts = [text for step in steps for key, text in step.items() if key != _CHARSMAP]
        texts += [parts.model.continuing_subword_prefix, parts.model.end_of_word_suffix]
        vocab = parts.model.vocab
        names = [*vocab] if isinstance(vocab, dict) else [entry[0] for entry in vocab]
        names += [token["content"] for token in parts.added_tokens or ()]
        for what, found, most in (("a text", texts, _MOST_TEXT), ("an entry", names, _MOST_ENTRY)):
            longest = max((len(text) for text in found if isinstance(text, str)), default=0)
            if longest > most:
                return f"puts in {what} of {longest:,} characters, where {most:,} are allowed"
        return _swollen(parts.normalizer)
    except (ValueError, TypeError, LookupError, AttributeError):
        return "has a step of no known form"


def _swollen(normalizer: Any) -> str | None:
    """What an ordinary letter becomes, where that is too much."""
    held = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "normalizer": normalizer}
    rewrites = Tokenizer.from_str(json.dumps(held)).normalizer
    for letter in _ORDINARY if rewrites else ():
        if (found := len(rewrites.normalize_str(letter))) > _MOST_ORDINARY:
            return f"makes {found:,} characters of {letter!r}, where {_MOST_ORDINARY} are allowed"
    return None


def _steps(side: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part in their order, those inside a sequence one by one."""
    left = [side] if side else []
    while left:
        step = left.pop()
        if step["type"] != "Sequence":
            yield step
            continue
        for inner in ("normalizers", "pretokenizers", "decoders"):
            left += reversed(step.get(inner, []))


def _growth(side: Any) -> float:
    """The bytes that one byte may become.

    Replacements multiply where one may find what those before it have put in. Those of a hundred
    accents by a hundred letters do not: of them the largest counts.
    """
    growth, apart, put_in = 1.0, 1.0, ""
    for step in _steps(side):
        if step["type"] == "Replace":
            size, text = len(step["content"].encode()), step["pattern"].get("String")
            own = max(1.0, size / len(text.encode()) if text else size + 1.0)
            if _finds(step["pattern"], put_in):
                growth *= own
            else:
                apart = max(apart, own)
            put_in += step["content"]
        elif step["type"] == "Prepend":
            put_in += step["prepend"]
        else:
            own = _WIDEST if step["type"] in _WIDENING else 1.0
            if _CHARSMAP in step:
                own = max(1.0, _longest_in(step[_CHARSMAP]))
            growth, apart, put_in = growth * apart * own, 1.0, ""
    return growth * apart


def _finds(pattern: dict[str, str], text: str) -> bool:
    """Whether a replacement may find something in a text, or across its end."""
    if wanted := pattern.get("String"):
        return not set(wanted).isdisjoint(text)
    if not _ONE_OF.fullmatch(pattern["Regex"]):
        return bool(text)
    return bool(Replace(Regex(pattern["Regex"]), "").normalize_str(text) != text)


def _longest_in(charsmap: str) -> int:
    """Bytes of the longest text in SentencePiece's table of replacements."""
    table = base64.b64decode(charsmap)
    return max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
