"""The shape of the tree, as a report: what `make shape` prints. Nothing here fails a build.

Sizes, long files and functions, crowded and tiny folders, names that stand twice, docstrings that
are fragments, files that CONTRIBUTING names and that are gone. People read it; no test does.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "toque"
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_FILES, FEWEST_FILES = 600, 80, 20, 4
SAYS_NOTHING = {"utils", "common", "helpers", "manager", "misc"}
FRAGMENT = re.compile(
    r"(Of|That|Those|By|With|From|For|In|On|At|To|What|Where|How|Which|Whether|When|After|As)\b"
)
"""A docstring that opens with one of these usually lacks its noun."""
FIVE_FILES = (
    "data/loader/batch_stream.py",
    "training/trainer.py",
    "models/forward/loss.py",
    "training/runtime.py",
    "training/update_guard.py",
)
"""The files that explain one update; CONTRIBUTING lists them in this order."""


def python_files(folder: str) -> list[Path]:
    """Every Python file below a folder of the repository, sorted."""
    return sorted((REPOSITORY / folder).rglob("*.py"))


def n_lines(file: Path) -> int:
    """Lines of a file."""
    return file.read_text(encoding="utf-8").count("\n")


def named(file: Path) -> str:
    """A file's path from the repository's root."""
    return file.relative_to(REPOSITORY).as_posix()


def long_functions(file: Path, tree: ast.Module) -> Iterator[str]:
    """Functions over the ceiling; their docstrings do not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            lines = (node.end_lineno or 0) - node.lineno + 1 - docstring
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield f"{named(file)}:{node.lineno}: {node.name} has {lines} lines"


def fragments(file: Path, tree: ast.Module) -> Iterator[str]:
    """Docstrings, and strings below attributes, that begin without their noun."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for at, part in enumerate(body if isinstance(body, list) else []):
            if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)):
                continue
            text = part.value.value
            documents = at == 0 or isinstance(body[at - 1], ast.AnnAssign | ast.Assign)
            if isinstance(text, str) and documents and FRAGMENT.match(text.strip()):
                yield f"{named(file)}:{part.lineno}: {text.strip().splitlines()[0][:80]}"


def missing_from_contributing() -> Iterator[str]:
    """Files that CONTRIBUTING names and that do not exist, and glossary words out of order."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in re.findall(r"`([a-z_0-9]+/[a-z_0-9/]+(?:/|\.py|\.md))`", text):
        if not any((base / path).exists() for base in (PACKAGE, REPOSITORY)):
            yield f"CONTRIBUTING.md names {path}, which does not exist"
    words = re.findall(
        r"(?m)^\| ([^|`]+?) \|", text.partition("## Glossary")[2].partition("\n## ")[0]
    )
    words = [word.lower() for word in words if word not in ("word", "---")]
    yield from (f"glossary: {b} stands after {a}" for a, b in pairwise(words) if b < a)


def sizes() -> Iterator[str]:
    """Lines and files of each part, and of the whole."""
    files = python_files("src")
    lines = {file: n_lines(file) for file in files}
    parts = Counter[str]()
    for file, n in lines.items():
        parts[file.relative_to(PACKAGE).parts[0]] += n
    yield f"src: {sum(lines.values()):,} lines in {len(files)} files"
    tests = python_files("tests")
    yield f"tests: {sum(map(n_lines, tests)):,} lines in {len(tests)} files"
    own = sorted(n for file, n in lines.items() if file.name != "__init__.py")
    ninth = own[len(own) * 9 // 10]
    yield f"a file of src: median {statistics.median(own):.0f} lines, 90th percentile {ninth}"
    yield ", ".join(f"{part} {n:,}" for part, n in parts.most_common())
    yield ", ".join(f"{file} ({n_lines(PACKAGE / file)} lines)" for file in FIVE_FILES)


def findings() -> Iterator[str]:
    """Everything worth a look, a line each."""
    source = python_files("src")
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in source}
    for file in [*source, *python_files("tests"), *python_files("bench"), *python_files("tools")]:
        if (n := n_lines(file)) > MOST_LINES:
            yield f"{named(file)}: {n} lines"
        if SAYS_NOTHING & set(file.stem.split("_")):
            yield f"{named(file)}: a name that says nothing"
    modules = [file for file in source if file.name != "__init__.py"]
    for folder, n in Counter(file.parent for file in modules).items():
        if n > MOST_FILES or n < FEWEST_FILES:
            yield f"{named(folder)}: {n} modules"
    names = Counter(file.stem for file in modules)
    yield from (f"module name {name}: {n} times" for name, n in names.items() if n > 1)
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    yield from (f"public class {name}: {n} times" for name, n in classes.items() if n > 1)
    for file, tree in trees.items():
        yield from long_functions(file, tree)
    yield from missing_from_contributing()
    for file, tree in trees.items():
        yield from fragments(file, tree)


if __name__ == "__main__":
    for line in [*sizes(), "", *findings()]:
        print(line)
