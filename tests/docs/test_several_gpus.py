"""The guide's table of several GPUs is what plans say today."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PAGE = REPOSITORY / "docs" / "guides" / "several-gpus.md"
MADE = runpy.run_path(str(REPOSITORY / "tools" / "several_gpus_table.py"))


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.timeout(1800)
def test_the_table_of_one_to_eight_gpus_is_made_of_plans(
    golden_text: Callable[[Path, str], None],
) -> None:
    golden_text(PAGE, MADE["written"](PAGE))
