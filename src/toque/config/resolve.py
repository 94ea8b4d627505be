"""Configuration loading: a file or preset and overrides to a `RunConfig`, with value origins.

A file may hold, beside its settings, what changes on a named card:
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

from toque.config.cross_checks import impossible
from toque.config.error_messages import (
    GONE,
    Origin,
    explain,
    explain_combination,
    explain_unknown,
    unknown_names,
)
from toque.config.schema import RunConfig
from toque.config.user_code import is_of_a_run, names_of_code
from toque.config.yaml_reader import Document, dotted, read_yaml
from toque.config.yaml_reader import Path as SettingPath
from toque.errors import ConfigError, argument, nearest_hint
from toque.reporter import one_line
from toque.user_paths import named_path

COMMAND_LINE = "command line"
DEFAULT = "default"
PRESETS = Path(__file__).parent.parent / "presets"
MOST_BYTES = 1 << 20
"""Length of a configuration; `init` writes some thousand."""
_HARDWARE = "hardware"
_LONGEST_NAME = 80  # letters of a name that is too long for a file, in its message
_FILES_NAMED = 5  # most files that a message lists
_LONGEST_PLACE = 20  # digits of a place in a list; Python reads no number of thousands


@dataclass(frozen=True)
class Resolved:
    """A configuration and the origin of each of its values."""

    config: RunConfig
    origins: Mapping[str, str]
    """Dotted path of each value -> "default", "my.yaml:12" or "command line"."""


class _Given:
    """Values that were given, and the origin of each; overlays and overrides change both."""

    def __init__(self, document: Document) -> None:
        self.values: Any = _without_gone(document.value)
        self._name = document.name
        self._origins = {path: f"{document.name}:{n}" for path, n in document.lines.items()}
        overlays = self.values.pop(_HARDWARE, None) or {}
        if not isinstance(overlays, Mapping) or not all(
            isinstance(overlay, Mapping) for overlay in overlays.values()
        ):
            raise ConfigError(
                f"{self.origin((_HARDWARE,))}: `{_HARDWARE}` is a mapping of cards to settings, "
                "e.g. {rtx-4090: {train: {micro_batch_rows: 8}}}."
            )
        self._overlays = {_card(name): (name, overlay) for name, overlay in overlays.items()}
        if len(self._overlays) < len(overlays):
            raise ConfigError(
                f"{self.origin((_HARDWARE,))}: `{_HARDWARE}` names a card twice: "
                f"{', '.join(map(str, overlays))}. Put what changes on it in one place."
            )
        for name, overlay in overlays.items():  # those of other machines, too
            _refuse_unknown(overlay, partial(self._origin_on, name))

    def origin(self, path: SettingPath) -> str:
        """The place where the value at `path`, or the nearest thing around it, was given."""
        while path and path not in self._origins:
            path = path[:-1]
        return self._origins.get(path, f"{self._name}:1")

    def _origin_on(self, card: str, path: SettingPath) -> str:
        return self.origin((_HARDWARE, card, *path))

    def has(self, path: SettingPath) -> bool:
        """True for what was given; the rest are defaults."""
        return path in self._origins

    def names_card(self, card: str) -> bool:
        """True where the file says what changes on a card."""
        return _card(card) in self._overlays

    def overlay(self, card: str) -> None:
        """Put what changes on a card over the settings, or list the cards in a ConfigError."""
        name, asked = _card(card), argument(f"hardware={card}")
        if not self._overlays:
            raise ConfigError(
                f"{asked}: {self._name} has no `{_HARDWARE}` section, so nothing in it changes "
                f"with the card. Leave {argument('hardware')} out; `toque plan` takes it for any."
            )
        if name not in self._overlays:
            raise ConfigError(
                f"{asked}: {self._name} says what changes on {', '.join(self._overlays)}."
                f"{nearest_hint(name, self._overlays, cutoff=0.0)}"
            )
        written, overlay = self._overlays[name]
        self.values = merged(self.values, overlay)
        for path, origin in list(self._origins.items()):
            if path[:2] == (_HARDWARE, written) and len(path) > 2:
                self._origins[path[2:]] = origin

    def override(self, text: str) -> None:
        """Put the value of "section.field=value" over what was given, or raise a ConfigError."""
        name, equals, written = text.partition("=")
        name = name.strip()
        if not equals or not all(name.split(".")):
            raise ConfigError(
                f"{text!r} on the command line is not an override. Write section.field=value, e.g. "
                'optim.peak_lr=3e-4 or train.stop_after="3 epochs".'
            )
        parts = name.split(".")
        path = tuple(int(p) if p.isdecimal() and len(p) < _LONGEST_PLACE else p for p in parts)
        try:
            value = read_yaml(written, f"{COMMAND_LINE}, {name}").value
        except ConfigError as error:
            raise ConfigError(
                f"command line: the value in {text!r} cannot be read. Write it as in YAML and "
                "quote text with special characters for the shell and for YAML: "
                f"{name}='\"...\"'."
            ) from error
        # Bare text stands for itself: YAML would fold its line breaks and end it at " #".
        if isinstance(value, str) and not written.strip().startswith(tuple("\"'|>!&")):
            value = written.strip(" ")
        nested = value
        for part in reversed(path):
            nested = [nested] if isinstance(part, int) else {part: nested}
        _refuse_unknown(nested, lambda _: COMMAND_LINE)
        try:
            self.values = _put(self.values, path, value)
        except LookupError as error:
            section = dotted(tuple(part for part in path if isinstance(part, str))[:-1])
            raise ConfigError(
                f"command line: {text!r} has no place: `{dotted(path[:-1])}` is not there in that "
                f"form. Give the whole of `{section}`, e.g. "
                "data.sources='[{path: recipes.jsonl}]'."
            ) from error
        kept = {p: origin for p, origin in self._origins.items() if p[: len(path)] != path}
        above = {path[:n]: COMMAND_LINE for n in range(1, len(path))}
        below = {place: COMMAND_LINE for place, _ in _places(value, path)}
        self._origins = {**above, **kept, **below}


def _card(name: object) -> str:
    """A card's name as it is looked up: however large its letters are, with its words joined."""
    return "-".join(str(name).lower().split())


def load_config(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    trust_code: bool | None = None,
    hardware: str | None = None,
) -> Resolved:
    """Read a YAML file or a preset and apply overrides. Default < file < its card < override.

    A name without a folder or an ending is a preset when there is one. Overrides are texts such as
    "section.field=value"; `hardware` is a card that the file's own section names. Code that the
    file names may be imported with `trust_code`; None: unless the file is a run's own, which may
    come from anyone. What is not usable is a ConfigError.
    """
    document = _read(str(name_or_path))
    given = _Given(document)
    if hardware is not None:
        given.overlay(hardware)
    for text in overrides:
        given.override(text)
    resolved = _resolve(given)
    if trust_code is None:
        trust_code = document.name != str(name_or_path) or not is_of_a_run(named_path(name_or_path))
    if trust_code:
        return resolved

    foreign = {
        setting: dict.fromkeys(names, given.origin(tuple(setting.split("."))))
        for setting, names in names_of_code(resolved.config.model_dump(mode="json")).items()
        if resolved.origins[setting] != COMMAND_LINE
    }
    return replace(resolved, config=resolved.config.with_foreign_code(foreign))


def names_card(name_or_path: str | Path, card: str) -> bool:
    """True where a file or preset says what changes on that card."""
    return _Given(_read(str(name_or_path))).names_card(card)


def resolve_values(values: Mapping[str, Any], name: str = "values") -> Resolved:
    """A configuration from nested values, checked as a file would be; `name` is for messages."""
    _refuse_unknown(_without_gone(values), lambda _: f"{name}:1")
    return _resolve(_Given(Document(name, values)))


def presets() -> dict[str, str]:
    """Name of each preset -> its first comment line."""
    files = sorted(PRESETS.glob("*.yaml"))
    return {f.stem: f.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for f in files}


def leaves(value: Any, path: SettingPath = ()) -> Iterator[tuple[SettingPath, Any]]:
    """Every value that has an origin of its own: in mappings and lists of mappings, their parts."""
    return ((place, held) for place, held in _places(value, path) if not _parts(held))


def _places(value: Any, path: SettingPath = ()) -> Iterator[tuple[SettingPath, Any]]:
    """A value and all its parts."""
    yield path, value
    for key, inner in _parts(value):
        yield from _places(inner, (*path, key))


def _parts(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return list(enumerate(value))
    return []


def merged(values: Any, changes: Any) -> Any:
    """Values with some changed; of mappings only what is named."""
    if not isinstance(values, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**values, **{key: merged(values.get(key), item) for key, item in changes.items()}}


def _resolve(given: _Given) -> Resolved:
    _refuse_unknown(given.values, given.origin)
    try:
        config = RunConfig.model_validate(given.values)
    except ValidationError as error:
        raise ConfigError(explain(error, given.values, given.origin)) from error
    for settings, message in impossible(config):
        raise ConfigError(explain_combination(settings, message, given.values, given.origin))
    paths = [path for path, _ in leaves(config.model_dump(mode="json"))]
    origins = {dotted(p): given.origin(p) if given.has(p) else DEFAULT for p in paths}
    return Resolved(config, origins)


def _read(name: str) -> Document:
    known = presets()
    if name in known:
        text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
        return _mapping(text, f"presets/{name}.yaml")
    try:
        with named_path(name).open("rb") as file:  # a pipe of the shell, too
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(
                f"{name} is longer than {MOST_BYTES:,} bytes, and a configuration has some "
                "thousand. Give a YAML file with the settings of a run."
            )
        text = content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(_absent(name, known)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}). "
            "Give a YAML file saved as UTF-8."
        ) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(_absent(one_line(name, _LONGEST_NAME), known)) from error
        raise ConfigError(
            f"{name} cannot be read: {error.strerror or error}. Give a readable YAML file or one "
            f"of the presets {', '.join(known)}."
        ) from error
    return _mapping(text, name)


def _absent(name: str, known: Iterable[str]) -> str:
    """The message about a name that is neither a file nor a preset: files of a like name first."""
    path, files = Path(name), list[str]()
    with suppress(OSError, ValueError):
        beside = sorted(path.parent.iterdir())
        files = [str(path.with_name(f.name)) for f in beside if f.suffix in (".yaml", ".yml")]
    missing = f"{name} is neither a file nor a preset."
    stems = {Path(file).stem: file for file in files}
    if near := difflib.get_close_matches(path.stem, stems, n=1):
        return f"{missing} Nearest: {stems[near[0]]}."
    hint = nearest_hint(name, known, cutoff=0.4)
    more = " ..." if len(files) > _FILES_NAMED else ""
    there = f" YAML files there: {', '.join(files[:_FILES_NAMED])}{more}." if files else ""
    return (
        f"{missing}{hint}{there} Presets: {', '.join(known)}. Give one of them, or the path of a "
        "YAML file."
    )


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


def _refuse_unknown(values: Any, origin: Origin) -> None:
    for path in unknown_names(values):
        raise ConfigError(explain_unknown(path, origin))


def _without_gone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without settings that went, where they are null."""
    kept = dict(values)
    for section, _, name in (path.partition(".") for path in GONE):
        held = kept.get(section)
        if isinstance(held, Mapping) and name in held and held[name] is None:
            kept[section] = {key: value for key, value in held.items() if key != name}
    return kept


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
