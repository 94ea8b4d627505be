"""Adapters in use on a card that is not there: bytes of a large one, and texts of every family."""

from __future__ import annotations

import pytest
import torch

from fake_cuda import cases_adapters as cases
from fake_cuda import hooks
from models.loading.test_beside_adapters import trained
from tiny import KINDS, make
from toque.models.loading.model_export import save_model
from toque.models.lora.frozen import FrozenFormat

GIB = 2**30


@pytest.mark.slow
@pytest.mark.parametrize(("form", "card"), [("nf4", 24), ("int8", 24), (None, 32)])
def test_an_adapter_of_flan_t5_xxl_is_used_where_it_was_trained(
    on_card, tmp_path, form, card
):
    found = on_card(cases.xxl, tmp_path, form, memory=card * GIB)
    assert (found.devices, found.texts, found.loss_on) == ({"cuda"}, 3, "cuda")
    assert found.card < card * GIB
    assert found.memory < 16 * GIB
    assert found.needed[0] == pytest.approx(found.loaded, rel=0.001)
    assert 0.75 * found.needed[1] < found.memory < found.needed[1]


@pytest.mark.slow
def test_one_that_has_no_room_is_refused_before_it_is_read(on_card, tmp_path):
    with pytest.raises(
        hooks.OnCardError, match=r"needs 21\.3 GiB of cuda and 2\.0 GiB .* \(bf16\)"
    ):
        on_card(cases.xxl, tmp_path, None, memory=24 * GIB)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("t5-v1.1", "int8"),
        *(
            pytest.param(kind, form, marks=pytest.mark.slow)
            for kind in KINDS
            for form in ("nf4", "int8", None)
        ),
    ],
)
def test_texts_of_adapters_are_written_on_the_card(on_card, tmp_path, kind, form):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    save_model(make(kind), None, base, card="")
    held = FrozenFormat(torch.bfloat16, form)
    trained(base, folder, FrozenFormat(torch.bfloat16), record=held)
    found = on_card(cases.used, base, {"one": folder})
    assert (found.held, found.devices, found.texts) == (str(held), {"cuda"}, 3)
    assert found.loss_on == "cuda"
