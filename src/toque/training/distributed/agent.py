"""Agent of one machine: torch's elastic agent over plain processes, with Toque's exit codes.

Torch's `SimpleElasticAgent` meets the other machines, watches the processes and starts all of them
again after a loss. Its `LocalElasticAgent` is not used: it ends every rank as soon as one has
left, and so cuts off a rank that still saves or says why, and starts again after a signal or an
error that would only repeat.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from toque.errors import ConfigError, Interrupted, NonFiniteError, RankLost
from toque.training.distributed.meeting import Meeting

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Passed on to the ranks, which finish the step, save and leave."""
AGREED: Final = {0, Interrupted.exit_code}
"""Exit codes of ranks that left together."""
FINAL: Final = {*range(ConfigError.exit_code, NonFiniteError.exit_code + 1)}
"""Exit codes of errors that another attempt would only repeat."""
_END_SECONDS: Final = 30
"""Seconds from one rank's failure until the others, which mostly notice and say so, are killed; and
from a request to stop. As many as torch's agents take."""
_OTHERS_SECONDS: Final = 60.0
"""Seconds for the other machines' ranks to end, once those of this one have finished well."""


class Agent(SimpleElasticAgent):
    """Starts the ranks of one machine, watches them, and starts them again after a loss.

    Args:
        meeting: of all machines.
        command: program and arguments of every rank.
        environment: of every rank; what tells them apart is added.
        processes: how many there are on this machine.
        restarts: how often they are started again.
        say: takes a sentence for whoever watches.
    """

    def __init__(
        self,
        meeting: Meeting,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        processes: int,
        restarts: int,
        say: Callable[[str], None],
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=processes,
            rdzv_handler=meeting.handler,
            entrypoint=command[0],
            max_restarts=restarts,
        )
        super().__init__(spec, _OTHERS_SECONDS, _END_SECONDS)
        self._meeting, self._command, self._environment = meeting, command, environment
        self._say = say
        self._round = 0
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._failed_at: float | None = None
        self._given_up: set[int] = set()
        self.codes: dict[int, int] = {}
        """Exit codes by rank, in the order in which they ended; a signal's is negative."""
        self.signal: signal.Signals | None = None
        """The last one that was passed on."""

    @property
    def restarts_left(self) -> int:
        """Number of times that the ranks may still be started again."""
        return int(self._remaining_restarts)

    def killed(self) -> str:
        """Ranks that somebody else ended by a signal, in words.

        Empty where there are none, or where a rank was left that has said so.
        """
        if any(code > 0 and code not in AGREED for code in self.codes.values()):
            return ""
        return "; ".join(
            f"Rank {rank} (process {self._ranks[rank].pid} on {self._meeting.name}) was killed by "
            f"{signal.Signals(-code).name}"
            for rank, code in self.codes.items()
            if code < 0 and rank not in self._given_up
        )

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """While inside, signals go to the ranks; only the main thread can see to that."""
        before: dict[signal.Signals, Any] = {}
        with contextlib.suppress(ValueError):  # another thread
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._pass_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _pass_on(self, number: int, frame: object) -> None:
        self.signal = signal.Signals(number)
        alive = self._alive()
        for process in alive:
            process.send_signal(number)
        done = self._ranks and all(rank.poll() in AGREED for rank in self._ranks.values())
        if not alive and not done:
            raise SignalException(f"{self.signal.name} between two attempts", self.signal)

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._ranks.values() if process.poll() is None]

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meeting.come()
        try:
            super()._rendezvous(worker_group)
        except RendezvousTimeoutError as error:
            raise self._meeting.missing() from error

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        place, self._round = self._meeting.place(store, group_rank)
        workers: list[Worker] = super()._assign_worker_ranks(store, place, group_world_size, spec)
        return workers

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._failed_at, self._given_up, self.codes, self._ranks = None, set(), {}, {}
        for worker in worker_group.workers:
            own = {
                "RANK": worker.global_rank,
                "LOCAL_RANK": worker.local_rank,
                "WORLD_SIZE": worker.world_size,
                "LOCAL_WORLD_SIZE": len(worker_group.workers),
                # The ranks meet at the launchers' store, each round in a room of its own.
                "MASTER_ADDR": self._meeting.host,
                "MASTER_PORT": self._meeting.store.port,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": self._round,
            }
            environment = {**self._environment, **{name: str(own[name]) for name in own}}
            # In the launcher's own process group: Ctrl-Z stops all of them.
            started = subprocess.Popen(self._command, env=environment)  # noqa: S603 - our own
            self._ranks[worker.global_rank] = started
        return {w.local_rank: self._ranks[w.global_rank].pid for w in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for rank, process in self._ranks.items():
            if rank not in self.codes and (code := process.poll()) is not None:
                self.codes[rank] = code
        failed = [code for code in self.codes.values() if code not in AGREED]
        if failed and self._failed_at is None:
            self._failed_at = time.monotonic()
        if len(self.codes) < len(self._ranks):
            if self._failed_at and time.monotonic() - self._failed_at > _END_SECONDS:
                for rank, process in self._ranks.items():
                    if process.poll() is None:
                        self._given_up.add(rank)
                        process.kill()
            return RunResult(WorkerState.HEALTHY)
        if not failed:
            return RunResult(WorkerState.SUCCEEDED, return_values=dict(self.codes))
        if self.signal is not None or FINAL & set(failed):
            self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._failed_at is not None:
            if told := self.killed():
                self._say(f"{told}, out of memory perhaps")
            total = self._worker_group.spec.max_restarts
            self._say(
                f"starting again from the newest checkpoint: restart "
                f"{total - self.restarts_left} of {total}"
            )
        elif self._meeting.nodes > 1:
            self._say("another machine starts again: stopping, to continue together with it")
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=_END_SECONDS)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _END_SECONDS
    ) -> None:
        for process in self._alive():
            process.send_signal(death_sig)
        deadline = time.monotonic() + timeout
        for process in self._ranks.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ending(agent: Agent) -> int:
    """The exit code of a command whose ranks have ended.

    Raises:
        RankLost: ranks were killed, and none was left to say so.
    """
    codes = [code for code in agent.codes.values() if code != 0]
    if final := [code for code in codes if code in FINAL]:
        return final[0]
    if told := agent.killed():
        if agent.signal is not None:
            return 128 + agent.signal  # the shell's convention
        raise RankLost(
            f"{told}, out of memory perhaps: `dmesg` tells. All ranks stop, and the last "
            "checkpoint stands. The same command continues from it."
        )
    lost = [code for code in codes if code > 0 and code != Interrupted.exit_code]
    return lost[0] if lost else (Interrupted.exit_code if codes else 0)
