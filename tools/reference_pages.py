"""Reference pages of settings, command line and Python interface, rendered from the code itself.

`pytest --regenerate tests/docs` writes them; the same tests compare them. The words are the
docstrings of the configuration's schema, of `toque.cli.app` and of what `toque.__all__` names.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cyclopts import App
from cyclopts.argument import Argument
from pydantic import BaseModel

from toque import errors
from toque.config.dump import flow
from toque.config.error_messages import allowed_words, mapping_types, section_of
from toque.config.schema import RunConfig

_WRITTEN = "<!-- Written by `pytest --regenerate`; the words are the docstrings of the code. -->"
_CLI_HEAD = f"""\
# Command line

{_WRITTEN}

```text
toque VERB [CONFIG] [section.field=value ...]
```

CONFIG is a YAML file or the name of a preset. Overrides stand after it, with values written as in
YAML; the shell needs quotes around spaces and brackets. [Exit codes](exit-codes.md) lists what each
command returns; `--traceback` after any command adds where an error was raised.
"""
_PYTHON_HEAD = f"""\
# Python

{_WRITTEN}

What `import toque` offers; [the guide](../guides/python.md) shows it in use. Errors are
`toque.errors.ToqueError`, with the exit code of the command in `exit_code`.
"""
_CONFIG_HEAD = f"""\
# Configuration

{_WRITTEN}

A run is one YAML file, or a preset's name, and overrides on the command line:

```console
$ toque train my.yaml optim.peak_lr=1e-4 train.stop_after="2 epochs"
```

An override wins over the file, the file over the defaults below. A file needs only what differs.
`toque show my.yaml` prints every setting with its origin. A name that is not listed here is
refused, with the nearest one that is. Relative paths are relative to the working directory.

A length of a run has a unit: `"200 steps"` (updates), `"3 epochs"`, `"5e6 tokens"`,
`"10000 examples"`, `"30 minutes"` or, where a whole is known, `"10 %"`.
"""
_AGENTS = f"""\
# For coding agents

{_WRITTEN}

Commands, files and errors on one page, for a program that works with Toque. `llms.txt` beside
these pages lists all of them, a line each.

## The usual way

```console
$ toque init my-recipes.jsonl.gz --to cookbook.yaml
$ toque train cookbook.yaml
$ toque report runs/cookbook
$ toque evaluate runs/cookbook
$ toque generate runs/cookbook --prompt "lentil soup: lentils, carrots, cumin"
$ toque export runs/cookbook --to exported
```

`init` looks at data of any [known form](formats.md) and writes a commented configuration. `train`
prepares the data first, and the same command again continues a run that was stopped. Settings stand
after the configuration as `section.name=value`, with values as in YAML; quote what has spaces or
brackets. `toque schema` prints the JSON schema of the configuration, `toque show CONFIG` every
setting with its origin, and [Configuration](configuration.md) has each in words.

No command waits for an answer but `chat`; `serve` and `watch` run until they are stopped. No code
of a model or a data set is run; the user's own is named in settings as `module:function`.

## Commands

| after `toque` | |
|---|---|
%(commands)s

[Command line](cli.md) has every argument. With `--json`, where a command has it, the answer is one
JSON object.

## Files of a run

%(files)s

[The run folder](run-folder.md) has every field of `metrics.jsonl`; [the store](store.md) is the
prepared data.

## Errors

An error is one paragraph: what was found, where, what is allowed, what to do. Do that, and run the
same command again. In Python it is an exception of `toque.errors`, with the code in `exit_code`.

| exit code | exception | meaning |
|---:|---|---|
%(codes)s

## Python

| function of `toque` | |
|---|---|
%(functions)s

[Python](python-api.md) has their arguments.
"""
_CODES = re.compile(r"(?m)^\| (\d+) \| (.+) \|$")
_ITEM = re.compile(r"^ {4}(\*{0,2}\w+): (.*)$")


def configuration_page() -> str:
    """The page of all settings as Markdown."""
    return "\n".join([_CONFIG_HEAD, *_settings(RunConfig, ""), ""])


def _settings(section: type[BaseModel], prefix: str) -> Iterator[str]:
    inner = {name: section_of(field) for name, field in section.model_fields.items()}
    title = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
    yield f"## {title}\n"
    if prefix:
        yield f"{_linked((section.__doc__ or '').strip())}\n"
    yield "| setting | default | allowed | what it does |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        if field.default_factory is not None:
            continue
        default = "required" if field.is_required() else f"`{_default_of(section, name)}`"
        help_text = _linked(" ".join((field.description or "").split()))
        allowed = allowed_words(field.annotation, field.metadata)
        yield f"| `{prefix}{name}` | {default} | {allowed} | {help_text} |"
    yield ""
    for name, nested in inner.items():
        if nested is not None:
            named = mapping_types(section.model_fields[name].annotation)
            yield from _settings(nested, f"{prefix}{name}.{'NAME.' if named else ''}")


def _linked(text: str) -> str:
    """`docs/guides/adapters.md` as a link from docs/reference."""
    return re.sub(r"docs/(\w+/([\w-]+)\.md)", r"[\2](../\1)", text)


def _default_of(section: type[BaseModel], name: str) -> str:
    values = section.model_construct().model_dump(mode="json", include={name})
    return flow(values[name])


def cli_page(app: App) -> str:
    """The page of all commands as Markdown."""
    commands = [name for name in app if not name.startswith("-")]
    rows = [
        f"| [`toque {name}`](#toque-{name}) | {_inline(_summary(app[name]))} |" for name in commands
    ]
    index = ["| command | |", "|---|---|", *rows, ""]
    return "\n".join([_CLI_HEAD, *index, *(_command(app[name], name) for name in commands)])


def agents_page(app: App, names: dict[str, Any], docs: Path) -> str:
    """The page for coding agents: commands, files and errors, each from where it is written."""
    commands = []
    for command in (name for name in app if not name.startswith("-")):
        arguments = app[command].assemble_argument_collection()
        used = " ".join([command, *filter(None, map(_usage, arguments))])
        commands.append(f"| `{_inline(used)}` | {_inline(_summary(app[command]))} |")
    raised: dict[str, list[str]] = {}
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.ToqueError) and name != "ToqueError":
            raised.setdefault(str(kind.exit_code), []).append(f"`{name}`")
    page = (docs / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    codes = [
        f"| {code} | {', '.join(raised.pop(code, []))} | {meaning} |"
        for code, meaning in _CODES.findall(page)
    ]
    if raised:
        raise ValueError(f"docs/reference/exit-codes.md lacks the codes {', '.join(raised)}")
    folder = (docs / "reference" / "run-folder.md").read_text(encoding="utf-8")
    functions = [
        f"| `{name}` | {_inline((inspect.getdoc(thing) or '').splitlines()[0])} |"
        for name, thing in sorted(names.items())
        if inspect.isfunction(thing)
    ]
    return _AGENTS % {
        "commands": "\n".join(commands),
        "files": "```text" + folder.split("```text")[1].split("```")[0] + "```",
        "codes": "\n".join(codes),
        "functions": "\n".join(functions),
    }


def llms_text(site: dict[str, Any], docs: Path) -> str:
    """`llms.txt`: every page of the site's navigation with its first sentence."""
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}"]
    for entry in site["nav"]:
        named = isinstance(entry, dict)
        section, pages = next(iter(entry.items())) if named else ("Start", [entry])
        lines += ["", f"## {section}", ""]
        for place in _files(pages):
            title, said = _opening((docs / place).read_text(encoding="utf-8"))
            lines.append(f"- [{title}]({place}): {said}")
    return "\n".join([*lines, ""])


def _files(entries: list[Any]) -> Iterator[str]:
    """The files that entries of a navigation name, those of its groups included."""
    for entry in entries:
        named = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(named, list):
            yield from _files(named)
        else:
            yield named


def _opening(page: str) -> tuple[str, str]:
    """Title and first sentence of a page, as plain text."""
    plain = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->", "", page)
    blocks = [" ".join(block.split()) for block in re.split(r"\n{2,}", plain) if block.strip()]
    title = next(block for block in blocks if block.startswith("# "))
    said = next((b for b in blocks if not re.match(r"[#|>!*-]|\d+\.", b)), "")
    said = re.sub(r"\[([^]]+)\]\([^)]*\)|[*`]", r"\1", said)
    return title.lstrip("# "), re.split(r"(?<=\.)\s(?=[A-Z])", said)[0].rstrip(":")


def python_page(names: dict[str, Any]) -> str:
    """The page of public functions and classes as Markdown.

    Args:
        names: each public name and the object behind it.
    """
    entries = sorted(names.items(), key=lambda entry: (inspect.isclass(entry[1]), entry[0].lower()))
    return "\n".join([_PYTHON_HEAD, *(_entry(name, thing) for name, thing in entries)])


def _summary(command: App) -> str:
    return inspect.cleandoc(command.help).splitlines()[0]


def _command(command: App, name: str) -> str:
    arguments = list(command.assemble_argument_collection())
    used = " ".join(filter(None, (_usage(argument) for argument in arguments)))
    help_of = dict(_items(_sections(inspect.getdoc(command.default_command) or "").get("Args", "")))
    text = _sections(inspect.cleandoc(command.help))[""]
    lines = [f"## toque {name}", "", text.strip(), ""]
    lines += ["```text", f"toque {name} {used}".rstrip(), "```", ""]
    if arguments:
        lines += ["| argument | default | |", "|---|---|---|"]
        lines += [_row(argument, help_of) for argument in arguments]
        lines.append("")
    return "\n".join(lines)


def _is_flag(argument: Argument) -> bool:
    return argument.hint is bool


def _usage(argument: Argument) -> str:
    name = argument.names[0]
    kind = argument.field_info.kind
    if kind is inspect.Parameter.VAR_POSITIONAL:
        overrides = argument.field_info.name == "overrides"
        return f"[{'section.field=value' if overrides else name} ...]"
    if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return argument.field_info.name.upper()
    if not name.startswith("-"):
        return name if argument.required else f"[{name}]"
    spelt = name if _is_flag(argument) else f"{name} {name.strip('-').upper().replace('-', '_')}"
    return spelt if argument.required else f"[{spelt}]"


def _row(argument: Argument, help_of: dict[str, str]) -> str:
    default = argument.field_info.default
    unsaid = default is inspect.Parameter.empty or default is None or default is False
    shown = "" if unsaid else f"`{default}`"
    shown = "required" if argument.required else shown
    text = help_of[argument.field_info.name]
    return f"| `{argument.names[0]}` | {shown} | {_inline(text)} |"


def _entry(name: str, thing: Any) -> str:
    node = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    sections = _sections(inspect.getdoc(thing) or "")
    lines = [f"## {name}", ""]
    if isinstance(node, ast.FunctionDef):
        lines += ["```text", _signature(name, node), "```", ""]
    lines += [_prose(sections.pop("")), ""]
    for heading, body in sections.items():
        items = list(_items(body))
        if items:
            lines += [f"**{heading}**", "", *(f"* `{key}`: {text}" for key, text in items), ""]
        else:
            lines += [f"**{heading}** {' '.join(body.split())}", ""]
    if isinstance(node, ast.ClassDef) and name != "RunConfig":
        fields = list(_fields(node))
        lines += ["| attribute | type | |", "|---|---|---|", *fields, ""] if fields else []
    if name == "RunConfig":
        lines += ["Its sections and fields are the [configuration](configuration.md).", ""]
    return "\n".join(lines)


def _signature(name: str, node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    parts = list(_parameters(node.args))
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def _parameters(args: ast.arguments) -> Iterator[str]:
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    for at, (arg, default) in enumerate(zip(plain, [*defaults, *args.defaults], strict=True)):
        yield _parameter(arg, default)
        if at + 1 == len(args.posonlyargs):
            yield "/"
    if args.vararg is not None:
        yield f"*{ast.unparse(args.vararg)}"
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(arg, default)
    if args.kwarg is not None:
        yield f"**{ast.unparse(args.kwarg)}"


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(arg) + (f" = {ast.unparse(default)}" if default is not None else "")


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Rows of a dataclass: its fields with the text below each, then its properties."""
    for at, statement in enumerate(node.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            after = node.body[at + 1] if at + 1 < len(node.body) else None
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            yield _field(statement.target.id, statement.annotation, text)
        elif (
            isinstance(statement, ast.FunctionDef)
            and statement.decorator_list
            and not statement.name.startswith("_")
        ):
            text = (ast.get_docstring(statement) or "").splitlines()[0]
            yield _field(statement.name, statement.returns, text)


def _field(name: str, annotation: ast.expr | None, text: str) -> str:
    kind = ast.unparse(annotation) if annotation is not None else ""
    return f"| `{name}` | `{_inline(kind)}` | {_inline(text)} |"


def _sections(text: str) -> dict[str, str]:
    """A Google docstring by heading; the text outside of all under ''."""
    sections, heading = {"": ""}, ""
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Yields|Attributes):", line):
            heading = line.rstrip(":")
            sections[heading] = ""
            continue
        if line and not line.startswith(" "):
            heading = ""
        sections[heading] += line + "\n"
    return sections


def _items(body: str) -> Iterator[tuple[str, str]]:
    """`name: text` entries, continued on deeper lines."""
    name, found = "", [""]
    for line in body.splitlines():
        match = _ITEM.match(line)
        if match:
            if name:
                yield name, " ".join(found).strip()
            name, found = match[1].strip("*"), [match[2]]
        else:
            found.append(line.strip())
    if name:
        yield name, " ".join(found).strip()


def _prose(text: str) -> str:
    """Text of a docstring, its examples as code."""
    blocks = [block for block in re.split(r"\n{2,}", text.strip()) if block]
    shown = [f"```pycon\n{b}\n```" if b.startswith(">>>") else b for b in blocks]
    return "\n\n".join(shown)


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
