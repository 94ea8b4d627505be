"""Generation of texts from prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toque.cooking.recipe_form import recipe_form
from toque.cooking.recipe_scores import asked_ingredients
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, argument
from toque.models.generation.options import GenerationOptions
from toque.models.loading.provenance import Provenance, provenance_of
from toque.reporter import SILENT, Reporter, counting
from toque.workflows.asking import provenance_in, writes_recipes
from toque.workflows.prompt_files import read_prompts
from toque.workflows.results import Model, Written, existing_folder

if TYPE_CHECKING:
    from toque.models.generation.constraints import FormConstraint

OnText = Callable[[int, Written], object]
"""(number of the text, the text so far)."""
_UNFINISHED = "\ufffd"
"""Character that a decoder gives while bytes of one are still to come."""


def generate(
    run_or_model: Model,
    prompts: str | Sequence[str],
    options: GenerationOptions,
    *,
    file: str | Path | None = None,
    adapters: Sequence[str | Path] = (),
    n: int = 1,
    raw: bool = False,
    device: str = "auto",
    must_use: bool = False,
    on_text: OnText | None = None,
    reporter: Reporter = SILENT,
) -> list[Written]:
    """Write texts for prompts; the arguments are those of `toque.generate`.

    The reporter hears of progress where nobody hears of the texts themselves.

    Raises:
        ConfigError: no prompt, `n` below 1, no such device, or `must_use` where it cannot be.
        DataError: a file that cannot be read.
        CheckpointError: a run without a checkpoint, or a damaged record of how it was trained.
    """
    if n < 1:
        raise ConfigError(f"{argument('n')} is {n}; it must be at least 1.")
    folder = existing_folder(run_or_model)
    own = provenance_in(folder)
    by: Sequence[str | Path | None] = adapters or (None,)
    # An adapter is asked in its own form, which its base may not know.
    records = [own if one is None else provenance_of(Path(one)) or own for one in by]
    each = [_prompts(prompts, file, record, n=n, raw=raw) for record in records]
    with reporter.working(f"reading {folder}"):
        # With torch, which answering a mistake does without.
        from toque.models.generation.engine import emulates_bf16
        from toque.models.generation.engine import generate as generate_ids
        from toque.models.glibc_malloc import keep_freed_memory
        from toque.models.lora.adapter_files import load_adapter
        from toque.workflows.open_model import open_model

        opened = open_model(folder, device=device, reporter=reporter)
        model, codec = opened.model, opened.codec
        if model.device.type == "cpu":
            keep_freed_memory()
    if emulates_bf16(options.precision, model):
        reporter.notice(
            f"This {model.device.type} has no bf16 in hardware: its products are emulated, which "
            "is slower than float32. Leave the precision at float32, or say auto."
        )
    texts: list[Written] = []
    for i, (adapter, record, typed) in enumerate(zip(by, records, each, strict=True)):
        if adapter is not None:
            load_adapter(model, Path(adapter), name=f"adapter_{i}")
        named = None if adapter is None else str(adapter)
        watch = on_text and InOrder(on_text, typed, codec.decode, adapter=named, first=len(texts))
        with counting(SILENT if watch else reporter, "writing", "texts") as count:
            written = generate_ids(
                model,
                [opened.prompt_ids(text, record.form) for text in typed],
                replace(options, max_new_tokens=options.max_new_tokens or record.max_new_tokens),
                eos_id=codec.eos_id,
                pad_id=codec.pad_id,
                constraint=recipe_constraint(codec, typed, record) if must_use else None,
                on_progress=count,
                on_token=watch,
            )
        pairs = zip(typed, written, strict=True)
        texts += [Written(text, codec.decode(ids), len(ids), named) for text, ids in pairs]
    return texts


def _prompts(
    prompts: str | Sequence[str], file: str | Path | None, record: Provenance, *, n: int, raw: bool
) -> list[str]:
    """The prompts as a model reads them, each as often as texts are wanted."""
    recipes, blanks = writes_recipes(record), record.form == "documents"
    read = read_prompts(prompts, file, task="write", raw=raw, recipes=recipes, blanks=blanks)
    return [text for text in read for _ in range(n)]


class InOrder:
    """An engine's `on_token` that tells of the first unfinished text, then of the next.

    Those that were written meanwhile are told as soon as it is their turn. `first` is the number
    of the first text.
    """

    def __init__(
        self,
        on_text: OnText,
        prompts: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        *,
        adapter: str | None = None,
        first: int = 0,
    ) -> None:
        self._on_text, self._prompts, self._decode = on_text, prompts, decode
        self._adapter, self._first = adapter, first
        self._ids: list[list[int]] = [[] for _ in prompts]
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
            if self._current < len(self._prompts):
                self._tell()

    def _tell(self) -> None:
        ids = self._ids[self._current]
        text = self._decode(ids)
        if self._current not in self._over:
            text = text.rstrip(_UNFINISHED)
        so_far = Written(self._prompts[self._current], text, len(ids), self._adapter)
        self._on_text(self._first + self._current, so_far)


def recipe_constraint(codec: Codec, prompts: Sequence[str], record: Provenance) -> FormConstraint:
    """Hold recipes to their form and to the ingredients of their prompts, in one call.

    A prompt, in the trained form, that names no ingredients is held to the form alone.

    Raises:
        ConfigError: the model does not write recipes, its vocabulary lacks an ingredient's
            letters, or llguidance is not installed.
    """
    from toque.models.generation.constraints import FormConstraint, Spelling  # with torch

    if not writes_recipes(record):
        tasks = f" for {', '.join(record.tasks)}" if record.form == "recipes" else ""
        raise ConfigError(
            f"{argument('must_use')} holds texts to the form of a recipe, and this model was "
            f"trained on {record.form}{tasks}. Leave it out."
        )
    forms = [
        recipe_form([_writable(name, codec) for name in asked_ingredients(prompt)])
        for prompt in prompts
    ]
    spelling = Spelling(
        codec.tokenizer_json, codec.eos_id, codec.newline_id, codec.encode, codec.decode
    )
    return FormConstraint(forms, spelling)


def _writable(name: str, codec: Codec) -> str:
    """The name in the letters that the vocabulary holds.

    Raises:
        ConfigError: it holds them not at all.
    """
    plain = codec.normalise(name)
    if codec.decode(codec.encode(plain)).strip().casefold() != plain.strip().casefold():
        raise ConfigError(
            f"{argument('must_use')}: this model's vocabulary cannot write {name!r}. Spell the "
            f"ingredient otherwise, or leave {argument('must_use')} out."
        )
    return plain
