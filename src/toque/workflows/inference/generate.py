"""Texts that a model writes for prompts, and answers that it chooses among a few."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toque.cooking.answer_schemas import answer_schema
from toque.cooking.prompts import CLASSES, Task
from toque.cooking.recipe_form import recipe_form
from toque.cooking.recipe_scores import asked_ingredients
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, argument
from toque.evaluation.best_of import BestOf
from toque.models.generation.options import GenerationOptions, Precision, refuse_no_number
from toque.models.loading.provenance import OwnTask, Provenance
from toque.reporter import SILENT, Reporter, counting
from toque.workflows.asking import (
    ReadPrompt,
    classes_of,
    model_in,
    model_to_open,
    provenance_in,
    read_prompts,
    record_on,
    refuse_no_text,
    task_to_ask,
    writes_recipes,
)
from toque.workflows.results import Answer, Model, Written, existing_folder

if TYPE_CHECKING:
    from toque.models.generation.constraints import HeldText
    from toque.workflows.inference.open_model import OpenedModel

OnText = Callable[[int, Written], object]  # (number of the text, the text so far)
_UNFINISHED = "\ufffd"  # character that a decoder gives while bytes of one are still to come


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
    """Write texts for prompts.

    Args:
        run_or_model: what writes.
        prompts: "dish" or "dish: a, b, c" for a model of recipes; one trained on prompts, texts or
            tokens of your own gets them as they are. One or several. For a task of the run's own
            the text that it asks about, or a record with the fields that it asks by.
        file: more prompts, one a line or as JSON lines.
        task: what to ask, a task that the model learnt: title, next_step, or one of the run's own.
            None: a recipe, where the model writes recipes.
        adapters: adapter folders, or finished runs that trained one; each writes every text.
        n: texts for each prompt; they follow each other.
        temperature: 0 takes the likeliest token every time.
        top_p: sample from the likeliest tokens that together have this probability.
        no_repeat_ngram_size: tokens of the shortest run that a text may not hold twice, 0 for no
            such rule. None: 12 for recipes as text, else 0.
        max_new_tokens: longest text; what the model was trained on when None.
        seed: the same seed writes the same texts.
        raw: send prompts as they are, not in the form the model was trained on.
        device: auto, the GPU where there is one; or cpu, cuda, cuda:N.
        on_text: called with the number of a text and the text so far whenever it has grown, one
            text after the other in their order; with `best_of` once for each, whole.
        precision: of the matrix products. bf16 is faster where the processor has it; where two
            tokens are about equally likely, a text may then part from float32's, and depend on
            what is written beside it. auto: bf16 there, float32 elsewhere.
        must_use: hold recipes to their form and to the ingredients of their prompts.
        schema: hold texts to JSON of this schema: a file, the schema itself, or "recipe", which is
            schema.org's.
        best_of: texts to write for each prompt, of which the `n` best are returned, the best first.
        by: score that they are chosen by: a recipe score, or likelihood, the mean log-probability
            of a text's tokens. None: recipe_score where the prompt asks for a recipe, those
            whose `oven_fits` is 0 behind all others; else likelihood.
        reporter: hears of progress, where nobody hears of the texts themselves.

    Raises:
        ConfigError: no prompt, a number out of range, no such device or score, a task that the
            model did not learn or that has classes, for which `classify` is; or `must_use`,
            `schema` or `best_of` where it cannot be.
        DataError: a file that cannot be read.
        CheckpointError: a run without a checkpoint, or a damaged record of how it was trained.
    """
    refuse_no_number(n=n, best_of=best_of)
    if n < 1:
        raise ConfigError(f"{argument('n')} is {n}; it must be at least 1.")
    if must_use and schema is not None:
        raise ConfigError(
            f"{argument('must_use')} and {argument('schema')} each hold texts to a form of their "
            "own. Leave one of them out."
        )
    if must_use and task not in (None, "write"):
        raise ConfigError(
            f"{argument('must_use')} holds texts to the form of a recipe, and "
            f"{argument(f'task={task}')} asks for others. Leave one of them out."
        )
    in_json = None if schema is None else answer_schema(schema)
    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        no_repeat_ngram_size=no_repeat_ngram_size,
        seed=seed,
        precision=precision,
    )
    best = BestOf(best_of, by)
    best.check(options, wanted=n)
    folder = model_to_open(run_or_model)
    asked = []
    for adapter, record in _records(folder, adapters):
        recipes, blanks = writes_recipes(record), record.form == "documents"
        asks = _task_to_write(task, record, folder if adapter is None else adapter.name)
        read = read_prompts(prompts, file, task=asks, raw=raw, recipes=recipes, blanks=blanks)
        texts = [one.text for one in read]
        best.check_prompts(texts, in_json=in_json is not None, knows_recipes=record.knows_recipes)
        some = [one for one in read for _ in range(max(n, best.n))]
        asked.append(_Asked(adapter, record, some))
    with reporter.working(f"reading {folder}"):
        # With torch, which answering a mistake does without.
        from toque.models.generation.engine import emulation_in_words
        from toque.models.glibc_malloc import keep_freed_memory
        from toque.workflows.inference.open_model import open_model

        beside = [one.adapter.folder for one in asked if one.adapter is not None]
        opened = open_model(folder, device=device, adapters=beside, reporter=reporter)
        if opened.model.device.type == "cpu":
            keep_freed_memory()
    if said := emulation_in_words(precision, opened.model):
        reporter.notice(said)
    how = partial(_written, must_use=must_use, schema=in_json, on_text=on_text, reporter=reporter)
    return how(opened, asked, options, best=best, wanted=n, raw=raw)


class _Adapter(NamedTuple):
    """An adapter's name as it was given, and its folder."""

    name: str
    folder: Path


def _records(
    folder: Path, adapters: Sequence[str | Path]
) -> list[tuple[_Adapter | None, Provenance]]:
    """The adapters, or None for the model itself, each with its record."""
    if not adapters:
        return [(None, provenance_in(folder))]
    named = [_Adapter(str(one), _adapter_in(one)) for one in adapters]
    return [(one, record_on(one.folder, folder)) for one in named]


def _adapter_in(named: str | Path) -> Path:
    """The folder of an adapter, or that of a finished run; ConfigError where it holds none."""
    folder = model_in(existing_folder(named))
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{argument(f'adapters={named}')}: {folder} holds no adapter (adapter_config.json). "
            "Name an adapter folder, or a finished run that trained one; a whole model is named "
            "in place of the base."
        )
    return folder


def _task_to_write(task: str | None, record: Provenance, of: str | Path) -> Task | OwnTask:
    """The task, or a recipe when left out; ConfigError for one whose answers are chosen."""
    asks = "write" if task is None else task_to_ask(task, record, of)
    if classes := classes_of(asks):
        raise ConfigError(
            f"{argument(f'task={task}')} is answered by one of {', '.join(classes)}, which "
            "toque.classify chooses among. Leave it out to write texts."
        )
    return asks


class _Asked(NamedTuple):
    """Prompts as an adapter, or the model itself, reads them."""

    adapter: _Adapter | None
    record: Provenance
    prompts: list[ReadPrompt]


def _written(
    opened: OpenedModel,
    asked: Sequence[_Asked],
    options: GenerationOptions,
    *,
    best: BestOf,
    wanted: int,
    raw: bool,
    must_use: bool,
    schema: Mapping[str, Any] | None,
    on_text: OnText | None,
    reporter: Reporter,
) -> list[Written]:
    """The texts of the adapters, one after the other."""
    from toque.models.generation.engine import generate as generate_ids

    texts, in_json = list[Written](), schema is not None
    chooses = best.n > 1
    for i, (adapter, record, prompts) in enumerate(asked):
        typed = [one.text for one in prompts]
        own = opened if adapter is None else opened.with_adapter(i, adapter.folder, record)
        codec, name = own.codec, None if adapter is None else adapter.name
        decode = partial(codec.decode, skip_special_tokens=True)
        watch, logprobs = None, [list[float]() for _ in typed]
        if on_text is not None and not chooses:
            watch = InOrder(on_text, typed, decode, adapter=name, first=len(texts))
        with counting(SILENT if watch else reporter, "writing", "texts") as count:
            written = generate_ids(
                opened.model,
                [own.prompt_ids(text, raw=raw) for text in typed],
                record.completed(options, in_json=in_json),
                eos_id=codec.end_ids,
                pad_id=codec.pad_id,
                held=held_texts(codec, typed, record, schema) if must_use or in_json else (),
                places=[one.where for one in prompts],
                on_progress=count,
                on_token=watch,
                on_logprob=partial(_note, logprobs) if chooses else None,
            )
        pairs = zip(typed, written, strict=True)
        knows = record.knows_recipes
        told = [Written(p, decode(ids), len(ids), name, in_json, knows) for p, ids in pairs]
        if chooses:
            told = _chosen(told, logprobs, best, wanted=wanted, reporter=reporter)
            if on_text is not None:
                for number, text in enumerate(told, start=len(texts)):
                    on_text(number, text)
        texts += told
    if n_cut := sum(text.is_cut for text in texts):
        reporter.notice(
            f"{n_cut} of {len(texts)} texts reached their longest length before their JSON was "
            "whole. Let them have more tokens, or bounds in the schema."
        )
    return texts


def _note(logprobs: Sequence[list[float]], number: int, logprob: float) -> None:
    logprobs[number].append(logprob)


def _chosen(
    texts: Sequence[Written],
    logprobs: Sequence[Sequence[float]],
    best: BestOf,
    *,
    wanted: int,
    reporter: Reporter,
) -> list[Written]:
    """The `wanted` best texts of each prompt, whose `best.n` texts stand side by side."""
    found: list[Written] = []
    for at in range(0, len(texts), best.n):
        some, logs = texts[at : at + best.n], logprobs[at : at + best.n]
        one, said = some[0], [text.text for text in some]
        ranked = best.ranked(
            one.prompt, said, logs, in_json=one.in_json, knows_recipes=one.knows_recipes
        )
        found += [replace(some[number], chosen=how) for number, how in ranked[:wanted]]
    n_without = sum(one.chosen is not None and one.chosen.by != best.by for one in found)
    if best.by is not None and n_without:
        reporter.notice(
            f"No text for {n_without // wanted} of {len(found) // wanted} prompts has {best.by}: "
            "there the likeliest were chosen."
        )
    return found


@dataclass
class InOrder:
    """An engine's `on_token` that tells of the texts in their order, from number `first` on."""

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
        """A text's next token; None: it has ended."""
        if token is None:
            self._over.add(number)
        else:
            self._ids[number].append(token)
        if number != self._current:
            return
        self._tell()
        while self._current in self._over:
            self._current += 1
            if self._current < len(self.prompts):
                self._tell()

    def _tell(self) -> None:
        ids = self._ids[self._current]
        text = self.decode(ids)
        if self._current not in self._over:
            text = text.rstrip(_UNFINISHED)
        so_far = Written(self.prompts[self._current], text, len(ids), self.adapter)
        self.on_text(self.first + self._current, so_far)


def held_texts(
    codec: Codec,
    prompts: Sequence[str],
    record: Provenance,
    schema: Mapping[str, Any] | None = None,
) -> list[HeldText]:
    """Texts held to a schema, or to a recipe's form with the ingredients of their prompts.

    Raises:
        ConfigError: the model cannot write so.
    """
    from toque.models.generation.constraints import HeldVocabulary  # with torch

    if schema is not None:
        held = HeldVocabulary(codec).to_schema(schema)
        return [held.again() for _ in prompts]
    if not writes_recipes(record):
        tasks = f" for {', '.join(record.tasks)}" if record.knows_recipes else ""
        raise ConfigError(
            f"{argument('must_use')} holds texts to the form of a recipe, and this model was "
            f"trained on {record.form}{tasks}. Leave it out."
        )
    asked = [[_writable(name, codec) for name in asked_ingredients(one)] for one in prompts]
    vocabulary = HeldVocabulary(codec)
    return [vocabulary.to_form(recipe_form(names)) for names in asked]


def _writable(name: str, codec: Codec) -> str:
    """The name in letters that the vocabulary holds; a ConfigError if it has none of them."""
    plain = codec.normalise(name)
    if codec.decode(codec.encode(plain)).strip().casefold() != plain.strip().casefold():
        raise ConfigError(
            f"{argument('must_use')}: this model's vocabulary cannot write {name!r}. Spell the "
            f"ingredient otherwise, or leave {argument('must_use')} out."
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
        run_or_model: what chooses.
        prompts: "dish: a, b, c" for a task; a question as it is for choices. For a task of the
            run's own the text that it asks about, or a record with the fields that it asks by.
        file: more prompts, one a line or as JSON lines.
        task: a task that the model learnt and that has classes: nutrition, difficulty, cuisine, or
            one of the run's own.
        choices: answers of your own instead, two or more.
        raw: send prompts as they are, not in the form the model was trained on.
        device: auto, the GPU where there is one; or cpu, cuda, cuda:N.
        reporter: hears of progress.

    Raises:
        ConfigError: no prompt, or one that is too long to be answered, a task the run did not
            learn, or fewer than two choices.
        DataError: a file that cannot be read.
    """
    folder = model_to_open(run_or_model)
    asks = None if task is None else task_to_ask(task, provenance_in(folder), folder)
    answers = _allowed(task, choices, () if asks is None else classes_of(asks))
    read = read_prompts(prompts, file, task=asks, raw=raw)
    with reporter.working(f"reading {folder}"):
        # With torch, which answering a mistake does without.
        from toque.evaluation.constrained_choice import choose
        from toque.workflows.inference.open_model import open_model

        opened = open_model(folder, device=device, reporter=reporter)
    ids = [opened.prompt_ids(prompt.text, raw=raw) for prompt in read]
    _refuse_too_long(ids, answers, opened, places=[prompt.where for prompt in read])
    with counting(reporter, "choosing for", "prompts") as count:
        shares = choose(opened.model, opened.codec, ids, answers, count)
    return [
        Answer(
            prompt.text, answers[int(row.argmax())], dict(zip(answers, row.tolist(), strict=True))
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
    """Raise a ConfigError for a prompt that leaves no positions for the longest answer."""
    from toque.models.families import max_positions

    codec, room = opened.codec, max_positions(opened.model.config)
    if room is None or opened.model.config.is_encoder_decoder:
        return
    longest = max(len(codec.encode(codec.normalise(answer))) for answer in answers)
    for where, prompt in zip(places, prompts, strict=True):
        if len(prompt) + longest > room:  # the end token is never read back
            raise ConfigError(
                f"The prompt at {where} has {len(prompt)} tokens and the longest answer {longest}, "
                f"and this model's positions end at {room}. Shorten the prompt."
            )


def has_classes(run_or_model: Model, task: str, adapters: Sequence[str | Path] = ()) -> bool:
    """True if the answers to a task are chosen, by `classify`; else `generate` writes them.

    Of nutrition, difficulty and cuisine that is so whatever the model learnt.

    Raises:
        ConfigError: the model, or an adapter, did not learn a task that is none of these.
    """
    if task in CLASSES:
        return True
    folder = model_to_open(run_or_model)
    asked = [
        task_to_ask(task, record, folder if adapter is None else adapter.name)
        for adapter, record in _records(folder, adapters)
    ]
    return any(map(classes_of, asked))


def _allowed(task: str | None, choices: Sequence[str], classes: tuple[str, ...]) -> tuple[str, ...]:
    """The answers a model may give, or a ConfigError."""
    if task is not None and not classes:
        raise ConfigError(
            f"{argument('task')} is {task}, whose answers are texts: toque.generate writes them. "
            f"Answers of your own are {argument('choices')}."
        )
    if task is not None and choices:
        raise ConfigError(
            f"{argument(f'task={task}')} has its own classes to choose from, and "
            f"{argument('choices')} gives others. Leave one of them out."
        )
    if task is not None:
        return classes
    example = argument("choices=['Healthy', 'Indulgent']")
    allowed = f"Give two answers or more, each once, e.g. {example}."
    if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
        raise ConfigError(f"{argument('choices')} is {choices!r}, no list of texts. {allowed}")
    for choice in choices:
        refuse_no_text(choice, argument(f"choices={choice}"))
    if len(set(choices)) < len(choices) or len(choices) < 2 or not all(map(str.strip, choices)):
        raise ConfigError(f"{argument('choices')} are {', '.join(map(repr, choices))}. {allowed}")
    return tuple(choices)
