"""Trainability of a prepared store: what `train` would refuse, found as soon as it is prepared."""

from __future__ import annotations

from pathlib import Path

from toque.config import RunConfig
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError


def refuse_untrainable(config: RunConfig, store: TokenStore) -> None:
    """Lay a store out for its model, as `train` will, without allocating the model.

    A model that is not on this machine is not known, and passes.

    Raises:
        ConfigError: the model's shape, its positions, the length of a row or the size of a batch
            do not fit the data, or there is too little of it. The store stays; most of these are
            put right without preparing again.
    """
    start = Path(config.model.start_from).expanduser()
    if config.model.start_from != "scratch" and not (start / "config.json").is_file():
        return
    from toque.data.loader.row_lengths import refuse_empty
    from toque.workflows.build import build_stream  # with torch
    from toque.workflows.forecast import in_outline

    try:
        refuse_empty(store, "validation")
        with in_outline(config, store) as model:
            outline = model
        build_stream(config, store, outline)
    except ConfigError as error:
        raise ConfigError(
            f"{store.path} is prepared, and `toque train` would refuse it: {error}"
        ) from error
