"""Defects that a day on a fake card showed, each as it was met."""

from __future__ import annotations

import pytest

from fake_cuda import cases_defects as cases


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_workspace_of_cublas_is_set_before_the_first_product(
    on_card, deterministic
):
    """Torch keeps what it sees then: a deterministic run after another would end in an error."""
    assert (
        on_card(cases.workspace_at_first_product, deterministic=deterministic)
        == ":4096:8"
    )


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "float32"])
def test_the_head_takes_the_bytes_that_are_counted(on_card, precision, smoothing, bias):
    taken, counted = on_card(
        cases.bytes_of_a_logit, precision, smoothing=smoothing, bias=bias
    )
    assert taken == pytest.approx(counted, rel=0.02)


def test_memory_that_others_hold_is_said_before_a_run(on_card):
    (said,) = on_card(cases.said_of_a_shared_card, 9 << 30)
    assert said.startswith(
        "on cuda other programs use 15.0 GiB of its 24.0 GiB; nvidia-smi lists"
    )
    assert on_card(cases.said_of_a_shared_card, 23 << 30) == ()


def test_float32_runs_multiply_in_float32(on_card):
    assert on_card(cases.float32_products) == ("highest", {})
