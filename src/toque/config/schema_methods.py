"""Settings of optional methods: adapters, noise, curriculum, augmentation, profiling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, cast

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
)
from toque.units import Duration


class AdapterConfig(Config):
    """A small trainable part beside frozen weights (docs/guides/adapters.md)."""

    kind: Literal["lora", "dora", "rslora"] = "lora"
    """lora: Hu et al. 2021. rslora: scaled for large r. dora: row lengths trained too, slower."""
    r: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Rank. auto: 16, and 8 for models of 3B parameters and more."""
    alpha: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Scale of what the adapter adds, divided by r (rslora: by its root). auto: 2 r."""
    dropout: Fraction = 0.05
    """Share of an adapter's inputs dropped while training."""
    target_modules: (
        Literal["auto", "all"]
        | Annotated[
            tuple[str, ...],
            AsTuple,
            Field(min_length=1),
            Allowed("a list of layer names such as [q, v]"),
        ]
    ) = "auto"
    """Linear layers that are adapted, by the last part of their names. auto: the attention
    projections q and v (joined ones whole); all: every one but the output head."""
    quantize_base: Literal["int8", "nf4"] | None = None
    """Hold the frozen matrices in fewer bits and turn them back at each product (QLoRA, Dettmers et
    al. 2023): int8 takes half of 16 bits, nf4 a quarter, which needs the extra quant. null: in the
    format of the products, to the same bits as in float32. (docs/explanation/fit-a-model.md)"""


class CyclesConfig(Config):
    """The cycles of the schedule cosine_restarts (Loshchilov and Hutter 2017)."""

    first: Interval = Duration(1000, "steps")
    """Length of the first cycle (T_0), which begins when warmup ends."""
    growth: Annotated[int, Field(ge=1)] = 2
    """Each cycle is this many times as long as the one before (T_mult)."""


class NoiseConfig(Config):
    """Gaussian noise on the gradients, annealed (Neelakantan et al. 2015)."""

    eta: Annotated[float, Field(gt=0)] = 0.3
    """Variance at the first update."""
    gamma: Annotated[float, Field(ge=0)] = 0.55
    """The variance of update t is eta / (1 + t)^gamma."""


class OutliersConfig(Config):
    """Updates far from those before are not applied."""

    sigma: Annotated[float, Field(gt=0)] = 6.0
    """Standard deviations above their means over recent updates at which a loss or a gradient's
    norm is an outlier."""
    window: Annotated[int, Field(ge=2)] = 128
    """Updates those means are over; judging begins when half of them have been seen."""
    roll_back_after: Annotated[int, Field(ge=1)] = 4
    """Outliers in a row after which the weights of the newest checkpoint are taken again and the
    examples since then passed over; at the second time within a window the run ends."""


class StageFilters(Config):
    """Bounds of the examples in a stage of a curriculum; those that lack a number pass."""

    max_difficulty: DifficultyName | None = None
    """No harder than this, by the label of the source or ours; null: any."""
    min_quality: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Quality score from here on."""
    max_ingredients: Annotated[int, Field(ge=1)] | None = None
    """Most ingredients of a dish; null: any number."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Most steps of a dish; null: any number."""

    @property
    def begins(self) -> Duration:
        """`from`, which is a word of Python and no attribute's name."""
        return cast("Duration", getattr(self, "from"))


_FROM = (
    AnyDuration,
    Field(
        description="Where the stage begins: a share of the run, or in the unit of "
        'train.stop_after. The first begins at "0 %".'
    ),
)
if TYPE_CHECKING:
    StageConfig = StageFilters
else:
    StageConfig = create_model("StageConfig", __base__=StageFilters, **{"from": _FROM})


class CurriculumConfig(Config):
    """Stages that see different examples (docs/guides/tasks-and-curriculum.md)."""

    stages: Annotated[
        tuple[StageConfig, ...],
        AsTuple,
        Field(min_length=1),
        Allowed('a list such as [{from: "0 %", max_difficulty: easy}, {from: "50 %"}]'),
    ]
    """One after the other; each sees what its bounds select, and nothing is bound but what it
    says."""


class SpanCorruptionConfig(Config):
    """T5's pretraining: spans are cut out of a text and asked for (docs/guides/prepare-data.md)."""

    density: Annotated[float, Field(gt=0, le=0.5)] = 0.15
    """Share of a text's tokens that are cut out."""
    mean_length: Annotated[float, Field(ge=1)] = 3.0
    """Tokens of a span on average."""


Probability = Annotated[float, Field(ge=0, le=1)]


class AugmentationConfig(Config):
    """Other wordings, new in each epoch (docs/guides/tasks-and-curriculum.md)."""

    prompt_formats: bool = False
    """Ask in one of eight wordings, each as likely, instead of one."""
    instructions: Probability = 0.0
    """Share of examples that name the ingredients in other words than "using ingredients:"."""
    paraphrase: Probability = 0.0
    """Share of examples whose steps begin sentences with other verbs of the same meaning."""
    substitute: Probability = 0.0
    """Share of examples with an ingredient replaced, in prompt and recipe, where that is safe."""
    tips: Probability = 0.0
    """Share of examples that end with a tip."""


class ProfileConfig(Config):
    """Updates of every session that are traced (docs/guides/watch-the-machine.md)."""

    wait: Annotated[int, Field(ge=0)] = 2
    """Updates before each trace that nothing is done to."""
    warmup: Annotated[int, Field(ge=1)] = 2
    """Updates after them with the profiler on and not traced, as its beginning is slow."""
    active: Annotated[int, Field(ge=1, le=1000)] = 5
    """Updates of a trace. A trace of a large model takes about 10 MB an update."""
    repeat: Annotated[int, Field(ge=1, le=1000)] = 3
    """Traces, one after the other."""
    stacks: bool = False
    """Record where in the code operations are called from: slower, and ten times as large."""
    memory: bool = True
    """Record every allocation: the table has a column of bytes, and the trace a timeline."""


class OptimisationsConfig(Config):
    """Switches of what makes a run faster (docs/explanation/memory-and-speed.md)."""

    attention: Literal["auto", "segments", "flex", "dense"] = "auto"
    """Way to keep the examples of a row apart. segments: each computed alone, on a CPU. flex:
    FlexAttention, on a GPU. dense: masks of all pairs of positions, which work everywhere. auto:
    segments on a CPU; on a GPU flex, or dense where flex does not work."""
    dropout: bool = True
    """Draw dropout's masks from a hash of seed, step, token and layer: the same for every
    train.micro_batch_rows, packing and number of ranks. false: from PyTorch's generator, whose
    masks depend on them."""
    activations: bool = True
    """Compute GPT-2's and T5 v1.1's GELU in one kernel instead of eight steps."""
    layers: bool = True
    """Compute layers by the library that is fastest in the run's precision, on a CPU."""
    head: bool = True
    """Compute the loss in chunks, so that the logits of a micro-batch never exist at once."""
    prefetch: bool = True
    """Make the next batches while an update is computed; on a GPU copy them there, too."""
    background_saves: bool = True
    """Write checkpoints while training goes on."""
