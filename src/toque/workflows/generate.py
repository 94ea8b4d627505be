"""Generation of texts from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toque.errors import ConfigError, argument
from toque.models.loading.provenance import Provenance, form_named, provenance_of
from toque.reporter import SILENT, Reporter, counting
from toque.workflows.asking.provenance import provenance_in, writes_recipes
from toque.workflows.prompt_files import read_prompts
from toque.workflows.results import Model, Written, existing_folder
from toque.workflows.texts_in_order import InOrder, OnText


def generate(
    run_or_model: Model,
    prompts: str | Sequence[str] = (),
    *,
    file: str | Path | None = None,
    adapters: Sequence[str | Path] = (),
    n: int = 1,
    temperature: float = 0.7,
    top_p: float = 0.95,
    max_new_tokens: int | None = None,
    seed: int = 0,
    raw: bool = False,
    device: str = "auto",
    on_text: OnText | None = None,
    reporter: Reporter = SILENT,
) -> list[Written]:
    """Write texts for prompts.

    Args:
        run_or_model: what writes.
        prompts: "dish" or "dish: a, b, c" for a model of recipes; one trained on prompts, texts or
            tokens of your own gets them as they are. One or several.
        file: more prompts, one a line or as JSON lines.
        adapters: adapter folders; each writes every text.
        n: texts for each prompt; they follow each other.
        temperature: 0 takes the likeliest token every time.
        top_p: sample from the likeliest tokens that together have this probability.
        max_new_tokens: longest text; what the model was trained on when None.
        seed: the same seed writes the same texts.
        raw: send prompts as they are, not in the form the model was trained on.
        device: auto, the GPU where there is one; or cpu, cuda, cuda:N.
        on_text: called with the number of a text and the text so far whenever it has grown, one
            text after the other in their order.
        reporter: hears of progress, where nobody hears of the texts themselves.

    Raises:
        ConfigError: no prompt, a number out of range, or no such device.
        DataError: a file that cannot be read.
        CheckpointError: a run without a checkpoint, or a damaged record of how it was trained.
    """
    _refuse_out_of_range(n, temperature, top_p)
    folder = existing_folder(run_or_model)
    own = provenance_in(folder)
    # An adapter is asked in its own form, which its base may never have seen.
    asked: list[tuple[str | Path | None, Provenance]] = [
        (adapter, provenance_of(Path(adapter)) or own) for adapter in adapters
    ] or [(None, own)]
    each = [
        [t for t in _texts(prompts, file, record, raw=raw) for _ in range(n)] for _, record in asked
    ]
    with reporter.working(f"reading {folder}"):
        # With torch, which answering a mistake does without.
        from toque.models.generation.engine import generate as generate_ids
        from toque.models.lora.files import load_adapter
        from toque.workflows.open_model import open_model

        opened = open_model(folder, device=device)
    texts: list[Written] = []
    for i, ((adapter, record), typed) in enumerate(zip(asked, each, strict=True)):
        if adapter is not None:
            load_adapter(opened.model, Path(adapter), name=f"adapter_{i}")
        by = None if adapter is None else str(adapter)
        watch = on_text and InOrder(
            on_text, typed, opened.codec.decode, adapter=by, first=len(texts)
        )
        with counting(SILENT if watch else reporter, "writing", "texts") as count:
            written = generate_ids(
                opened.model,
                [opened.prompt_ids(text, form_named(record.form)) for text in typed],
                max_new_tokens=max_new_tokens or record.max_new_tokens,
                eos_id=opened.codec.eos_id,
                pad_id=opened.codec.pad_id,
                strategy="sample" if temperature > 0 else "greedy",
                temperature=temperature or 1.0,
                top_p=top_p,
                seed=seed,
                on_progress=count,
                on_token=watch,
            )
        texts += [
            Written(prompt, opened.codec.decode(found), len(found), by)
            for prompt, found in zip(typed, written, strict=True)
        ]
    return texts


def _refuse_out_of_range(n: int, temperature: float, top_p: float) -> None:
    if n < 1 or temperature < 0 or not 0 < top_p <= 1:
        name_n, name_t, name_p = map(argument, ("n", "temperature", "top_p"))
        raise ConfigError(
            f"{name_n} is {n}, {name_t} {temperature:g} and {name_p} {top_p:g}. "
            f"Allowed: {name_n} from 1, {name_t} from 0, {name_p} above 0 and up to 1."
        )


def _texts(
    prompts: str | Sequence[str], file: str | Path | None, record: Provenance, *, raw: bool
) -> list[str]:
    return read_prompts(prompts, file, task="write", raw=raw, recipes=writes_recipes(record))
