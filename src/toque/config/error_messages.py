"""Names of settings, and messages about refused ones: found, where, what is allowed or meant.

The words for what a setting allows are read from its annotation.
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

Origin = Callable[[Path], str]  # gives the place where the value at a path is written
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
"""Names of other trainers' options, and the setting here that does the same."""
GONE = {"optim.averaging": "let optim.schedule fall to zero, or average two checkpoints by hand"}
"""Settings that went, and what to do instead; records of earlier runs hold them as null."""
_SCALARS = {types.NoneType: "null", int: "a whole number", float: "a number", str: "text"}
_BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section a field holds, or holds a list of, or some by name; None for a plain value."""
    named = mapping_types(field.annotation) or ()
    for annotation in (field.annotation, *get_args(field.annotation), *named):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def mapping_types(annotation: Any) -> tuple[Any, Any] | None:
    """Types of the names and of the values of a mapping among an annotation's branches.

    >>> mapping_types(dict[str, float] | None)
    (<class 'str'>, <class 'float'>)
    """
    if get_origin(annotation) is dict:
        names, values = get_args(annotation)
        return names, values
    return next(filter(None, map(mapping_types, get_args(annotation))), None)


def find_field(path: Path) -> FieldInfo | None:
    """The field at `path`; indices step into lists, and names into a mapping.

    None when the path leaves the tree.
    """
    section: type[BaseModel] | None = RunConfig
    found: FieldInfo | None = None
    own = False
    for part in path:
        if isinstance(part, int) or own:
            own = False
            continue
        if section is None or part not in section.model_fields:
            return None
        found = section.model_fields[part]
        section, own = section_of(found), mapping_types(found.annotation) is not None
    return found


@cache
def setting_paths() -> tuple[str, ...]:
    """Dotted names of all settings and sections, in the order of the tree."""

    def below(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            yield prefix + name
            if (inner := section_of(field)) is not None:
                own = "NAME." if mapping_types(field.annotation) is not None else ""
                yield from below(inner, f"{prefix}{name}.{own}")

    return tuple(below(RunConfig, ""))


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
            elif (below := section_of(field)) is None:
                continue
            elif mapping_types(field.annotation) is not None and isinstance(inner, Mapping):
                for name, one in inner.items():
                    yield from unknown_names(one, below, (*path, key, name))
            else:
                yield from unknown_names(inner, below, (*path, key))


def nearest(path: Path) -> str | None:
    """The setting most probably meant by `path`.

    >>> nearest(("optim", "peak_lrr")), nearest(("peak_lr",)), nearest(("learning_rate",))
    ('optim.peak_lr', 'optim.peak_lr', 'optim.peak_lr')
    """
    *above, last = [part.lower() for part in path if isinstance(part, str)]
    if last in ELSEWHERE:
        return ELSEWHERE[last]
    section = "".join(f"{part}." for part in above)
    # Names of the same section come before equal ones of others, and whole paths last.
    ranked = sorted(setting_paths(), key=lambda known: known.rpartition(".")[0] + "." != section)
    by_last = {known.rpartition(".")[2]: known for known in reversed(ranked)}
    close = difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)
    whole = difflib.get_close_matches(section + last, setting_paths(), n=1, cutoff=0.6)
    return by_last[close[0]] if close else next(iter(whole), None)


def explain_unknown(path: Path, origin: Origin) -> str:
    """One paragraph about a name that is no setting."""
    close, instead = nearest(path), GONE.get(dotted(path))
    hint = f" Nearest: `{close}`." if close else ""
    hint = f" It went; instead, {instead}." if instead else hint
    return (
        f"{origin(path)}: `{dotted(path)}` is not a setting.{hint} `toque show demo` prints "
        "every setting; docs/reference/configuration.md explains them."
    )


def explain(error: ValidationError, given: Mapping[str, Any], origin: Origin) -> str:
    """One paragraph about the first thing wrong in `given`, and how many more there are."""
    details = error.errors(include_url=False)
    places = {_setting(detail["loc"]) for detail in details}
    more = f" ({len(places) - 1} more to correct after this.)" if len(places) > 1 else ""
    return _value(details[0], given, origin) + more


def explain_combination(
    settings: tuple[str, str], message: str, given: Mapping[str, Any], origin: Origin
) -> str:
    """The message about impossible values, after the place of the first that was written."""
    paths: list[Path] = [tuple(name.split(".")) for name in settings]
    absent = object()
    written = [path for path in paths if _at(given, path, absent) is not absent]
    return f"{origin(written[0])}: {message}" if written else message


def _value(detail: ErrorDetails, given: Mapping[str, Any], origin: Origin) -> str:
    if detail["loc"][-1] == "[key]":
        *above, key, _ = detail["loc"]  # a key may look like a tag: "(a)"
        return _name((*_setting(tuple(above)), key), origin)
    path = _setting(detail["loc"])
    name, field = dotted(path), find_field(path)
    text = field.description if field is not None else None
    meaning = f" It means: {' '.join(text.split())}" if text else ""
    if detail["type"] == "missing":
        return f"{origin(path[:-1])}: `{name}` is missing. Write it.{meaning}"
    value, allowed = _at(given, path), "text"
    if field is not None:
        named, above = mapping_types(field.annotation), _at(given, path[:-1])
        is_named = find_field(path[:-1]) is field and isinstance(above, Mapping)
        kind = (named[1], ()) if named and is_named else (field.annotation, field.metadata)
        allowed = allowed_words(*kind)
    found = _found(value)
    if field is not None and any(isinstance(item, Secret) for item in field.metadata):
        found = "not an address (it is a secret, so it is not shown)"
    verdict = f"{origin(path)}: `{name}` is {found}"
    if isinstance(path[-1], int):
        return f"{verdict}, which does not fit in its list. Allowed there: {allowed}."
    is_text = allowed.startswith(("a folder", "a file", "text"))
    quote = " Quote it to make it text." if is_text and isinstance(value, int | float) else ""
    return f"{verdict}. Allowed: {allowed}.{quote}{meaning}"


def _name(path: Path, origin: Origin) -> str:
    """One paragraph about the last of `path`, a name that its mapping cannot have."""
    field = find_field(path)
    names, _ = (field and mapping_types(field.annotation)) or (str, None)
    close = difflib.get_close_matches(str(path[-1]), map(str, get_args(names)), n=1)
    hint = f" Nearest: `{close[0]}`." if close else ""
    return (
        f"{origin(path)}: `{dotted(path[:-1])}` has the name `{path[-1]}`.{hint} Allowed names: "
        f"{allowed_words(names)}."
    )


def _setting(location: tuple[int | str, ...]) -> Path:
    """The part of pydantic's location that is a path of ours; it adds the names of types."""
    path: Path = ()
    for part in location:
        if isinstance(part, str) and part.startswith("("):
            continue  # the tag of a union's branch
        if isinstance(part, str) and find_field((*path, part)) is None:
            break
        path = (*path, part)
    return path


def _found(value: Any) -> str:
    if value is None:
        return "null (nothing is written there)"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, bool | int | float):
        return as_written(value)
    text = str(value)
    return f'"{text[:80]}..."' if len(text) > 80 else f'"{text}"'


def _at(given: Any, path: Path, absent: Any = None) -> Any:
    for part in path:
        try:
            given = given[part]
        except (KeyError, IndexError, TypeError):
            return absent
    return given


def allowed_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Allowed values of a setting with this annotation, in words.

    >>> allowed_words(Literal["linear", "cosine"] | None)
    'linear, cosine or null'
    """
    said = next((item.text for item in metadata if isinstance(item, Allowed)), None)
    if said is not None:
        return said
    parts = _branches(annotation, metadata)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " or " + parts[-1]


def _branches(annotation: Any, metadata: Sequence[Any]) -> list[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return [allowed_words(arguments[0], arguments[1:])]
    if origin in (Union, types.UnionType):
        # Numbers before null, words first: "auto or a whole number".
        ordered = sorted(arguments, key=lambda branch: branch is types.NoneType)
        return [words for branch in ordered for words in _branches(branch, metadata)]
    if origin is Literal:
        return [as_written(value) for value in arguments]
    if origin is tuple:
        return [f"a list of {'texts' if arguments[0] is str else allowed_words(arguments[0])}"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ["{" + ", ".join(f"{name}: ..." for name in annotation.model_fields) + "}"]
    if annotation is bool:
        return ["true", "false"]
    return [_SCALARS.get(annotation, "a mapping of names to values") + _bounds(metadata)]


def as_written(value: object) -> str:
    """A plain value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bounds(metadata: Sequence[Any]) -> str:
    flat = [inner for item in metadata for inner in getattr(item, "metadata", (item,))]
    return "".join(
        f" {word} {getattr(item, bound)}"
        for bound, word in _BOUNDS.items()
        for item in flat
        if hasattr(item, bound)
    )
