"""Constrained decoding: every text matches its form, in any family, batch and way of choosing."""

import json
import re
from collections import Counter
from collections.abc import Generator

import pytest
import torch

from tiny import model_of, shape_of
from toque.cooking.recipe_form import SHIPPED, answer_schema
from toque.cooking.schemas.schema_org import record_of_node
from toque.data.tokenizer.codec import load_codec
from toque.errors import ConfigError
from toque.models.generation.constraints import ConstraintCompiler
from written import generate

pytest.importorskip("llguidance")

WORDS = ("salt", "pepper", "butter", "milk")
GREEDY: dict[str, object] = {}
SAMPLED = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "seed": 3}


def form(words: tuple[str, ...]) -> Generator[str, str, None]:
    """Every word on a line of its own, in any order, then an end of any words."""
    left, before = list(words), r"Ingredients:\n"
    while left:
        line = yield rf"{before}- [0-9] (?:{'|'.join(left)})\n"
        left.remove(line.split()[-1])
        before = ""
    yield r"\nInstructions: .*\."


def is_whole(text: str, words: tuple[str, ...]) -> bool:
    found = re.fullmatch(
        r"Ingredients:\n((?:- [0-9] \w+\n)*)\nInstructions: .*\.", text
    )
    return found is not None and sorted(found[1].split()[2::3]) == sorted(words)


def eager_to_end(codec, family):
    """A model of random weights that ends as soon as it may."""
    model = model_of(
        family, vocab=codec.vocab_size, shape=shape_of(family, positions=300)
    )
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    with torch.no_grad():
        if head.weight is embedding:
            head.weight = torch.nn.Parameter(embedding.clone())
        head.weight[codec.eos_id] = 0
        for token in codec.encode("."):
            head.weight[token] *= 3
    return model


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("t5", GREEDY),
        ("t5", SAMPLED),
        ("gpt2", SAMPLED),
        ("neox", GREEDY),
        ("llama", GREEDY),
    ],
)
def test_texts_match_their_forms_whatever_shares_the_batch(family, way, tokenizers_at):
    codec = load_codec(
        tokenizers_at["encoder-decoder" if family == "t5" else "decoder"]
    )
    model = eager_to_end(codec, family)
    asked = [WORDS[: 1 + number % 4] for number in range(6)]
    prompts = [codec.encode(" ".join(words)) for words in asked]

    def write(rows: int, *, held: bool) -> list[str]:
        vocabulary = ConstraintCompiler(codec)
        texts = [vocabulary.to_form(form(words)) for words in asked] if held else ()
        how = {"max_new_tokens": 120, "batch_rows": rows, "constraints": texts, **way}
        found = generate(
            model, prompts, eos_id=codec.eos_id, pad_id=codec.pad_id, **how
        )
        return [codec.decode(tokens) for tokens in found]

    texts = write(6, held=True)
    for text, words in zip(texts, asked, strict=True):
        # Of random weights some ramble in the last line until the tokens end.
        assert is_whole(text if text.endswith(".") else f"{text}.", words), text
    assert write(2, held=True) == texts
    free = write(6, held=False)
    assert not any(
        is_whole(text, words) for text, words in zip(free, asked, strict=True)
    )


def test_what_no_token_can_write_is_an_error(tokenizers_at):
    codec = load_codec(tokenizers_at["encoder-decoder"])
    held = [ConstraintCompiler(codec).to_form(form(("爆",)))]
    model, how = model_of("t5", vocab=codec.vocab_size), {"constraints": held}
    how |= {"max_new_tokens": 30, "eos_id": codec.eos_id, "pad_id": codec.pad_id}
    with pytest.raises(
        ConfigError, match="Prompt 1 has a text that cannot match its form"
    ):
        generate(model, [codec.encode("salt")], **how)


ORDER = {
    "type": "object",
    "properties": {
        "dish": {"enum": ["soup", 'crème "brûlée"']},
        "persons": {"type": "integer", "minimum": 1, "maximum": 9},
        "with": {
            "type": "array",
            "items": {"enum": list(WORDS)},
            "minItems": 1,
            "maxItems": 3,
        },
        "hot": {"type": ["boolean", "null"]},
    },
    "required": ["dish", "persons", "with", "hot"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("way", [GREEDY, SAMPLED])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_texts_are_json_of_their_schema_beside_texts_that_are_free(
    family, way, writers_of_json
):
    jsonschema = pytest.importorskip("jsonschema")
    codec = writers_of_json["encoder-decoder" if family == "t5" else "decoder"]
    model, schema = (
        eager_to_end(codec, family),
        ConstraintCompiler(codec).to_schema(ORDER),
    )
    prompts = [codec.encode(f"soup {n}") for n in range(5)]

    def write(rows: int, held) -> list[str]:
        how = {"max_new_tokens": 120, "batch_rows": rows, "constraints": held, **way}
        found = generate(
            model, prompts, eos_id=codec.eos_id, pad_id=codec.pad_id, **how
        )
        return [codec.decode(tokens) for tokens in found]

    texts = write(5, [schema.copy() for _ in prompts])
    for text in texts:
        assert text == json.dumps(
            json.loads(text), ensure_ascii=False
        )  # one line, plain blanks
        jsonschema.validate(json.loads(text), ORDER)
    assert write(2, [schema.copy() for _ in prompts]) == texts
    free = write(5, ())
    mixed = write(5, [schema.copy() if n % 2 else None for n in range(5)])
    assert mixed == [texts[n] if n % 2 else free[n] for n in range(5)]


def test_the_shipped_recipe_is_one_that_is_read_as_data(writers_of_json):
    codec = writers_of_json["decoder"]
    model, held = eager_to_end(codec, "llama"), ConstraintCompiler(codec)
    for name in SHIPPED:
        held.to_schema(answer_schema(name))
    # Shorter than what people write: random weights ramble to every bound there is.
    schema = json.loads(json.dumps(answer_schema("recipe")))
    for lists in ("recipeIngredient", "recipeInstructions"):
        schema["properties"][lists] |= {"maxItems": 2}
        schema["properties"][lists]["items"] |= {"minLength": 8, "maxLength": 12}
    how = {
        "max_new_tokens": 290,
        "eos_id": codec.eos_id,
        "pad_id": codec.pad_id,
        **SAMPLED,
    }
    (ids,) = generate(
        model, [codec.encode("soup")], constraints=[held.to_schema(schema)], **how
    )
    recipe = record_of_node(json.loads(codec.decode(ids)), Counter())
    wanted = {
        "title",
        "ingredients",
        "directions",
        "servings",
        "minutes",
        "prep_time",
        "cook_time",
    }
    assert recipe.keys() == wanted


deep: dict[str, object] = {"type": "string"}
for _ in range(5000):
    deep = {"items": deep}
CANNOT = {
    "a keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "another's address": ({"$ref": "https://example.org/a"}, "does not fetch"),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "nothing fits": ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
    "options of its own": ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
    "too deep": (deep, "schema"),
    "too long": ({"enum": ["x" * 100_000]}, "than the allowed 100,000"),
    "names": ({"properties": 3}, "properties must be an object"),
    "a large step": ({"type": "integer", "multipleOf": 99_991}, "more than 10,000 rem"),
    "steps of one number": (
        {"anyOf": [{"multipleOf": 997}, {"multipleOf": 1.01}]},
        "rounder",
    ),
    "steps past counting": (
        {"enum": [{"multipleOf": 10**k + 1} for k in range(400)]},
        "rounder",
    ),
    "no JSON": ({"const": {1, 2}}, "not valid JSON"),
}


def test_round_steps_and_those_of_several_numbers_are_held(writers_of_json):
    quarters = {name: {"type": "number", "multipleOf": 0.25} for name in "abcd"}
    prices = {
        "price": {"type": "number", "multipleOf": 0.01},
        "rows": {"multipleOf": 1_000_000},
    }
    ConstraintCompiler(writers_of_json["decoder"]).to_schema(
        {"properties": quarters | prices}
    )


@pytest.mark.parametrize("case", CANNOT)
def test_a_schema_that_cannot_be_held_is_refused_in_a_paragraph(case, writers_of_json):
    schema, said = CANNOT[case]
    with pytest.raises(ConfigError, match=said) as caught:
        ConstraintCompiler(writers_of_json["decoder"]).to_schema(schema)
    assert "\n" not in str(caught.value)
    assert "start:" not in str(caught.value)


def test_a_vocabulary_that_cannot_write_json_is_refused(tokenizers_at, writers_of_json):
    with pytest.raises(ConfigError, match=r'cannot encode " , 0 .* \[ \] { }, which'):
        ConstraintCompiler(load_codec(tokenizers_at["encoder-decoder"])).to_schema(
            {"type": "object"}
        )
    with pytest.raises(ConfigError, match=r"cannot encode 爆, which"):
        ConstraintCompiler(writers_of_json["encoder-decoder"]).to_schema(
            {"properties": {"爆": {}}}
        )
