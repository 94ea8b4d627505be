"""Several processes by ddp and fsdp train as one does, and continue to the same bits."""

import hashlib
import itertools
import json
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.ranks import (
    as_rank,
    loaded,
    losses_of,
    prepared_folder,
    ranks_of,
    surroundings,
    torchrun,
    train,
)
from tiny import FAMILIES
from toque.config import load_config
from toque.config.schema import OptimConfig
from toque.errors import ConfigError
from toque.training.distributed.collectives import Ranks
from toque.training.runtime import Runtime
from toque.training.strategy import choose_strategy

RANK_TIMEOUT = 600
"""Seconds; not torch's own."""
SCRIPT = Path(__file__).parent / "shared_cases.py"
shared_cases = loaded(SCRIPT)

STRATEGIES = ("ddp", "fsdp")
FAST = (
    "gpt2/ddp/full/uneven", "t5/fsdp/full/uneven", "llama/fsdp/lora/even", "neox/ddp/lora/uneven"
)  # fmt: skip
"""Every family, strategy, kind of weights and share."""
MATRIX = ["/".join(c) for c in itertools.product(FAMILIES, STRATEGIES, ("full", "lora"), ("even", "uneven"))]  # fmt: skip  # noqa: E501


def walked(
    folder: Path, verb: str, *cases: str, ranks: int = 2, stop_at: int = 0
) -> list[dict[str, Any]]:
    """What each of several ranks saw of the cases."""
    shared = surroundings(ranks=ranks, timeout=RANK_TIMEOUT) | {"STOP_AT": str(stop_at)}
    words = (str(SCRIPT), str(folder), verb, *cases)
    processes = [as_rank(number, shared, *words) for number in range(ranks)]
    said = [process.communicate()[0] for process in processes]
    ends = [process.returncode for process in processes]
    assert ends == [0] * ranks, "\n".join(text[-4000:] for text in said)
    return [
        json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)
    ]


def check_as_one(seen: list[dict[str, Any]], case: str) -> None:
    (alone,) = (rank[case]["alone"] for rank in seen if "alone" in rank[case])
    for shared in (rank[case]["shared"] for rank in seen):
        assert len(shared["losses"]) == shared_cases.UPDATES
        assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert shared["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert shared["best"] == pytest.approx(alone["best"], rel=1e-5)
    assert seen[0][case]["shared"] == seen[1][case]["shared"]  # to the bit


def check_continued(seen: list[dict[str, Any]], case: str) -> None:
    for rank in seen:
        whole, continued = rank[case]["shared"], rank[case]["continued"]
        assert continued["losses"] == whole["losses"][shared_cases.SAVED_AT :]
        assert continued["norms"] == whole["norms"][shared_cases.SAVED_AT :]
        assert continued["weights"] == whole["weights"]
        assert continued["notes"] == []


@pytest.fixture(scope="module")
def fast(tmp_path_factory) -> list[dict[str, Any]]:
    return walked(tmp_path_factory.mktemp("fast"), "both", *FAST)


@pytest.mark.parametrize("case", FAST)
def test_all_groups_wait_as_long_as_ranks_do(fast, case):
    divided = "/ddp/" not in case
    for rank in fast:
        assert rank[case]["shared"]["waits"] == (
            [float(RANK_TIMEOUT)] if divided else []
        )


@pytest.mark.timeout(
    900
)  # several processes on a busy machine wait for each other's turns
@pytest.mark.parametrize("case", FAST)
def test_two_processes_train_as_one(fast, case):
    check_as_one(fast, case)


@pytest.mark.parametrize("case", FAST)
def test_a_continued_run_ends_at_the_same_bits(fast, case):
    check_continued(fast, case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_matrix(tmp_path):
    """Families x strategies x weights x shares."""
    seen = walked(tmp_path, "both", *MATRIX)
    for case in MATRIX:
        check_as_one(seen, case)
        check_continued(seen, case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_two_four_and_one_processes_are_one_run(tmp_path, family):
    """With other strategies, too; sums of floats in another order are all that differs."""
    whole = walked(
        tmp_path / "whole", "moved", f"{family}/single/full/uneven", ranks=1, stop_at=10
    )
    losses: list[float] = []
    for ranks, strategy, stop_at in ((1, "single", 2), (2, "fsdp", 4), (4, "fsdp", 7), (1, "single", 10)):  # fmt: skip  # noqa: E501
        case = f"{family}/{strategy}/full/uneven"
        (seen, *others) = walked(
            tmp_path / "parts", "moved", case, ranks=ranks, stop_at=stop_at
        )
        losses += seen[case]["losses"]
        assert all(other == seen for other in others)
        notes = " ".join(seen[case]["notes"])
        assert ("ranks: " in notes) == bool(losses[2:])
    ((alone),) = whole[0].values()
    assert losses == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2/fsdp/full/even", "t5/fsdp/lora/even"])
def test_an_infinite_gradient_of_one_rank_is_applied_by_none(tmp_path, case):
    """By `found_inf`, as on a GPU; nothing of the optimizer's state counts the update."""
    for rank in walked(tmp_path, "skipped", case):
        seen = rank[case]
        assert seen["finite"] == seen["changed"] == [True, False, True]
        assert seen["state"] == [[1.0], [1.0], [2.0]]


STEPS = 24


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory) -> Path:
    return prepared_folder(
        tmp_path_factory.mktemp("ranks"),
        steps=STEPS,
        shape=", resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0",
        train="micro_batch_rows: 2, strategy: fsdp",
        observe=', gradients: "3 steps"',
    )


def model_sha256(run: Path) -> str:
    return hashlib.sha256(
        (run / "model" / "model.safetensors").read_bytes()
    ).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(kitchen) -> Path:
    agent = torchrun(kitchen, "whole", timeout=600)
    said = agent.communicate()[0]
    assert agent.returncode == 0, said[-6000:]
    return kitchen / "whole"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_whole_run_by_fsdp_is_the_run_of_one_process(kitchen, undisturbed):
    """Texts, scores, gradients by layer and the finished model, too."""
    alone = train(kitchen, "alone", "train.strategy=single")
    said = alone.communicate()[0]
    assert alone.returncode == 0, said[-3000:]
    assert losses_of(undisturbed) == pytest.approx(
        losses_of(kitchen / "alone"), rel=1e-4
    )
    one, two = (
        json.loads((run / "evaluation.json").read_text())
        for run in (kitchen / "alone", undisturbed)
    )
    assert one["heldout"]["loss"] == pytest.approx(two["heldout"]["loss"], rel=1e-4)

    def told(run: Path) -> list[dict[str, Any]]:
        events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [e["groups"] for e in events if e["event"] == "gradients"]

    for here, there in zip(told(undisturbed), told(kitchen / "alone"), strict=True):
        assert {n: g["grad_norm"] for n, g in here.items()} == pytest.approx(
            {n: g["grad_norm"] for n, g in there.items()}, rel=1e-3
        )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_of_a_rank_under_fsdp_change_no_bit(kitchen, undisturbed):
    chance, kills, runs = random.Random(7), 0, 0
    while kills < 20:
        run = kitchen / f"killed-{runs}"
        runs += 1
        while True:
            agent = torchrun(kitchen, run.name, timeout=600)
            before = (
                max(losses_of(run), default=0)
                if (run / "metrics.jsonl").exists()
                else 0
            )
            target = before + chance.randint(1, 6)
            while agent.poll() is None and kills < 20:
                done = (
                    max(losses_of(run), default=0)
                    if (run / "metrics.jsonl").exists()
                    else 0
                )
                if done >= target:
                    both = ranks_of(agent)
                    if len(both) == 2:
                        time.sleep(chance.random() * 0.2)
                        chance.choice(both).kill()
                        kills += 1
                        break
                time.sleep(0.02)
            said = agent.communicate()[0]
            if agent.returncode == 0:
                break
            # The launcher names the killed rank, the one that missed it, or both, by who was first.
            assert re.search(r"exitcode\s*: -9\b|RankLost at step", said), said[-6000:]
        assert losses_of(run) == losses_of(undisturbed)
        assert model_sha256(run) == model_sha256(undisturbed)
        shutil.rmtree(run)


@pytest.mark.parametrize("name", ["muon", "adafactor", "adamw8bit"])
def test_what_needs_whole_tensors_is_refused(name):
    config = load_config("demo", [f"optim.name={name}", "train.strategy=fsdp"]).config
    runtime = Runtime(ranks=Ranks(rank=0, world_size=2))
    with pytest.raises(ConfigError, match=f"optim.name={name} needs whole tensors"):
        choose_strategy(config.train, config.adapter, config.optim, None, runtime)


def test_one_loss_scale_for_all_parts_is_refused():
    config = load_config("demo", ["train.strategy=fsdp"]).config
    runtime = Runtime(
        ranks=Ranks(rank=0, world_size=2), scaler=torch.amp.GradScaler("cpu")
    )
    with pytest.raises(ConfigError, match="fp16 needs one loss scale for all parts"):
        choose_strategy(config.train, None, OptimConfig(), None, runtime)
