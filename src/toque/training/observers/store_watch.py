"""Store watch: nothing is evaluated or saved of a run whose store was replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from toque.data.store.token_store import TokenStore, refuse_replaced
from toque.training.callbacks import Callback
from toque.units import Progress


@final
@dataclass(frozen=True)
class StoreWatch(Callback):
    """Looks before every evaluation and save whether the store is the one the run began with.

    A lock keeps `prepare` away where the file system has locks; this holds elsewhere, too.
    """

    store: TokenStore

    def on_before_evaluate(self, at: Progress) -> None:
        """Look.

        Raises:
            DataError: it was replaced or removed.
        """
        refuse_replaced(self.store)

    def on_before_save(self, at: Progress) -> None:
        """Look.

        Raises:
            DataError: it was replaced or removed.
        """
        refuse_replaced(self.store)
