"""Generation of texts for prompts, and classification of prompts."""

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
    refuse_non_numbers,
)
from toque.models.loading.provenance import OwnTask, Provenance
from toque.reporter import SILENT, Reporter, counting
from toque.workflows.model_record import (
    check_model,
    finished_model,
    read_adapter_record,
    read_record,
    writes_recipes,
)
from toque.workflows.prompts import (
    ReadPrompt,
    check_utf8,
    find_task,
    read_prompts,
    task_classes,
)
from toque.workflows.results import Answer, Model, Written, existing_folder

if TYPE_CHECKING:
    from toque.models.generation.constraints import Constraint
    from toque.workflows.inference.open_model import OpenedModel

OnText = Callable[[int, Written], object]
"""Function called with the number of a text and the text so far."""
_UNFINISHED = "\ufffd"
"""Replacement character, which a decoder returns for an incomplete sequence of bytes."""


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
        task: A task that the model learned: title, next_step, or a task of the run. None: a
            recipe, if the model writes recipes.
        adapters: Adapter folders, or finished runs that trained an adapter. Each adapter answers
            every prompt.
        n: Texts per prompt. The texts for a prompt are consecutive.
        temperature: 0 always takes the most likely token.
        top_p: Sample from the most likely tokens that together have this probability.
        no_repeat_ngram_size: Length in tokens of a sequence that a text must not repeat, or 0 for
            no limit. None: 12 for recipes as text, otherwise 0.
        max_new_tokens: Longest text, in tokens. None: the longest target in training.
        seed: The same seed generates the same texts.
        raw: Send prompts unchanged, not in the training format.
        device: auto (the GPU, if present), cpu, cuda or cuda:N.
        on_text: Function called with the number of a text and the text so far, whenever the text
            grows. The texts arrive in order. With `best_of`, each arrives once, complete.
        precision: Precision of the matmuls. bf16 is faster if the processor supports it.
            In bf16, near-ties between tokens may resolve differently than in float32 or in another
            batch. auto: bf16 if supported, otherwise float32.
        must_use: Constrain recipes to the recipe format and to the ingredients in their prompts.
        schema: Constrain texts to JSON of this schema: a file, the schema itself, or "recipe" for
            the schema of schema.org.
        best_of: Texts to generate per prompt. The best `n` are returned, the best first.
        by: The score that ranks the texts: a recipe score, or likelihood, which is the mean
            log-probability of a text's tokens. None: recipe_score if the prompt asks for a
            recipe (texts with an `oven_fits` of 0 rank last), otherwise likelihood.
        reporter: Receives the progress, if `on_text` does not receive the texts.

    Raises:
        ConfigError: A prompt is missing, a number is out of range, or the device or the score does
            not exist. Or the model did not learn the task, or the task has classes, for
            `classify`. Or the model does not support `must_use`, `schema` or `best_of`.
        DataError: A file cannot be read.
        CheckpointError: A run has no checkpoint, or the record of its training is damaged.
    """
    refuse_non_numbers(n=n, best_of=best_of)
    request = GenerationRequest(
        task=task,
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
        ),
        best=BestOf(best_of, by),
    )
    folder = check_model(run_or_model)
    batches = _read_batches(folder, prompts, file, adapters, request)

    with reporter.working(f"reading {folder}"):
        # Torch is loaded only after all arguments are checked.
        from toque.hardware.glibc_malloc import keep_freed_memory
        from toque.models.generation.engine import emulation_in_words
        from toque.workflows.inference.open_model import open_model

        adapter_folders = [
            batch.adapter.folder for batch in batches if batch.adapter is not None
        ]
        opened = open_model(
            folder, device=device, adapters=adapter_folders, reporter=reporter
        )
        if opened.model.device.type == "cpu":
            keep_freed_memory()
    if note := emulation_in_words(precision, opened.model):
        reporter.notice(note)
    return _write_batches(opened, batches, request, on_text=on_text, reporter=reporter)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Number and format of the texts to generate."""

    task: str | None
    raw: bool
    """True to send prompts unchanged."""
    n: int
    """Texts per prompt."""
    must_use: bool
    """True to constrain recipes to the recipe format and the ingredients in their prompts."""
    schema: Mapping[str, Any] | None
    """JSON schema of the texts."""
    options: GenerationOptions
    best: BestOf

    def __post_init__(self) -> None:
        """Raise a ConfigError for options that cannot be combined."""
        if self.n < 1:
            raise ConfigError(f"{argument('n')} is {self.n}; it must be at least 1.")
        if self.must_use and self.schema is not None:
            raise ConfigError(
                f"{argument('must_use')} and {argument('schema')} cannot be combined, because each "
                "constrains the form of the texts. Use one of them."
            )
        if self.must_use and self.task not in (None, "write"):
            raise ConfigError(
                f"{argument('must_use')} and {argument(f'task={self.task}')} cannot be combined: "
                "the first writes recipes only, and the task asks for other texts. Use one of them."
            )
        self.best.check(self.options, n_results=self.n)

    @property
    def in_json(self) -> bool:
        """True for texts that a schema constrains."""
        return self.schema is not None


def _read_batches(
    folder: Path,
    prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    file: str | Path | None,
    adapters: Sequence[str | Path],
    request: GenerationRequest,
) -> list[_Batch]:
    """Read the prompts in the format that the model, or each adapter, was trained on."""
    task, best = request.task, request.best
    batches = []
    for adapter, record in _records(folder, adapters):
        written_task = _task_to_write(
            task, record, folder if adapter is None else adapter.name
        )
        read = read_prompts(
            prompts,
            file,
            task=written_task,
            raw=request.raw,
            recipes=writes_recipes(record),
            blanks=record.form == "documents",
        )
        best.check_prompts(
            [prompt.text for prompt in read],
            in_json=request.in_json,
            knows_recipes=record.knows_recipes,
        )
        repeated = [prompt for prompt in read for _ in range(max(request.n, best.n))]
        batches.append(_Batch(adapter, record, repeated))
    return batches


class _Adapter(NamedTuple):
    """An adapter's name from the call, and its folder."""

    name: str
    folder: Path


def _records(
    folder: Path, adapters: Sequence[str | Path]
) -> list[tuple[_Adapter | None, Provenance]]:
    """Pair each adapter, or None for the model itself, with its record."""
    if not adapters:
        return [(None, read_record(folder))]
    resolved = [_Adapter(str(name), _adapter_in(name)) for name in adapters]
    return [
        (adapter, read_adapter_record(adapter.folder, folder)) for adapter in resolved
    ]


def _adapter_in(name: str | Path) -> Path:
    """Return the folder of an adapter, given that folder or a finished run.

    Raises:
        ConfigError: The folder has no adapter.
    """
    folder = finished_model(existing_folder(name))
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{argument(f'adapters={name}')}: {folder} has no adapter (adapter_config.json). "
            "Name an adapter folder, or a finished run that trained an adapter. To use a complete "
            "model, name it in place of the base."
        )
    return folder


def _task_to_write(
    task: str | None, record: Provenance, model: str | Path
) -> Task | OwnTask:
    """Return the task, by default the generation of recipes.

    Raises:
        ConfigError: The answers to the task are classes.
    """
    known_task = "write" if task is None else find_task(task, record, model)
    if classes := task_classes(known_task):
        raise ConfigError(
            f"{argument(f'task={task}')} has the classes {', '.join(classes)}. Use toque.classify "
            "to choose one of them, or leave the task out to write texts."
        )
    return known_task


class _Batch(NamedTuple):
    """Prompts for an adapter, or for the model itself if `adapter` is None."""

    adapter: _Adapter | None
    record: Provenance
    prompts: list[ReadPrompt]


def _write_batches(
    opened: OpenedModel,
    batches: Sequence[_Batch],
    request: GenerationRequest,
    *,
    on_text: OnText | None,
    reporter: Reporter,
) -> list[Written]:
    """Generate the texts of all batches, adapter by adapter."""
    from toque.models.generation.engine import generate as generate_ids

    texts: list[Written] = []
    in_json = request.in_json
    chooses = request.best.n > 1
    for i, (adapter, record, prompts) in enumerate(batches):
        typed = [prompt.text for prompt in prompts]
        name = None if adapter is None else adapter.name
        adapted = (
            opened
            if adapter is None
            else opened.with_adapter(i, adapter.folder, record)
        )
        codec = adapted.codec
        decode = partial(codec.decode, skip_special_tokens=True)
        logprobs: list[list[float]] = [[] for _ in typed]
        constraints: Sequence[Constraint] = ()
        if in_json or request.must_use:
            constraints = constrain_texts(codec, typed, record, request.schema)
        watch = None
        if on_text is not None and not chooses:
            watch = InOrder(on_text, typed, decode, adapter=name, first=len(texts))

        with counting(SILENT if watch else reporter, "writing", "texts") as count:
            written = generate_ids(
                opened.model,
                [adapted.prompt_ids(text, raw=request.raw) for text in typed],
                record.completed(request.options, in_json=in_json),
                eos_id=codec.end_ids,
                pad_id=codec.pad_id,
                constraints=constraints,
                places=[prompt.where for prompt in prompts],
                on_progress=count,
                on_token=watch,
                on_logprob=partial(_note, logprobs) if chooses else None,
            )

        batch_texts = [
            Written(prompt, decode(ids), len(ids), name, in_json, record.knows_recipes)
            for prompt, ids in zip(typed, written, strict=True)
        ]
        if chooses:
            batch_texts = _choose_best(batch_texts, logprobs, request, reporter)
            if on_text is not None:
                for number, text in enumerate(batch_texts, start=len(texts)):
                    on_text(number, text)
        texts += batch_texts

    if n_cut := sum(text.is_cut for text in texts):
        reporter.notice(
            f"{n_cut} of {len(texts)} texts reached the longest length before their JSON was "
            f"complete. Raise {argument('max_new_tokens')}, or add limits to the schema."
        )
    return texts


def _note(logprobs: Sequence[list[float]], number: int, logprob: float) -> None:
    logprobs[number].append(logprob)


def _choose_best(
    texts: Sequence[Written],
    logprobs: Sequence[Sequence[float]],
    request: GenerationRequest,
    reporter: Reporter,
) -> list[Written]:
    """Return the `n` best texts per prompt. The `best.n` texts of a prompt are consecutive."""
    n, best = request.n, request.best
    chosen: list[Written] = []
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
            replace(candidates[number], chosen=how) for number, how in ranked[:n]
        ]

    n_without = sum(
        text.chosen is not None and text.chosen.by != best.by for text in chosen
    )
    if best.by is not None and n_without:
        reporter.notice(
            f"{best.by} could not score the texts for {n_without // n} of {len(chosen) // n} "
            "prompts. Their most likely texts were chosen."
        )
    return chosen


@dataclass
class InOrder:
    """`on_token` function for the engine that calls `on_text` in the order of the texts.

    The number of the first text is `first`.
    """

    on_text: OnText
    prompts: Sequence[str]
    decode: Callable[[Sequence[int]], str]
    adapter: str | None = None
    first: int = 0

    def __post_init__(self) -> None:
        self._ids: list[list[int]] = [[] for _ in self.prompts]
        self._over: set[int] = set()
        self._current = 0

    def __call__(self, number: int, token: int | None) -> None:
        """Add a text's next token. None ends the text."""
        if token is None:
            self._over.add(number)
        else:
            self._ids[number].append(token)
        if number != self._current:
            return
        self._report_text()
        while self._current in self._over:
            self._current += 1
            if self._current < len(self.prompts):
                self._report_text()

    def _report_text(self) -> None:
        ids = self._ids[self._current]
        text = self.decode(ids)
        if self._current not in self._over:
            text = text.rstrip(_UNFINISHED)
        so_far = Written(self.prompts[self._current], text, len(ids), self.adapter)
        self.on_text(self.first + self._current, so_far)


def constrain_texts(
    codec: Codec,
    prompts: Sequence[str],
    record: Provenance,
    schema: Mapping[str, Any] | None = None,
) -> list[Constraint]:
    """Constrain texts to a schema, or to the recipe form with the ingredients of their prompts.

    Raises:
        ConfigError: The model cannot generate such texts.
    """
    from toque.models.generation.constraints import ConstraintCompiler  # loads torch

    if schema is not None:
        constrained = ConstraintCompiler(codec).to_schema(schema)
        return [constrained.again() for _ in prompts]
    if not writes_recipes(record):
        tasks = f" for {', '.join(record.tasks)}" if record.knows_recipes else ""
        raise ConfigError(
            f"{argument('must_use')} needs a model that writes recipes. This model was trained on "
            f"{record.form}{tasks}. Leave {argument('must_use')} out."
        )
    ingredients = [
        [_normalise_ingredient(name, codec) for name in requested_ingredients(prompt)]
        for prompt in prompts
    ]
    vocabulary = ConstraintCompiler(codec)
    return [vocabulary.to_form(recipe_form(names)) for names in ingredients]


def _normalise_ingredient(name: str, codec: Codec) -> str:
    """Return the name in the characters of the vocabulary.

    Raises:
        ConfigError: The vocabulary cannot write the name.
    """
    plain = codec.normalise(name)
    if codec.decode(codec.encode(plain)).strip().casefold() != plain.strip().casefold():
        raise ConfigError(
            f"{argument('must_use')}: this model's vocabulary cannot write {name!r}. Change "
            f"the spelling of the ingredient, or leave {argument('must_use')} out."
        )
    return plain


def classify(
    run_or_model: Model,
    prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    *,
    file: str | Path | None = None,
    task: str | None = None,
    choices: Sequence[str] = (),
    raw: bool = False,
    device: str = "auto",
    reporter: Reporter = SILENT,
) -> list[Answer]:
    """Choose one of a few answers for each prompt, with the probability of each.

    Args:
        run_or_model: The run or model that chooses.
        prompts: "dish: a, b, c" for a task, or a complete question for choices. For a task of the
            run, a prompt is the text that the task is about, or a record with the fields of the
            task's prompt.
        file: A file with more prompts, one per line or as JSON lines.
        task: A task with classes that the model learned: nutrition, difficulty, cuisine, or a
            task of the run.
        choices: Two or more answers of your own, in place of a task.
        raw: Send prompts unchanged, not in the training format.
        device: auto (the GPU, if present), cpu, cuda or cuda:N.
        reporter: Receives the progress.

    Raises:
        ConfigError: A prompt is missing, a prompt leaves no context for an answer, the run did
            not learn the task, or there are fewer than two choices.
        DataError: A file cannot be read.
    """
    folder = check_model(run_or_model)
    known_task = None if task is None else find_task(task, read_record(folder), folder)
    classes = () if known_task is None else task_classes(known_task)
    answers = _check_answers(task, choices, classes)
    read = read_prompts(prompts, file, task=known_task, raw=raw)
    with reporter.working(f"reading {folder}"):
        # Torch is loaded only after all arguments are checked.
        from toque.evaluation.constrained_choice import choose
        from toque.workflows.inference.open_model import open_model

        opened = open_model(folder, device=device, reporter=reporter)
    ids = [opened.prompt_ids(prompt.text, raw=raw) for prompt in read]
    _refuse_too_long(ids, answers, opened, places=[prompt.where for prompt in read])
    with counting(reporter, "choosing for", "prompts") as count:
        shares = choose(opened.model, opened.codec, ids, answers, count)
    return [
        Answer(
            prompt.text,
            answers[int(row.argmax())],
            dict(zip(answers, row.tolist(), strict=True)),
        )
        for prompt, row in zip(read, shares, strict=True)
    ]


def _refuse_too_long(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[str],
    opened: OpenedModel,
    *,
    places: Sequence[str],
) -> None:
    """Raise a ConfigError if a prompt leaves too little context for the longest answer."""
    from toque.models.config_values import max_positions

    codec = opened.codec
    positions = max_positions(opened.model.config)
    if positions is None or opened.model.config.is_encoder_decoder:
        return
    longest = max(len(codec.encode(codec.normalise(answer))) for answer in answers)
    for where, prompt in zip(places, prompts, strict=True):
        if len(prompt) + longest > positions:  # the model never reads the end token
            raise ConfigError(
                f"The prompt at {where} has {len(prompt)} tokens and the longest answer {longest}, "
                f"but this model has only {positions} positions. Shorten the prompt."
            )


def has_classes(
    run_or_model: Model, task: str, adapters: Sequence[str | Path] = ()
) -> bool:
    """Return whether a task has classes, so that `classify` answers it, not `generate`.

    It is true of nutrition, difficulty and cuisine for every model.

    Raises:
        ConfigError: The model or an adapter did not learn another task.
    """
    if task in CLASSES:
        return True
    folder = check_model(run_or_model)
    tasks = [
        find_task(task, record, folder if adapter is None else adapter.name)
        for adapter, record in _records(folder, adapters)
    ]
    return any(map(task_classes, tasks))


def _check_answers(
    task: str | None, choices: Sequence[str], classes: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the answers that a model may choose, or raise a ConfigError."""
    if task is not None:
        if not classes:
            raise ConfigError(
                f"{argument(f'task={task}')} has no classes. Use toque.generate to write its "
                f"answers, or name your own answers with {argument('choices')}."
            )
        if choices:
            raise ConfigError(
                f"{argument('choices')} and {argument(f'task={task}')} cannot be combined, because "
                "the task has its own classes. Use one of them."
            )
        return classes

    example = argument("choices=['Healthy', 'Indulgent']")
    allowed = f"Give two or more different answers, e.g. {example}."
    if isinstance(choices, str) or not all(
        isinstance(choice, str) for choice in choices
    ):
        raise ConfigError(
            f"{argument('choices')} must be a list of texts, not {choices!r}. {allowed}"
        )
    for choice in choices:
        check_utf8(choice, argument(f"choices={choice}"))
    if (
        len(set(choices)) < len(choices)
        or len(choices) < 2
        or not all(map(str.strip, choices))
    ):
        raise ConfigError(
            f"{argument('choices')} are {', '.join(map(repr, choices))}. {allowed}"
        )
    return tuple(choices)
