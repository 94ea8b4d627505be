"""Runs of tokens that a text holds once: the rule of recipes, wherever texts are written."""

import json
from pathlib import Path

import msgspec
import pytest

import toque
from plain_transformers import model_folder
from toque.data.tokenizer.codec import Codec, load_codec
from toque.evaluation.text_samples import Prompt, Sampler
from toque.models.generation.options import GenerationOptions
from toque.models.loading.provenance import RECIPE_RUN_TOKENS
from toque.workflows.inference.open_model import open_model
from toque.workflows.inference.talk import open_talk

PROMPT = "Generate recipe for: Pea Soup using ingredients: peas, onion"
GREEDY = {"temperature": 0, "max_new_tokens": 120, "raw": True}


@pytest.fixture(params=["recipes", "documents"])
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(form: str, tokenizers_at: dict[str, Path], tmp_path: Path) -> Path:
    """A model whose likeliest texts turn in circles."""
    return model_folder(
        tmp_path, "t5", load_codec(tokenizers_at["encoder-decoder"]), form
    )


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.1}, {"temperature": 0.1, "best_of": 3}]
)
def test_recipes_go_by_the_rule_unless_told_and_other_texts_when_told(
    folder: Path, form: str, how: dict[str, object]
) -> None:
    def write(**more: object) -> str:
        [text] = toque.generate(folder, PROMPT, **GREEDY | how | more)
        return text.text

    free, ruled = (write(no_repeat_ngram_size=n) for n in (0, RECIPE_RUN_TOKENS))
    assert free != ruled
    assert write() == (ruled if form == "recipes" else free)


def test_a_text_in_json_is_free_to_repeat_its_names(
    writers_of_json: dict[str, Codec], tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    folder = model_folder(tmp_path, "gpt2", writers_of_json["decoder"])
    one = {
        "type": "object",
        "properties": {
            name: {"enum": [1, 2]} for name in ("a_long_name", "another_long_name")
        },
        "required": ["a_long_name", "another_long_name"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": one, "minItems": 3, "maxItems": 3}

    def write(**more: object) -> str:
        how = GREEDY | {"max_new_tokens": 200, "schema": schema} | more
        [text] = toque.generate(folder, PROMPT, **how)
        return text.text

    usual = write()
    assert usual == write(no_repeat_ngram_size=0)
    assert len(json.loads(usual)) == 3
    # Where a person asks for the rule all the same, the form goes first.
    assert len(json.loads(write(no_repeat_ngram_size=4))) == 3


def test_evaluation_and_chat_write_as_generate_does(folder: Path) -> None:
    [usual] = toque.generate(folder, PROMPT, **GREEDY)
    model = open_model(folder)
    record = msgspec.structs.replace(model.provenance, max_new_tokens=120)
    prompt = Prompt(tuple(model.prompt_ids(PROMPT)), PROMPT)
    sampler = Sampler([prompt], model.codec, record)
    sample = sampler.generate_samples(model.model)[0]
    assert sample.text == usual.text
    talk = open_talk(folder, system=None, device="cpu")
    options = GenerationOptions(temperature=0, max_new_tokens=120)
    assert talk.ask(PROMPT, options, on_text=lambda _: None) == usual.text


def test_plain_transformers_is_told(folder: Path, form: str) -> None:
    held = json.loads((folder / "generation_config.json").read_text())
    assert held.get("no_repeat_ngram_size") == (
        RECIPE_RUN_TOKENS if form == "recipes" else None
    )
