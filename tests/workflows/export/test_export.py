"""Export: a folder for transformers or for llama.cpp, and how the model in it is asked."""

import json
import re
import shutil
from pathlib import Path

import gguf
import jinja2
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from tokenizers import Tokenizer

import toque
from plain_transformers import model_folder
from toque.cooking.prompts import write_prompt
from toque.data.tokenizer.chat import TEMPLATES
from toque.data.tokenizer.codec import load_codec
from toque.errors import CheckpointError, ConfigError
from toque.models.loading.provenance import Provenance
from toque.workflows.export import chat_template
from toque.workflows.trained_model.training_record import UNKNOWN

RECIPES = Provenance(form="recipes", max_new_tokens=40)
TEXTS = Provenance(form="documents", max_new_tokens=40)


@pytest.fixture
def model(tokenizers_at: dict[str, Path], tmp_path: Path) -> Path:
    """The folder of a finished GPT-2 of recipes."""
    return model_folder(
        tmp_path, "gpt2", load_codec(tokenizers_at["decoder"]), wide=0.2
    )


def test_the_gguf_folder_holds_the_file_and_how_it_is_asked(
    model: Path, tmp_path: Path
) -> None:
    done = toque.export(model, tmp_path / "soup", form="gguf", dtype="Q8_0")
    assert str(done).startswith(
        f"{tmp_path / 'soup' / 'soup-Q8_0.gguf'} holds the model"
    )
    held = sorted(path.name for path in done.folder.iterdir())
    assert held == ["Modelfile", "README.md", "soup-Q8_0.gguf"]
    modelfile = (done.folder / "Modelfile").read_text()
    assert 'TEMPLATE """Generate recipe for: {{ .Prompt }}\n"""' in modelfile
    assert "FROM ./soup-Q8_0.gguf\n" in modelfile
    card = (done.folder / "README.md").read_text()
    assert card.startswith("# Soup\n")
    assert "soup-Q8_0.gguf -e -p 'Generate recipe for: lentil soup using" in card
    found = {
        name: field.contents()
        for name, field in gguf.GGUFReader(done.folder / done.file).fields.items()
    }
    codec = load_codec(model)
    assert found["tokenizer.ggml.bos_token_id"] == codec.bos_id
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["general.name"] == "soup"


@pytest.fixture
def talker(tokenizers_at: dict[str, Path], tmp_path: Path) -> Path:
    """The folder of a finished GPT-2 of conversations."""
    source = shutil.copytree(tokenizers_at["decoder"], tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(source / "tokenizer.json"))
    told = json.loads((source / "tokenizer_config.json").read_text())
    told |= {
        "chat_template": TEMPLATES["plain"],
        "bos_token": "<s>",
    }  # another than its end
    (source / "tokenizer_config.json").write_text(json.dumps(told))
    return model_folder(tmp_path, "gpt2", load_codec(source), "conversations", wide=0.2)


def test_a_gguf_that_converses_is_asked_by_the_template_in_the_file(
    talker: Path, tmp_path: Path
) -> None:
    done, codec = (
        toque.export(talker, tmp_path / "talk", form="gguf"),
        load_codec(talker),
    )
    modelfile = (done.folder / "Modelfile").read_text().splitlines()
    assert not [line for line in modelfile if line.startswith("TEMPLATE")]
    assert f'PARAMETER stop "{codec.piece(codec.eos_id)}"' in modelfile
    fields = gguf.GGUFReader(done.folder / done.file).fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATES["plain"]
    assert codec.bos_id not in (None, codec.eos_id)
    assert fields["tokenizer.ggml.bos_token_id"].contents() == codec.bos_id
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    card = (done.folder / "README.md").read_text()
    assert "llama-server" in card
    assert "llama-completion" not in card


def test_the_card_of_a_model_that_converses_shows_messages(
    talker: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    card = (toque.export(talker, tmp_path / "talk").folder / "README.md").read_text()
    assert card == (talker / "README.md").read_text()
    assert "The tokenizer adds" not in card
    monkeypatch.chdir(talker)
    capsys.readouterr()
    exec(compile(card.split("```python\n")[1].split("```")[0], "README.md", "exec"), {})  # noqa: S102  # the card's own text
    [expected] = toque.generate(talker, "Your prompt", temperature=0, max_new_tokens=40)
    assert capsys.readouterr().out == expected.text + "\n"


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_hugging_face_folder_in_half_the_bytes(
    dtype: str, model: Path, tmp_path: Path
) -> None:
    done = toque.export(model, tmp_path / "half", dtype=dtype)
    kinds = {
        tensor.dtype for tensor in load_file(done.folder / "model.safetensors").values()
    }
    assert kinds == {{"bf16": torch.bfloat16, "f16": torch.float16}[dtype]}
    assert (
        json.loads((done.folder / "config.json").read_text())["dtype"]
        == str(*kinds)[6:]
    )
    assert 0 < done.difference < 0.1
    whole = toque.export(model, tmp_path / "whole")
    assert whole.difference == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"form": "mlx"},
            "form must be one of hf, gguf, onnx, web, adapter, not 'mlx'",
        ),
        ({"form": "web", "dtype": "bf16"}, "dtype must be one of f32, f16, int8 in"),
        (
            {"dtype": "q8_0"},
            "dtype must be one of f32, bf16, f16 in the format hf, not q8_0",
        ),
        ({"form": "gguf", "dtype": "q4_k"}, "dtype must be one of f32, f16"),
        ({"push_to": "soup"}, "must name a repository on the hub"),
        ({"push_to": "me/soup"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    options: dict[str, str], said: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        toque.export(model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_card_that_is_no_utf_8_is_named_before_anything_is_written(
    model: Path, tmp_path: Path
) -> None:
    (model / "README.md").write_bytes("# Crème brûlée".encode("latin-1"))
    with pytest.raises(
        CheckpointError, match=r"README.md is not UTF-8 text \(byte 4 is 0xe8\)"
    ):
        toque.export(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (model / "README.md").unlink()
    assert toque.export(model, tmp_path / "new").folder == tmp_path / "new"


def test_a_taken_folder_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        toque.export(model, tmp_path / "photos", form="gguf")
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["one.jpg"]


def asked(
    record: Provenance, text: str, *, ends: str = "\n", own: object = None
) -> str:
    template = jinja2.Template(chat_template(record, own, ends=ends))
    before = {"role": "user", "content": "earlier"}
    return template.render(messages=[before, {"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("typed", "title", "foods"),
    [
        ("lentil soup", "lentil soup", []),
        ("lentil soup: lentils, cumin", "lentil soup", ["lentils", "cumin"]),
        ("it's soup : beans", "it's soup", ["beans"]),
    ],
)
def test_the_template_makes_the_prompt_that_was_trained(
    typed: str, title: str, foods: list[str]
) -> None:
    assert asked(RECIPES, typed) == write_prompt(title, foods) + "\n"
    assert (
        asked(RECIPES, write_prompt(title, foods)) == write_prompt(title, foods) + "\n"
    )
    assert asked(RECIPES, typed, ends="") == write_prompt(title, foods)


def test_other_models_get_what_was_typed_or_their_own_template() -> None:
    assert asked(TEXTS, "Once: upon a time", ends="") == "Once: upon a time"
    assert asked(UNKNOWN, "Soup: a") == "Soup: a\n"
    assert asked(UNKNOWN, "Soup", own="<{{ messages[-1].content }}>") == "<Soup>"


def test_without_a_token_nothing_is_written_or_sent(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="needs a token"):
        toque.export(model, tmp_path / "out", push_to="me/soup")
    assert not (tmp_path / "out").exists()
