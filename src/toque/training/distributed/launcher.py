"""Launcher: starts and supervises the ranks on one machine.

Every rank runs the same command, with the environment variables that `torchrun` would set. For
several machines, use `torchrun`. On one machine, this launcher replaces it for three reasons.
`torchrun` kills all ranks when one ends, even a rank that is saving. It also restarts after errors
that a retry does not fix, and its exit code is always 1. Torch is imported only when ranks start.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from toque.errors import ConfigError, Interrupted, NonFiniteError, RankLost, argument
from toque.hardware.processor import usable_cores
from toque.training.signal_handlers import handling_signals

LAUNCHER_VARIABLE: Final = "TOQUE_LAUNCHER"
"""Environment variable with the process id of a rank's launcher."""
_REGULAR_CODES: Final = {0, Interrupted.exit_code}
"""Exit codes of a rank that did not fail. The other ranks end soon with the same code."""
_NO_RETRY_CODES: Final = {*range(ConfigError.exit_code, NonFiniteError.exit_code + 1)}
"""Exit codes of errors that a retry would not fix."""
_GRACE_SECONDS: Final = 30
"""Seconds from the failure of a rank until the remaining ranks are killed."""
_POLL_SECONDS: Final = 0.1


def launch(
    command: Sequence[str], *, gpus: int, restarts: int, say: Callable[[str], None]
) -> int:
    """Start the ranks, wait for them, and restart all of them if one is lost.

    Args:
        command: Command that every rank runs.
        gpus: Number of ranks.
        restarts: Maximum number of restarts.
        say: Function that prints a message.

    Returns:
        The common exit code, or the code of the first failed rank.

    Raises:
        ConfigError: `gpus` or `restarts` is impossible.
        RankLost: Ranks were killed, and no rank has reported it.
    """
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

    refuse_impossible(gpus, restarts)
    environment = environment_of(gpus)
    processes = "1 process" if gpus == 1 else f"{gpus} processes"
    if torch.cuda.is_available():
        say(f"{processes}, one per GPU")
    else:
        threads = environment["OMP_NUM_THREADS"]
        say(
            f"{processes} on the CPU, as this machine has no CUDA device (OMP_NUM_THREADS="
            f"{threads} each)"
        )

    # The store connects the ranks and records how they ended. It outlives each of them.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment["MASTER_PORT"] = str(store.port)
    ranks = LaunchedRanks(command, environment, gpus)
    with handling_signals(ranks.forward_signal):
        ranks.run_attempt(0)
        for restart in range(1, restarts + 1):
            if not ranks.may_restart:
                break
            if message := ranks.describe_killed():
                say(f"{message}, out of memory perhaps")
            say(
                f"starting again from the newest checkpoint: restart {restart} of {restarts}"
            )
            ranks.run_attempt(restart)
    return ranks.exit_code()


def refuse_impossible(gpus: int, restarts: int) -> None:
    """Refuse negative numbers, and more processes than this machine has GPUs.

    Raises:
        ConfigError: `gpus` or `restarts` is impossible.
    """
    import torch

    if gpus < 1:
        raise ConfigError(f"{argument('gpus')} must be at least 1, not {gpus}.")
    if restarts < 0:
        raise ConfigError(f"{argument('restarts')} must be at least 0, not {restarts}.")
    n_devices = torch.cuda.device_count()
    if 0 < n_devices < gpus:
        raise ConfigError(
            f"{argument('gpus')} must be at most {n_devices}, the number of CUDA devices on this "
            f"machine, not {gpus}. Each process needs a device (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})."
        )


def environment_of(gpus: int) -> dict[str, str]:
    """Return the environment of all ranks. By default, the ranks share the cores equally."""
    threads = max(1, len(usable_cores()) // gpus)
    ranks = {
        "WORLD_SIZE": str(gpus),
        "LOCAL_WORLD_SIZE": str(gpus),
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **ranks}


class LaunchedRanks:
    """Processes of the ranks, which are started together and receive the launcher's signals."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], count: int
    ) -> None:
        self._command = command
        self._environment = environment
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        """Exit codes by rank, in the order in which the ranks ended. Negative after a signal.
        """
        self._killed_late: set[int] = set()
        """Ranks that the launcher killed after the grace period."""
        self._signal: signal.Signals | None = None
        """Last signal that was forwarded."""

    def run_attempt(self, restart: int) -> None:
        """Start all ranks and wait until they end. `restart` is the number of earlier attempts."""
        self._codes.clear()
        self._killed_late.clear()
        self._processes.clear()
        try:
            for rank in range(self._count):
                self._start(rank, restart)
            if self._signal is not None:  # received while the ranks started
                self.forward_signal(self._signal, None)
            self._wait()
        finally:
            for process in self._processes:
                process.kill()

    def _start(self, rank: int, restart: int) -> None:
        """Start the process of a rank."""
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "TORCHELASTIC_RESTART_COUNT": str(restart),
        }
        # The rank stays in the launcher's process group, so that Ctrl-Z also suspends it.
        process = subprocess.Popen(  # noqa: S603
            self._command, env={**self._environment, **variables}
        )
        self._processes.append(process)

    def _wait(self) -> None:
        """Wait until all ranks end. If a rank fails, kill the remaining ranks after some time."""
        deadline = math.inf
        while len(self._codes) < self._count:
            time.sleep(_POLL_SECONDS)
            for rank, process in enumerate(self._processes):
                code = process.poll()
                if code is None and time.monotonic() > deadline:
                    self._killed_late.add(rank)
                    process.kill()
                elif code is not None and rank not in self._codes:
                    self._codes[rank] = code
            if not _REGULAR_CODES.issuperset(self._codes.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)

    @property
    def may_restart(self) -> bool:
        """True if another attempt may succeed, and no signal has ended this one."""
        codes = set(self._codes.values())
        if codes <= _REGULAR_CODES or codes & _NO_RETRY_CODES:
            return False
        return self._signal is None

    def describe_killed(self) -> str:
        """List the ranks that another process killed. Return "" if a rank reported an error."""
        codes = self._codes.values()
        if any(code > 0 and code not in _REGULAR_CODES for code in codes):
            return ""
        return "; ".join(
            f"Rank {rank} (process {self._processes[rank].pid} on {socket.gethostname()}) was "
            f"killed by {signal.Signals(-code).name}"
            for rank, code in self._codes.items()
            if code < 0 and rank not in self._killed_late
        )

    def exit_code(self) -> int:
        """Choose the exit code of the command from the exit codes of the ranks.

        Raises:
            RankLost: Ranks were killed, and no rank has reported it.
        """
        codes = [code for code in self._codes.values() if code != 0]
        # An error that a retry does not fix is the cause of all other ends.
        for code in codes:
            if code in _NO_RETRY_CODES:
                return code
        if message := self.describe_killed():
            if self._signal is not None:
                return 128 + self._signal  # the shell's convention
            raise RankLost(
                f"{message}, possibly because memory ran out (see `dmesg`). All ranks stop. The "
                "last checkpoint is intact, and the same command continues from it."
            )
        # Ranks that were interrupted, or killed by the launcher, do not have the cause.
        for code in codes:
            if code > 0 and code != Interrupted.exit_code:
                return code
        return Interrupted.exit_code if codes else 0

    def forward_signal(self, number: int, frame: object) -> None:
        """Send a signal to all ranks. This is a signal handler."""
        self._signal = signal.Signals(number)
        for process in self._processes:
            process.send_signal(number)  # has no effect after the process has ended


def is_launched() -> bool:
    """Check whether Toque's launcher started this process."""
    return LAUNCHER_VARIABLE in os.environ


def follow_launcher() -> None:
    """Make Linux send SIGTERM to this rank when its launcher ends, so that no rank is orphaned."""
    is_child = os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())
    if is_child and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
