"""A reader for the tests of prepare: one JSON object a line, importable by workers.

{"id": 3, "prompt": "...", "target": "...", "quality": 0.5, "extra": "a second task's target"}
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import xxhash

from toque.sources.records import Block, BlockExamples, Example

LINES_PER_BLOCK = 4


@dataclass(frozen=True)
class LineReader:
    version: int = 1
    recorded_name: ClassVar[str] = "line_reader:line_reader"

    def schema(self, path: Path) -> str:
        return "lines"

    def blocks(self, path: Path) -> Iterator[Block]:
        lines = path.read_bytes().splitlines(keepends=True)
        for at in range(0, len(lines), LINES_PER_BLOCK):
            yield Block(
                0, str(path), at + 1, b"".join(lines[at : at + LINES_PER_BLOCK])
            )

    def examples(self, block: Block) -> BlockExamples:
        examples: list[Example] = []
        per_record: list[int] = []
        dropped: dict[str, list[int]] = {}
        lines = block.payload.splitlines()
        for number, line in enumerate(lines, block.first_line):
            try:
                record = json.loads(line)
            except ValueError:
                dropped.setdefault("not JSON", []).append(number)
                continue
            body = xxhash.xxh3_64_intdigest(record["target"].encode())
            title = xxhash.xxh3_64_intdigest(record["prompt"].encode())
            targets = [record["target"]] + (
                [record["extra"]] if "extra" in record else []
            )
            per_record.append(len(targets))
            examples += [
                Example(
                    prompt=record["prompt"],
                    target=target,
                    key=body,
                    title_key=title,
                    record_key=body,
                    task=task,
                    columns={
                        "quality": record.get("quality", 1.0),
                        "id": record.get("id", -1),
                    },
                )
                for task, target in enumerate(targets)
            ]
        n_kept = len(lines) - sum(map(len, dropped.values()))
        return BlockExamples(
            examples, len(lines), n_kept, dropped, per_record=per_record
        )


@dataclass(frozen=True)
class ForgetfulReader(LineReader):
    """Says it read more than it accounts for."""

    def examples(self, block: Block) -> BlockExamples:
        given = super().examples(block)
        return replace(given, read=given.read + 1)


@dataclass(frozen=True)
class ReaderOfTasks(LineReader):
    """Can only be read with once `prepare` has told it the tasks."""

    tasks: tuple[str, ...] = ()

    def for_tasks(self, tasks: tuple[str, ...]) -> Self:
        return replace(self, tasks=tasks)

    def examples(self, block: Block) -> BlockExamples:
        assert self.tasks == ("write",)
        return super().examples(block)
