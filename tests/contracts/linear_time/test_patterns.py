"""Every regular expression takes linear time, whatever text it is given (fault 55).

The texts are made from the patterns themselves, so a new pattern is tried without a line here.
"""

import ast
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import toque
from fixtures.hostile_texts import HUGE, LARGEST, hostile_texts, superlinear

SRC = Path(toque.__file__).parent


def modules() -> list[str]:
    found = pkgutil.walk_packages([str(SRC)], "toque.")
    return sorted(m.name for m in found if not m.name.endswith("__main__"))


def patterns() -> dict[str, tuple[re.Pattern[Any], frozenset[str]]]:
    """Every compiled pattern that a module holds, by where it is, and how it is used there."""
    found: dict[str, tuple[re.Pattern[Any], frozenset[str]]] = {}
    for name in modules():
        for attribute, value in vars(importlib.import_module(name)).items():
            for pattern in _inside(value):
                where = f"{name}.{attribute} {pattern.pattern[:30]!r}"
                found[where] = (pattern, ways_of(name, attribute))
    return found


def _inside(value: object, depth: int = 0) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif depth < 5 and isinstance(value, Mapping):
        for item in value.values():
            yield from _inside(item, depth + 1)
    elif depth < 5 and isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from _inside(item, depth + 1)


def ways_of(module: str, attribute: str) -> frozenset[str]:
    """The methods that a module uses of a pattern it names; all of them when it does not say."""
    tree = ast.parse((SRC.parent / (module.replace(".", "/") + ".py")).read_text())
    used = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == attribute
    ]
    read = (
        sum(isinstance(n, ast.Name) and n.id == attribute for n in ast.walk(tree)) - 1
    )
    told = used and len(used) == read and "pattern" not in used
    return frozenset(used) if told else WAYS


WAYS = frozenset({"match", "fullmatch", "finditer"})


def work_of(pattern: re.Pattern[Any], ways: frozenset[str]) -> Callable[[str], object]:
    """The ways a pattern is used, one after the other."""

    def work(text: str) -> object:
        given: Any = (
            text.encode("utf-8", "replace")
            if isinstance(pattern.pattern, bytes)
            else text
        )
        found: list[object] = [
            getattr(pattern, way)(given) for way in ways & {"match", "fullmatch"}
        ]
        if "search" in ways:
            found.append(pattern.search(given))
        if ways - {"match", "fullmatch", "search"}:
            found.append(sum(1 for _ in pattern.finditer(given)))
        return found

    return work


PATTERNS = patterns()


@pytest.mark.parametrize("name", PATTERNS)
def test_fault_55_every_pattern_takes_linear_time(name: str) -> None:
    assert not slow_growth(*PATTERNS[name], most=130, largest=LARGEST)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_fault_55_every_pattern_takes_linear_time_up_to_a_megabyte(name: str) -> None:
    assert not slow_growth(*PATTERNS[name], most=12, largest=HUGE)


def slow_growth(
    pattern: re.Pattern[Any], ways: frozenset[str], *, most: int, largest: int
) -> str:
    """The first hostile text whose time grows too fast, in words; "" when there is none."""
    work = work_of(pattern, ways)
    texts = hostile_texts(pattern, most=most)
    return next(
        (g for text_of in texts if (g := superlinear(work, text_of, largest=largest))),
        "",
    )


@pytest.mark.slow
def test_the_texts_find_what_is_not_linear() -> None:
    """The texts are hostile: known bad patterns are found by them.

    An exponential pattern, such as "(a+)+b", would not be found but hang, and the limit on every
    test's time says where.
    """
    bad = (
        r"[ \t]+$", r"(\d+(?:\.\d+)?)\s*h", r"[.!?][.!?]*\s+", r"<\s*/?\s*(?:br|p)\b[^<>]*>",
        r"for (?:[^\W\d_]+[ '&-]*){1,4}!",
        r"(?<![*_])(\*\*|__)(?=[^\s*_])(.+?)(?<=[^\s*_])\1(?![*_])",
        r"<meta\b[^>]*\bcharset\s*=",
    )  # fmt: skip
    missed = [
        b
        for b in bad
        if not slow_growth(re.compile(b), WAYS, most=130, largest=LARGEST)
    ]
    assert missed == []


@pytest.mark.parametrize(
    ("seconds", "is_linear"),
    [
        (lambda n: 9e-6 * n, True),  # seconds for a megabyte, but in proportion
        (
            lambda n: (4e-6 if n > 100_000 else 3e-7) * n,
            True,
        ),  # from there on read another way
        (lambda n: 4e-12 * n**2, False),
        (lambda n: 2e-7 * n**1.5, False),
        (
            lambda n: 60.0 if n > 100_000 else 1e-7 * n,
            False,
        ),  # from nothing to a minute
    ],
)
def test_growth_is_told_from_slowness_up_to_a_megabyte(
    seconds: Callable[[int], float], is_linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fixtures.hostile_texts._seconds", lambda _, text: seconds(len(text))
    )
    found = superlinear(len, lambda size: "a" * size, largest=HUGE, noise_seconds=0.02)
    assert (found == "") is is_linear


BUILT_AT_RUN_TIME = {
    "toque.cooking.recipe_form": "an ingredient line that this very pattern has just let through",
    "toque.data.tokenizer.char_fallbacks": "one character, or one of a vocabulary's special tokens",
}
"""Modules that compile a pattern while running, and what is in it."""


def test_patterns_are_compiled_where_they_can_be_found() -> None:
    wrong = []
    for file in sorted(SRC.rglob("*.py")):
        module = ".".join(file.relative_to(SRC.parent).with_suffix("").parts)
        tree = ast.parse(file.read_text())
        at_import = _called_at_import(tree)
        in_functions = {
            call
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            and getattr(function, "name", "") not in at_import
            for call in ast.walk(function)
        }
        wrong += [
            f"{module}:{node.lineno} {ast.unparse(node)[:60]}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "re"
            and (node.func.attr not in ("compile", "escape") or node in in_functions)
            and node.func.attr != "escape"
            and module not in BUILT_AT_RUN_TIME
        ]
    assert wrong == [], "give the pattern a name on the module's own level"


def _called_at_import(tree: ast.Module) -> set[str]:
    """Functions that a module calls while it is imported: what they compile is in a name."""
    assigned = (s for s in tree.body if isinstance(s, ast.Assign | ast.AnnAssign))
    calls = (
        node for s in assigned for node in ast.walk(s) if isinstance(node, ast.Call)
    )
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}
