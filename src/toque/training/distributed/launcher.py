"""Launcher: start and supervision of the ranks on one machine.

Every rank runs the same command. The environment variables of `torchrun` contain its number. Use
`torchrun` for several machines. On one machine this launcher replaces it for three reasons:
`torchrun` kills all ranks when one ends, even a rank that is saving. It also restarts after errors
that a retry does not fix, and its exit code is always 1. Torch is imported only when ranks start.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from toque.errors import ConfigError, Interrupted, NonFiniteError, RankLost, argument
from toque.hardware.processor import usable_cores

LAUNCHER_VARIABLE: Final = "TOQUE_LAUNCHER"
"""Environment variable of a rank: process id of its launcher."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_AGREED: Final = {0, Interrupted.exit_code}
"""Exit codes of ranks that end together."""
_FINAL: Final = {*range(ConfigError.exit_code, NonFiniteError.exit_code + 1)}
"""Exit codes of errors that a retry would not fix."""
_GRACE_SECONDS: Final = 30
"""Seconds from the failure of a rank until the remaining ranks are killed."""
_POLL_SECONDS: Final = 0.1


def launch(
    command: Sequence[str], *, gpus: int, restarts: int, say: Callable[[str], None]
) -> int:
    """Start the ranks, wait for them, and restart them after a loss.

    Returns:
        The common exit code, or the code of the first failed rank.

    Raises:
        ConfigError: `gpus` or `restarts` is impossible.
        RankLost: Ranks were killed, and no rank has reported it.
    """
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

    refuse_impossible(gpus, restarts)
    environment = environment_of(gpus)
    count = f"{gpus} process{'es' if gpus > 1 else ''}"
    if torch.cuda.is_available():
        say(f"{count}, one per GPU")
    else:
        threads = environment["OMP_NUM_THREADS"]
        say(
            f"{count} on the CPU, as this machine has no CUDA device (OMP_NUM_THREADS={threads} "
            "each)"
        )
    # The store connects the ranks and records how they ended. It outlives each of them.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = LaunchedRanks(command, environment | {"MASTER_PORT": str(store.port)}, gpus)
    with ranks.forwarding_signals():
        ranks.run(0)
        for restart in range(1, restarts + 1):
            if not ranks.may_restart:
                break
            if message := ranks.killed_ranks():
                say(f"{message}, out of memory perhaps")
            say(
                f"starting again from the newest checkpoint: restart {restart} of {restarts}"
            )
            ranks.run(restart)
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
    """Return the environment of all ranks. By default, it divides the machine's cores."""
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
        """Exit codes by rank, in the order in which the ranks ended. Negative for a signal."""
        self._killed_late: set[int] = set()
        """Ranks that the launcher killed after the grace period."""
        self._signal: signal.Signals | None = None
        """Last signal that was forwarded."""

    def run(self, restart: int) -> None:
        """Start all ranks and wait until they end. `restart` is the number of earlier attempts."""
        self._codes.clear()
        self._killed_late.clear()
        self._processes.clear()
        try:
            for rank in range(self._count):
                numbers = {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "TORCHELASTIC_RESTART_COUNT": restart,
                }
                variables = {name: str(number) for name, number in numbers.items()}
                # The ranks stay in the launcher's process group, so Ctrl-Z stops all of them.
                process = subprocess.Popen(  # noqa: S603
                    self._command, env={**self._environment, **variables}
                )
                self._processes.append(process)
            if self._signal is not None:  # received while the ranks started
                self._forward(self._signal, None)

            deadline = math.inf
            while len(self._codes) < self._count:
                time.sleep(_POLL_SECONDS)
                for rank, process in enumerate(self._processes):
                    if rank in self._codes:
                        continue
                    code = process.poll()
                    if code is not None:
                        self._codes[rank] = code
                        if code not in _AGREED:
                            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                    elif time.monotonic() > deadline:
                        self._killed_late.add(rank)
                        process.kill()
        finally:
            for process in self._processes:
                process.kill()

    @property
    def may_restart(self) -> bool:
        """True if another attempt may succeed, and no signal has ended this one."""
        codes = set(self._codes.values())
        return not codes <= _AGREED and not codes & _FINAL and self._signal is None

    def killed_ranks(self) -> str:
        """Describe ranks that another process has killed, or return "" if a rank reported it."""
        if any(code > 0 and code not in _AGREED for code in self._codes.values()):
            return ""
        return "; ".join(
            f"Rank {rank} (process {self._processes[rank].pid} on {socket.gethostname()}) was "
            f"killed by {signal.Signals(-code).name}"
            for rank, code in self._codes.items()
            if code < 0 and rank not in self._killed_late
        )

    def exit_code(self) -> int:
        """Compute the exit code of the command.

        Raises:
            RankLost: Ranks were killed, and no rank has reported it.
        """
        codes = [code for code in self._codes.values() if code != 0]
        for code in codes:
            if code in _FINAL:
                return code
        if message := self.killed_ranks():
            if self._signal is not None:
                return 128 + self._signal  # the shell's convention
            raise RankLost(
                f"{message}, out of memory perhaps (see `dmesg`). All ranks stop. The last "
                "checkpoint is intact, and the same command continues from it."
            )
        for code in codes:
            if code > 0 and code != Interrupted.exit_code:
                return code
        return Interrupted.exit_code if codes else 0

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Forward signals to the ranks. This works only in the main thread."""
        handlers: dict[signal.Signals, Any] = {}
        with contextlib.suppress(ValueError):  # another thread
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    handlers[number] = signal.signal(number, self._forward)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _forward(self, number: int, frame: object) -> None:
        self._signal = signal.Signals(number)
        for process in self._processes:
            process.send_signal(number)  # has no effect after the process has ended


def is_launched() -> bool:
    """Check whether Toque's launcher started this process."""
    return LAUNCHER_VARIABLE in os.environ


def follow_launcher() -> None:
    """Make Linux send SIGTERM to this rank when its launcher ends, so that no rank is orphaned."""
    if (
        os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())
        and sys.platform == "linux"
    ):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
