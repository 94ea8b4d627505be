"""Random numbers of a model that depend on the grouping of rows are refused, with their place."""

import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from tiny import model_of, shape_of, stream_of, uneven_examples
from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError
from toque.models.forward.blocks import compile_blocks
from toque.models.forward.keyed_dropout import use_keyed_dropout
from toque.models.lora.layers import attach
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.workflows.diagnosis.update_ways import training_update

LOSSES_DIFFER = "depend on train.micro_batch_rows and on the number of ranks"


def update(model):
    step = stream_of(uneven_examples(6), "gpt2").at(Cursor())
    return training_update(
        model, step, rows_at_once=2, runtime=Runtime(), smoothing=0.0
    )


def gpt2(*, keyed=True):
    model = model_of("gpt2", shape=shape_of("gpt2", dropout=0.1)).train()
    if keyed:
        use_keyed_dropout(model)
    return model


def with_layerdrop():
    torch.manual_seed(5)
    config = OPTConfig(
        vocab_size=61, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, layerdrop=0.3,
    )  # fmt: skip
    return OPTForCausalLM(config).train()


class DropPath(nn.Module):
    """Stochastic depth of a layer: its output is dropped for some rows."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.drop_prob = 0.2

    def forward(self, values):
        output = self.layer(values)
        return output * (torch.rand(len(output), 1, 1) >= self.drop_prob)


def test_layerdrop_is_refused_and_named():
    model = with_layerdrop()
    use_keyed_dropout(model)
    with pytest.raises(ConfigError, match=LOSSES_DIFFER) as refused:
        update(model)
    assert "model.decoder (OPTDecoder)" in str(refused.value)
    assert "layerdrop=0.3" in str(refused.value)
    assert "train.optimisations.dropout=false" in str(refused.value)


def test_stochastic_depth_and_other_kinds_of_dropout_are_refused_and_named():
    model = gpt2()
    model.transformer.h[1].mlp = DropPath(model.transformer.h[1].mlp)
    with pytest.raises(
        ConfigError, match=r"transformer\.h\.1\.mlp \(DropPath\).*drop_prob=0\.2"
    ):
        update(model)
    model = gpt2()
    model.transformer.ln_f = nn.Sequential(model.transformer.ln_f, nn.AlphaDropout(0.1))
    with pytest.raises(ConfigError, match=r"transformer\.ln_f\.1 \(AlphaDropout\)"):
        update(model)
    model = gpt2()
    attach(
        model, AdapterConfig(r=2, dropout=0.2), base="none", seed=1
    )  # after the keys
    with pytest.raises(ConfigError, match=r"lora_dropout\.default \(Dropout\)"):
        update(model)


def test_noise_of_a_hook_is_refused():
    """As NEFTune adds it to embeddings (Jain et al. 2023)."""
    model = gpt2()
    table = model.get_input_embeddings()
    table.register_forward_hook(
        lambda _, __, output: output + 0.1 * torch.rand_like(output)
    )
    with pytest.raises(ConfigError, match=LOSSES_DIFFER):
        update(model)


def test_compiled_blocks_are_checked_without_hooks():
    model = gpt2()
    compile_blocks(model, backend="eager")
    update(model)
    model.transformer.drop.register_forward_hook(lambda *_: torch.rand(()) * 0 + _[2])
    with pytest.raises(
        ConfigError,
        match=f"^The model uses PyTorch.s random generator.*{LOSSES_DIFFER}",
    ):
        update(model)


def test_a_model_that_draws_nothing_trains_and_so_does_one_without_keys():
    model = gpt2(keyed=False)
    attach(model, AdapterConfig(r=2, dropout=0.2), base="none", seed=1)
    use_keyed_dropout(model)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    update(model)
    assert hooks == [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    ]
    update(gpt2(keyed=False))
    update(with_layerdrop())
