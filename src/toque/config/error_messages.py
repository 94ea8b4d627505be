"""Error messages about settings: the value, its line, the allowed values, and similar names.

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
"""Function from the path of a setting to the origin of its value, e.g. "my.yaml:3"."""
ELSEWHERE: Mapping[str, str] = {
    "adam": "optim.name",
    "batch_size": "train.batch",
    "beta": "objective.beta",
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
    "loss_type": "objective.kind",
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
    "rl": "objective.kind",
    "rpo_alpha": "objective.sft_weight",
    "train_file": "data.sources",
    "train_split": "data.validation_fraction",
    "use_lora": "adapter",
    "use_wandb": "observe.trackers",
    "warmup_ratio": "optim.warmup",
    "warmup_steps": "optim.warmup",
}
"""Options in other trainers -> equivalent settings."""
GONE = {
    "optim.averaging": "use optim.ema_decay for an exponential average, or `toque average`"
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
    """Return the type of the sections in a field, in its list or in its mapping, or None."""
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
    is_key = False  # the part is a key of a mapping, not the name of a field
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
    if not isinstance(value, Mapping):
        return
    for name, item in value.items():
        field = section.model_fields.get(name)
        subsection = None if field is None else section_of(field)
        if field is None:
            yield (*path, name)
        elif subsection is None:
            continue
        elif mapping_types(field.annotation) and isinstance(item, Mapping):
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
    # If several sections have the name, prefer the user's section, which the dict receives last.
    ranked = sorted(
        setting_paths(), key=lambda path: path.rpartition(".")[0] + "." != section
    )
    by_last_name = {path.rpartition(".")[2]: path for path in reversed(ranked)}
    close_names = difflib.get_close_matches(last, by_last_name, n=1, cutoff=0.7)
    if close_names:
        return by_last_name[close_names[0]]
    # Without a similar name, compare the whole path, e.g. for a misspelt section.
    close_paths = difflib.get_close_matches(
        section + last, setting_paths(), n=1, cutoff=0.6
    )
    return close_paths[0] if close_paths else None


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
    message = _explain_value(details[0], values, origin)
    n_settings = len({_setting_path(detail["loc"]) for detail in details})
    if n_settings == 1:
        return message
    return f"{message} ({n_settings - 1} more to correct after this.)"


def explain_combination(
    settings: tuple[str, str], message: str, values: Mapping[str, Any], origin: Origin
) -> str:
    """Begin a message about two settings with the origin of the first one that the user has set."""
    for name in settings:
        path = tuple(name.split("."))
        if _value_at(values, path, _MISSING) is not _MISSING:
            return f"{origin(path)}: {message}"
    return message


def _explain_value(
    detail: ErrorDetails, values: Mapping[str, Any], origin: Origin
) -> str:
    """Write the message about one validation error."""
    if detail["loc"][-1] == "[key]":
        *above, key, _ = detail["loc"]  # a key may look like a tag: "(a)"
        return _explain_key((*_setting_path(tuple(above)), key), origin)
    path = _setting_path(detail["loc"])
    name, field = dotted(path), find_field(path)
    description = field.description if field is not None else None
    meaning = f" It means: {' '.join(description.split())}" if description else ""
    if detail["type"] == "missing":
        return f"{origin(path[:-1])}: `{name}` is missing. Add it.{meaning}"

    value = _value_at(values, path)
    allowed = _describe_allowed(path, field, values)
    shown_value = _describe_value(value)
    if field is not None and any(isinstance(item, Secret) for item in field.metadata):
        shown_value = "not an address (it is a secret, so it is not shown)"
    problem = f"{origin(path)}: `{name}` is {shown_value}"
    if isinstance(path[-1], int):
        return f"{problem}, which is not allowed in this list. Allowed: {allowed}."
    hint = ""
    takes_text = allowed.startswith(("a folder", "a file", "text"))
    if takes_text and isinstance(value, int | float):
        hint = " Quote it to make it text."
    return f"{problem}. Allowed: {allowed}.{hint}{meaning}"


def _describe_allowed(
    path: Path, field: FieldInfo | None, values: Mapping[str, Any]
) -> str:
    """Describe the allowed values of a setting, or of an entry of its mapping."""
    if field is None:
        return "text"
    key_and_value = mapping_types(field.annotation)
    is_in_field = find_field(path[:-1]) is field
    is_entry = is_in_field and isinstance(_value_at(values, path[:-1]), Mapping)
    if key_and_value and is_entry:
        return allowed_words(key_and_value[1])
    return allowed_words(field.annotation, field.metadata)


def _explain_key(path: Path, origin: Origin) -> str:
    """Write the message about a key that its mapping does not allow."""
    field = find_field(path)
    key_and_value = None if field is None else mapping_types(field.annotation)
    key_type = str if key_and_value is None else key_and_value[0]
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


def _describe_value(value: Any) -> str:
    """Describe a value for a message, at most 80 characters of it."""
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
    """Return the value at a path, or `default` if the path does not exist."""
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
    *first, last = _branches(annotation, metadata)
    return f"{', '.join(first)} or {last}" if first else last


def _branches(annotation: Any, metadata: Sequence[Any]) -> list[str]:
    """Describe each alternative of an annotation."""
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
        items = "texts" if arguments[0] is str else allowed_words(arguments[0])
        return [f"a list of {items}"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = ", ".join(f"{name}: ..." for name in annotation.model_fields)
        return [f"{{{fields}}}"]
    if annotation is bool:
        return ["true", "false"]
    return [
        _SCALARS.get(annotation, "a mapping of names to values") + _bounds(metadata)
    ]


def as_written(value: object) -> str:
    """Format a plain value as in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bounds(metadata: Sequence[Any]) -> str:
    """Describe the limits on a number, e.g. " from 0 to 1"."""
    # pydantic's Field has its constraints in `metadata`. Others are constraints themselves.
    constraints = [
        inner for item in metadata for inner in getattr(item, "metadata", (item,))
    ]
    return "".join(
        f" {word} {getattr(constraint, bound)}"
        for bound, word in _BOUNDS.items()
        for constraint in constraints
        if hasattr(constraint, bound)
    )
