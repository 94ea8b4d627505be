"""Planning: what a run will take, before anything of it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toque.reporter import SILENT, Reporter
from toque.workflows.configure import Configured, configure
from toque.workflows.plan.utilisation import refuse_impossible

if TYPE_CHECKING:
    from toque.workflows.plan.result import Plan


def plan(
    config: Configured,
    *,
    hardware: str | None = None,
    utilisation: float | None = None,
    reporter: Reporter = SILENT,
) -> Plan:
    """Memory by part, FLOPs, time, disk and traffic of a run, and what would change them.

    Nothing is trained and no weight is read: the model has shapes alone. With a prepared store the
    lengths are those of its examples; without, each is as long as the settings allow.

    Args:
        config: what `configure` takes.
        hardware: a card of `toque.hardware.cards`, e.g. "rtx-4090"; None for this machine.
        utilisation: share of the peak to assume, in (0, 1]; None for what is known.
        reporter: hears of progress.

    Raises:
        ConfigError: the configuration, the card or the utilisation cannot be used.
        DataError: the store is damaged.
    """
    if utilisation is not None:
        refuse_impossible(utilisation, "was asked for")
    settings = configure(config)
    from toque.workflows.plan.planned import planned  # it loads torch

    with reporter.working("planning"):
        return planned(settings, hardware, utilisation)
