"""Configuration loader: a `RunConfig` from a file or preset and overrides.

A file may also contain settings for particular GPUs:
`hardware: {rtx-4090: {train: {micro_batch_rows: 8}}}`.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toque.config.cross_checks import find_conflicts
from toque.config.error_messages import (
    Origin,
    explain,
    explain_combination,
    explain_unknown,
    unknown_names,
)
from toque.config.schema import RunConfig
from toque.config.user_code import is_run_config, names_of_code
from toque.config.yaml_reader import Document, dotted, read_yaml
from toque.config.yaml_reader import Path as SettingPath
from toque.errors import ConfigError, argument, nearest_hint
from toque.reporter import one_line
from toque.user_paths import named_path

COMMAND_LINE = "command line"
DEFAULT = "default"
PRESETS = Path(__file__).parent.parent / "presets"
MAX_BYTES = 1 << 20
"""Maximum size of a configuration file, in bytes. `init` writes a few thousand bytes."""
_HARDWARE = "hardware"
_MAX_NAME_CHARS = 80
"""Maximum length of a name in a message, in characters."""
_MAX_LISTED_FILES = 5
_MAX_INDEX_DIGITS = 19
"""Maximum number of digits in a list index. `int` rejects numbers with thousands of digits."""


@dataclass(frozen=True)
class Resolved:
    """A configuration and the origin of each of its values."""

    config: RunConfig
    origins: Mapping[str, str]
    """Dotted path of each value -> "default", "my.yaml:12" or "command line"."""


class _Settings:
    """Values of a file and their origins. Overlays and overrides change both."""

    def __init__(self, document: Document) -> None:
        self.values: Any = dict(document.value)
        self._name = document.name
        self._origins = {
            path: f"{document.name}:{n}" for path, n in document.lines.items()
        }
        overlays = self.values.pop(_HARDWARE, None) or {}
        if not isinstance(overlays, Mapping) or not all(
            isinstance(overlay, Mapping) for overlay in overlays.values()
        ):
            raise ConfigError(
                f"{self.origin((_HARDWARE,))}: `{_HARDWARE}` must map GPUs to settings, e.g. "
                "{rtx-4090: {train: {micro_batch_rows: 8}}}."
            )
        # Normalised name of a GPU -> its name in the file, and its settings.
        self._overlays = {
            _normalise(name): (name, overlay) for name, overlay in overlays.items()
        }
        if len(self._overlays) < len(overlays):
            raise ConfigError(
                f"{self.origin((_HARDWARE,))}: `{_HARDWARE}` names a GPU twice: "
                f"{', '.join(map(str, overlays))}. Merge its settings."
            )
        for name, overlay in overlays.items():  # also check the settings of unused GPUs
            _refuse_unknown(overlay, partial(self._origin_in_overlay, name))

    def origin(self, path: SettingPath) -> str:
        """Return the file and line of the value at `path`, or of the smallest section around it."""
        while path and path not in self._origins:
            path = path[:-1]
        return self._origins.get(path, f"{self._name}:1")

    def _origin_in_overlay(self, gpu: str, path: SettingPath) -> str:
        return self.origin((_HARDWARE, gpu, *path))

    def has(self, path: SettingPath) -> bool:
        """Return whether a value was set. Values that were not set are defaults."""
        return path in self._origins

    def names_card(self, gpu: str) -> bool:
        """Return whether the file has settings for a GPU."""
        return _normalise(gpu) in self._overlays

    def apply_overlay(self, gpu: str) -> None:
        """Apply the settings for a GPU.

        Raises:
            ConfigError: The file has no settings for this GPU.
        """
        name = _normalise(gpu)
        flag = argument(f"hardware={gpu}")
        if not self._overlays:
            raise ConfigError(
                f"{flag} needs a `{_HARDWARE}` section, but {self._name} has no `{_HARDWARE}` "
                f"section. Leave {argument('hardware')} out. (`toque plan` accepts any GPU.)"
            )
        if name not in self._overlays:
            raise ConfigError(
                f"{flag} is not in the `{_HARDWARE}` section of {self._name}, which has settings "
                f"for {', '.join(self._overlays)}."
                f"{nearest_hint(name, self._overlays, cutoff=0.0)}"
            )
        name_in_file, overlay = self._overlays[name]
        self.values = _merge(self.values, overlay)
        # The line of hardware.GPU.train.batch becomes the line of train.batch.
        for path, origin in list(self._origins.items()):
            if path[:2] == (_HARDWARE, name_in_file) and len(path) > 2:
                self._origins[path[2:]] = origin

    def apply_override(self, text: str) -> None:
        """Apply an override, "section.field=value".

        Raises:
            ConfigError: The override is invalid.
        """
        path, value = _parse_override(text)
        nested = value
        for part in reversed(path):
            nested = [nested] if isinstance(part, int) else {part: nested}
        _refuse_unknown(nested, lambda _: COMMAND_LINE)
        try:
            self.values = _replace_at(self.values, path, value)
        except LookupError as error:
            section = dotted(tuple(part for part in path if isinstance(part, str))[:-1])
            raise ConfigError(
                f"command line: {text!r} cannot be applied, because `{dotted(path[:-1])}` does not "
                f"exist or is not a section. Set `{section}` as a whole, e.g. "
                "data.sources='[{path: recipes.jsonl}]'."
            ) from error

        sections = {path[:n]: COMMAND_LINE for n in range(1, len(path))}
        unchanged = {
            p: origin for p, origin in self._origins.items() if p[: len(path)] != path
        }
        values = {value_path: COMMAND_LINE for value_path, _ in _nodes(value, path)}
        self._origins = sections | unchanged | values


def _parse_override(text: str) -> tuple[SettingPath, Any]:
    """Split an override, "section.field=value", into the path of a setting and its value.

    Raises:
        ConfigError: The text is not an override, or the value is not YAML.
    """
    name, equals, value_text = text.partition("=")
    name = name.strip()
    if not equals or not all(name.split(".")):
        raise ConfigError(
            f"{text!r} on the command line is not an override. Write section.field=value, e.g. "
            'optim.peak_lr=3e-4 or train.stop_after="3 epochs".'
        )
    path = tuple(
        int(part) if part.isdecimal() and len(part) <= _MAX_INDEX_DIGITS else part
        for part in name.split(".")
    )
    try:
        value = read_yaml(value_text, f"{COMMAND_LINE}, {name}").value
    except ConfigError as error:
        raise ConfigError(
            f"command line: the value in {text!r} cannot be read as YAML. Quote text with "
            f"special characters for both the shell and YAML: {name}='\"...\"'."
        ) from error
    # Use text without quotes unchanged. YAML would fold line breaks and drop comments.
    has_yaml_marks = value_text.strip().startswith(tuple("\"'|>!&"))
    if isinstance(value, str) and not has_yaml_marks:
        value = value_text.strip(" ")
    return path, value


def _normalise(gpu: object) -> str:
    """Convert the name of a GPU to lower case with hyphens."""
    return "-".join(str(gpu).lower().split())


def load_config(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    trust_code: bool | None = None,
    hardware: str | None = None,
) -> Resolved:
    """Load a YAML file or a preset and apply overrides.

    Args:
        name_or_path: The name of a preset, or the path of a file.
        overrides: Texts such as "section.field=value", which take precedence over the file.
        trust_code: Allow imports of code that the file names. Default: True, except for the
            configuration in a run folder, which may come from anyone.
        hardware: A GPU, to apply the settings that the file has for it.

    Raises:
        ConfigError: The file or an override is invalid.
    """
    document = _read(str(name_or_path))
    settings = _Settings(document)
    if hardware is not None:
        settings.apply_overlay(hardware)
    for text in overrides:
        settings.apply_override(text)
    resolved = _resolve(settings)
    if trust_code is None:
        is_preset = document.name != str(name_or_path)
        trust_code = is_preset or not is_run_config(named_path(name_or_path))
    if trust_code:
        return resolved

    foreign: dict[str, dict[str, str]] = {}
    code = names_of_code(resolved.config.model_dump(mode="json"))
    for setting, names in code.items():
        path = tuple(setting.split("."))
        for name in names:
            # A mapping such as objective.rewards has an origin for each of its names.
            origin = settings.origin(path)
            for value_path in (path, (*path, name)):
                if settings.has(value_path):
                    origin = settings.origin(value_path)
            # The user wrote the command line, so its code is trusted.
            if origin != COMMAND_LINE:
                foreign.setdefault(setting, {})[name] = origin
    return replace(resolved, config=resolved.config.with_foreign_code(foreign))


def names_card(name_or_path: str | Path, card: str) -> bool:
    """Return whether a file or a preset has settings for a GPU."""
    return _Settings(_read(str(name_or_path))).names_card(card)


def resolve_values(values: Mapping[str, Any], name: str = "values") -> Resolved:
    """Validate nested values as if they came from a file.

    `name` identifies them in error messages.
    """
    # Before `_Settings`, because only a file may have settings for particular GPUs.
    _refuse_unknown(values, lambda _: f"{name}:1")
    return _resolve(_Settings(Document(name, values)))


def load_text(text: str, name: str) -> Resolved:
    """Load a configuration from the text of a YAML file. `name` identifies it in messages.

    Raises:
        ConfigError: The text is not a valid configuration. The message starts with `name:LINE: `
            if the error has a line.
    """
    return _resolve(_Settings(_parse(text, name)))


def presets() -> dict[str, str]:
    """Return the names of the presets with their descriptions."""
    files = sorted(PRESETS.glob("*.yaml"))
    return {
        f.stem: f.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for f in files
    }


def leaves(value: Any, path: SettingPath = ()) -> Iterator[tuple[SettingPath, Any]]:
    """Yield the values below `path` that are not sections, with their paths."""
    return ((path, inner) for path, inner in _nodes(value, path) if not _items(inner))


def _nodes(value: Any, path: SettingPath = ()) -> Iterator[tuple[SettingPath, Any]]:
    """Yield a value and all values in it, with their paths."""
    yield path, value
    for key, inner in _items(value):
        yield from _nodes(inner, (*path, key))


def _items(value: Any) -> list[tuple[str | int, Any]]:
    """List the items of a mapping or of a list of mappings."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple) and any(
        isinstance(item, Mapping) for item in value
    ):
        return list(enumerate(value))
    return []


def _merge(values: Any, changes: Any) -> Any:
    """Replace the values that `changes` contains, recursively in mappings."""
    if not isinstance(values, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {
        **values,
        **{key: _merge(values.get(key), item) for key, item in changes.items()},
    }


def _resolve(settings: _Settings) -> Resolved:
    """Validate the values and their combinations, and find the origin of each.

    Raises:
        ConfigError: A name is unknown, a value is wrong, or two settings cannot be combined.
    """
    values = settings.values
    _refuse_unknown(values, settings.origin)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, values, settings.origin)) from error
    for names, message in find_conflicts(config):
        raise ConfigError(explain_combination(names, message, values, settings.origin))
    origins = {
        dotted(path): settings.origin(path) if settings.has(path) else DEFAULT
        for path, _ in leaves(config.model_dump(mode="json"))
    }
    return Resolved(config, origins)


def _read(name: str) -> Document:
    """Read a preset, or the file with this path.

    Raises:
        ConfigError: The file does not exist, cannot be read, or is not a configuration.
    """
    preset_names = presets()
    if name in preset_names:
        text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
        return _parse(text, f"presets/{name}.yaml")

    try:
        with named_path(name).open("rb") as file:  # also a pipe created by the shell
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{name} is longer than {MAX_BYTES:,} bytes, so it is not a configuration. Give a "
                "YAML file with the settings of a run."
            )
        text = content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(_explain_missing(name, preset_names)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}). "
            "Give a YAML file saved as UTF-8."
        ) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # probably YAML text instead of its path
            name = one_line(name, _MAX_NAME_CHARS)
            raise ConfigError(_explain_missing(name, preset_names)) from error
        raise ConfigError(
            f"{name} cannot be read: {error.strerror or error}. Give a readable YAML file or one "
            f"of the presets {', '.join(preset_names)}."
        ) from error

    return _parse(text, name)


def _explain_missing(name: str, preset_names: Iterable[str]) -> str:
    """Write the message about a name that is neither a file nor a preset.

    If a YAML file in the folder has a similar name, it suggests only this file.
    """
    path = Path(name)
    files: list[str] = []
    with suppress(OSError, ValueError):  # the folder may not exist, or not be readable
        siblings = sorted(path.parent.iterdir())
        yaml_files = [file for file in siblings if file.suffix in (".yaml", ".yml")]
        files = [str(path.with_name(file.name)) for file in yaml_files]
    problem = f"{name} is neither a file nor a preset."
    files_by_stem = {Path(file).stem: file for file in files}
    if similar := difflib.get_close_matches(path.stem, files_by_stem, n=1):
        return f"{problem} Nearest: {files_by_stem[similar[0]]}."

    preset_hint = nearest_hint(name, preset_names, cutoff=0.4)
    file_hint = ""
    if files:
        listed = ", ".join(files[:_MAX_LISTED_FILES])
        ellipsis = " ..." if len(files) > _MAX_LISTED_FILES else ""
        file_hint = f" YAML files there: {listed}{ellipsis}."
    return (
        f"{problem}{preset_hint}{file_hint} Presets: {', '.join(preset_names)}. Give one of them, "
        "or the path of a YAML file."
    )


def _parse(text: str, name: str) -> Document:
    """Read the YAML text of a configuration, which must be a mapping."""
    document = read_yaml(text, name)
    if document.value is None:
        raise ConfigError(
            f"{name} is empty. Write the settings that differ from their defaults, e.g. "
            "`data: {sources: [{path: my-recipes.jsonl}]}`, or use a preset: "
            f"{', '.join(presets())}."
        )
    if not isinstance(document.value, Mapping):
        kind = "a list" if isinstance(document.value, list) else "a single value"
        raise ConfigError(
            f"{name}:{document.lines[()]}: a configuration must map names to values, but this is "
            f"{kind}. Write `name: value`."
        )
    return document


def _refuse_unknown(values: Any, origin: Origin) -> None:
    """Raise a ConfigError for the first name in `values` that is not a setting."""
    for path in unknown_names(values):
        raise ConfigError(explain_unknown(path, origin))


def _replace_at(target: Any, path: Sequence[str | int], value: Any) -> Any:
    """Copy `target` with `value` at `path`.

    Raises:
        LookupError: The path does not exist.
    """
    if not path:
        return value
    part, *rest = path
    if isinstance(target, Mapping | None) and isinstance(part, str):
        changed: Any = dict(target or {})
        changed[part] = _replace_at(changed.get(part), rest, value)
    elif isinstance(target, list) and isinstance(part, int) and part < len(target):
        changed = list(target)
        changed[part] = _replace_at(target[part], rest, value)
    else:
        raise LookupError
    return changed
