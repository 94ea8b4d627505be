"""Cookbook generator: synthetic recipes from a hand-written grammar of dish families.

The `source` of every record marks it as synthetic. The recipes are consistent, varied,
labelled and free of rights. They are the data of `toque demo` and of the tests. A recipe depends
only on its seed and its index.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

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
    """Write a cookbook as JSON lines. Equal arguments write equal bytes.

    Args:
        path: The file to write. It is compressed if its name ends in ".gz".
        n: Number of recipes.
        seed: Seed of the cookbook.
        unseen: Titles to leave out, as prompts for dishes that a model was not trained on.

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
                    record = asdict(dish)
                    record = {
                        "directions" if k == "steps" else k: v
                        for k, v in record.items()
                    }
                    stream.write(msgspec.json.encode(record) + b"\n")
    except OSError as error:
        raise DataError(
            f"The cookbook cannot be written to {path}: {error.strerror or error}. Check the "
            "permissions of the folder and the free space, or choose another file with "
            f"{argument('out')}."
        ) from error


def _compressed(file: BinaryIO, path: Path) -> AbstractContextManager[BinaryIO]:
    """Compress to a file if the name of its path ends in ".gz"."""
    if path.suffix != ".gz":
        return nullcontext(file)
    # Without name and time in the header, so that equal contents have equal bytes.
    return io.BufferedWriter(
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
    )
