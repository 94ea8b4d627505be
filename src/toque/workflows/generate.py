"""Generation of texts from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toque.errors import ConfigError, argument
from toque.models.generation.options import GenerationOptions
from toque.models.loading.provenance import Provenance, form_named, provenance_of
from toque.reporter import SILENT, Reporter, counting
from toque.workflows.asking import provenance_in, writes_recipes
from toque.workflows.prompt_files import read_prompts
from toque.workflows.results import Model, Written, existing_folder
from toque.workflows.texts_in_order import InOrder, OnText

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toque.workflows.open_model import OpenedModel


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
    """Write texts for prompts.

    Args:
        run_or_model: What writes.
        prompts: "dish" or "dish: a, b, c" for a model of recipes; one trained on prompts, texts or
            tokens of your own gets them as they are. One or several.
        options: How they are written.
        file: More prompts, one a line or as JSON lines.
        adapters: Adapter folders; each writes every text.
        n: Texts for each prompt; they follow each other.
        raw: Send prompts as they are, not in the form the model was trained on.
        device: auto, the GPU where there is one; or cpu, cuda, cuda:N.
        must_use: Hold recipes to their form and to the ingredients of their prompts.
        on_text: Called with the number of a text and the text so far whenever it has grown, one
            text after the other in their order.
        reporter: Hears of progress, where nobody hears of the texts themselves.

    Raises:
        ConfigError: no prompt, `n` below 1, no such device, or `must_use` where it cannot be.
        DataError: a file that cannot be read.
        CheckpointError: a run without a checkpoint, or a damaged record of how it was trained.
    """
    if n < 1:
        raise ConfigError(f"{argument('n')} is {n}; it must be at least 1.")
    folder = existing_folder(run_or_model)
    asked = _asked(adapters, provenance_in(folder))
    each = [
        [t for t in _texts(prompts, file, record, raw=raw) for _ in range(n)] for _, record in asked
    ]
    with reporter.working(f"reading {folder}"):
        # With torch, which answering a mistake does without.
        from toque.models.generation.engine import generate as generate_ids
        from toque.models.lora.adapter_files import load_adapter
        from toque.workflows.structured_writing import recipe_constraint

        opened = _opened(folder, device, reporter)
    _warn_of_emulated_bf16(options, opened.model, reporter)
    texts: list[Written] = []
    for i, ((adapter, record), typed) in enumerate(zip(asked, each, strict=True)):
        if adapter is not None:
            load_adapter(opened.model, Path(adapter), name=f"adapter_{i}")
        held = recipe_constraint(opened.codec, typed, record) if must_use else None
        by = None if adapter is None else str(adapter)
        decode = opened.codec.decode
        watch = on_text and InOrder(on_text, typed, decode, adapter=by, first=len(texts))
        with counting(SILENT if watch else reporter, "writing", "texts") as count:
            written = generate_ids(
                opened.model,
                [opened.prompt_ids(text, form_named(record.form)) for text in typed],
                replace(options, max_new_tokens=options.max_new_tokens or record.max_new_tokens),
                eos_id=opened.codec.eos_id,
                pad_id=opened.codec.pad_id,
                constraint=held,
                on_progress=count,
                on_token=watch,
            )
        pairs = zip(typed, written, strict=True)
        texts += [Written(prompt, decode(found), len(found), by) for prompt, found in pairs]
    return texts


def _asked(
    adapters: Sequence[str | Path], own: Provenance
) -> list[tuple[str | Path | None, Provenance]]:
    """Who writes, and the form it is asked in: an adapter's own, which its base may not know."""
    named: list[tuple[str | Path | None, Provenance]] = [
        (adapter, provenance_of(Path(adapter)) or own) for adapter in adapters
    ]
    return named or [(None, own)]


def _warn_of_emulated_bf16(
    options: GenerationOptions, model: PreTrainedModel, reporter: Reporter
) -> None:
    import torch

    from toque.models.precision import has_fast_bf16

    emulated = options.precision == "bf16" and not has_fast_bf16(model.device)
    if emulated and model.dtype != torch.bfloat16:
        reporter.notice(
            f"This {model.device.type} has no bf16 in hardware: its products are emulated, which "
            "is slower than float32. Leave the precision at float32, or say auto."
        )


def _opened(folder: Path, device: str, reporter: Reporter) -> OpenedModel:
    from toque.models.glibc_malloc import keep_freed_memory
    from toque.workflows.open_model import open_model

    opened = open_model(folder, device=device, reporter=reporter)
    if opened.model.device.type == "cpu":
        keep_freed_memory()
    return opened


def _texts(
    prompts: str | Sequence[str], file: str | Path | None, record: Provenance, *, raw: bool
) -> list[str]:
    recipes, blanks = writes_recipes(record), record.form == "documents"
    return read_prompts(prompts, file, task="write", raw=raw, recipes=recipes, blanks=blanks)
