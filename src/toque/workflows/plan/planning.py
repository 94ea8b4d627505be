"""Planning: memory, time and disk of a run, before anything of it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toque.config import load_config
from toque.config.resolve import names_card
from toque.config.user_code import refuse_foreign_code
from toque.errors import ConfigError, argument
from toque.hardware.cards import card_named
from toque.reporter import SILENT, Reporter
from toque.workflows.configure import Configured, configure

if TYPE_CHECKING:
    from toque.workflows.plan.plan_result import Plan


def plan(
    config: Configured,
    *,
    hardware: str | None = None,
    utilisation: float | None = None,
    gpus: int = 1,
    reporter: Reporter = SILENT,
) -> Plan:
    """Memory by part, FLOPs, time, disk and traffic of a run, and what would change them.

    Nothing is trained and no weight is read: the model has shapes alone. With a prepared store the
    lengths are those of its examples; without, each is as long as the settings allow.

    Args:
        config: what `configure` takes.
        hardware: a card of `toque.hardware.cards`, e.g. "rtx-4090"; None for this machine. The
            `hardware` section of a file or preset changes its settings for that card.
        utilisation: share of the peak to assume, in (0, 1]; None for what is known.
        gpus: how many of the card share every update; memory is that of one.
        reporter: hears of progress.

    Raises:
        ConfigError: the configuration, the card, its number or the utilisation cannot be used.
        DataError: the store is damaged.
    """
    if utilisation is not None and not 0.0 < utilisation <= 1.0:
        raise ConfigError(
            f"A utilisation of {utilisation:.0%} was asked for, and no machine computes more than "
            "100 % of its peak, or less than nothing. Published trainings reach 12 to 57 %: give "
            f"{argument('utilisation')} a share above nothing and up to all of it, or leave it out."
        )
    if gpus < 1:
        raise ConfigError(
            f"A plan for {gpus} GPUs was asked for. Give {argument('gpus')} 1 or more."
        )
    if hardware is not None:
        hardware = card_named(hardware).name
        if isinstance(config, str | Path) and names_card(config, hardware):
            config = load_config(config, hardware=hardware).config
    settings = configure(config)
    refuse_foreign_code(settings.foreign_code, ["optim.name"])
    from toque.workflows.plan.planned import planned  # loads torch

    with reporter.working("planning"):
        return planned(settings, hardware, utilisation, gpus)
