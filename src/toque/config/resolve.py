"""Configuration loading: a file or preset and overrides to a `RunConfig`, with value origins."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toque.config.cross_checks import impossible
from toque.config.error_messages import Origin, explain, explain_combination
from toque.config.foreign_code import foreign_names, is_of_a_run
from toque.config.gone import GONE
from toque.config.hardware import has_overlay, overlaid, without_overlays
from toque.config.schema import RunConfig
from toque.config.suggestions import nearest, unknown_names
from toque.config.yaml_reader import Document, dotted, read_yaml
from toque.config.yaml_reader import Path as SettingPath
from toque.errors import ConfigError

COMMAND_LINE = "command line"
DEFAULT = "default"
PRESETS = Path(__file__).parent.parent / "presets"
RETIRED: Mapping[str, Mapping[str, Any]] = {"observe": {"system": True}}
"""Values that 0.1.0 wrote into every run's config.yaml and that never did anything: they are passed
over for the default, so that its runs still open."""

FORMER_PRESETS: Mapping[str, str] = {
    "recipes-t5-small": "recipe-t5-small",
    "recipes-gpt2-small": "recipe-gpt2-small",
}
"""Names that presets had before, and those they have now; the former are still understood."""

FORMER_DEFAULTS: Mapping[str, str] = {"optim.warmup": "100 steps"}
"""Defaults that an earlier release had, as its runs' config.yaml has them: a run begun with one
keeps it, unless its configuration names another value."""


@dataclass(frozen=True)
class Resolved:
    """A configuration and where each of its values came from."""

    config: RunConfig
    origins: Mapping[str, str]
    """Dotted path of each value -> "default", "my.yaml:12" or "command line"."""


def load_config(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    trust_code: bool | None = None,
    hardware: str | None = None,
) -> Resolved:
    """Read a YAML file or a preset and apply overrides. Default < file < its card < override.

    Args:
        name_or_path: a file, or the name of a preset; a name without a folder or an ending is a
            preset when there is one. Relative paths inside are relative to the working directory.
        overrides: "section.field=value" texts, the value written as in YAML.
        trust_code: whether code that the file names may be imported; None: unless the file is a
            run's own, which may come from anyone.
        hardware: a card that the file's `hardware` section names; its settings come on top.

    Raises:
        ConfigError: the file, a name, a value or a combination of values is not usable.
    """
    document = _read(str(name_or_path))
    given, overlays = without_overlays(document)
    if hardware is not None:
        given = overlaid(given, document, overlays, hardware)
    overridden: set[SettingPath] = set()
    for text in overrides:
        path, value = _override(text)
        nested = value
        for part in reversed(path):
            nested = [nested] if isinstance(part, int) else {part: nested}
        _refuse_unknown(nested, lambda _: COMMAND_LINE)
        try:
            given = _put(given, path, value)
        except LookupError as error:
            section = dotted(tuple(part for part in path if isinstance(part, str))[:-1])
            raise ConfigError(
                f"command line: {text!r} has no place: `{dotted(path[:-1])}` is not there in that "
                f"form. Give the whole of `{section}`, e.g. "
                "data.sources='[{path: recipes.jsonl}]'."
            ) from error
        overridden = {p for p in overridden if p[: len(path)] != path}
        overridden.update(leaf for leaf, _ in leaves(value, path))
    resolved = _resolve(given, document, frozenset(overridden))
    if trust_code is None:
        trust_code = document.name != str(name_or_path) or not is_of_a_run(Path(name_or_path))
    if trust_code:
        return resolved

    def origin(setting: str) -> str | None:
        path = tuple(setting.split("."))
        return None if path in overridden else document.origin(path)

    foreign = foreign_names(resolved.config.model_dump(mode="json"), origin)
    return replace(resolved, config=resolved.config.with_foreign_code(foreign))


def names_card(name_or_path: str | Path, card: str) -> bool:
    """Whether a file or preset says what changes on that card.

    Raises:
        ConfigError: the file cannot be read.
    """
    return has_overlay(_read(str(name_or_path)), card)


def resolve_values(values: Mapping[str, Any], name: str = "values") -> Resolved:
    """A configuration from nested values, checked as a file would be; `name` is for messages.

    Raises:
        ConfigError: as for `load_config`.
    """
    return _resolve(dict(values), Document(name), frozenset())


def presets() -> dict[str, str]:
    """Name of each preset -> its first comment line."""
    files = sorted(PRESETS.glob("*.yaml"))
    return {f.stem: f.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for f in files}


def leaves(value: Any, path: SettingPath = ()) -> Iterator[tuple[SettingPath, Any]]:
    """Every value that has an origin of its own: in mappings and lists of mappings, their parts."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        items = list(enumerate(value))
    if not items:
        yield path, value
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def _resolve(
    given: dict[str, Any], document: Document, overridden: frozenset[SettingPath]
) -> Resolved:
    def origin(path: SettingPath) -> str:
        if any(p[: len(path)] == path or path[: len(p)] == p for p in overridden):
            return COMMAND_LINE
        return document.origin(path)

    given = _without_retired(given)
    _refuse_unknown(given, origin)
    try:
        config = RunConfig.model_validate(given)
    except ValidationError as error:
        raise ConfigError(explain(error, given, origin)) from error
    for problem in impossible(config):
        raise ConfigError(explain_combination(problem, given, origin))
    origins: dict[str, str] = {}
    for path, _ in leaves(config.model_dump(mode="json")):
        replaced = any(path[: len(p)] == p for p in overridden)
        is_default = path not in overridden and (replaced or path not in document.lines)
        origins[dotted(path)] = DEFAULT if is_default else origin(path)
    return Resolved(config, origins)


def _without_retired(given: dict[str, Any]) -> dict[str, Any]:
    kept = dict(given)
    for section, retired in RETIRED.items():
        if isinstance(kept.get(section), Mapping):
            items = kept[section].items()
            kept[section] = {k: v for k, v in items if k not in retired or v != retired[k]}
    return kept


def _read(name: str) -> Document:
    known = presets()
    name = FORMER_PRESETS.get(name, name)
    if name in known:
        text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
        return _mapping(text, f"presets/{name}.yaml")
    try:
        text = Path(name).read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f" Nearest preset: {close[0]}." if close else ""
        raise ConfigError(
            f"{name} is neither a file nor a preset.{hint} Presets: {', '.join(known)}. "
            "Give one of them, or the path of a YAML file."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}). "
            "Give a YAML file saved as UTF-8."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read: {error.strerror or error}. Give a readable YAML file or one "
            f"of the presets {', '.join(known)}."
        ) from error
    return _mapping(text, name)


def _mapping(text: str, name: str) -> Document:
    document = read_yaml(text, name)
    if document.value is None:
        raise ConfigError(
            f"{name} is empty. Write the settings that differ from their defaults, e.g. "
            "`data: {sources: [{path: my-recipes.jsonl}]}`, or use a preset: "
            f"{', '.join(presets())}."
        )
    if not isinstance(document.value, Mapping):
        raise ConfigError(
            f"{name}:{document.lines[()]}: a configuration is a mapping of names to values, and "
            f"this is {'a list' if isinstance(document.value, list) else 'a single value'}. "
            "Write `name: value`."
        )
    return document


def _override(text: str) -> tuple[SettingPath, Any]:
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name or any(not part for part in name.split(".")):
        raise ConfigError(
            f"{text!r} on the command line is not an override. Write section.field=value, e.g. "
            'optim.peak_lr=3e-4 or train.stop_after="3 epochs".'
        )
    path = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
    try:
        found = read_yaml(value, f"{COMMAND_LINE}, {name}").value
    except ConfigError as error:
        raise ConfigError(
            f"command line: the value in {text!r} cannot be read. Write it as in YAML and quote "
            f"text with special characters for the shell and for YAML: {name}='\"...\"'."
        ) from error
    # Bare text stands for itself: YAML would fold its line breaks and end it at " #".
    is_bare = isinstance(found, str) and value.strip()[0] not in "\"'|>!&"
    return path, value.strip(" ") if is_bare else found


def _refuse_unknown(values: Any, origin: Origin) -> None:
    for path in unknown_names(values):
        gone = GONE.get(dotted(tuple(part for part in path if isinstance(part, str))))
        if gone is not None:
            raise ConfigError(f"{origin(path)}: `{dotted(path)}` is a setting no more: {gone}")
        close = nearest(path)
        hint = f" Nearest: `{close}`." if close else ""
        raise ConfigError(
            f"{origin(path)}: `{dotted(path)}` is not a setting.{hint} `toque show demo` prints "
            "every setting; docs/reference/configuration.md explains them."
        )


def _put(where: Any, path: Sequence[str | int], value: Any) -> Any:
    """`where` with `value` at `path`, copied on the way; LookupError where the path ends early."""
    if not path:
        return value
    part, *rest = path
    if isinstance(where, Mapping | None) and isinstance(part, str):
        changed: Any = dict(where or {})
        changed[part] = _put(changed.get(part), rest, value)
    elif isinstance(where, list) and isinstance(part, int) and part < len(where):
        changed = list(where)
        changed[part] = _put(where[part], rest, value)
    else:
        raise LookupError
    return changed
