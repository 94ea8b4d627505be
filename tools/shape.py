"""Print the size and density of the code: `make shape`. The report never fails a build.

Size is counted in syntax nodes, not in lines: a line may hold one thought or three. The report also
lists long files and functions, crowded and tiny folders, repeated module names, and files that
CONTRIBUTING names but that do not exist.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "toque"
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_FILES, FEWEST_FILES = 600, 80, 20, 4
SAYS_NOTHING = {"utils", "common", "helpers", "manager", "misc"}
GRAMMAR_NAMES = {
    *(
        "found",
        "own",
        "asked",
        "told",
        "said",
        "whole",
        "kept",
        "held",
        "most",
        "known",
    ),
    *("given", "made", "taken", "here", "there", "wanted"),
}
"""Variables should be named after a thing, not after a piece of grammar."""
WITHOUT_CODE = {
    *(
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
    ),
    tokenize.ENDMARKER,
}
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


def docstring_nodes(tree: ast.Module) -> set[ast.AST]:
    """Statements and constants of all docstrings, also of strings below attributes."""
    nodes = set[ast.AST]()
    for node in ast.walk(tree):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    nodes |= {statement, text}
    return nodes


def is_text_product(node: ast.AST) -> bool:
    """Check for a product of a text, a list or a condition: `"s" * (n > 1)`."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    for side in (node.left, node.right):
        if isinstance(side, ast.Compare | ast.BoolOp | ast.JoinedStr | ast.List):
            return True
        if isinstance(side, ast.Constant) and isinstance(side.value, str):
            return True
    return False


def is_triple_assignment(node: ast.AST) -> bool:
    """Check for three or more values in one assignment: `a, b, c = 1, 2, 3`."""
    match node:
        case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple(elts=values)):
            return len(values) > 2
    return False


def grammar_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names of a function's parameters and variables that are pieces of grammar."""
    parameters = {
        argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]
    }
    stored = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return (parameters | stored) & GRAMMAR_NAMES


def n_code_lines(source: str, docstrings: set[ast.AST]) -> int:
    """Lines with code, without docstrings, comments and blank lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {token.start[0] for token in tokens if token.type not in WITHOUT_CODE}
    for node in docstrings:
        if isinstance(node, ast.Expr):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def density() -> Iterator[str]:
    """Syntax nodes by package, and habits that make code dense."""
    nodes_of, code_lines, counts = Counter[str](), 0, Counter[str]()
    for file in python_files("src"):
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        docstrings = docstring_nodes(tree)
        code_lines += n_code_lines(source, docstrings)
        for node in ast.walk(tree):
            if node in docstrings or isinstance(node, ast.expr_context):
                continue
            nodes_of[file.relative_to(PACKAGE).parts[0]] += 1
            counts["triple assignments"] += is_triple_assignment(node)
            counts["text products"] += is_text_product(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                counts["grammar names of functions"] += len(grammar_names(node))

    n_nodes = nodes_of.total()
    yield f"src: {n_nodes:,} syntax nodes, {n_nodes / code_lines:.2f} per line of code"
    yield ", ".join(f"{n:,} {habit}" for habit, n in counts.items())
    yield ", ".join(f"{part} {n:,}" for part, n in nodes_of.most_common())


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
    """Number and length of files."""
    lengths = sorted(
        n_lines(file) for file in python_files("src") if file.name != "__init__.py"
    )
    median, ninth_decile = statistics.median(lengths), lengths[len(lengths) * 9 // 10]
    yield f"modules: {len(lengths)}, median {median:.0f} lines, 90 % under {ninth_decile}"
    yield f"test files: {len(python_files('tests'))}"
    yield ", ".join(f"{file} ({n_lines(PACKAGE / file)} lines)" for file in FIVE_FILES)


def findings() -> Iterator[str]:
    """Everything worth a look, a line each."""
    source = python_files("src")
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in source}
    for file in [
        *source,
        *python_files("tests"),
        *python_files("bench"),
        *python_files("tools"),
    ]:
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
    yield from (
        f"public class {name}: {n} times" for name, n in classes.items() if n > 1
    )
    for file, tree in trees.items():
        yield from long_functions(file, tree)
    yield from missing_from_contributing()


if __name__ == "__main__":
    for line in [*density(), *sizes(), "", *findings()]:
        print(line)
