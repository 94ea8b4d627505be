"""Cookbook generator: synthetic recipes from a hand-written grammar of dish families.

The `source` of every record marks it as synthetic. The recipes are consistent, varied,
labelled and free of copyright. They are the data of `toque demo` and of the tests. A recipe depends
only on its seed and its index.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from toque.cooking.cookbook.kitchen import Draw, dishes
from toque.cooking.recipe import Recipe
from toque.errors import ConfigError, DataError, argument
from toque.storage.atomic import atomic_file


def recipe(seed: int, index: int) -> Recipe:
    """Create recipe `index` (from 0) of a cookbook."""
    draw = Draw(seed, index)
    book = dishes()
    return book[draw.below(len(book))].recipe(draw)


def recipes(n: int, seed: int) -> Iterator[Recipe]:
    """Create the first `n` recipes of a cookbook.

    Raises:
        ConfigError: `n` is negative.
    """
    if n < 0:
        raise ConfigError(f"{argument('n')} must be 0 or more, not {n}.")
    return (recipe(seed, index) for index in range(n))


def write_cookbook(
    path: Path, n: int, seed: int, *, unseen: Collection[str] = ()
) -> None:
    """Write a cookbook as JSON lines. Equal arguments give equal bytes.

    Args:
        path: The file to write. It is compressed if its name ends in ".gz".
        n: Number of recipes.
        seed: Seed of the cookbook.
        unseen: Titles to leave out, so that they can test a model on new dishes.

    Raises:
        ConfigError: `n` is negative.
        DataError: The file cannot be written.
    """
    book = recipes(n, seed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file, _compressed(file, path) as stream:
            for dish in book:
                if dish.title not in unseen:
                    stream.write(msgspec.json.encode(_record_of(dish)) + b"\n")
    except OSError as error:
        raise DataError(
            f"The cookbook cannot be written to {path}: {error.strerror or error}. Check the "
            "permissions of the folder and the free space, or choose another file with "
            f"{argument('out')}."
        ) from error


def _record_of(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe, with the steps under the usual name "directions"."""
    fields = asdict(recipe)
    return {"directions" if name == "steps" else name: fields[name] for name in fields}


def _compressed(file: BinaryIO, path: Path) -> AbstractContextManager[BinaryIO]:
    """Return a stream that compresses to `file` if the path ends in ".gz", otherwise `file`."""
    if path.suffix != ".gz":
        return nullcontext(file)
    # The header has no name and no time, so that equal contents have equal bytes.
    return io.BufferedWriter(
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
    )
