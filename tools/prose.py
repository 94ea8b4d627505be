"""Count expressions that a native engineer would not write, and compare them with the ceilings.

    python tools/prose.py                 # what `make lint` runs
    python tools/prose.py --list docs     # every hit of one area
    python tools/prose.py --lower         # lower the ceilings to the present counts

The tool reads docstrings, comments and messages of src, and all Markdown pages. It ignores code
blocks, quoted code and tables of numbers. The rules are in `prose_rules.toml`. `ceilings.toml` has
the largest number of hits that each area may have. A ceiling is never raised.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).resolve().parent.parent
RULES_FILE = REPOSITORY / "tools" / "prose_rules.toml"
CEILINGS_FILE = REPOSITORY / "tools" / "ceilings.toml"
MAX_SENTENCE_WORDS = 40
SHOWN_HITS = 10
MESSAGE_CALLS = frozenset(
    {
        "notice",
        "say",
        "warn",
        "warning",
        "print",
        "on_warning",
        "write",
        "info",
        "error",
        "debug",
    }
)
TOOL_COMMENTS = ("noqa", "type:", "fmt:", "pragma", "mypy", "ruff", "!", "-*-")

Where = Literal["d", "a", "c", "m", "p"]


@dataclass(frozen=True)
class Rule:
    """An expression to avoid."""

    name: str
    where: str
    pattern: re.Pattern[str]
    instead: str


@dataclass(frozen=True)
class Prose:
    """A docstring, comment, message or paragraph, without the code in it."""

    where: Where
    line: int
    text: str


@dataclass(frozen=True)
class Hit:
    """A place where a rule applies."""

    file: str
    line: int
    rule: str
    excerpt: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: ...{self.excerpt}... ({self.instead})"


def read_rules() -> list[Rule]:
    """Read the rules of `prose_rules.toml`."""
    entries = tomllib.loads(RULES_FILE.read_text(encoding="utf-8"))["rule"]
    return [
        Rule(
            entry["name"],
            entry["where"],
            re.compile(entry["pattern"]),
            entry["instead"],
        )
        for entry in entries
    ]


def without_code(text: str) -> str:
    """Remove doctests, code blocks, addresses and comments, and replace quoted code by X."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    text = re.sub(r"(?m)^\s*(?:>>>|\.\.\.).*(?:\n(?!\s*$|\s*>>>).*)*", " ", text)
    text = re.sub(r"``?[^`]*``?", "X", text)
    text = re.sub(r"https?://\S+|\]\([^)]*\)", " ", text)
    return re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL)


def text_of(node: ast.expr) -> str:
    """Text of a string, an f-string (its values as {}) or a sum of them. Otherwise empty."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            parts = [
                text_of(v) if isinstance(v, ast.Constant) else "{}" for v in values
            ]
            return "".join(parts)
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{text_of(body)} {text_of(orelse)}"
        case _:
            return ""


def docstrings(tree: ast.Module) -> Iterator[Prose]:
    """Docstrings of modules, classes and functions, and strings below attributes."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if not isinstance(node, documented):
            continue
        if docstring := ast.get_docstring(node):
            yield Prose("d", node.body[0].lineno, without_code(docstring))
        for before, after in zip(node.body, node.body[1:], strict=False):
            if not isinstance(before, ast.Assign | ast.AnnAssign):
                continue
            match after:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    yield Prose("a", after.lineno, without_code(text))


def messages(tree: ast.Module) -> Iterator[Prose]:
    """Texts of raised errors and of calls that print or log."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(args=args)):
                texts = [text_of(arg) for arg in args]
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=args):
                is_message = name.lstrip("_") in MESSAGE_CALLS
                texts = [text_of(arg) for arg in args] if is_message else []
            case _:
                continue
        for text in texts:
            if len(text) > 20 and " " in text:
                yield Prose("m", node.lineno, text)


def comments(source: str) -> Iterator[Prose]:
    """Comments, with neighbouring lines joined."""
    block, first_line, last_line = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("# ").rstrip()
        if not text or text.startswith(TOOL_COMMENTS):
            continue

        line = token.start[0]
        is_whole_line = not token.line[: token.start[1]].strip()
        if block and is_whole_line and line == last_line + 1:
            block = f"{block} {text}"
        else:
            if block:
                yield Prose("c", first_line, without_code(block))
            block, first_line = text, line
        last_line = line if is_whole_line else -1
    if block:
        yield Prose("c", first_line, without_code(block))


def paragraphs(page: str) -> Iterator[Prose]:
    """Paragraphs, list items and table rows of a Markdown page, without headings."""
    page = re.sub(
        r"```.*?```", lambda code: "\n" * code[0].count("\n"), page, flags=re.DOTALL
    )
    line = 1
    for part in re.split(r"(\n\s*\n|\n(?=\s*[-*|] )|\n(?=\|))", page):
        text = without_code(part).strip()
        if text and not text.startswith("#"):
            yield Prose("p", line, text)
        line += part.count("\n")


def prose_of(file: Path) -> Iterator[Prose]:
    """All prose of a Python file or a Markdown page."""
    content = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        yield from paragraphs(content)
        return
    tree = ast.parse(content)
    yield from docstrings(tree)
    yield from messages(tree)
    yield from comments(content)


def long_sentences(text: str) -> Iterator[str]:
    """Sentences of more than `MAX_SENTENCE_WORDS` words."""
    for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", text):
        if len(re.findall(r"[A-Za-z][\w'-]*", sentence)) > MAX_SENTENCE_WORDS:
            yield sentence


def hits_in(file: Path, rules: list[Rule]) -> Iterator[Hit]:
    """Every place of a file where a rule applies."""
    name = file.relative_to(REPOSITORY).as_posix()
    for prose in prose_of(file):
        for rule in rules:
            if prose.where not in rule.where:
                continue
            for match in rule.pattern.finditer(prose.text):
                start, end = max(0, match.start() - 30), match.end() + 30
                excerpt = " ".join(prose.text[start:end].split())
                yield Hit(name, prose.line, rule.name, excerpt, rule.instead)
        if prose.where in "dmp" and not prose.text.lstrip().startswith("|"):
            for sentence in long_sentences(prose.text):
                excerpt = " ".join(sentence.split())[:60]
                yield Hit(name, prose.line, "long sentence", excerpt, "split it")


def files_by_area() -> Mapping[str, list[Path]]:
    """Files by area: a package of src, a folder of docs, or a page of the root."""
    areas: dict[str, list[Path]] = defaultdict(list)
    package = REPOSITORY / "src" / "toque"
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).parts
        areas["src/toque" if len(parts) == 1 else f"src/toque/{parts[0]}"].append(file)

    docs = REPOSITORY / "docs"
    for file in sorted(docs.rglob("*.md")):
        parts = file.relative_to(docs).parts
        areas["docs" if len(parts) == 1 else f"docs/{parts[0]}"].append(file)

    for file in sorted(REPOSITORY.glob("*.md")):
        areas[file.name].append(file)
    return areas


def read_ceilings() -> dict[str, int]:
    """Largest allowed number of hits by area."""
    if not CEILINGS_FILE.exists():
        return {}
    ceilings: dict[str, int] = tomllib.loads(CEILINGS_FILE.read_text(encoding="utf-8"))[
        "prose"
    ]
    return ceilings


def write_ceilings(ceilings: Mapping[str, int]) -> None:
    """Write `ceilings.toml`."""
    lines = [f'"{area}" = {ceiling}' for area, ceiling in sorted(ceilings.items())]
    header = "# Largest number of hits of tools/prose.py by area. Only lower them: --lower does it."
    CEILINGS_FILE.write_text(
        "\n".join([header, "[prose]", *lines, ""]), encoding="utf-8"
    )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--list", metavar="AREA", help="print every hit of an area or file"
    )
    parser.add_argument(
        "--lower", action="store_true", help="lower the ceilings to the counts"
    )
    return parser.parse_args()


def main() -> int:
    """Check all areas. The exit code is 1 if one has more hits than its ceiling."""
    arguments = parse_arguments()
    rules = read_rules()
    hits = {
        area: [hit for file in files for hit in hits_in(file, rules)]
        for area, files in files_by_area().items()
    }
    if arguments.list:
        for hit in (hit for area_hits in hits.values() for hit in area_hits):
            if hit.file.startswith(arguments.list):
                print(hit)
        return 0

    ceilings = read_ceilings()
    if arguments.lower:
        counts = {area: len(area_hits) for area, area_hits in hits.items()}
        write_ceilings(
            {area: min(n, ceilings.get(area, n)) for area, n in counts.items()}
        )
        return 0

    is_above = False
    for area, area_hits in hits.items():
        ceiling = ceilings.get(area, 0)
        if len(area_hits) <= ceiling:
            continue
        is_above = True
        print(
            f"{area}: {len(area_hits)} hits, at most {ceiling} are allowed. The first hits:"
        )
        for hit in area_hits[:SHOWN_HITS]:
            print(f"  {hit}")
        print(f"  `python tools/prose.py --list {area}` prints all of them.")
    total = sum(map(len, hits.values()))
    print(f"prose: {total:,} hits, ceilings {sum(ceilings.values()):,}")
    return 1 if is_above else 0


if __name__ == "__main__":
    sys.exit(main())
