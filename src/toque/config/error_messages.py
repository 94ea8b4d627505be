"""Error messages about settings: the value, its place, the allowed values, and similar names.

The allowed values are derived from the annotation of a setting.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from toque.config.field_types import Allowed, Secret
from toque.config.schema import RunConfig
from toque.config.yaml_reader import Path, dotted
from toque.errors import nearest_hint

Origin = Callable[[Path], str]
"""Function from the path of a setting to the place of its value, e.g. "my.yaml:3"."""
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
"""Options of other trainers -> equivalent settings."""
GONE = {
    "optim.averaging": "use an optim.schedule that falls to zero, or average two checkpoints"
}
"""Removed settings -> alternatives."""
_SCALARS = {
    types.NoneType: "null",
    int: "a whole number",
    float: "a number",
    str: "text",
}
_MISSING = object()
_BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section in a field, in its list, or in its mapping, or None."""
    value_types = mapping_types(field.annotation) or ()
    for annotation in (field.annotation, *get_args(field.annotation), *value_types):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def mapping_types(annotation: Any) -> tuple[Any, Any] | None:
    """Return the types of keys and values if the annotation allows a mapping, else None.

    >>> mapping_types(dict[str, float] | None)
    (<class 'str'>, <class 'float'>)
    """
    if get_origin(annotation) is dict:
        names, values = get_args(annotation)
        return names, values
    return next(filter(None, map(mapping_types, get_args(annotation))), None)


def find_field(path: Path) -> FieldInfo | None:
    """Return the field at a path through sections, lists and mappings, or None."""
    section: type[BaseModel] | None = RunConfig
    field: FieldInfo | None = None
    is_key = False
    for part in path:
        if isinstance(part, int) or is_key:
            is_key = False
            continue
        if section is None or part not in section.model_fields:
            return None
        field = section.model_fields[part]
        section = section_of(field)
        is_key = mapping_types(field.annotation) is not None
    return field


@cache
def setting_paths() -> tuple[str, ...]:
    """Return the dotted names of all settings and sections, in the order of the schema."""

    def paths_in(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            yield prefix + name
            if (subsection := section_of(field)) is not None:
                key = "NAME." if mapping_types(field.annotation) is not None else ""
                yield from paths_in(subsection, f"{prefix}{name}.{key}")

    return tuple(paths_in(RunConfig, ""))


def unknown_names(
    value: Any, section: type[BaseModel] = RunConfig, path: Path = ()
) -> Iterator[Path]:
    """Yield the paths in the values of a section that are not settings."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_names(item, section, (*path, index))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            field = section.model_fields.get(name)
            if field is None:
                yield (*path, name)
            elif (subsection := section_of(field)) is None:
                continue
            elif mapping_types(field.annotation) is not None and isinstance(
                item, Mapping
            ):
                for key, entry in item.items():
                    yield from unknown_names(entry, subsection, (*path, name, key))
            else:
                yield from unknown_names(item, subsection, (*path, name))


def nearest(path: Path) -> str | None:
    """Return the setting that the user most likely meant. None if no setting is similar.

    >>> nearest(("optim", "peak_lrr")), nearest(("peak_lr",)), nearest(("learning_rate",))
    ('optim.peak_lr', 'optim.peak_lr', 'optim.peak_lr')
    """
    *above, last = [part.lower() for part in path if isinstance(part, str)]
    if last in ELSEWHERE:
        return ELSEWHERE[last]
    section = "".join(f"{part}." for part in above)
    # For a name in several sections, prefer the section of the user.
    ranked = sorted(
        setting_paths(), key=lambda path: path.rpartition(".")[0] + "." != section
    )
    by_last_name = {path.rpartition(".")[2]: path for path in reversed(ranked)}
    close_names = difflib.get_close_matches(last, by_last_name, n=1, cutoff=0.7)
    if close_names:
        return by_last_name[close_names[0]]
    close_paths = difflib.get_close_matches(
        section + last, setting_paths(), n=1, cutoff=0.6
    )
    return next(iter(close_paths), None)


def explain_unknown(path: Path, origin: Origin) -> str:
    """Write the error message about a name that is not a setting."""
    name = dotted(path)
    hint = ""
    if name in GONE:
        hint = f" It was removed. Instead, {GONE[name]}."
    elif close := nearest(path):
        hint = f" Nearest: `{close}`."
    return (
        f"{origin(path)}: `{name}` is not a setting.{hint} For a list of all settings, see `toque "
        "show demo` or docs/reference/configuration.md."
    )


def explain(error: ValidationError, values: Mapping[str, Any], origin: Origin) -> str:
    """Write the message about the first validation error in `values`, and count the rest."""
    details = error.errors(include_url=False)
    paths = {_setting_path(detail["loc"]) for detail in details}
    others = (
        f" ({len(paths) - 1} more to correct after this.)" if len(paths) > 1 else ""
    )
    return _explain_value(details[0], values, origin) + others


def explain_combination(
    settings: tuple[str, str], message: str, values: Mapping[str, Any], origin: Origin
) -> str:
    """Add the place of the first setting that the user has set to a message about two settings."""
    for name in settings:
        path = tuple(name.split("."))
        if _value_at(values, path, _MISSING) is not _MISSING:
            return f"{origin(path)}: {message}"
    return message


def _explain_value(
    detail: ErrorDetails, values: Mapping[str, Any], origin: Origin
) -> str:
    if detail["loc"][-1] == "[key]":
        *above, key, _ = detail["loc"]  # a key may look like a tag: "(a)"
        return _explain_key((*_setting_path(tuple(above)), key), origin)
    path = _setting_path(detail["loc"])
    name, field = dotted(path), find_field(path)
    description = field.description if field is not None else None
    meaning = f" It means: {' '.join(description.split())}" if description else ""
    if detail["type"] == "missing":
        return f"{origin(path[:-1])}: `{name}` is missing. Add it.{meaning}"

    value, allowed = _value_at(values, path), "text"
    shown_value = _shown(value)
    if field is not None:
        types_of_mapping = mapping_types(field.annotation)
        is_entry = find_field(path[:-1]) is field and isinstance(
            _value_at(values, path[:-1]), Mapping
        )
        if types_of_mapping and is_entry:
            allowed = allowed_words(types_of_mapping[1])
        else:
            allowed = allowed_words(field.annotation, field.metadata)
        if any(isinstance(item, Secret) for item in field.metadata):
            shown_value = "not an address (it is a secret, so it is not shown)"

    problem = f"{origin(path)}: `{name}` is {shown_value}"
    if isinstance(path[-1], int):
        return f"{problem}, which is not allowed in this list. Allowed: {allowed}."
    is_text = allowed.startswith(("a folder", "a file", "text"))
    hint = (
        " Quote it to make it text."
        if is_text and isinstance(value, int | float)
        else ""
    )
    return f"{problem}. Allowed: {allowed}.{hint}{meaning}"


def _explain_key(path: Path, origin: Origin) -> str:
    """Write the message about a key that its mapping does not allow."""
    field = find_field(path)
    key_type, _ = (field and mapping_types(field.annotation)) or (str, None)
    hint = nearest_hint(f"`{path[-1]}`", [f"`{key}`" for key in get_args(key_type)])
    return (
        f"{origin(path)}: `{dotted(path[:-1])}` has the name `{path[-1]}`.{hint} Allowed names: "
        f"{allowed_words(key_type)}."
    )


def _setting_path(location: tuple[int | str, ...]) -> Path:
    """Convert pydantic's location, which includes types, to the path of a setting."""
    path: Path = ()
    for part in location:
        if isinstance(part, str) and part.startswith("("):
            continue  # the tag of a union's branch
        if isinstance(part, str) and find_field((*path, part)) is None:
            break
        path = (*path, part)
    return path


def _shown(value: Any) -> str:
    """Format a value for a message."""
    if value is None:
        return "null (it has no value)"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, bool | int | float):
        return as_written(value)
    text = str(value)
    return f'"{text[:80]}..."' if len(text) > 80 else f'"{text}"'


def _value_at(values: Any, path: Path, default: Any = None) -> Any:
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return default
    return values


def allowed_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the allowed values of a setting with this annotation.

    >>> allowed_words(Literal["linear", "cosine"] | None)
    'linear, cosine or null'
    """
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    parts = _branches(annotation, metadata)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " or " + parts[-1]


def _branches(annotation: Any, metadata: Sequence[Any]) -> list[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return [allowed_words(arguments[0], arguments[1:])]
    if origin in (Union, types.UnionType):
        # null is last, e.g. "auto, a whole number or null".
        ordered = sorted(arguments, key=lambda branch: branch is types.NoneType)
        return [words for branch in ordered for words in _branches(branch, metadata)]
    if origin is Literal:
        return [as_written(value) for value in arguments]
    if origin is tuple:
        return [
            f"a list of {'texts' if arguments[0] is str else allowed_words(arguments[0])}"
        ]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [
            "{" + ", ".join(f"{name}: ..." for name in annotation.model_fields) + "}"
        ]
    if annotation is bool:
        return ["true", "false"]
    return [
        _SCALARS.get(annotation, "a mapping of names to values") + _bounds(metadata)
    ]


def as_written(value: object) -> str:
    """Format a plain value as in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bounds(metadata: Sequence[Any]) -> str:
    constraints = [
        inner for item in metadata for inner in getattr(item, "metadata", (item,))
    ]
    return "".join(
        f" {word} {getattr(constraint, bound)}"
        for bound, word in _BOUNDS.items()
        for constraint in constraints
        if hasattr(constraint, bound)
    )
