"""YAML reader: plain values with their line numbers.

In contrast to `yaml.safe_load`, `3e-4` is a number, `no`, `on`, `1:30` and `2024-01-01` are text,
and a duplicate key is an error. Values can only be null, booleans, numbers, text, lists and
mappings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from toque.errors import ConfigError

Path = tuple[str | int, ...]
"""Path of a setting: names of sections, indices in lists, and its own name."""
MAX_DEPTH = 50
"""Maximum nesting of lists and mappings. Settings need five levels."""
MAX_NODES = 20_000
"""Maximum number of values. A configuration has about a hundred, but aliases can multiply them."""

_INT = r"[-+]?[0-9][0-9_]*"
_FLOAT = (
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_NOT_PYTHON = re.compile(r"_|\.(?=inf|nan)")
"""Characters of YAML numbers that Python's `float` does not accept."""
_BOOL = r"true|True|TRUE|false|False|FALSE"
_NULL = r"~|null|Null|NULL|"
_SCALARS = {
    name: re.compile(rf"\A(?:{text})\Z")
    for name, text in (
        ("null", _NULL),
        ("bool", _BOOL),
        ("int", _INT),
        ("float", _FLOAT),
    )
}
"""Tag of a plain scalar -> its format. The first match decides."""
_TAG = "tag:yaml.org,2002:"
_READ: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": lambda text: int(text.replace("_", "")),
    "float": lambda text: float(_NOT_PYTHON.sub("", text)),
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "null": lambda _: None,
}
"""Tag of a scalar -> function from its text to its value."""


class _TooDeep(yaml.YAMLError):
    """Nesting beyond `MAX_DEPTH`. PyYAML needs quadratic time for it."""


class _TooMany(yaml.YAMLError):
    """More values than `MAX_NODES`. PyYAML reads only about 10,000 per second."""


class _Loader(yaml.SafeLoader):
    """Safe loader with the scalars of YAML 1.2, for `yaml.compose`."""

    n_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.n_nodes += 1
        if self.n_nodes > 2 * MAX_NODES:  # names of settings are also nodes
            raise _TooMany
        return super().compose_node(parent, index)

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level >= MAX_DEPTH:
            raise _TooDeep
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        if len(self.indents) >= MAX_DEPTH:
            raise _TooDeep
        return bool(super().add_indent(column))


_Loader.yaml_implicit_resolvers = {}

for _name, _form in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, _form, None)


def dotted(path: Path) -> str:
    """Format a path.

    >>> dotted(("data", "sources", 0, "path"))
    'data.sources.0.path'
    """
    return ".".join(map(str, path))


@dataclass
class Document:
    """Values of a YAML text, and their line numbers from 1."""

    name: str
    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)


def read_yaml(text: str, name: str) -> Document:
    """Read one YAML document.

    Args:
        text: Text of the document.
        name: Name of the document in error messages.

    Raises:
        ConfigError: The text is not YAML, or has values of another type.
    """
    document = Document(name)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except _TooDeep as error:
        raise ConfigError(
            f"{name} is nested too deeply. Settings need no more than five levels."
        ) from error
    except _TooMany as error:
        raise ConfigError(
            f"{name} has more than {MAX_NODES:,} values. A typical configuration has about a "
            "hundred."
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(_explain_syntax_error(error, text, name)) from error
    if node is not None:
        document.value = _read_value(node, (), document, ())
    return document


def _read_value(
    node: yaml.Node, path: Path, document: Document, above: tuple[int, ...]
) -> Any:
    """Return a node's value, and store its line. `above` are the ids of the nodes around it."""
    line = node.start_mark.line + 1
    document.lines.setdefault(path, line)
    if id(node) in above or len(document.lines) > MAX_NODES:
        raise ConfigError(
            f"{document.name}:{line}: an alias (*name) contains itself, or aliases expand to more "
            f"than {MAX_NODES:,} values. Replace the aliases with their values."
        )
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        return _read_mapping(node, path, document, above)
    if isinstance(node, yaml.SequenceNode):
        return [
            _read_value(item, (*path, index), document, above)
            for index, item in enumerate(node.value)
        ]
    try:
        return _READ[node.tag.removeprefix(_TAG)](str(node.value))
    except (KeyError, ValueError):
        raise ConfigError(
            f"{document.name}:{line}: `{node.tag} {node.value}` is not a valid value for a "
            "setting. Use text, numbers, true, false, null, lists and mappings."
        ) from None


def _read_mapping(
    node: yaml.MappingNode, path: Path, document: Document, above: tuple[int, ...]
) -> Mapping[str, Any]:
    """Convert a mapping. Its keys must be text, each used once."""
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(
                f"{document.name}:{line}: a setting's name must be text, not a list or a mapping. "
                "Write `name: value`."
            )
        key = str(key_node.value)
        if key in values:
            raise ConfigError(
                f"{document.name}:{line}: `{dotted((*path, key))}` is given twice, first on line "
                f"{document.lines[(*path, key)]}. Remove one of them."
            )
        document.lines[(*path, key)] = line
        values[key] = _read_value(value_node, (*path, key), document, above)
    return values


def _explain_syntax_error(error: yaml.YAMLError, text: str, name: str) -> str:
    """Write the message about a text that is not YAML, with its line."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return (
            f"{name} is not YAML text: {str(error).splitlines()[0]}. "
            "Save the file as plain UTF-8 text."
        )
    problem = str(getattr(error, "problem", ""))
    if problem.startswith("but "):  # the second half of a sentence
        problem = f"{getattr(error, 'context', '')}, {problem}"

    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    location = f"{name}:{mark.line + 1}"
    indent = line[: len(line) - len(line.lstrip())]
    if "\\t" in problem or "\t" in indent:
        return f"{location}: the line is indented with a tab. Use two spaces instead."
    quote = f" in `{line.strip()[:60]}`" if line.strip() else ""
    return (
        f"{location}: this is not YAML: {problem}{quote}. Write `name: value`, indent with spaces, "
        "and quote text with a colon, a quote, # or %."
    )
