"""Launcher: which rank this process is, and a supervisor of the ranks that one machine starts.

Every rank is the same command, told which one it is by the variables of `torchrun`, which starts
ranks over several machines. It is not used on one: it ends every rank as soon as one has left, and
so cuts off a rank that still saves or says why, starts again after errors that would only repeat,
and ends with 1 whatever the ranks' exit codes were. Torch is loaded only where ranks are started.
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
"""Environment variable of a rank: the process of the launcher that started it."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_AGREED: Final = {0, Interrupted.exit_code}  # exit codes of ranks that left together
_FINAL: Final = {*range(ConfigError.exit_code, NonFiniteError.exit_code + 1)}
"""Exit codes of errors that another attempt would only repeat."""
_END_SECONDS: Final = 30
"""Seconds from one rank's failure until the others, which mostly notice and say so, are killed."""
_LOOK_SECONDS: Final = 0.1


def launch(command: Sequence[str], *, gpus: int, restarts: int, say: Callable[[str], None]) -> int:
    """Start the ranks, wait until they have ended, and start them again after a loss.

    The exit code is what the ranks agree on, or that of the first that failed; RankLost if they
    were killed, and none is left to say so.
    """
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

    refuse_impossible(gpus, restarts)
    environment = environment_of(gpus)
    count, each = f"{gpus} process{'es' if gpus > 1 else ''}", environment["OMP_NUM_THREADS"]
    on_cpu = f" on the CPU, as this machine has no CUDA device (OMP_NUM_THREADS={each} each)"
    say(f"{count}, one a GPU" if torch.cuda.is_available() else count + on_cpu)
    # The ranks meet, and tell of their ends, at a store that outlives each of them.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = LaunchedRanks(command, environment | {"MASTER_PORT": str(store.port)}, gpus)
    with ranks.passing_signals_on():
        ranks.run(0)
        for restart in range(1, restarts + 1):
            if not ranks.may_start_again:
                break
            if killed := ranks.killed():
                say(f"{killed}, out of memory perhaps")
            say(f"starting again from the newest checkpoint: restart {restart} of {restarts}")
            ranks.run(restart)
    return ranks.exit_code()


def refuse_impossible(gpus: int, restarts: int) -> None:
    """Refuse numbers of processes below their least, and more than this machine has GPUs."""
    import torch

    if gpus < 1 or restarts < 0:
        raise ConfigError(
            f"{argument(f'gpus={gpus}')} and {argument(f'restarts={restarts}')} cannot be: GPUs "
            "are counted from 1, restarts from 0."
        )
    found = torch.cuda.device_count()
    if 0 < found < gpus:
        raise ConfigError(
            f"{argument('gpus')} is {gpus}, and this machine has {found} CUDA device"
            f"{'s' if found > 1 else ''} (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); each process needs one of "
            f"its own. Give {argument(f'gpus={found}')} or fewer."
        )


def environment_of(gpus: int) -> dict[str, str]:
    """Environment that all ranks share; the machine's cores are divided unless the user has."""
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
    """The processes of the ranks: started together, watched, and told of signals."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], count: int) -> None:
        self._command, self._environment, self._count = command, environment, count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        """Exit codes by rank, in the order in which they ended; a signal's is negative."""
        self._given_up: set[int] = set()
        self._signal: signal.Signals | None = None  # the last that was passed on

    def run(self, restart: int) -> None:
        """Start all ranks and wait for their ends; `restart` counts the attempts before."""
        self._codes, self._given_up, self._processes = {}, set(), []
        try:
            for rank in range(self._count):
                own = {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": restart}
                environment = {**self._environment, **{name: str(own[name]) for name in own}}
                # In the launcher's own process group: Ctrl-Z stops all of them.
                started = subprocess.Popen(self._command, env=environment)  # noqa: S603 - our own
                self._processes.append(started)
            if self._signal is not None:  # it came while they started
                self._pass_on(self._signal, None)
            deadline = math.inf
            while len(self._codes) < self._count:
                time.sleep(_LOOK_SECONDS)
                for rank, process in enumerate(self._processes):
                    if rank not in self._codes and (code := process.poll()) is not None:
                        self._codes[rank] = code
                        if code not in _AGREED:
                            deadline = min(deadline, time.monotonic() + _END_SECONDS)
                    elif rank not in self._codes and time.monotonic() > deadline:
                        self._given_up.add(rank)
                        process.kill()
        finally:
            for process in self._processes:
                process.kill()

    @property
    def may_start_again(self) -> bool:
        """True after a loss that another attempt may mend, unless somebody asked for the end."""
        codes = set(self._codes.values())
        return not codes <= _AGREED and not codes & _FINAL and self._signal is None

    def killed(self) -> str:
        """Ranks that somebody else ended by a signal, in words, unless a rank has said so."""
        if any(code > 0 and code not in _AGREED for code in self._codes.values()):
            return ""
        return "; ".join(
            f"Rank {rank} (process {self._processes[rank].pid} on {socket.gethostname()}) was "
            f"killed by {signal.Signals(-code).name}"
            for rank, code in self._codes.items()
            if code < 0 and rank not in self._given_up
        )

    def exit_code(self) -> int:
        """The command's exit code; RankLost if ranks were killed, and none was left to say so."""
        codes = [code for code in self._codes.values() if code != 0]
        if final := [code for code in codes if code in _FINAL]:
            return final[0]
        if killed := self.killed():
            if self._signal is not None:
                return 128 + self._signal  # the shell's convention
            raise RankLost(
                f"{killed}, out of memory perhaps: `dmesg` tells. All ranks stop, and the last "
                "checkpoint stands. The same command continues from it."
            )
        lost = [code for code in codes if code > 0 and code != Interrupted.exit_code]
        return lost[0] if lost else (Interrupted.exit_code if codes else 0)

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """While inside, signals go to the ranks; only the main thread can see to that."""
        before: dict[signal.Signals, Any] = {}
        with contextlib.suppress(ValueError):  # another thread
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._pass_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _pass_on(self, number: int, frame: object) -> None:
        self._signal = signal.Signals(number)
        for process in self._processes:
            process.send_signal(number)  # does nothing once the process has ended


def is_launched() -> bool:
    """True if our own launcher started this process."""
    return LAUNCHER_VARIABLE in os.environ


def follow_launcher() -> None:
    """Ask Linux for SIGTERM when the launcher is gone: no rank trains on unseen."""
    if os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
