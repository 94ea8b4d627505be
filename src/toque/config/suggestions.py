"""All setting names, and the closest match for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from toque.config.schema import RunConfig
from toque.config.yaml_reader import Path

ELSEWHERE: Mapping[str, str] = {
    "adam": "optim.name",
    "batch_size": "train.batch",
    "bf16": "train.precision",
    "dtype": "train.precision",
    "early_stopping_patience": "train.early_stopping",
    "enable_profiling": "observe.profile",
    "epochs": "train.stop_after",
    "eval_steps": "train.evaluate_every",
    "fp16": "train.precision",
    "gradient_accumulation_steps": "train.micro_batch_rows",
    "learning_rate": "optim.peak_lr",
    "logging_steps": "observe.log_every",
    "lora": "adapter",
    "lr": "optim.peak_lr",
    "lr_scheduler_type": "optim.schedule",
    "max_input_length": "data.max_prompt_tokens",
    "max_length": "data.max_target_tokens",
    "max_steps": "train.stop_after",
    "micro_batch_size": "train.micro_batch_rows",
    "mixed_precision": "train.precision",
    "model_name": "model.start_from",
    "model_name_or_path": "model.start_from",
    "model_type": "model.family",
    "multi_task": "data.tasks",
    "num_epochs": "train.stop_after",
    "num_train_epochs": "train.stop_after",
    "optimizer": "optim.name",
    "output_dir": "run_dir",
    "per_device_train_batch_size": "train.micro_batch_rows",
    "pretrained_model": "model.start_from",
    "profile_schedule": "observe.profile",
    "report_to": "observe.trackers",
    "save_steps": "train.save_every",
    "torch_compile": "train.compile",
    "train_file": "data.sources",
    "train_split": "data.validation_fraction",
    "use_lora": "adapter",
    "use_wandb": "observe.trackers",
    "warmup_ratio": "optim.warmup",
    "warmup_steps": "optim.warmup",
}
"""What other trainers call things, and the setting here that does it."""


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section a field holds, or holds a list of; None for a plain value."""
    for annotation in (field.annotation, *get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def find_field(path: Path) -> FieldInfo | None:
    """The field at `path`; indices step into lists. None when the path leaves the tree."""
    section: type[BaseModel] | None = RunConfig
    found: FieldInfo | None = None
    for part in path:
        if isinstance(part, int):
            continue
        if section is None or part not in section.model_fields:
            return None
        found = section.model_fields[part]
        section = section_of(found)
    return found


@cache
def setting_paths() -> tuple[str, ...]:
    """Dotted names of all settings and sections, in the order of the tree."""
    return tuple(_paths(RunConfig, ""))


def _paths(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = section_of(field)
        if inner is not None:
            yield from _paths(inner, f"{prefix}{name}.")


def unknown_names(
    value: Any, section: type[BaseModel] = RunConfig, path: Path = ()
) -> Iterator[Path]:
    """Paths in the values of a section that are no settings."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from unknown_names(item, section, (*path, i))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            field = section.model_fields.get(key)
            if field is None:
                yield (*path, key)
            elif (below := section_of(field)) is not None:
                yield from unknown_names(inner, below, (*path, key))


def nearest(path: Path) -> str | None:
    """The setting most probably meant by `path`.

    >>> nearest(("optim", "peak_lrr")), nearest(("peak_lr",)), nearest(("learning_rate",))
    ('optim.peak_lr', 'optim.peak_lr', 'optim.peak_lr')
    """
    names = [part for part in path if isinstance(part, str)]
    wanted, last = ".".join(names).lower(), names[-1].lower()
    if last in ELSEWHERE:
        return ELSEWHERE[last]
    known = setting_paths()
    siblings = [name for name in known if name.rpartition(".")[0] == ".".join(names[:-1])]
    for candidates in (siblings, list(known)):
        by_last = {name.rpartition(".")[2]: name for name in reversed(candidates)}
        close = difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)
        if close:
            return by_last[close[0]]
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    return close[0] if close else None
