"""The page of what fits on which card is what a plan says today."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PAGE = REPOSITORY / "docs" / "reference" / "hardware.md"
MADE = runpy.run_path(str(REPOSITORY / "tools" / "hardware_page.py"))
Golden = Callable[[Path, str], None]


@pytest.mark.golden
def test_the_page_has_every_model_and_its_tiers_are_derived_from_them(
    golden_text: Golden,
) -> None:
    rows = MADE["rows_of"](PAGE.read_text(encoding="utf-8"))
    assert set(rows) == {
        (model, way) for model in MADE["MODELS"] for way in MADE["WAYS"]
    }
    golden_text(PAGE, MADE["page_of"](rows))


def test_a_small_model_s_line_is_what_a_plan_says(golden_text: Golden) -> None:
    key = "FLAN-T5 small, 77 M", "whole"
    golden_text(PAGE, MADE["written"](PAGE, MADE["row"](*key)))


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("model", MADE["MODELS"])
def test_a_model_s_lines_are_what_a_plan_says(model: str, golden_text: Golden) -> None:
    made = [MADE["row"](model, way) for way in MADE["WAYS"]]
    golden_text(PAGE, MADE["written"](PAGE, *made))
