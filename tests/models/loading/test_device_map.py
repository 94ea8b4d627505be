"""Device maps: blocks in their order over devices of given memory, and texts that stay the same."""

from __future__ import annotations

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import attach_execution_device_hook

from tiny import EOS, FAMILIES, PAD, model_of, shape_of
from toque.errors import ConfigError
from toque.models.forward.blocks import blocks
from toque.models.generation.causal import CausalDecoding
from toque.models.generation.kv_cache import layer_devices
from toque.models.generation.t5 import T5Decoding
from toque.models.loading.device_map import (
    Parts,
    device_map,
    parts_of,
    placement_note,
    placement_of,
)
from toque.models.loading.model_export import save_model
from toque.models.loading.pretrained import Placement, check_folder, load_model
from written import generate

A, B, C = (torch.device("cuda", number) for number in range(3))
PARTS = Parts({"wte": 10, "ln_f": 2}, {f"h.{n}": 5 for n in range(4)})
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [7]]
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize(
    ("memory", "blocks_on"),
    [
        ({A: 32}, [A, A, A, A]),
        ({A: 31, B: 5}, [A, A, A, B]),
        ({A: 17, B: 9, C: 99}, [A, B, C, C]),  # never back to one that was left
        ({A: 12, B: 4, C: 20}, [C, C, C, C]),
        *(({A: a, B: b}, None) for a, b in ((11, 99), (12, 19), (31, 0))),  # no room
    ],
)
def test_blocks_fill_devices_in_their_order(memory, blocks_on):
    placed = blocks_on and {"wte": A, "ln_f": A} | dict(
        zip(PARTS.blocks, blocks_on, strict=True)
    )
    assert device_map(PARTS, memory) == placed


@each_family
def test_every_weight_has_a_part_and_counts_once(family):
    model = model_of(family)
    parts = parts_of(model, torch.float32)
    buffers = sum(b.numel() * 4 for b in model.buffers())
    assert parts.bytes == sum(p.numel() * 4 for p in model.parameters()) + buffers
    assert 2 * parts_of(model, torch.bfloat16).bytes == parts.bytes
    assert list(map(model.get_submodule, parts.blocks)) == list(blocks(model))
    named = parts.rest.keys() | parts.blocks.keys()
    assert all(
        any(n.startswith(f"{part}.") for part in named) for n in model.state_dict()
    )


@pytest.fixture
def folder(family, tmp_path):
    save_model(model_of(family), None, tmp_path / "model", card="", files={})
    return str(tmp_path / "model")


@each_family
def test_precision_and_devices_go_by_the_memory_there_is(family, folder):
    found = check_folder(folder)
    whole = parts_of(model_of(family), torch.float32)
    rest = sum(whole.rest.values())
    assert placement_of(found, {A: whole.bytes}) is None
    halved = placement_of(found, {A: whole.bytes - 1})
    assert halved is not None
    assert (set(halved.devices.values()), halved.dtype) == ({A}, torch.bfloat16)
    spread = placement_of(found, {A: whole.bytes - 1, B: whole.bytes})
    assert spread is not None
    assert (set(spread.devices.values()), spread.dtype) == ({A, B}, torch.float32)
    with pytest.raises(ConfigError, match=r"cuda:0 .*Free memory"):
        placement_of(found, {A: rest // 2})
    with pytest.raises(ConfigError, match="cuda:0, cuda:1"):
        placement_of(found, {A: rest // 2, B: 1})


@each_family
def test_a_model_is_read_to_its_devices_in_its_precision(family, folder):
    parts = parts_of(model_of(family), torch.bfloat16)
    cpu = dict.fromkeys([*parts.rest, *parts.blocks], torch.device("cpu"))
    placed = Placement(cpu, torch.bfloat16)
    model = load_model(folder, place=lambda _found: placed)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    wanted = model_of(family).to(torch.bfloat16).state_dict()
    assert all(
        torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items()
    )
    note = placement_note(model)
    assert note is not None
    assert "on cpu in bfloat16" in note
    assert placement_note(model_of(family)) is None


@each_family
def test_texts_through_the_hooks_are_those_without(family):
    plain, hooked = model_of(family), model_of(family)
    parts = parts_of(hooked, torch.float32)
    devices = dict.fromkeys([*parts.rest, *parts.blocks], "cpu")
    dispatch_model(hooked, devices, main_device="cpu", force_hooks=True)
    how = {"max_new_tokens": 12, "eos_id": EOS, "pad_id": PAD}
    assert generate(plain, PROMPTS, **how) == generate(hooked, PROMPTS, **how)


@each_family
def test_a_step_and_its_cache_follow_the_layers(family):
    """The device meta computes nothing, and refuses tensors of another all the same."""
    model = model_of(family, shape=shape_of(family, layers=3))
    meta = torch.device("meta")
    parts = parts_of(model, torch.float32)
    last = [name for name in parts.rest if "norm" in name or "ln_f" in name]
    decoder = [name for name in parts.blocks if "encoder" not in name]
    for name in [*decoder[1:], *(n for n in last if "encoder" not in n)]:
        attach_execution_device_hook(model.get_submodule(name), meta)
    assert layer_devices(model) == [torch.device("cpu"), meta, meta]
    kind = T5Decoding if family == "t5" else CausalDecoding
    with torch.inference_mode():
        rows = kind(model, rows=3, columns=20, pad_id=PAD)
        tokens = rows.admit(PROMPTS)
        for _ in range(2):
            hidden = rows.step(torch.tensor(tokens))
            assert (hidden.device, len(hidden)) == (meta, len(PROMPTS))
        rows.drop(0)
        assert len(rows.step(torch.tensor(tokens[1:]))) == len(PROMPTS) - 1
