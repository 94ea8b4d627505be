"""Build of a run: from the configuration to objects that are ready, store first, observers last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.cooking.augmentation import Rewriting
from toque.data.loader.batch_stream import BatchStream
from toque.data.loader.collate import Layout
from toque.data.loader.curriculum import StagedPlan
from toque.data.loader.epoch_plan import WINDOW_EXAMPLES, EpochPlan, Varied
from toque.data.loader.mixture import Mixture
from toque.data.loader.packing import RowShape
from toque.data.loader.row_lengths import ExampleLengths, refuse_empty, refuse_longer, row_shape
from toque.data.loader.span_corruption import SpanCorruption
from toque.data.prepare.example_rows import prompt_ids
from toque.data.prepare.prepare_settings import FamilyKind
from toque.data.store.store_manifest import form_of
from toque.data.store.token_store import TokenStore
from toque.evaluation.heldout_loss import HeldOut
from toque.evaluation.rows_at_once import with_rows_at_once
from toque.evaluation.text_samples import Prompt, Sampler
from toque.models.families import max_positions
from toque.models.loading.to_train import model_to_train
from toque.reporter import SILENT, Reporter
from toque.training.distributed.sharing import Sharing
from toque.training.runtime import Runtime
from toque.workflows.asking.own_words import in_trained_form
from toque.workflows.asking.provenance import provenance_of_run, target_limit


def build_language_model(config: RunConfig, store: TokenStore) -> PreTrainedModel:
    """The model to train, in float32 on the CPU, fitting the store's tokenizer, adapter and all."""
    return model_to_train(config.model, config.adapter, store.codec(), seed=config.seed)


def build_stream(
    config: RunConfig, store: TokenStore, model: PreTrainedModel, *, rank: int = 0, ranks: int = 1
) -> BatchStream:
    """Training batches by position.

    Raises:
        ConfigError: the store is empty, or its examples fit neither the model nor the settings.
    """
    refuse_empty(store, "train")
    rows, train, encoder = store.rows("train"), config.train, model.config.is_encoder_decoder
    spans = SpanCorruption.from_settings(config.span_corruption, store, encoder=encoder)
    lengths = ExampleLengths.of(store, rows, encoder=encoder, spans=spans)
    refuse_longer(lengths, max_positions(model.config))
    mixture = Mixture.from_settings(config.data, store, rows, seed=config.seed)
    shape = row_shape(train, lengths, mixture)
    rewriting = Rewriting.from_settings(config.augmentation, store, rows, encoder=encoder)
    varied: Varied | None = rewriting.varied if rewriting is not None else None
    if spans is not None:
        varied = spans.in_store(store)
    in_tokens = train.batch.unit == "tokens"

    def plan_of(chosen: np.ndarray, seed: int) -> EpochPlan:
        mixture = Mixture.from_settings(config.data, store, rows[chosen], seed=config.seed)
        return EpochPlan(
            examples=rows[chosen],
            source_lengths=lengths.source[chosen],
            target_lengths=lengths.target[chosen],
            shape=shape,
            seed=seed,
            update_rows=max(1, int(train.batch.amount // shape.tokens)) if in_tokens else None,
            window=WINDOW_EXAMPLES if in_tokens else int(train.batch.amount),
            mixture=mixture and replace(mixture, seed=seed),
            varied=varied,
        )

    plan: EpochPlan | StagedPlan
    if config.curriculum is None:
        plan = plan_of(np.arange(len(rows)), config.seed)
    else:
        plan = StagedPlan.from_settings(
            config.curriculum, store, rows, plan_of, stop_after=train.stop_after, seed=config.seed
        )
    return BatchStream(
        plan=plan,
        layout=build_layout(store, model, shape, packed=train.pack),
        prompt_lengths=store.prompt_lengths,
        target_lengths=store.target_lengths,
        rank=rank,
        world_size=ranks,
        varied=varied,
        readers=train.readers,
    )


def build_layout(
    store: TokenStore, model: PreTrainedModel, shape: RowShape, *, packed: bool
) -> Layout:
    """The layout by which examples become the model's inputs."""
    start_id = getattr(model.config, "decoder_start_token_id", None) or 0
    pad_id = model.config.pad_token_id or 0
    return Layout(store, shape=shape, pad_id=pad_id, start_id=start_id, packed=packed)


def build_heldout(
    config: RunConfig,
    store: TokenStore,
    model: PreTrainedModel,
    trained: Layout,
    runtime: Runtime,
    *,
    sharing: Sharing | None = None,
    reporter: Reporter = SILENT,
) -> HeldOut:
    """Held-out loss over the fixed subset that evaluation.max_examples asks for.

    On a GPU, the rows computed at once are measured now, if they never were on this machine.

    Raises:
        ConfigError: the store has no held-out example.
    """
    encoder = trained.shape.source > 0
    heldout = HeldOut.from_store(
        store,
        trained,
        runtime,
        at_most=config.evaluation.max_examples,
        data=config.data,
        spans=SpanCorruption.from_settings(config.span_corruption, store, encoder=encoder),
        sharing=sharing,
    )
    return with_rows_at_once(heldout, model, reporter.notice)


def own_prompts(config: RunConfig, store: TokenStore, *, encoder: bool) -> list[Prompt]:
    """Prompts of evaluation.prompts, in the form the model is trained on where it has one."""
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
    config: RunConfig, store: TokenStore, prompts: Sequence[Prompt], reporter: Reporter = SILENT
) -> Sampler:
    """Greedy texts for `prompts`, scored; as long as the store's targets."""
    limit = target_limit(config, store.manifest)
    return Sampler.greedy(prompts, store.codec(), max_new_tokens=limit, on_notice=reporter.notice)
