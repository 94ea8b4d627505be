"""Bytes of single tokens, which may be parts of a character."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from toque.data.tokenizer.codec import Codec

_BYTE: Final = re.compile("<0x([0-9A-F]{2})>")
"""Token of a byte in SentencePiece vocabularies."""
_INVALID: Final = "\ufffd"
"""Replacement character, for bytes that are not a complete character."""


def _byte_characters() -> Mapping[str, int]:
    """Map the characters of GPT-2's byte-level vocabulary to bytes.

    Printable bytes are their own character. The other bytes have the characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(b): b for b in printable} | {
        chr(0x100 + n): b for n, b in enumerate(others)
    }


_BYTE_CHARACTERS: Final = _byte_characters()


def bytes_of_token(codec: Codec, token: int, text: str) -> bytes:
    """Return the bytes that a token adds to a text.

    The bytes of all tokens together are the text's UTF-8, if the text is valid UTF-8.

    Args:
        codec: Codec of the model.
        token: Id of the token.
        text: Text of the token in its position.
    """
    if token in codec.silent or token == codec.newline_id:
        return text.encode()

    piece = codec.piece(token)
    raw = _spelled_bytes(piece)
    if raw is not None:
        alone = codec.decode([token])
        # In SentencePiece, a token such as "é" is a character, and not the spelling of a byte.
        is_spelling = raw.decode(errors="replace") == alone
        if is_spelling and (_INVALID in alone or text.endswith(alone)):
            return raw
    if _INVALID in piece:  # the text comes with the next token
        return codec.decode([token]).encode()
    # Without the bytes of earlier tokens.
    return text.replace(_INVALID, "").encode()


def _spelled_bytes(piece: str) -> bytes | None:
    """Return the bytes that a token spells; None for a token of text."""
    if match := _BYTE.fullmatch(piece):
        return bytes.fromhex(match[1])
    if all(char in _BYTE_CHARACTERS for char in piece):
        return bytes(_BYTE_CHARACTERS[char] for char in piece)
    return None
