"""`toque generate`: prompts in, texts out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from toque.cli.opening import OpenedModel, open_model
from toque.cooking.scoring import text_metrics
from toque.cooking.templates import ASKS_FOR, write_prompt
from toque.data.rows import prompt_ids
from toque.errors import ConfigError, DataError
from toque.models.adapter_folder import load_adapter
from toque.models.generate import generate

DEFAULT_NEW_TOKENS = 256


def run_generation(
    path: str,
    *,
    prompts: list[str],
    file: Path | None,
    n: int,
    max_new_tokens: int | None,
    temperature: float,
    top_p: float,
    seed: int,
    raw: bool,
    as_json: bool,
    adapters: Sequence[Path] = (),
) -> Iterator[str]:
    """Texts for every prompt, `n` each, in order; as JSON objects when asked.

    Raises:
        ConfigError: no prompt, or a number out of range.
    """
    if n < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError("--n must be at least 1, --temperature at least 0, --top-p in (0, 1].")
    asked = [_request(p, raw=raw) for p in prompts] + (_from_file(file, raw=raw) if file else [])
    if not asked:
        raise ConfigError(
            'Nothing to write for. Give --prompt "lentil soup" or --file prompts.txt.'
        )
    opened = open_model(path)
    texts = partial(
        _texts,
        opened,
        [text for text in asked for _ in range(n)],
        max_new_tokens=max_new_tokens or _usual_length(opened),
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        as_json=as_json,
    )
    return _with_each(opened, adapters, texts) if adapters else texts()


def _with_each(
    opened: OpenedModel, adapters: Sequence[Path], texts: Callable[..., Iterator[str]]
) -> Iterator[str]:
    """All texts with one adapter, then with the next, beside a base that is read once."""
    for i, folder in enumerate(adapters):
        name = f"adapter_{i}"
        load_adapter(opened.model, folder, name=name)
        yield from texts(adapter=str(folder))


def _texts(
    opened: OpenedModel,
    prompts: list[str],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    as_json: bool,
    adapter: str | None = None,
) -> Iterator[str]:
    codec, encoder = opened.codec, bool(opened.model.config.is_encoder_decoder)
    kind: Literal["decoder", "encoder-decoder"] = "encoder-decoder" if encoder else "decoder"
    written = generate(
        opened.model,
        [prompt_ids(codec, text, kind) for text in prompts],
        max_new_tokens=max_new_tokens,
        eos_id=codec.eos_id,
        pad_id=codec.pad_id,
        strategy="sample" if temperature > 0 else "greedy",
        temperature=temperature or 1.0,
        top_p=top_p,
        seed=seed,
    )
    for prompt, ids in zip(prompts, written, strict=True):
        text = codec.decode(ids)
        if as_json:
            record = {"prompt": prompt, "text": text, "tokens": len(ids)}
            record |= {"adapter": adapter} if adapter is not None else {}
            yield json.dumps(record | {"metrics": text_metrics(prompt, text)}, ensure_ascii=False)
        else:
            heading = f"[{adapter}] {prompt}" if adapter is not None else prompt
            yield f"{heading}\n\n{text}\n"


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


def _from_file(file: Path, *, raw: bool) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--file {file} cannot be read as UTF-8 text: {error}.") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append(_request(line.strip(), raw=raw))
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}:{number} looks like JSON and is not: {error}.") from error
        if isinstance(record.get("prompt"), str):
            prompts.append(record["prompt"])
        elif isinstance(record.get("title"), str):
            prompts.append(write_prompt(record["title"], record.get("ingredients") or []))
        else:
            raise DataError(
                f'{file}:{number} has neither "prompt" nor "title". Write {{"prompt": "..."}} or '
                '{"title": "...", "ingredients": ["...", "..."]} on each line.'
            )
    return prompts
