"""Model folders with random weights, and the texts that transformers writes with them alone."""

from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from tiny import shape_of
from toque.data.tokenizer.codec import Codec
from toque.models.loading.card_usage import with_usage
from toque.models.loading.from_scratch import build_model
from toque.models.loading.model_export import save_model
from toque.models.loading.provenance import Provenance
from toque.workflows.trained_model.model_codec import model_files
from toque.workflows.trained_model.prompt_format import example_prompt

PROMPTS = [
    f"Generate recipe for: {dish} using ingredients: {foods}"
    for dish in (
        "Lentil Soup",
        "Crème Brûlée",
        "1½ Hour Bread",
        "Toast\n\nwith butter",
        "a</s>b",
    )
    for foods in ("eggs, flour", "jalapeños", "<unk> {salt}", "  two  spaces")
]
FAMILIES = {
    "t5": ("t5", "encoder-decoder", "tokenizers/t5"),
    "gpt2": ("gpt2", "decoder", "tokenizers/gpt2"),
    "neox": ("neox", "decoder", "tokenizers/gpt_neox"),
    "llama": ("llama", "decoder", "models/stories15m"),
}


def model_folder(
    to: Path, family: str, codec: Codec, form: str = "recipes", *, wide: float = 0.4
) -> Path:
    """The folder of a finished model; with wide random weights it writes every kind of token."""
    more = {} if family == "t5" else {"initializer_range": wide}
    model = build_model(
        family=family, shape=shape_of(family, positions=256, **more), vocab_size=codec.vocab_size,
        pad_id=codec.pad_id, eos_id=codec.eos_id, bos_id=codec.bos_id, seed=4,
    )  # fmt: skip
    if family == "t5":
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(3)
    record = Provenance(form=form, max_new_tokens=40)
    files, portable = model_files(codec, record, encoder=family == "t5")
    assert portable
    card = with_usage(
        "# Soup\n", prompt=PROMPTS[0] if form == "recipes" else example_prompt(record),
        encoder=family == "t5", max_new_tokens=40, portable=True,
    )  # fmt: skip
    save_model(model.eval(), None, to / family, card=card, files=files, record=record)
    return to / family


def plain(folder: Path, prompts: list[str], *, encoder: bool, most: int) -> list[str]:
    """What plain transformers writes, greedily."""
    if not encoder:
        write = pipeline("text-generation", model=str(folder), device="cpu")
        asked = {"return_full_text": False, "do_sample": False, "max_new_tokens": most}
        return [write(prompt, **asked)[0]["generated_text"] for prompt in prompts]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    written = []
    for prompt in prompts:
        ids = model.generate(
            **tokenizer(prompt, return_tensors="pt"),
            do_sample=False,
            max_new_tokens=most,
        )
        written.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    return written
