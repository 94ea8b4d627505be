"""`toque generate`: prompts in, texts out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from toque.cooking.prompts import ASKS_FOR, write_prompt
from toque.cooking.scoring.recipe_scores import text_metrics
from toque.data.prepare.example_rows import prompt_ids
from toque.errors import ConfigError, DataError
from toque.models.generation.engine import generate
from toque.models.lora.files import load_adapter
from toque.workflows.open_model import OpenedModel, open_model
from toque.workflows.prompt_files import lines_of

DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class SamplingParams:
    """How texts are written.

    Raises:
        ConfigError: a number out of range.
    """

    n: int = 1
    """Texts for each prompt."""
    max_new_tokens: int | None = None
    """None for what the model was trained on."""
    temperature: float = 0.7
    """0 takes the likeliest token every time."""
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"--n is {self.n}, --temperature {self.temperature:g} and --top-p {self.top_p:g}. "
                "Allowed: --n from 1, --temperature from 0, --top-p above 0 and up to 1."
            )


@dataclass(frozen=True)
class WrittenText:
    """A text of a model."""

    prompt: str
    """As the model read it."""
    text: str
    tokens: int
    adapter: str | None = None
    """Folder of the adapter it was written with, where several were asked for."""

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """The recipe scores of the text."""
        return text_metrics(self.prompt, self.text)

    def record(self) -> dict[str, Any]:
        """As one object of JSON lines."""
        found: dict[str, Any] = {"prompt": self.prompt, "text": self.text, "tokens": self.tokens}
        found |= {"adapter": self.adapter} if self.adapter is not None else {}
        return found | {"metrics": self.metrics}

    def shown(self) -> str:
        """For people."""
        heading = f"[{self.adapter}] {self.prompt}" if self.adapter is not None else self.prompt
        return f"{heading}\n\n{self.text}\n"


def asked_for(prompts: Sequence[str], file: Path | None, *, raw: bool) -> list[str]:
    """Prompts as a model reads them, those of a file after those of the command line.

    Args:
        prompts: "dish" or "dish: a, b, c".
        file: a prompt a line, or JSON lines with `prompt`, or with `title` and `ingredients`.
        raw: take prompts as they are, not in the form models are trained on.

    Raises:
        ConfigError: there is none.
        DataError: a file that cannot be read.
    """
    asked = [_request(p, raw=raw) for p in prompts]
    asked += _from_file(file, raw=raw) if file is not None else ()
    if not asked:
        raise ConfigError(
            'Nothing to write for. Give --prompt "lentil soup" or --file prompts.txt.'
        )
    return asked


def write_texts(
    path: str, prompts: Sequence[str], manner: SamplingParams, *, adapters: Sequence[Path] = ()
) -> Iterator[WrittenText]:
    """Texts for every prompt, in order; all with one adapter, then with the next.

    Args:
        path: a run, a model folder or a hub name; it is read once.
        prompts: as the model reads them.
        manner: how many, how long, how freely.
        adapters: folders of adapters for the model.
    """
    opened = open_model(path)
    if not adapters:
        yield from _texts(opened, prompts, manner, adapter=None)
    for i, folder in enumerate(adapters):
        load_adapter(opened.model, folder, name=f"adapter_{i}")
        yield from _texts(opened, prompts, manner, adapter=str(folder))


def _texts(
    opened: OpenedModel, prompts: Sequence[str], manner: SamplingParams, *, adapter: str | None
) -> Iterator[WrittenText]:
    codec, encoder = opened.codec, bool(opened.model.config.is_encoder_decoder)
    kind: Literal["decoder", "encoder-decoder"] = "encoder-decoder" if encoder else "decoder"
    each = [text for text in prompts for _ in range(manner.n)]
    written = generate(
        opened.model,
        [prompt_ids(codec, text, kind) for text in each],
        max_new_tokens=manner.max_new_tokens or _usual_length(opened),
        eos_id=codec.eos_id,
        pad_id=codec.pad_id,
        strategy="sample" if manner.temperature > 0 else "greedy",
        temperature=manner.temperature or 1.0,
        top_p=manner.top_p,
        seed=manner.seed,
    )
    for prompt, ids in zip(each, written, strict=True):
        yield WrittenText(prompt, codec.decode(ids), len(ids), adapter)


def _usual_length(opened: OpenedModel) -> int:
    return DEFAULT_NEW_TOKENS if opened.config is None else opened.config.data.max_target_tokens


def _request(prompt: str, *, raw: bool) -> str:
    """The trained form of what a person types: "dish" or "dish: a, b, c".

    >>> _request("lentil soup: lentils, cumin", raw=False)
    'Generate recipe for: lentil soup using ingredients: lentils, cumin'
    """
    if raw or prompt.startswith(ASKS_FOR):
        return prompt
    title, _, listed = prompt.partition(":")
    return write_prompt(title.strip(), [i.strip() for i in listed.split(",") if i.strip()])


def _from_file(file: Path, *, raw: bool) -> Iterator[str]:
    for where, line in lines_of(file):
        if isinstance(line, str):
            yield _request(line, raw=raw)
        elif isinstance(line.get("prompt"), str):
            yield line["prompt"]
        elif isinstance(line.get("title"), str):
            yield write_prompt(line["title"], line.get("ingredients") or [])
        else:
            raise DataError(
                f'{where} has neither "prompt" nor "title". Write {{"prompt": "..."}} or '
                '{"title": "...", "ingredients": ["...", "..."]} on each line.'
            )
