"""Texts that transformers writes without Toque."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline


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
            **tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=most
        )
        written.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    return written
