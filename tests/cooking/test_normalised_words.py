"""Words by the fast ways are words by the definition."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from toque.cooking.normalised_words import words_of

SIGNS = "°½¼¾⅓⅔⅛⅜⅝⅞⅙⅚⅕⅖⅗⅘–—‑’‘“”®™©…×•·⁄\u00a0´″"
CHARACTERS = st.sampled_from(
    [*"aBz019 _-'\n.", *SIGNS, *"éÑßİﬁſ", *"²Ⅷ①٣", "\ud800", "\u0301"]
)


@given(st.text(CHARACTERS, max_size=30) | st.text(max_size=20))
@example("crème 1½")
@example("2² ½ cup")
def test_words_are_runs_of_letters(text: str) -> None:
    blank = re.sub(f"[{SIGNS}]", " ", text)
    assert words_of(text) == re.findall(r"[^\W\d_]+", blank.lower())
