"""Rollouts: the texts that the model in training generates for an update, with their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Self

import numpy as np
from transformers import PreTrainedModel

from toque.batch import Batch
from toque.config.schema import RunConfig
from toque.config.schema_methods import ObjectiveConfig
from toque.data.array_types import Floats
from toque.data.loader.batch_stream import (
    BatchStream,
    RewardedText,
    Step,
    example_keys,
)
from toque.data.loader.collate import Layout
from toque.data.loader.epoch_plan import Update
from toque.data.loader.packing import RowShape, computed_lengths, pack, round_up
from toque.data.store.token_column import Ids
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.evaluation.rewards import Rewards
from toque.keyed_random import key_of
from toque.models.config_values import max_positions
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions, Precision
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import DataParallel
from toque.training.objectives.policy_gradient import advantages, with_weights
from toque.training.runtime import Runtime
from toque.units import Cursor

# Separates these random numbers from dropout's and the sampler's.
_SEED: Final = key_of(0x726F6C6C)


@dataclass(frozen=True)
class Text:
    """Text that the model generated for a prompt of the store."""

    row: int  # store row of the prompt
    prompt: Ids
    answer: Ids  # ids of the text, and the end token if the model generated it
    is_ended: bool
    nats: float  # minus the log-probability of the answer


class _Texts:
    """Texts as the examples of a layout."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts

    def prompt(self, index: int, /) -> Ids:
        """Return the prompt ids of a text."""
        return self._texts[index].prompt

    def target(self, index: int, /) -> Ids:
        """Return the ids of a text."""
        return self._texts[index].answer


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of the texts that are generated."""

    objective: ObjectiveConfig
    max_new_tokens: int
    longest_prompt: int  # tokens
    context_length: int | None  # tokens; None means no limit
    seed: int
    precision: Precision

    @classmethod
    def for_run(
        cls,
        config: RunConfig,
        store: TokenStore,
        model: PreTrainedModel,
        runtime: Runtime,
    ) -> Self:
        """Collect the settings of a run.

        Raises:
            ConfigError: A training example has no prompt, or a prompt fills the context.
        """
        rows = store.rows("train")
        lengths = store.prompt_lengths[rows]
        if not lengths.all():
            raise ConfigError(
                f"objective.kind is {config.objective.kind}, which generates a text for every "
                f"prompt, but the store {store.path} has documents, which have no prompts. Remove "
                "them from data.sources, and prepare the data again."
            )
        if store.has_spans:
            # The prompt of a conversation is everything before its last answer.
            lengths = lengths + store.target_lengths[rows]
        limit = store.manifest.settings["max_target_tokens"]
        return cls(
            objective=config.objective,
            max_new_tokens=int(limit),
            longest_prompt=int(lengths.max()),
            context_length=max_positions(model.config),
            seed=config.seed,
            precision="bf16" if runtime.precision == "bf16" else "float32",
        )


@dataclass
class Rollouts:
    """Generator of the batches of grpo and best_of, with the weights in training.

    The texts depend only on the weights, the seed, the cursor and the prompt, so a continued run
    generates the same texts.
    """

    store: TokenStore
    layout: Layout
    sharing: DataParallel
    ranks: Ranks
    rewards: Rewards
    settings: RolloutSettings

    def feed(self, batches: BatchStream, cursor: Cursor) -> RolloutFeed:
        """Return the updates from a cursor on. It replaces `Prefetch`."""
        return RolloutFeed(self, batches, cursor)

    def step(self, cursor: Cursor, update: Update) -> Step:
        """Generate the texts of an update, score them, and give them weights.

        The batch has the texts with a weight. With `kl` it has all texts, because the divergence is
        a mean over the texts of the model. With `sft_weight` it also has the target of each prompt.
        """
        objective = self.settings.objective
        rows = list(chain.from_iterable(update.rows))
        rank_rows = rows[self.ranks.rank :: self.ranks.world_size]
        texts = self._generate(rank_rows, cursor)
        rewards = self._score(texts).reshape(-1, objective.samples)
        weights = self._weigh(rewards).ravel()
        in_batch = weights != 0.0
        if objective.kl:
            in_batch[:] = True
        indices = np.flatnonzero(in_batch)
        targets = self._targets(rank_rows) if objective.sft_weight else []
        batch = self._batch([*(texts[i] for i in indices), *targets])
        totals = self._sum_over_ranks(texts, targets, rewards, weights, batch)

        n_targets = int(totals["targets"])
        divisor = max(1.0, totals["weighted_tokens"])
        if objective.kind == "grpo":
            divisor = totals["texts"] * self.settings.max_new_tokens
        imitation = objective.sft_weight / max(1.0, totals["imitated_tokens"])
        in_loss = [weights[indices] / divisor, np.full(len(targets), imitation)]
        return Step(
            # The trainer divides by the targets of the update.
            batch=with_weights(batch, np.concatenate(in_loss) * n_targets),
            cursor=update.cursor,
            n_targets=n_targets,
            n_tokens=int(totals["tokens"]),
            n_examples=len(rows),
            n_computed=batch.n_computed,
            epoch=update.epoch,
            loss_count=max(1, n_targets),
            measured={
                "reward": totals["reward"] / totals["texts"],
                "reward_std": totals["reward_std"],
                "text_tokens": totals["text_tokens"] / totals["texts"],
                "entropy": totals["nats"] / max(1.0, totals["text_tokens"]),
                "cut_texts": totals["cut_texts"] / totals["texts"],
                "equal_groups": totals["equal_groups"] / totals["groups"],
            },
            texts=self._best_and_worst(texts, rewards),
        )

    def _targets(self, rows: Sequence[int]) -> list[Text]:
        """Read the target in the data of each prompt."""
        sides = [(row, *self.store.prompt_and_answer(row)) for row in rows]
        return [
            Text(row, prompt, answer, is_ended=True, nats=0.0)
            for row, prompt, answer in sides
        ]

    def _generate(self, rows: Sequence[int], cursor: Cursor) -> list[Text]:
        """Generate the texts of each prompt, in the order of the prompts."""
        settings = self.settings
        samples = settings.objective.samples
        codec = self.store.codec()
        prompts = [self.store.prompt_and_answer(row)[0] for row in rows]
        repeated = [prompt.tolist() for prompt in prompts for _ in range(samples)]
        nats = np.zeros(len(repeated))

        def on_logprob(number: int, logprob: float) -> None:
            nats[number] -= logprob

        where = (cursor.stage, cursor.epoch, cursor.window, cursor.row)
        options = GenerationOptions(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.objective.temperature,
            seed=key_of(_SEED, settings.seed, *where),
            precision=settings.precision,
        )
        with self.sharing.full_model() as model:
            answers = generate(
                model,
                repeated,
                options,
                eos_id=codec.end_ids,
                pad_id=codec.pad_id,
                draws=[row * samples + k for row in rows for k in range(samples)],
                on_logprob=on_logprob,
            )
        texts = []
        for number, answer in enumerate(answers):
            prompt = prompts[number // samples]
            is_ended = len(answer) < self._limit_of(prompt)
            ids = [*answer, codec.eos_id] if is_ended else answer
            texts.append(
                Text(
                    rows[number // samples],
                    prompt,
                    np.array(ids, prompt.dtype),
                    is_ended,
                    float(nats[number]),
                )
            )
        return texts

    def _limit_of(self, prompt: Ids) -> int:
        """Return the most tokens of an answer to a prompt."""
        limit = self.settings.max_new_tokens
        context_length = self.settings.context_length
        if context_length is None or self.layout.shape.source:
            return limit
        return min(limit, context_length - len(prompt) + 1)

    def _score(self, texts: Sequence[Text]) -> Floats:
        """Compute the rewards, [texts]."""
        if not texts:
            return np.zeros(0)
        codec = self.store.codec()
        rows = [text.row for text in texts]
        references = {
            row: codec.decode(self.store.prompt_and_answer(row)[1]) for row in {*rows}
        }
        return self.rewards.score(
            [codec.decode(text.prompt) for text in texts],
            [codec.decode(text.answer, skip_special_tokens=True) for text in texts],
            [references[row] for row in rows],
        )

    def _weigh(self, rewards: Floats) -> Floats:
        """Compute the weights of the texts of each prompt, [prompts, samples].

        Texts with the weight 0 are not in the batch.
        """
        if self.settings.objective.kind == "grpo":
            return advantages(rewards)
        weights = np.zeros_like(rewards)
        if len(rewards):
            np.put_along_axis(weights, rewards.argmax(1)[:, None], 1.0, axis=1)
        # If all texts are equally good, none is the best.
        weights[np.ptp(rewards, axis=1) == 0.0] = 0.0
        return weights

    def _batch(self, texts: Sequence[Text]) -> Batch:
        """Pack texts into rows of a constant shape."""
        settings = self.settings
        encoder = self.layout.shape.source > 0
        source, target = computed_lengths(
            np.array([len(text.prompt) for text in texts], np.int64),
            np.array([len(text.answer) for text in texts], np.int64),
            encoder=encoder,
        )
        longest_source, longest_target = computed_lengths(
            np.array([settings.longest_prompt]),
            np.array([settings.max_new_tokens]),
            encoder=encoder,
        )
        shape = RowShape(0, round_up(int(longest_target[0])))
        if encoder:
            n_source = max(self.layout.shape.source, round_up(int(longest_source[0])))
            shape = RowShape(n_source, shape.target)
        rows = pack(source, target, shape)
        keys = example_keys(np.array([text.row for text in texts], np.int64))
        ordered = list(chain.from_iterable(rows))
        layout = replace(self.layout, examples=_Texts(texts), shape=shape, group=1)
        return layout.batch(rows, keys=keys[ordered])

    def _best_and_worst(
        self, texts: Sequence[Text], rewards: Floats
    ) -> list[RewardedText]:
        """Decode the best and the worst text of the first prompt. Of equal texts, decode one."""
        if not texts:
            return []
        codec = self.store.codec()
        group = rewards[0]
        return [
            RewardedText(
                codec.decode(texts[i].prompt),
                codec.decode(texts[i].answer, skip_special_tokens=True),
                len(texts[i].answer),
                float(group[i]),
            )
            for i in dict.fromkeys([int(group.argmax()), int(group.argmin())])
        ]

    def _sum_over_ranks(
        self,
        texts: Sequence[Text],
        targets: Sequence[Text],
        rewards: Floats,
        weights: Floats,
        batch: Batch,
    ) -> Mapping[str, float]:
        """Sum the counts of an update over all ranks. `reward_std` is a standard deviation."""
        lengths = np.array([len(text.answer) for text in texts])
        mean = rewards.mean() if len(texts) else 0.0
        is_equal = np.ptp(rewards, axis=1) == 0.0 if len(texts) else np.zeros(0)
        sums = {
            "texts": len(texts),
            "reward": rewards.sum(),
            "squared_deviations": ((rewards - mean) ** 2).sum(),
            "text_tokens": lengths.sum(),
            "weighted_tokens": lengths[weights != 0.0].sum(),
            "imitated_tokens": sum(len(target.answer) for target in targets),
            "nats": sum(text.nats for text in texts),
            "cut_texts": sum(not text.is_ended for text in texts),
            "groups": len(rewards),
            "equal_groups": is_equal.sum(),
            "tokens": batch.n_tokens,
            "targets": batch.n_targets,
        }
        # Each rank fills its own row, so that one all-reduce gathers the numbers of all ranks.
        by_rank = np.zeros((self.ranks.world_size, len(sums)))
        by_rank[self.ranks.rank] = [*sums.values()]
        gathered = self.ranks.all_reduce_sum(by_rank.ravel().tolist())
        columns = dict(zip(sums, np.reshape(gathered, by_rank.shape).T, strict=True))
        deviation = pooled_deviation(
            columns["texts"], columns["reward"], columns["squared_deviations"]
        )
        totals = {name: float(column.sum()) for name, column in columns.items()}
        return totals | {"reward_std": deviation}


def pooled_deviation(counts: Floats, sums: Floats, squared_deviations: Floats) -> float:
    """Compute the standard deviation of the values in several groups together.

    The squares of large values would lose the digits of a small deviation (Chan, Golub and LeVeque
    1983, "Algorithms for computing the sample variance", equation 2.1).

    Args:
        counts: Number of values in each group, [groups]. At least one is not 0.
        sums: Sums of the values, [groups].
        squared_deviations: Sums of the squared deviations from the mean of the group, [groups].

    >>> pooled_deviation(np.array([2.0, 1.0]), np.array([4.0, 5.0]), np.array([2.0, 0.0]))
    1.632993161855452
    """
    mean = sums.sum() / counts.sum()
    group_means = sums / np.maximum(counts, 1.0)
    between_groups = counts * (group_means - mean) ** 2
    variance = (squared_deviations + between_groups).sum() / counts.sum()
    return float(np.sqrt(variance))


class RolloutFeed:
    """Queue of updates. The texts of an update are generated on request."""

    def __init__(
        self, rollouts: Rollouts, batches: BatchStream, cursor: Cursor
    ) -> None:
        self._rollouts = rollouts
        self._batches = batches
        self._cursor = cursor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no thread is running."""

    def next(self) -> tuple[Step, Batch]:
        """Generate the texts of the next update, and return it and its batch."""
        update = self._batches.plan_update(self._cursor)
        step = self._rollouts.step(self._cursor, update)
        self._cursor = update.cursor
        return step, step.batch
