"""GGUF: the file holds the model, llama.cpp's own order included, or is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tiny import EOS, EVERY_KIND, PAD, make, model_of
from toque.data.tokenizer.codec import load_codec
from toque.errors import CheckpointError, ConfigError
from toque.models.gguf import gguf_export as exporting
from toque.models.gguf.gguf_export import (
    TYPES,
    ExportedGguf,
    export_gguf,
    read_weights,
    write_gguf,
)
from toque.models.gguf.gguf_vocabulary import PromptTokens
from toque.models.gguf.layout import remove_output_scale, stored_weights
from toque.models.loading.model_export import save_model

Export, Write = Callable[..., ExportedGguf], Callable[..., Path]
ASKING = PromptTokens(
    begin=None, bos=None, ends=(EOS,), pad=PAD, unk=None, newline=None, ends_with_eos=False,
    template=None,
)  # fmt: skip
PROMPTS = [[5 + i, 9, 13 + i, 7, EOS] for i in range(20)]
READ_BY_TRANSFORMERS = {"gpt2": False, "llama": True, "qwen2": True, "qwen3": False}
"""By kind, whether its sizes are read, too: some config values transformers leaves at defaults. It
reads no GPT-NeoX, and of a T5 no embeddings; llama.cpp's test has those."""


@pytest.fixture
def tokenizer_json(tokenizers_at: dict[str, Path]) -> str:
    return load_codec(tokenizers_at["decoder"]).tokenizer_json


def saved(model: PreTrainedModel, to: Path) -> Path:
    save_model(model, None, to, card="")
    return to


@pytest.fixture
def export(tokenizer_json: str, tmp_path: Path) -> Export:
    """Exports a model to the folder soup."""

    def exporting(source: Path, kind: str, **more: Any) -> ExportedGguf:
        how = {"tokenizer_json": tokenizer_json, "tokens": ASKING, "prompts": PROMPTS}
        return export_gguf(source, tmp_path / "soup", kind=kind, **how, **more)

    return exporting


@pytest.fixture
def write(tokenizer_json: str, tmp_path: Path) -> Write:
    """Writes a model's file."""

    def writing(model: PreTrainedModel, kind: str = "f32", **more: Any) -> Path:
        how = {"tokenizer_json": tokenizer_json, "tokens": ASKING} | more
        write_gguf(model, tmp_path / "model.gguf", name="x", kind=kind, **how)
        return tmp_path / "model.gguf"

    return writing


@pytest.mark.parametrize(
    ("kind", "stored"),
    [(kind, "f32") for kind in EVERY_KIND]
    + [(kind, stored) for kind in ("t5-v1.1", "llama") for stored in ("f16", "q8_0")],
)
def test_every_kind_is_written_read_back_and_compared(
    kind: str, stored: str, export: Export, tmp_path: Path
) -> None:
    source = saved(make(kind), tmp_path / "model")
    done = export(source, stored, files={"README.md": "# Soup\n"})
    assert sorted(p.name for p in (tmp_path / "soup").iterdir()) == [
        "README.md",
        done.file,
    ]
    assert done.file == f"soup-{stored.upper()}.gguf"
    assert done.prompts == 20
    assert done.unchanged == 20 or stored != "f32"
    with pytest.raises(CheckpointError, match="not empty"):
        export(source, stored)


@pytest.mark.parametrize("kind", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_file_as_the_same_model(kind: str, write: Write) -> None:
    """A reader that shares no line with ours: names, the order of rows, and sizes."""
    model = make(kind)
    remove_output_scale(model)
    file = write(model)
    known = {} if READ_BY_TRANSFORMERS[kind] else {"config": model.config}
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, **known
    ).eval()
    tokens = torch.tensor(PROMPTS)
    with torch.no_grad():
        theirs, ours = (m(input_ids=tokens).logits for m in (read, model))
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("begin", "bos", "held", "text"),
    [(None, 7, 7, "<7>hi"), (9, 7, 9, "<9>hi"), (None, None, EOS, "hi")],
)
def test_the_template_writes_the_token_that_the_tokenizer_begins_with(
    begin: int | None, bos: int | None, held: int, text: str, write: Write
) -> None:
    """llama.cpp takes `bos_token` from the file, which must hold some token."""
    asking = replace(ASKING, begin=begin, bos=bos, template="{{ bos_token }}hi")
    fields = gguf.GGUFReader(write(make("gpt2"), tokens=asking)).fields
    assert fields["tokenizer.ggml.bos_token_id"].contents() == held
    assert fields["tokenizer.ggml.add_bos_token"].contents() is (begin is not None)
    template = jinja2.Template(fields["tokenizer.chat_template"].contents())
    assert template.render(bos_token=f"<{held}>") == text


def test_neox_gives_all_queries_first() -> None:
    model = make("neox")
    (fused,) = [p for p in stored_weights(model) if p.name == "blk.0.attn_qkv.bias"]
    turned = fused.to_file(torch.arange(96.0)).view(3, 4, 8)
    for part in range(3):
        for head in range(4):
            first = 24.0 * head + 8 * part
            assert turned[part, head].tolist() == list(np.arange(first, first + 8))


@pytest.mark.parametrize("stored", TYPES)
def test_quantised_rows_and_plain_vectors(stored: str, write: Write) -> None:
    read = gguf.GGUFReader(write(make("gpt2"), stored))
    held = {tensor.name: tensor.tensor_type.name for tensor in read.tensors}
    assert held["blk.0.attn_qkv.weight"] == held["token_embd.weight"] == stored.upper()
    assert held["blk.0.attn_qkv.bias"] == held["position_embd.weight"] == "F32"


def test_a_file_that_computes_something_else_is_not_kept(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(make("gpt2"), tmp_path / "model")

    def of_another(model: PreTrainedModel, path: Path) -> None:
        read_weights(model, path)
        model.load_state_dict(make("gpt2", seed=1).state_dict())

    monkeypatch.setattr(exporting, "read_weights", of_another)
    with pytest.raises(
        CheckpointError, match="generates different tokens from the model"
    ):
        export(source, "f16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("kind", "setting", "value", "said"),
    [
        ("gpt2", "activation_function", "relu", "activation_function=relu"),
        ("neox", "attention_bias", False, "attention_bias=False"),
        ("llama", "hidden_act", "gelu", "hidden_act=gelu"),
        ("llama", "rope_parameters", {"rope_type": "yarn"}, "rope_type=yarn"),
        ("qwen2", "rope_parameters", {"rope_type": "llama3"}, "rope_type=llama3"),
        ("mistral", "sliding_window", 8, "sliding_window=8"),
        (
            "t5",
            "relative_attention_max_distance",
            64,
            "relative_attention_max_distance=64",
        ),
        ("gpt2", "model_type", "bloom", "type bloom"),
    ],
)
def test_what_toque_does_not_write_is_refused(
    kind: str, setting: str, value: object, said: str, write: Write, tmp_path: Path
) -> None:
    model = make(kind)
    setattr(model.config, setting, value)
    with pytest.raises(ConfigError, match=said):
        write(model)
    assert not list(tmp_path.iterdir())


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


def test_rotary_factors_are_those_of_llama_3(export: Export, tmp_path: Path) -> None:
    config = make("llama").config
    config.rope_parameters = LLAMA3
    model = type(make("llama"))(config).eval()
    done = export(saved(model, tmp_path / "model"), "f32")
    read = gguf.GGUFReader(done.folder / done.file)
    (factors,) = [t.data for t in read.tensors if t.name == "rope_freqs.weight"]
    plain = 10000.0 ** -(np.arange(0, 2 * len(factors), 2) / (2 * len(factors)))
    wavelengths = 2 * np.pi / plain
    share = np.clip((32 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    np.testing.assert_allclose(factors, 1 / ((1 - share) / 8.0 + share), rtol=1e-5)
    assert factors.min() == 1.0
    assert factors.max() > 1.0


@pytest.mark.parametrize("stored", ["f16", "bf16", "q8_0"])
def test_weights_beyond_a_type_are_float32(
    stored: str, export: Export, tmp_path: Path
) -> None:
    model = make("llama")
    weights = dict(model.named_parameters())
    with torch.no_grad():
        weights["model.layers.0.mlp.up_proj.weight"][0, 0] = (
            1e5 if stored != "bf16" else 3.4e38
        )
    done = export(saved(model, tmp_path / "model"), stored)
    assert done.widened == ("blk.0.ffn_up.weight",)
    assert "1 weights are stored in float32, because they have values" in str(done)
    assert "The first is blk.0.ffn_up.weight" in str(done)
    read = {
        t.name: t.tensor_type.name
        for t in gguf.GGUFReader(done.folder / done.file).tensors
    }
    assert read["blk.0.ffn_up.weight"] == "F32"
    assert read["blk.1.ffn_up.weight"] == stored.upper()


def test_the_export_reports_a_tokenizer_that_composes_letters(
    tokenizer_json: str, tmp_path: Path
) -> None:
    source, tokenizer = (
        saved(make("gpt2"), tmp_path / "model"),
        Tokenizer.from_str(tokenizer_json),
    )
    for normalizer in (None, normalizers.Sequence([normalizers.NFC()])):
        tokenizer.normalizer = normalizer
        folder = tmp_path / f"soup-{normalizer is None}"
        how = {"kind": "f32", "tokens": ASKING, "prompts": PROMPTS[:2]}
        done = export_gguf(source, folder, tokenizer_json=tokenizer.to_str(), **how)
        assert ("composes letters (Unicode NFC)" in str(done)) is (
            normalizer is not None
        )


def test_a_weight_that_is_not_a_number_is_refused(write: Write) -> None:
    model = make("llama")
    with torch.no_grad():
        dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"][0, 0] = (
            torch.inf
        )
    with pytest.raises(
        ConfigError, match=r"blk.0.ffn_up.weight .*infinite.* optim\.peak_lr"
    ):
        write(model)


def test_the_vocabulary_of_a_unigram_spells_its_line_break(
    tokenizers_at: dict[str, Path], write: Write
) -> None:
    codec = load_codec(tokenizers_at["encoder-decoder"])
    model = make("t5")
    model.resize_token_embeddings(codec.vocab_size + 3)
    remove_output_scale(model)
    asking = replace(
        ASKING, unk=codec.unk_id, newline=codec.newline_id, ends_with_eos=True
    )
    read = gguf.GGUFReader(
        write(model, tokenizer_json=codec.tokenizer_json, tokens=asking)
    )
    found = {name: field.contents() for name, field in read.fields.items()}
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert found["tokenizer.ggml.model"] == "t5"
    assert tokens[codec.newline_id] == "\n"
    assert types[codec.newline_id] == gguf.TokenType.USER_DEFINED
    assert types[codec.unk_id] == gguf.TokenType.UNKNOWN
    assert types[codec.eos_id] == gguf.TokenType.CONTROL
    assert types[-3:] == [gguf.TokenType.UNUSED] * 3
    assert found["tokenizer.ggml.add_eos_token"] is True
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert len(found["tokenizer.ggml.scores"]) == len(tokens) == codec.vocab_size + 3


PREPEND, REPLACE = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")


def sentencepiece_bpe(norm: Any, pre: Any = None) -> str:
    """The tokenizer.json of a SentencePiece BPE with these steps."""
    pieces = [
        "<pad>",
        "</s>",
        "<unk>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *"▁abc",
        "ab",
    ]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[("a", "b")], byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = norm
    if pre is not None:
        made.pre_tokenizer = pre
    return made.to_str()


@pytest.mark.parametrize(
    ("norm", "pre", "begins"),
    [
        (normalizers.Sequence([PREPEND, REPLACE]), None, True),
        (REPLACE, None, False),  # as Yi's
        (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), True),
        (None, pre_tokenizers.Metaspace(prepend_scheme="never", split=False), False),
    ],
)
def test_a_sentencepiece_bpe_says_whether_texts_begin_with_a_blank(
    norm: Any, pre: Any, begins: bool, write: Write
) -> None:
    tokenizer_json = sentencepiece_bpe(norm, pre)
    tokens = Tokenizer.from_str(tokenizer_json).encode("ab").tokens
    assert tokens == ["▁"] * begins + ["ab"]
    read = gguf.GGUFReader(
        write(model_of("llama", vocab=264), tokenizer_json=tokenizer_json)
    )
    assert read.fields["tokenizer.ggml.add_space_prefix"].contents() is begins


def test_a_normalizer_that_llama_cpp_lacks_is_refused(write: Write) -> None:
    odd = sentencepiece_bpe(
        normalizers.Sequence([normalizers.Lowercase(), PREPEND, REPLACE])
    )
    with pytest.raises(
        ConfigError, match="SentencePiece BPE after the normalizer Lowercase"
    ):
        write(model_of("llama", vocab=264), tokenizer_json=odd)


def test_a_normalizer_of_a_unigram_is_written_or_refused(
    tokenizers_at: dict[str, Path], write: Write
) -> None:
    codec = load_codec(tokenizers_at["encoder-decoder"])
    model = make("t5")
    model.resize_token_embeddings(codec.vocab_size)
    remove_output_scale(model)
    tokenizer = Tokenizer.from_str(codec.tokenizer_json)
    blanks = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Strip(), blanks]
    )
    write(model, tokenizer_json=tokenizer.to_str())
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ConfigError, match="Unigram after the normalizer Lowercase"):
        write(model, tokenizer_json=tokenizer.to_str())


def test_a_tokenizer_llama_cpp_lacks_is_refused(
    tokenizer_json: str, write: Write
) -> None:
    odd = tokenizer_json.replace(
        '"type":"ByteLevel","add_prefix_space":false', '"type":"Digits"'
    )
    odd = odd.replace(
        '"type": "ByteLevel", "add_prefix_space": false', '"type": "Digits"'
    )
    assert odd != tokenizer_json
    with pytest.raises(ConfigError, match="tokenizer is BPE over Digits"):
        write(make("gpt2"), tokenizer_json=odd)
