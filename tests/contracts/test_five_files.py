"""Five files explain a training step: what `Trainer.step` calls is defined in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PACKAGE = REPOSITORY / "src" / "toque"
FIVE = (
    "training/trainer.py",
    "training/runtime.py",
    "training/guards/update_guard.py",
    "models/forward/loss.py",
    "data/loader/batch_stream.py",
)
FIELDS = {"self.loss_fn": "loss_sum"}
"""Functions that a step holds as a field -> what is assembled into it."""
ELSEWHERE = {
    "DataError": "an exception",
    "Progress": "a record",
    "StepInfo": "a record",
    "self.lr_at": "a function of progress",
    "self.check_reached": "adapters only, once",
    "self.count_seconds": "a limit on the whole command only",
    "self.clock.lap": "a clock",
    "self.clock.taken": "a clock",
    "step_if": "one if: on the device for fused AdamW, else on the host",
    "whole": "the norm of divided gradients, by fsdp",
    "self.noise.add": "optim.gradient_noise only",
    "self.skip_step.limits": "optim.outliers only",
    "self.oom_fallback.run": "calls forward_backward",
    "self.callbacks.on_micro_batch": "observers only",
    "self.phases": "observers only",
    "self._ranks.all_reduce_sum": "several ranks only",
    "self._ranks.computing": "several ranks only",
    "self._ranks.total": "several ranks only",
    "self._sharing.loss": "calls the loss; DDP or FSDP where there are several ranks",
}
"""Calls that leave the five files -> why a reader need not follow them."""

FOREIGN = ("self.model.", "self.optimizer.", "self.scaler.", "self._pending.")
"""Fields that are torch's or Python's."""

Function = ast.FunctionDef


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"), file)


def definitions() -> dict[str, list[tuple[str, ast.stmt]]]:
    """Name -> where in the five files a function or class of that name is defined."""
    found: dict[str, list[tuple[str, ast.stmt]]] = {}
    for file in FIVE:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append((file, node))
    return found


def ours(file: str) -> set[str]:
    """Names in a file that Toque defines: imported from it, or at the top of the file."""
    names = {n.name for n in tree(file).body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in tree(file).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("toque"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def calls(file: str, function: Function) -> Iterator[str]:
    """The calls of a function that are not torch's or Python's, e.g. `self.runtime.backward`."""
    known = ours(file)
    roots = {"self", *known}
    for argument in (*function.args.args, *function.args.kwonlyargs):
        words = re.findall(r"\w+", ast.unparse(argument.annotation) if argument.annotation else "")
        if set(words) & known:
            roots.add(argument.arg)
    for node in ast.walk(function):
        if isinstance(node, ast.Call | ast.Attribute):
            # A method that is handed on, `self.forward_backward`, counts as called.
            dotted = ast.unparse(node.func if isinstance(node, ast.Call) else node)
            named = dotted.count(".") == 1 and dotted.split(".")[1] in definitions()
            method = named or dotted in FIELDS
            called = isinstance(node, ast.Call) or method
            if dotted.split(".")[0] in roots and called and not dotted.startswith(FOREIGN):
                yield dotted


def followed() -> tuple[set[str], set[str]]:
    """Files that a step and what it calls need, and the calls that lead out of them."""
    defined = definitions()
    ((file, step),) = [(f, n) for f, n in defined["step"] if f == FIVE[0]]
    assert isinstance(step, Function)
    used, outside, frontier = {file}, set(), [(file, step, 0)]
    while frontier:
        file, function, depth = frontier.pop()
        for call in calls(file, function):
            name = FIELDS.get(call, call.rsplit(".", 1)[-1])
            if name not in defined:
                outside.add(call)
                continue
            used |= {where for where, _ in defined[name]}
            if depth == 0:
                functions = [(w, n, 1) for w, n in defined[name] if isinstance(n, Function)]
                frontier += functions
    return used, outside


def test_a_step_is_explained_by_five_files():
    used, outside = followed()
    assert outside == ELSEWHERE.keys()
    assert used == set(FIVE)


def test_the_loop_is_short():
    assert len((PACKAGE / FIVE[0]).read_text(encoding="utf-8").splitlines()) <= 300


@pytest.mark.parametrize("file", FIVE)
def test_contributing_names_them_with_their_lines(file):
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    stated = re.search(rf"`{re.escape(file)}` \((\d+) lines\)", text)
    assert stated is not None, f"CONTRIBUTING.md does not name {file} with its lines"
    lines = len((PACKAGE / file).read_text(encoding="utf-8").splitlines())
    assert int(stated.group(1)) == pytest.approx(lines, rel=0.1)
