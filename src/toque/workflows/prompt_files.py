"""Prompt files: lines of text, or JSON objects, one a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toque.errors import DataError, argument


def lines_of(file: Path) -> Iterator[tuple[str, str | dict[str, Any]]]:
    """Where each line stands, and its text or its JSON object; blank lines are passed over.

    Raises:
        DataError: a file that is no UTF-8 text, or a line that begins as JSON and is not.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{argument(f'file={file}')} cannot be read as UTF-8 text: {error}."
        ) from error
    for number, line in enumerate(lines, start=1):
        where = f"{file}:{number}"
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            yield where, line.strip()
            continue
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} looks like JSON and is not: {error}.") from error
        yield where, record
