"""Rollouts: the loss of an update against a plain loop, on one rank and on two."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import toque
from fixtures.kitchens import TINY
from tiny import model_of, shape_of
from toque.data.loader.batch_stream import Step
from toque.evaluation.rewards import Rewards
from toque.evaluation.rollouts import Rollouts, RolloutSettings, Text
from toque.models.families import FAMILIES
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import DataParallel
from toque.training.objectives.policy_gradient import advantages
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.workflows.build import build_stream
from toque.workflows.run_objective import build_objective
from training.objectives.test_dpo import gradients, plain_nats, token_nats

LIMIT, SAMPLES = 10, 4
WORDS = ["salt", "onion", "garlic", "butter", "flour", "sugar", "egg", "rice"]


@dataclass(frozen=True)
class TwoRanks(Ranks):
    """A rank that shares its sums with another `TwoRanks` in the same process."""

    shared: dict[int, list[float]] = field(default_factory=dict)

    def all_reduce_sum(self, values: Any) -> list[float]:
        self.shared[self.rank] = list(values)
        return np.sum([*self.shared.values()], axis=0).tolist()


@dataclass(frozen=True)
class Bench:
    """A store of prompts, and a model with another one as its reference."""

    config: toque.RunConfig
    store: Any
    model: Any
    reference: Any

    def rollouts(self, reward: Any, ranks: Ranks, **objective: Any) -> Any:
        """Rollouts, and the configuration of their run."""
        settings = {"rewards": {"mine:score": 1.0}, "samples": SAMPLES} | objective
        config = toque.configure(
            self.config.model_copy(
                update={"model": type(self.config.model)(start_from="m")}
            ),
            objective=settings,
            train={"batch": "6 examples"},
        )
        stream = build_stream(
            config, self.store, self.model, rank=ranks.rank, ranks=ranks.world_size
        )
        runtime = Runtime.from_settings(config.train, FAMILIES["gpt2"], Ranks())
        rollouts = Rollouts(
            self.store,
            stream.layout,
            DataParallel(self.model),
            ranks,
            Rewards({"score": reward}, {"score": 1.0}),
            RolloutSettings.for_run(config, self.store, self.model, runtime),
        )
        return rollouts, stream.plan_update(Cursor()), config


@pytest.fixture(scope="module", params=["gpt2", "t5", "llama"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Bench:
    folder = tmp_path_factory.mktemp(request.param)
    rows = [{"ask": f"Use {a} and {b}", "say": a} for a in WORDS for b in WORDS]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "ask", "target": "say"}
    shape = shape_of(request.param, dropout=0.0)
    if request.param != "t5":
        shape["initializer_range"] = 0.3  # texts that end early and differ
    model = {"family": request.param, "tokenizer": "trained:512", "shape": shape}
    config = toque.configure(
        TINY | {"model": model},
        data={
            "sources": [{"path": str(folder / "a.jsonl"), "columns": columns}],
            "store": str(folder / "store"),
            "max_target_tokens": LIMIT,
            "dedup": "none",
        },
    )
    store = toque.prepare(config).store
    vocab = store.codec().vocab_size
    models = [model_of(request.param, vocab=vocab, seed=n, shape=shape) for n in (1, 2)]
    return Bench(config, store, *models)


def length_of(_prompts: list[str], texts: list[str], _references: list[str]) -> Any:
    """Rewards that differ within a group."""
    return [len(text) % 7 for text in texts]


def plain_loss(texts: list[Text], rewards: Any, kind: str, kl: float, b: Bench) -> Any:
    """The loss of an update: a loop over its texts, and over the tokens of each."""
    groups = np.reshape(rewards, (-1, SAMPLES))
    n_tokens = sum(len(text.answer) for text in texts)
    if kind == "grpo":
        weights = advantages(groups).ravel()
        divisor = float(len(texts) * LIMIT)
    else:
        weights = np.zeros(len(texts))
        for n, group in enumerate(groups):
            if np.ptp(group):
                weights[n * SAMPLES + int(group.argmax())] = 1.0
        best = zip(weights, texts, strict=True)
        divisor = float(sum(len(text.answer) for weight, text in best if weight))
    loss: Tensor = torch.zeros(())
    for weight, text in zip(weights, texts, strict=True):
        example = text.prompt.tolist(), text.answer.tolist()
        loss = loss + float(weight) / divisor * plain_nats(b.model, *example)
        log_p = -token_nats(b.model, *example)
        with torch.no_grad():
            log_r = -token_nats(b.reference, *example)
        ratio = log_r - log_p
        loss = loss + kl / n_tokens * (ratio.exp() - 1 - ratio).sum()
    return loss


@pytest.mark.parametrize("kl", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["grpo", "best_of"])
def test_update_equals_a_plain_loop(bench, kind, kl):
    rollouts, update, config = bench.rollouts(length_of, Ranks(), kind=kind, kl=kl)
    step = rollouts.step(Cursor(), update)
    rows = [row for packed in update.rows for row in packed]
    texts = rollouts._generate(rows, Cursor())
    codec = bench.store.codec()
    written = [codec.decode(text.answer, skip_special_tokens=True) for text in texts]
    expected = plain_loss(texts, length_of([], written, []), kind, kl, bench)
    expected_gradients = gradients(bench.model, expected)

    objective = build_objective(config, bench.reference if kl else None)
    parts = step.batch.split(2)
    assert len(parts) > 1
    losses = [objective.loss_fn(bench.model, p) / step.loss_count for p in parts]
    loss = torch.stack(losses).sum()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    found = gradients(bench.model, loss)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    if kl:
        assert step.n_targets == sum(len(text.answer) for text in texts)


def test_metric_kl_is_the_mean_per_token(bench):
    rollouts, update, config = bench.rollouts(length_of, Ranks(), kind="grpo", kl=0.1)
    step = rollouts.step(Cursor(), update)
    objective = build_objective(config, bench.reference)
    objective.loss_fn(bench.model, step.batch)
    means = objective.measurements.means(Ranks(), count=step.loss_count)
    rows = [row for packed in update.rows for row in packed]
    divergences = []
    with torch.no_grad():
        for text in rollouts._generate(rows, Cursor()):
            example = text.prompt.tolist(), text.answer.tolist()
            ratio = token_nats(bench.model, *example)
            ratio = ratio - token_nats(bench.reference, *example)
            divergences += (ratio.exp() - 1 - ratio).tolist()
    assert float(means["kl"]) == pytest.approx(np.mean(divergences), rel=1e-4)


def steps_of_two_ranks(bench: Bench, reward: Any, **objective: Any) -> list[Step]:
    """The update as each of two ranks computes it. The first pass fills the sums."""
    shared: dict[int, list[float]] = {}
    for _ in range(2):
        steps = []
        for rank in range(2):
            ranks = TwoRanks(rank, 2, shared=shared)
            rollouts, update, _ = bench.rollouts(reward, ranks, **objective)
            steps.append(rollouts.step(Cursor(), update))
    return steps


@pytest.mark.parametrize("kind", ["grpo", "best_of"])
def test_two_ranks_make_the_update_of_one(bench, kind):
    settings = {"kind": kind, "kl": 0.1}
    rollouts, update, config = bench.rollouts(length_of, Ranks(), **settings)
    alone = rollouts.step(Cursor(), update)
    both = steps_of_two_ranks(bench, length_of, **settings)
    objective = build_objective(config, bench.reference)

    def loss(step: Step) -> float:
        total = objective.loss_fn(bench.model, step.batch).detach()
        return float(total) / step.loss_count

    for step in both:
        assert step.measured == pytest.approx(alone.measured, rel=1e-12)
        for count in ("n_targets", "n_tokens", "n_examples", "loss_count"):
            assert getattr(step, count) == getattr(alone, count)
    assert sum(map(loss, both)) == pytest.approx(loss(alone), abs=1e-5)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_deviation_of_large_rewards_keeps_its_digits(bench, n_ranks):
    rewards: list[float] = []

    def near_1000(prompts: list[str], texts: list[str], _: list[str]) -> list[float]:
        values = [1000.0 + 0.01 * (len(t) % 3) + 0.02 * (len(p) % 2)
                  for p, t in zip(prompts, texts, strict=True)]  # fmt: skip
        rewards.extend(values)
        return values

    if n_ranks == 1:
        rollouts, update, _ = bench.rollouts(near_1000, Ranks(), kind="grpo")
        step = rollouts.step(Cursor(), update)
    else:
        step = steps_of_two_ranks(bench, near_1000, kind="grpo")[1]
        rewards = rewards[len(rewards) // 2 :]
    assert step.measured["reward_std"] == pytest.approx(np.std(rewards), rel=1e-8)
    assert step.measured["reward"] == pytest.approx(np.mean(rewards), rel=1e-14)
