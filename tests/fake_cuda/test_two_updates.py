"""Every family, whole or with an adapter, through two updates on a card that is not there."""

from __future__ import annotations

import pytest

from fake_cuda import cases, hooks

FAMILIES = ["gpt2", "neox", "t5", "llama"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_update_of_any_family_waits_for_the_card(on_card, family, adapter, recompute, precision):
    found = on_card(
        cases.two_updates, family, adapter=adapter, recompute=recompute, precision=precision
    )
    assert (found.attention, found.waits) == ("flex", {})
    assert "cuda" in found.state_on


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_no_update_waits_for_the_card(on_card, family):
    found = on_card(cases.two_updates, family, adapter=True, recompute=True)
    assert (found.attention, found.waits) == ("flex", {})


def test_a_wait_is_found(on_card):
    with pytest.raises(hooks.OnCardError, match=r"a number is read at cases\.py"):
        on_card(cases.reads_a_number)


def test_a_copy_that_blocks_is_found(on_card):
    with pytest.raises(hooks.OnCardError, match=r"a copy from cpu to cuda blocks at cases\.py"):
        on_card(cases.copies_and_waits)


def test_a_tensor_on_another_device_is_found(on_card):
    with pytest.raises(hooks.OnCardError, match="on the same device"):
        on_card(cases.adds_across_devices)
