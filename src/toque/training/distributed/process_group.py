"""Process group: joining the other ranks, comparing them, work of rank 0 alone, leaving."""

from __future__ import annotations

import faulthandler
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
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
_STARTING: Final = f"toque train CONFIG {argument('gpus=2')}"
BEAT = 10.0  # seconds between two signs of life of rank 0 while it works alone
TIMEOUT_VARIABLE: Final = "TOQUE_RANK_TIMEOUT"
"""Environment variable: seconds that ranks wait for each other before the run is given up."""
_TIMEOUT_SECONDS: Final = 1800  # one rank's evaluating, writing texts and saving must fit in
_KEPT: Final[list[ProcessGroup]] = []  # groups that were left; they live as long as the process


@contextmanager
def joined(*, strategy: Strategy) -> Iterator[Ranks]:
    """Be one of the ranks while inside; leaving without an error waits for the others."""
    world_size, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if strategy == "single" and world_size > 1:
        raise ConfigError(
            f"train.strategy is single, and this is one of {world_size} processes (WORLD_SIZE). "
            "Start `toque train` without torchrun, or set train.strategy=auto."
        )
    sharded = strategy == "fsdp" and world_size == 1  # nothing to divide among
    if sharded or (strategy == "ddp" and "WORLD_SIZE" not in os.environ):
        found = os.environ.get("WORLD_SIZE", "not set")
        raise ConfigError(
            f"train.strategy is {strategy}, and this process was started alone (WORLD_SIZE is "
            f"{found}), as `accelerate launch --cpu` does whatever --num_processes says. Start "
            f"several with `{_STARTING}`, or set train.strategy=auto."
        )
    if world_size == 1:
        device_named("auto")  # refused, where it is of no use, before anything begins
        yield Ranks()
        return
    ranks = _joined(rank, world_size, _number(TIMEOUT_VARIABLE, _TIMEOUT_SECONDS))
    assert ranks.failures is not None
    try:
        yield ranks
        ranks.all_reduce_sum([0.0])  # nobody leaves while another may still need an answer
        # A group's destructor waits for its own thread, which may be waiting for the interpreter's
        # lock that the caller of the destructor holds: seen once as a rank that never ended.
        _KEPT.extend(distributed_c10d._world.pg_map)  # noqa: SLF001  # it has no public name
        dist.destroy_process_group()
        ranks.failures.leave()
    except BaseException as error:
        ranks.failures.report(error)
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def _joined(rank: int, world_size: int, timeout_seconds: float) -> Ranks:
    local_rank = _number("LOCAL_RANK", rank)
    device = device_named("auto", local_rank=local_rank)
    if cuda := device.type == "cuda":
        torch.cuda.set_device(device)
    wait = timedelta(seconds=timeout_seconds)
    try:
        # Under torchrun this is torchrun's own store, which outlives us.
        found, _, _ = next(rendezvous("env://", timeout=wait))
        # It also outlives a restart, and must not tell of processes that are gone.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"toque/{attempt}", found)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=wait,
        )
    except (RuntimeError, ValueError) as error:
        raise RankLost(
            f"Rank {rank} of {world_size} could not join the others: "
            f"{str(error).splitlines()[0]}. Start all of them together, e.g. `{_STARTING}`; across "
            "machines each needs the same MASTER_ADDR and MASTER_PORT, reachable from all."
        ) from error
    failures = RankFailures(PrefixStore("ranks", store), rank, world_size, timeout_seconds)
    failures.enrol()
    return Ranks(rank, world_size, local_rank, failures)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(
            f"{name} is {text!r} in the environment, where a whole number belongs. The "
            f"launcher sets what it takes to share a run (`{_STARTING}`); or unset {name}."
        )
    return int(text)


def while_others_wait(ranks: Ranks, work: Callable[[], None]) -> None:
    """Do `work` on rank 0, however long it takes; the others return when it is done."""
    if not ranks.is_main:
        while not ranks.broadcast():
            pass
        return
    done = threading.Event()

    def live() -> None:
        while not done.wait(BEAT):
            ranks.broadcast(False)

    with ThreadPoolExecutor(1, "toque-alive") as pool:
        signs = pool.submit(live)
        try:
            work()
        finally:
            done.set()
    signs.result()  # RankLost, if another is gone
    ranks.broadcast(True)


def versions() -> dict[str, str]:
    """Versions of what decides a number or the form of a file."""
    packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"toque": __version__, **packages, "python": platform.python_version()}


def refuse_unlike(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Compare the ranks' surroundings; where they differ, ConfigError says which has what."""
    held = ranks.all_gather((socket.gethostname(), dict(facts)))
    told = []
    for name in facts:
        having: dict[str, dict[str, list[str]]] = {}
        for rank, (host, own) in enumerate(held):
            places = having.setdefault(own.get(name, "not known"), {})
            places.setdefault(host, []).append(str(rank))
        values = []
        for value, places in having.items():
            where = [
                f"{host} (rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)})"
                for host, numbers in places.items()
            ]
            values.append(f"{value} on {' and '.join(where)}")
        if len(having) > 1:
            told.append(f"{name} is {', '.join(values)}")
    if told:
        raise ConfigError(
            f"The {ranks.world_size} ranks are not alike: {'; '.join(told)}. They share every "
            "update, so all need the same installation, and the same command with the same files."
        )
