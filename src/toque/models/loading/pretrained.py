"""Pretrained models from a Hugging Face folder or hub name, checked before use.

`load_model` reads all of one. `load_frame` reads everything but its matrices, for a base that stays
frozen (FLAN-T5-XXL's are 42 of 44 GB in float32): in their places are tensors of no memory, until
an `AdaptedBase`, to train or to use, reads one after the other to its device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from toque.errors import CheckpointError, ConfigError, argument
from toque.hardware.memory import HEADROOM, free_bytes, in_words
from toque.models.families import (
    CAUSAL,
    FAMILIES,
    Family,
    embedding,
    exchange_parameters,
    family_of,
    is_read,
    refuse_unfit,
    unknown_type,
    vocabulary_rows,
)
from toque.models.loading.from_scratch import config_in, construct, fuse_activations, give_own_head
from toque.models.loading.hub import resolve_folder
from toque.models.loading.model_folder import (
    StoredWeights,
    check_config,
    read_config_json,
    stored_weights,
    too_few_weights,
)
from toque.models.loading.proof import refuse_unproven
from toque.models.lora.adapter_files import CONFIG as ADAPTER_CONFIG
from toque.models.lora.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from toque.models.lora.adapter_files import (
    add_from,
    is_adapter_folder,
    merged,
    read_config,
    refuse_another_base,
    rows_needed,
    trained_beside,
    use_adapter,
)
from toque.models.lora.frozen import (
    PLAIN,
    FrozenFormat,
    base_sha256,
    frozen_matrices,
    hold_frozen,
    is_added,
    read_frozen,
)
from toque.models.lora.layers import ADAPTER
from toque.models.lora.quantised import Outlined, form_named
from toque.models.onednn import has_fast_bf16

SHARE: Final = 0.8  # of a device's free memory for weights; KV cache and activations have the rest
CPU: Final = torch.device("cpu")
MOST_ROWS: Final = 500_000  # rows that an embedding is grown to, as many as a tokenizer may learn


@dataclass(frozen=True)
class CheckedFolder:
    """A model folder that may be read: its family, and what its files hold."""

    folder: Path
    family: Family
    stored: StoredWeights
    has_own_head: bool  # config.json says head and embedding are two, and the files hold the head


@dataclass(frozen=True)
class Placement:
    """Devices and precision of the weights of a stored model as they are read."""

    devices: Mapping[str, torch.device]  # device of each module, by its name
    dtype: torch.dtype


Place = Callable[[CheckedFolder], Placement | None]
"""Placement of a stored model; None: on the CPU in float32."""


def check_folder(path: str, *, family: str = "auto") -> CheckedFolder:
    """The folder behind a path or hub name, its config and headers checked, no weight read.

    ConfigError where there is no such model, or one of another family than `family` or of none
    here; CheckpointError where it is incomplete, damaged or holds only pickles.
    """
    folder = resolve_folder(path)
    file = folder / "config.json"
    if is_adapter_folder(folder):
        raise ConfigError(
            f"{folder} holds an adapter, not a model. Name the model it was trained on in "
            "model.start_from."
        )
    if (folder / ADAPTER_CONFIG).exists():  # transformers would put it into the model, unsaid
        raise ConfigError(
            f"{folder} holds both the weights of a model and an adapter, {ADAPTER_CONFIG}, and "
            f"which is meant is not sure. Move {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} to a folder "
            "of their own, then name that for the adapter, and this one for the model alone."
        )
    if not file.exists():
        raise ConfigError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder. Name the "
            "folder that holds config.json and model.safetensors."
        )
    raw = read_config_json(folder)
    model_type = str(raw.get("model_type"))
    if family != "auto" and model_type not in FAMILIES[family].model_types:
        raise ConfigError(
            f'model.family is {family}, and {folder} holds a model of type "{model_type}". '
            "Set model.family=auto, or name another checkpoint in model.start_from."
        )
    if not is_read(model_type):
        raise unknown_type(model_type, has_code="auto_map" in raw)
    stored = stored_weights(folder)
    n_weights = sum(map(math.prod, stored.shapes.values()))
    check_config(raw, file, n_weights)
    config = config_in(folder)
    refuse_unfit(config)
    own_head = raw.get("tie_word_embeddings") is False and "lm_head.weight" in stored.files
    found = CheckedFolder(folder, family_of(config), stored, own_head)
    if found.family == CAUSAL:
        _check_size(found, file, n_weights)
    return found


def _check_size(found: CheckedFolder, file: Path, there: int) -> None:
    """Refuse, with a CheckpointError, a model of more weights than its files hold."""
    try:
        needed = sum(parameter.numel() for parameter in outlined(found).parameters())
    except Exception as error:  # whatever a config that may be anyone's makes of a model
        raise CheckpointError(
            f"{file} describes no model that can be made ({type(error).__name__}): "
            f"{' '.join(str(error).split())[:300]}. Copy the model from its source again."
        ) from error
    if needed > there:
        raise too_few_weights(file, needed, there)


def load_model(path: str, *, family: str = "auto", place: Place | None = None) -> PreTrainedModel:
    """A pretrained model in float32 on the CPU, in evaluation mode, dropout as its config says.

    The weights must be all there and have the config's shapes; transformers alone would draw
    missing ones at random. `place` says where it goes instead, without a copy on the CPU. Raises
    what `check_folder` raises.
    """
    found = check_folder(path, family=family)
    placed = None if place is None else place(found)
    model = _read_weights(found.folder, found.family, placed)
    if placed is not None:  # transformers says so of several devices alone
        vars(model)["hf_device_map"] = dict(placed.devices)
    if found.has_own_head:  # transformers 5 ties a T5's head whatever config.json says
        if _head(model) is embedding(model):
            give_own_head(model, _head(model).detach().clone())
        model.config.tie_word_embeddings = False
    fuse_activations(model)
    refuse_unproven(model)
    return model


def grow_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """Give embeddings and head `vocab_size` rows, when they have fewer: the mean of the old ones.

    So the predictions barely change (Hewitt 2021, "Initializing new word embeddings for pretrained
    language models"), and nothing is random.
    """
    old = vocabulary_rows(model)
    if vocab_size <= old:
        return
    most = max(MOST_ROWS, 2 * old)
    if vocab_size > most:
        raise CheckpointError(
            f"The tokenizer, or an adapter's record, asks for {vocab_size:,} rows of the embedding "
            f"where the model has {old:,}; at most {most:,} are made. It is damaged, or another's."
        )
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        # A tied table is filled twice, with the same numbers.
        for table in (embedding(model), _head(model)):
            table[old:] = table[:old].mean(0)


def _read_weights(folder: Path, family: Family, placed: Placement | None) -> PreTrainedModel:
    # Loading is over before anyone could read a progress bar.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    auto = AutoModelForSeq2SeqLM if family.is_encoder_decoder else AutoModelForCausalLM
    try:
        loaded: Any = auto.from_pretrained(
            folder,
            dtype=torch.float32 if placed is None else placed.dtype,
            device_map=None if placed is None else dict(placed.devices),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,  # without it, transformers asks at the terminal
            output_loading_info=True,
        )
    except Exception as error:  # whatever transformers makes of a folder that may be anyone's
        raise CheckpointError(
            f"The model in {folder} does not load ({type(error).__name__}): "
            f"{' '.join(str(error).split())[:600]}. Its config.json and its weights do not belong "
            "together, or one of them is damaged: copy the model from its source again."
        ) from error
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights its config.json asks for: {shown}. "
            "The two do not belong together, or the copy is not whole."
        )
    return model  # transformers hands it over in evaluation mode


def _head(model: PreTrainedModel) -> Tensor:
    return model.get_parameter("lm_head.weight")


def load_frame(found: CheckedFolder) -> PreTrainedModel | None:
    """The frame of the model in a checked folder, in float32 on the CPU, in evaluation mode.

    None where names or shapes in the files are not the model's own, which `load_model` reads or
    refuses.
    """
    model = outlined(found)
    made = _parameters(model, found)
    # Of other types buffers may hold what only their own constructor computes.
    known = found.family != CAUSAL or all(
        "RotaryEmbedding" in type(module).__name__ or not [*module.buffers(recurse=False)]
        for module in model.modules()
    )
    if made is None or not known:
        return None
    exchange_parameters(model, made)
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            empty = torch.empty_like(buffer, device="cpu")
            setattr(module, name, nn.Buffer(empty, persistent=False))
        if buffers:  # of rotary embeddings: in no file, computed as from_pretrained does
            model._init_weights(module)  # type: ignore[no-untyped-call]  # noqa: SLF001
    fuse_activations(model)
    model.train(mode=False)
    return model


def outlined(found: CheckedFolder) -> PreTrainedModel:
    """The model of a checked folder on the device meta, with the head that it is stored with."""
    with torch.device("meta"):
        model = construct(found.family, config_in(found.folder))
        if found.has_own_head and model.get_parameter("lm_head.weight") is embedding(model):
            give_own_head(model, embedding(model).detach().clone())
    return model


def _parameters(model: PreTrainedModel, found: CheckedFolder) -> dict[int, nn.Parameter] | None:
    """Parameters by the id of those on the device meta: one for all names of a shared one."""
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


@dataclass(frozen=True)
class AdaptedBase:
    """A checked base and what is put beside its matrices before they are read; placed once."""

    found: CheckedFolder
    add: Callable[[PreTrainedModel], None]  # makes rows for new tokens, and puts the adapters in
    read_whole: bool  # as DoRA wants it, which computes with float32 weights

    @cached_property
    def _frame(self) -> PreTrainedModel | None:
        """All but the matrices; None where these are read whole first, in float32.

        So are those of files with older names.
        """
        return None if self.read_whole else load_frame(self.found)

    def placed(self, held: FrozenFormat, device: torch.device) -> tuple[PreTrainedModel, str]:
        """The model on a device, its frozen matrices held in a format, and the base's hash."""
        form, frame = held.quantised and form_named(held.quantised), self._frame
        if frame is None:
            model = load_model(str(self.found.folder))
            self.add(model)
            base_hash = base_sha256(model)
            hold_frozen(model, held.dtype, form)
            model.to(device)  # type: ignore[arg-type]  # transformers annotates it away
            return model, base_hash
        self.add(frame)
        read = partial(matrix_of, self.found, frame)
        base_hash = read_frozen(frame, read, dtype=held.dtype, form=form, device=device)
        refuse_unproven(frame)
        return frame, base_hash

    def needed(self, held: FrozenFormat, device: torch.device) -> tuple[int, int]:
        """Bytes on a GPU, once it is there, and of the machine's memory while it is read."""
        model = outlined(self.found)
        with torch.device("meta"):
            self.add(model)
            whole = sum(p.nbytes for p in model.parameters())
            layers: Iterable[Any] = frozen_matrices(model).values()
            rest = whole - sum(layer.weight.nbytes for layer in layers)
            # Beside the model: an adapter's file, and a tensor of the base with a copy.
            beside = sum(p.nbytes for name, p in model.named_parameters() if is_added(name))
            beside += 2 * max(p.nbytes for p in model.parameters())
            hold_frozen(model, held.dtype, held.quantised and Outlined(held.quantised))
        in_format = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        on_cpu = device.type == "cpu"
        read = whole if self._frame is None else in_format if on_cpu else rest
        return 0 if on_cpu else in_format, read + beside

    def fitting(self, formats: Sequence[FrozenFormat], device: torch.device) -> FrozenFormat:
        """The first of the formats that there is memory for; ConfigError without one."""
        room, free = int(SHARE * free_bytes(device)), int(HEADROOM * free_bytes(CPU))
        on_gpu, takes = device.type != "cpu", []
        for held in formats:
            there, here = self.needed(held, device)
            if there <= room and here <= free:
                return held
            on_card = f"{in_words(there)} of {device} and " * on_gpu
            takes.append(f"{on_card}{in_words(here)} of the machine's memory ({held})")
        on_card = f"{in_words(room)} of {device} ({SHARE:.0%} of what is free) and " * on_gpu
        raise ConfigError(
            f"{self.found.folder} with its adapter takes {', or '.join(takes)}. It may take "
            f"{on_card}{in_words(free)} of memory ({HEADROOM:.0%} of what is free). End what else "
            f"uses it, or take a larger machine or another {argument('device')}. An adapter "
            "trained with adapter.quantize_base=nf4 takes a fourth of 16 bits, with int8 half; "
            "`toque export`, in memory for float32, merges it into a model that goes over several "
            "GPUs."
        )


def formats_in_use(
    adapters: Iterable[Path], device: torch.device, otherwise: FrozenFormat | None = None
) -> list[FrozenFormat]:
    """Formats of a base for some adapters, the best first; `otherwise` if they do not record one.

    A GPU takes what they were trained beside. Float32 is for a CPU, and for adapters of float32, of
    several formats or of one unknown: into it one is merged, which is the fastest. Where it has no
    room, matrices are turned back to what is fast.
    """
    recorded = {trained_beside(adapter) or otherwise for adapter in adapters} or {otherwise}
    trained = recorded.pop() if len(recorded) == 1 else None
    if device.type != "cpu" and trained not in (None, PLAIN):
        return [trained]
    quantised = None if trained is None else trained.quantised
    slow = quantised is not None and not has_fast_bf16(device)
    return [PLAIN, FrozenFormat(torch.float32 if slow else torch.bfloat16, quantised)]


def load_with_adapters(
    adapters: Mapping[str, Path],
    formats: Sequence[FrozenFormat],
    device: torch.device,
    *,
    base: str | None = None,
    merge: bool = False,
    read_whole: bool = False,
) -> PreTrainedModel:
    """A base on a device, in the first format that fits, with adapters by name, the first active.

    The base is the one that the first adapter names, if no other is. With `merge` a plain model,
    where the format is. ConfigError for a base that is missing or none that works here, or too
    little memory; CheckpointError for a damaged folder, or another base than the adapters'.
    """
    folders, configs = [*adapters.values()], [*map(read_config, adapters.values())]
    named = base or configs[0].base_model_name_or_path
    if not named:
        raise ConfigError(
            f"{folders[0] / ADAPTER_CONFIG} does not say which model it belongs to. Write that "
            'model\'s folder or hub name into it as "base_model_name_or_path".'
        )

    def add(model: PreTrainedModel) -> None:
        grow_vocabulary(model, max(rows_needed(folder) or 0 for folder in folders))
        for name, folder in adapters.items():
            add_from(folder, model, name=name)

    whole = read_whole or any(config.use_dora for config in configs)
    beside = AdaptedBase(check_folder(str(named)), add, whole)
    held = beside.fitting(formats, device)
    model, base_hash = beside.placed(held, device)
    for folder in folders:
        refuse_another_base(folder, lambda: base_hash)
    use_adapter(model, next(iter(adapters)))
    return merged(model) if merge and held == PLAIN else model


def load_with_adapter(folder: Path, *, merge: bool = True) -> PreTrainedModel:
    """The base that an adapter names with the adapter in it, in float32 on the CPU, to export."""
    # Whole: with the settings of generation that lie beside its weights.
    beside = {ADAPTER: folder}
    return load_with_adapters(beside, [PLAIN], CPU, merge=merge, read_whole=True)
