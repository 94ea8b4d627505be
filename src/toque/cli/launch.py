"""Launched processes: their command line, and torchrun's siblings, seen without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Final, NoReturn

from toque.errors import ConfigError, Interrupted, ToqueError
from toque.training.distributed.launcher import is_launched

COMMAND: Final[ContextVar[Sequence[str]]] = ContextVar("words of the command that runs")
"""Every rank that the launcher starts is given the same ones."""
RESTARTS: Final = 3
"""Number of times that a run starts again by itself when it lost a process; as many as torchrun's
own examples have. A resumed run is the same run to the bit, so nothing but time is at stake."""
SHARED_VERBS = ("train",)
"""Commands whose work is shared; the others would do it once in each process."""


def one_of_several() -> bool:
    """True if this process has siblings."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def starts_ranks(gpus: int | None, restarts: int | None) -> bool:
    """True if this process is to start the ranks; refuses --gpus in one, --restarts alone."""
    if gpus is None and restarts is not None:
        raise ConfigError(
            "--restarts is about processes that `toque train` starts, and --gpus, which says how "
            "many, is missing. Add it, or leave --restarts out."
        )
    if gpus is None or is_launched():
        return False
    if one_of_several():
        raise ConfigError(
            f"--gpus {gpus} starts processes, and this is one of {os.environ['WORLD_SIZE']} "
            "already (WORLD_SIZE). Leave --gpus out, or start `toque train` without torchrun."
        )
    return True


def start_ranks(gpus: int, restarts: int | None, say: Callable[[str], None]) -> int:
    """Start this very command once a GPU, and return the exit code that they agree on."""
    from toque.training.distributed.launcher import launch

    command = [sys.executable, "-m", "toque", *COMMAND.get()]
    return launch(command, gpus=gpus, restarts=RESTARTS if restarts is None else restarts, say=say)


def verb_of(words: Sequence[str]) -> str:
    """The command's name; empty where there is none.

    >>> verb_of(["train", "my.yaml"])
    'train'
    """
    return next((word for word in words if not word.startswith("-")), "")


def refuse_repeating(words: Sequence[str]) -> None:
    """Refuse to do the same work in every process."""
    verb = verb_of(words)
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if verb == "train" and "SLURM_PROCID" in os.environ and tasks != "1" and not one_of_several():
        raise ConfigError(
            f"srun started {tasks} of `toque train`, and each would train alone: Slurm's variables "
            "are not read. Start one torchrun on every machine: srun --ntasks-per-node=1 torchrun "
            "... -m toque train CONFIG, as examples/cluster/slurm.sh does."
        )
    if one_of_several() and verb and verb not in SHARED_VERBS:
        raise ConfigError(
            f"`toque {verb}` was started as one of {os.environ['WORLD_SIZE']} processes "
            "(WORLD_SIZE), and only `toque train` shares its work between them: each would do all "
            "of it. Start it without torchrun or accelerate, or unset WORLD_SIZE."
        )


def speaks(error: ToqueError) -> bool:
    """True if this process prints an error that ends it.

    Before the ranks have met, each fails for itself, mostly alike: one on each machine speaks.
    """
    if isinstance(error, Interrupted):
        return os.environ.get("RANK", "0") == "0"
    met = "toque.training.distributed.process_group" in sys.modules
    return not error.said_by_another and (met or os.environ.get("LOCAL_RANK", "0") == "0")


def leave(code: int) -> NoReturn:
    """End the process at once.

    Threads of gloo may abort an interpreter that shuts down with everything saved (1 exit in 8).
    """
    os._exit(code)  # the streams are flushed already


def is_secret(word: str) -> bool:
    """True for an override with the address of a webhook, which lets anyone write there.

    >>> [is_secret(f"observe.webhook={w}") for w in ("https://x/token", "env:HOOK", "null")]
    [True, False, False]
    """
    name, _, value = (part.strip() for part in word.partition("="))
    if name == "observe" and "webhook" in value:
        return "://" in value or "env:" not in value
    return name == "observe.webhook" and not (value.startswith("env:") or value in ("", "null"))


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command line with the address of a webhook left out.

    >>> without_secrets(["train", "my.yaml", "observe.webhook=https://x/token", "seed=1"])
    ['train', 'my.yaml', 'observe.webhook=...', 'seed=1']
    """
    return [w.partition("=")[0] + "=..." if is_secret(w) else w for w in words]
