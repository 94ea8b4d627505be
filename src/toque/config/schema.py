"""Settings of a run: one frozen tree of pydantic models, strict about names and values.

The docstring of a field is its help, and its line on the configuration page.
`toque.config.cross_checks` checks combinations of values. `toque.config.resolve` runs both checks.
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
    ObjectiveConfig,
    OptimisationsConfig,
    OutliersConfig,
    ProfileConfig,
    SpanCorruptionConfig,
)
from toque.units import Duration

TRAINED = "trained:"
"""Prefix of a `model.tokenizer` that is trained. The vocabulary size follows."""
CHAT_DATE = "2024-07-26"
"""Date that Llama 3's chat template writes if it cannot read a clock."""
DEFAULT_VOCABULARY = 8192
"""Vocabulary size of the tokenizer for a model from scratch, few enough for a small model."""


class ModelConfig(Config):
    """The model and its initial weights."""

    family: Literal["t5", "gpt2", "neox", "llama", "auto"] = "t5"
    """Architecture. auto: the architecture of the checkpoint in `start_from`."""
    start_from: Annotated[
        FileName, Allowed("scratch, a Hugging Face folder or a hub name")
    ] = "scratch"
    """scratch (random weights), a Hugging Face folder, or a hub name."""
    shape: dict[str, Any] = {}  # noqa: RUF012  # pydantic copies it
    """Arguments of the family's Hugging Face config, e.g. {d_model: 256}. From scratch only."""
    tokenizer: TokenizerName = "auto"
    """A Hugging Face folder, a hub name, or trained:N for a tokenizer with N entries that is
    trained on the data and stored with them. auto: the checkpoint's tokenizer; from scratch,
    trained:8192."""

    licence: str | None = None
    """Licence of the finished model for its model card, as a hub identifier such as apache-2.0.
    null means the licence on the card of `start_from`, if it has one."""

    @property
    def tokenizer_source(self) -> str:
        """Folder, hub name or "trained:N" of the tokenizer, with auto resolved."""
        if self.tokenizer != "auto":
            return self.tokenizer
        if self.start_from == "scratch":
            return f"{TRAINED}{DEFAULT_VOCABULARY}"
        return self.start_from


class FilesConfig(Config):
    """One file, folder or pattern of raw data, on this machine, in a bucket or on the hub."""

    path: Annotated[
        FileName,
        Allowed(
            "a file, a folder or a pattern, also at gs:// or s3://, or hf:NAME:SPLIT"
        ),
    ]
    """A file, a folder or a pattern such as "dump/*.jsonl.gz" or "gs://bucket/dumps/"; or a Hugging
    Face dataset, "hf:NAME:SPLIT", in full "hf:NAME@REVISION:CONFIGURATION:SPLIT[:ROWS]". With ROWS,
    only the first ROWS rows are streamed."""
    format: Literal["auto", "recipes", "text", "tokens"] = "auto"
    """recipes: any recipe format of docs/reference/formats.md; text: plain text documents; tokens:
    .npy or .npz files of token ids; auto: detected from the content of the file, not its name."""
    columns: dict[
        ColumnPart,
        str | Annotated[tuple[str, ...], AsTuple, Field(min_length=1)],
    ] = {}  # noqa: RUF012
    """Fields of a table or JSON file, by part. Recipes, if the names of the fields are not
    recognised: {title: dish, steps: method}. Documents: {text: body}. A task of your own:
    {prompt: question, target: answer}; these texts are not changed. A prompt of several fields is
    a list, {prompt: [question, context], target: answer}, or a template,
    "Q: {question} Context: {context}". Conversations: {messages: messages}, a list of messages, or
    {system: role, prompt: question, target: answer} for conversations of one answer. Preference
    pairs: {prompt: question, chosen: better, rejected: worse}; without prompt if both answers
    contain it."""
    max_files: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of files to read, the first ones by name. Other files in a bucket are not
    downloaded. null means all."""
    licence: str | None = None
    """Licence of the data for the finished model's card, e.g. CC-BY-4.0. null means unknown."""


class SourceConfig(FilesConfig):
    """Raw data to train on. `validation_fraction` may hold out a share."""

    weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Passes over this source's training examples per epoch. 2.0 repeats each example; 0.5 uses one
    half in this epoch and the other half in the next. A change does not need a new store."""


class TaskConfig(Config):
    """A task of your own, built from the columns of the data (docs/guides/own-tasks.md)."""

    prompt: str | Annotated[tuple[str, ...], AsTuple, Field(min_length=1)]
    """Prompt: a template over columns, "Review: {text}\\nSentiment:", a column or a list of
    columns."""
    target: str
    """Answer: a template over columns or a column."""
    classes: Annotated[
        tuple[str, ...],
        AsTuple,
        Once,
        Predicate(lambda classes: len(classes) != 1 and all(map(str.strip, classes))),
        Allowed("a list of two texts or more, each once"),
    ] = ()
    """Allowed answers. A row with another answer is dropped and counted. A model's answer must
    equal one of them, apart from surrounding spaces. [] means any text."""
    metrics: Annotated[
        tuple[TaskMetricName, ...],
        AsTuple,
        Once,
        Allowed(
            f"a list of {', '.join((*ANY_TEXTS, *OF_CLASSES))}, module:function, each once"
        ),
    ] = ()
    """Metrics of the model's answers, reported as NAME_METRIC, e.g. sentiment_accuracy. A function
    of your own is module:function. []: accuracy and macro_f1 if the task has classes, else
    `evaluation.metrics`."""


class DataConfig(Config):
    """Raw files, and the store prepared from them."""

    sources: Annotated[
        tuple[SourceConfig, ...],
        AsTuple,
        Allowed("a list such as [{path: recipes.jsonl.gz}]"),
    ] = ()
    """Raw files. `train` refuses files that differ from the files of the store. May be empty if the
    store already exists."""
    validation: Annotated[
        tuple[FilesConfig, ...],
        AsTuple,
        Allowed("a list such as [{path: heldout.jsonl}]"),
    ] = ()
    """Raw files that are held out completely from training. `validation_fraction` then does not
    apply. A record that is also in `sources` is dropped from `sources` as a duplicate."""
    store: FolderName = "stores/cookbook"
    """Folder of the prepared, tokenised data."""
    tasks: Annotated[
        Annotated[
            tuple[TaskName, ...], AsTuple, Once, Field(min_length=1), Tag("(names)")
        ]
        | Annotated[dict[OwnTaskName, TaskConfig], Field(min_length=1), Tag("(own)")],
        Discriminator(
            lambda value: "(own)" if isinstance(value, Mapping) else "(names)"
        ),
        Allowed(
            f"a list of {', '.join(get_args(TaskName))}, each once; or tasks of your own, "
            "{NAME: {prompt: ..., target: ...}}, each NAME a word that is not in this list"
        ),
    ] = ("write",)
    """Tasks made from each recipe, all in one store (docs/guides/tasks-and-curriculum.md).
    write: the recipe from its title and ingredients. Text sources always become documents. Tasks of
    your own, by name, apply to every source without `columns` that has the columns they need."""
    task_weights: dict[str, Annotated[float, Field(gt=0, le=100)]] = {}  # noqa: RUF012
    """Passes over a task's training examples per epoch, e.g. {nutrition: 0.5}; 1 for other tasks.
    A change does not need a new store."""
    task_temperature: Annotated[float, Field(ge=1, le=100)] | None = None
    """Temperature T: mix tasks in proportion to (number of examples)^(1/T) (Raffel et al. 2020). 1
    keeps their shares; 100 makes them nearly equal. The length of an epoch does not change. null:
    use `task_weights`."""
    chat_template: str = "auto"
    """Jinja template that turns conversations into text: a file, plain or chatml. auto: the
    tokenizer's template, or plain if it does not have one. The finished model keeps it."""
    chat_date: Day = CHAT_DATE
    """Today's date for a template that reads the clock (strftime_now), in training and inference.
    With a fixed date, the same data give the same store on any day."""
    loss_on: Literal["answers", "last_answer"] = "answers"
    """Answers of a conversation that contribute to the loss: all, or only the last one."""
    max_prompt_tokens: Annotated[int, Field(ge=8)] | Auto = "auto"
    """Longest prompt, in tokens. auto: long enough for 99 % of a sample, at most 2048 and the
    model's context length; see the data report. If all data are documents, they are split into
    prompts of at most 256 tokens (encoder-decoders only)."""
    max_target_tokens: Annotated[int, Field(ge=8)] | Auto = "auto"
    """Longest target, in tokens. auto: as for prompts. If all data are documents, they are split
    into targets of at most 512 tokens. The sum of both limits applies to conversations."""
    on_overlong: Literal["auto", "error", "drop", "truncate", "split"] = "auto"
    """Treatment of examples above these limits. Their number is printed. auto: truncate recipes,
    split documents."""
    validation_fraction: Fraction = 0.1
    """Share of the recipes or documents held out from training."""
    max_examples: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of examples. Files take turns, and reading stops at this number. null means
    all."""
    min_quality: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Minimum quality score of a recipe. Recipes below it are dropped."""
    max_bad_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Maximum share of unusable records in a source. A source with a larger share is refused,
    because it probably has another format. Dropped records are always counted by reason."""
    encoding: EncodingName = "utf-8"
    """Character encoding of text, JSON, CSV and web pages. If the data report counts many bytes
    that are not UTF-8, try latin-1 or cp1252, which old exports use."""
    dedup: Literal["none", "exact", "near"] = "exact"
    """exact: keep one of several recipes that are equal apart from case and spacing. near: also
    keep one of several recipes or documents that share most of their wording."""
    engine: Literal["local", "ray"] = "local"
    """Machines that prepare the data. local: the cores of this machine. ray: a Ray cluster that
    shares a file system. Both write the same store."""

    @property
    def own_tasks(self) -> Mapping[str, TaskConfig]:
        """The user's own tasks by name, or an empty mapping."""
        return self.tasks if isinstance(self.tasks, Mapping) else {}

    @property
    def task_names(self) -> tuple[str, ...]:
        """Tasks that a store may have. The store's column `task` holds an index into them."""
        return *get_args(TaskName), *self.own_tasks


class OptimConfig(Config):
    """The optimizer and its learning rate."""

    name: Annotated[
        Literal["adamw", "adafactor", "muon", "adamw8bit"] | PythonName,
        Allowed("adamw, adafactor, muon, adamw8bit, or module:function"),
    ] = "adamw"
    """adamw: decoupled weight decay. muon: orthogonalised updates of the inner matrices, AdamW for
    the rest. adamw8bit: 2 bytes of state per weight instead of AdamW's 8. All three use the same
    peak_lr. adafactor: almost no state; its peak_lr is relative to the size of each weight and
    capped at 1 / sqrt(step). Use 1e-3 to fine-tune a T5 and 1e-2 to train one from scratch, with a
    constant schedule. Do not use it for adapters, because it moves weights that start at zero very
    slowly. module:function, e.g. torch.optim:NAdam: your own optimizer, called with groups of
    weights, lr, and each of betas, eps and momentum that is set."""
    betas: (
        Annotated[
            tuple[Fraction, Fraction], AsTuple, Allowed("two numbers from 0 below 1")
        ]
        | None
    ) = None
    """Decay rates of AdamW's moving averages of gradients and squared gradients. null means 0.9 and
    0.999."""
    eps: Annotated[float, Field(gt=0)] | None = None
    """Constant added to the square root of AdamW's second moment. null means 1e-8."""
    momentum: Fraction | None = None
    """Decay rate of muon's moving average of gradients, or the momentum of your own optimizer.
    null means 0.95 for muon."""
    peak_lr: Annotated[float, Field(gt=0)] = 3e-4
    """Highest learning rate, reached when warmup ends."""
    schedule: Literal[
        "constant", "linear", "cosine", "cosine_restarts", "inverse_sqrt", "wsd"
    ] = "cosine"
    """Decay of the learning rate from the peak to `min_lr`. linear, cosine: until the run ends;
    cosine_restarts: in cycles; inverse_sqrt: as 1 / sqrt(time), without reaching `min_lr`; wsd:
    constant, then a linear cooldown at the end."""
    cycles: CyclesConfig | None = None
    """Cycles of cosine_restarts. null means that the first cycle takes 1000 steps, and each next
    cycle twice as many."""
    cooldown: Interval | None = None
    """Length of wsd's cooldown at the end of the run. null means 20 %."""
    warmup: AnyDuration = Duration(3, "%")
    """Length of the linear warmup to the peak learning rate. The default is a share, so that even a
    short run reaches the peak."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay of matrices. Biases and norms have no decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum gradient norm. Larger gradients are clipped to it."""
    label_smoothing: Fraction = 0.0
    """Share of the target probability spread over the vocabulary (Szegedy et al. 2016)."""
    gradient_noise: NoiseConfig | None = None
    """Annealed noise added to the clipped gradients."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential average of the weights with this decay, e.g. 0.999. `toque average` then
    measures it and writes it as a model. It suits a constant schedule, and takes 4 bytes per
    trained weight in memory and in checkpoints (docs/reference/training.md). null: keep none."""
    outliers: OutliersConfig | None = None
    """Skip updates if the loss or gradient is not finite, or far above the previous ones. null:
    apply all updates, and end the run if the loss or gradient is not finite
    (docs/guides/train-and-resume.md)."""


class EarlyStoppingConfig(Config):
    """Conditions for stopping before `stop_after`."""

    patience: Annotated[int, Field(ge=1)] = 3
    """Evaluations in a row without improvement before the run ends."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Smallest improvement that counts, in units of the metric; nats for the loss."""
    metric: ScoreName = "loss"
    """Metric that must improve: the held-out loss, perplexity, or a score of the texts generated
    at every evaluation, e.g. bleu, rougeL, cookable (docs/guides/evaluate-and-compare.md)."""


class TrainConfig(Config):
    """The training loop: its length, its batches, its evaluations and checkpoints."""

    stop_after: RunLength = Duration(3, "epochs")
    """Length of the whole run. A time such as "10 minutes" counts only updates. With "total", as in
    "10 minutes total" or "8 hours total", it also counts loading, measurements, evaluations and
    saves."""
    time_limit: Seconds | None = None
    """Time limit for the entire command. Training stops early enough to stay within it, even if
    `stop_after` has not been reached. null means no limit, except for a `stop_after` such as
    "10 minutes total"."""
    batch: BatchSize = Duration(16384, "tokens")
    """Amount of data per update. It affects the result."""
    micro_batch_rows: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Rows per forward and backward pass. Fewer rows need less memory and give the same update.
    auto: 4,096 tokens on a CPU; on a GPU the largest number that fits, measured before the first
    update."""
    readers: Annotated[int, Field(ge=1, le=64)] = 1
    """Threads that prepare batches in advance, without changing them. One is enough for a local
    disk. More help if reading is slow, e.g. on a network disk (docs/guides/doctor.md)."""
    row_tokens: Annotated[int, Field(ge=16)] | Auto = "auto"
    """Length of a packed row, in tokens; for T5, length of its target side. auto: chosen from the
    data."""
    pack: bool = True
    """Put several examples in one row. Attention never crosses examples."""
    precision: Literal["auto", "bf16", "fp16", "float32"] = "auto"
    """Number format of the matmuls. Weights stay float32. auto: bf16 on devices that compute it
    fast."""
    compile: bool | Auto = "auto"
    """Use torch.compile, which takes a minute. auto: on a GPU. If compiling fails, the run
    continues without it."""
    gradient_checkpointing: bool | Auto = "auto"
    """Recompute activations in the backward pass to save memory. Training is about a third slower,
    with results that are bitwise identical to a run without it. auto: if a single row does not fit
    into memory otherwise."""
    activation_offload: bool = False
    """Move the block inputs that `gradient_checkpointing` stores to the machine's memory until the
    backward pass needs them. The results are bitwise identical to a run without it. GPUs only
    (docs/explanation/fit-a-model.md)."""
    evaluate_every: Interval = Duration(200, "steps")
    """Interval between evaluations on held-out examples. The last step is always evaluated."""
    save_every: Interval = Duration(200, "steps")
    """Interval between checkpoints. The last step is always saved."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """Number of checkpoints with the best evaluations to keep in addition."""
    best_by: ScoreName = "loss"
    """Metric that selects the best evaluation, for `keep_best` and the finished model: loss, or
    another metric as in `early_stopping.metric`."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run when the held-out loss, or another metric, stops improving. null means never."""
    deterministic: bool = True
    """Compute bitwise identical results in every run on the same machine. Costs a little speed on
    some GPUs."""
    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """Division of the model among processes (docs/guides/several-gpus.md). single: refuse to run in
    several processes. ddp: a full copy in each process. fsdp: a part of every weight, gradient and
    optimizer state in each process. auto: single for one process, else ddp if the model fits into
    memory, else fsdp."""
    optimisations: OptimisationsConfig = Field(default_factory=OptimisationsConfig)
    """Switches for optimisations. All are on by default."""

    @property
    def command_seconds(self) -> float | None:
        """Time limit of the entire command, in seconds; None without a limit."""
        limits = [self.stop_after] if self.stop_after.total else []
        if self.time_limit is not None:
            limits.append(self.time_limit)
        return min((limit.seconds or 0.0 for limit in limits), default=None)


class CheckpointConfig(Config):
    """Copies of checkpoints outside the run's folder, and the layout of all checkpoints."""

    upload: (
        Annotated[
            str,
            Field(pattern=r"^(gs|s3)://[^/@\s]+/[^/\s]"),
            Allowed(
                "an address such as gs://bucket/runs/cookbook or s3://bucket/runs/cookbook"
            ),
        ]
        | None
    ) = None
    """Folder in a bucket for copies of checkpoints, metrics and the finished model, uploaded during
    training. Another machine can continue from it (docs/guides/buckets-and-the-hub.md). null means
    no copies."""
    layout: Literal["auto", "whole", "sharded"] = "auto"
    """whole: rank 0 writes whole tensors. sharded: every rank writes its own slices in parallel
    under one manifest; all ranks need access to the run's folder. Any number of processes and any
    strategy can continue from either. auto: sharded if the strategy shards the weights and a whole
    checkpoint would take more than half of rank 0's free memory."""


class EvaluationConfig(Config):
    """Measurements on held-out examples."""

    max_examples: Annotated[int, Field(ge=1)] | None = 512
    """Held-out examples per evaluation. null means all."""
    generate: Annotated[int, Field(ge=0)] = 16
    """Number of held-out prompts for which the final evaluation generates and scores texts, and as
    many again for each task with metrics of its own. 0: no texts for held-out prompts, not even
    during training."""
    texts: Annotated[int, Field(ge=0)] = 16
    """Number of the `generate` prompts for which every evaluation during training generates and
    scores texts. The prompts stay the same, and their cost is printed. 0: only the held-out loss.
    """
    prompts: Annotated[tuple[str, ...], AsTuple] = ()
    """Your own prompts, for which every evaluation generates texts, e.g.
    [Make a healthy breakfast]. They are rewritten in the format of the training prompts. The texts
    are printed with their quality and appended to `samples.jsonl`."""
    metrics: Annotated[
        Auto | Annotated[tuple[MetricName, ...], AsTuple],
        Allowed(f"auto, or a list of auto, {', '.join(ANY_TEXTS)}, module:function"),
    ] = "auto"
    """Metrics of the generated texts, except texts of tasks with metrics of their own. auto: bleu,
    rouge, repetition and recipe. A function of your own is module:function, e.g.
    [auto, mymodule:my_metric] (docs/guides/evaluate-and-compare.md)."""


class ObserveConfig(Config):
    """Records of a training run. They never change its results."""

    log_every: Interval = Duration(10, "steps")
    """Interval between step events in `metrics.jsonl`."""
    summary: Interval | None = Duration(500, "steps")
    """Interval between summaries in `training.log`: speed, utilisation, memory, data per update,
    scaling, signs of convergence. null means none."""
    system: Seconds | None = Duration(10, "seconds")
    """Time between `system` events: processor, memory, disk and network, and use, memory, power,
    temperature and throttling of each GPU. null means never (docs/guides/watch-the-machine.md)."""
    gradients: StepInterval | None = Duration(100, "steps")
    """Updates between `gradients` events, the gradient norms of each group of layers. null means
    never."""
    profile: ProfileConfig | None = None
    """Updates to trace with torch's profiler into `trace/` of the run folder. Rates exclude these
    updates. null means none."""
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        AsTuple,
        Allowed("a list of tensorboard, wandb, trackio"),
    ] = ()
    """Experiment trackers that receive copies of `metrics.jsonl`, each in its own thread. A tracker
    that hangs or fails loses only its copies (docs/guides/callbacks-and-trackers.md)."""
    webhook: Annotated[SecretAddress, Field(repr=False)] = None
    """Address that is notified when a run starts, has a new best evaluation, ends or fails.
    Discord's addresses get Discord's format, others plain JSON. No file or message contains the
    address. Prefer env:NAME, so that the run's own config.yaml also works."""
    callbacks: Annotated[
        tuple[PythonName, ...], AsTuple, Allowed("a list of module:Class")
    ] = ()
    """Classes of your own that observe the run, e.g. [mymodule:Watcher]
    (docs/guides/callbacks-and-trackers.md)."""


class RunConfig(Config):
    """Settings of a run."""

    run_dir: FolderName = "runs/cookbook"
    """Folder of the run: checkpoints, metrics, the finished model. For gs:// or s3://, the run uses
    a local folder and uploads it (`checkpoint.upload`). In every path `~` is your home folder."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 17
    """Seed of all randomness: weights, data order, dropout, sampling."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    adapter: AdapterConfig | None = None
    """Train a small adapter (LoRA) and freeze the weights of the checkpoint. null: train all
    weights."""
    data: DataConfig = Field(default_factory=DataConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    curriculum: CurriculumConfig | None = None
    """Stages with different examples, e.g. easy examples first. null means all examples from the
    start."""
    span_corruption: SpanCorruptionConfig | None = None
    """Pretrain a T5: join the prompt and target of each example, and replace random spans with gaps
    to fill. Each epoch has new gaps. null: train on prompts and targets as they are."""
    augmentation: AugmentationConfig | None = None
    """Vary prompts and texts during training. null: use them as stored."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)

    _foreign: dict[str, dict[str, str]] = PrivateAttr(default_factory=dict)

    @property
    def foreign_code(self) -> Mapping[str, Mapping[str, str]]:
        """Untrusted code named by the configuration of a run folder.

        Maps each setting to names of code, and each name to its file and line. Copies of the
        configuration keep it, but files do not store it.
        """
        return self._foreign

    def with_foreign_code(self, names: Mapping[str, Mapping[str, str]]) -> Self:
        """Return a copy with these names as its untrusted code."""
        copy = self.model_copy()
        copy._foreign = {setting: dict(places) for setting, places in names.items()}  # noqa: SLF001
        return copy
