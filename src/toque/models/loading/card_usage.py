"""Usage section of a model card: how to use the model without Toque."""

from __future__ import annotations

import json
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

_TRANSFORMERS_JS: Final = """import {{ pipeline }} from "@huggingface/transformers";

const write = await pipeline("{task}", "FOLDER", {{ dtype: "fp32" }});
const texts = await write({prompt}, {options});
console.log(texts[0].generated_text);"""


def with_usage(
    card: str,
    *,
    prompt: Example | None,
    encoder: bool,
    max_new_tokens: int,
    portable: bool,
) -> str:
    """Add a usage section to a model card, or replace the existing section.

    Args:
        card: Text of the card.
        prompt: Example prompt. Without one, the section is removed.
        encoder: True for an encoder-decoder.
        max_new_tokens: Length limit in the example.
        portable: True if transformers tokenizes texts like Toque.
    """
    if prompt is None:
        return without_usage(card)
    if not portable:
        return _with_section(
            card,
            "transformers tokenizes texts differently than this model was trained. Generate texts "
            "with `toque generate`.",
        )
    program = _ENCODER if encoder else _DECODER
    code = program.format(prompt=prompt, most=max_new_tokens)
    text = (
        "Run this program in this folder, or replace the dot with the folder's path or hub name. "
        "The text is the same as from `toque generate` with temperature 0."
    )
    if isinstance(prompt, str):
        text += " The tokenizer adds the tokens that begin and end a prompt."
        if not encoder:
            text += (
                " With `return_full_text=True`, the text lacks a line break that the tokenizer "
                "added."
            )
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
    """Add a usage section to a GGUF file's card, or replace the existing section.

    Args:
        card: Text of the card.
        file: Name of the GGUF file.
        prompt: Example prompt. Without one, the section is removed.
        ends: Text after a prompt.
        encoder: True for an encoder-decoder, which Ollama does not run.
        max_new_tokens: Length limit in the example.
    """
    if prompt is None:
        return without_usage(card)
    commands = []
    if isinstance(prompt, str):
        # llama-completion reads escapes such as \n (its flag -e).
        escaped_ends = ends.encode("unicode_escape").decode()
        shell_prompt = in_shell(prompt + escaped_ends)
        commands.append(
            f"llama-completion -m {file} -e -p {shell_prompt} -n {max_new_tokens} --temp 0"
        )
    text = "In llama.cpp, from this folder:"
    if not encoder:
        commands.append(f"llama-server -m {file} --jinja")
        commands.append("ollama create NAME -f Modelfile")
        text = (
            "In llama.cpp and Ollama, from this folder. The server's chat accepts the same prompts "
            "as `toque generate`, by the template in the file. Ollama uses the template in "
            "`Modelfile`."
        )
    lines = "\n".join(commands)
    return _with_section(card, text, f"```sh\n{lines}\n```")


def with_onnx_usage(
    card: str, *, kind: str, prompt: Example | None, encoder: bool, max_new_tokens: int
) -> str:
    """Add a usage section to the card of ONNX files, or replace the existing section.

    Args:
        card: Text of the card.
        kind: Type of the matrices in the files, of `stored_types.TYPES`.
        prompt: Example prompt. Without one, the section is removed.
        encoder: True for an encoder-decoder.
        max_new_tokens: Length limit in the example.
    """
    if prompt is None:
        return without_usage(card)
    task = "text2text-generation" if encoder else "text-generation"
    options: dict[str, object] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    if not encoder:
        options["return_full_text"] = False
        if isinstance(prompt, str):  # a chat template writes its own tokens
            options["add_special_tokens"] = True
    code = _TRANSFORMERS_JS.format(
        task=task,
        prompt=json.dumps(prompt, ensure_ascii=False),
        options=json.dumps(options),
    )
    text = (
        "With transformers.js. `FOLDER` is the name of this folder in `env.localModelPath`, or its "
        "name on the hub. Other programs with onnxruntime read the files in `onnx/`; their inputs "
        "have the names that transformers.js uses."
    )
    weights = f"The matrices in the files have the type {kind}."
    if kind != "f32":
        weights += (
            " Scores in this card were measured before the weights were rounded to it. In "
            'transformers.js, `dtype: "fp32"` only selects the files without a suffix.'
        )
    return _with_section(card, weights, text, f"```js\n{code}\n```")


def adapter_usage(card: str) -> str:
    """Add a usage section to an adapter's card: transformers needs the merged model."""
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
