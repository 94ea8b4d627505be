"""Served model that knows one recipe by heart: what it writes is known; it learns in seconds."""

from collections.abc import Sequence
from functools import cache, partial

import torch
from transformers import PreTrainedModel

import tiny
from toque.cooking.prompts import write_prompt
from toque.data.tokenizer.chat import prompt_ids
from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.tokenizer_training import train_codec
from toque.models.loading.provenance import Provenance
from toque.serving.batcher import ServedModel, ServedModels
from toque.workflows.trained_model.prompt_format import format_prompt

TITLE = "Lentil Soup"
FOODS = ("lentils", "saffron")
"""The second is not in the recipe."""
TEXT = """Ingredients:
- 1 1/2 cups red lentils
- 2 tablespoons olive oil
- 3 carrots, diced
- salt to taste

Instructions:
1. Heat the olive oil in a pot and cook the carrots for 8 minutes.
2. Add the lentils and simmer for 20 minutes. Season with salt. Serves 2."""
_STEPS = 150


@cache
def taught(steps: int, family: str = "llama") -> tuple[PreTrainedModel, Codec]:
    """The model and its tokenizer."""
    prompt = write_prompt(TITLE, FOODS)
    kind = "encoder-decoder" if family == "t5" else "decoder"
    codec = train_codec(
        [prompt, TEXT] * 2, vocab_size=320, kind="unigram" if family == "t5" else "bpe"
    )
    more = {"num_key_value_heads": 4} if family == "llama" else {}
    shape = tiny.shape_of(family, width=64, positions=512, inner=128, **more)
    model = tiny.model_of(family, vocab=codec.vocab_size, shape=shape)
    target = [*codec.encode(codec.normalise(TEXT)), codec.eos_id]
    asked = prompt_ids(codec, prompt, kind, "recipes")
    ids, labels = torch.tensor([asked]), torch.tensor([target])
    if family != "t5":
        ids = torch.cat([ids, labels], 1)
        labels = torch.cat([torch.full((1, len(asked)), -100), labels], 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, codec


def served_models(names: Sequence[str], *, steps: int = _STEPS) -> ServedModels:
    """The model under some names; the first alone has learnt to tell difficulty."""
    model, codec = taught(steps)
    found = []
    for name in names:
        tasks = ["write", "difficulty"] if name == names[0] else ["write"]
        record = Provenance(form="recipes", max_new_tokens=400, tasks=tasks)
        asked = partial(format_prompt, task="write")
        found.append(
            ServedModel(
                name=name, model=model, codec=codec, record=record, to_prompt=asked
            )
        )
    return ServedModels(found)
