"""Usage section of a model card: programs that use the model without Toque."""

from __future__ import annotations

from typing import Final

from toque.errors import in_shell

# A prompt, or the first messages of a conversation.
Example = str | list[dict[str, str]]
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
    card: str,
    *,
    prompt: Example | None,
    encoder: bool,
    max_new_tokens: int,
    portable: bool,
) -> str:
    """Add a usage section to a model card. Without an example prompt, remove the section."""
    if prompt is None:
        return without_usage(card)
    if not portable:
        return _with_section(
            card,
            "transformers reads this model's tokenizer differently than it was trained. Generate "
            "texts with `toque generate`.",
        )
    code = (_ENCODER if encoder else _DECODER).format(
        prompt=prompt, most=max_new_tokens
    )
    text = (
        "Run it in this folder, or replace the dot by the folder's path or hub name. The text is "
        "the same as from `toque generate` with temperature 0."
    )
    if isinstance(prompt, str):
        text += " The tokenizer adds the tokens that begin and end a prompt."
        if not encoder:
            text += " With `return_full_text=True`, the text lacks a line break that it added."
    return _with_section(card, text, f"```python\n{code}\n```")


def with_gguf_usage(
    card: str,
    *,
    file: str,
    prompt: Example | None,
    ends: str,
    encoder: bool,
    max_new_tokens: int,
) -> str:
    """Add a usage section to a GGUF file's card. Ollama does not run encoder-decoders."""
    if prompt is None:
        return without_usage(card)
    lines = []
    if isinstance(prompt, str):
        shell_prompt = in_shell(prompt + ends.encode("unicode_escape").decode())
        lines = [
            f"llama-completion -m {file} -e -p {shell_prompt} -n {max_new_tokens} --temp 0"
        ]
    text = "In llama.cpp, from this folder:"
    if not encoder:
        lines += [f"llama-server -m {file} --jinja", "ollama create NAME -f Modelfile"]
        text = (
            "In llama.cpp and Ollama, from this folder. The server's chat accepts the same prompts "
            "as `toque generate`, by the template in the file. Ollama uses the template of "
            "`Modelfile`."
        )
    commands = "\n".join(lines)
    return _with_section(card, text, f"```sh\n{commands}\n```")


def adapter_usage(card: str) -> str:
    """Add a usage section to an adapter's card. transformers needs the merged model."""
    return _with_section(
        card,
        "`toque export ADAPTER --to FOLDER` merges this adapter into its base model. The card of "
        "the merged model shows how to use it with transformers.",
    )


def _with_section(card: str, *paragraphs: str) -> str:
    return "\n\n".join([f"{without_usage(card)}\n{HEADING}", *paragraphs]) + "\n"


def without_usage(card: str) -> str:
    """Remove the usage section, which is the last section of a card."""
    return card.partition(f"\n{HEADING}\n")[0].rstrip("\n") + "\n"
