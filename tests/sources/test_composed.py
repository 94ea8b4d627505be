"""Composition is that of `unicodedata`, whatever the order of the marks."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from toque.sources.composed import composed

MARKS = "\u0301\u0323\u0308\u0344\u0f71\u0f73\u0f75\u05b0\u3099\u0345\u1dca!e\u00e9 "


@given(st.text(alphabet=MARKS, max_size=80) | st.text())
def test_every_text_is_composed_as_the_standard_library_does(text: str) -> None:
    assert composed(text) == unicodedata.normalize("NFC", text)


def test_a_long_run_loses_no_mark() -> None:
    text = "e" + "\u0301\u0323" * 500
    assert composed(text) == unicodedata.normalize("NFC", text)
    assert len(composed(text)) == len(text) - 1  # the letter and one mark are one character
