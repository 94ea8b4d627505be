"""Settings of a run: one frozen tree of pydantic models, strict about names and values.

The text under a field is its help, and its line in the configuration page. Combinations of values
are checked by `toque.config.cross_checks`; `toque.config.resolve` runs both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from annotated_types import Predicate
from pydantic import Discriminator, Field, PrivateAttr, Tag

from toque.config.field_types import (
    ANY_TEXTS,
    OF_CLASSES,
    Allowed,
    AnyDuration,
    AsTuple,
    Auto,
    BatchSize,
    ColumnPart,
    Config,
    Day,
    EncodingName,
    FileName,
    FolderName,
    Fraction,
    Interval,
    MetricName,
    Once,
    OwnTaskName,
    PythonName,
    RunLength,
    ScoreName,
    Seconds,
    SecretAddress,
    StepInterval,
    TaskMetricName,
    TaskName,
    TokenizerName,
)
from toque.config.schema_methods import (
    AdapterConfig,
    AugmentationConfig,
    CurriculumConfig,
    CyclesConfig,
    NoiseConfig,
    OptimisationsConfig,
    OutliersConfig,
    ProfileConfig,
    SpanCorruptionConfig,
)
from toque.units import Duration

TRAINED = "trained:"
"""Prefix of a `model.tokenizer` that is learnt, before its number of pieces."""
CHAT_DATE = "2024-07-26"
"""Day that Llama 3's chat template writes if it cannot read a clock."""
DEFAULT_VOCABULARY = 8192
"""Pieces learnt when a model from scratch names no tokenizer; small models spend little on them."""


class ModelConfig(Config):
    """The model, and the weights it starts from."""

    family: Literal["t5", "gpt2", "neox", "llama", "auto"] = "t5"
    """Architecture. auto: read from the checkpoint that `start_from` names."""
    start_from: Annotated[FileName, Allowed("scratch, a Hugging Face folder or a hub name")] = (
        "scratch"
    )
    """scratch (random weights), a Hugging Face folder, or a hub name."""
    shape: dict[str, Any] = {}  # noqa: RUF012  # pydantic copies it
    """Arguments of the family's Hugging Face config, e.g. {d_model: 256}; from scratch only."""
    tokenizer: TokenizerName = "auto"
    """A Hugging Face folder, a hub name, or trained:N (learnt from the data and kept in the store).
    auto: the checkpoint's own; from scratch, trained:8192."""

    licence: str | None = None
    """Licence of the finished model as the hub spells it, e.g. apache-2.0, for its card. null: the
    one that the card of `start_from` names; a card of which none is known says so."""

    @property
    def tokenizer_source(self) -> str:
        """`tokenizer` with auto resolved: a folder, a hub name or "trained:N"."""
        if self.tokenizer != "auto":
            return self.tokenizer
        scratch = self.start_from == "scratch"
        return f"{TRAINED}{DEFAULT_VOCABULARY}" if scratch else self.start_from


class FilesConfig(Config):
    """One file, folder or pattern of raw data, here, in a bucket or on the hub."""

    path: Annotated[
        FileName, Allowed("a file, a folder or a pattern, also at gs:// or s3://, or hf:NAME:SPLIT")
    ]
    """A file, a folder or a pattern such as "dump/*.jsonl.gz" or "gs://bucket/dumps/"; or a Hugging
    Face dataset, "hf:NAME:SPLIT", in full "hf:NAME@REVISION:CONFIGURATION:SPLIT[:ROWS]", of which
    the first ROWS rows are streamed and the rest is not downloaded."""
    format: Literal["auto", "recipes", "text", "tokens"] = "auto"
    """recipes: any of the known recipe formats (docs/reference/formats.md); text: plain text
    documents; tokens: .npy or .npz files of token ids; auto: by what the file holds, never by its
    name."""
    columns: dict[
        ColumnPart,
        str | Annotated[tuple[str, ...], AsTuple, Field(min_length=1)],
    ] = {}  # noqa: RUF012
    """Fields that hold a recipe's parts, e.g. {title: dish, steps: method}, where a table's or JSON
    file's own names are not recognised; or {text: body}, the field that holds a document; or
    {prompt: question, target: answer}, for texts of your own task, taken as they are; a prompt of
    several fields is a list, {prompt: [question, context], target: answer}, or a template over
    fields, "Q: {question} Context: {context}"; or {messages: messages} for conversations, which are
    lists of messages, or {system: role, prompt: question, target: answer} for those of one
    answer."""
    max_files: Annotated[int, Field(ge=1)] | None = None
    """Read only this many files, the first ones by name, so that every start reads the same; in a
    bucket the others are not fetched. null for all."""
    licence: str | None = None
    """Licence of the data, e.g. CC-BY-4.0, as the finished model's card names it; null: not known.
    """


class SourceConfig(FilesConfig):
    """Raw data to train on, of which a share may be held out."""

    weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Times an epoch passes over this source's training examples: 2.0 repeats each, 0.5 takes half
    of them, the other half in the next epoch. Changing it needs no new store."""


class TaskConfig(Config):
    """A task of your own, made of the columns of the data (docs/guides/own-tasks.md)."""

    prompt: str | Annotated[tuple[str, ...], AsTuple, Field(min_length=1)]
    """Template of the prompts over columns, "Review: {text}\\nSentiment:"; or a column, or a list
    of columns."""
    target: str
    """Template of the answers, or their column."""
    classes: Annotated[
        tuple[str, ...],
        AsTuple,
        Once,
        Predicate(lambda classes: len(classes) != 1 and all(map(str.strip, classes))),
        Allowed("a list of two texts or more, each once"),
    ] = ()
    """Answers that there are. A row with another one is left out and counted; a model's answer
    counts where it is one of them, blanks around it aside. []: any text."""
    metrics: Annotated[
        tuple[TaskMetricName, ...],
        AsTuple,
        Once,
        Allowed(f"a list of {', '.join((*ANY_TEXTS, *OF_CLASSES))}, module:function, each once"),
    ] = ()
    """Metrics of the model's answers, shown as NAME_METRIC, e.g. sentiment_accuracy; a function of
    your own is module:function. []: accuracy and macro_f1 of classes, and otherwise those of
    evaluation.metrics."""


class DataConfig(Config):
    """Raw files, and the store that is made of them."""

    sources: Annotated[
        tuple[SourceConfig, ...], AsTuple, Allowed("a list such as [{path: recipes.jsonl.gz}]")
    ] = ()
    """Raw files; `train` refuses other ones than the store was prepared from. May stay empty when
    the store exists already."""
    validation: Annotated[
        tuple[FilesConfig, ...], AsTuple, Allowed("a list such as [{path: heldout.jsonl}]")
    ] = ()
    """Raw files that are held out, whole, from training; `validation_fraction` then does not apply.
    A record that is also in `sources` is left out there, as a duplicate."""
    store: FolderName = "stores/cookbook"
    """Folder of the prepared, tokenised data."""
    tasks: Annotated[
        Annotated[tuple[TaskName, ...], AsTuple, Once, Field(min_length=1), Tag("(names)")]
        | Annotated[dict[OwnTaskName, TaskConfig], Field(min_length=1), Tag("(own)")],
        Discriminator(lambda value: "(own)" if isinstance(value, Mapping) else "(names)"),
        Allowed(
            f"a list of {', '.join(get_args(TaskName))}, each once; or tasks of your own, "
            "{NAME: {prompt: ..., target: ...}}, each NAME a word that is none of these"
        ),
    ] = ("write",)
    """Tasks a recipe is turned into, all in one store (docs/guides/tasks-and-curriculum.md). write:
    the recipe from its title and ingredients. Text sources always make documents. Or tasks of your
    own, by name, which every source without `columns` is turned into that has their columns."""
    task_weights: dict[str, Annotated[float, Field(gt=0, le=100)]] = {}  # noqa: RUF012
    """Times an epoch passes over a task's training examples, e.g. {nutrition: 0.5}; 1 where not
    named. Changing it needs no new store."""
    task_temperature: Annotated[float, Field(ge=1, le=100)] | None = None
    """Mix tasks by (their examples)^(1/T) instead (Raffel et al. 2020): 1 as they are, 100 nearly
    equal shares; an epoch stays as long. null: by task_weights."""
    chat_template: str = "auto"
    """Jinja by which conversations become text: a file, or plain or chatml. auto: the tokenizer's
    own, and plain where it has none. The finished model keeps it."""
    chat_date: Day = CHAT_DATE
    """Today's date for a template that reads the clock (strftime_now), in every conversation and
    whenever the model is asked, so that the same data give the same store on any day."""
    loss_on: Literal["answers", "last_answer"] = "answers"
    """Part of a conversation that is learnt: all its answers, or the last one."""
    max_prompt_tokens: Annotated[int, Field(ge=8)] | Auto = "auto"
    """Longest prompt, in tokens. auto: what 99 % of a sample's prompts fit in, within the model's
    positions and 2048; the data report says what was chosen. Documents are split at 256 and 512."""
    max_target_tokens: Annotated[int, Field(ge=8)] | Auto = "auto"
    """Longest target, in tokens. auto: as of prompts. Both limits together bound a conversation."""
    on_overlong: Literal["auto", "error", "drop", "truncate", "split"] = "auto"
    """Treatment of an example that is longer; what was done is counted and printed.
    auto: recipes are truncated, documents are split."""
    validation_fraction: Fraction = 0.1
    """Share of the recipes or documents held out from training."""
    max_examples: Annotated[int, Field(ge=1)] | None = None
    """Use only this many examples, the first ones: files take turns, and reading stops when enough
    are found. null for all."""
    min_quality: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out recipes whose quality score is below this."""
    max_bad_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a source's records that may be unusable; with more, the source is refused: its
    format is likely another one. What is dropped is counted by reason in any case."""
    encoding: EncodingName = "utf-8"
    """Character encoding of text, JSON, CSV and web pages. Old exports may be latin-1 or cp1252:
    then many of their bytes are not UTF-8, which the data report counts."""
    dedup: Literal["none", "exact", "near"] = "exact"
    """exact: of equal recipes, apart from case and spacing, only one is kept. near: of recipes and
    documents that share most of their wording, too."""
    engine: Literal["local", "ray"] = "local"
    """Place where preparing runs. local: the cores of this machine. ray: a Ray cluster that shares
    a file system; the store is the same."""

    @property
    def own_tasks(self) -> Mapping[str, TaskConfig]:
        """The tasks of the user's own by name; none where recipes are turned into theirs."""
        return self.tasks if isinstance(self.tasks, Mapping) else {}

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks that a store may hold; an index is a code of its column `task`."""
        return *get_args(TaskName), *self.own_tasks


class OptimConfig(Config):
    """The optimizer and its learning rate."""

    name: Annotated[
        Literal["adamw", "adafactor", "muon", "adamw8bit"] | PythonName,
        Allowed("adamw, adafactor, muon, adamw8bit, or module:function"),
    ] = "adamw"
    """adamw: decoupled weight decay. muon: orthogonalised updates of the inner matrices, AdamW for
    the rest. adamw8bit keeps 2 bytes a weight where AdamW keeps 8. Their peak_lr is AdamW's.
    adafactor keeps next to nothing; its peak_lr is relative to the size of each weight and capped
    at 1 / sqrt(step): 1e-3 to fine-tune a T5, 1e-2 to train one from scratch, schedule constant.
    Weights that begin at zero move very slowly under it: not for adapters. module:function, such as
    torch.optim:NAdam: one of your own, called with groups of weights, lr, and those of betas, eps
    and momentum that are set."""
    betas: (
        Annotated[tuple[Fraction, Fraction], AsTuple, Allowed("two numbers from 0 below 1")] | None
    ) = None
    """Decay rates of AdamW's averages of gradients and of their squares; null: 0.9 and 0.999."""
    eps: Annotated[float, Field(gt=0)] | None = None
    """Number added to the root of AdamW's average of squares; null: 1e-8."""
    momentum: Fraction | None = None
    """Decay rate of muon's average of gradients, null: 0.95; or the momentum of your own."""
    peak_lr: Annotated[float, Field(gt=0)] = 3e-4
    """Highest learning rate, reached when warmup ends."""
    schedule: Literal["constant", "linear", "cosine", "cosine_restarts", "inverse_sqrt", "wsd"] = (
        "cosine"
    )
    """Course of the rate from the peak to `min_lr`. linear, cosine: down by the end of the run;
    cosine_restarts: in cycles; inverse_sqrt: as 1 / sqrt(time), never quite down; wsd: at the peak
    until a linear cooldown at the end."""
    cycles: CyclesConfig | None = None
    """Cycles of cosine_restarts; null: 1000 steps, then each twice as long."""
    cooldown: Interval | None = None
    """Length of the cooldown of wsd, at the end of the run; null: 20 %."""
    warmup: AnyDuration = Duration(3, "%")
    """Time in which the rate rises linearly to the peak; a share of the run, so that the shortest
    run reaches it."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate the decay falls to."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Applied to matrices; never to biases and norms."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """A longer gradient is scaled down to this norm."""
    label_smoothing: Fraction = 0.0
    """Share of the target probability spread over the vocabulary (Szegedy et al. 2016)."""
    gradient_noise: NoiseConfig | None = None
    """Noise added to the clipped gradients, annealed."""
    outliers: OutliersConfig | None = None
    """Leave out updates whose loss or gradient lies far above those before, or is not a number.
    null: apply all, and end the run at what is not a number
    (docs/guides/train-and-resume.md)."""


class EarlyStoppingConfig(Config):
    """Conditions for stopping before `stop_after`."""

    patience: Annotated[int, Field(ge=1)] = 3
    """Evaluations in a row without improvement that end the run."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Change for the better that counts as an improvement; nats for the loss."""
    metric: ScoreName = "loss"
    """Metric that must improve: the held-out loss, perplexity, or a score of the texts written at
    every evaluation, e.g. bleu, rougeL, recipe_score (docs/guides/evaluate-and-compare.md)."""


class TrainConfig(Config):
    """The loop: how long, how much at a time, when to evaluate and save."""

    stop_after: RunLength = Duration(3, "epochs")
    """Length of the whole run. A time is that of its updates; "10 minutes total" or "8 hours total"
    is that of the whole command, reading, measuring, evaluating and writing included."""
    time_limit: Seconds | None = None
    """Time of the whole command after which training ends, even if `stop_after` is not reached.
    null: no limit but a `stop_after` such as "10 minutes total"."""
    batch: BatchSize = Duration(16384, "tokens")
    """Amount of data in one update. Changing it changes the result."""
    micro_batch_rows: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Rows computed at once. Less needs less memory; the update stays the same. auto: on a CPU
    4,096 tokens, on a GPU the most that fit, measured before the first update."""
    readers: Annotated[int, Field(ge=1, le=64)] = 1
    """Threads that make batches ahead of the loop; the batches stay the same. One is enough for a
    local disk; more help where reading waits, as on a network disk (docs/guides/doctor.md)."""
    row_tokens: Annotated[int, Field(ge=16)] | Auto = "auto"
    """Length of a packed row, in tokens; for T5, of its target side. auto: chosen from the data."""
    pack: bool = True
    """Put several examples in one row; attention never crosses examples."""
    precision: Literal["auto", "bf16", "fp16", "float32"] = "auto"
    """Number format of the matrix products; weights stay float32. auto: bf16 where it is fast."""
    compile: bool | Auto = "auto"
    """torch.compile, which takes a minute. auto: on a GPU. If it fails, the run goes on without."""
    gradient_checkpointing: bool | Auto = "auto"
    """Recompute activations in backward to save memory; the same bits, about a third slower.
    auto: when a single row does not fit without."""
    activation_offload: bool = False
    """Keep what `gradient_checkpointing` keeps, the inputs of the blocks, in the machine's memory
    until backward asks for them. The same bits; for GPUs only (docs/explanation/fit-a-model.md)."""
    evaluate_every: Interval = Duration(200, "steps")
    """Time between evaluations on the held-out examples; the end is always evaluated."""
    save_every: Interval = Duration(200, "steps")
    """Time between checkpoints; the end is always saved."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints that are kept."""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """Checkpoints with the best evaluation that are kept besides."""
    best_by: ScoreName = "loss"
    """Metric that makes an evaluation the best, for `keep_best` and the finished model: loss, or
    another metric, as of `early_stopping.metric`."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run when the held-out loss, or another metric, stops improving; null: never."""
    deterministic: bool = True
    """The same bits in every run on the same machine; costs a little speed on some GPUs."""
    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """Division of the model among processes (docs/guides/several-gpus.md). single: refuse to be one
    of several. ddp: all of it in each. fsdp: a part of every weight, gradient and optimizer state
    in each. auto: single alone, else ddp where it fits into memory, else fsdp."""
    optimisations: OptimisationsConfig = Field(default_factory=OptimisationsConfig)
    """Switches of what makes a run faster; everything is on."""

    @property
    def command_seconds(self) -> float | None:
        """Seconds that the whole command may take; None without a limit."""
        limits = [self.stop_after] if self.stop_after.total else []
        limits += [] if self.time_limit is None else [self.time_limit]
        return min((limit.seconds or 0.0 for limit in limits), default=None)


class CheckpointConfig(Config):
    """Copies of checkpoints beside the run's folder, and the layout of all."""

    upload: (
        Annotated[
            str,
            Field(pattern=r"^(gs|s3)://[^/@\s]+/[^/\s]"),
            Allowed("an address such as gs://bucket/runs/cookbook or s3://bucket/runs/cookbook"),
        ]
        | None
    ) = None
    """Folder in a bucket that checkpoints, metrics and the finished model are copied to while
    training goes on; from there another machine continues
    (docs/guides/buckets-and-the-hub.md). null: nowhere."""
    layout: Literal["auto", "whole", "sharded"] = "auto"
    """whole: rank 0 writes whole tensors. sharded: every rank writes its own slices, side by side,
    under one manifest; all ranks must see the run's folder. Each is continued from by any number of
    processes and any strategy. auto: sharded where the strategy shards the weights and a whole
    checkpoint would take more than half of rank 0's free memory."""


class EvaluationConfig(Config):
    """Measurements on held-out examples."""

    max_examples: Annotated[int, Field(ge=1)] | None = 512
    """Held-out examples per evaluation; null for all."""
    generate: Annotated[int, Field(ge=0)] = 16
    """Held-out prompts to write for in the final evaluation, and as many of each task with metrics
    of its own; the texts are scored. 0: no text is written for held-out prompts, while training
    neither."""
    texts: Annotated[int, Field(ge=0)] = 16
    """Number of those prompts that are written for and scored at every evaluation while training,
    the same each time. What that costs is printed; 0: the held-out loss alone."""
    prompts: Annotated[tuple[str, ...], AsTuple] = ()
    """Own prompts to write for at every evaluation, in any words, e.g. [Make a healthy breakfast]:
    asked in the form the model is trained on, shown with their quality, kept in `samples.jsonl`."""
    metrics: Annotated[
        Auto | Annotated[tuple[MetricName, ...], AsTuple],
        Allowed(f"auto, or a list of auto, {', '.join(ANY_TEXTS)}, module:function"),
    ] = "auto"
    """Metrics of the texts that are written, those of tasks with metrics of their own aside; auto:
    bleu, rouge, repetition and recipe.
    A function of your own is module:function, e.g. [auto, mymodule:my_metric]
    (docs/guides/evaluate-and-compare.md)."""


class ObserveConfig(Config):
    """Records of a training run; nothing here can change a number."""

    log_every: Interval = Duration(10, "steps")
    """Time between lines of `metrics.jsonl`."""
    summary: Interval | None = Duration(500, "steps")
    """Time between summaries in `training.log`: speed, utilisation, memory, what an update sees,
    scaling, signs of convergence. null: none."""
    system: Seconds | None = Duration(10, "seconds")
    """Time between looks at the machine, written as `system` events: processor, memory, disk and
    network, and each GPU's use, memory, power, heat and throttling; null: never
    (docs/guides/watch-the-machine.md)."""
    gradients: StepInterval | None = Duration(100, "steps")
    """Updates between `gradients` events: for each group of layers the norm of its gradient; null:
    never."""
    profile: ProfileConfig | None = None
    """Trace some updates with torch's profiler, into `trace/` of the run folder; rates leave these
    updates out. null: none."""
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        AsTuple,
        Allowed("a list of tensorboard, wandb, trackio"),
    ] = ()
    """Experiment trackers fed with copies of `metrics.jsonl`, from threads of their own: one that
    hangs or fails costs its copies, nothing else (docs/guides/callbacks-and-trackers.md)."""
    webhook: Annotated[SecretAddress, Field(repr=False)] = None
    """Address notified when a run starts, has a new lowest held-out loss, ends or fails;
    Discord's form for its addresses, plain JSON for others. It is kept out of every file and
    message: better env:NAME, so that the run's own config.yaml works, too."""
    callbacks: Annotated[tuple[PythonName, ...], AsTuple, Allowed("a list of module:Class")] = ()
    """Classes of your own that watch the run, e.g. [mymodule:Watcher]
    (docs/guides/callbacks-and-trackers.md)."""


class RunConfig(Config):
    """A whole run."""

    run_dir: FolderName = "runs/cookbook"
    """Folder of the run: checkpoints, metrics, the finished model. At gs:// or s3:// it is worked
    on in a folder of this machine and uploaded (`checkpoint.upload`). In every path `~` is your
    home folder."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 17
    """Seed of all randomness: weights, data order, dropout, sampling."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    adapter: AdapterConfig | None = None
    """Train a small adapter (LoRA) beside the frozen weights of a checkpoint."""
    data: DataConfig = Field(default_factory=DataConfig)
    curriculum: CurriculumConfig | None = None
    """Stages that see different examples, e.g. the easy ones first; null: all from the start."""
    span_corruption: SpanCorruptionConfig | None = None
    """Pretrain a T5: every example, prompt and target joined, becomes a text with gaps and the
    gaps' content, new in each epoch; null: examples are asked and answered as they are."""
    augmentation: AugmentationConfig | None = None
    """Vary prompts and texts while training; null: as they are stored."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)

    _foreign: dict[str, dict[str, str]] = PrivateAttr(default_factory=dict)

    @property
    def foreign_code(self) -> Mapping[str, Mapping[str, str]]:
        """Code that a run's own file names and nobody vouches for.

        By setting: each name, and the file and line where it is written. It goes with every copy of
        the configuration, and is no part of what is written down.
        """
        return self._foreign

    def with_foreign_code(self, names: Mapping[str, Mapping[str, str]]) -> Self:
        """The same configuration with these names not vouched for; with none, all are."""
        copy = self.model_copy()
        copy._foreign = {setting: dict(found) for setting, found in names.items()}  # noqa: SLF001
        return copy
