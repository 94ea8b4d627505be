"""Generation of texts from prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from toque.cooking.prompts import ASKS_FOR, write_prompt
from toque.data.prepare.example_rows import prompt_ids
from toque.errors import ConfigError, DataError, argument
from toque.models.generation.engine import generate as generate_ids
from toque.models.lora.files import load_adapter
from toque.workflows.open_model import OpenedModel, open_model
from toque.workflows.prompt_files import lines_of
from toque.workflows.results import Written

DEFAULT_NEW_TOKENS = 256
_EXAMPLE: Final = 'prompts="lentil soup"'


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
            n, temperature, top_p = map(argument, ("n", "temperature", "top_p"))
            raise ConfigError(
                f"{n} is {self.n}, {temperature} {self.temperature:g} and {top_p} {self.top_p:g}. "
                f"Allowed: {n} from 1, {temperature} from 0, {top_p} above 0 and up to 1."
            )


def generate(
    run_or_model: str | Path,
    prompts: Sequence[str] = (),
    *,
    file: Path | None = None,
    adapters: Sequence[Path] = (),
    n: int = 1,
    max_new_tokens: int | None = None,
    temperature: float = 0.7,
    top_p: float = 0.95,
    seed: int = 0,
    raw: bool = False,
) -> Iterator[Written]:
    """Write texts for prompts, in order; all with one adapter, then with the next.

    Arguments and errors are those of `toque.api.generate`.
    """
    sampling = SamplingParams(
        n=n, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    asked = asked_for(prompts, file, raw=raw)
    return _written(str(run_or_model), asked, sampling, adapters)


def _written(
    path: str, prompts: Sequence[str], sampling: SamplingParams, adapters: Sequence[Path]
) -> Iterator[Written]:
    opened = open_model(path)
    if not adapters:
        yield from _texts(opened, prompts, sampling, adapter=None)
    for i, folder in enumerate(adapters):
        load_adapter(opened.model, folder, name=f"adapter_{i}")
        yield from _texts(opened, prompts, sampling, adapter=str(folder))


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
            f"Nothing to write for. Give {argument(_EXAMPLE)} or {argument('file=prompts.txt')}."
        )
    return asked


def _texts(
    opened: OpenedModel, prompts: Sequence[str], sampling: SamplingParams, *, adapter: str | None
) -> Iterator[Written]:
    codec, encoder = opened.codec, bool(opened.model.config.is_encoder_decoder)
    kind: Literal["decoder", "encoder-decoder"] = "encoder-decoder" if encoder else "decoder"
    each = [text for text in prompts for _ in range(sampling.n)]
    written = generate_ids(
        opened.model,
        [prompt_ids(codec, text, kind) for text in each],
        max_new_tokens=sampling.max_new_tokens or _usual_length(opened),
        eos_id=codec.eos_id,
        pad_id=codec.pad_id,
        strategy="sample" if sampling.temperature > 0 else "greedy",
        temperature=sampling.temperature or 1.0,
        top_p=sampling.top_p,
        seed=sampling.seed,
    )
    for prompt, ids in zip(each, written, strict=True):
        yield Written(prompt, codec.decode(ids), len(ids), adapter)


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
