"""Kill a training run with SIGKILL again and again, and compare it with one that was left alone.

    python bench/kills.py [--kills 200] [--seed 1] [--upload] [--trainer toque|transformers]

A tiny T5 with dropout and saves in the background trains in a process forked from one that has
imported torch and transformers but computed nothing, so that a restart costs tenths of a second
and is a fresh trainer all the same. Each is killed at a random moment after its first new update;
then the next one continues. At the end SHA-256 of the last weights and optimizer, and every loss,
are compared with the undisturbed run's, bit for bit. With --upload the checkpoints go to an S3
emulator, and every tenth kill also deletes the run's folder: the bucket alone continues. With
--trainer transformers the same is done to transformers.Trainer. Prints one JSON object; exit code
1 when toque differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

SAVE_EVERY = 3
SHAPE = "{d_model: 48, d_kv: 12, d_ff: 96, num_layers: 2, num_heads: 4, dropout_rate: 0.1}"


def main() -> int:
    """Run the undisturbed run, the killed one, and compare."""
    options = _arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        work = Path(name)
        os.environ["TOQUE_CACHE"] = str(work / "cache")
        _prepare(work, options)
        server = _emulator(work) if options.upload else None
        try:
            result = _trial(work, options)
        finally:
            if server is not None:
                server.kill()
                server.wait()
    print(json.dumps(result, indent=1))
    return int(options.trainer == "toque" and not result["bit_exact"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="SIGKILL a run and compare its bits")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="0: enough for the kills")
    parser.add_argument("--upload", action="store_true")
    parser.add_argument("--trainer", choices=("toque", "transformers"), default="toque")
    options = parser.parse_args()
    options.steps = options.steps or max(60, options.kills * 8)
    return options


def _prepare(work: Path, options: argparse.Namespace) -> None:
    from toque.cooking.cookbook import write_cookbook

    write_cookbook(work / "a.jsonl", n=240, seed=3)
    (work / "run.yaml").write_text(
        f"""
run_dir: {work}/run
seed: 5
model: {{family: t5, tokenizer: "trained:600", shape: {SHAPE}}}
data: {{sources: [{{path: "{work}/a.jsonl"}}], store: "{work}/store", max_prompt_tokens: 64,
  max_target_tokens: 128}}
optim: {{peak_lr: 1e-3, warmup: "5 steps", label_smoothing: 0.1}}
train: {{stop_after: "{options.steps} steps", batch: "512 tokens", micro_batch_rows: 2,
  precision: float32, compile: false, gradient_checkpointing: false,
  save_every: "{SAVE_EVERY} steps", evaluate_every: "50 steps", keep_last: 2}}
evaluation: {{max_examples: 4, generate: 0}}
observe: {{log_every: "1 step"}}
"""
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "toque", "prepare", str(work / "run.yaml")],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr.decode())


def _emulator(work: Path) -> subprocess.Popen[bytes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with (work / "moto.log").open("wb") as log:
        server = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log
        )
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"http://127.0.0.1:{port}/pantry", data=b"", method="PUT")
    for _ in range(300):
        try:
            urllib.request.urlopen(request).close()  # noqa: S310
            return server
        except urllib.error.URLError:
            time.sleep(0.1)
    raise SystemExit("the S3 emulator did not start")


def _trial(work: Path, options: argparse.Namespace) -> dict[str, object]:
    _preload(options)
    start = _toque if options.trainer == "toque" else _transformers
    whole, killed, chance = work / "whole", work / "killed", random.Random(options.seed)
    began = time.perf_counter()
    if not start(whole, work, options, upload=False)():
        raise SystemExit((work / "log.txt").read_text()[-3000:])
    calm = time.perf_counter() - began
    kills, moments, wiped, died = 0, [], 0, 0
    while kills < options.kills:
        hit, step = _killed(start(killed, work, options, upload=options.upload), killed, chance)
        if not hit:
            died += 1
            break
        kills += 1
        moments.append(step)
        if options.upload and kills % 10 == 0:
            shutil.rmtree(killed)
            wiped += 1
    finished = start(killed, work, options, upload=options.upload)()
    same = {name: _facts(whole)[name] == _facts(killed).get(name) for name in _facts(whole)}
    return {
        "what": f"{options.trainer}: killed with SIGKILL and continued, against an undisturbed run",
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "transformers": version("transformers"),
        },
        "cores": len(os.sched_getaffinity(0)),
        "steps": options.steps,
        "save_every_steps": SAVE_EVERY,
        "kills": kills,
        "ended_by_itself": died,
        "last_session_finished": finished,
        "folders_deleted": wiped,
        "calm_seconds": round(calm, 1),
        "total_seconds": round(time.perf_counter() - began, 1),
        "newest_step_when_killed": [min(moments, default=0), max(moments, default=0)],
        "same": same,
        "bit_exact": all(same.values()) and finished and kills == options.kills,
        "log_tail": "" if finished else (work / "log.txt").read_text()[-1500:],
    }


def _preload(options: argparse.Namespace) -> None:
    """Import, and compute nothing: a forked process that has computed shares broken threads."""
    import torch
    import transformers.models.t5.modeling_t5

    import toque.cli.training
    import toque.models.families  # noqa: F401

    torch.set_num_threads(1)
    if options.trainer == "transformers":
        import transformers.trainer  # noqa: F401


class _Child:
    """A trainer in a forked process; calling it waits for its end."""

    def __init__(self, work: Path, body: object) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                log = os.open(work / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                code = body()  # type: ignore[operator]
            except BaseException:
                import traceback

                traceback.print_exc()
                raise
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def __call__(self) -> bool:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0

    def ended(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _toque(run: Path, work: Path, _options: argparse.Namespace, *, upload: bool) -> _Child:
    def body() -> int:
        from toque.cli import main as toque

        words = [f"run_dir={run}"]
        words += ["checkpoint.upload=s3://pantry/killed"] if upload else []
        return toque(["train", str(work / "run.yaml"), *words])

    return _Child(work, body)


def _transformers(run: Path, work: Path, options: argparse.Namespace, *, upload: bool) -> _Child:
    del upload  # it has none

    def body() -> int:
        import torch
        from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments
        from transformers.trainer_utils import get_last_checkpoint

        torch.manual_seed(5)
        rows = torch.randint(3, 600, (240, 48), generator=torch.Generator().manual_seed(3))
        data = [{"input_ids": row[:24], "labels": row[24:]} for row in rows]
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=600,
                d_model=48,
                d_kv=12,
                d_ff=96,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
            )
        )
        arguments = TrainingArguments(
            output_dir=str(run), max_steps=options.steps, save_steps=SAVE_EVERY,
            save_total_limit=2, logging_steps=1, per_device_train_batch_size=2, seed=5,
            report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-3,
        )  # fmt: skip
        last = get_last_checkpoint(str(run)) if run.exists() else None
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=last)
        trainer.save_model(str(run / "model"))
        return 0

    return _Child(work, body)


def _newest(run: Path) -> int:
    folders = [*(run / "checkpoints").glob("step-*"), *run.glob("checkpoint-*")]
    return max((int(f.name.rpartition("-")[2]) for f in folders), default=0)


def _killed(child: _Child, run: Path, chance: random.Random) -> tuple[bool, int]:
    """Wait for a new checkpoint, then a random moment of the next, and kill."""
    before, deadline = _newest(run), time.monotonic() + 300
    while _newest(run) <= before and time.monotonic() < deadline:
        if child.ended():
            return False, _newest(run)
        time.sleep(0.002)
    time.sleep(chance.uniform(0.0, 0.25))
    if child.ended():
        return False, _newest(run)
    child.kill()
    return True, _newest(run)


def _facts(run: Path) -> dict[str, object]:
    """Hashes of what training made, and the loss of every step as last reported."""
    found: dict[str, object] = {}
    newest = [*(run / "checkpoints").glob("step-*"), *run.glob("checkpoint-*")]
    if newest:
        last = max(newest, key=lambda f: int(f.name.rpartition("-")[2]))
        for name in ("model.safetensors", "optimizer.safetensors"):
            if (last / name).exists():
                found[name] = hashlib.sha256((last / name).read_bytes()).hexdigest()
        state = last / "trainer_state.json"
        if state.exists():
            history = json.loads(state.read_text())["log_history"]
            found["losses"] = {e["step"]: e["loss"] for e in history if "loss" in e}
    if (run / "metrics.jsonl").exists():
        lines = []
        for text in (run / "metrics.jsonl").read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:  # half a line of a killed writer
                continue
        found["losses"] = {e["step"]: e["loss"] for e in lines if e["event"] == "step"}
    return found


if __name__ == "__main__":
    sys.exit(main())
