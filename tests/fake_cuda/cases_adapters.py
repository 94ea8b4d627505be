"""Adapters in use on the fake card: what they take there and in the machine's memory, and texts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fake_cuda.card import fake_card
from tiny import EOS, PAD, stream_of, uneven_examples
from toque.config.schema_methods import AdapterConfig
from toque.models.families import family_of
from toque.models.forward.loss import loss_sum
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.models.loading import pretrained
from toque.models.loading.from_scratch import config_in, known_model
from toque.models.loading.model_folder import StoredWeights
from toque.models.loading.pretrained import (
    AdaptedBase,
    CheckedFolder,
    formats_in_use,
    load_with_adapters,
)
from toque.models.lora import adapter_files, frozen
from toque.models.lora.adapter_files import adapter_tensors, read_config, write_adapter
from toque.models.lora.frozen import FrozenFormat, computing, format_of
from toque.models.lora.layers import attach
from toque.models.lora.quantised import FormName, Outlined
from toque.units import Cursor

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [7]]
CUDA = torch.device("cuda")


class MachineMemory(TorchDispatchMode):
    """Bytes that tensors take in the machine's memory, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return

        def freed(_: Any) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class InUse:
    """Facts of an adapter in use on the card."""

    held: str  # format of the base
    card: int  # bytes at most, loading and writing
    memory: int  # bytes of the machine's memory at most
    needed: tuple[
        int, int
    ]  # what was computed before: of the card, once loaded, and in memory
    loaded: int  # bytes on the card once loaded
    devices: set[str]
    texts: int
    loss_on: str  # device of a held-out loss


class _OnCard(Outlined):
    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        with matrix.device:
            return super().quantise(matrix)


class _Shapes(StoredWeights):
    """Weights of a folder without their content."""

    def float32(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name])


@contextmanager
def _without_content(stored: StoredWeights) -> Iterator[None]:
    """A context in which a base is read as shapes, hashes are of nothing, and nf4 is outlined."""
    shapes = _Shapes(stored.files, stored.shapes)

    def outside(function: Any) -> Any:
        def real(*args: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args)

        return real

    opened = adapter_files._opened

    @contextmanager
    def read(file: Path) -> Iterator[Any]:
        with unset_fake_temporarily(), opened(file) as found:
            yield found

    with ExitStack() as stack:
        for owner, name, value in (
            (pretrained, "stored_weights", lambda _: shapes),
            (frozen, "_add_to_digest", lambda *_: None),
            (pretrained, "refuse_another_base", lambda *_: None),
            (torch, "equal", lambda *_: True),
            # Inference mode skips the step by which new tensors on the card become fake.
            (torch._C, "_InferenceMode", lambda _: torch.no_grad()),
            (pretrained, "form_named", _OnCard),
            (AdaptedBase, "needed", outside(AdaptedBase.needed)),
            (adapter_files, "_opened", read),
            (nn.Module, "to", _to),
            (FakeTensor, "tolist", lambda tensor: np.ones(tensor.shape, int).tolist()),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def _to(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`nn.Module.to` for tensors without content, which torch changes in place; one by one."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is not None:
                    if id(old) not in made:
                        new: Tensor = old.detach().to(device, dtype)
                        is_weight = isinstance(old, nn.Parameter)
                        made[id(old)] = (
                            nn.Parameter(new, old.requires_grad) if is_weight else new
                        )
                    held[name] = made[id(old)]
    return model


def used(base: Path, adapters: Mapping[str, Path], *, memory: int = 24 << 30) -> InUse:
    """Load adapters beside their base as they were trained, and write texts with the first."""
    return _used(adapters, pretrained.stored_weights(base), memory=memory)


def _used(adapters: Mapping[str, Path], stored: StoredWeights, *, memory: int) -> InUse:
    seen: list[Any] = []
    choose_format = AdaptedBase.choose_format

    def noted(
        base: AdaptedBase, formats: Sequence[FrozenFormat], device: torch.device
    ) -> Any:
        held = choose_format(base, formats, device)
        seen.append(base.needed(held, device))
        return held

    config = config_in(
        Path(read_config(next(iter(adapters.values()))).base_model_name_or_path)
    )
    batch = stream_of(uneven_examples(38), family_of(config).name).at(Cursor()).batch
    machine = MachineMemory()
    for folder in adapters.values():
        read_config(
            folder
        )  # imports peft, which would ask the card that is not there for streams
    with (
        fake_card(memory=memory) as card,
        _without_content(stored),
        patch.object(AdaptedBase, "choose_format", noted),
        machine,
    ):
        formats = formats_in_use(adapters.values(), CUDA)
        model = load_with_adapters(adapters, formats, CUDA, merge=True)
        loaded = card.now
        options = GenerationOptions(max_new_tokens=4)
        texts = generate(model, PROMPTS, options, eos_id=EOS, pad_id=PAD)
        with computing(model), torch.no_grad():
            loss = loss_sum(model, batch.to(CUDA))
        devices = {t.device.type for t in (*model.parameters(), *model.buffers())}
        held = str(format_of(model))
        return InUse(
            held,
            card.peak,
            machine.peak,
            seen[0],
            loaded,
            devices,
            len(texts),
            loss.device.type,
        )


def xxl(folder: Path, form: FormName | None, *, memory: int) -> InUse:
    """FLAN-T5-XXL with LoRA of the preset's size, beside a base in bf16, int8 or nf4."""
    base, adapter = folder / "base", folder / "adapter"
    with FakeTensorMode():
        known = known_model("google/flan-t5-xxl")
    assert known is not None
    known.config.save_pretrained(base)
    nothing = StoredWeights({}, {})
    model = pretrained.build_outline(
        CheckedFolder(base, family_of(known.config), nothing, True)
    )
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with torch.device("meta"):
        attach(model, AdapterConfig(), base=str(base), seed=1)
    vars(model)["frozen_format"] = FrozenFormat(torch.bfloat16, form)
    made = {key: torch.zeros(t.shape) for key, t in adapter_tensors(model).items()}
    adapter.mkdir()
    with patch.object(adapter_files, "adapter_tensors", lambda _: made):
        write_adapter(model, adapter, base_hash="")
    stored = StoredWeights(dict.fromkeys(own, base / "model.safetensors"), own)
    return _used({"default": adapter}, stored, memory=memory)
