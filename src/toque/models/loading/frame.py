"""Frame of a pretrained model: everything but its matrices, which are read later, one by one.

For a base that stays frozen: in float32 FLAN-T5-XXL is 44 GB, of which 42 are matrices that are
held in 16 bits or fewer. Where its matrices will be, a frame has tensors of their shape and of no
memory; an adapter is attached to it as to the model itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from toque.models.families import embedding
from toque.models.loading.from_scratch import config_in, construct, give_own_head
from toque.models.loading.fused_activations import fuse_activations
from toque.models.loading.pretrained import CheckedFolder
from toque.models.lora.frozen import frozen_matrices

_META: Final = torch.device("meta")


def load_frame(found: CheckedFolder) -> PreTrainedModel | None:
    """The frame of the model in a checked folder, in float32 on the CPU, in evaluation mode.

    None where the files' names or shapes are not the model's own: transformers knows how to read
    some older ones, and how to refuse the others (`load_model`).
    """
    with _META:
        model = construct(found.family, config_in(found.folder))
        if found.has_own_head and model.get_parameter("lm_head.weight") is embedding(model):
            give_own_head(model, embedding(model).detach().clone())
    made = _parameters(model, found)
    if made is None:
        return None
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, made[id(old)])
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            empty = torch.empty_like(buffer, device="cpu")
            setattr(module, name, nn.Buffer(empty, persistent=False))
        if buffers:  # of rotary embeddings: in no file, computed as from_pretrained does
            model._init_weights(module)  # type: ignore[no-untyped-call]  # noqa: SLF001
    fuse_activations(model)
    model.train(mode=False)
    return model


def _parameters(model: PreTrainedModel, found: CheckedFolder) -> dict[int, nn.Parameter] | None:
    """By the id of those on the device meta: one for all names of a shared one."""
    stored, prefix = found.stored, model.base_model_prefix
    later = {f"{path}.weight" for path in frozen_matrices(model)}
    shared: dict[int, list[str]] = defaultdict(list)
    shapes: dict[int, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared[id(parameter)].append(name)
        shapes[id(parameter)] = tuple(parameter.shape)
    made: dict[int, nn.Parameter] = {}
    for key, names in shared.items():
        there = [own for name in names if (own := stored.name_of(name, prefix)) is not None]
        if not there or any(stored.shapes[own] != shapes[key] for own in there):
            return None
        if names[0] in later:
            tensor = torch.zeros(()).expand(shapes[key])
        else:
            tensor = stored.float32(there[0])
            if not all(torch.equal(tensor, stored.float32(other)) for other in there[1:]):
                return None
        made[key] = nn.Parameter(tensor)
    return made


def matrix_of(found: CheckedFolder, model: PreTrainedModel, parameter: str) -> Tensor:
    """A matrix that the frame lacks, in float32, by the name of its parameter."""
    name = found.stored.name_of(parameter, model.base_model_prefix)
    assert name is not None  # as `load_frame` found it
    return found.stored.float32(name)
