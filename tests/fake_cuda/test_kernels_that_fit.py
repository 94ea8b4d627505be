"""FlexAttention's blocks: which are chosen, that they are used, and that their kernels fit.

Kernels are compiled to machine code for cards that are not here (`kernels.py`), where triton stands
beside a CPU build of torch: `make test-kernels`. TOQUE_KERNELS=all compiles for every card, in
minutes each.
"""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

from fake_cuda import cases_kernels as cases
from fake_cuda import kernels

NEEDED = "246,784 bytes of shared memory and the card has 232,448"
ALL = os.environ.get("TOQUE_KERNELS") == "all"


@pytest.mark.parametrize(
    ("found", "nth", "words"),
    [
        ({}, 0, "torch's own blocks"),
        ({1: cases.TOO_LARGE}, 1, f"blocks of 128 x 64, since torch's own need {NEEDED}"),
        (
            {1: cases.TOO_LARGE, 2: 0.3, 3: ValueError()},
            3,
            f"blocks of 64 x 32, since torch's own need {NEEDED}",
        ),
        ({1: 0.3}, 1, "blocks of 128 x 64, since torch's own are off by 3.0e-01"),
        ({1: float("nan")}, 1, "blocks of 128 x 64, since torch's own are off by nan"),
        (
            dict.fromkeys(range(1, 9), RuntimeError("backend='inductor' raised:\nno triton\nhere")),
            None,
            "none, since no triton",
        ),
    ],
)
def test_the_first_blocks_that_work_are_chosen(on_card, found, nth, words):
    options, said, asked = on_card(cases.tried, found)
    ladder = on_card(cases.ladder)
    assert options == (None if nth is None else ladder[nth])
    assert asked == ladder[: None if nth is None else nth + 1]
    assert said == words


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_kernel_of_a_model_has_the_blocks_that_were_chosen(on_card, dropout):
    chosen, made = on_card(cases.made_by, "t5", dropout=dropout)
    assert made == {("64", True), ("torch's", False)}
    assert chosen.blocks == (
        "torch's own blocks; where T5's bias is added, blocks of 64 x 64, since reasons"
    )
    chosen, made = on_card(cases.made_by, "gpt2", dropout=dropout)
    assert made == {("torch's", False)}
    assert chosen.blocks == "torch's own blocks"


@pytest.mark.parametrize("fails", ["plain", "biased"])
def test_masks_take_the_place_of_kernels_of_which_one_fails(on_card, fails):
    chosen = on_card(cases.choice_where, fails)
    assert (chosen.name, chosen.blocks) == ("dense", "")
    assert chosen.notes == ("attention without masks by flex is not used: no luck",)


def test_doctor_says_which_blocks_work(on_card):
    assert on_card(cases.checked) == (
        "ok",
        "flex, torch's own blocks; where T5's bias is added, blocks of 64 x 64, since reasons",
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="make test-kernels")
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "plain"])
@pytest.mark.parametrize("arch", list(kernels.CARDS) if ALL else ["sm_90", "sm_89"])
@pytest.mark.parametrize("size", kernels.SIZES if ALL else [64])
@pytest.mark.parametrize("dtype", kernels.DTYPES if ALL else ["bfloat16"])
def test_the_kernels_of_a_run_fit_a_card(arch, size, dtype, biased):
    command = ["compile", arch, "--size", str(size), "--dtype", dtype, *["--biased"] * biased]
    record = json.loads(kernels.run(command))
    assert record["options"] is not None, record["words"]
    made = [kernel for kernel in record["kernels"] if kernel["by"] == "run"]
    # forward and backward x without dropout, of what is kept, of all pairs x two masks
    assert len(made) >= 12
    assert all(kernel["shared"] < record["limit"] for kernel in made), made
