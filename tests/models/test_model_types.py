"""Model types without parts of their own here: by what they have, as transformers computes them."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Phi3Config, UMT5Config

from fixtures import model_types
from toque.errors import CheckpointError, ConfigError
from toque.models.config_values import max_positions
from toque.models.forward import packed, varlen_attention
from toque.models.forward.blocks import recompute_blocks
from toque.models.forward.loss import cross_entropy_sum, loss_sum
from toque.models.loading import self_check
from toque.models.loading.pretrained import check_folder, load_model
from written import generate

FAST = (
    "gemma2",
    "stablelm",
    "umt5",
)  # windows and caps; layers that pass nothing on; a T5
SLOW = (
    "gemma2", "gemma3_text", "phi3", "smollm3", "olmo2", "olmo3", "granite", "qwen3", "stablelm",
    "gpt_bigcode", "starcoder2", "opt", "mistral", "cohere2", "mt5", "umt5",
)  # fmt: skip


@pytest.fixture
def folder_of(tmp_path):
    """A folder of a type, as transformers alone writes it."""

    def made(kind):
        with model_types.quiet():
            model_types.write_folder(kind, tmp_path / kind)
        return tmp_path / kind

    return made


@pytest.mark.parametrize("kind", FAST)
def test_packed_adapted_and_written_as_transformers_computes(kind, tmp_path):
    if kind == "umt5" and not hasattr(UMT5Config(), "scale_decoder_outputs"):
        pytest.skip(
            "this transformers scales UMT5's outputs where its config says not to"
        )
    with model_types.quiet():
        row = model_types.tried(kind, tmp_path, train=False)
    assert (row.outcome, row.why) == ("works", "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW)
def test_all_that_and_resumed_to_the_bit(kind, tmp_path):
    with model_types.quiet():
        row = model_types.tried(kind, tmp_path)
    assert (row.outcome, row.why) == ("works", "")


REFUSED = {
    "mixtral": "mixtures of experts",
    "mamba": "layers without plain attention (linear_attention)",
    "rwkv": "passes a state from token to token",
    "lfm3": "layers without plain attention (conv)",
    "gemma3": "parts for other data than text (text_config, vision_config)",
    "bart": "counts positions from the beginning of a row",
    "bert": "no plain linear output head with the name lm_head",
    "t5gemma": "which is not supported",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_words(kind, folder_of):
    with pytest.raises(ConfigError) as refused:
        load_model(str(folder_of(kind)))
    known = kind in CONFIG_MAPPING or kind == "t5gemma"
    assert (REFUSED[kind] if known else "which is not supported") in str(refused.value)


def no_windows(*tensors, of=varlen_attention.attend_causally, **how):
    return of(*tensors, **how | {"window": None})


WRONG = {
    "windows": (varlen_attention, "attend_causally", no_windows),
    "caps": (self_check, "logit_cap", lambda _: None),
    "scales": (packed, "scale_outputs", lambda _, hidden: hidden * 1.1),
    "neighbours": (packed, "examples_in", lambda _: [(0, 12, 0, 12)]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_model_that_would_be_computed_otherwise_is_refused(
    what, folder_of, monkeypatch
):
    folder = str(folder_of("gemma3_text"))
    load_model(folder)
    monkeypatch.setattr(*WRONG[what])
    with pytest.raises(
        ConfigError, match="two texts packed in one row get other logits"
    ):
        load_model(folder)


def test_the_proof_leaves_the_model_as_it_was(folder_of):
    model = load_model(str(folder_of("gemma2")))
    assert model.config.sliding_window == 5
    assert {
        m.sliding_window for m in model.modules() if hasattr(m, "sliding_window")
    } == {5, None}


def test_a_config_of_more_weights_than_its_files_hold(folder_of):
    file = folder_of("opt") / "config.json"
    config = json.loads(file.read_text())
    for larger in (
        {"num_hidden_layers": 5},
        {"vocab_size": 1 << 30, "hidden_size": 1 << 20},
    ):
        file.write_text(json.dumps(config | larger))
        with pytest.raises(CheckpointError, match="describes a model of at least"):
            check_folder(str(file.parent))
    file.write_text(json.dumps(config | {"num_attention_heads": 3}))
    with pytest.raises(CheckpointError, match="does not describe a valid model"):
        check_folder(str(file.parent))


@pytest.mark.parametrize("kind", ["gemma2", "stablelm"])
def test_recomputed_blocks_give_the_same_gradients(kind, folder_of):
    model, batch = load_model(str(folder_of(kind))).train(), model_types.batch_of(False)
    loss_sum(model, batch).backward()
    kept = model_types.gradients(model)
    recompute_blocks(model)
    loss_sum(model, batch).backward()
    assert torch.equal(model_types.gradients(model), kept)


def test_the_loss_of_capped_logits():
    torch.manual_seed(0)
    hidden = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    weight, labels = (
        torch.randn(11, 8, dtype=torch.float64, requires_grad=True),
        torch.arange(9),
    )
    logits = 2.0 * torch.tanh(hidden @ weight.T / 2.0)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    got = cross_entropy_sum(hidden, weight, labels, cap=2.0, chunk_rows=4)
    torch.testing.assert_close(got, expected)
    pairs = zip(
        *(torch.autograd.grad(of, (hidden, weight)) for of in (got, expected)),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


@pytest.fixture
def longrope(tmp_path):
    """A Phi-3 whose factors change after 16 tokens, as it is read from a folder."""
    half = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 5.0]}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Phi3Config(
        vocab_size=61, num_attention_heads=4, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        max_position_embeddings=64, original_max_position_embeddings=16, initializer_range=0.3,
        rope_scaling={"type": "longrope", **half}, **sizes,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "phi3")
    return load_model(str(tmp_path / "phi3"))


def test_longrope_is_read_up_to_the_length_where_its_factors_change(longrope):
    assert max_positions(longrope.config) == 16
    how = {"eos_id": 60, "pad_id": 0, "max_new_tokens": 30}
    prompts = [list(range(2, 10)), list(range(20, 36))]
    (alone,), both = (
        generate(longrope, prompts[:1], **how),
        generate(longrope, prompts, **how),
    )
    assert both[0] == alone
    plain = longrope.generate(
        torch.tensor(prompts[:1]), max_new_tokens=9, do_sample=False, eos_token_id=60
    )
    assert (
        alone == plain[0, 8:].tolist()
    )  # 16 positions, and one token that is not read back
    with pytest.raises(
        ConfigError, match="17 tokens, but this model's context length is 16"
    ):
        generate(longrope, [list(range(2, 19))], **how)
