"""Hardware overlays: the part of a configuration that says what changes on a named card.

A file may hold, beside its settings, `hardware: {rtx-4090: {train: {micro_batch_rows: 8}}}`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from toque.config.yaml_reader import Document
from toque.config.yaml_reader import Path as SettingPath
from toque.errors import ConfigError, argument

SECTION = "hardware"


def without_overlays(document: Document) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The settings of a file, and its overlays by card.

    Raises:
        ConfigError: `hardware` is no mapping of cards to settings.
    """
    given = dict(document.value)
    overlays = given.pop(SECTION, None) or {}
    if not isinstance(overlays, Mapping) or not all(
        isinstance(overlay, Mapping) for overlay in overlays.values()
    ):
        raise ConfigError(
            f"{document.origin((SECTION,))}: `{SECTION}` is a mapping of cards to settings, e.g. "
            "{rtx-4090: {train: {micro_batch_rows: 8}}}."
        )
    return given, overlays


def overlaid(
    given: dict[str, Any], document: Document, overlays: Mapping[str, Any], card: str
) -> dict[str, Any]:
    """The settings as they are on `card`; their lines become those of the overlay.

    Raises:
        ConfigError: the file says nothing of this card; those that it knows are named.
    """
    name = "-".join(card.lower().split())
    if name not in overlays:
        asked = argument(f"hardware={card}")
        if not overlays:
            raise ConfigError(
                f"{asked}: {document.name} has no `{SECTION}` section, so nothing in it changes "
                f"with the card. Leave {argument('hardware')} out; `toque plan` takes it for any."
            )
        close = difflib.get_close_matches(name, overlays, n=1, cutoff=0.0)
        raise ConfigError(
            f"{asked}: {document.name} says what changes on {', '.join(overlays)}. "
            f"Nearest: {close[0]}."
        )
    above: SettingPath = (SECTION, name)
    for path, line in list(document.lines.items()):
        if path[: len(above)] == above and len(path) > len(above):
            document.lines[path[len(above) :]] = line
    merged: dict[str, Any] = _merged(given, overlays[name])
    return merged


def has_overlay(document: Document, card: str) -> bool:
    """Whether a file says what changes on `card`."""
    overlays = without_overlays(document)[1]
    return "-".join(card.lower().split()) in overlays


def _merged(values: Any, changes: Any) -> Any:
    if not isinstance(values, Mapping) or not isinstance(changes, Mapping):
        return changes
    merged = dict(values)
    for key, change in changes.items():
        merged[key] = _merged(merged.get(key), change)
    return merged
