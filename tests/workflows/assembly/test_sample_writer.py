from __future__ import annotations

import io
import json
from contextlib import nullcontext

import pytest
from rich.console import Console

from toque.cli.console import ConsoleReporter
from toque.evaluation.text_samples import Sample
from toque.reporter import SILENT
from toque.units import Progress
from toque.workflows.assembly.sample_writer import SampleWriter

SAMPLES = [
    Sample(
        "a pasta dish",
        "Ingredients:\n- pasta",
        5,
        None,
        {"recipe_score": 0.75, "overall_quality": 1.0},
    ),
    Sample("breakfast", "", 0, None, {}),
]


@pytest.mark.parametrize("with_console", [True, False])
def test_texts_are_kept_and_shown_when_there_is_where(tmp_path, with_console):
    out = io.StringIO()
    reporter = ConsoleReporter(Console(file=out, width=30)) if with_console else SILENT
    path = tmp_path / "samples.jsonl"
    writer = SampleWriter(lambda *_: SAMPLES, None, path, nullcontext, reporter=reporter, show=True)
    writer.on_evaluate(Progress(step=1000), {})
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(k["step"], k["prompt"]) for k in kept] == [(1000, "a pasta dish"), (1000, "breakfast")]
    expected = (
        "step 1,000  a pasta dish  (recipe score 0.75)\n"
        "    Ingredients:\n"
        "    - pasta\n"
        "step 1,000  breakfast\n"
        "    (nothing)\n"
    )
    assert out.getvalue() == (expected if with_console else "")
