"""Launcher: the processes of a run that is shared by GPUs, on this machine and on others.

Every process is the same command, told which rank it is; torch's elastic agent watches them
(`agent.py`) and brings machines together (`meeting.py`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
)

from toque.errors import ConfigError, RankLost, argument
from toque.hardware.processor import usable_cores
from toque.training.distributed.agent import Agent, ending
from toque.training.distributed.meeting import (
    Meeting,
    address_of,
    alone,
    interface_to,
    met,
    patience_seconds,
)
from toque.training.distributed.surroundings import LAUNCHER_VARIABLE

_HEARD_SECONDS: Final = 3
"""Seconds for the other machines to hear how the run ended, before the store goes with its host."""


@dataclass(frozen=True)
class Machines:
    """The processes that share a run.

    Args:
        gpus: processes on each machine, one a GPU; without a GPU they share the CPU.
        nodes: machines.
        rendezvous: HOST:PORT of the first of several machines.
        restarts: how often all start again from the newest checkpoint when one was lost.
    """

    gpus: int
    nodes: int
    rendezvous: str | None
    restarts: int

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ConfigError: counts below their least, several machines without an address or one
                with, or more GPUs than this machine has.
        """
        if self.gpus < 1 or self.nodes < 1 or self.restarts < 0:
            raise ConfigError(
                f"{argument(f'gpus={self.gpus}')}, {argument(f'nodes={self.nodes}')} and "
                f"{argument(f'restarts={self.restarts}')} cannot be: GPUs and machines are "
                "counted from 1, restarts from 0."
            )
        if (self.nodes > 1) != (self.rendezvous is not None):
            raise ConfigError(
                f"{argument('nodes')} is {self.nodes} and {argument('rendezvous')} "
                f"{self.rendezvous or 'is not given'}: several machines meet at the first one's "
                f"HOST:PORT, and one needs none. Give both, e.g. {argument('nodes=2')} "
                f"{argument('rendezvous=node-1:29400')}, or neither."
            )
        found = torch.cuda.device_count()
        if 0 < found < self.gpus:
            raise ConfigError(
                f"{argument('gpus')} is {self.gpus}, and this machine has {found} CUDA "
                f"device{'s' if found > 1 else ''} (CUDA_VISIBLE_DEVICES is "
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); each process needs one of "
                f"its own. Give {argument(f'gpus={found}')} or fewer."
            )


def launch(machines: Machines, command: Sequence[str], *, say: Callable[[str], None]) -> int:
    """Start the ranks of this machine, and wait until they have ended.

    Args:
        machines: how many processes, and where.
        command: program and arguments of every rank.
        say: takes a sentence for whoever watches.

    Returns:
        the exit code of the command: what the ranks agree on, or that of the first that failed.

    Raises:
        ConfigError: machines that do not fit each other.
        RankLost: machines did not come, or ranks were killed and no rank is left to say so.
    """
    if "LOGLEVEL" not in os.environ:  # torch's variable: what it names is logged as torch does
        elastic = logging.getLogger("torch.distributed.elastic")
        elastic.propagate = False
        elastic.addHandler(logging.NullHandler())
    environment = environment_of(machines)
    say(in_words(machines, environment))
    restarts = machines.restarts
    while True:
        meeting = _meeting(machines)
        agent = Agent(
            meeting,
            command=command,
            environment=environment,
            processes=machines.gpus,
            restarts=restarts,
            say=say,
        )
        try:
            return _ended(agent, meeting)
        except RendezvousConnectionError as error:
            if agent.restarts_left == 0 or agent.signal is not None:
                raise RankLost(
                    f"{meeting.host}:{meeting.store.port} cannot be reached any more: the command "
                    "there has ended, or the network is gone. All ranks stop, and the last "
                    "checkpoint stands. The same command on every machine continues from it."
                ) from error
            restarts = agent.restarts_left - 1
            say(f"{meeting.host} cannot be reached any more: trying for {meeting.patience} s")


def _ended(agent: Agent, meeting: Meeting) -> int:
    leaves = True
    try:
        with agent.passing_signals_on():
            agent.run()
        return ending(agent)
    except RendezvousConnectionError:
        leaves = False  # the others are to wait for this machine
        raise
    except RendezvousClosedError as error:
        raise RankLost(
            "The run was given up on another machine, whose message says why. All ranks stop, and "
            "the last checkpoint stands."
        ) from error
    except SignalException as error:
        return 128 + error.sigval  # the shell's convention
    finally:
        if leaves:
            meeting.handler.shutdown()
            time.sleep(_HEARD_SECONDS if meeting.is_host and meeting.nodes > 1 else 0)


def environment_of(machines: Machines) -> dict[str, str]:
    """Environment of every rank of this machine, without what tells it apart.

    The cores of the machine are divided between its ranks; over several machines gloo is told the
    network that leads to the first, as it would guess by the machine's name. Whatever is set
    already stays.
    """
    threads = max(1, len(usable_cores()) // machines.gpus)
    added = {"OMP_NUM_THREADS": str(threads)}
    if machines.rendezvous is not None:
        try:
            interface = interface_to(address_of(machines.rendezvous)[0])
        except OSError:  # not known yet; meeting there says so when it stays unknown
            interface = None
        if interface is not None:
            added["GLOO_SOCKET_IFNAME"] = interface
    return {**added, **os.environ, LAUNCHER_VARIABLE: str(os.getpid())}


def in_words(machines: Machines, environment: dict[str, str]) -> str:
    """A sentence about what is about to start."""
    count = f"{machines.gpus} process{'es' if machines.gpus > 1 else ''}"
    if torch.cuda.is_available():
        here = f"{count}, one a GPU"
    else:
        here = (
            f"{count} on the CPU, as this machine has no CUDA device "
            f"(OMP_NUM_THREADS={environment['OMP_NUM_THREADS']} each)"
        )
    if machines.nodes == 1:
        return here
    return f"{here}; waiting for {machines.nodes} machines at {machines.rendezvous}"


def _meeting(machines: Machines) -> Meeting:
    if machines.rendezvous is None:
        return alone()
    return met(machines.rendezvous, nodes=machines.nodes, patience=patience_seconds())
