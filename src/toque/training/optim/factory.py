"""Optimizer construction, the conditional step, and the optimizer's state as named tensors.

State is keyed by parameter name, not by position, so that a checkpoint says whose it is and an
optimizer with another grouping can read it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from toque.config.schema import OptimConfig
from toque.config.user_code import imported
from toque.errors import ConfigError
from toque.training.distributed.sharing import divided_like, own_part
from toque.training.optim.attributes import (
    Facts,
    facts_of_class,
    facts_outside,
    first_difference,
    random_state,
)
from toque.training.optim.with_adamw import WithAdamW, adamw_8bit, muon
from toque.training.state_values import all_finite, refuse

_ADAFACTOR_EPS: Final = (1e-18, 1e-3)
"""Floors of a gradient's and of a weight's RMS. torch's own floor of gradients, 1e-7, is above
those of a large model; the square of this one is still a normal float32."""
_PROBED: Final = (11, 13, 17, 19)  # sizes that tell which of a state's is which of a parameter's
_TRIED: Final = 120  # updates before and after a trial of continuing: some act every hundredth
_SMALL: Final = 4096  # weights below which bitsandbytes keeps a tensor's averages in float32
_BLOCK: Final = 256  # weights that share one of bitsandbytes' scales
_NEVER_NEGATIVE: Final = frozenset(
    {"exp_avg_sq", "variance", "row_var", "col_var", "state2", "absmax1", "absmax2"}
)
"""Entries that are averages of squares, or largest absolute values."""


def optimizer_of(model: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that these settings ask for, as `build_optimizer` makes it."""
    names = ("name", "weight_decay", "betas", "eps", "momentum")
    return build_optimizer(model, **{name: getattr(optim, name) for name in names})


def build_optimizer(
    model: nn.Module,
    *,
    name: str = "adamw",
    weight_decay: float = 0.01,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    momentum: float | None = None,
) -> torch.optim.Optimizer:
    """An optimizer over the trainable parameters; the loop sets its learning rate at every step.

    adamw: Loshchilov & Hutter 2019, algorithm 2, fused. adafactor: Shazeer & Stern 2018, algorithm
    4 without momentum: an update's RMS is lr times that of the weight it changes, as T5 was
    trained, and lr is capped at 1 / sqrt(step). muon: with AdamW for tables and vectors.
    adamw8bit: AdamW whose averages take a byte a weight, but for tables and vectors. Vectors
    (biases, norms' scales) are never decayed: they are few, and pulling a scale towards zero is no
    regularisation. Betas (0.9, 0.999) and eps 1e-8 are torch's defaults; None takes the default.
    module:function is of the user's own, vouched for by who calls. A ConfigError where
    its code cannot be used, or nothing is trainable.
    """
    asked = {"betas": betas, "eps": eps, "momentum": momentum}
    given: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("The model has no trainable parameter: everything is frozen.")
    apart = _tables(model)
    large = [p for p in trained if p.ndim >= 2]
    matrices = [p for p in large if p.ndim == 2 and id(p) not in apart]
    tables = [p for p in large if p.ndim != 2 or id(p) in apart]
    vectors = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}

    def decayed(parameters: list[nn.Parameter]) -> dict[str, Any]:
        return {"params": parameters, "weight_decay": weight_decay}

    if name == "muon":
        of_rest = {key: value for key, value in given.items() if key != "momentum"}
        of_inner = {key: value for key, value in given.items() if key == "momentum"}
        return WithAdamW(
            muon([decayed(matrices)], **of_inner), [decayed(tables), vectors], **of_rest
        )
    if name == "adamw8bit":
        inner = adamw_8bit([decayed(matrices)], **given)
        return WithAdamW(inner, [decayed(tables), vectors], **given)
    groups = [decayed(large), vectors]
    if ":" in name:
        return _own_optimizer(name, groups, given)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=0.0, eps=_ADAFACTOR_EPS)
    return torch.optim.AdamW(groups, lr=0.0, fused=True, **given)


def _own_optimizer(
    name: str, groups: list[dict[str, Any]], given: dict[str, Any]
) -> torch.optim.Optimizer:
    """The user's own optimizer; one that cannot be used, or not be continued, is refused now."""
    function = imported({}, name, setting="optim.name", wanted="a function or class")

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = function(groups, lr=1.0, **given)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"optim.name is {name}, which returned a {type(made).__name__}. It must return a "
                "torch.optim.Optimizer of the groups it is given."
            )
        return made

    try:
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
            why = _trial(make)
        made = make(groups)
    except ConfigError:
        raise
    except Exception as error:
        values = "".join(f", {key}={value}" for key, value in given.items())
        raise ConfigError(
            f"optim.name is {name}, which raised {type(error).__name__} where it was called with "
            f"groups of weights, lr=1.0{values}, or at a step() of a small matrix: {error}."
        ) from error
    if why is not None:
        raise ConfigError(
            f"optim.name is {name}, with which a run could not be continued: in a trial, {why}. "
            "A checkpoint keeps tensors and numbers in state[parameter], of sizes that follow from "
            "the parameter's, and nothing else. Take an optimizer that keeps all of its state "
            "there, e.g. torch.optim:NAdam, or one of adamw, adafactor, muon and adamw8bit, which "
            "is AdamW in 8 bits."
        )
    return made


class _KeptOutside:
    """State of an optimizer outside its parameters' state, compared as a run continues."""

    parts = (range(_TRIED, _TRIED + 1), range(_TRIED + 1, 2 * _TRIED))
    """Updates after continuing: a short history is full again after many."""

    def __init__(self, whole: torch.optim.Optimizer) -> None:
        self._of_class, self._generators = facts_of_class(whole), random_state()
        self._noted: list[Facts] = []
        self.reason: str | None = None

    def note(self, whole: torch.optim.Optimizer) -> None:
        """Note what the optimizer of a run that was not interrupted keeps after a part."""
        self._noted.append(facts_outside(whole))

    def compare(self, part: int, continued: torch.optim.Optimizer) -> None:
        """Set the reason if the optimizer that was continued keeps something else."""
        drawn = first_difference(self._generators, random_state())
        changed = first_difference(self._noted[part], facts_outside(continued))
        changed = changed or first_difference(self._of_class, facts_of_class(continued))
        if self.reason is None and drawn is not None:
            self.reason = f"it drew numbers from {drawn}, whose state a checkpoint does not hold"
        elif self.reason is None and changed is not None:
            self.reason = (
                f"its attribute {changed} differed from that of a run that was not interrupted"
            )


def _unfit_for_a_checkpoint(optimizer: torch.optim.Optimizer) -> str | None:
    """Describe the first state that is neither a tensor nor a number; None if there is none."""
    states: Iterable[Mapping[str, Any]] = optimizer.state.values()
    for entry, value in (item for state in states for item in state.items()):
        if not isinstance(value, Tensor | float | int | None):
            return f"state[parameter][{entry!r}] was a {type(value).__name__}"
    return None


def _trial(make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> str | None:
    """Why an own optimizer comes to other weights where it is continued; None if it does not.

    What it raises before that is raised. It seeds the CPU's random numbers anew.
    """
    seed = torch.default_generator.manual_seed  # the run's GPUs keep their random numbers
    seed(0)
    model = nn.Linear(64, _SMALL // 32)  # large enough for a state in 8 bits

    def made(model: nn.Linear) -> torch.optim.Optimizer:
        groups = [(model.weight, 0.01), (model.bias, 0.0)]
        return make([{"params": [p], "weight_decay": decay} for p, decay in groups])

    def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
            optimizer.step()

    whole = made(model)
    train(model, whole, range(_TRIED))
    unfit = _unfit_for_a_checkpoint(whole)
    if unfit is not None:
        return unfit
    saved = {key: tensor.clone() for key, tensor in optimizer_tensors(whole, model).items()}
    twin = copy.deepcopy(model)
    kept = _KeptOutside(whole)
    for steps in kept.parts:
        train(model, whole, steps)
        kept.note(whole)
    try:
        continued = made(twin)
        wrong = _differences(saved, _expected(continued, twin, saved), steps=_TRIED)
        if wrong:
            of = " x ".join(map(str, model.weight.shape))
            return f"its state of a matrix of {of} did not fit it again ({min(wrong)})"
        load_optimizer_tensors(continued, twin, saved, where="")
        for number, steps in enumerate(kept.parts):
            train(twin, continued, steps)
            kept.compare(number, continued)
    except Exception as error:  # noqa: BLE001 - whatever a user's code may raise
        return f"going on from its state raised {type(error).__name__} ({error})"
    same = torch.equal(model.weight, twin.weight) and torch.equal(model.bias, twin.bias)
    other = "going on from its state gave other weights than a run that was not interrupted"
    return kept.reason or (None if same else other)


def _first_state(optimizer: torch.optim.Optimizer, n_dims: int = 2) -> dict[str, Any]:
    """State that an own optimizer keeps of a parameter of `_PROBED` sizes, after an update."""
    parameter = nn.Parameter(torch.ones(_PROBED[:n_dims]))
    parameter.grad = torch.ones_like(parameter)
    twin = object.__new__(type(optimizer))  # its settings, with neither its weights nor its state
    group = {**optimizer.param_groups[0], "params": [parameter]}
    vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=[group])
    twin.step()
    found: Mapping[str, Any] = twin.state[parameter]
    return {entry: value for entry, value in found.items() if value is not None}


def step_if(optimizer: torch.optim.Optimizer, wanted: Tensor, device: torch.device) -> None:
    """Apply the update where `wanted` [] holds; otherwise neither weights nor state change.

    Fused kernels of a GPU skip by themselves when `found_inf` says so, as for a loss scaler, and
    nothing waits for the device. For any other optimizer the host reads `wanted`, which does.
    """
    if device.type != "cpu" and optimizer.defaults.get("fused"):
        optimizer.found_inf = (~wanted).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
    elif bool(wanted):
        optimizer.step()


def _tables(model: nn.Module) -> set[int]:
    """Parameters whose rows stand for tokens, positions or distances, the output head included."""
    found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if name.endswith("lm_head.weight"):
            found.add(id(parameter))
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes the optimizer's state takes once every parameter was updated."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return sum(entry.nbytes for p in parameters for entry in _layout(optimizer, p).values())


def held_bytes(model: nn.Module, optim: OptimConfig) -> dict[str, int]:
    """Bytes of the gradients and of the optimizer's state once every weight was updated."""
    return {
        "gradients": sum(p.nbytes for p in model.parameters() if p.requires_grad),
        "optimizer": state_bytes(optimizer_of(model, optim)),
    }


def _layout(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The state of `parameter` after an update, without its values: tensors on no device."""
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    step = torch.empty((), device="meta")
    if _is_own(optimizer):
        with unset_fake_temporarily():
            found = _first_state(optimizer, like.ndim)
        sizes = dict(zip(_PROBED, like.shape, strict=False))
        for entry, value in found.items():
            sized = [sizes.get(n, n) for n in getattr(value, "shape", ())]
            kind = value.dtype if isinstance(value, Tensor) else step.dtype
            found[entry] = torch.empty(sized, dtype=kind, device="meta")
        return found
    if isinstance(optimizer, WithAdamW):
        optimizer = optimizer.half_of(parameter)
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": like}
    if _is_in_8_bits(optimizer):
        if like.numel() < _SMALL:
            return {"step": step, "state1": like.float(), "state2": like.float()}
        codes, blocks = like.to(torch.uint8), -(-like.numel() // _BLOCK)
        scales = torch.empty(blocks, device="meta")
        states = {"state1": codes, "state2": codes, "absmax1": scales, "absmax2": scales}
        return {"step": step} | states
    if not isinstance(optimizer, torch.optim.Adafactor):
        return {"step": step, "exp_avg": like, "exp_avg_sq": like}
    if like.ndim < 2:
        return {"step": step, "variance": like}
    return {"step": step, "row_var": like[..., :1], "col_var": like[..., :1, :]}


def _is_own(optimizer: torch.optim.Optimizer) -> bool:
    """True for an optimizer that the user named by its module."""
    return type(optimizer) not in (torch.optim.AdamW, torch.optim.Adafactor, WithAdamW)


def _is_in_8_bits(optimizer: torch.optim.Optimizer) -> bool:
    """True for bitsandbytes', which need not be installed, as the inner half of `WithAdamW`."""
    return type(optimizer).__module__.startswith("bitsandbytes.")


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter name>/<entry>`, e.g. `wte.weight/exp_avg`."""
    tables = isinstance(optimizer, WithAdamW)  # of what a byte means, always the same
    return {
        # bitsandbytes counts updates in a plain integer.
        f"{name}/{entry}": value if isinstance(value, Tensor) else torch.tensor(float(value))
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
        if not (tables and entry.startswith("qmap")) and value is not None
    }


@torch.no_grad()
def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    where: str,
    steps: int | None = None,
) -> None:
    """Give the optimizer the state that `optimizer_tensors` named, after a run's `steps` if known.

    A CheckpointError, and nothing changed, where it belongs to another model or optimizer, or no
    updates can have made the values.
    """
    expected = _expected(optimizer, model, tensors)
    wrong = _differences(tensors, expected, steps=steps)
    refuse(wrong, where=where, what="the optimizer")
    optimizer.state.clear()
    if isinstance(optimizer, WithAdamW) and _is_in_8_bits(optimizer.inner):
        # The state of a beginning, with the tables that no checkpoint holds.
        inner: Any = optimizer.inner
        held = {parameter for parameter, *_ in expected.values()}
        for number, group in enumerate(inner.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter in held:
                    inner.init_state(group, parameter, number, place)
    for key, (parameter, entry, _) in expected.items():
        optimizer.state[parameter][entry] = _placed(optimizer, parameter, entry, tensors[key])


def _expected(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[nn.Parameter, str, Tensor]]:
    """Parameter, entry and layout by name, of all the state of what `tensors` have state of."""
    own = {p for group in optimizer.param_groups for p in group["params"]}
    updated = {key.rpartition("/")[0] for key in tensors}
    return {
        f"{name}/{entry}": (parameter, entry, like)
        for name, parameter in model.named_parameters()
        if parameter in own and name in updated
        for entry, like in _layout(optimizer, parameter).items()
    }


def _differences(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[nn.Parameter, str, Tensor]],
    *,
    steps: int | None,
) -> list[str]:
    """Each way in which `tensors` are not the `expected` state after so many steps, if known."""
    wrong = [f"{key} is unknown to the optimizer" for key in tensors.keys() - expected.keys()]
    wrong += [" lacks ".join(key.rsplit("/", 1)) for key in expected.keys() - tensors.keys()]
    for key in tensors.keys() & expected.keys():
        found, (_, entry, like) = tensors[key], expected[key]
        if found.shape != like.shape:
            wrong.append(f"{key} is {tuple(found.shape)}, the optimizer's {tuple(like.shape)}")
        elif found.dtype != like.dtype:
            wrong.append(f"{key} is {found.dtype}, the optimizer's {like.dtype}")
        elif why := _impossible_state(entry, found, steps):
            wrong.append(f"{key} {why}")
    return wrong


def _impossible_state(entry: str, value: Tensor, steps: int | None) -> str | None:
    """Reason that no updates can have made the state `entry`; None if they can."""
    if entry == "step":
        most = float("inf") if steps is None else steps
        count = float(value)
        # Fused kernels count none where they skip the first, whose state is there all the same.
        possible = 0.0 <= count <= most and count.is_integer()
        return None if possible else f"counts {count:g} updates, in a run of {most:,}"
    if not value.is_floating_point():
        return None
    if not all_finite(value):
        return "holds numbers that are not finite"
    if entry in _NEVER_NEGATIVE and bool((own_part(value) < 0).any()):
        return "holds negative numbers, and is an average of squares"
    return None


def _placed(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, entry: str, value: Tensor
) -> Tensor | int:
    """A copy where the optimizer keeps it, in the memory layout its kernels walk."""
    if value.ndim == 0 and _is_own(optimizer):
        kind = type(_first_state(optimizer, parameter.ndim).get(entry))
        if kind in (int, float):
            return cast("int", kind(value.item()))
    if entry == "step":
        if isinstance(optimizer, WithAdamW):
            optimizer = optimizer.half_of(parameter)
            if _is_in_8_bits(optimizer):
                return int(value)
        # Fused and capturable kernels count on the device; the plain ones on the CPU.
        on_device = bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
        return value.to(parameter.device if on_device else "cpu").clone()
    if value.shape == parameter.shape:
        own = torch.empty_like(parameter, dtype=value.dtype)
        return own.copy_(divided_like(own, value))
    return value.to(parameter.device).clone()
