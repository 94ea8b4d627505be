"""Four simulated machines share a run, one loses its network, and the same command continues.

    python bench/robustness/lost_network.py [--machines 4] [--lost 3] [--seconds 60] [--steps 24]
                                            [--answer 20] [--strategy ddp|fsdp]

Every machine is a network namespace with a host name of its own, joined by a bridge in one more
namespace (root, iproute2 and util-linux; nothing outside of them is touched). On each torchrun is
typed, `--nnodes 4 --nproc-per-node 1 ... -m toque train CONFIG`; the run folder is shared, as on a
cluster. Once the run has saved, the lost machine's cable is pulled (`ip link set ... down` on the
bridge's side) and put back after --seconds. The others name it once a collective has waited
--answer seconds (TOQUE_RANK_TIMEOUT), and end; the same command on every machine continues from the
newest checkpoint. Compared with an undisturbed run's, bit for bit: weights, optimizer, finished
model, every loss.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers
from machines import Machine, ip, network

from toque.workflows.diagnosis.drill import differing, facts_of

PORT = 29400
SAVE_EVERY = 2


def measure(a: argparse.Namespace) -> harness.Result:
    """The undisturbed run, the disturbed one, and both compared."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="lost-") as name, network(a.machines) as found:
        switch, machines = found
        work = Path(name)
        os.environ["TOQUE_CACHE"] = str(work / "cache")
        _prepare(work, a.steps)
        began = time.monotonic()
        calm = _run(machines, work, "calm", a)
        calm_codes = [_wait(machine) for machine in calm]
        calm_seconds = time.monotonic() - began
        if any(calm_codes):
            raise SystemExit("\n".join(machine.text[-1500:] for machine in machines))
        disturbed = _disturbed(switch, machines, work, a)
        whole, other = facts_of(work / "calm"), facts_of(work / "lost")
        wrong = differing(whole, other)
        passes = not wrong and disturbed["named"] and not any(disturbed["exit_codes"])
        return harness.Result(
            ours=disturbed,
            quality={"passes": passes, "compared": sorted(whole), "differing": wrong},
            details={"calm_seconds": round(calm_seconds, 1), "save_every_steps": SAVE_EVERY},
        )


def _disturbed(switch: str, machines: list[Machine], work: Path, a: argparse.Namespace) -> dict:
    lost = machines[a.lost - 1]
    _run(machines, work, "lost", a)
    _until_saved(machines, work / "lost" / "checkpoints", a.steps // 3)
    port = f"port-{lost.name}"
    ip("-n", switch, "link", "set", port, "down")
    pulled = time.monotonic()
    time.sleep(a.seconds)
    ip("-n", switch, "link", "set", port, "up")
    first_codes = [_wait(machine) for machine in machines]
    others = [machine for machine in machines if machine is not lost]
    naming = [
        (at - pulled, line)
        for machine in others
        for at, line in machine.said
        if f"on {lost.name})" in line and at > pulled
    ]
    codes = [_wait(machine) for machine in _run(machines, work, "lost", a)]
    return {
        "lost": lost.name,
        "seconds_without_network": a.seconds,
        "named": bool(naming),
        "sentence": naming[0][1] if naming else [machine.text[-800:] for machine in others],
        "seconds_until_named": round(naming[0][0], 1) if naming else None,
        "first_exit_codes": first_codes,
        "exit_codes": codes,
        "said": [machine.text[-1200:] for machine in machines] if any(codes) else None,
    }


def _run(machines: list[Machine], work: Path, name: str, a: argparse.Namespace) -> list[Machine]:
    where = ["--master-addr", machines[0].address, "--master-port", str(PORT)]
    words = ["train", "run.yaml", f"run_dir={name}", f"train.strategy={a.strategy}"]
    for number, machine in enumerate(machines):
        machine.start(
            *("torch.distributed.run", "--nnodes", str(len(machines)), "--nproc-per-node", "1"),
            *("--node-rank", str(number), *where, "-m", "toque", *words),
            work=work,
            answer=a.answer,
        )
    return machines


def _wait(machine: Machine) -> int:
    assert machine.process is not None
    return machine.process.wait(timeout=900)


def _until_saved(machines: list[Machine], checkpoints: Path, step: int) -> None:
    while not list(checkpoints.glob("step-*")) or _newest(checkpoints) < step:
        if any(m.process is not None and m.process.poll() is not None for m in machines):
            raise SystemExit("\n".join(machine.text[-1500:] for machine in machines))
        time.sleep(0.05)


def _newest(checkpoints: Path) -> int:
    return max(int(folder.name.rpartition("-")[2]) for folder in checkpoints.glob("step-*"))


def _prepare(work: Path, steps: int) -> None:
    from toque.cooking.cookbook.recipes import write_cookbook

    write_cookbook(work / "a.jsonl", n=200, seed=3)
    (work / "run.yaml").write_text(
        f"""
seed: 5
model: {{family: gpt2, tokenizer: "trained:512",
  shape: {{n_embd: 32, n_layer: 2, n_head: 2, n_positions: 512}}}}
data: {{sources: [{{path: a.jsonl}}], store: store, max_prompt_tokens: 64, max_target_tokens: 256}}
optim: {{warmup: "2 steps", peak_lr: 1e-2}}
train: {{stop_after: "{steps} steps", batch: "4096 tokens", evaluate_every: "12 steps",
  precision: float32, micro_batch_rows: 1, compile: false, save_every: "{SAVE_EVERY} steps"}}
evaluation: {{max_examples: 8, generate: 2}}
observe: {{log_every: "1 step"}}
"""
    )
    with contextlib.chdir(work):
        peers.toque("prepare", "run.yaml")


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--machines", type=int, default=4)
    p.add_argument("--lost", type=int, default=3, help="which machine; 1 holds the store")
    p.add_argument("--seconds", type=float, default=60.0, help="without the network")
    p.add_argument("--steps", type=int, default=24, help="of the run")
    p.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    p.add_argument("--answer", type=int, default=20, help="seconds that a collective waits")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
