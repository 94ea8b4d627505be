"""Commands in several processes: the start of ranks, and checks that do not need torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final, NoReturn

from toque.errors import ConfigError, Interrupted, ToqueError
from toque.reporter import Reporter
from toque.training.distributed.launcher import is_launched

COMMAND: Final[ContextVar[Sequence[str]]] = ContextVar(
    "command line without the program"
)
"""Arguments of the current command. The launcher starts every rank with the same arguments."""
RESTARTS: Final = 3
"""Default number of restarts after a lost process, as in torchrun's examples. A restart costs only
time, because a resumed run is bitwise identical."""


def is_rank() -> bool:
    """Check whether this process is one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_first_rank() -> bool:
    """Check whether this process prints for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def starts_ranks(gpus: int | None) -> bool:
    """Check whether this process starts the ranks."""
    return gpus is not None and not is_launched()


def check_rank_flags(gpus: int | None, restarts: int | None) -> None:
    """Check --gpus and --restarts.

    Raises:
        ConfigError: --restarts without --gpus, or --gpus in a rank that torchrun started.
    """
    if gpus is None and restarts is not None:
        raise ConfigError(
            "--restarts needs --gpus, the number of processes to start. Add --gpus, or leave "
            "--restarts out."
        )
    if starts_ranks(gpus) and is_rank():
        raise ConfigError(
            f"--gpus {gpus} starts processes, but this process is already one of "
            f"{os.environ['WORLD_SIZE']} (WORLD_SIZE). Leave --gpus out, or start `toque train` "
            "without torchrun."
        )


def start_ranks(gpus: int, restarts: int | None, reporter: Reporter) -> int:
    """Start this command once per GPU, and return the exit code of the run."""
    from toque.training.distributed.launcher import launch

    command = [sys.executable, "-m", "toque", *COMMAND.get()]
    restarts = RESTARTS if restarts is None else restarts
    return launch(command, gpus=gpus, restarts=restarts, say=reporter.notice)


def verb_of(words: Sequence[str]) -> str:
    """Return the command's name, or "" without a command.

    >>> verb_of(["train", "my.yaml"])
    'train'
    """
    return next((word for word in words if not word.startswith("-")), "")


def refuse_repeating(words: Sequence[str]) -> None:
    """Check that several processes do not all do the same work.

    Raises:
        ConfigError: srun or torchrun started several processes of a command that does not share
            its work.
    """
    verb = verb_of(words)
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    is_slurm_task = "SLURM_PROCID" in os.environ and tasks != "1"
    if verb == "train" and is_slurm_task and not is_rank():
        raise ConfigError(
            f"srun started `toque train` {tasks} times, and each process would train alone, "
            "because Toque does not read Slurm's variables. Start one torchrun per machine, as in "
            "examples/cluster/slurm.sh: srun --ntasks-per-node=1 torchrun ... -m toque train "
            "CONFIG."
        )
    if is_rank() and verb and verb != "train":
        raise ConfigError(
            f"`toque {verb}` was started as {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), but "
            "only `toque train` supports multiple processes. Start it without torchrun or "
            "accelerate, or unset WORLD_SIZE."
        )


def prints_error(error: ToqueError) -> bool:
    """Check whether this process prints its error.

    Before the process group exists, all ranks usually fail with the same error. Then only one rank
    per machine prints it.
    """
    if isinstance(error, Interrupted):
        return is_first_rank()
    if error.said_by_another:
        return False
    has_group = "toque.training.distributed.process_group" in sys.modules
    is_first_on_machine = os.environ.get("LOCAL_RANK", "0") == "0"
    return has_group or is_first_on_machine


def exit_immediately(code: int) -> NoReturn:
    """Exit without the interpreter's shutdown, during which gloo's threads may abort."""
    os._exit(code)  # the streams are already flushed


def is_secret(word: str) -> bool:
    """Check whether an override contains a webhook's address, with which anyone can post there.

    >>> [is_secret(f"observe.webhook={w}") for w in ("https://x/token", "env:HOOK", "null")]
    [True, False, False]
    """
    name, _, value = (part.strip() for part in word.partition("="))
    if name == "observe" and "webhook" in value:  # observe={webhook: ...}
        return "://" in value or "env:" not in value
    is_public = value.startswith("env:") or value in ("", "null")
    return name == "observe.webhook" and not is_public


def without_secrets(words: Sequence[str]) -> list[str]:
    """Hide webhook addresses in the words of a command.

    >>> without_secrets(["train", "my.yaml", "observe.webhook=https://x/token", "seed=1"])
    ['train', 'my.yaml', 'observe.webhook=...', 'seed=1']
    """
    return [
        word.partition("=")[0] + "=..." if is_secret(word) else word for word in words
    ]
