"""Tests on a card that is not there: each calls a function of `cases` in a process that has one.

The process is one for all tests of a session, since the hooks must be loaded before torch, and
not in a process that runs other tests: there a CPU is all there is.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from fake_cuda import hooks

On = Callable[..., Any]


@pytest.fixture(scope="session")
def on_card() -> Iterator[On]:
    """`on_card(function, ...)`: its result, from the process with the fake card."""
    if shutil.which("g++") is None:
        pytest.skip("the hooks of a fake card need g++")
    if torch.version.cuda is not None:
        pytest.skip("this torch has devices of CUDA of its own")
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=hooks.install
    ) as pool:
        yield lambda function, /, *args, **kwargs: pool.submit(
            hooks.run, function, args, kwargs
        ).result()
