"""Held-out loss and texts, assembled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from toque.config import RunConfig
from toque.cooking.prompts import CLASSES, TASKS
from toque.cooking.scoring.recipe_scores import text_metrics
from toque.data.loader.collate import Layout
from toque.data.loader.mixture import held_out_weights
from toque.data.loader.packing import choose_shape
from toque.data.loader.row_lengths import ExampleLengths, refuse_empty, usual_rows
from toque.data.loader.span_corruption import SpanCorruption
from toque.data.prepare.example_rows import prompt_ids
from toque.data.prepare.prepare_settings import FamilyKind
from toque.data.store.prompt_form import form_of
from toque.data.store.token_store import TokenStore
from toque.evaluation.heldout_loss import HeldOut, RowsAtOnce, choose_rows, subset
from toque.evaluation.text_samples import Prompt, Sampler
from toque.models.forward.loss import loss_sum
from toque.reporter import SILENT, Reporter
from toque.training.distributed.sharing import LossFn, Sharing
from toque.workflows.asking.own_words import in_trained_form
from toque.workflows.asking.provenance import provenance_of_run, target_limit
from toque.workflows.assembly.metrics import slices_of, text_bytes
from toque.workflows.assembly.setup import Setup
from toque.workflows.assembly.speed.evaluation_rows import loss_rows, write


def build_heldout(setup: Setup, reporter: Reporter = SILENT) -> HeldOut:
    """Held-out loss over the fixed subset that evaluation.max_examples asks for.

    Where sources or tasks are mixed by weight, examples weigh in it as they do in training. On a
    GPU, the rows computed at once are measured now, if they never were on this machine.

    Raises:
        ConfigError: the store has no held-out example.
    """
    config, store, runtime, sharded = setup.config, setup.store, setup.runtime, setup.sharded
    trained, rows = setup.stream.layout, store.rows("validation")
    encoder = trained.shape.source > 0
    refuse_empty(store, "validation")
    spans = SpanCorruption.from_settings(config.span_corruption, store, encoder=encoder)
    lengths = ExampleLengths.of(store, rows, encoder=encoder, spans=spans)
    shape = choose_shape(*lengths.sample(), encoder=encoder)
    everything = store.prompt_lengths.astype(np.int64), store.target_lengths.astype(np.int64)
    prompts, targets = everything if spans is None else spans.longest(*everything)
    chosen = subset(rows, config.evaluation.max_examples)
    weights = held_out_weights(config.data, store, chosen)
    packed = {
        weight: choose_rows(
            chosen[weights == weight],
            prompt_lengths=prompts,
            target_lengths=targets,
            shape=shape,
        )
        for weight in sorted(set(weights.tolist()))
    }
    held_rows = [row for part in packed.values() for row in part]
    heldout = HeldOut(
        layout=Layout(
            store if spans is None else spans.held_out(store),
            shape=shape,
            pad_id=trained.pad_id,
            start_id=trained.start_id,
            packed=trained.packed,
        ),
        rows=held_rows,
        weights=[weight for weight, part in packed.items() for _ in part],
        loss_sum=loss_sum if sharded is None else _together(sharded),
        autocast=runtime.autocast,
        device=runtime.device,
        rows_per_batch=usual_rows(shape.tokens),
        share=(runtime.ranks.rank, runtime.ranks.world_size),
        total=runtime.ranks.all_reduce_sum,
        in_step=sharded is not None,
        # The targets of a corrupted text are pieces: bits a byte would describe no text.
        n_bytes=text_bytes(store, held_rows) if spans is None else 0,
    )
    return replace(heldout, at_once=RowsAtOnce(loss_rows(heldout, setup.model), reporter.notice))


def _together(sharded: Sharing) -> LossFn:
    """The loss of a model that all ranks have to enter together."""
    return lambda _model, batch: sharded.evaluate(loss_sum, batch)


def held_out_prompts(store: TokenStore, n: int) -> list[Prompt]:
    """The first `n` of the fixed held-out order that have a prompt, with their references.

    Questions whose answer is a class are left out: they are scored by `task_scores`.
    """
    codec = store.codec()
    found: list[tuple[int, tuple[int, ...], str]] = []
    held_out = store.rows("validation")
    of_classes = [number for number, task in enumerate(TASKS) if task in CLASSES]
    written = ~np.isin(np.asarray(store.column("task"))[held_out], of_classes)
    for row in subset(held_out[written], None)[: 4 * n].tolist():
        ids = tuple(int(i) for i in store.prompt(row))
        text = codec.decode(ids)
        if text.strip() and len(found) < n:
            found.append((row, ids, text))
    references = [codec.decode(store.target(row)) for row, _, _ in found]
    slices = slices_of(store, [row for row, _, _ in found], references)
    return [
        Prompt(ids, text, reference, labels)
        for (_, ids, text), reference, labels in zip(found, references, slices, strict=True)
    ]


def own_prompts(config: RunConfig, store: TokenStore, *, encoder: bool) -> list[Prompt]:
    """The prompts of evaluation.prompts, in the form the model is trained on where it has one."""
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


def build_sampler(
    config: RunConfig,
    store: TokenStore,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | None = None,
    reporter: Reporter = SILENT,
) -> Sampler:
    """Greedy texts for `prompts`, scored; as long as the store's targets unless told otherwise."""
    codec = store.codec()
    return Sampler(
        prompts=prompts,
        codec=codec,
        generate=partial(
            write,
            max_new_tokens=max_new_tokens or target_limit(config, store.manifest),
            eos_id=codec.eos_id,
            pad_id=codec.pad_id,
            on_notice=reporter.notice,
        ),
        metrics=text_metrics,
    )
