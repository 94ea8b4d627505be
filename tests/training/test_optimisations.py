"""Every optimisation can be turned off, and is: what is built without it."""

import pytest
import torch
from transformers.activations import NewGELUActivation

from tiny import model_of, shape_of
from toque.config.resolve import resolve_values
from toque.models.forward.cpu_linear import CpuConv1D, CpuLinear
from toque.models.forward.keyed_dropout import Dropout
from toque.training.optimisations import (
    choose_attention,
    choose_prefetch,
    list_disabled,
    optimise,
    training_loss,
)
from toque.training.runtime import Runtime


def config_with(**off):
    values = {"data": {"store": "store"}, "train": {"optimisations": off}}
    return resolve_values(values).config.train.optimisations


def built(**off):
    model = model_of("gpt2", shape=shape_of("gpt2", dropout=0.1))
    optimise(model, config_with(**off), Runtime())
    return model


def kinds(model):
    return {type(module) for module in model.modules()}


def test_nothing_is_off_by_default():
    assert list_disabled(config_with()) == []
    found = kinds(built())
    assert Dropout in found
    assert torch.nn.GELU in found
    assert NewGELUActivation not in found


@pytest.mark.parametrize(
    ("name", "stock"),
    [("dropout", torch.nn.Dropout), ("activations", NewGELUActivation)],
)
def test_a_switch_leaves_what_transformers_has(name, stock):
    assert stock in kinds(built(**{name: False}))
    assert stock not in kinds(built())
    assert list_disabled(config_with(**{name: False})) == [
        f"turned off by train.optimisations: {name}"
    ]


def test_the_rest():
    model = built()
    assert {CpuConv1D, CpuLinear} <= kinds(model) - kinds(built(layers=False))
    assert choose_attention(model, Runtime()).name == "segments"
    assert choose_attention(built(attention="dense"), Runtime()).name == "dense"
    assert training_loss(config_with(), smoothing=0.0).keywords["chunk_rows"] is None
    assert (
        training_loss(config_with(head=False), smoothing=0.0).keywords["chunk_rows"]
        > 1 << 20
    )
    waiting = choose_prefetch(config_with(prefetch=False), Runtime())
    assert waiting.keywords == {"depth": 0}


def test_without_prefetching_a_batch_is_made_when_it_is_asked_for(row_stream):
    from toque.units import Cursor

    made = []

    class Counted(type(row_stream)):
        def collate(self, cursor, update):
            made.append(cursor)
            return update

    with choose_prefetch(config_with(prefetch=False), Runtime())(
        Counted(), Cursor()
    ) as ahead:
        for number in range(3):
            assert len(made) == number
            ahead.next()
            assert len(made) == number + 1
