"""Constrained decoding: every text matches its form, in any family, batch and way of choosing."""

import re
from collections.abc import Generator

import pytest
import torch

from tiny import model_of, shape_of
from toque.data.tokenizer.codec import Codec, load_codec
from toque.errors import ConfigError
from toque.models.generation.constraints import FormConstraint, Spelling
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
    found = re.fullmatch(r"Ingredients:\n((?:- [0-9] \w+\n)*)\nInstructions: .*\.", text)
    return found is not None and sorted(found[1].split()[2::3]) == sorted(words)


def spelling_of(codec: Codec) -> Spelling:
    return Spelling(
        codec.tokenizer_json, codec.eos_id, codec.newline_id, codec.encode, codec.decode
    )


def eager_to_end(codec, family):
    """A model of random weights that ends as soon as it may."""
    model = model_of(family, vocab=codec.vocab_size, shape=shape_of(family, positions=300))
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
    [("t5", GREEDY), ("t5", SAMPLED), ("gpt2", SAMPLED), ("neox", GREEDY), ("llama", GREEDY)],
)
def test_texts_match_their_forms_whatever_shares_the_batch(family, way, tokenizers_at):
    codec = load_codec(tokenizers_at["encoder-decoder" if family == "t5" else "decoder"])
    model = eager_to_end(codec, family)
    asked = [WORDS[: 1 + number % 4] for number in range(6)]
    prompts = [codec.encode(" ".join(words)) for words in asked]

    def write(rows: int, *, held: bool) -> list[str]:
        spelt = spelling_of(codec)
        constraint = FormConstraint([form(words) for words in asked], spelt) if held else None
        how = {"max_new_tokens": 120, "batch_rows": rows, "constraint": constraint, **way}
        found = generate(model, prompts, eos_id=codec.eos_id, pad_id=codec.pad_id, **how)
        return [codec.decode(tokens) for tokens in found]

    texts = write(6, held=True)
    for text, words in zip(texts, asked, strict=True):
        # Of random weights some ramble in the last line until the tokens end.
        assert is_whole(text if text.endswith(".") else f"{text}.", words), text
    assert write(2, held=True) == texts
    free = write(6, held=False)
    assert not any(is_whole(text, words) for text, words in zip(free, asked, strict=True))


def test_what_no_token_can_write_is_an_error(tokenizers_at):
    codec = load_codec(tokenizers_at["encoder-decoder"])
    constraint = FormConstraint([form(("爆",))], spelling_of(codec))
    model, how = model_of("t5", vocab=codec.vocab_size), {"constraint": constraint}
    how |= {"max_new_tokens": 30, "eos_id": codec.eos_id, "pad_id": codec.pad_id}
    with pytest.raises(ConfigError, match="prompt 0 cannot be held to its form"):
        generate(model, [codec.encode("salt")], **how)
