"""Data parallelism as `bench/cluster.py` computes it against 1, 2 and 4 processes that are counted.

    python bench/quality/scaling.py [--updates 6] [--width 256]

A small GPT-NeoX under PyTorch's own DDP and FSDP2 over gloo, each job in a network of its own
(`unshare --net`, which needs root), so that the loopback's counters hold its bytes and no others.
Floor: the bytes of an update within 2 % of the formulas; TCP and IP headers are part of them.
Seconds: an update alone, the rate of the loopback (an all-reduce alone), and an update of several
processes beside what the two predict without overlap. Processes beyond the cores share them.
`tables` are those of docs/explanation/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import cluster
import harness

FLOOR = 0.02
ROWS, LENGTH, VOCABULARY = 2, 256, 4096
"""Of each process in an update."""


def worker(a: argparse.Namespace) -> dict[str, Any] | None:
    """One process of a job: seconds and bytes of its updates, from the first."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = _small(a.width)
    n_weights = sum(p.numel() for p in model.parameters())
    # Counted before they are divided.
    in_layers = sum(p.numel() for p in model.gpt_neox.layers.parameters())
    act = _sharing(a.worker, model, model.gpt_neox.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))

    def one() -> None:
        act(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    flat = torch.zeros(n_weights)
    sums = _counted(lambda: dist.all_reduce(flat), a.updates)
    updates = _counted(one, a.updates)
    if dist.get_rank():
        return {}
    return {
        "ranks": ranks,
        "strategy": a.worker,
        "weights": n_weights,
        "in_layers": in_layers,
        "update": updates,
        "all_reduce_alone": sums,
    }


def _small(width: int) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=4 * width,
            max_position_embeddings=LENGTH,
        )
    )


def _sharing(strategy: str, model: Any, layers: Any) -> Any:
    """The model as `strategy` calls it."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if strategy == "ddp":
        return DistributedDataParallel(model)
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def _counted(act: Any, n: int) -> dict[str, float]:
    """Median seconds of `act`, and bytes of the loopback in one, after two that are not counted."""
    import torch.distributed as dist

    for _ in range(2):
        act()
    dist.barrier()
    before, seconds = _sent(), []
    for _ in range(n):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    return {"seconds": statistics.median(seconds), "bytes": (_sent() - before) / n}


def _sent() -> int:
    """Bytes that this network's loopback has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    raise harness.Skipped("this system does not count the bytes of its loopback")


def job(strategy: str, ranks: int, a: argparse.Namespace) -> dict[str, Any]:
    """A job of `ranks` processes in a network of its own."""
    script = (
        f"ip link set lo up && exec {sys.executable} -m torch.distributed.run --nproc-per-node "
        f"{ranks} --master-port 29500 {Path(__file__).resolve()} --worker {strategy} "
        f"--updates {a.updates} --width {a.width}"
    )
    done = subprocess.run(  # noqa: S603
        ["unshare", "--net", "sh", "-c", script],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    at = done.stdout.find('{"ranks"')
    if done.returncode or at < 0:
        raise harness.Skipped(f"no network of its own, or the job failed: {done.stderr[-400:]}")
    # Other processes may print their empty record on the same line.
    found: dict[str, Any] = json.JSONDecoder().raw_decode(done.stdout[at:])[0]
    harness.note(json.dumps(found))
    return found


def expected_bytes(found: dict[str, Any]) -> float:
    """What all ranks send in an update by the formulas, in float32.

    gloo has no reduce-scatter of its own: PyTorch's is an all-reduce of which each rank keeps its
    part, twice the bytes of NCCL's.
    """
    ranks, weights, in_layers = found["ranks"], found["weights"], found["in_layers"]
    gathered = 0 if found["strategy"] == "ddp" else weights + in_layers
    moved = gathered + 2 * weights
    return ranks * cluster.ring_bytes(4.0 * moved, ranks)


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """The tables, and the counted jobs beside the formulas."""
    if a.worker:
        return worker(a) or {}
    tables = {model.name: cluster.table(model) for model in cluster.models()}
    if a.tables:
        return {"tables": tables}
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        raise harness.Skipped("unshare and ip are not there")
    jobs = [job("ddp", 1, a), *(job(s, n, a) for s in ("ddp", "fsdp") for n in (2, 4))]
    alone = jobs[0]["update"]["seconds"]
    cores = len(os.sched_getaffinity(0))
    rows = []
    for found in jobs[1:]:
        ranks, wanted = found["ranks"], expected_bytes(found)
        sums = found["all_reduce_alone"]
        share = max(1.0, ranks / cores)
        moved = found["update"]["bytes"]
        rows.append(
            {
                "strategy": found["strategy"],
                "ranks": ranks,
                "bytes": moved,
                "bytes_by_formula": wanted,
                "ratio": moved / wanted,
                "seconds": found["update"]["seconds"],
                "compute": alone * share,
                "communication": sums["seconds"] * moved / sums["bytes"],
            }
        )
    passes = all(abs(row["ratio"] - 1) <= FLOOR for row in rows)
    return harness.Result(
        quality={"passes": passes, "bytes_within": FLOOR},
        details={"alone_seconds": alone, "weights": jobs[0]["weights"], "jobs": rows}
        | {"tables": tables},
    )


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--updates", type=int, default=6)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--tables", action="store_true", help="only the tables of the page")
    p.add_argument("--worker", choices=("ddp", "fsdp"), help=argparse.SUPPRESS)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
