import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.cooking.schemas.list_fields import (
    MAX_DEPTH,
    looks_like_literal,
    parse_literal,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    TEXT | st.none() | st.booleans() | st.integers(-(10**12), 10**12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=5))
def test_python_lists_read_as_literal_eval_reads_them(values):
    assert parse_literal(repr(values)) == ast.literal_eval(repr(values)) == values


@given(st.lists(VALUES, max_size=5))
def test_json_lists_read_as_json(values):
    assert parse_literal(json.dumps(values)) == values
    assert parse_literal(json.dumps(values, ensure_ascii=False, indent=1)) == values


@given(st.lists(TEXT, min_size=1, max_size=5))
def test_vectors_of_r(values):
    printed = "c(" + ", ".join(json.dumps(v, ensure_ascii=False) for v in values) + ")"
    assert parse_literal(printed) == values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('c("1", NA, "1/2")', ["1", None, "1/2"]), ("character(0)", []), ('"one"', "one"),
        ("['a' 'b'\n 'c']", ["a", "b", "c"]), ("array(['a', 'b'], dtype=object)", ["a", "b"]),
        ("[{'n': 1, 'm': array([], dtype=object)}\n {'n': 2.5}]", [{"n": 1, "m": []}, {"n": 2.5}]),
        ("{'n': 'a'}, {'n': 'b'}", [{"n": "a"}, {"n": "b"}]),
        ("[np.str_('a'), np.float64(1.5), nan]", ["a", 1.5, None]),
        ("[u'caf\\xe9', 'it\\'s', \"it's\", '\\u00bd\\n']", ["café", "it's", "it's", "½\n"]),
        ("['\\ud83c\\udf5e']", ["🍞"]), ("('a', 'b',)", ["a", "b"]),
    ],
)  # fmt: skip
def test_what_other_programs_print(text, value):
    assert looks_like_literal(text)
    assert parse_literal(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "['a', 'b", "['a', 'b'", "[", "", "['a' ... 'b']", "[__import__('os').system('x')]",
        "[a]", "{'a'}", "{[1]: 2}", "[" * (MAX_DEPTH + 5) + "]" * (MAX_DEPTH + 5), "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_cut_or_no_literal_is_refused(text):
    with pytest.raises(ValueError):
        parse_literal(text)
