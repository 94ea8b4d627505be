"""Every family through two updates on a card that is not there: where they wait, what they hold."""

import pytest

from fake_cuda import cases
from tiny import EVERY_KIND


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "float32"])
@pytest.mark.parametrize("memory", ["kept", "recomputed", "offloaded"])
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_no_update_of_any_kind_waits_for_the_card(
    on_card, kind, adapter, memory, precision
):
    found = on_card(
        cases.two_updates,
        kind,
        adapter=adapter,
        recompute=memory != "kept",
        offload=memory == "offloaded",
        precision=precision,
        rows=3,
    )
    assert (found.attention, found.waits) == ("flex", {})
    assert set(found.state_on.values()) == {"cuda"}


@pytest.mark.parametrize(
    ("kind", "setup"),
    [
        ("gpt2", {"adapter": True, "recompute": True, "rows": 3}),
        ("t5", {"recompute": True, "offload": True}),
        ("llama", {"precision": "fp16"}),
        ("neox", {"precision": "float32", "smoothing": 0.0}),
        ("gpt2", {"adapter": True, "form": "int8", "attention": "dense"}),
    ],
)
def test_no_update_waits_for_the_card(on_card, kind, setup):
    found = on_card(cases.two_updates, kind, **setup)
    assert (found.attention, found.waits) == (setup.get("attention", "flex"), {})
    assert set(found.state_on.values()) == {"cuda"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_no_update_beside_a_quantised_base_waits(
    on_card, kind, form, recompute, precision
):
    if form == "nf4":
        pytest.importorskip("bitsandbytes")
    found = on_card(
        cases.two_updates,
        kind,
        adapter=True,
        form=form,
        recompute=recompute,
        precision=precision,
    )
    assert (found.attention, found.waits) == ("flex", {})


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["flex", "dense"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_no_update_waits_however_it_is_computed(
    on_card, kind, rows, smoothing, attention
):
    found = on_card(
        cases.two_updates, kind, rows=rows, smoothing=smoothing, attention=attention
    )
    assert (found.attention, found.waits) == (attention, {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "t5", "llama"])
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "adamw8bit"])
def test_an_optimizer_waits_as_often_as_the_page_on_speed_says(
    on_card, kind, optimizer
):
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    found = on_card(cases.two_updates, kind, optimizer=optimizer, may_wait=True)
    whether, *others = found.waits.items()
    assert whether[0].endswith("step_if")
    assert whether[1] == 1
    each_weight = {
        "muon": 0,
        "adafactor": 2 * found.weights,
        "adamw8bit": found.matrices,
    }
    assert sum(number for _, number in others) == each_weight[optimizer]
    elsewhere = {name for name, on in found.state_on.items() if on != "cuda"}
    assert elsewhere == ({"step"} if optimizer == "adafactor" else set())
