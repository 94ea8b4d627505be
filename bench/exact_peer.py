"""Run the shared peers/hf_train.py with a clock that counts every timed batch; used by train.py.

    python bench/exact_peer.py PEERS_FOLDER [flags of hf_train.py]

hf_train.py counts tokens where a batch is put together and sets them to 0 when the first timed
step begins. accelerate puts a batch together one step ahead, so the first timed one is forgotten:
of 24 timed steps one, of two timed steps half the tokens. Here every batch is remembered.
"""

from __future__ import annotations

import sys


class Remembered:
    """A count of a `Clock` that grows batch by batch; reads as the sum of the timed ones."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, clock: object, _owner: type) -> int:
        return sum(vars(clock).setdefault(self.name, [])[vars(clock)["warmup"] :])

    def __set__(self, clock: object, value: int) -> None:
        if value:
            # `+=` has read the sum of the timed ones and adds a batch to it.
            batch = value - self.__get__(clock, type(clock))
            vars(clock)[self.name].append(batch)


def main() -> None:
    """Run it."""
    sys.path.insert(0, sys.argv.pop(1))
    import hf_train

    class Clock(hf_train.Clock):
        useful, computed = Remembered(), Remembered()

    hf_train.Clock = Clock
    hf_train.main()


if __name__ == "__main__":
    main()
