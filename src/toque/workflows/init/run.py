"""Init: a first configuration, written for the files it is pointed at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toque.config import RunConfig, resolve_values
from toque.config.yaml_reader import read_yaml
from toque.errors import ConfigError, argument, in_shell
from toque.reporter import SILENT, Reporter
from toque.storage.atomic import atomic_write
from toque.training.bottlenecks import few_updates
from toque.units import Duration
from toque.workflows.configure import configure
from toque.workflows.init.survey import Found, survey
from toque.workflows.init.template import SIZES, SMALL_FROM_TOKENS, USUAL_BATCH, batch_for, written


@dataclass(frozen=True)
class Initialised:
    """A configuration that was written."""

    file: Path
    config: RunConfig
    sources: tuple[Found, ...]
    warning: str = ""  # about a run of very few updates

    def __str__(self) -> str:
        """What was found, and what to do next."""
        found = "\n".join(
            line for one in self.sources for line in (f"{one.path}: {one}", *one.remarks)
        )
        found += f"\n{self.warning}" if self.warning else ""
        return f"{found}\nWrote {self.file}. Look it over, then: toque train {in_shell(self.file)}"


def init(
    sources: str | Path | Sequence[str | Path],
    *,
    to: str | Path = "my.yaml",
    size: str | None = None,
    start_from: str | Path = "scratch",
    stop_after: str = "30 minutes",
    tokenizer: str = "auto",
    encoding: str = "utf-8",
    replace: bool = False,
    reporter: Reporter = SILENT,
) -> Initialised:
    """Look at files and write a commented configuration for them, ready to train.

    Args:
        sources: a file, a folder or a pattern, or several; what they hold is recognised.
        to: the file to write; run and store are named after it.
        size: of a model from scratch: tiny, small or medium. None: by the amount of text, tiny or
            small.
        start_from: a model to go on from, a folder or a hub name, instead of random weights.
        stop_after: length of the run, e.g. "30 minutes" or "3 epochs".
        tokenizer: a folder or a hub name; auto: the model's own, or learnt from the data.
        encoding: of the files that are text, e.g. cp1252 for an old export.
        replace: overwrite a file that is there.
        reporter: hears what takes time.

    Returns:
        The file, its configuration, and what each source holds.

    Raises:
        ConfigError: `to` is there already or cannot be written, or a value makes no sense.
        DataError: a source cannot be found or recognised, or holds nothing of use.
    """
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    file, start = Path(to), str(start_from)
    if not given:
        raise ConfigError(
            f"{argument('sources')} is empty, so there is nothing to write a configuration for. "
            "Name a file, a folder or a pattern with recipes or other texts. Without any, `toque "
            "cookbook recipes.jsonl` writes synthetic recipes."
        )
    if size is not None and size not in SIZES:
        raise ConfigError(f"{argument('size')} is {size}. Use {', '.join(SIZES)}, or leave it out.")
    if file.exists() and not replace:
        raise ConfigError(
            f"{file} is there already and may hold your changes. Name another file with "
            f"{argument('to')}, or overwrite it with {argument('replace=True')}."
        )
    Duration.parse(stop_after)
    paths = [{"path": str(path)} for path in given]
    asked = {"tokenizer": tokenizer} if start == "scratch" else {
        "tokenizer": tokenizer, "family": "auto", "start_from": start,
    }  # fmt: skip
    data = {"sources": paths, "encoding": encoding}
    wanted = configure(data=data, model=asked, train={"stop_after": stop_after})
    with reporter.working("looking at the files"):
        found = survey(wanted, reporter.notice)
    tokens = sum(one.tokens for one in found)
    size = size or ("tiny" if tokens < SMALL_FROM_TOKENS else "small")
    usual = SIZES[size].batch if start == "scratch" else USUAL_BATCH
    batch, updates = batch_for(found, wanted.train.stop_after, usual)
    text = written(
        found,
        file=str(file),
        name=file.stem,
        size=size,
        start_from=start,
        stop_after=str(wanted.train.stop_after),
        tokenizer=tokenizer,
        encoding=wanted.data.encoding,
        batch=batch,
    )
    config = resolve_values(read_yaml(text, str(file)).value, str(file)).config
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}. Name another file with {argument('to')}."
        ) from error
    return Initialised(file, config, tuple(found), few_updates(updates))
