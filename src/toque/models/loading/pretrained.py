"""Pretrained models from a Hugging Face folder or hub name, checked before use.

`load_model` reads a complete model. `load_frame` reads everything except the matrices, for a frozen
base (FLAN-T5-XXL's matrices take 42 of 44 GB in float32). Tensors without memory replace the
matrices until an `AdaptedBase` reads them to its device, one at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from toque.errors import CheckpointError, ConfigError, argument
from toque.hardware.memory import HEADROOM, free_bytes, in_words
from toque.hardware.onednn import has_fast_bf16
from toque.models.families import (
    CAUSAL,
    FAMILIES,
    Family,
    embedding,
    exchange_parameters,
    family_of,
    may_be_supported,
    refuse_unsupported_layers,
    unsupported_type,
    vocabulary_rows,
)
from toque.models.loading.from_scratch import (
    config_in,
    construct,
    fuse_activations,
    give_own_head,
)
from toque.models.loading.hub import resolve_folder
from toque.models.loading.model_folder import (
    StoredWeights,
    check_config,
    describe_adapter,
    read_config_json,
    stored_weights,
    too_few_weights,
)
from toque.models.loading.self_check import refuse_wrong_forward
from toque.models.lora.adapter_files import CONFIG as ADAPTER_CONFIG
from toque.models.lora.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from toque.models.lora.adapter_files import (
    add_adapter,
    fill_tables,
    is_adapter_folder,
    merge_adapter,
    read_config,
    recorded_format,
    refuse_another_base,
    refuse_shared_base,
    required_rows,
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

# Fraction of free memory for weights. The KV cache and activations need the rest.
SHARE: Final = 0.8
CPU: Final = torch.device("cpu")
# Maximum size of a grown embedding, and of a trained tokenizer.
MAX_ROWS: Final = 500_000


@dataclass(frozen=True)
class CheckedFolder:
    """A valid model folder, its family and the content of its files."""

    folder: Path
    family: Family
    stored: StoredWeights
    has_own_head: bool  # the head is not tied to the embedding and has its own tensor in the files


@dataclass(frozen=True)
class Placement:
    """Devices and precision of a stored model's weights."""

    devices: Mapping[str, torch.device]  # device of each module, by its name
    dtype: torch.dtype


Place = Callable[[CheckedFolder], Placement | None]
"""Function that places a stored model; None places it on the CPU in float32."""


def check_folder(path: str, *, family: str = "auto") -> CheckedFolder:
    """Check the config and headers of a folder or hub name without reading any weight.

    Raises:
        ConfigError: The model does not exist, or its family is not supported or not `family`.
        CheckpointError: The model is incomplete or damaged, or has only pickles.
    """
    folder = resolve_folder(path)
    _check_folder_kind(folder)

    raw = read_config_json(folder)
    model_type = str(raw.get("model_type"))
    if family != "auto" and model_type not in FAMILIES[family].model_types:
        raise ConfigError(
            f'model.family is {family}, but {folder} contains a model of type "{model_type}". '
            "Set model.family=auto, or set model.start_from to another model."
        )
    if not may_be_supported(model_type):
        raise unsupported_type(model_type, has_code="auto_map" in raw)

    stored = stored_weights(folder)
    n_weights = sum(map(math.prod, stored.shapes.values()))
    file = folder / "config.json"
    check_config(raw, file, n_weights)
    config = config_in(folder)
    refuse_unsupported_layers(config)
    is_untied = raw.get("tie_word_embeddings") is False
    has_own_head = is_untied and "lm_head.weight" in stored.files
    checked = CheckedFolder(folder, family_of(config), stored, has_own_head)
    if checked.family == CAUSAL:  # `check_config` does not know such a model's sizes
        _check_size(checked, file, n_weights)
    return checked


def _check_folder_kind(folder: Path) -> None:
    """Raise a ConfigError if a folder contains an adapter, or no model."""
    if is_adapter_folder(folder):
        raise ConfigError(describe_adapter(folder))
    # transformers would silently add the adapter to the model.
    if (folder / ADAPTER_CONFIG).exists():
        raise ConfigError(
            f"{folder} contains both the weights of a model and an adapter ({ADAPTER_CONFIG}). "
            f"Move {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} to a separate folder. Then use that "
            "folder for the adapter, and this one for the model without it."
        )
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder. Use a folder "
            "with config.json and model.safetensors."
        )


def _check_size(checked: CheckedFolder, file: Path, n_weights: int) -> None:
    """Raise a CheckpointError if a model has more weights than its files."""
    try:
        needed = sum(
            parameter.numel() for parameter in build_outline(checked).parameters()
        )
    except Exception as error:  # an untrusted config can cause any error
        raise CheckpointError(
            f"{file} does not describe a valid model ({type(error).__name__}): "
            f"{' '.join(str(error).split())[:300]}. Copy the model from its source again."
        ) from error
    if needed > n_weights:
        raise too_few_weights(file, needed, n_weights)


def load_model(
    path: str, *, family: str = "auto", place: Place | None = None
) -> PreTrainedModel:
    """Load a pretrained model in float32 on the CPU, in evaluation mode.

    With `place`, load the model to the devices of its placement, without a copy on the CPU.

    Raises:
        ConfigError: See `check_folder`.
        CheckpointError: See `check_folder`. Or weights are missing or have other shapes.
    """
    checked = check_folder(path, family=family)
    placement = None if place is None else place(checked)
    model = _read_weights(checked.folder, checked.family, placement)
    if placement is not None:  # transformers sets the map for several devices only
        vars(model)["hf_device_map"] = dict(placement.devices)
    if checked.has_own_head:
        # transformers 5 ties a T5's head regardless of config.json.
        if _head(model) is embedding(model):
            give_own_head(model, _head(model).detach().clone())
        model.config.tie_word_embeddings = False
    fuse_activations(model)
    refuse_wrong_forward(model)
    return model


def grow_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """Grow the embeddings and the head to `vocab_size` rows, if they have fewer.

    New rows are the mean of the old rows, which hardly changes the predictions and needs no random
    numbers (Hewitt 2021, "Initializing new word embeddings for pretrained language models").

    Raises:
        CheckpointError: `vocab_size` is implausible.
    """
    old = vocabulary_rows(model)
    if vocab_size <= old:
        return
    limit = max(MAX_ROWS, 2 * old)
    if vocab_size > limit:
        raise CheckpointError(
            f"The tokenizer or an adapter's record requires {vocab_size:,} embedding rows, but the "
            f"model has {old:,} and at most {limit:,} are allowed. The file is damaged or belongs "
            "to another model."
        )
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        # A tied table is filled twice, with the same values.
        for table in (embedding(model), _head(model)):
            table[old:] = table[:old].mean(0)


def _read_weights(
    folder: Path, family: Family, placement: Placement | None
) -> PreTrainedModel:
    """Read a model with transformers. Raise a CheckpointError if a weight is missing.

    transformers would initialise missing weights at random.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    auto = AutoModelForSeq2SeqLM if family.is_encoder_decoder else AutoModelForCausalLM

    try:
        loaded: Any = auto.from_pretrained(
            folder,
            dtype=torch.float32 if placement is None else placement.dtype,
            device_map=None if placement is None else dict(placement.devices),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,  # otherwise transformers prompts at the terminal
            output_loading_info=True,
        )
    except Exception as error:  # an untrusted folder can cause any error
        raise CheckpointError(
            f"The model in {folder} does not load ({type(error).__name__}): "
            f"{' '.join(str(error).split())[:600]}. Its config.json and its weights do not match, "
            "or one of them is damaged. Copy the model from its source again."
        ) from error

    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:4])
        if len(missing) > 4:
            shown += ", ..."
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights that its config.json requires: {shown}. The "
            "config and the weights do not match, or the copy is incomplete. Copy the model from "
            "its source again."
        )

    return model  # from_pretrained returns it in evaluation mode


def _head(model: PreTrainedModel) -> Tensor:
    return model.get_parameter("lm_head.weight")


def load_frame(checked: CheckedFolder) -> PreTrainedModel | None:
    """Load everything except the matrices, in float32 on the CPU, in evaluation mode.

    Return None if names or shapes in the files differ from the model. `load_model` converts or
    rejects such files. Return None also if only constructors can compute the model's buffers.
    """
    model = build_outline(checked)
    parameters = _read_parameters(model, checked)
    if parameters is None or not _has_only_rotary_buffers(model, checked.family):
        return None

    exchange_parameters(model, parameters)
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            empty = torch.empty_like(buffer, device="cpu")
            setattr(module, name, nn.Buffer(empty, persistent=False))
        if buffers:
            # Rotary frequencies are not in the files. from_pretrained computes them like this.
            model._init_weights(module)  # type: ignore[no-untyped-call]  # noqa: SLF001
    fuse_activations(model)
    model.train(mode=False)
    return model


def _has_only_rotary_buffers(model: nn.Module, family: Family) -> bool:
    """True if all buffers are rotary frequencies, or the family is known to compute them."""
    if family != CAUSAL:
        return True
    with_buffers = (m for m in model.modules() if [*m.buffers(recurse=False)])
    return all("RotaryEmbedding" in type(module).__name__ for module in with_buffers)


def build_outline(checked: CheckedFolder) -> PreTrainedModel:
    """Construct a checked folder's model on the meta device, with its stored head."""
    with torch.device("meta"):
        model = construct(checked.family, config_in(checked.folder))
        if checked.has_own_head and _head(model) is embedding(model):
            give_own_head(model, embedding(model).detach().clone())
    return model


def _read_parameters(
    model: PreTrainedModel, checked: CheckedFolder
) -> dict[int, nn.Parameter] | None:
    """Read the parameters by the id of their counterparts on the meta device.

    A shared parameter has several names and is read once. Matrices are zeros without memory. None
    if names, shapes or shared values in the files differ from the model.
    """
    stored, prefix = checked.stored, model.base_model_prefix
    matrices = {f"{path}.weight" for path in frozen_matrices(model)}
    names_by_id: dict[int, list[str]] = defaultdict(list)
    shapes: dict[int, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id[id(parameter)].append(name)
        shapes[id(parameter)] = tuple(parameter.shape)

    parameters: dict[int, nn.Parameter] = {}
    for key, names in names_by_id.items():
        candidates = (stored.name_of(name, prefix) for name in names)
        stored_names = [name for name in candidates if name is not None]
        # The set is empty if none of the names is in the files.
        if {stored.shapes[name] for name in stored_names} != {shapes[key]}:
            return None
        if names[0] in matrices:
            tensor = torch.zeros(()).expand(shapes[key])
        else:
            tensor = stored.float32(stored_names[0])
            others = (stored.float32(name) for name in stored_names[1:])
            if not all(torch.equal(tensor, other) for other in others):
                return None
        parameters[key] = nn.Parameter(tensor)
    return parameters


def matrix_of(checked: CheckedFolder, model: PreTrainedModel, parameter: str) -> Tensor:
    """Read a matrix that is not in the frame, in float32, by the name of its parameter."""
    name = checked.stored.name_of(parameter, model.base_model_prefix)
    assert name is not None  # `load_frame` checks the names
    return checked.stored.float32(name)


class NeededMemory(NamedTuple):
    """Bytes that a base with adapters needs."""

    on_gpu: int
    """Bytes on the GPU after loading. 0 on a CPU."""
    on_cpu: int
    """Largest number of bytes in CPU memory while loading."""


@dataclass(frozen=True)
class AdaptedBase:
    """A checked base, and the adapters to add before its matrices are read.

    `placed` may be called once, because it uses up the frame.
    """

    checked: CheckedFolder
    add: Callable[[PreTrainedModel], None]  # grows the vocabulary and adds the adapters
    # Read all matrices in float32 first, because DoRA computes with them.
    read_whole: bool
    # Replaces the embedding and the head by an adapter's, after the base is hashed.
    fill_tables: Callable[[PreTrainedModel], None] = lambda _model: None

    @cached_property
    def _frame(self) -> PreTrainedModel | None:
        """Everything except the matrices; None if all matrices are read in float32 first."""
        return None if self.read_whole else load_frame(self.checked)

    def placed(
        self, frozen_format: FrozenFormat, device: torch.device
    ) -> tuple[PreTrainedModel, str]:
        """Load the model to a device, with its matrices in a format.

        Returns:
            The model, and the hash of its base.
        """
        dtype = frozen_format.dtype
        quantised = frozen_format.quantised
        form = None if quantised is None else form_named(quantised)
        frame = self._frame
        if frame is None:
            model = load_model(str(self.checked.folder))
            self.add(model)
            base_hash = base_sha256(model)
            hold_frozen(model, dtype, form)
            model.to(device)  # type: ignore[arg-type]  # transformers annotates it away
            self.fill_tables(model)
            return model, base_hash

        self.add(frame)
        read = partial(matrix_of, self.checked, frame)
        base_hash = read_frozen(frame, read, dtype=dtype, form=form, device=device)
        refuse_wrong_forward(frame)
        self.fill_tables(frame)
        return frame, base_hash

    def needed(self, frozen_format: FrozenFormat, device: torch.device) -> NeededMemory:
        """Compute the memory that loading needs."""
        quantised = frozen_format.quantised
        form = None if quantised is None else Outlined(quantised)
        model = build_outline(self.checked)
        with torch.device("meta"):
            self.add(model)
            in_float32 = sum(p.nbytes for p in model.parameters())
            layers: Iterable[Any] = frozen_matrices(model).values()
            without_matrices = in_float32 - sum(layer.weight.nbytes for layer in layers)
            # In addition to the model: the adapter's file, and a tensor of the base with a copy.
            extra = sum(
                p.nbytes for name, p in model.named_parameters() if is_added(name)
            )
            extra += 2 * max(p.nbytes for p in model.parameters())
            hold_frozen(model, frozen_format.dtype, form)
        in_format = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))

        is_on_cpu = device.type == "cpu"
        on_gpu = 0 if is_on_cpu else in_format
        if self._frame is None:
            return NeededMemory(on_gpu, in_float32 + extra)
        return NeededMemory(
            on_gpu, extra + (in_format if is_on_cpu else without_matrices)
        )

    def choose_format(
        self, formats: Sequence[FrozenFormat], device: torch.device
    ) -> FrozenFormat:
        """Return the first format that fits in the free memory.

        Raises:
            ConfigError: None of the formats fits.
        """
        gpu_limit = int(SHARE * free_bytes(device))
        cpu_limit = int(HEADROOM * free_bytes(CPU))
        has_gpu = device.type != "cpu"
        needs = []
        for frozen_format in formats:
            on_gpu, on_cpu = self.needed(frozen_format, device)
            if on_gpu <= gpu_limit and on_cpu <= cpu_limit:
                return frozen_format
            need = f"{in_words(on_cpu)} of the machine's memory ({frozen_format})"
            if has_gpu:
                need = f"{in_words(on_gpu)} of {device} and {need}"
            needs.append(need)

        limit = f"{in_words(cpu_limit)} of memory ({HEADROOM:.0%} of the free memory)"
        if has_gpu:
            gpu_share = f"{SHARE:.0%} of its free memory"
            limit = f"{in_words(gpu_limit)} of {device} ({gpu_share}) and {limit}"
        raise ConfigError(
            f"{self.checked.folder} with its adapter needs {', or '.join(needs)}. The limit is "
            f"{limit}. Stop other programs, or use a larger machine or another "
            f"{argument('device')}. With adapter.quantize_base=nf4 in training, the base needs a "
            "quarter of its 16-bit memory, and with int8 half of it. `toque export` merges the "
            "adapter in float32 into a model that can be split across several GPUs."
        )


def formats_in_use(
    adapters: Iterable[Path],
    device: torch.device,
    otherwise: FrozenFormat | None = None,
) -> list[FrozenFormat]:
    """List the formats in which a base may be loaded for some adapters, the best first.

    A GPU uses the format that the adapters were trained with (`otherwise` if not recorded). A CPU
    uses float32, because an adapter that is merged into float32 is fastest. A GPU also uses float32
    if the format is float32 or unknown, or the adapters differ. The second format is for too little
    memory.
    """
    recorded = {recorded_format(adapter) or otherwise for adapter in adapters}
    trained = otherwise
    if recorded:
        trained = recorded.pop() if len(recorded) == 1 else None
    if device.type != "cpu" and trained not in (None, PLAIN):
        return [trained]

    # A quantised matrix computes in any precision. A plain one saves memory only in bfloat16.
    quantised = None if trained is None else trained.quantised
    dtype = torch.bfloat16
    if quantised is not None and not has_fast_bf16(device):
        dtype = torch.float32
    return [PLAIN, FrozenFormat(dtype, quantised)]


def load_with_adapters(
    adapters: Mapping[str, Path],
    formats: Sequence[FrozenFormat],
    device: torch.device,
    *,
    base: str | None = None,
    merge: bool = False,
    read_whole: bool = False,
) -> PreTrainedModel:
    """Load a base with adapters by name, and activate the first adapter.

    Args:
        adapters: Folders of the adapters by name.
        formats: Formats of the base. The first one that fits in the free memory is used.
        device: Device for the model.
        base: Folder or hub name of the base; by default the base in the first adapter's config.
        merge: Merge the adapter if the format is float32.
        read_whole: Read all matrices in float32 first. This is always done for DoRA.

    Raises:
        ConfigError: The base is missing or not supported, or the memory is too small.
        CheckpointError: A folder is damaged, or an adapter was trained on another base.
    """
    folders = [*adapters.values()]
    configs = [read_config(folder) for folder in folders]
    base_path = base or configs[0].base_model_name_or_path
    if not base_path:
        raise ConfigError(
            f"{folders[0] / ADAPTER_CONFIG} does not name the adapter's base model. Set "
            '"base_model_name_or_path" in this file to the folder or hub name of the base.'
        )

    if len(folders) > 1:
        refuse_shared_base(folders)

    def add(model: PreTrainedModel) -> None:
        grow_vocabulary(model, max(required_rows(folder) or 0 for folder in folders))
        for name, folder in adapters.items():
            add_adapter(folder, model, name=name)

    def fill(model: PreTrainedModel) -> None:
        for name, folder in adapters.items():
            fill_tables(model, folder, name=name)

    read_whole = read_whole or any(config.use_dora for config in configs)
    adapted = AdaptedBase(check_folder(str(base_path)), add, read_whole, fill)
    frozen_format = adapted.choose_format(formats, device)
    model, base_hash = adapted.placed(frozen_format, device)
    for folder in folders:
        refuse_another_base(folder, lambda: base_hash)
    use_adapter(model, next(iter(adapters)))
    return merge_adapter(model) if merge and frozen_format == PLAIN else model


def load_with_adapter(folder: Path, *, merge: bool = True) -> PreTrainedModel:
    """Load an adapter and its base in float32 on the CPU, for export."""
    # load_model also reads the settings of generation, which an export contains.
    adapters = {ADAPTER: folder}
    return load_with_adapters(adapters, [PLAIN], CPU, merge=merge, read_whole=True)
