"""Commands about data, settings and folders; what is heavy is imported inside a command."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from toque.cli.console import ConsoleReporter, print_page
from toque.errors import ConfigError, argument, in_shell
from toque.user_paths import named_path

if TYPE_CHECKING:
    from toque.config import Resolved

Overrides = Annotated[str, Parameter(help="Settings to change, as section.field=value.")]


def load(
    config: str,
    overrides: Iterable[str],
    *,
    trust_code: bool | None = None,
    hardware: str | None = None,
) -> Resolved:
    """The configuration that a command line names; the rest is `load_config`'s."""
    from toque.config import load_config

    return load_config(config, list(overrides), trust_code=trust_code, hardware=hardware)


def is_first() -> bool:
    """True for the one of its siblings that prints."""
    return os.environ.get("RANK", "0") == "0"


def loading(prints: ConsoleReporter | None = None) -> AbstractContextManager[object]:
    """Progress shown while torch is imported, which takes seconds."""
    prints = prints or ConsoleReporter()
    return prints.working("loading torch") if is_first() else nullcontext()


def prepare(config: str, /, *overrides: Overrides, replace: bool = False) -> None:
    """Turn raw data into a token store, once, and print the data report.

    A killed prepare continues where it stopped; an unchanged one reuses its store.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        replace: delete a store made from other data or settings instead of refusing.
    """
    # A process of one thread forks its workers; numpy would start one for each core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings = load(config, overrides).config
    from toque.reports.store_page import store_page
    from toque.workflows.prepare import describe_result, prepare_store, refuse_untrainable

    result = prepare_store(settings, replace=replace, reporter=ConsoleReporter())
    print_page(store_page(result.store.path, result.report))
    made = describe_result(result, settings.data.engine)
    print(f"{made} `toque report {in_shell(result.store.path)}` makes a page of this.", flush=True)
    if not result.reused:
        refuse_untrainable(settings, result.store)  # after the report, which says why


def show(config: str, /, *overrides: Overrides, hardware: str | None = None) -> None:
    """Print the resolved configuration with the origin of every value.

    Args:
        config: YAML file, preset or run folder.
        overrides: settings to change, as section.field=value.
        hardware: a card such as rtx-4090; what CONFIG says of it comes on top.
    """
    from toque.config import resolved_yaml

    own = named_path(config) / "config.yaml"
    resolved = load(str(own) if own.exists() else config, overrides, hardware=hardware)
    print(resolved_yaml(resolved).rstrip("\n"))


def show_batch(config: str, /, *overrides: Overrides, step: int = 1, most: int = 4) -> None:
    """Print the texts of one update as the model reads them, unpacked and augmented.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        step: which update, counted from 1.
        most: examples to show.
    """
    settings = load(config, overrides).config
    from toque.workflows.prepared_store import refuse_unprepared

    refuse_unprepared(settings)
    with loading():
        from toque.workflows.diagnosis.show_batch import show_batch as workflow

    with ConsoleReporter().working("reading the store"):
        shown = workflow(settings, step=step, most=most)
    print(shown)
    if shown.left:
        print(f"\n{shown.left:,} more; --most shows more of them.")


def schema() -> None:
    """Print the JSON schema of a configuration, by which editors complete and check one.

    `toque schema > toque-schema.json` writes the file that `toque init` names in its first line.
    """
    from toque.config.json_schema import schema_text

    print(schema_text(), end="")


def presets() -> None:
    """List the complete runs that come with Toque."""
    from toque.config import presets as known

    for name, summary in known().items():
        print(f"{name:24}{summary}")


def cookbook(out: str, *, n: int = 20_000, seed: int = 17, replace: bool = False) -> None:
    """Write synthetic recipes from the embedded grammar, as JSON lines.

    Args:
        out: the file to write, .jsonl or .jsonl.gz.
        n: how many.
        seed: recipe i depends on the seed and i alone.
        replace: overwrite a file that is there.
    """
    from toque.cooking.cookbook.recipes import write_cookbook

    file = named_path(out)
    if os.path.lexists(file) and not replace:
        raise ConfigError(
            f"{file} is there already and may hold what is yours. Name another file with "
            f"{argument('out')}, or overwrite it with {argument('replace=True')}."
        )
    write_cookbook(file, n=n, seed=seed)
    print(f"{n:,} synthetic recipes in {file}")


def report(path: str, /, *, out: str | None = None) -> None:
    """Write one offline HTML page about a store or a run, finished or not.

    Args:
        path: a store folder, or a run folder.
        out: the file to write; report.html in the folder when left out.
    """
    from toque.workflows.report import report as workflow

    with ConsoleReporter().working(f"making a page of {path}"):
        page = workflow(path, out=out)
    print(page)


def verify(path: str, /) -> None:
    """Check a store, a checkpoint or a run against its hashes.

    Args:
        path: the folder.
    """
    from toque.workflows.report import verify as workflow

    with ConsoleReporter().working(f"hashing every file of {path}"):
        found = workflow(path)
    print(found)


def init(
    *sources: Annotated[str, Parameter(help="a file, a folder or a pattern, or several.")],
    to: str = "my.yaml",
    size: Literal["300k", "1m", "3m", "6m", "14m", "30m"] | None = None,
    start_from: str = "scratch",
    for_: str = "1 hour",
    tokenizer: str = "auto",
    encoding: str = "utf-8",
    columns: list[str] | None = None,
    replace: bool = False,
) -> None:
    """Look at your files and write a commented configuration for them, ready to train.

    Args:
        sources: a file, a folder or a pattern, or several.
        to: the file to write. Run and store are named after it.
        size: parameters of a new model with a vocabulary of 2,048 tokens; when left out, the best
            for the text, this machine's speed, which is measured, and the time.
        start_from: a model to continue from, a folder or a hub name, instead of a new one.
        for_: time of the whole run, preparing and scoring included, e.g. "10 minutes"; tonight is 8
            hours.
        tokenizer: a folder or a hub name; learnt from the data, or the model's own, when left out.
        encoding: of files that are text; cp1252 or latin-1 for an old export.
        columns: PART=FIELD, e.g. prompt=question, or a template over fields, "prompt=Q: {question}
            {hint}"; once for each part: prompt, target, text, messages, system, title, ingredients,
            steps. A line break is a backslash and an n.
        replace: overwrite the file if it is there.
    """
    fields = dict[str, str | list[str]]()
    for each in columns or []:
        part, mark, field = each.partition("=")
        if not mark or part in fields:
            raise ConfigError(
                f"--columns {each!r} is no PART=FIELD, or the part is named twice. Write each part "
                "once, e.g. --columns prompt=question --columns target=answer."
            )
        fields[part] = field.replace(r"\n", "\n")
    from toque.workflows.first_config.init import init as workflow

    made = workflow(
        sources,
        to=to,
        size=size,
        start_from=start_from,
        for_=for_,
        tokenizer=tokenizer,
        encoding=encoding,
        columns=fields or None,
        replace=replace,
        reporter=ConsoleReporter(),
    )
    print(made)
