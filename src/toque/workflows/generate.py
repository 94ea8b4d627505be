"""Generation of texts from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from toque.errors import ConfigError, argument
from toque.models.loading.provenance import Provenance, form_named, provenance_of
from toque.reporter import SILENT, Reporter, counting
from toque.workflows.asking.provenance import provenance_in, writes_recipes
from toque.workflows.prompt_files import read_prompts
from toque.workflows.results import Model, Written, existing_folder
from toque.workflows.texts_in_order import InOrder, OnText

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toque.workflows.open_model import OpenedModel

Precision = Literal["auto", "bf16", "float32"]


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
    precision: Precision = "float32",
    must_use: bool = False,
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
        precision: of the matrix products. bf16 is faster where the processor has it; where two
            tokens are about equally likely, a text may then part from float32's, and depend on
            what is written beside it. auto: bf16 there, float32 elsewhere.
        must_use: hold recipes to their form and to the ingredients of their prompts.
        reporter: hears of progress, where nobody hears of the texts themselves.

    Raises:
        ConfigError: no prompt, a number out of range, no such device, or `must_use` where it cannot
            be.
        DataError: a file that cannot be read.
        CheckpointError: a run without a checkpoint, or a damaged record of how it was trained.
    """
    _refuse_out_of_range(n, temperature, top_p, precision)
    folder = existing_folder(run_or_model)
    asked = _asked(adapters, provenance_in(folder))
    each = [
        [t for t in _texts(prompts, file, record, raw=raw) for _ in range(n)] for _, record in asked
    ]
    with reporter.working(f"reading {folder}"):
        # With torch, which answering a mistake does without.
        from toque.models.generation.engine import generate as generate_ids
        from toque.models.lora.files import load_adapter
        from toque.workflows.asking.structured_writing import recipe_constraint

        opened = _opened(folder, device, reporter)
    computed = _precision(precision, opened.model, reporter)
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
                max_new_tokens=max_new_tokens or record.max_new_tokens,
                eos_id=opened.codec.eos_id,
                pad_id=opened.codec.pad_id,
                strategy="sample" if temperature else "greedy",
                temperature=temperature or 1.0,
                top_p=top_p,
                seed=seed,
                precision=computed,
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


def _refuse_out_of_range(n: int, temperature: float, top_p: float, precision: str) -> None:
    if precision not in get_args(Precision):
        raise ConfigError(f"{argument('precision')} is {precision!r}; use auto, bf16 or float32.")
    if n < 1 or temperature < 0 or not 0 < top_p <= 1:
        name_n, name_t, name_p = map(argument, ("n", "temperature", "top_p"))
        raise ConfigError(
            f"{name_n} is {n}, {name_t} {temperature:g} and {name_p} {top_p:g}. "
            f"Allowed: {name_n} from 1, {name_t} from 0, {name_p} above 0 and up to 1."
        )


def _precision(
    asked: str, model: PreTrainedModel, reporter: Reporter
) -> Literal["bf16", "float32"]:
    """What `asked` means for a model here; says it where bf16 costs time."""
    import torch

    from toque.models.precision import has_fast_bf16

    if model.dtype == torch.bfloat16:
        return "float32"  # the model as it is, which is all in bf16
    device = model.device
    fast = has_fast_bf16(device)
    if asked == "bf16" and not fast:
        reporter.notice(
            f"This {device.type} has no bf16 in hardware: its products are emulated, which is "
            "slower than float32. Leave the precision at float32, or say auto."
        )
    return "bf16" if asked == "bf16" or (asked == "auto" and fast) else "float32"


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
