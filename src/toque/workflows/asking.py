"""Asking of a model: what it was trained on, and prompts of a call or a file as it reads them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from toque.config import RunConfig, load_config
from toque.cooking.examples import question
from toque.cooking.prompts import (
    ASKS_FOR,
    CLASSES,
    QUESTIONS,
    RECIPE_TASKS,
    TASKS,
    Task,
    asks_for_a_recipe,
    dish_and_foods,
    write_prompt,
)
from toque.cooking.recipe import Recipe
from toque.cooking.schemas.columns import prompt_of
from toque.data.store.store_manifest import StoreManifest, form_of, read_manifest
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.chat import ChatTemplate, chat_template_of, prompt_ids
from toque.data.tokenizer.codec import Codec, FamilyKind, asking_bounds, load_codec
from toque.data.tokenizer.portable import files_of_model
from toque.data.tokenizer.tokenizer_folder import end_ids_in, is_toques, resolve_tokenizer
from toque.errors import CheckpointError, ConfigError, DataError, argument
from toque.models.loading.card_usage import Example
from toque.models.loading.hub import resolve_folder
from toque.models.loading.provenance import OwnTask, Provenance, provenance_of
from toque.sources.documents import blank_text, fields_in, text_of
from toque.sources.records import is_filled
from toque.user_paths import named_path
from toque.workflows.results import Model, existing_folder
from toque.workflows.saved_steps import run_of

if TYPE_CHECKING:
    from toque.evaluation.text_samples import Prompt

UNKNOWN: Final = Provenance(form="recipes", max_new_tokens=256)
"""Record of models that hold none but have a tokenizer of Toque's."""
FOREIGN: Final = Provenance(form="documents", max_new_tokens=256)
"""Record of models that others made, whose training is unknown; they continue prompts."""
_DISH: Final = ("lentil soup", ("lentils", "carrots", "cumin"))
_OTHER_PROMPTS: Final = {
    "request": "`How do I make NAME?` and other free requests",
    "next_step": f"`{QUESTIONS['next_step']}...`",
    "title": f"`{QUESTIONS['title']}...`",
}


def provenance_of_run(config: RunConfig, manifest: StoreManifest) -> Provenance:
    """The record of a run's model."""
    form = form_of(entry.reader for entry in manifest.sources)
    return Provenance(
        form="gaps" if config.span_corruption is not None else form,
        max_new_tokens=target_limit(config, manifest),
        tasks=[*config.data.tasks] if form == "recipes" else [],
        own_tasks=_own_tasks(config),
    )


def _own_tasks(config: RunConfig) -> list[OwnTask]:
    return [OwnTask(name, one.prompt, one.classes) for name, one in config.data.own_tasks.items()]


def target_limit(config: RunConfig, manifest: StoreManifest | None) -> int:
    """Longest target, in tokens: as the store was cut, else as the configuration says."""
    found = None if manifest is None else manifest.settings.get("max_target_tokens")
    asked = config.data.max_target_tokens
    if isinstance(found, int):
        return found
    return UNKNOWN.max_new_tokens if asked == "auto" else asked


def provenance_in(folder: Path) -> Provenance:
    """Record of a run, checkpoint, model folder or hub name.

    An unfinished run is known by its store.
    """
    folder = run_of(folder) or folder
    if not (folder / "config.yaml").is_file():
        if not folder.exists():
            with suppress(ConfigError, DataError):  # opening it says what is wrong
                folder = resolve_folder(str(folder))
        base = base_of(folder)
        if base is not None:
            return record_on(folder, base)
        return provenance_of(folder) or (UNKNOWN if is_toques(folder) else FOREIGN)
    record = provenance_of(folder / "model")
    # A record that an earlier version wrote names no tasks of one's own; the configuration does.
    if record is not None and (record.own_tasks or record.form != "pairs"):
        return record
    config = load_config(folder / "config.yaml").config
    if record is not None:
        return msgspec.structs.replace(record, own_tasks=_own_tasks(config))
    return provenance_of_run(config, read_manifest(Path(config.data.store)))


def model_to_open(model: Model) -> Path:
    """The folder or hub name of a model in use; refused before torch loads if it is neither.

    Raises:
        ConfigError: no such folder, and no such model on the hub.
        CheckpointError: a folder without a run, a model or an adapter.
    """
    folder = existing_folder(model)
    if run_of(folder) is not None:
        return folder  # reading the checkpoint reports what is wrong with it
    names = ("config.yaml", "config.json", "adapter_config.json", "manifest.json")
    resolved = resolve_folder(str(folder), setting="the model to open")
    if not any((resolved / name).is_file() for name in names):
        raise CheckpointError(
            f"{folder} holds neither a run (config.yaml), a model (config.json) nor an adapter "
            "(adapter_config.json). Name a run folder such as runs/cookbook, or a Hugging Face "
            "model folder."
        )
    return folder


def model_in(folder: Path) -> Path:
    """The folder of a run's finished model, or the folder itself."""
    inner = folder / "model"
    return inner if (folder / "config.yaml").exists() and inner.is_dir() else folder


def base_of(folder: Path) -> Path | None:
    """The folder of the weights that an adapter stands on; None for a whole model."""
    if not (folder / "adapter_config.json").is_file():
        return None  # without torch, which reading an adapter's settings takes
    from toque.models.lora.adapter_files import is_adapter_folder, read_config

    named = read_config(folder).base_model_name_or_path if is_adapter_folder(folder) else None
    if not named:
        return None
    base = resolve_folder(str(named), setting="the base").resolve()
    if is_adapter_folder(base):
        raise ConfigError(
            f"The adapter {folder} names {base} as its base, which is an adapter itself. Export "
            "that one as a whole model, and name its folder in adapter_config.json."
        )
    return base


def record_on(adapter: Path, base: Path) -> Provenance:
    """Record of an adapter; one without, and without a tokenizer of Toque's, is asked as its base.

    An adapter is asked in its own form, which its base may not know.
    """
    return provenance_of(adapter) or (UNKNOWN if is_toques(adapter) else provenance_in(base))


def tokenizer_of(folder: Path) -> Path:
    """The folder of a model's tokenizer: its own, or its base's for an adapter that has none."""
    base = None if (folder / "tokenizer.json").is_file() else base_of(folder)
    return resolve_tokenizer(str(base or folder))


def codec_in(folder: Path, record: Provenance) -> Codec:
    """The tokenizer of a model folder, or a CheckpointError; it begins foreign prompts.

    Texts end at every token that the files of the model, or of an adapter's base, name.
    """
    try:
        codec = load_codec(tokenizer_of(folder))
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if record is FOREIGN:
        codec.read_as_written()
    codec.end_also(end_ids_in(base_of(folder) or folder), ordinary=record is FOREIGN)
    return codec


def template_asked_by(codec: Codec, record: Provenance) -> ChatTemplate | None:
    """The chat template that a model is asked by; None for one that was trained on single requests.

    Such is each that Toque trained on anything but conversations, whatever it began from.
    """
    talks = record is FOREIGN or record.form == "conversations"
    template = chat_template_of(codec) if talks else None
    if template is not None:
        template.end_as_written()
    return template


def model_files(codec: Codec, record: Provenance, *, encoder: bool) -> tuple[dict[str, str], bool]:
    """Files of a model folder beside its weights; see `files_of_model`."""
    kind: FamilyKind = "encoder-decoder" if encoder else "decoder"
    begin, end = asking_bounds(codec, kind, record.form)
    return files_of_model(codec, record, begin=begin, end=end)


def writes_recipes(record: Provenance) -> bool:
    """True if "dish: a, b, c" is turned into the request for a recipe."""
    return record.knows_recipes and (not record.tasks or "write" in record.tasks)


def task_to_ask(name: str, record: Provenance, of: str | Path) -> Task | OwnTask:
    """The task of this name; ConfigError where the model of the record did not learn it.

    A model whose training is unknown may be asked any task of recipes.
    """
    own = {task.name: task for task in record.own_tasks}
    known = [*own, *(record.tasks or ["write"] if record.knows_recipes else [])]
    if name not in known:
        learnt = f"its data.tasks is {', '.join(known)}"
        if record is FOREIGN or record is UNKNOWN:
            if name in TASKS:
                return name
            learnt = (
                f"nothing is known of its training, and tasks of recipes are {', '.join(TASKS)}"
            )
        elif not known:
            learnt = f"it was trained on {record.form}, which have no tasks"
        raise ConfigError(
            f"{of} did not learn {argument(f'task={name}')}: {learnt}. An answer would be chance. "
            "Train with it (docs/guides/tasks-and-curriculum.md), or ask in your own way, without "
            f"{argument('task')} or with {argument('choices')}."
        )
    return own.get(name) or cast("Task", name)


def classes_of(task: Task | OwnTask) -> tuple[str, ...]:
    """The answers that a task has; () for any text."""
    return task.classes if isinstance(task, OwnTask) else RECIPE_TASKS[task].classes


def example_prompt(record: Provenance) -> Example | None:
    """A prompt for the model card; None for a model that answers none."""
    if record.form == "gaps":
        return None
    if record.own_tasks:
        own = record.own_tasks[0]
        return _asked_of(own, dict.fromkeys(fields_in(own.prompt), "Your text"), "")
    if record.form == "documents":
        return "Once upon a time"
    if record.form == "pairs":
        return "Your prompt"
    if record.form == "conversations":
        return [{"role": "user", "content": "Your prompt"}]
    if writes_recipes(record):
        return write_prompt(*_DISH)
    if "request" in record.tasks:
        return f"How do I make {_DISH[0]}?"
    task = next(task for task in TASKS if task in record.tasks)
    return f"{QUESTIONS[task]}{_DISH[0]}"


def form_in_words(record: Provenance) -> str:
    """The sentence of the model card that says what the model is asked with."""
    if record.form == "gaps":
        return (
            "It was trained to fill gaps in texts, as a start for further training: it answers no "
            "prompts and writes no texts yet."
        )
    if record.own_tasks:
        blank = [
            (one.name, blank_text(one.prompt).replace("\n", "\\n")) for one in record.own_tasks
        ]
        return _prompts_in_words([f"{name}: `{text}`" for name, text in blank])
    if record.form == "documents":
        return (
            "It was trained on whole texts: a prompt is the beginning of a text, which it goes on "
            "with."
        )
    if record.form == "conversations":
        return (
            "It was trained on conversations, by the chat template beside it: `toque chat` talks "
            "to it, and a prompt is a question that begins one."
        )
    if record.form == "pairs":
        return "It was trained on its maker's own prompts and answers: a prompt is sent as it is."
    shown = {"write": f"`{write_prompt('NAME', ('a', 'b', 'c'))}`", **_OTHER_PROMPTS}
    shown |= {task: f"`{QUESTIONS[task]}...`" for task in CLASSES}
    return _prompts_in_words([shown[task] for task in record.tasks or ["write"]])


def _prompts_in_words(prompts: Sequence[str]) -> str:
    several = len(prompts) > 1
    return f"The {'prompts' if several else 'prompt'} it was trained on: {', '.join(prompts)}."


def in_trained_form(typed: str, record: Provenance) -> str:
    """The prompt a model reads; as it was typed where nothing else is nearer to its training.

    >>> in_trained_form("Create a simple pasta dish", Provenance(form="recipes", max_new_tokens=9))
    'Generate recipe for: simple pasta dish'
    """
    if not record.knows_recipes or typed.lstrip().startswith(ASKS_FOR):
        return typed
    if "request" in record.tasks and asks_for_a_recipe(typed):
        return typed
    title, foods = dish_and_foods(typed)
    if writes_recipes(record):
        return write_prompt(title, foods)
    if "request" not in record.tasks:
        return typed
    if not foods:
        return f"How do I make {title}?"
    return f"Please tell me how to make {title} with {', '.join(foods)}."


def own_prompts(config: RunConfig, store: TokenStore, *, encoder: bool) -> list[Prompt]:
    """Prompts of evaluation.prompts, in the form the model is trained on where it has one."""
    from toque.evaluation.text_samples import Prompt  # with torch

    codec, record = store.codec(), provenance_of_run(config, store.manifest)
    kind: FamilyKind = "encoder-decoder" if encoder else "decoder"
    form = form_of(entry.reader for entry in store.manifest.sources)
    asked = [(typed, in_trained_form(typed, record)) for typed in config.evaluation.prompts]
    return [
        Prompt(
            tuple(prompt_ids(codec, text, kind, form)), text, typed=typed if typed != text else None
        )
        for typed, text in asked
    ]


def _asked_of(task: OwnTask, record: Mapping[str, Any], where: str) -> str:
    """The task's prompt for a record; DataError where it fills none of the fields."""
    fields = fields_in(task.prompt)
    text, unread = text_of(record, task.prompt, Counter())
    if unread or not any(is_filled(record.get(field)) for field in fields):
        raise DataError(
            f"{where} has no text in {unread or ' or '.join(fields)}, which data.tasks."
            f"{task.name} asks by. Its fields are {', '.join(record) or 'none'}; a prompt as "
            'it is stands in {"prompt": "..."}.'
        )
    return text


def _asked_by(task: OwnTask, typed: str, where: str) -> str:
    """The task's prompt for a text, which fills its one field; ConfigError where it has several."""
    fields = fields_in(task.prompt)
    if len(fields) > 1:
        raise ConfigError(
            f"{where} is one text, and data.tasks.{task.name} asks by {len(fields)} "
            f"fields, {', '.join(fields)}. Give records that have them, each a line of "
            f"JSON, with {argument('file=rows.jsonl')}."
        )
    return _asked_of(task, dict.fromkeys(fields, typed), where) if typed.strip() else typed


class ReadPrompt(NamedTuple):
    """A prompt as a model reads it, and its place in a call or a file, for errors."""

    where: str
    text: str


def read_prompts(
    prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    file: str | Path | None,
    *,
    task: Task | OwnTask | None,
    raw: bool,
    recipes: bool = True,
    blanks: bool = False,
) -> list[ReadPrompt]:
    """Prompts as a model reads them, those of a file after those of the call.

    A line of `file` is a prompt, or JSON with `prompt`, or for a task with `title`, `ingredients`
    and `steps`, or with the fields of an own task; so is one of `prompts`. Texts are put in the
    form of the `task`, unless it is None, `raw` is set, or the model does not write `recipes`. With
    `blanks` a prompt of nothing passes: a text begins there. Without any prompt it is a
    ConfigError, as is one that is no text, and a file that cannot be read is a DataError.
    """
    wish, example = "write for", 'prompts="lentil soup"'
    if task != "write":
        wish, example = "answer", 'prompts="lentil soup: 200 g lentils, 1 onion"'
    own = None
    if isinstance(task, OwnTask):
        example, own, task = 'prompts="your text"', task, None
    if task == "write" and not recipes:
        task = None
    form = None if raw else task
    several = isinstance(prompts, Iterable) and not isinstance(prompts, str | Mapping)
    typed = prompts if several else [prompts]
    given = ((f"{argument('prompts')}, number {n}", one) for n, one in enumerate(typed, start=1))
    found = list[tuple[str, str, str]]()  # place, content and trained form of each
    for where, line in chain(given, _lines(named_path(file)) if file is not None else ()):
        if isinstance(line, str):
            asked = trained_prompt(line, form)
            if own is not None and not raw:
                asked = _asked_by(own, line, where)
            found.append((where, line, asked))
        elif not isinstance(line, Mapping):
            raise ConfigError(
                f"{where} is {str(line)[:60]!r}, a {type(line).__name__}. Give a text, or a record "
                f"of fields by their names: {argument(example)}."
            )
        elif own is not None and (
            "prompt" not in line or not line.keys().isdisjoint(fields_in(own.prompt))
        ):
            found.append((where, asked := _asked_of(own, line, where), asked))
        elif isinstance(line.get("prompt"), str):
            found.append((where, line["prompt"], prompt_of(line)))
        elif task is not None and (isinstance(line.get("title"), str) or task == "title"):
            title = line.get("title")
            title = title if isinstance(title, str) else ""
            steps = _texts(line, "steps" if "steps" in line else "directions", where)
            recipe = Recipe(title, _texts(line, "ingredients", where), steps)
            said = " ".join((recipe.title, *recipe.ingredients))
            found.append((where, said, _trained_form(task, recipe)))
        else:
            raise DataError(
                f'{where} has neither "prompt" nor, for a recipe or a {argument("task")}, "title". '
                'Write {"prompt": "..."} or {"title": "...", "ingredients": ["2 eggs"], "steps": '
                '["..."]} on each line.'
            )
    return _usable(found, wish=wish, example=example, blanks=blanks)


def _usable(
    found: Sequence[tuple[str, str, str]], *, wish: str, example: str, blanks: bool
) -> list[ReadPrompt]:
    """The trained forms of prompts; ConfigError for none, a blank one, or one that is no text."""
    if not found:
        raise ConfigError(
            f"Nothing to {wish}. Give {argument(example)} or {argument('file=prompts.txt')}."
        )
    blank = next((where for where, said, _ in found if not said.strip(" \t\r\n:,")), None)
    if blank is not None and not blanks:
        raise ConfigError(
            f"The prompt at {blank} is blank, so there is nothing to {wish}. Say what is wanted, "
            f"as in {argument(example)}, or leave it out."
        )
    for where, _, asked in found:
        refuse_no_text(asked, f"The prompt at {where}")
    return [ReadPrompt(where, asked) for where, _, asked in found]


def refuse_no_text(text: str, what: str) -> None:
    """Raise a ConfigError for a text that holds bytes which are no UTF-8, or half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.end + 20]
        raise ConfigError(
            f"{what} is no text in UTF-8: {around!a} holds a byte of another encoding, or "
            "half of a surrogate pair. Write it in UTF-8, as of a file with `iconv -t UTF-8`."
        ) from error


def trained_prompt(prompt: str, task: Task | None) -> str:
    """The trained form of what a person types: "dish", "dish: a, b, c", "make me a dish".

    >>> trained_prompt("lentil soup: lentils, cumin", "write")
    'Generate recipe for: lentil soup using ingredients: lentils, cumin'
    """
    if task in (None, "request") or (task == "write" and prompt.startswith(ASKS_FOR)):
        return prompt
    if task == "write":
        return write_prompt(*dish_and_foods(prompt))
    title, colon, listed = prompt.partition(":")
    if task == "title" and not colon:
        listed = title  # of a dish that is to be named
    lines = tuple(line.strip() for line in listed.split(",") if line.strip())
    return _trained_form(task, Recipe(title.strip(), lines, ()))


def _trained_form(task: Task, recipe: Recipe) -> str:
    if task == "write":
        return write_prompt(recipe.title, recipe.ingredients)
    return question(task, recipe)


def _texts(record: Mapping[str, Any], field: str, where: str) -> tuple[str, ...]:
    """A record's list of texts, or the lines of one; () for none, DataError for what is no text."""
    value = record.get(field)
    if value is None or isinstance(value, str):
        return tuple((value or "").splitlines())
    is_list = isinstance(value, list | tuple)
    for number, item in enumerate(value if is_list else [value], start=1):
        if not isinstance(item, str):
            what = f"item {number} of {field}" if is_list else field
            raise DataError(
                f"{where}: {what} is {str(item)[:100]}, which is no text. Write {field} as a list "
                'of texts, ["2 eggs", "salt"], or leave the field out.'
            )
    return tuple(value)


def _lines(file: Path) -> Iterator[tuple[str, str | dict[str, Any]]]:
    """Place of each line, and its text or its JSON object; blank lines are left out."""
    try:
        # Not `splitlines`, which ends a line at U+2028 and others that JSON and texts may hold.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{argument(f'file={file}')} cannot be read as UTF-8 text: {error}."
        ) from error
    for number, line in enumerate(map(str.strip, lines), start=1):
        where = f"{file}:{number}"
        try:
            if line:
                yield where, json.loads(line) if line.startswith("{") else line
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} looks like JSON and is not: {error}.") from error
