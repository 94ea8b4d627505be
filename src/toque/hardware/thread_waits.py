"""Thread waits: how long OpenMP threads spin while they wait for each other, before they sleep.

A spinning thread responds fastest on an idle machine. Next to a busy program it takes the core from
the thread that it waits for. The limits here are for an idle machine. `short_waits` lowers the
limit of GNU's OpenMP while other programs compute (lab/performance.md, "Threads that wait").
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Final

WAIT_VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that set how threads wait; OpenMP reads them once, when torch is loaded."""
PASSIVE: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment variables with which waiting threads sleep."""
BOUNDED: Final = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "1"}
"""Spin limits: rounds per thread for GNU's OpenMP (its default), and milliseconds per thread for
LLVM's and Intel's OpenMP. PyTorch's Linux wheels bundle GNU's."""


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set `BOUNDED`, unless the user set one of `WAIT_VARIABLES`. Child processes inherit it.

    Call it before torch is loaded. Later it has no effect on this process.
    """
    if not any(name in environment for name in WAIT_VARIABLES):
        environment.update(BOUNDED)


def waits_in(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of `WAIT_VARIABLES` that are set, by name."""
    return {name: environment[name] for name in WAIT_VARIABLES if name in environment}


def chosen_by_user(waits: Mapping[str, object]) -> bool:
    """True if the variables from `waits_in` differ from `BOUNDED`."""
    return bool(waits) and waits != BOUNDED
