"""Collectives of an update, counted, have the bytes of the formulas; the page shows the counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toque
from fake_cuda import cases_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "scaling.md"
Case = tuple[str, str, int, str, str, int]
FAST: list[Case] = [
    ("gpt2", "fsdp", 2, "whole", "bf16", 1), ("gpt2", "ddp", 4, "LoRA", "float32", 2)
]  # fmt: skip
CASES: list[Case] = [
    (family, *rest)
    for family in ("gpt2", "neox", "t5", "llama")
    for rest in (
        ("ddp", 2, "whole", "float32", 1), ("ddp", 4, "LoRA", "float32", 2),
        ("ddp", 8, "whole", "float32", 2), ("fsdp", 2, "whole", "bf16", 1),
        ("fsdp", 4, "LoRA", "float32", 2), ("fsdp", 8, "LoRA", "bf16", 1),
        ("fsdp", 8, "whole", "float32", 1), ("fsdp", 8, "whole", "bf16", 2),
    )
]  # fmt: skip
"""Family, strategy, ranks, what is trained, precision, micro-batches of a rank."""


def counted(on_card: Callable[..., Any], case: Case) -> str:
    """Counts an update, and returns its row of the page's table."""
    family, strategy, ranks, trained, precision, micro_batches = case
    found = on_card(
        cases_ranks.counted_update, family, strategy, ranks,
        adapter=trained == "LoRA", precision=precision, micro_batches=micro_batches,
    )  # fmt: skip
    assert found.bytes == found.expected
    cells = [family, f"`{strategy}`", ranks, trained, precision, micro_batches]
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    cells += [f"{found.bytes.get(kind, 0):,}" for kind in kinds]
    return f"| {' | '.join(map(str, [*cells, f'{found.formula.sent:,.0f}']))} |"


@pytest.mark.parametrize("case", FAST, ids=lambda case: "-".join(map(str, case)))
def test_collectives_move_the_bytes_of_the_formulas(on_card, case):
    assert counted(on_card, case) in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.timeout(3600)
def test_collectives_of_every_family_do_and_the_page_has_them(on_card, golden_text):
    rows = "\n".join(counted(on_card, case) for case in CASES)
    page = PAGE.read_text(encoding="utf-8")
    table = re.compile(
        r"(<!-- counted by tests/fake_cuda/test_ranks.py -->\n(?:\|.*\n){2})(\|.*\n)*"
    )
    golden_text(PAGE, table.sub(lambda found: f"{found[1]}{rows}\n", page))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("ranks", "width", "words", "rows", "recompute"),
    [(8, 1024, 512, 2, False), (2, 1024, 512, 2, True), (8, 512, 50_000, 2, False)],
    ids=["blocks are most", "recomputed", "the table is most"],
)
def test_a_plan_of_parts_is_what_a_rank_takes(
    on_card, tmp_path, ranks, width, words, rows, recompute
):
    shape = {"n_embd": width, "n_layer": 6, "n_head": 8, "n_positions": 64}
    train = {
        "batch": f"{64 * rows * ranks * 2} tokens", "micro_batch_rows": rows, "precision": "bf16",
        "strategy": "fsdp", "gradient_checkpointing": recompute,
    }  # fmt: skip
    config = toque.configure(
        {"run_dir": str(tmp_path / "run"), "train": train},
        model={"family": "gpt2", "tokenizer": f"trained:{words}", "shape": shape},
        data={
            "sources": [], "store": str(tmp_path / "store"), "max_prompt_tokens": 16,
            "max_target_tokens": 48,
        },
    )  # fmt: skip
    planned, taken = on_card(cases_ranks.peak_of_rank, config, ranks)
    assert planned == pytest.approx(taken, rel=0.04)
