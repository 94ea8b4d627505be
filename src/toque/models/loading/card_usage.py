"""Usage section of a model card: how the model is asked, and a program that does it elsewhere."""

from __future__ import annotations

from typing import Final

from toque.errors import in_shell

Example = str | list[dict[str, str]]  # a prompt, or the messages that begin a conversation
HEADING: Final = "## Use it without Toque"
_DECODER: Final = """from transformers import pipeline

write = pipeline("text-generation", model=".")
prompt = {prompt!r}
written = write(prompt, return_full_text=False, do_sample=False, max_new_tokens={most})
print(written[0]["generated_text"])"""
_ENCODER: Final = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForSeq2SeqLM.from_pretrained(".")
prompt = {prompt!r}
written = model.generate(
    **tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens={most}
)
print(tokenizer.decode(written[0], skip_special_tokens=True))"""


def with_usage(
    card: str, *, prompt: Example | None, encoder: bool, max_new_tokens: int, portable: bool
) -> str:
    """A whole model's card with its usage section; without an example of a prompt it has none."""
    if prompt is None:
        return without_usage(card)
    if not portable:
        return _used(
            card,
            "Plain transformers reads this model's tokenizer otherwise than it was trained with: "
            "write texts with `toque generate`.",
        )
    code = (_ENCODER if encoder else _DECODER).format(prompt=prompt, most=max_new_tokens)
    told = (
        "In this folder, or with its path or hub name in place of the dot; the text is that of "
        "`toque generate` with temperature 0."
    )
    if isinstance(prompt, str):
        told += " The tokenizer adds what begins and ends a prompt."
    if isinstance(prompt, str) and not encoder:
        told += " With `return_full_text=True` a line break that it added is missing from the text."
    return _used(card, told, f"```python\n{code}\n```")


def with_gguf_usage(
    card: str, *, file: str, prompt: Example | None, ends: str, encoder: bool, max_new_tokens: int
) -> str:
    """A GGUF file's card with its usage section; Ollama runs no encoder-decoder."""
    if prompt is None:
        return without_usage(card)
    lines = []
    if isinstance(prompt, str):
        asked = in_shell(prompt + ends.encode("unicode_escape").decode())
        lines = [f"llama-completion -m {file} -e -p {asked} -n {max_new_tokens} --temp 0"]
    told = "In llama.cpp, from this folder:"
    if not encoder:
        lines += [f"llama-server -m {file} --jinja", "ollama create NAME -f Modelfile"]
        told = (
            "In llama.cpp and Ollama, from this folder. The server's chat takes what `toque "
            "generate` takes, by the template in the file; Ollama asks as `Modelfile` says."
        )
    shown = "\n".join(lines)
    return _used(card, told, f"```sh\n{shown}\n```")


def adapter_usage(card: str) -> str:
    """The card of an adapter, which plain transformers cannot use before it is merged."""
    return _used(
        card,
        "`toque export ADAPTER --to FOLDER` merges this adapter into its base, and writes a card "
        "that shows how the result is used in plain transformers.",
    )


def _used(card: str, *paragraphs: str) -> str:
    return "\n\n".join([f"{without_usage(card)}\n{HEADING}", *paragraphs]) + "\n"


def without_usage(card: str) -> str:
    """The card without its usage section, which is its last."""
    return card.partition(f"\n{HEADING}\n")[0].rstrip("\n") + "\n"
