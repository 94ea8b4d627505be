"""Cookbook generator: synthetic recipes from a hand-written grammar of dish families.

Every record says in its `source` that nobody cooked it. They are the default data and the data of
the tests: correct in form, consistent, varied in wording, labelled, free of anyone's rights. Recipe
`index` of a seed depends on nothing but (seed, index).
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
    """Recipe `index` (from 0) of the cookbook `seed`."""
    draw, book = Draw(seed, index), dishes()
    return book[draw.below(len(book))].recipe(draw)


def recipes(n: int, seed: int) -> Iterator[Recipe]:
    """The first `n` recipes of the cookbook `seed`; raises `ConfigError` if `n` is negative."""
    if n < 0:
        raise ConfigError(f"A cookbook of {n} recipes cannot be made. Ask for 0 or more.")
    return (recipe(seed, index) for index in range(n))


def write_cookbook(path: Path, n: int, seed: int, *, unseen: Collection[str] = ()) -> None:
    """Write `n` recipes as JSON lines, gzipped for ".gz"; equal arguments give equal bytes.

    Titles in `unseen` are left out, so that a model can be asked for a dish it has not read.
    Raises `ConfigError` for a negative `n`, `DataError` if the file cannot be written.
    """
    path, made = Path(path), (one for one in recipes(n, seed) if one.title not in unseen)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file, _packed(file, path) as stream:
            for one in made:
                record = {"directions" if k == "steps" else k: v for k, v in asdict(one).items()}
                stream.write(msgspec.json.encode(record) + b"\n")
    except OSError as error:
        raise DataError(
            f"The cookbook cannot be written to {path}: {error.strerror or error}. Check the "
            f"folder's permissions and the free space, or name another file with {argument('out')}."
        ) from error


def _packed(file: BinaryIO, path: Path) -> AbstractContextManager[BinaryIO]:
    """The file itself, or what compresses into it."""
    if path.suffix != ".gz":
        return nullcontext(file)
    # No name and no time in the gzip header, so that equal content gives equal bytes.
    return io.BufferedWriter(gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0))
