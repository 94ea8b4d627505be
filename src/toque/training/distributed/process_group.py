"""Process group of a run: join and leave it, compare the ranks, and wait for work of rank 0."""

from __future__ import annotations

import faulthandler
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from importlib import metadata
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroup,
    distributed_c10d,
    rendezvous,
)

from toque.errors import ConfigError, RankLost, argument
from toque.hardware.devices import device_named
from toque.training.distributed.collectives import RankFailures, Ranks
from toque.version import __version__

Strategy = Literal["auto", "single", "ddp", "fsdp"]
_START_COMMAND: Final = f"toque train CONFIG {argument('gpus=2')}"
HEARTBEAT_SECONDS = 10.0
"""Seconds between two messages from rank 0 while it works alone."""
TIMEOUT_VARIABLE: Final = "TOQUE_RANK_TIMEOUT"
"""Environment variable with the seconds that ranks wait for each other before the run fails.
"""
_TIMEOUT_SECONDS: Final = 1800
"""Default of the timeout. A rank may need this long to evaluate, generate texts and save."""
_CLOSED_GROUPS: Final[list[ProcessGroup]] = []
"""References to closed groups, so that their destructors run only when the process ends."""


@contextmanager
def join_ranks(*, strategy: Strategy) -> Iterator[Ranks]:
    """Join the ranks of the run, and leave them when the context ends.

    After an error this rank leaves immediately. Otherwise it waits for all ranks.

    Raises:
        ConfigError: The strategy does not fit the number of processes.
        RankLost: Another rank is missing.
    """
    world_size = _read_number("WORLD_SIZE", 1)
    rank = _read_number("RANK", 0)
    _refuse_wrong_world_size(strategy, world_size)
    if world_size == 1:
        device_named("auto")  # refuse an unusable device before anything starts
        yield Ranks()
        return

    ranks = _join(rank, world_size, _read_number(TIMEOUT_VARIABLE, _TIMEOUT_SECONDS))
    assert ranks.failures is not None
    try:
        yield ranks
        ranks.all_reduce_sum([0.0])  # leave only when no other rank needs this one
        # Keep the groups: a group's destructor waits for the group's thread, and this thread may
        # wait for the interpreter's lock, which the caller of the destructor has.
        _CLOSED_GROUPS.extend(distributed_c10d._world.pg_map)  # noqa: SLF001  # no public name
        dist.destroy_process_group()
        ranks.failures.leave()
    except BaseException as error:
        ranks.failures.report(error)
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def _refuse_wrong_world_size(strategy: Strategy, world_size: int) -> None:
    """Raise ConfigError if the strategy does not allow this number of processes."""
    if strategy == "single" and world_size > 1:
        raise ConfigError(
            f"train.strategy is single, but there are {world_size} processes (WORLD_SIZE). Start "
            "`toque train` without torchrun, or set train.strategy=auto."
        )
    # ddp also works with a single rank, but only if a launcher started it.
    is_lone_ddp = strategy == "ddp" and "WORLD_SIZE" not in os.environ
    if is_lone_ddp or (strategy == "fsdp" and world_size == 1):
        setting = os.environ.get("WORLD_SIZE", "not set")
        raise ConfigError(
            f"train.strategy is {strategy}, but there is only one process (WORLD_SIZE is "
            f"{setting}). `accelerate launch --cpu` starts one, whatever --num_processes is. Start "
            f"several with `{_START_COMMAND}`, or set train.strategy=auto."
        )


def _join(rank: int, world_size: int, timeout_seconds: float) -> Ranks:
    """Choose the device, and connect to all ranks."""
    local_rank = _read_number("LOCAL_RANK", rank)
    device = device_named("auto", local_rank=local_rank)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)

    timeout = timedelta(seconds=timeout_seconds)
    try:
        # Under torchrun this store belongs to torchrun, so it outlives this process.
        shared_store, _, _ = next(rendezvous("env://", timeout=timeout))
        # It also outlives a restart, so each attempt uses its own prefix.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"toque/{attempt}", shared_store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise RankLost(
            f"Rank {rank} of {world_size} cannot join the other ranks: "
            f"{str(error).splitlines()[0]}. Start all ranks together, e.g. `{_START_COMMAND}`. "
            "With several machines, set the same MASTER_ADDR and MASTER_PORT on all of them, and "
            "check that they can reach it."
        ) from error

    failures = RankFailures(
        PrefixStore("ranks", store), rank, world_size, timeout_seconds
    )
    failures.register()
    return Ranks(rank, world_size, local_rank, failures)


def _read_number(name: str, default: int) -> int:
    """Read a whole number from an environment variable."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(
            f"The environment variable {name} must be a whole number, not {text!r}. Unset it, or "
            f"start the run with a launcher that sets it: `{_START_COMMAND}`."
        )
    return int(text)


def run_on_main_rank(ranks: Ranks, work: Callable[[], None]) -> None:
    """Call `work` on rank 0 while all remaining ranks wait for it, without a timeout."""
    if not ranks.is_main:
        # Rank 0 broadcasts False as a heartbeat, and True at the end.
        while not ranks.broadcast():
            pass
        return
    done = threading.Event()

    def send_heartbeats() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            ranks.broadcast(False)

    with ThreadPoolExecutor(1, "toque-alive") as pool:
        heartbeats = pool.submit(send_heartbeats)
        try:
            work()
        finally:
            done.set()
    heartbeats.result()  # raises RankLost if another rank has ended
    ranks.broadcast(True)


def versions() -> dict[str, str]:
    """Return the versions of the software that affects numbers or file formats."""
    packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"toque": __version__, **packages, "python": platform.python_version()}


def refuse_different_ranks(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Check that all ranks have the same `facts`, e.g. versions.

    Raises:
        ConfigError: The facts differ. The message lists the values by host and rank.
    """
    gathered = ranks.all_gather((socket.gethostname(), dict(facts)))
    hosts = [host for host, _ in gathered]
    differences = []
    for name in facts:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, (_, rank_facts) in enumerate(gathered):
            value = rank_facts.get(name, "unknown")
            ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            values = [
                f"{value} on {_describe_hosts(value_ranks, hosts)}"
                for value, value_ranks in ranks_by_value.items()
            ]
            differences.append(f"{name} is {', '.join(values)}")
    if differences:
        raise ConfigError(
            f"The {ranks.world_size} ranks differ: {'; '.join(differences)}. All ranks share every "
            "update, so they need the same installation and the same command with the same files."
        )


def _describe_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """List ranks by host, e.g. "node1 (ranks 0, 1) and node2 (rank 2)"."""
    ranks_by_host: dict[str, list[str]] = {}
    for rank in ranks:
        ranks_by_host.setdefault(hosts[rank], []).append(str(rank))
    descriptions = []
    for host, host_ranks in ranks_by_host.items():
        noun = "ranks" if len(host_ranks) > 1 else "rank"
        descriptions.append(f"{host} ({noun} {', '.join(host_ranks)})")
    return " and ".join(descriptions)
