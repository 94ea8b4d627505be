"""Launched processes: their command line, and torchrun's siblings, seen without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Final, NoReturn

from toque.errors import ConfigError, Interrupted, ToqueError
from toque.training.distributed.surroundings import (
    follow_launcher,
    is_launched,
    ranks_of_srun,
)

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


def look_around(words: Sequence[str]) -> None:
    """Find out which of several processes this is, before anything asks."""
    COMMAND.set(words)
    follow_launcher()
    if not any(word.partition("=")[0] == "--gpus" for word in words):  # a launcher has no rank
        os.environ.update(ranks_of_srun(os.environ))


@dataclass(frozen=True)
class Launching:
    """The processes that share a run, as the command line names them; all None without any."""

    gpus: int | None
    nodes: int | None
    rendezvous: str | None
    restarts: int | None

    @property
    def is_asked(self) -> bool:
        """True if this process is to start the ranks, and is none itself.

        Raises:
            ConfigError: it is one already, or the number of GPUs is missing beside the rest.
        """
        if self.gpus is None and self != Launching(None, None, None, None):
            raise ConfigError(
                "--nodes, --rendezvous and --restarts are about processes that `toque train` "
                "starts, and --gpus, which says how many on each machine, is missing. Add it, or "
                "leave these out."
            )
        if self.gpus is None or is_launched():
            return False
        if one_of_several():
            raise ConfigError(
                f"--gpus {self.gpus} starts processes, and this is one of "
                f"{os.environ['WORLD_SIZE']} already (WORLD_SIZE). Leave --gpus out, or start "
                "`toque train` without torchrun."
            )
        return True

    @property
    def prepares_first(self) -> bool:
        """True if an absent store is made before ranks are; of several machines, rank 0 does."""
        return self.nodes in (None, 1)

    @property
    def flags(self) -> list[str]:
        """The flags as words of a command line."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return [word for name in given for word in (f"--{name}", str(given[name]))]

    def start(self, say: Callable[[str], None]) -> int:
        """Start this very command once a GPU, and return the exit code that they agree on.

        Raises:
            ConfigError: machines that cannot be.
            RankLost: a process or a machine is missing.
        """
        from toque.training.distributed.launcher import Machines, launch

        assert self.gpus is not None
        machines = Machines(
            gpus=self.gpus,
            nodes=1 if self.nodes is None else self.nodes,
            rendezvous=self.rendezvous,
            restarts=RESTARTS if self.restarts is None else self.restarts,
        )
        return launch(machines, [sys.executable, "-m", "toque", *COMMAND.get()], say=say)


def verb_of(words: Sequence[str]) -> str:
    """The command's name; empty where there is none.

    >>> verb_of(["train", "my.yaml"])
    'train'
    """
    return next((word for word in words if not word.startswith("-")), "")


def refuse_repeating(words: Sequence[str]) -> None:
    """Refuse to do the same work in every process.

    Raises:
        ConfigError: the command is not one that several processes share.
    """
    verb = verb_of(words)
    if one_of_several() and verb and verb not in SHARED_VERBS:
        raise ConfigError(
            f"`toque {verb}` was started as one of {os.environ['WORLD_SIZE']} processes "
            "(WORLD_SIZE), and only `toque train` shares its work between them: each would do all "
            "of it. Start it without torchrun or accelerate, or unset WORLD_SIZE."
        )


def speaks(error: ToqueError) -> bool:
    """True if this process prints an error that ends it.

    Before the ranks have met each fails for itself, and mostly for the same reason: then one on
    each machine speaks.
    """
    if isinstance(error, Interrupted):
        return os.environ.get("RANK", "0") == "0"
    met = "toque.training.distributed.process_group" in sys.modules
    return not error.said_by_another and (met or os.environ.get("LOCAL_RANK", "0") == "0")


def leave(code: int) -> NoReturn:
    """End the process at once.

    Threads of gloo may abort an interpreter that is shutting down, long after everything is done
    and saved (measured: 1 exit in 8), which would turn success into failure.
    """
    os._exit(code)  # the streams are flushed already


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command line with the address of a webhook left out.

    >>> without_secrets(["train", "my.yaml", "observe.webhook=https://x/token", "seed=1"])
    ['train', 'my.yaml', 'observe.webhook=...', 'seed=1']
    """
    return [w.partition("=")[0] + "=..." if "webhook" in w and "=" in w else w for w in words]
