"""Checkup: what was found of a machine, each thing ok, a warning or failed, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from toque.errors import CheckFailed

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at or tried."""

    name: str
    state: State
    found: str
    todo: str = ""
    """Advice; empty where all is well."""


@dataclass(frozen=True)
class Checkup:
    """All of them."""

    checks: Sequence[Check]
    seconds: float

    @property
    def failed(self) -> list[Check]:
        """Checks of what training needs and this machine lacks."""
        return [check for check in self.checks if check.state == "failed"]

    def record(self) -> dict[str, Any]:
        """The checks as a JSON value."""
        return {"seconds": self.seconds, "checks": [asdict(check) for check in self.checks]}

    def raise_if_failed(self) -> None:
        """Raise when something needed is broken.

        Raises:
            CheckFailed: with the names.
        """
        if self.failed:
            names = ", ".join(check.name for check in self.failed)
            raise CheckFailed(
                f"This machine cannot train yet: {names} failed. The table above says what to do "
                "about each; `toque doctor` looks again."
            )
