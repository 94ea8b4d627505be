"""Imports of the package: levels, no circles, and what must start without torch."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from fixtures.processes import python

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PACKAGE = REPOSITORY / "src" / "toque"
LEVELS = (
    ("errors", "version"),
    ("units", "batch", "keyed_random", "reporter", "hardware", "user_paths"),
    ("storage", "config"),
    ("sources", "models"),
    ("data", "runs"),
    ("training", "cooking"),
    ("evaluation",),
    ("reports",),
    ("serving",),
    ("workflows",),
    ("studio",),
    ("cli", "api"),
    ("__main__",),
)
"""Parts of `toque`, lowest first. A module imports its own part and parts of lower levels only."""
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}

LIGHT = (
    "toque.errors",
    "toque.api",
    "toque.units",
    "toque.keyed_random",
    "toque.storage",
    "toque.config",
    "toque.cli.app",
    "toque.sources",
    "toque.data.tokenizer",
    "toque.data.store",
    "toque.data.prepare",
    "toque.data.loader.packing",
    "toque.data.loader.epoch_plan",
    "toque.data.loader.curriculum",
    "toque.cooking",
    "toque.runs.curves",
    "toque.runs.history",
    "toque.runs.time_left",
    "toque.reports",
    "toque.serving.watch_app",
)
"""Modules and packages that must not load torch: commands answer at once, workers stay small."""
HEAVY = ("torch", "transformers", "peft")

Graph = Mapping[str, set[str]]


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return found


def imported(tree: ast.Module, known: Mapping[str, object]) -> Iterator[str]:
    """Modules of `known` that a module imports, also in functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known or node.module in known:
                    yield inner if inner in known else str(node.module)


def import_graph(trees: Mapping[str, ast.Module]) -> Graph:
    """Module -> modules it imports. The package itself is left out: it imports names when asked."""
    return {
        name: {other for other in imported(tree, trees) if other not in (name, "toque")}
        for name, tree in trees.items()
        if name != "toque"
    }


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other: a node stays when it is reached from itself."""
    reach = {node: set(others) for node, others in graph.items()}
    for through in graph:
        for node in graph:
            if through in reach[node]:
                reach[node] |= reach[through]
    circular = sorted(node for node in graph if node in reach[node])
    groups = {
        frozenset(n for n in circular if n in reach[node] and node in reach[n])
        for node in circular
    }
    return sorted(sorted(group) for group in groups)


def part(module: str) -> str:
    """`toque.data.store.store_manifest` -> `data`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else ""


def room(module: str) -> str:
    """The subpackage a module is in, or the module itself at the top of its part."""
    names = module.split(".")
    is_package = (PACKAGE.parent / Path(*names)).is_dir()
    return ".".join(names[:3]) if len(names) > 3 or is_package else module


def test_every_module_has_a_level():
    unknown = {part(name) for name in modules()} - LEVEL.keys() - {""}
    assert unknown == set(), "say at which level they are: LEVELS in this file"


def test_imports_point_down():
    wrong = [
        f"{name} imports {other}"
        for name, others in import_graph(modules()).items()
        for other in sorted(others)
        if part(other) != part(name) and LEVEL[part(other)] >= LEVEL[part(name)]
    ]
    assert wrong == []


def test_no_circle_among_modules():
    assert circles(import_graph(modules())) == []


def test_no_circle_among_subpackages():
    """So that each part has levels of its own: its subpackages and top modules in one order."""
    rooms: dict[str, set[str]] = {}
    for name, others in import_graph(modules()).items():
        here = rooms.setdefault(room(name), set())
        here |= {room(other) for other in others} - {room(name)}
    assert (
        circles({node: others & rooms.keys() for node, others in rooms.items()}) == []
    )


def test_the_guards_see_what_they_look_for():
    """A circle of three, and an import inside a function."""
    trees = {
        name: ast.parse(text)
        for name, text in {
            "toque.a": "from toque import b",
            "toque.b": "def f():\n    from toque.c import g",
            "toque.c": "import toque.a",
            "toque.d": "from toque.a import h",
        }.items()
    }
    assert import_graph(trees)["toque.b"] == {"toque.c"}
    assert circles(import_graph(trees)) == [["toque.a", "toque.b", "toque.c"]]


def test_light_modules_do_not_load_torch():
    """One fresh process imports them one by one and says which first brought a heavy library."""
    light = [
        n
        for n in modules()
        if any(n == part or n.startswith(f"{part}.") for part in LIGHT)
    ]
    assert {part for part in LIGHT if part in light} == set(LIGHT)
    code = (
        "import importlib, sys\n"
        f"for name in {light!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [h for h in {HEAVY!r} if h in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} loads {heavy}')\n"
    )
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
