"""Settings of optional methods: adapters, noise, curriculum, augmentation, profiling."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, cast

from annotated_types import Predicate
from pydantic import Field, create_model

from toque.config.field_types import (
    Allowed,
    AnyDuration,
    AsTuple,
    Auto,
    Config,
    DifficultyName,
    Fraction,
    Interval,
    Once,
    RewardName,
    TableName,
)
from toque.units import Duration


class AdapterConfig(Config):
    """An adapter: a few trainable weights added to a frozen model (docs/guides/adapters.md)."""

    start_from: str | None = None
    """Adapter to continue: its folder, or a finished run that trained it. `model.start_from` must
    be its base, and `kind` its kind. r, alpha and target_modules are taken from it. null: new
    weights."""
    kind: Literal["lora", "dora", "rslora"] = "lora"
    """lora: Hu et al. 2021. rslora: a scale for large r. dora: also trains the norms of the rows of
    the weights, and is slower."""
    r: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Rank. auto: 16, or 8 for models with at least 3 billion parameters."""
    alpha: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Scale of the adapter's output, divided by r (rslora: by the square root of r). auto: 2 r."""
    dropout: Fraction = 0.05
    """Dropout rate of the adapter's inputs during training."""
    target_modules: (
        Literal["auto", "all"]
        | Annotated[
            tuple[str, ...],
            AsTuple,
            Field(min_length=1),
            Allowed("a list of layer names such as [q, v]"),
        ]
    ) = "auto"
    """Linear layers with an adapter, by the last part of their names. auto: the attention's q
    and v projections, or its joined projection. all: all linear layers except the output head."""
    also_train: Annotated[
        tuple[TableName, ...], AsTuple, Once, Allowed("a list of embeddings, head")
    ] = ()
    """Whole matrices to train next to the adapter: embeddings, the output head. If they share a
    matrix, either name selects it. A continued adapter trains the same matrices as before."""
    quantize_base: Literal["int8", "nf4"] | None = None
    """Store the frozen matrices with 8 (int8) or 4 (nf4) bits per weight, and dequantize them for
    each matmul (QLoRA, Dettmers et al. 2023). nf4 needs the extra quant. null: store them in the
    number format of the matmuls (docs/explanation/fit-a-model.md)."""


FROM_REWARDS = ("grpo", "best_of")
"""Objectives with texts that the model in training generates."""


class ObjectiveConfig(Config):
    """The loss that training minimises (docs/guides/learn-from-preferences.md)."""

    kind: Literal["sft", "dpo", "grpo", "best_of"] = "sft"
    """sft: cross-entropy of the targets. dpo: prefer the chosen to the rejected answer of each pair
    (Rafailov et al. 2023). The reference is the model that the run starts from. grpo: generate
    texts and learn from their rewards (Shao et al. 2024). best_of: generate texts and imitate the
    best one (Dong et al. 2023)."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """dpo: strength of the pull towards the reference. A smaller beta allows larger changes."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo: share of the pairs that are assumed to be the wrong way round (Mitchell 2023)."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of imitation, added to the loss. dpo: the chosen answer's cross-entropy per token
    (Pang et al. 2024); 1 keeps the probability of chosen answers from falling. grpo and best_of:
    the cross-entropy per token of the prompts' targets in the data; it keeps the held-out loss from
    rising."""
    length_normalised: bool = False
    """dpo: divide the log-probability of an answer by its number of tokens."""
    rewards: dict[RewardName, Annotated[float, Predicate(math.isfinite)]] = {}  # noqa: RUF012
    """grpo and best_of: scores of a text and their weights, e.g. {cookable: 1.0}. A score of weight
    0 has no effect. A function of your own is module:function. It is called with lists of prompts,
    texts and references, and returns one number per text (docs/guides/learn-from-rewards.md)."""
    samples: Annotated[int, Field(ge=2)] = 8
    """grpo and best_of: texts per prompt."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """grpo and best_of: divisor of the logits when texts are generated."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """grpo and best_of: weight of the mean divergence per token from the model in
    model.start_from. Above 0, a copy of that model stays in memory. An adapter shares its base."""

    @property
    def learns_from_rewards(self) -> bool:
        """True if the model generates the texts of an update."""
        return self.kind in FROM_REWARDS


class CyclesConfig(Config):
    """Cycles of the schedule cosine_restarts (Loshchilov and Hutter 2017)."""

    first: Interval = Duration(1000, "steps")
    """Length of the first cycle (T_0), which begins after the warmup."""
    growth: Annotated[int, Field(ge=1)] = 2
    """Ratio of a cycle's length to the previous cycle's length (T_mult)."""


class NoiseConfig(Config):
    """Gaussian noise on the gradients, which decays over time (Neelakantan et al. 2015)."""

    eta: Annotated[float, Field(gt=0)] = 0.3
    """Variance at the first update."""
    gamma: Annotated[float, Field(ge=0)] = 0.55
    """Exponent of the decay. The variance of update t is eta / (1 + t)^gamma."""


class OutliersConfig(Config):
    """Detection of outliers: updates with an unusual loss or gradient norm are skipped."""

    sigma: Annotated[float, Field(gt=0)] = 6.0
    """Limit in standard deviations above the mean of recent updates."""
    window: Annotated[int, Field(ge=2)] = 128
    """Number of recent updates. Detection begins after half as many updates."""
    roll_back_after: Annotated[int, Field(ge=1)] = 4
    """Number of consecutive outliers after which the run loads its newest checkpoint and skips the
    examples since then. The second time within a window, the run ends."""


class StageFilters(Config):
    """Limits on the examples in a stage of a curriculum. Examples without a value pass."""

    max_difficulty: DifficultyName | None = None
    """Highest difficulty, from the source or estimated. null means no limit."""
    min_quality: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Lowest quality score."""
    max_ingredients: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of ingredients. null means no limit."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of steps. null means no limit."""

    @property
    def begins(self) -> Duration:
        """The setting `from`, which is a keyword of Python."""
        return cast("Duration", getattr(self, "from"))


_FROM = (
    AnyDuration,
    Field(
        description="Start of the stage, as a percentage of the run or in the unit of "
        'train.stop_after. The first stage starts at "0 %".'
    ),
)
if TYPE_CHECKING:
    StageConfig = StageFilters
else:
    StageConfig = create_model("StageConfig", __base__=StageFilters, **{"from": _FROM})


class CurriculumConfig(Config):
    """Stages of training on different examples (docs/guides/tasks-and-curriculum.md)."""

    stages: Annotated[
        tuple[StageConfig, ...],
        AsTuple,
        Field(min_length=1),
        Allowed('a list such as [{from: "0 %", max_difficulty: easy}, {from: "50 %"}]'),
    ]
    """Stages in order. A stage does not inherit the limits of the previous one."""


class SpanCorruptionConfig(Config):
    """T5's pretraining objective: predict masked spans of a text (docs/guides/prepare-data.md)."""

    density: Annotated[float, Field(gt=0, le=0.5)] = 0.15
    """Share of a text's tokens that are removed."""
    mean_length: Annotated[float, Field(ge=1)] = 3.0
    """Mean tokens per span."""


Probability = Annotated[float, Field(ge=0, le=1)]


class AugmentationConfig(Config):
    """Random variations of the texts in every epoch (docs/guides/tasks-and-curriculum.md)."""

    prompt_formats: bool = False
    """Choose one of eight prompt formats at random instead of always the same format."""
    instructions: Probability = 0.0
    """Share of examples that replace "using ingredients:" with another phrase."""
    paraphrase: Probability = 0.0
    """Share of examples with synonyms for the verbs at the beginning of sentences."""
    substitute: Probability = 0.0
    """Share of examples with a safe substitute for an ingredient, in prompt and recipe."""
    tips: Probability = 0.0
    """Share of examples that end with a tip."""


class ProfileConfig(Config):
    """Traces of some updates in every session (docs/guides/watch-the-machine.md)."""

    wait: Annotated[int, Field(ge=0)] = 2
    """Updates before each trace without the profiler."""
    warmup: Annotated[int, Field(ge=1)] = 2
    """Updates with the profiler before the trace starts, because its start is slow."""
    active: Annotated[int, Field(ge=1, le=1000)] = 5
    """Updates per trace. A trace of a large model takes about 10 MB per update."""
    repeat: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of traces."""
    stacks: bool = False
    """Record the call stack of every operation: slower, and ten times as large."""
    memory: bool = True
    """Record every allocation: adds a column of bytes to the table and a timeline to the trace."""


class OptimisationsConfig(Config):
    """Switches for optimisations (docs/explanation/memory-and-speed.md)."""

    attention: Literal["auto", "segments", "flex", "dense"] = "auto"
    """Attention kernel that separates packed examples. segments: one example at a time, on a CPU.
    flex: FlexAttention, on a GPU. dense: a mask of all pairs of positions, on any device. auto:
    segments on a CPU; on a GPU flex, or dense if flex does not work."""
    dropout: bool = True
    """Compute dropout masks from a hash of seed, step, token and layer. The masks do not depend on
    train.micro_batch_rows, packing or the number of ranks. false: use PyTorch's generator."""
    activations: bool = True
    """Compute the GELU of GPT-2 and T5 v1.1 in one kernel instead of eight."""
    layers: bool = True
    """On a CPU, compute layers with the fastest library for the precision of the run."""
    head: bool = True
    """Compute the loss in chunks, without storing all logits of a micro-batch."""
    prefetch: bool = True
    """Build the next batches during an update and, on a GPU, copy them to it."""
    background_saves: bool = True
    """Write checkpoints in the background, while training continues."""
