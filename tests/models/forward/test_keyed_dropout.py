"""Dropout drops the share that was requested, keeps the mean, and depends on its keys alone."""

import copy

import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM, PhiConfig, PhiForCausalLM

from tiny import EOS, PAD, VOCAB, model_of, pack, shape_of, stream_of, uneven_examples
from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError
from toque.keyed_random import key_of, keys_of
from toque.models.families import FAMILIES
from toque.models.forward.attention import use_attention
from toque.models.forward.blocks import (
    compile_blocks,
    recompute_blocks,
    stop_recomputing,
)
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.keyed_dropout import (
    UPDATE,
    Dropout,
    Masks,
    column_table,
    drop_pairs,
    keep_mask,
    kept_elements,
    keys_by_head,
    use_keyed_dropout,
)
from toque.models.forward.loss import loss_sum
from toque.models.lora.layers import attach
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.workflows.diagnosis.update_ways import (
    FLOAT32,
    HALF,
    compare_updates,
    training_update,
)

N, C = 301, 997


def keys(n, first=0):
    return torch.from_numpy(
        keys_of(3, torch.arange(first, first + n).numpy()).view("int64")
    )


def independent(left, right, p):
    """Equal within five standard deviations to what independent masks keep of both."""
    both, n = (left & right).double().mean().item(), left.numel()
    return abs(both - (1 - p) ** 2) < 5 * ((1 - p) ** 2 / n) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_share_and_the_mean(p, dtype):
    mask = keep_mask(torch.empty(N, C, dtype=dtype), p, keys(N))
    assert mask.dtype == dtype
    stays = mask != 0
    n = stays.numel()
    assert abs(stays.sum().item() / n - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5 + 1e-5
    assert mask[stays].unique().tolist() == pytest.approx([1 / (1 - p)], rel=4e-3)


def test_neighbours_are_independent():
    """Columns of one hash and of the next, tokens, heads, layers and updates."""
    p = 0.3
    mask = kept_elements(keys(N), C, p)[0]
    for apart in (1, 2, 3, 4, 8):
        assert independent(mask[:, apart:], mask[:, :-apart], p)
        assert independent(mask[apart:], mask[:-apart], p)
    heads = kept_elements(keys_by_head(keys(N), 4), C, p)[0]
    assert independent(heads[1:], heads[:-1], p)
    masks = Masks()
    sites = [masks.add("wte", FAMILIES["gpt2"]) for _ in range(2)]
    drawn = []
    for update in (0, 1):
        UPDATE.set(key_of(5, update))
        masks.begin(target=torch.arange(N)[None])
        drawn += [
            kept_elements(site.next_keys(), C, p)[0] for site in (*sites, sites[0])
        ]
    for left in range(6):
        for right in range(left):
            assert independent(drawn[left], drawn[right], p), (left, right)


def test_ends_of_the_scale_and_odd_shapes():
    for shape in ((1,), (3,), (0, 4), (5, 7)):
        like, some = torch.ones(shape), torch.ones(shape[:-1], dtype=torch.int64)
        assert torch.equal(keep_mask(like, 0.0, some), like)
        assert torch.equal(keep_mask(like, 1.0, some), torch.zeros(shape))
        assert keep_mask(like, 0.3, some).shape == like.shape


def test_masks_of_compiled_code_are_those_of_four_columns_at_once():
    def mask(numbers):
        return kept_elements(numbers, 31, 0.3, column_table(64, numbers.device))[0]

    assert torch.equal(mask(keys(N)), kept_elements(keys(N), 31, 0.3)[0])


def test_pairs_are_dropped_by_their_tokens():
    shares = torch.ones(2, 3, 20, 30)
    pair = keys(40).view(2, 20), keys(60, 99).view(2, 30)
    dropped = drop_pairs(shares, 0.25, pair)
    share = (dropped == 0).float().mean().item()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / shares.numel()) ** 0.5
    turned = drop_pairs(shares, 0.25, (pair[0].flip(1), pair[1].flip(1)))
    assert torch.equal(turned, dropped.flip(2, 3))


def test_a_models_and_its_adapters_are_exchanged():
    model = model_of("gpt2")
    attach(model, AdapterConfig(r=2, dropout=0.25), base="none", seed=1)
    model.train()
    model.transformer.h[1].mlp.dropout.eval()
    plain = [m for m in model.modules() if type(m) is nn.Dropout]
    assert use_keyed_dropout(model) == len(plain) > 0
    assert not [m for m in model.modules() if type(m) is nn.Dropout]
    ours = [m for m in model.modules() if isinstance(m, Dropout)]
    assert {m.p for m in ours} == {0.1, 0.25}
    assert not model.transformer.h[1].mlp.dropout.training
    assert sum(m.training for m in ours) == len(ours) - 1
    assert use_keyed_dropout(model) == 0
    ids = torch.arange(30).view(2, 15)
    assert not torch.equal(
        model(ids).logits, model(ids).logits
    )  # outside of a batch PyTorch's own
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def other(kind):
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "attention_dropout": 0.2,
    }  # fmt: skip
    torch.manual_seed(5)
    if kind == "opt":  # which calls a function of dropout
        more = {
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "dropout": 0.2,
            "pad_token_id": PAD,
        }
        return OPTForCausalLM(
            OPTConfig(**sizes, **more, eos_token_id=EOS, bos_token_id=2)
        )
    # One layer of dropout of a block is called twice.
    more = {"intermediate_size": 48, "resid_pdrop": 0.2, "pad_token_id": PAD}
    return PhiForCausalLM(PhiConfig(**sizes, **more, eos_token_id=EOS, bos_token_id=2))


def dropping(kind):
    """A model of a kind with dropout in every place, keyed."""
    family, _, method = kind.partition(" ")
    if family in ("opt", "phi"):
        model = other(family)
    else:
        model = model_of(family, seed=5, shape=shape_of(family, dropout=0.2))
    if method:
        adapter = AdapterConfig(kind=method, r=4, dropout=0.2, target_modules="all")
        attach(model, adapter, base="none", seed=1)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
    use_keyed_dropout(model)
    return model.train()


def update(model, kind, *, packed=True, ranks=1, rows_at_once=99, runtime=None):
    """Loss and gradient of one update of 40 examples, summed over ranks."""
    family = "t5" if kind.startswith("t5") else "gpt2"
    loss, gradient = 0.0, {}
    for rank in range(ranks):
        stream = stream_of(
            uneven_examples(40), family, packed=packed, rank=rank, world_size=ranks
        )
        share, part = training_update(
            model,
            stream.at(Cursor()),
            rows_at_once=rows_at_once,
            runtime=runtime or Runtime(),
            smoothing=0.1,
        )
        loss += share
        gradient = {name: g + gradient.get(name, 0.0) for name, g in part.items()}
    return loss, gradient


KINDS = ["t5", "gpt2", "neox", "opt", "phi", "t5 lora", "gpt2 dora"]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_do_not_depend_on_rows_at_once_packing_ranks_or_recomputing(kind):
    model = dropping(kind)
    reference = update(model, kind)
    ways = {
        "one row": {"rows_at_once": 1},
        "two rows": {"rows_at_once": 2},
        "ranks": {"ranks": 2, "rows_at_once": 3},
        "alone": {"packed": False},
        "one alone": {"packed": False, "rows_at_once": 1},
    }
    for name, way in ways.items():
        found = compare_updates(update(model, kind, **way), reference)
        assert found.within(FLOAT32), (name, found)
    recompute_blocks(model)
    found = compare_updates(update(model, kind, rows_at_once=2), reference)
    stop_recomputing(model)
    assert found.within(FLOAT32), found


@pytest.mark.parametrize("attention", ["dense", "flex"])
@pytest.mark.parametrize("kind", ["t5", "gpt2", "phi"])
def test_nor_does_attention_by_masks(kind, attention):
    model = dropping(kind)
    use_attention(model, attention)
    reference = update(model, kind)
    for way in ({"rows_at_once": 1}, {"packed": False, "rows_at_once": 1}):
        assert compare_updates(update(model, kind, **way), reference).within(FLOAT32), (
            way
        )


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_nor_does_bfloat16_and_its_masks_are_those_of_float32(kind):
    model = dropping(kind)
    exact = update(model, kind)
    use_cpu_layers(model)
    rounded = Runtime(precision="bf16")
    for way in ({}, {"rows_at_once": 1}, {"packed": False}):
        found = compare_updates(update(model, kind, runtime=rounded, **way), exact)
        assert found.within(HALF), (way, found)


@pytest.mark.parametrize(
    "kind", [pytest.param("t5", marks=pytest.mark.slow), "gpt2", "opt"]
)
def test_nor_do_compiled_blocks(kind):
    model = dropping(kind)
    compile_blocks(model, backend="eager")
    reference = update(model, kind)
    assert compare_updates(update(model, kind, rows_at_once=4), reference).within(
        FLOAT32
    )
    recompute_blocks(model)
    assert compare_updates(update(model, kind, rows_at_once=4), reference).within(
        FLOAT32
    )


def test_a_copy_has_masks_of_its_own_and_updates_differ():
    model = dropping("gpt2")
    twin = copy.deepcopy(model)
    batch = stream_of(uneven_examples(40), "gpt2").at(Cursor()).batch
    losses = []
    for step in (0, 1, 0):
        UPDATE.set(key_of(5, step))
        losses.append(loss_sum(model, batch).item())
    assert losses[0] == losses[2] != losses[1]
    assert loss_sum(twin, batch).item() == losses[0]
    sites = [m.site for m in model.modules() if isinstance(m, Dropout)]
    assert not {*map(id, sites)} & {
        id(m.site) for m in twin.modules() if isinstance(m, Dropout)
    }


def test_examples_that_come_twice_get_other_masks():
    pairs = [([3, 4], [5, 6, EOS])]
    stream = stream_of(pairs * 2, "gpt2")
    twice = stream.collate(Cursor(), stream.plan_update(Cursor()).__class__(
        rows=((0, 0),), cursor=Cursor(), epoch=1.0
    )).batch  # fmt: skip
    first, second = twice.keys[0, :4], twice.keys[0, 4:8]
    assert (first != second).all()
    assert torch.equal(first - first[0], torch.arange(4))


def test_a_layer_that_sees_other_vectors_than_tokens_is_refused():
    model = dropping("gpt2")
    model.transformer.drop.register_forward_pre_hook(
        lambda _, args: (args[0].repeat(1, 2, 1),)
    )
    with pytest.raises(
        ConfigError, match=r"dropout to .* vectors.*train.optimisations.dropout"
    ):
        loss_sum(model, pack("gpt2", [[([3, 4], [5, EOS])]]))
