"""Commands about data, settings and folders: prepare, show, report, verify ...

Everything heavy is imported inside a command, so `--help` and a mistyped key answer at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from toque.config import Resolved
    from toque.reporter import Reporter


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


def reporter() -> Reporter:
    """Where a command's workflow prints."""
    from toque.cli.console import ConsoleReporter

    return ConsoleReporter()


def is_first() -> bool:
    """Whether this process is the one of its siblings that speaks."""
    return os.environ.get("RANK", "0") == "0"


def loading() -> AbstractContextManager[object]:
    """For the seconds that importing torch takes."""
    return reporter().working("loading torch") if is_first() else nullcontext()


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
    from toque.cli.console import print_report
    from toque.errors import in_shell
    from toque.workflows.check.trainable import refuse_untrainable
    from toque.workflows.prepare import in_a_line, prepared

    result = prepared(settings, replace=replace, reporter=reporter())
    print_report(result.report)
    made = in_a_line(result, settings.data.engine)
    print(f"{made} `toque report {in_shell(result.store.path)}` makes a page of this.", flush=True)
    if not result.reused:
        refuse_untrainable(settings, result.store)  # after the report, which says why


def show(
    config: str, /, *overrides: Overrides, plot: bool = False, hardware: str | None = None
) -> None:
    """Print the resolved configuration with the origin of every value, and what saves will take.

    Args:
        config: YAML file, preset or run folder.
        overrides: settings to change, as section.field=value.
        plot: draw the learning rate over the run instead, and where a curriculum's stages begin.
        hardware: a card such as rtx-4090; what CONFIG says of it comes on top.
    """
    from toque.workflows.show.settings import show as workflow

    own = Path(config) / "config.yaml"
    resolved = load(str(own) if own.exists() else config, overrides, hardware=hardware)
    with loading():
        shown = workflow(resolved, plot=plot)
    print(shown)


def show_batch(config: str, /, *overrides: Overrides, step: int = 1, most: int = 4) -> None:
    """Print the texts of one update as the model reads them, unpacked and augmented.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        step: which update, counted from 1.
        most: examples to show.
    """
    settings = load(config, overrides).config
    with loading():
        from toque.workflows.show.batch import show_batch as workflow

    with reporter().working("reading the store"):
        shown = workflow(settings, step=step, most=most)
    print(shown)
    if shown.left:
        print(f"\n{shown.left:,} more; --most shows more of them.")


def presets() -> None:
    """List the complete runs that come with Toque."""
    from toque.config import presets as known

    for name, summary in known().items():
        print(f"{name:24}{summary}")


def cookbook(out: Path, *, n: int = 20_000, seed: int = 17, replace: bool = False) -> None:
    """Write synthetic recipes from the embedded grammar, as JSON lines.

    Args:
        out: the file to write, .jsonl or .jsonl.gz.
        n: how many.
        seed: recipe i depends on the seed and i alone.
        replace: overwrite a file that is there.
    """
    from toque.cooking.cookbook.generate import write_cookbook
    from toque.errors import ConfigError, argument

    if os.path.lexists(out) and not replace:
        raise ConfigError(
            f"{out} is there already and may hold what is yours. Name another file with "
            f"{argument('out')}, or overwrite it with {argument('replace=True')}."
        )
    write_cookbook(out, n=n, seed=seed)
    print(f"{n:,} synthetic recipes in {out}")


def report(path: Path, /, *, out: Path | None = None) -> None:
    """Write one offline HTML page about a store or a run, finished or not.

    Args:
        path: a store folder, or a run folder.
        out: the file to write; report.html in the folder when left out.
    """
    from toque.workflows.report import report as workflow

    with reporter().working(f"making a page of {path}"):
        page = workflow(path, out=out)
    print(page)


def verify(path: Path, /) -> None:
    """Check a store, a checkpoint or a run against its hashes.

    Args:
        path: the folder.
    """
    from toque.workflows.verify import verify as workflow

    with reporter().working(f"hashing every file of {path}"):
        found = workflow(path)
    print(found)
