"""Plan of a run: its memory, time and disk space, before its model and data are loaded."""

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
    from toque.workflows.plan.plan_report import Plan


def plan(
    config: Configured,
    *,
    hardware: str | None = None,
    utilisation: float | None = None,
    gpus: int = 1,
    changes: bool = True,
    reporter: Reporter = SILENT,
) -> Plan:
    """Estimate the memory, FLOPs, time, disk space and traffic of a run, and useful changes.

    The estimate needs only the model's shapes, not its weights. The lengths of examples come from
    the prepared store. Without a store, each example is as long as the settings allow.

    Args:
        config: A configuration, as for `configure`.
        hardware: A GPU of `toque.hardware.cards`, e.g. "rtx-4090", or None for this machine. The
            `hardware` section of a file or preset changes its settings for this GPU.
        utilisation: Model FLOPs utilisation, in (0, 1], or None for a known or measured value.
        gpus: Number of GPUs that share every update. The memory is per GPU.
        changes: Also estimate other settings, which takes longer than the rest.
        reporter: Receives the progress.

    Raises:
        ConfigError: The configuration, the GPU, the number of GPUs or the utilisation is not valid.
        DataError: The store is damaged.
    """
    if utilisation is not None and not 0.0 < utilisation <= 1.0:
        raise ConfigError(
            f"{argument('utilisation')} must be above 0 and at most 100 %, not "
            f"{utilisation:.0%}. Published training runs reach 12 to 57 %."
        )
    if gpus < 1:
        raise ConfigError(f"{argument('gpus')} must be at least 1, not {gpus}.")
    if hardware is not None:
        hardware = card_named(hardware).name
        if isinstance(config, str | Path) and names_card(config, hardware):
            config = load_config(config, hardware=hardware).config
    settings = configure(config)
    refuse_foreign_code(settings.foreign_code, ["optim.name"])
    from toque.workflows.plan.run_estimate import build_plan  # loads torch

    with reporter.working("planning"):
        return build_plan(settings, hardware, utilisation, gpus, changes=changes)
