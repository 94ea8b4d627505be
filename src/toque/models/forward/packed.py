"""The forward of a packed batch, up to the tensor the output head reads.

Stock transformers modules do the work. Ours are the means that keep packed examples apart: kernels
without masks on a GPU (`kernels/`), variable-length attention without padding on a CPU
(`varlen_attention.py`, `unpadded.py`), masks (`masks.py`) where neither works. The logits of a
whole batch never exist (`cross_entropy.py`).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from toque.batch import Batch, DecoderBatch, EncoderDecoderBatch
from toque.errors import ConfigError
from toque.models.families import family_of, max_positions, unwrapped
from toque.models.forward.attention_choice import attention_of
from toque.models.forward.gpu_attention import decoder_hidden, encoder_decoder_hidden
from toque.models.forward.unpadded import unpadded_decoder, unpadded_encoder_decoder


def hidden_states(model: nn.Module, batch: Batch) -> Tensor:
    """The output head's input at every position.

    Examples that share a row do not influence each other: in self- and cross-attention, tokens
    see only their own segment.

    Args:
        model: A transformers model of one of the families, bare or wrapped by PEFT.
        batch: On the model's device; of the kind that fits the family.

    Returns:
        [R, L, D] or [R, T, D], after the final norm, and for a T5 with scaled outputs after the
        factor d_model ** -0.5, so that `output_head` applied to it gives the stock logits.

    Raises:
        TypeError: the batch is of the other kind.
        ConfigError: the model's attention implementation cannot take masks.
    """
    core = unwrapped(model)
    family = family_of(core.config)
    if isinstance(batch, EncoderDecoderBatch):
        if not family.is_encoder_decoder:
            raise TypeError(
                f"a {family.name} model reads a DecoderBatch, not {type(batch).__name__}"
            )
        return _encoder_decoder(core, batch)
    if family.is_encoder_decoder:
        raise TypeError(f"a {family.name} model reads an EncoderDecoderBatch, not a DecoderBatch")
    return _decoder_only(core, batch)


def output_head(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The output head's weight [V, D] and bias [V], if it has one.

    Raises:
        ConfigError: the head is not a plain linear layer, so its weight alone is not the head.
    """
    head = unwrapped(model).get_submodule("lm_head")
    # peft's wrapper of a table of which some rows are trained: its weight is the whole table with
    # those rows in it, computed.
    inner = getattr(head, "original_module", None) if hasattr(head, "token_adapter") else head
    if not isinstance(inner, nn.Linear):
        raise ConfigError(
            f"The model's output head is a {type(head).__name__}, and the loss needs a plain "
            "linear layer. Leave the output head out of the adapter's target modules."
        )
    return cast("Tensor", head.weight), inner.bias


def scale_decoder_outputs(model: nn.Module, hidden: Tensor) -> Tensor:
    """The factor between the last norm and the head that only some T5 models have.

    T5 shares its embeddings with the head and scales by d_model ** -0.5; T5 v1.1 and FLAN-T5 do
    neither. transformers keeps the fact as `scale_decoder_outputs`, whatever the weights say.
    """
    config = unwrapped(model).config
    return hidden * config.d_model**-0.5 if config.scale_decoder_outputs else hidden


def _encoder_decoder(core: PreTrainedModel, batch: EncoderDecoderBatch) -> Tensor:
    attention = attention_of(core, batch.labels.device).name
    if attention == "segments":
        return scale_decoder_outputs(core, unpadded_encoder_decoder(core, batch))
    if attention == "flex":
        return scale_decoder_outputs(core, encoder_decoder_hidden(core, batch))
    encoder, decoder = core.get_submodule("encoder"), core.get_submodule("decoder")
    own_mask = same_segment(batch.source_segments)
    causal = causal_same_segment(batch.target_segments)
    across = cross_segment(batch.target_segments, batch.source_segments)
    source = encoder(
        input_ids=batch.source_tokens, attention_mask=for_model(own_mask, core)
    ).last_hidden_state
    output = decoder(
        input_ids=batch.target_tokens,
        attention_mask=for_model(causal, core),
        encoder_hidden_states=source,
        encoder_attention_mask=for_model(across, core),
        use_cache=False,
    )
    return scale_decoder_outputs(core, output.last_hidden_state)


def _decoder_only(core: PreTrainedModel, batch: DecoderBatch) -> Tensor:
    attention = attention_of(core, batch.labels.device).name
    causal = _purely_causal(core, batch)
    if attention == "segments" and not (causal and bool((batch.segments > 0).all())):
        return unpadded_decoder(core, batch)
    if attention in {"flash", "flex"} and not causal:
        return decoder_hidden(core, batch, attention)
    # Embeddings instead of tokens: without a mask GPT-2 would look for padding among the tokens.
    embeddings = core.get_input_embeddings()(batch.tokens)
    if causal:
        output = core.base_model(inputs_embeds=embeddings, use_cache=False)
    else:
        output = core.base_model(
            inputs_embeds=embeddings,
            attention_mask=for_model(causal_same_segment(batch.segments), core),
            position_ids=batch.positions,
            use_cache=False,
        )
    return cast("Tensor", output.last_hidden_state)


def _purely_causal(core: PreTrainedModel, batch: DecoderBatch) -> bool:
    """True if each row holds one example and then padding, which causality alone hides.

    Then no mask at all lets PyTorch's fused causal kernels run. Read from the example ids, which
    live on the host: looking at the segments would wait for the device in every micro-batch.
    """
    limit = max_positions(core.config)
    fits = limit is None or batch.tokens.shape[1] <= limit
    return fits and all(len(row) <= 1 for row in batch.example_ids)


def same_segment(segments: Tensor) -> Tensor:
    """[R, S] segment numbers -> [R, 1, S, S]: an encoder over packed examples."""
    return segments[:, None, :, None] == segments[:, None, None, :]


def causal_same_segment(segments: Tensor) -> Tensor:
    """[R, L] segment numbers -> [R, 1, L, L]: a decoder over packed examples.

    >>> causal_same_segment(torch.tensor([[1, 1, 2]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return same_segment(segments) & causal


def cross_segment(target_segments: Tensor, source_segments: Tensor) -> Tensor:
    """[R, T] and [R, S] segment numbers -> [R, 1, T, S]: segment k reads the source's segment k.

    Every target segment needs at least one source token of the same number.
    """
    target = target_segments[:, None, :, None]
    return (target == source_segments[:, None, None, :]) | (target == 0)


def for_model(mask: Tensor, model: PreTrainedModel) -> Tensor:
    """`mask` in the form that the model's attention implementation takes.

    Args:
        mask: [R, 1, queries, keys] bool, True where attention is allowed.
        model: Its config names the implementation. Additive masks use the smallest number of the
            weights' dtype, not -inf, so that adding a position bias cannot make NaN.

    Raises:
        ConfigError: the implementation cannot take a mask of our own.
    """
    implementation = model.config._attn_implementation  # noqa: SLF001  # it has no public name
    if implementation == "sdpa":
        return mask
    if implementation == "eager":
        blocked = torch.zeros((), dtype=model.dtype, device=mask.device)
        return torch.where(mask, blocked, torch.finfo(model.dtype).min)
    raise ConfigError(
        f'The model was loaded with attn_implementation="{implementation}", which cannot keep '
        "packed examples apart with a mask. Load it with sdpa or eager."
    )
