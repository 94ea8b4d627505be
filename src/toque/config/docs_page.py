"""Configuration page of the documents, rendered from the schema and its docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel

from toque.config.dump import flow
from toque.config.field_types import allowed_words
from toque.config.schema import RunConfig
from toque.config.suggestions import section_of

_HEAD = """\
# Configuration

<!-- Written by `pytest --regenerate` from the docstrings of src/toque/config/schema.py. -->

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


def configuration_page() -> str:
    """The page of all settings as Markdown."""
    return "\n".join([_HEAD, *_section(RunConfig, ""), ""])


def _section(section: type[BaseModel], prefix: str) -> Iterator[str]:
    inner = {name: section_of(field) for name, field in section.model_fields.items()}
    title = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
    yield f"## {title}\n"
    if prefix:
        yield f"{_linked((section.__doc__ or '').strip())}\n"
    yield "| setting | default | allowed | what it does |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        if field.default_factory is not None:
            continue
        default = "required" if field.is_required() else f"`{_default(section, name)}`"
        help_text = _linked(" ".join((field.description or "").split()))
        allowed = allowed_words(field.annotation, field.metadata)
        yield f"| `{prefix}{name}` | {default} | {allowed} | {help_text} |"
    yield ""
    for name, nested in inner.items():
        if nested is not None:
            yield from _section(nested, f"{prefix}{name}.")


def _linked(text: str) -> str:
    """`docs/guides/adapters.md` as a link from docs/reference."""
    return re.sub(r"docs/(\w+/([\w-]+)\.md)", r"[\2](../\1)", text)


def _default(section: type[BaseModel], name: str) -> str:
    values = section.model_construct().model_dump(mode="json", include={name})
    return flow(values[name])
