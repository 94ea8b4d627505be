"""Held store: a token store that stays what it was while a run trains on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from toque.data.store.store_manifest import read_manifest
from toque.data.store.token_store import TokenStore, check_files
from toque.errors import DataError
from toque.storage.locks import Held, file_lock, is_shared, shared_lock

LOCK: Final = ".lock"
"""Held alone by who writes the store, and together by those who train on it."""


@contextmanager
def held_store(folder: Path) -> Iterator[None]:
    """Keep `prepare` from replacing the store in `folder`; several runs may hold it.

    Where the file system has no locks it can be replaced all the same, which `refuse_replaced`
    finds.

    Raises:
        DataError: it is being written.
    """

    def refuse(holder: str) -> None:
        raise DataError(
            f"The store {folder} is being written by another process (id {holder}). Start again "
            "when it is done."
        )

    with shared_lock(folder / LOCK, refuse):
        yield


@contextmanager
def store_to_write(store: Path) -> Iterator[Held]:
    """Hold the store's lock, so that two commands do not write one store.

    Raises:
        DataError: another process holds it.
    """
    lock = store / LOCK

    def refuse(holder: str) -> None:
        if is_shared(lock):
            raise DataError(
                f"{store} cannot be replaced now: a run trains on it, in another process or in "
                "this one. Wait for it to end, stop it, or choose another data.store."
            )
        raise DataError(
            f"Another process is preparing {store} (id {holder}). Wait for it to end, or choose "
            "another data.store."
        )

    with file_lock(lock, refuse) as held:
        yield held


def check_tokenizer(store: TokenStore) -> None:
    """Compare the files of the store's tokenizer with its manifest.

    Raises:
        DataError: naming a file that is missing or changed.
    """
    words = [entry for entry in store.manifest.files if entry.file.startswith("tokenizer/")]
    check_files(store.path, words, verify=True)


def refuse_replaced(store: TokenStore) -> None:
    """Look whether the folder of an open store still holds it: its manifest and its tokenizer.

    Columns are read by and by, so of a store that was replaced some may be the new one's.

    Raises:
        DataError: it was replaced or removed.
    """
    try:
        found = read_manifest(store.path)
        same = (
            found.fingerprint == store.fingerprint and found.tokenizer == store.manifest.tokenizer
        )
        if same:
            check_tokenizer(store)
            return
        now = f"it holds another one now ({found.fingerprint[:12]})"
    except DataError as error:
        now = str(error).rstrip(".")
    raise DataError(
        f"The store {store.path} was replaced while this run trained on it (it began with "
        f"{store.fingerprint[:12]}): {now}. Nothing was saved since it was last seen whole. Put "
        "the store back, or prepare the same data again, and start the same command: the run goes "
        "on from its newest checkpoint. Or begin a new run: run_dir=runs/another."
    )
