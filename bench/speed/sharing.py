"""How ranks share an update: memory of a rank by ddp and fsdp, and how far exchanges overlap.

    python bench/speed/sharing.py [--ranks 4] [--turns 5] [--only memory|time]
                                  [--rows 4 16 32] [--gbit 0 2 1]

memory: a GPT-2 of 98 M parameters with AdamW in float32 is updated three times by four processes
over gloo, by ddp (theirs) and by fsdp (ours), each in processes of their own. The ratio is of the
peak resident memory of the rank that used most, everything from the interpreter on included.

time: two processes, in turn: an update by ddp; by a sum after the last backward, as Toque had it
until this (`own`); the same without any sum (`compute`); and the exchange of as many bytes in
buckets of the same size alone (`exchange`). `ddp_by_the_slower` is ddp's seconds by the larger of
the last two: 1 would be an exchange that hides completely. Each number of `--rows` (of 128 tokens,
a rank) is timed at each rate of `--gbit` (10^9 bits a second; the ranks are then simulated machines
whose links are limited); 0 is this machine's own loopback, whose exchange is done by the very cores
that compute and has nothing to hide behind.

Quality: losses and gradient norms of both strategies agree to 1e-5, and so do ddp's and the own
sum's. Norms are taken in float64 for that; by how much the norm that clips, in float32, is off
them stands beside (`norm_off`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
from machines import Machine, network

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from toque.batch import DecoderBatch
    from toque.training.distributed.collectives import Ranks

VOCABULARY, WIDTH, LAYERS = 16_000, 768, 12
SMALL = {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 256}
"""Of the timed updates: 27 M parameters."""
BUCKET_BYTES = 25 * 2**20
TOKENS = 128


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """One rank, or the whole comparison."""
    if a.rank_of is not None:
        found = _memory(a.rank_of) if a.rank_of != "time" else _times(a.turns, a.rows[0])
        print(json.dumps(found), flush=True)
        os._exit(0)  # gloo may abort a process that is done
    result = harness.Result()
    if a.only != "time":
        sides = {name: _ranks(a, name, a.ranks) for name in ("ddp", "fsdp")}
        peaks = {name: max(rank["peak_mib"] for rank in found) for name, found in sides.items()}
        result.ours, result.theirs = sides["fsdp"], sides["ddp"]
        share = peaks["fsdp"] / peaks["ddp"]
        result.ratio = {"median": round(1 / share, 4), "worst": round(1 / share, 4)}
        result.details |= {"fsdp_by_ddp": round(share, 4), "peak_mib": peaks}
        if not _close(sides["fsdp"][0], sides["ddp"][0]):
            result.void("fsdp and ddp differ")
    if a.only != "memory":
        cases = [(gbit, rows) for gbit in a.gbit for rows in a.rows]
        result.details["time"] = [_timed(a, gbit, rows) for gbit, rows in cases]
        for times in result.details["time"]:
            seen = times.pop("seen")
            if not _close(seen["ddp"], seen["own"]):
                result.void("ddp and the own sum differ")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--ranks", type=int, default=4, help="whose memory is compared")
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--rows", type=int, nargs="+", default=[4, 16, 32], help="of a rank's update")
    p.add_argument("--gbit", type=float, nargs="+", default=[0.0, 2.0, 1.0], help="links")
    p.add_argument("--only", choices=("memory", "time"))
    p.add_argument("--rank-of", choices=("ddp", "fsdp", "time"), help=argparse.SUPPRESS)


def _timed(a: argparse.Namespace, gbit: float, rows: int) -> dict[str, Any]:
    """One case of `time`."""
    asked = argparse.Namespace(turns=a.turns, rows=[rows])
    if not gbit:
        found = _ranks(asked, "time", 2)
    else:
        with network(2, gbit=gbit) as (_, machines):
            found = _ranks(asked, "time", 2, machines)
    return {"gbit": gbit or "loopback", "tokens_of_a_rank": rows * TOKENS, **found[0]}


def _ranks(
    a: argparse.Namespace, name: str, n: int, machines: list[Machine] | None = None
) -> list[dict[str, Any]]:
    """Start `n` ranks of this script, on machines of their own or here; what each found."""
    shared = {"WORLD_SIZE": str(n), "MASTER_PORT": str(harness.free_port()), "OMP_NUM_THREADS": "1"}
    if machines:
        shared |= {"GLOO_SOCKET_IFNAME": "eth0", "LOCAL_WORLD_SIZE": "1"}
    else:
        shared |= {"LOCAL_WORLD_SIZE": str(n)}
    shared["MASTER_ADDR"] = machines[0].address if machines else "127.0.0.1"
    command = [sys.executable, __file__, "--rank-of", name, "--turns", str(a.turns)]
    command += ["--rows", str(a.rows[0])]
    started = [
        subprocess.Popen(  # noqa: S603  # this script again
            [*(machines[rank].inside if machines else []), *command],
            env=os.environ
            | shared
            | {"RANK": str(rank), "LOCAL_RANK": "0" if machines else str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(n)
    ]
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise harness.Skipped(f"a rank of {name} ended with an error")
    found = [json.loads(text.splitlines()[-1]) for text in said]
    harness.note(f"{name}: {found[0]}")
    return found


def _close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def apart(key: str) -> float:
        return max(abs(x - y) / abs(y) for x, y in zip(one[key], other[key], strict=True))

    return apart("losses") <= 1e-5 and apart("norms") <= 1e-5


def _batch(step: int, rank: int, rows: int) -> DecoderBatch:
    import torch

    from toque.batch import DecoderBatch

    drawn = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(1, VOCABULARY, (rows, TOKENS + 1), generator=drawn)
    return DecoderBatch(
        labels=tokens[:, 1:].clone(),
        example_ids=((0,),) * rows,
        tokens=tokens[:, :-1].clone(),
        segments=torch.ones(rows, TOKENS, dtype=torch.int32),
        positions=torch.arange(TOKENS).repeat(rows, 1),
    )


def _model(shape: dict[str, Any]) -> torch.nn.Module:
    from toque.models.forward.cpu_layers import use_cpu_layers
    from toque.models.loading.from_scratch import build_model

    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = build_model(
        family="gpt2", shape=shape | none, vocab_size=VOCABULARY, pad_id=0, eos_id=1, bos_id=None,
        seed=1,
    )  # fmt: skip
    use_cpu_layers(model)
    return model.train()


def _memory(strategy: str) -> dict[str, Any]:
    import torch

    from toque.models.forward.loss import loss_sum
    from toque.training.distributed.process_group import joined
    from toque.training.distributed.sharding import Sharded
    from toque.training.distributed.sharing import Replicated, Sharing
    from toque.training.optim.factory import build_optimizer
    from toque.training.runtime import Runtime

    shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 12, "n_positions": 256}
    losses, norms, off = [], [], 0.0
    with joined(strategy="ddp") as ranks:
        runtime = Runtime.detect(device="cpu", precision="float32", ranks=ranks)
        model = _model(shape)
        n = sum(p.numel() for p in model.parameters())
        cpu, here = torch.device("cpu"), ranks.world_size
        sharing: Sharing
        if strategy == "ddp":
            sharing = Replicated(model)
        else:
            sharing = Sharded(
                model, "fsdp", ranks, device=cpu, dtype=torch.float32, on_this_machine=here
            )
        optimizer = build_optimizer(model)
        for step in range(3):
            (rows,) = sharing.micro_batches(_batch(step, ranks.rank, 1), 1)
            loss = sharing.loss(loss_sum, rows, last=True)
            runtime.backward(loss / (TOKENS * ranks.world_size))
            norms.append(_exact_norm(model, ranks))
            clipped = float(runtime.clip_gradients(optimizer, 1.0))
            off = max(off, abs(clipped / norms[-1] - 1.0))
            runtime.optimizer_step(optimizer, lr=1e-4, only_if=torch.tensor(True))
            losses.append(float(ranks.total(loss.detach())))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"parameters": n, "peak_mib": round(peak), "losses": losses, "norms": norms}
    return {"strategy": strategy, "norm_off": off, **found}


def _exact_norm(model: torch.nn.Module, ranks: Ranks | None = None) -> float:
    """Of the gradients, summed in float64 a part at a time; of parts of them over the ranks."""
    from torch.distributed.tensor import DTensor

    total, is_divided = 0.0, False
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient, is_divided = gradient.to_local(), True
            for part in gradient.reshape(-1).split(1 << 20):
                total += float(part.double().square().sum())
    if is_divided:
        assert ranks is not None
        (total,) = ranks.all_reduce_sum([total])
    return math.sqrt(total)


def _times(turns: int, n_rows: int) -> dict[str, Any]:
    from toque.models.forward.loss import loss_sum
    from toque.training.distributed.process_group import joined
    from toque.training.distributed.sharing import Replicated

    with joined(strategy="ddp") as ranks:
        models = {name: _model(SMALL) for name in ("ddp", "own", "compute")}
        sharing = Replicated(models["ddp"])
        held = {name: list(model.parameters()) for name, model in models.items()}
        seen: dict[str, dict[str, list[float]]] = {
            name: {"losses": [], "norms": []} for name in models
        }

        def update(name: str, step: int) -> None:
            for parameter in held[name]:
                parameter.grad = None
            rows = _batch(step, ranks.rank, n_rows)
            if name == "ddp":
                loss = sharing.loss(loss_sum, rows, last=True)
            else:
                loss = loss_sum(models[name], rows)
            (loss / (n_rows * TOKENS * ranks.world_size)).backward()
            if name == "own":
                _sum_after_backward([p.grad for p in held[name] if p.grad is not None])
            seen[name]["losses"].append(float(loss.detach()))

        flat = [p.detach().clone() for p in held["ddp"]]
        work: dict[str, Callable[[int], None]] = {
            "ddp": lambda step: update("ddp", step),
            "own": lambda step: update("own", step),
            "compute": lambda step: update("compute", step),
            "exchange": lambda _: _sum_after_backward(flat),
        }
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for step in range(turns + 1):
            for name, one in work.items():
                ranks.all_reduce_sum([0.0])  # all begin together
                began = time.perf_counter()
                one(step)
                ranks.all_reduce_sum([0.0])
                if step > 0:  # the first chooses kernels
                    seconds[name].append(time.perf_counter() - began)
                if name in seen:
                    seen[name]["norms"].append(_exact_norm(models[name]))
    middle = {name: round(statistics.median(found), 4) for name, found in seconds.items()}
    slower = max(middle["compute"], middle["exchange"])
    return {
        "seconds": middle,
        "gradient_mib": round(sum(t.nbytes for t in flat) / 2**20, 1),
        "ddp_by_the_slower": round(middle["ddp"] / slower, 4),
        "own_by_the_slower": round(middle["own"] / slower, 4),
        "seen": seen,
    }


def _sum_after_backward(tensors: list[Tensor]) -> None:
    """Toque's own sum until 2026-11: buckets one after another, one under way while one is made."""
    import torch
    import torch.distributed as dist

    def finish(bucket: list[Tensor], flat: Tensor, work: Any) -> None:
        work.wait()
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))

    buckets: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if sum(t.nbytes for t in buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(tensor)
    before: tuple[list[Tensor], Tensor, Any] | None = None
    for bucket in buckets:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        work = dist.all_reduce(flat, async_op=True)
        if before is not None:
            finish(*before)
        before = (bucket, flat, work)
    if before is not None:
        finish(*before)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
