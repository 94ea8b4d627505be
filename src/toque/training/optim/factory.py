"""Optimizer construction, the conditional step, and the optimizer's state as named tensors.

The state is keyed by parameter name, not by position, so that an optimizer with other groups can
load it.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from toque.config.schema import OptimConfig
from toque.config.user_code import import_user_code
from toque.errors import ConfigError
from toque.training.distributed.data_parallel import local_part, shard_like
from toque.training.optim.hidden_state import (
    GENERATORS,
    Facts,
    first_difference,
    hidden_state,
)
from toque.training.optim.matrix_optimizers import WithAdamW, adamw_8bit, muon
from toque.training.optim.weight_average import (
    AVERAGE,
    keep_average,
    keeps_average,
    update_average,
)
from toque.training.state_values import all_finite, refuse_differences

_Groups = list[dict[str, Any]]
_Build = Callable[[_Groups], torch.optim.Optimizer]
_ADAFACTOR_EPS: Final = (1e-18, 1e-3)
"""Lower bounds for the RMS of gradients and weights. A large model's gradients are below torch's
default bound, 1e-7. The square of 1e-18 is still a normal float32."""
_PROBE_SIZES: Final = (11, 13, 17, 19)
"""Sizes of a probe parameter's dimensions, all different to identify them in the state's shapes.
"""
_TRIAL_UPDATES: Final = 120
"""Number of updates before and after a trial restart. Some optimizers act only every hundredth
update.
"""
_TRIAL_PARTS: Final = (
    range(_TRIAL_UPDATES, _TRIAL_UPDATES + 1),
    range(_TRIAL_UPDATES + 1, 2 * _TRIAL_UPDATES),
)
"""Updates after a trial restart. The states are compared after each part. The first part is a
single update, because after many updates a lost history of gradients is complete again."""
_MIN_8_BIT_WEIGHTS: Final = 4096
"""Minimum number of weights in a tensor for 8-bit averages in bitsandbytes."""
_WEIGHTS_PER_BLOCK: Final = 256
"""Number of weights that share a scale in bitsandbytes."""
_NEVER_NEGATIVE: Final = frozenset(
    {"exp_avg_sq", "variance", "row_var", "col_var", "state2", "absmax1", "absmax2"}
)
"""State entries that are averages of squares or maximum absolute values."""


def optimizer_of(model: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer from the settings `optim`."""
    names = ("name", "weight_decay", "betas", "eps", "momentum")
    arguments = {name: getattr(optim, name) for name in names}
    optimizer = build_optimizer(model, **arguments)
    keep_average(optimizer, optim.ema_decay)
    return optimizer


def build_optimizer(
    model: nn.Module,
    *,
    name: str = "adamw",
    weight_decay: float = 0.01,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    momentum: float | None = None,
) -> torch.optim.Optimizer:
    """Build an optimizer for the trainable parameters. The loop sets its learning rate.

    - adamw: algorithm 2 of Loshchilov & Hutter 2019, fused.
    - adafactor: algorithm 4 of Shazeer & Stern 2018 without momentum, as in the training of T5. The
      RMS of an update is lr times the RMS of the weight, and lr is at most 1 / sqrt(step).
    - muon: Muon for matrices, AdamW for tables and vectors.
    - adamw8bit: AdamW with 8-bit averages for matrices, AdamW for tables and vectors.
    - module:function: the user's code. The caller checks that it is trusted.

    Tables are the embeddings and the output head. Vectors (biases and norm scales) have no weight
    decay: they are few, and decay towards zero does not regularise a scale. None stands for the
    optimizer's default, e.g. betas (0.9, 0.999) and eps 1e-8.

    Raises:
        ConfigError: The user's code fails, or the model has no trainable parameter.
    """
    options = {"betas": betas, "eps": eps, "momentum": momentum}
    arguments: dict[str, Any] = {
        key: value for key, value in options.items() if value is not None
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(
            "The model has no trainable parameters: all weights are frozen."
        )

    table_ids = _ids_of_tables(model)
    large = [p for p in trained if p.ndim >= 2]
    matrices = [p for p in large if p.ndim == 2 and id(p) not in table_ids]
    tables = [p for p in large if p.ndim != 2 or id(p) in table_ids]
    vectors = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}

    def decayed(parameters: list[nn.Parameter]) -> dict[str, Any]:
        return {"params": parameters, "weight_decay": weight_decay}

    if name == "muon":
        muon_arguments = {}
        if momentum is not None:  # AdamW has no such argument
            muon_arguments["momentum"] = arguments.pop("momentum")
        inner = muon([decayed(matrices)], **muon_arguments)
        return WithAdamW(inner, [decayed(tables), vectors], **arguments)
    if name == "adamw8bit":
        inner = adamw_8bit([decayed(matrices)], **arguments)
        return WithAdamW(inner, [decayed(tables), vectors], **arguments)

    groups = [decayed(large), vectors]
    if ":" in name:
        return _build_custom_optimizer(name, groups, arguments)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=0.0, eps=_ADAFACTOR_EPS)
    return torch.optim.AdamW(groups, lr=0.0, fused=True, **arguments)


def _build_custom_optimizer(
    name: str, groups: _Groups, arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """Build the user's optimizer. Refuse it if it fails or cannot continue from a checkpoint."""
    function = import_user_code(
        {}, name, setting="optim.name", kind="a function or class"
    )

    def build(groups: _Groups) -> torch.optim.Optimizer:
        optimizer = function(groups, lr=1.0, **arguments)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optim.name is {name}, which returned a {type(optimizer).__name__}. It must "
                "return a torch.optim.Optimizer for its first argument, the parameter groups."
            )
        return optimizer

    try:
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
            problem = _find_restart_problem(build)
        optimizer = build(groups)
    except ConfigError:
        raise
    except Exception as error:
        values = "".join(f", {key}={value}" for key, value in arguments.items())
        raise ConfigError(
            f"optim.name is {name}, which raised {type(error).__name__} when it was called with "
            f"groups of weights, lr=1.0{values}, or in step() with a small matrix: {error}."
        ) from error

    if problem is not None:
        raise ConfigError(
            f"optim.name is {name}, which does not support continuing from a checkpoint: in a "
            f"trial, {problem}. A checkpoint stores only tensors and numbers in state[parameter], "
            "and their sizes must follow from the parameter's size. Use an optimizer that stores "
            "all of its state there, e.g. torch.optim:NAdam, adamw, adafactor, muon or adamw8bit."
        )
    return optimizer


def _find_unsaved_entry(optimizer: torch.optim.Optimizer) -> str | None:
    """Describe the first state entry that is neither a tensor nor a number, if there is one."""
    states: Iterable[Mapping[str, Any]] = optimizer.state.values()
    for state in states:
        for entry, value in state.items():
            if not isinstance(value, Tensor | float | int | None):
                return f"state[parameter][{entry!r}] was a {type(value).__name__}"
    return None


def _train_with_noise(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> None:
    """Make updates with random gradients and learning rates that depend only on the step."""
    for step in steps:
        # torch.manual_seed would also seed the GPUs.
        torch.default_generator.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()


def _find_restart_problem(build: _Build) -> str | None:
    """Train a small model with and without a restart, and describe the difference, if any.

    Errors before the restart are raised. The caller must restore the CPU's random numbers.
    """
    torch.default_generator.manual_seed(0)
    # Twice the size from which bitsandbytes stores averages in 8 bits.
    model = nn.Linear(64, _MIN_8_BIT_WEIGHTS // 32)
    optimizer = _build_for_trial(build, model)
    _train_with_noise(model, optimizer, range(_TRIAL_UPDATES))
    unsaved = _find_unsaved_entry(optimizer)
    if unsaved is not None:
        return unsaved

    tensors = optimizer_tensors(optimizer, model)
    saved = {key: tensor.clone() for key, tensor in tensors.items()}
    restarted = copy.deepcopy(model)
    expected_facts: list[Facts] = []
    for steps in _TRIAL_PARTS:
        _train_with_noise(model, optimizer, steps)
        expected_facts.append(hidden_state(optimizer))

    try:
        problem = _continue_trial(build, restarted, saved, expected_facts)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return f"continuing from its state raised {type(error).__name__} ({error})"
    if problem is not None:
        return problem
    for parameter, expected in zip(
        restarted.parameters(), model.parameters(), strict=True
    ):
        if not torch.equal(parameter, expected):
            return (
                "continuing from its state gave other weights than an uninterrupted run"
            )
    return None


def _build_for_trial(build: _Build, model: nn.Linear) -> torch.optim.Optimizer:
    weight = {"params": [model.weight], "weight_decay": 0.01}
    bias = {"params": [model.bias], "weight_decay": 0.0}
    return build([weight, bias])


def _continue_trial(
    build: _Build,
    model: nn.Linear,
    saved: Mapping[str, Tensor],
    expected_facts: list[Facts],
) -> str | None:
    """Continue a trial with a new optimizer from its `saved` state.

    Returns:
        A description of the first difference from the uninterrupted trial, if there is one.
    """
    optimizer = _build_for_trial(build, model)
    layout = _expected_state(optimizer, model, saved)
    differences = _list_differences(saved, layout, steps=_TRIAL_UPDATES)
    if differences:
        shape = " x ".join(map(str, model.weight.shape))
        return (
            f"the saved state of a matrix of {shape} did not fit a new optimizer "
            f"({min(differences)})"
        )
    load_optimizer_tensors(optimizer, model, saved, where="")
    for steps, expected in zip(_TRIAL_PARTS, expected_facts, strict=True):
        _train_with_noise(model, optimizer, steps)
        name = first_difference(expected, hidden_state(optimizer))
        if name in GENERATORS:
            return f"it drew random numbers from {name}, which checkpoints do not store"
        if name is not None:
            return f"its attribute {name} differed from an uninterrupted run"
    return None


def _probe_state(optimizer: torch.optim.Optimizer, n_dims: int = 2) -> dict[str, Any]:
    """Return a custom optimizer's state for a parameter of `_PROBE_SIZES` after an update."""
    parameter = nn.Parameter(torch.ones(_PROBE_SIZES[:n_dims]))
    parameter.grad = torch.ones_like(parameter)
    # A copy with the optimizer's settings, but without its weights and state.
    twin = object.__new__(type(optimizer))
    group = {**optimizer.param_groups[0], "params": [parameter]}
    vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=[group])
    twin.step()
    state: Mapping[str, Any] = twin.state[parameter]
    return {entry: value for entry, value in state.items() if value is not None}


def step_if(
    optimizer: torch.optim.Optimizer,
    condition: Tensor,
    device: torch.device,
    *,
    step: int,
) -> None:
    """Apply update `step` if `condition` [] is true. Otherwise weights and state do not change.

    An average of the weights, if the optimizer keeps one, is a part of its state.

    Fused kernels on a GPU read `found_inf`, as with a loss scaler, so the host does not wait. For
    other optimizers the host reads `condition`, which waits for the device.
    """
    if device.type != "cpu" and optimizer.defaults.get("fused"):
        optimizer.found_inf = (~condition).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
        update_average(optimizer, step, condition)
    elif bool(condition):
        optimizer.step()
        update_average(optimizer, step, condition)


def _ids_of_tables(model: nn.Module) -> set[int]:
    """Return the ids of the embedding tables (tokens, positions, distances) and the output head."""
    table_ids = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if name.endswith("lm_head.weight"):
            table_ids.add(id(parameter))
    return table_ids


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Compute the bytes of the optimizer's state after an update of every parameter."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return sum(
        entry.nbytes for p in parameters for entry in _layout(optimizer, p).values()
    )


def gradient_and_state_bytes(model: nn.Module, optim: OptimConfig) -> dict[str, int]:
    """Compute the bytes of the gradients, and of the optimizer's state after an update."""
    return {
        "gradients": sum(p.nbytes for p in model.parameters() if p.requires_grad),
        "optimizer": state_bytes(optimizer_of(model, optim)),
    }


def _layout(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> dict[str, Tensor]:
    """Return the shapes and types of the state of `parameter` after an update, as meta tensors."""
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    average = {AVERAGE: like} if keeps_average(optimizer) else {}
    return _layout_of_kind(optimizer, parameter, like) | average


def _layout_of_kind(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, like: Tensor
) -> dict[str, Tensor]:
    """Return the layout of the state without an average. `like` is a meta tensor."""
    step = torch.empty((), device="meta")
    if _is_custom(optimizer):
        with unset_fake_temporarily():
            state = _probe_state(optimizer, like.ndim)
        real_sizes = dict(zip(_PROBE_SIZES, like.shape, strict=False))
        for entry, value in state.items():
            probe_shape = getattr(value, "shape", ())
            shape = [real_sizes.get(size, size) for size in probe_shape]
            dtype = value.dtype if isinstance(value, Tensor) else step.dtype
            state[entry] = torch.empty(shape, dtype=dtype, device="meta")
        return state

    if isinstance(optimizer, WithAdamW):
        optimizer = optimizer.part_for(parameter)
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": like}
    if _is_in_8_bits(optimizer):
        if like.numel() < _MIN_8_BIT_WEIGHTS:
            return {"step": step, "state1": like.float(), "state2": like.float()}
        codes = like.to(torch.uint8)
        n_blocks = math.ceil(like.numel() / _WEIGHTS_PER_BLOCK)
        scales = torch.empty(n_blocks, device="meta")
        first = {"state1": codes, "absmax1": scales}
        second = {"state2": codes, "absmax2": scales}
        return {"step": step, **first, **second}

    if not isinstance(optimizer, torch.optim.Adafactor):
        return {"step": step, "exp_avg": like, "exp_avg_sq": like}
    if like.ndim < 2:
        return {"step": step, "variance": like}
    return {"step": step, "row_var": like[..., :1], "col_var": like[..., :1, :]}


def _is_custom(optimizer: torch.optim.Optimizer) -> bool:
    """Check whether an optimizer is from the user's code."""
    return type(optimizer) not in (torch.optim.AdamW, torch.optim.Adafactor, WithAdamW)


def _is_in_8_bits(optimizer: torch.optim.Optimizer) -> bool:
    """Check whether an optimizer is from bitsandbytes, which may not be installed."""
    return type(optimizer).__module__.startswith("bitsandbytes.")


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, Tensor]:
    """Return the optimizer's state by `<parameter name>/<entry>`, e.g. `wte.weight/exp_avg`."""
    has_code_tables = isinstance(optimizer, WithAdamW)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            # The tables of 8-bit codes are constant.
            if value is None or (has_code_tables and entry.startswith("qmap")):
                continue
            # bitsandbytes and some custom optimizers count updates in a plain number.
            is_tensor = isinstance(value, Tensor)
            tensor = value if is_tensor else torch.tensor(float(value))
            tensors[f"{name}/{entry}"] = tensor
    return tensors


@torch.no_grad()
def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    where: str,
    steps: int | None = None,
) -> None:
    """Load the state that `optimizer_tensors` returned.

    An average of the weights may be missing: it then begins with the next update. If the optimizer
    keeps none, a saved average is left out.

    Args:
        optimizer: Optimizer, with any state.
        model: Model with the optimizer's parameters.
        tensors: State by parameter name and entry.
        where: The checkpoint, for messages.
        steps: Number of updates so far, if known. A larger count in the state is an error.

    Raises:
        CheckpointError: The state belongs to another model or optimizer, or its values are
            impossible. The optimizer is unchanged.
    """
    if not keeps_average(optimizer):
        suffix = f"/{AVERAGE}"
        tensors = {key: t for key, t in tensors.items() if not key.endswith(suffix)}
    expected = _expected_state(optimizer, model, tensors)
    differences = _list_differences(tensors, expected, steps=steps)
    refuse_differences(differences, where=where, what="the optimizer")

    optimizer.state.clear()
    if isinstance(optimizer, WithAdamW) and _is_in_8_bits(optimizer.inner):
        _init_code_tables(optimizer.inner, {p for p, *_ in expected.values()})
    for key, (parameter, entry, _) in expected.items():
        value = _copy_to_optimizer(optimizer, parameter, entry, tensors[key])
        optimizer.state[parameter][entry] = value


def _init_code_tables(inner: Any, parameters: set[nn.Parameter]) -> None:
    """Create the initial state of bitsandbytes for some of its parameters.

    This state has the tables of 8-bit codes, which checkpoints leave out.
    """
    for group_number, group in enumerate(inner.param_groups):
        for number, parameter in enumerate(group["params"]):
            if parameter in parameters:
                inner.init_state(group, parameter, group_number, number)


def _expected_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[nn.Parameter, str, Tensor]]:
    """Return the complete state of the parameters in `tensors`, by the keys of `tensors`.

    Averages of weights are included only if `tensors` has them.

    Each entry is the parameter, the name of the state entry, and a meta tensor of its layout.
    """
    optimized = {p for group in optimizer.param_groups for p in group["params"]}
    updated = {key.rpartition("/")[0] for key in tensors}
    return {
        f"{name}/{entry}": (parameter, entry, like)
        for name, parameter in model.named_parameters()
        if parameter in optimized and name in updated
        for entry, like in _layout(optimizer, parameter).items()
        if entry != AVERAGE or f"{name}/{entry}" in tensors
    }


def _list_differences(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[nn.Parameter, str, Tensor]],
    *,
    steps: int | None,
) -> list[str]:
    """Describe how `tensors` differ from the state `expected` after at most `steps` updates."""
    unknown = tensors.keys() - expected.keys()
    differences = [f"{key} is unknown to the optimizer" for key in unknown]
    for key in expected.keys() - tensors.keys():
        parameter_name, _, entry = key.rpartition("/")
        differences.append(f"{parameter_name} lacks {entry}")
    for key in tensors.keys() & expected.keys():
        value = tensors[key]
        _, entry, like = expected[key]
        shape = tuple(value.shape)
        if value.shape != like.shape:
            differences.append(f"{key} is {shape}, the optimizer's {tuple(like.shape)}")
        elif value.dtype != like.dtype:
            differences.append(f"{key} is {value.dtype}, the optimizer's {like.dtype}")
        elif problem := _find_impossible_value(entry, value, steps):
            differences.append(f"{key} {problem}")
    return differences


def _find_impossible_value(entry: str, value: Tensor, steps: int | None) -> str | None:
    """Describe why no run of `steps` updates can have this value of a state entry, if so."""
    if entry == "step":
        max_steps = math.inf if steps is None else steps
        count = float(value)
        # 0 is possible: fused kernels that skip the first update create a state but do not count.
        if 0.0 <= count <= max_steps and count.is_integer():
            return None
        return f"counts {count:g} updates, in a run of {max_steps:,}"
    if not value.is_floating_point():
        return None
    if not all_finite(value):
        return "has numbers that are not finite"
    if entry in _NEVER_NEGATIVE and bool((local_part(value) < 0).any()):
        return "is an average of squares, but has negative numbers"
    return None


def _copy_to_optimizer(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, entry: str, value: Tensor
) -> Tensor | int:
    """Copy a value with the device, memory layout and type that the optimizer expects."""
    if value.ndim == 0 and _is_custom(optimizer):
        number_type = type(_probe_state(optimizer, parameter.ndim).get(entry))
        if number_type in (int, float):
            return cast("int", number_type(value.item()))
    if entry == "step":
        if isinstance(optimizer, WithAdamW):
            optimizer = optimizer.part_for(parameter)
            if _is_in_8_bits(optimizer):
                return int(value)
        # Fused and capturable kernels count on the device, plain kernels on the CPU.
        defaults = optimizer.defaults
        on_device = bool(defaults.get("fused") or defaults.get("capturable"))
        return value.to(parameter.device if on_device else "cpu").clone()
    if value.shape == parameter.shape:
        result = torch.empty_like(parameter, dtype=value.dtype)
        return result.copy_(shard_like(result, value))
    return value.to(parameter.device).clone()
