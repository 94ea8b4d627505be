"""Surroundings of a rank: what started it, seen without torch.

`torchrun`, `accelerate launch` and our own launcher say in WORLD_SIZE, RANK and the like which
process is which. srun says it in its own variables, which are translated here.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import Final

LAUNCHER_VARIABLE: Final = "TOQUE_LAUNCHER"
"""Environment variable of a rank: the process of the launcher that started it."""
_PARENT_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of linux/prctl.h."""
_FIRST_PORT: Final = 15_000
_PORTS: Final = 15_000
"""Ports that ranks under srun may meet at: below those that Linux gives to outgoing connections."""

_TASKS_EACH: Final = re.compile(r"(\d{1,9}+)(?:\(x\d{1,9}+\))?\Z")
_FIRST_HOST: Final = re.compile(r"(?:\[[^]\[]*+\]|[^,\[])*+")
_HOST_NUMBERS: Final = re.compile(r"\[(\w{1,32}+)[^]\[]*+\]")


def is_launched() -> bool:
    """True if our own launcher started this process."""
    return LAUNCHER_VARIABLE in os.environ


def follow_launcher() -> None:
    """Ask for SIGTERM when the launcher is gone: no rank trains on unseen, holding the folder.

    Only Linux has that.
    """
    if os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def ranks_of_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch wants, for a process that srun started as one of several.

    Empty where something else has named the ranks already, and outside of srun: a batch script
    has the variables of its job, but is no step of it.

    >>> ranks_of_srun({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    ...                "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "5"})["MASTER_ADDR"]
    'gpu07'
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or "SLURM_PROCID" not in environ or "WORLD_SIZE" in environ:
        return {}
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    found = {
        "WORLD_SIZE": tasks,
        "RANK": environ["SLURM_PROCID"],
        # A task that sees its own GPU alone has it under the number 0.
        "LOCAL_RANK": "0" if "SLURM_GPUS_PER_TASK" in environ else environ["SLURM_LOCALID"],
        "MASTER_ADDR": first_host(environ.get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": str(_FIRST_PORT + (31 * int(job) + int(step)) % _PORTS),
    }
    each = _TASKS_EACH.match(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if each is not None:  # as many on every machine
        found["LOCAL_WORLD_SIZE"] = each[1]
    return {name: value for name, value in found.items() if name not in environ}


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts.

    >>> first_host("gpu[07-09,12],fat1"), first_host("r[1-2]n[3,5]"), first_host("a,b")
    ('gpu07', 'r1n3', 'a')
    """
    first = _FIRST_HOST.match(nodes)
    assert first is not None
    return _HOST_NUMBERS.sub(r"\1", first[0])
