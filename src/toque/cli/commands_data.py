"""Commands about data, settings and folders. Slow imports are inside the commands."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from toque.cli.console import ConsoleReporter, print_page
from toque.cli.launch import is_first_rank
from toque.errors import ConfigError, argument, in_shell
from toque.user_paths import named_path

if TYPE_CHECKING:
    from toque.config import Resolved

Overrides = Annotated[
    str, Parameter(help="settings to change, as section.field=value.")
]


def load(
    config: str,
    overrides: Iterable[str],
    *,
    trust_code: bool = False,
    hardware: str | None = None,
) -> Resolved:
    """Load the configuration of a command. `trust_code` is the flag --trust-code."""
    from toque.config import load_config

    # By default, load_config trusts the user's own file, but not the config.yaml of a run folder,
    # which may come from anyone.
    return load_config(
        config, list(overrides), trust_code=trust_code or None, hardware=hardware
    )


def loading(reporter: ConsoleReporter | None = None) -> AbstractContextManager[object]:
    """Show progress in the block, which imports torch and takes seconds."""
    if not is_first_rank():
        return nullcontext()
    return (reporter or ConsoleReporter()).working("loading torch")


def prepare(config: str, /, *overrides: Overrides, replace: bool = False) -> None:
    """Convert raw data into a token store, and print the data report.

    After a kill, the same command continues. An unchanged store is reused.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        replace: delete a store that was made from other data or settings.
    """
    # Only a process with one thread can fork workers, and numpy would start a thread per core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings = load(config, overrides).config
    from toque.reports.store_page import build_store_page
    from toque.workflows.prepare import (
        describe_result,
        prepare_store,
        refuse_untrainable,
    )

    result = prepare_store(settings, replace=replace, reporter=ConsoleReporter())
    print_page(build_store_page(result.store.path, result.report))
    summary = describe_result(result, settings.data.engine)
    command = f"toque report {in_shell(result.store.path)}"
    print(f"{summary} `{command}` writes this report as a web page.", flush=True)
    if not result.reused:
        # After the report, because it shows the reason.
        refuse_untrainable(settings, result.store)


def show(config: str, /, *overrides: Overrides, hardware: str | None = None) -> None:
    """Print the resolved configuration with the origin of every value.

    Args:
        config: YAML file, preset or run folder.
        overrides: settings to change, as section.field=value.
        hardware: a GPU such as rtx-4090, to apply the settings that CONFIG has for it.
    """
    from toque.config import resolved_yaml

    run_config = named_path(config) / "config.yaml"
    source = str(run_config) if run_config.exists() else config
    resolved = load(source, overrides, hardware=hardware)
    print(resolved_yaml(resolved).rstrip("\n"))


def show_batch(
    config: str, /, *overrides: Overrides, step: int = 1, most: int = 4
) -> None:
    """Print the texts of one update, one example at a time, augmented as the model receives them.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        step: number of the update, from 1.
        most: maximum number of examples.
    """
    settings = load(config, overrides).config
    from toque.workflows.prepared_store import refuse_unprepared

    refuse_unprepared(settings)
    with loading():
        from toque.workflows.diagnosis.show_batch import show_batch as workflow

    with ConsoleReporter().working("reading the store"):
        shown = workflow(settings, step=step, max_examples=most)
    print(shown)
    if shown.left:
        print(f"\n{shown.left:,} more examples. To see more, raise --most.")


def schema() -> None:
    """Print the JSON schema of a configuration, with which editors complete and check settings.

    A configuration from `toque init` refers to this schema as toque-schema.json. To write it, run
    `toque schema > toque-schema.json`.
    """
    from toque.config.json_schema import schema_text

    print(schema_text(), end="")


def presets() -> None:
    """List the configurations that are part of Toque."""
    from toque.config import presets as list_presets

    for name, summary in list_presets().items():
        print(f"{name:24}{summary}")


def cookbook(
    out: str, *, n: int = 20_000, seed: int = 17, replace: bool = False
) -> None:
    """Write synthetic recipes from a grammar, as JSON lines.

    Args:
        out: the file to write, .jsonl or .jsonl.gz.
        n: number of recipes.
        seed: seed of the recipes. Recipe i depends only on the seed and on i.
        replace: overwrite an existing file.
    """
    from toque.cooking.cookbook.recipes import write_cookbook

    file = named_path(out)
    if os.path.lexists(file) and not replace:
        raise ConfigError(
            f"{file} already exists. Choose another file with {argument('out')}, or overwrite it "
            f"with {argument('replace=True')}."
        )
    write_cookbook(file, n=n, seed=seed)
    print(f"{n:,} synthetic recipes in {file}")


def report(path: str, /, *, out: str | None = None) -> None:
    """Write an offline HTML page about a store or a run. The run may be unfinished.

    Args:
        path: store folder or run folder.
        out: the file to write. Default: report.html in the folder.
    """
    from toque.workflows.report import report as workflow

    with ConsoleReporter().working(f"writing a page about {path}"):
        page = workflow(path, out=out)
    print(page)


def verify(path: str, /) -> None:
    """Check a store, a checkpoint or a run against its hashes.

    Args:
        path: the folder.
    """
    from toque.workflows.report import verify as workflow

    with ConsoleReporter().working(f"hashing every file of {path}"):
        result = workflow(path)
    print(result)


def init(
    *sources: Annotated[
        str, Parameter(help="files, folders or patterns such as 'data/*.csv'.")
    ],
    to: str = "my.yaml",
    size: Literal["300k", "1m", "3m", "6m", "14m", "30m"] | None = None,
    start_from: str = "scratch",
    for_: str = "1 hour",
    tokenizer: str = "auto",
    encoding: str = "utf-8",
    columns: list[str] | None = None,
    rewards: list[str] | None = None,
    replace: bool = False,
) -> None:
    """Read your files and write a commented configuration that is ready to train.

    Args:
        sources: files, folders or patterns such as 'data/*.csv'.
        to: the file to write. The run and the store get its name.
        size: parameters of a new model with a vocabulary of 2,048 tokens. Default: the best size
            for the amount of text, the measured speed of this machine, and the time.
        start_from: a model to fine-tune instead of a new one: a folder or a Hugging Face name.
        for_: time for the entire run, including preparation and evaluation, e.g. "10 minutes".
            "tonight" is 8 hours.
        tokenizer: a folder or a Hugging Face name. Default: learn a tokenizer from the data, or use
            the tokenizer of --start-from.
        encoding: encoding of text files, e.g. cp1252 or latin-1 for an old export.
        columns: PART=FIELD, e.g. prompt=question, or a template over fields, e.g. "prompt=Q:
            {question} {hint}". Use it once per part: prompt, target, chosen, rejected, text,
            messages, system, title, ingredients, steps. For a line break, write a backslash and an
            n.
        rewards: a score from which the model of --start-from learns, instead of imitating your
            texts: cookable, or a function of yours as module:function. Use it once per score.
        replace: overwrite an existing file.
    """
    from toque.workflows.first_config.init import init as workflow

    result = workflow(
        sources,
        to=to,
        size=size,
        start_from=start_from,
        for_=for_,
        tokenizer=tokenizer,
        encoding=encoding,
        columns=_parse_columns(columns or []) or None,
        rewards=rewards or (),
        replace=replace,
        reporter=ConsoleReporter(),
    )
    print(result)


def _parse_columns(columns: Iterable[str]) -> dict[str, str | list[str]]:
    """Convert the values of --columns to a template or field by part.

    Raises:
        ConfigError: A value has another form, or two values name the same part.
    """
    fields: dict[str, str | list[str]] = {}
    for column in columns:
        part, equals, field = column.partition("=")
        if not equals or part in fields:
            raise ConfigError(
                f"--columns must name each part once, as PART=FIELD, not {column!r}, e.g. "
                "--columns prompt=question --columns target=answer."
            )
        fields[part] = field.replace(r"\n", "\n")  # a shell passes the two characters
    return fields
