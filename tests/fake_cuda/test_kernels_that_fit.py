"""FlexAttention's blocks: which are chosen, that they are used, and that their kernels fit.

Kernels are compiled to machine code for cards that are not here (`kernels.py`), where triton stands
beside a CPU build of torch: `make test-kernels`. TOQUE_KERNELS=all compiles for every card, head
size and precision, in hours.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from fake_cuda import cases_kernels as cases
from fake_cuda import kernels

NEEDED = "246,784 bytes of shared memory and the card has 232,448"
ALL = os.environ.get("TOQUE_KERNELS") == "all"


FORWARD, BACKWARD = (
    cases.too_large(k) for k in ("flex_attention", "flex_attention_backward")
)
FAILED = RuntimeError("backend='inductor' raised:\nno triton\nhere")


@pytest.mark.parametrize(
    ("found", "blocks", "words"),
    [
        ([], ("own", "own"), "torch's own blocks"),
        (
            [FORWARD],
            ("128x64", "own"),
            f"blocks of 128 x 64, since torch's own need {NEEDED}",
        ),
        (
            [FORWARD, 0.3, ValueError()],
            ("64x32", "own"),
            f"blocks of 64 x 32, since torch's own need {NEEDED}",
        ),
        (
            [BACKWARD],
            ("own", "64x64"),
            f"backward blocks of 64 x 64, since torch's own need {NEEDED}",
        ),
        (
            [FORWARD, BACKWARD, FORWARD, BACKWARD],
            ("64x64", "32x32"),
            "blocks of 64 x 64 and backward blocks of 32 x 32, since torch's own need "
            + NEEDED,
        ),
        (
            [0.3],
            ("128x64", "own"),
            "blocks of 128 x 64, since torch's own are off by 3.0e-01",
        ),
        (
            [math.nan],
            ("128x64", "own"),
            "blocks of 128 x 64, since torch's own are off by nan",
        ),
        ([FAILED] * 9, None, "none, since no triton"),
        ([FORWARD] * 9, None, f"none, since torch's own need {NEEDED}"),
        ([BACKWARD] * 9, None, f"none, since torch's own need {NEEDED}"),
    ],
)
def test_the_first_blocks_that_work_are_chosen(on_card, found, blocks, words):
    options, said, asked = on_card(cases.tried, found)
    assert said == words
    if blocks is None:
        assert options is None
    else:
        m, n, m1, n1, m2, n2 = cases.blocks(options)
        sizes = ((m, n), (m1, n1), (m2, n2))
        forward, *backward = ("own" if m is None else f"{m}x{n}" for m, n in sizes)
        assert (forward, backward) == (blocks[0], [blocks[1]] * 2)
        assert asked[-1] == options
    assert cases.blocks(asked[0]) == (None,) * 6
    assert len({cases.blocks(options) for options in asked}) == len(asked)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_kernel_of_a_model_has_the_blocks_that_were_chosen(on_card, dropout):
    chosen, made = on_card(cases.made_by, "t5", dropout=dropout)
    assert made == {("64", True), ("torch's", False)}
    assert chosen.blocks == (
        "torch's own blocks; with T5's bias, blocks of 64 x 64, since reasons"
    )
    chosen, made = on_card(cases.made_by, "gpt2", dropout=dropout)
    assert made == {("torch's", False)}
    assert chosen.blocks == "torch's own blocks"


@pytest.mark.parametrize("fails", ["plain", "biased"])
def test_masks_take_the_place_of_kernels_of_which_one_fails(on_card, fails):
    chosen = on_card(cases.choice_where, fails)
    assert (chosen.name, chosen.blocks) == ("dense", "")
    assert chosen.notes == ("attention by flex is not used: no luck",)


def test_doctor_says_which_blocks_work(on_card):
    assert on_card(cases.checked) == (
        "ok",
        "flex, torch's own blocks; with T5's bias, blocks of 64 x 64, since reasons",
    )


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="make test-kernels"
)
@pytest.mark.parametrize("arch", list(kernels.CARDS) if ALL else ["sm_90", "sm_86"])
def test_the_kernels_of_a_run_fit_a_card(tmp_path, arch):
    sizes, dtypes = (kernels.SIZES, kernels.DTYPES) if ALL else ([64], ["bfloat16"])
    file = tmp_path / "records.jsonl"
    asked = ["--sizes", *map(str, sizes), "--dtypes", *dtypes]
    subprocess.run(
        [sys.executable, kernels.__file__, "compile", arch, file, *asked], check=True
    )
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 2 * len(sizes) * len(dtypes)
    for record in records:
        which = (
            f"{arch}, {record['size']}, {record['dtype']}, biased: {record['biased']}"
        )
        assert record["options"] is not None, f"{which}: {record['words']}"
        # Forward and backward: without dropout, of what it keeps, of all pairs; for two masks.
        made = [kernel for kernel in record["kernels"] if kernel["by"] == "run"]
        assert len(made) > 6, which
        assert max(kernel["shared"] for kernel in made) < record["limit"], which
    # A card's limit decides, and not the probe alone: without it torch's own blocks would be taken.
    own = [
        r
        for r in records
        if r["biased"] and r["size"] == 64 and r["dtype"] == "bfloat16"
    ]
    assert own[0]["kernels"][0]["shared"] > own[0]["limit"]
