"""Training time lost to saving and uploading, against no saving at all; prints JSON.

    python bench/save.py [--pairs 2] [--seconds 95] [--every 30] [--rate 5]

A T5 of 54 M parameters (the shared peers/t5_mini.json) trains on cookbook recipes, with a save
every 30 seconds that goes to an S3 emulator through a line throttled to 5 MB/s, and without saves
or uploads, in turn (A B A B), each in a process of its own that is ended after its time. Lost is
1 - (steps a second with) / (steps a second without), the median of the pairs; beside it, what
training waited for by its own account (`blocked_seconds` of the save events) and the processor
time of a step, both of which a busy machine disturbs less. `synchronous` is what waiting for the
same save, and for its upload over the same line, would take: measured apart, by writing and sending
tensors of the same sizes. Quality: both sides must report the same losses, step by step, and
each session with saves must see one become durable, or the ratio is void.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from about import versions

SHARED = Path(os.environ.get("TOQUE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
CHUNK = 1 << 16


def main() -> int:
    """One side, the line, or the whole comparison."""
    parser = argparse.ArgumentParser(description="what saving and uploading cost training")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=95.0, help="of each session")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between saves")
    parser.add_argument("--rate", type=float, default=5.0, help="MB/s of the line")
    parser.add_argument("--side", choices=("with", "without", "synchronous", "line"))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.side == "line":
        asyncio.run(_line(options.port, options.rate))
    elif options.side == "synchronous":
        print(json.dumps(_synchronous(options.work)))
    elif options.side is not None:
        _session(options)
    else:
        print(json.dumps(_compared(options), indent=1))
    return 0


def _compared(options: argparse.Namespace) -> dict[str, Any]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with tempfile.TemporaryDirectory(prefix="save-") as name, contextlib.ExitStack() as stack:
        work = Path(name)
        os.environ["TOQUE_CACHE"] = str(work / "cache")
        _prepare(work)
        _services(work, options.rate, stack)
        # How to compute is found out once, before anything is timed.
        _run(options, work, "without", seconds=5.0)
        sides: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
        for _ in range(options.pairs):
            for side, found in sides.items():
                found.append(_run(options, work, side, seconds=options.seconds))
        synchronous = _run(options, work, "synchronous", seconds=0.0)
    return _judged(options, sides, synchronous)


def _judged(
    options: argparse.Namespace, sides: dict[str, list[dict[str, Any]]], synchronous: dict[str, Any]
) -> dict[str, Any]:
    pairs = list(zip(sides["with"], sides["without"], strict=True))

    def lost(name: str) -> list[float]:
        return [round(1 - a[name] / b[name], 4) for a, b in pairs]

    waited = [r["blocked_seconds"] / r["seconds"] for r in sides["with"]]
    equal = all(
        x == y for a, b in pairs for x, y in zip(a["losses"], b["losses"], strict=False)
    )  # as many as both have done
    rates, saved = lost("steps_per_second"), all(r["saves"] for r in sides["with"])
    void = "void: other losses" if not equal else "void: no save was durable in its session"
    save, sent = synchronous["save_seconds"], synchronous["upload_seconds"]
    return {
        "what": "share of training time lost to a save every so often and its upload",
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions("torch", "transformers"),
        "cores": len(os.sched_getaffinity(0)),
        "threads": os.environ["OMP_NUM_THREADS"],
        "load": os.getloadavg(),
        "save_every_seconds": options.every,
        "line_megabytes_per_second": options.rate,
        "checkpoint_megabytes": round(synchronous["bytes"] / 1e6, 1),
        "lost": round(statistics.median(rates), 4) if equal and saved else void,
        "lost_of_pairs": rates,
        "lost_by_blocked_seconds": round(statistics.median(waited), 4) if saved else void,
        "more_processor_time_a_step": [-share for share in lost("cpu_a_step")],
        "synchronous": {
            "lost_to_the_save_alone": round(save / (options.every + save), 4),
            "lost_to_save_and_upload": round((save + sent) / (options.every + save + sent), 4),
            **synchronous,
        },
        "sides": {
            side: [{k: v for k, v in r.items() if k != "losses"} for r in found]
            for side, found in sides.items()
        },
    }  # fmt: skip


def _prepare(work: Path) -> None:
    from toque.cooking.cookbook.generate import write_cookbook

    write_cookbook(work / "a.jsonl", n=3000, seed=3)
    config = {
        "run_dir": str(work / "run"),
        "model": {
            "family": "t5",
            "tokenizer": str(SHARED / "tokenizers" / "t5"),
            "shape": json.loads((SHARED / "peers" / "t5_mini.json").read_text()),
        },
        "data": {"sources": [{"path": str(work / "a.jsonl")}], "store": str(work / "store")},
        "train": {
            "batch": "1024 tokens",
            "micro_batch_rows": 1,
            "compile": False,
            "precision": "float32",
            "stop_after": "100 epochs",
            "evaluate_every": "100 %",
            "save_every": "100 %",
        },
        "evaluation": {"max_examples": 8, "generate": 0},
        "observe": {"log_every": "1 step"},
    }
    (work / "run.yaml").write_text(json.dumps(config))
    subprocess.run(  # noqa: S603
        [sys.executable, "-m", "toque", "prepare", str(work / "run.yaml")],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _services(work: Path, rate: float, stack: contextlib.ExitStack) -> None:
    """The emulator, the line to it, and the environment that leads there."""
    log = stack.enter_context((work / "services.log").open("wb"))

    def begin(command: list[str]) -> None:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, *command], stdout=log, stderr=log
        )
        stack.callback(process.wait)
        stack.callback(process.kill)

    emulator, line = _free_port(), _free_port()
    begin(["-m", "moto.server", "-p", str(emulator)])
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{line}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    (work / "ports.json").write_text(json.dumps([line, emulator]))
    begin([__file__, "--side", "line", "--port", str(line), "--rate", str(rate), "--work", work])  # type: ignore[list-item]
    request = urllib.request.Request(f"http://127.0.0.1:{line}/pantry", data=b"", method="PUT")
    for _ in range(300):
        try:
            urllib.request.urlopen(request).close()  # noqa: S310
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit((work / "services.log").read_text()[-2000:])


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _line(port: int, rate: float) -> None:
    """Pass bytes on to the emulator, those towards it at `rate` MB/s in all."""
    emulator = json.loads((Path(sys.argv[-1]) / "ports.json").read_text())[1]
    free_at = 0.0

    async def passed(near: asyncio.StreamReader, far: asyncio.StreamWriter, slow: bool) -> None:  # noqa: FBT001
        nonlocal free_at
        with contextlib.suppress(ConnectionError):
            while data := await near.read(CHUNK):
                if slow:
                    free_at = max(free_at, time.monotonic()) + len(data) / (rate * 1e6)
                    await asyncio.sleep(max(0.0, free_at - time.monotonic()))
                far.write(data)
                await far.drain()
        far.close()

    async def connected(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, there = await asyncio.open_connection("127.0.0.1", emulator)
        except OSError:
            back.close()
            return
        await asyncio.gather(passed(near, there, True), passed(far, back, False))

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


def _run(options: argparse.Namespace, work: Path, side: str, *, seconds: float) -> dict[str, Any]:
    done = subprocess.run(  # noqa: S603
        [sys.executable, __file__, "--side", side, "--seconds", str(seconds), "--every",
         str(options.every), "--work", str(work)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{side} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


class Clock:
    """Times the updates of a session, and ends the process when it is enough."""

    def __init__(self, run: Path, seconds: float) -> None:
        self.run, self.seconds = run, seconds
        self.times: list[tuple[float, float]] = []

    def on_step_end(self, state: Any) -> None:
        """Note wall and processor time."""
        del state
        self.times.append((time.perf_counter(), time.process_time()))
        (first, cpu), (now, cpu_now) = self.times[0], self.times[-1]
        if now - first < self.seconds:
            return
        events = [json.loads(x) for x in (self.run / "metrics.jsonl").read_text().splitlines()]
        saves = [e for e in events if e["event"] == "save"]
        steps = len(self.times) - 1
        found = {
            "steps": steps,
            "seconds": round(now - first, 2),
            "steps_per_second": round(steps / (now - first), 5),
            "cpu_a_step": round((cpu_now - cpu) / steps, 5),
            "saves": len(saves),
            "blocked_seconds": round(sum(e["blocked_seconds"] for e in saves), 3),
            "seconds_until_durable": [round(e["seconds"], 2) for e in saves],
            "warnings": [e["message"] for e in events if e["event"] == "warning"],
            "losses": [e["loss"] for e in events if e["event"] == "step"],
        }
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        os._exit(0)  # what is left to upload is not our matter


def _session(options: argparse.Namespace) -> None:
    from toque.config import load_config
    from toque.workflows.train import train

    number = len(list(options.work.glob("run-*")))
    run = options.work / f"run-{number}"
    words = [f"run_dir={run}"]
    if options.side == "with":
        words += [f"train.save_every={options.every / 60} minutes"]
        words += [f"checkpoint.upload=s3://pantry/{run.name}"]
    train(
        load_config(str(options.work / "run.yaml"), words), callbacks=[Clock(run, options.seconds)]
    )


def _synchronous(work: Path) -> dict[str, float]:
    """Seconds that one save takes when it is waited for, and its upload."""
    import torch

    from toque.config import load_config
    from toque.data.store.token_store import TokenStore
    from toque.storage.bucket_folder import RemoteFolder
    from toque.training.checkpoint.state_tensors import model_tensors
    from toque.training.checkpoint.store import CheckpointStore
    from toque.workflows.forecast import in_outline

    config = load_config(str(work / "run.yaml"), []).config
    with in_outline(config, TokenStore.open(config.data.store)) as model:
        shapes = {n: tuple(t.shape) for n, t in model_tensors(model, trainable_only=False).items()}
    made = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {f"{n}/{m}": t.clone() for n, t in made.items() for m in ("exp_avg", "exp_avg_sq")}
    store, seconds, saved = CheckpointStore(work / "synchronous"), [], None
    for step in range(1, 4):
        began = time.perf_counter()
        saved = store.save(step, {"model": made, "optimizer": moments}, {})
        seconds.append(time.perf_counter() - began)
    # The weights alone are sent, a third of it; the line is the slow part and knows no sizes.
    weights = saved.path / "model.safetensors"
    began = time.perf_counter()
    RemoteFolder.at("s3://pantry/synchronous").put_file(weights, "model.safetensors")
    sent = time.perf_counter() - began
    return {
        "bytes": saved.bytes,
        "save_seconds": round(statistics.median(seconds), 2),
        "upload_seconds": round(sent * saved.bytes / weights.stat().st_size, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
