"""Calls in a thread that ends, because a thread that computes keeps OpenMP threads until then."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def call_in_ending_thread(work: Callable[[], T]) -> T:
    """Call `work` in a new thread, and return its result after the thread has ended.

    The OpenMP threads of several threads together would be more than the cores, and a step of a
    server would take twice as long (lab/notes.md, 2026-11-22).
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()
