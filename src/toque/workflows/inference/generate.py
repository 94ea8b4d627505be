"""Generation of texts for prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toque.cooking.prompts import CLASSES, Task
from toque.cooking.recipe_form import answer_schema, recipe_form
from toque.cooking.recipe_scores import requested_ingredients
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, argument
from toque.evaluation.best_of import BestOf
from toque.models.generation.options import (
    GenerationOptions,
    Precision,
    check_sampling,
    refuse_below,
    refuse_non_numbers,
)
from toque.models.loading.provenance import OwnTask, Provenance
from toque.reporter import SILENT, Reporter, counting
from toque.workflows.results import Model, Written, resolve_model
from toque.workflows.trained_model.folders import check_model, finished_model
from toque.workflows.trained_model.prompt_format import find_task, task_classes
from toque.workflows.trained_model.prompt_reader import (
    Prompts,
    ReadPrompt,
    read_prompts,
)
from toque.workflows.trained_model.training_record import (
    read_adapter_record,
    read_record,
    writes_recipes,
)

if TYPE_CHECKING:
    from toque.models.generation.constraints import Constraint
    from toque.workflows.inference.open_model import OpenedModel

OnText = Callable[[int, Written], object]
"""Function called with the index of a text and the text so far."""
_UNFINISHED = "\ufffd"
"""Replacement character, which a decoder returns for an incomplete sequence of bytes."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Texts to generate: their prompts, number, form and sampling options."""

    prompts: Prompts = ()
    file: str | Path | None = None
    """File with more prompts."""
    task: str | None = None
    """Task that the model learned; None for a recipe, if the model generates recipes."""
    adapters: Sequence[str | Path] = ()
    """Adapter folders or finished runs. Each answers every prompt."""
    raw: bool = False
    """True to send prompts unchanged."""
    n: int = 1
    """Number of texts per prompt."""
    must_use: bool = False
    """True to constrain recipes to the recipe format and the ingredients in their prompts."""
    schema: Mapping[str, Any] | None = None
    """JSON schema of the texts; None for free texts."""
    options: GenerationOptions
    best: BestOf

    def __post_init__(self) -> None:
        """Raise a ConfigError for values that are not allowed or cannot be combined."""
        refuse_non_numbers(n=self.n)
        refuse_below(1, n=self.n)
        if self.must_use and self.schema is not None:
            raise ConfigError(
                f"{argument('must_use')} and {argument('schema')} cannot be combined, because each "
                "constrains the form of the texts. Use one of them."
            )
        if self.must_use and self.task not in (None, "write"):
            raise ConfigError(
                f"{argument('must_use')} and {argument(f'task={self.task}')} cannot be combined: "
                "the first constrains recipes, but the task requests other texts. Use one of them."
            )
        self.best.check(self.options, n_results=self.n)

    @property
    def in_json(self) -> bool:
        """True for texts that a schema constrains."""
        return self.schema is not None


def generate(
    run_or_model: Model,
    prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    *,
    file: str | Path | None = None,
    task: str | None = None,
    adapters: Sequence[str | Path] = (),
    n: int = 1,
    temperature: float = 0.7,
    top_p: float = 0.95,
    no_repeat_ngram_size: int | None = None,
    max_new_tokens: int | None = None,
    seed: int = 0,
    raw: bool = False,
    device: str = "auto",
    on_text: OnText | None = None,
    precision: Precision = "float32",
    must_use: bool = False,
    schema: str | Path | Mapping[str, Any] | None = None,
    best_of: int = 1,
    by: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    reporter: Reporter = SILENT,
) -> list[Written]:
    """Generate texts for prompts.

    Args:
        run_or_model: The run or model that generates.
        prompts: One prompt or several. A recipe model reads "dish" or "dish: a, b, c". A model
            trained on your own prompts, texts or tokens gets each prompt unchanged. For a task of
            the run, a prompt is the text that the task is about, or a record with the fields of
            the task's prompt.
        file: A file with more prompts, one per line or as JSON lines.
        task: A task that the model learned: title, next_step, or a task of the run. None means a
            recipe, if the model generates recipes.
        adapters: Adapter folders, or finished runs that trained an adapter. Each adapter answers
            every prompt.
        n: Texts per prompt. The texts for a prompt are consecutive.
        temperature: 0 always takes the most likely token.
        top_p: Sample from the most likely tokens that together have this probability.
        no_repeat_ngram_size: Length in tokens of a sequence that a text must not repeat, or 0 for
            no limit. None means 12 for recipes as text, otherwise 0.
        max_new_tokens: Longest text, in tokens. None means the longest target in training.
        seed: The same seed generates the same texts.
        raw: Send prompts unchanged, not in the training format.
        device: auto (the GPU, if present), cpu, cuda or cuda:N.
        on_text: Function called with the number of a text and the text so far, whenever the text
            grows. The texts arrive in order. With `best_of`, each arrives once, complete.
        precision: Precision of the matmuls. bf16 is faster if the processor supports it.
            In bf16, near-ties between tokens may resolve differently than in float32 or in another
            batch. auto: bf16 if supported, otherwise float32.
            int8: auto, but one text on a CPU has 8 bits (docs/reference/generation.md).
        must_use: Constrain recipes to the recipe format and to the ingredients in their prompts.
        schema: Constrain texts to JSON of this schema: a file, the schema itself, or "recipe" for
            the schema of schema.org.
        best_of: Texts to generate per prompt. The best `n` are returned, the best first.
        by: The score that ranks the texts: a recipe score, or likelihood, which is the mean
            log-probability of a text's tokens. None means cookable if the prompt asks for a
            recipe, otherwise likelihood.
        sampling: More options by name: min_p, repetition_penalty, presence_penalty,
            frequency_penalty, and logit_bias with a number for each token id.
        reporter: Receives the progress, if `on_text` does not receive the texts.

    Raises:
        ConfigError: A prompt is missing, a number is out of range, or the device or the score does
            not exist. Or the model did not learn the task, or the task has classes, for
            `classify`. Or the model does not support `must_use`, `schema` or `best_of`.
        DataError: A file cannot be read.
        CheckpointError: A run has no checkpoint, or the record of its training is damaged.
    """
    refuse_non_numbers(best_of=best_of)
    request = GenerationRequest(
        prompts=prompts,
        file=file,
        task=task,
        adapters=adapters,
        raw=raw,
        n=n,
        must_use=must_use,
        schema=None if schema is None else answer_schema(schema),
        options=GenerationOptions(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            no_repeat_ngram_size=no_repeat_ngram_size,
            seed=seed,
            precision=precision,
            **check_sampling(sampling or {}),
        ),
        best=BestOf(best_of, by),
    )
    return generate_texts(
        run_or_model, request, device=device, on_text=on_text, reporter=reporter
    )


def generate_texts(
    run_or_model: Model,
    request: GenerationRequest,
    *,
    device: str = "auto",
    on_text: OnText | None = None,
    reporter: Reporter = SILENT,
) -> list[Written]:
    """Generate the texts of a request, adapter by adapter; see `generate`."""
    folder = check_model(run_or_model)
    batches = _read_batches(folder, request)

    with reporter.working(f"reading {folder}"):
        # Torch is loaded only after all arguments are checked.
        from toque.workflows.inference.open_model import open_to_generate

        adapter_folders = [
            batch.folder for batch in batches if batch.adapter is not None
        ]
        opened = open_to_generate(
            folder,
            request.options.precision,
            device=device,
            adapters=adapter_folders,
            reporter=reporter,
        )

    texts: list[Written] = []
    for number, batch in enumerate(batches):
        active = opened
        if batch.adapter is not None:
            active = opened.with_adapter(number, batch.folder, batch.record)
        texts += _generate_batch(
            active, batch, request, len(texts), on_text=on_text, reporter=reporter
        )
    n_cut = sum(text.is_cut for text in texts)
    if n_cut:
        reporter.notice(
            f"{n_cut} of {len(texts)} texts reached the maximum length before their JSON was "
            f"complete. Raise {argument('max_new_tokens')}, or add limits to the schema."
        )
    return texts


class _Batch(NamedTuple):
    """Prompts for an adapter or for the model itself."""

    adapter: str | None
    """Name of the adapter in the call; None for the model itself."""
    folder: Path
    record: Provenance
    prompts: list[ReadPrompt]


def _read_batches(folder: Path, request: GenerationRequest) -> list[_Batch]:
    """Read the prompts in the format that the model, or each adapter, was trained on.

    Raises:
        ConfigError: A prompt or the task does not suit the model.
    """
    batches = []
    for adapter, path, record in _read_records(folder, request.adapters):
        prompts = read_prompts(
            request.prompts,
            request.file,
            task=_find_text_task(request.task, record, adapter or folder),
            raw=request.raw,
            recipes=writes_recipes(record),
            blanks=record.form == "documents",
        )
        request.best.check_prompts(
            [prompt.text for prompt in prompts],
            in_json=request.in_json,
            knows_recipes=record.knows_recipes,
        )
        n_texts = max(request.n, request.best.n)
        repeated = [prompt for prompt in prompts for _ in range(n_texts)]
        batches.append(_Batch(adapter, path, record, repeated))
    return batches


def _read_records(
    folder: Path, adapters: Sequence[str | Path]
) -> list[tuple[str | None, Path, Provenance]]:
    """Return the name, folder and record of each adapter, or of the model itself (None)."""
    if not adapters:
        return [(None, folder, read_record(folder))]
    folders = [_find_adapter(name) for name in adapters]
    return [
        (str(name), path, read_adapter_record(path, folder))
        for name, path in zip(adapters, folders, strict=True)
    ]


def _find_adapter(name: str | Path) -> Path:
    """Return the folder of an adapter, from that folder or a finished run.

    Raises:
        ConfigError: The folder has no adapter.
    """
    folder = finished_model(resolve_model(name))
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{argument(f'adapters={name}')}: {folder} has no adapter (adapter_config.json). "
            "Name an adapter folder, or a finished run that trained an adapter. To use a complete "
            "model, name it in place of the base."
        )
    return folder


def _find_text_task(
    task: str | None, record: Provenance, model: str | Path
) -> Task | OwnTask:
    """Return a task that is answered with a text, by default the generation of recipes.

    Raises:
        ConfigError: The answers to the task are classes.
    """
    text_task = "write" if task is None else find_task(task, record, model)
    if classes := task_classes(text_task):
        raise ConfigError(
            f"{argument(f'task={task}')} has the classes {', '.join(classes)}. Use toque.classify "
            "to choose one of them, or leave the task out to generate texts."
        )
    return text_task


def _generate_batch(
    model: OpenedModel,
    batch: _Batch,
    request: GenerationRequest,
    first: int,
    *,
    on_text: OnText | None,
    reporter: Reporter,
) -> list[Written]:
    """Generate the texts of a batch. Report them with indices from `first`."""
    chooses = request.best.n > 1
    on_token = None
    if on_text is not None and not chooses:
        on_token = OrderedTexts(
            on_text,
            [prompt.text for prompt in batch.prompts],
            partial(model.codec.decode, skip_special_tokens=True),
            adapter=batch.adapter,
            first=first,
        )
    texts, logprobs = _generate_candidates(
        model, batch, request, on_token, SILENT if on_token else reporter
    )
    if not chooses:
        return texts

    texts = _choose_best(texts, logprobs, request, reporter)
    if on_text is not None:
        for number, text in enumerate(texts, start=first):
            on_text(number, text)
    return texts


def _generate_candidates(
    model: OpenedModel,
    batch: _Batch,
    request: GenerationRequest,
    on_token: OrderedTexts | None,
    reporter: Reporter,
) -> tuple[list[Written], list[list[float]]]:
    """Generate all texts of a batch. For best-of-n, also return the logprobs of their tokens."""
    from toque.models.generation.engine import generate as generate_ids

    codec = model.codec
    prompts = [prompt.text for prompt in batch.prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]

    def add_logprob(number: int, logprob: float) -> None:
        logprobs[number].append(logprob)

    constraints = _create_constraints(codec, prompts, batch.record, request)
    with counting(reporter, "writing", "texts") as count:
        ids_of_texts = generate_ids(
            model.model,
            [model.prompt_ids(prompt, raw=request.raw) for prompt in prompts],
            batch.record.completed(request.options, in_json=request.in_json),
            eos_id=codec.end_ids,
            pad_id=codec.pad_id,
            constraints=constraints,
            places=[prompt.where for prompt in batch.prompts],
            on_progress=count,
            on_token=on_token,
            on_logprob=add_logprob if request.best.n > 1 else None,
        )
    texts = [
        Written(
            prompt,
            codec.decode(ids, skip_special_tokens=True),
            len(ids),
            batch.adapter,
            request.in_json,
            batch.record.knows_recipes,
        )
        for prompt, ids in zip(prompts, ids_of_texts, strict=True)
    ]
    return texts, logprobs


def _choose_best(
    texts: Sequence[Written],
    logprobs: Sequence[Sequence[float]],
    request: GenerationRequest,
    reporter: Reporter,
) -> list[Written]:
    """Return the `n` best texts per prompt. The `best.n` texts of a prompt are consecutive.

    Print a notice if texts do not have the requested score.
    """
    n = request.n
    best = request.best
    chosen: list[Written] = []
    n_unscored = 0
    for start in range(0, len(texts), best.n):
        candidates = texts[start : start + best.n]
        first = candidates[0]
        ranked = best.rank(
            first.prompt,
            [text.text for text in candidates],
            logprobs[start : start + best.n],
            in_json=first.in_json,
            knows_recipes=first.knows_recipes,
        )
        chosen += [
            replace(candidates[number], chosen=score) for number, score in ranked[:n]
        ]
        # Without the requested score, all texts of the prompt are ranked by likelihood.
        _, best_score = ranked[0]
        if best_score.by != best.by:
            n_unscored += 1

    if best.by is not None and n_unscored:
        reporter.notice(
            f"{best.by} could not score the texts for {n_unscored} of {len(chosen) // n} "
            "prompts. Their most likely texts were chosen."
        )
    return chosen


@dataclass
class OrderedTexts:
    """`on_token` function for the engine that calls `on_text` in the order of the texts.

    The engine generates several texts at a time. Only the first unfinished text is reported.
    """

    on_text: OnText
    prompts: Sequence[str]
    decode: Callable[[Sequence[int]], str]
    adapter: str | None = None
    first: int = 0
    """Index of the first text."""

    def __post_init__(self) -> None:
        self._ids: list[list[int]] = [[] for _ in self.prompts]
        self._finished: set[int] = set()
        self._current = 0

    def __call__(self, number: int, token: int | None) -> None:
        """Add a text's next token. None ends the text."""
        if token is None:
            self._finished.add(number)
        else:
            self._ids[number].append(token)
        if number != self._current:
            return
        self._report_text()
        while self._current in self._finished:
            self._current += 1
            if self._current < len(self.prompts):
                self._report_text()

    def _report_text(self) -> None:
        """Report the current text so far, without an incomplete last character."""
        ids = self._ids[self._current]
        text = self.decode(ids)
        if self._current not in self._finished:
            text = text.rstrip(_UNFINISHED)
        so_far = Written(self.prompts[self._current], text, len(ids), self.adapter)
        self.on_text(self.first + self._current, so_far)


def _create_constraints(
    codec: Codec,
    prompts: Sequence[str],
    record: Provenance,
    request: GenerationRequest,
) -> list[Constraint]:
    """Constrain texts to a schema, or to the recipe form with the ingredients of their prompts.

    Return no constraints for free texts.

    Raises:
        ConfigError: The model cannot generate such texts.
    """
    schema = request.schema
    if schema is None and not request.must_use:
        return []
    from toque.models.generation.constraints import ConstraintCompiler  # loads torch

    if schema is not None:
        constraint = ConstraintCompiler(codec).to_schema(schema)
        return [constraint.copy() for _ in prompts]
    if not writes_recipes(record):
        tasks = f" for {', '.join(record.tasks)}" if record.knows_recipes else ""
        raise ConfigError(
            f"{argument('must_use')} needs a model that generates recipes. This model was trained "
            f"on {record.form}{tasks}. Leave {argument('must_use')} out."
        )
    ingredients = [
        [_normalise_ingredient(name, codec) for name in requested_ingredients(prompt)]
        for prompt in prompts
    ]
    compiler = ConstraintCompiler(codec)
    return [compiler.to_form(recipe_form(names)) for names in ingredients]


def _normalise_ingredient(name: str, codec: Codec) -> str:
    """Return the name in the characters of the vocabulary.

    Raises:
        ConfigError: The vocabulary cannot encode the name.
    """
    plain = codec.normalise(name)
    decoded = codec.decode(codec.encode(plain))
    if decoded.strip().casefold() != plain.strip().casefold():
        raise ConfigError(
            f"{argument('must_use')}: this model's vocabulary cannot encode {name!r}. Change "
            f"the spelling of the ingredient, or leave {argument('must_use')} out."
        )
    return plain


def has_classes(
    run_or_model: Model, task: str, adapters: Sequence[str | Path] = ()
) -> bool:
    """Check whether a task has classes, so that `classify` answers it, not `generate`.

    The built-in tasks nutrition, difficulty and cuisine have classes for every model.

    Raises:
        ConfigError: The model or an adapter did not learn another task.
    """
    if task in CLASSES:
        return True
    folder = check_model(run_or_model)
    tasks = [
        find_task(task, record, adapter or folder)
        for adapter, _, record in _read_records(folder, adapters)
    ]
    return any(map(task_classes, tasks))
