"""Likeness of ranks: what must be equal on all of them, compared before anything is computed."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from importlib import metadata

from toque.errors import ConfigError
from toque.training.distributed.collectives import Ranks
from toque.version import __version__


def versions() -> dict[str, str]:
    """Versions of what decides a number or the form of a file."""
    packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"toque": __version__, **packages, "python": platform.python_version()}


def refuse_unlike(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Compare the ranks' surroundings.

    Args:
        ranks: the processes that share the run.
        facts: of this rank, by what they are called in a sentence.

    Raises:
        ConfigError: on every rank, when they differ; says which machine has which.
    """
    held = ranks.all_gather((socket.gethostname(), dict(facts)))
    differing = {name: _who_has(name, held) for name in facts}
    told = [
        f"{name} is " + ", ".join(f"{value} on {who}" for value, who in found.items())
        for name, found in differing.items()
        if len(found) > 1
    ]
    if told:
        raise ConfigError(
            f"The {ranks.world_size} ranks are not alike: {'; '.join(told)}. They share every "
            "update, so all need the same installation, and the same command with the same files. "
            "Nothing was computed or written."
        )


def _who_has(name: str, held: list[tuple[str, dict[str, str]]]) -> dict[str, str]:
    """Machines by the value that they have; ranks beside it where one machine has several."""
    found: dict[str, list[int]] = {}
    for rank, (_, facts) in enumerate(held):
        found.setdefault(facts.get(name, "not known"), []).append(rank)
    return {
        value: " and ".join(_machines([(held[rank][0], rank) for rank in having]))
        for value, having in found.items()
    }


def _machines(having: list[tuple[str, int]]) -> list[str]:
    by_host: dict[str, list[str]] = {}
    for host, rank in having:
        by_host.setdefault(host, []).append(str(rank))
    return [
        f"{host} (rank{'s' if len(found) > 1 else ''} {', '.join(found)})"
        for host, found in by_host.items()
    ]
