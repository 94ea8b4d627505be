"""Utilisation that cannot be: more of a machine's peak than all of it, or nothing."""

from __future__ import annotations

from toque.errors import ConfigError, argument


def refuse_impossible(share: float, what: str) -> None:
    """Refuse a share of the peak outside (0, 1].

    Raises:
        ConfigError: it is.
    """
    if not 0.0 < share <= 1.0:
        raise ConfigError(
            f"A utilisation of {share:.0%} {what}, and no machine computes more than 100 % of its "
            "peak, or less than nothing. Published trainings reach 12 to 57 %: give "
            f"{argument('utilisation')} a share above nothing and up to all of it, or leave it out."
        )
