"""Survey of the files a new configuration is pointed at: what they hold, and about how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from toque.config import RunConfig
from toque.cooking.schemas import RecipeReader
from toque.data.prepare.data_report import (
    ENCODING_HINT,
    SourceReport,
    is_of_another_encoding,
    reasons_in_words,
    unused_in_words,
)
from toque.errors import DataError, argument
from toque.sources.prompt_target import PairReader
from toque.sources.records import BlockExamples, Source, examples_in
from toque.sources.source_files import SourceFile, blocks_of, find_files, plain_bytes
from toque.sources.token_arrays import TokenReader
from toque.storage.bucket import is_remote
from toque.workflows.prepared_store import sources_of

_LOOK_BYTES: Final = 4 << 20
"""Read of every source: some thousand recipes, in about a second."""
_CHARACTERS_A_TOKEN: Final = 4.0
"""Guess, for English recipes and tokenizers of some thousand entries."""
RECIPES, DOCUMENTS = "recipes", "documents"
PAIRS, TOKENS = "prompts with answers", "texts of token ids"


@dataclass(frozen=True)
class Found:
    """What one source holds."""

    path: str
    kind: str
    """`RECIPES`, `DOCUMENTS`, `PAIRS`, `TOKENS`; "" where nobody has looked."""
    schema: str = ""
    """Its name in the data report, e.g. "json-lines" or "foodcom"."""
    files: int = 1
    records: int = 0
    """That can be used."""
    tokens: int = 0
    """About."""
    whole: bool = True
    """Whether all of it was read; else `records` is scaled up by the bytes."""
    remarks: tuple[str, ...] = ()
    """Sentences on what no example holds, and on bytes that are not of the encoding."""

    def __str__(self) -> str:
        """In a few words."""
        if not self.kind:
            return "in a bucket or on the hub; not looked at"
        files = f" in {self.files:,} files" if self.files > 1 else ""
        about = "" if self.whole else "about "
        kind = (
            self.kind
            if self.records != 1
            else " ".join(word.removesuffix("s") for word in self.kind.split())
        )
        return f"{self.schema}, {about}{self.records:,} {kind}{files}"


def survey(config: RunConfig, say: Callable[[str], None]) -> list[Found]:
    """What each of the configuration's sources holds, by the reader that would prepare it.

    `say` hears of files that are left out.

    Raises:
        DataError: a source cannot be found, recognised or read, or holds nothing of use.
        ConfigError: token files, and no tokenizer is named that wrote them.
    """
    local = [s for s in config.data.sources if not (is_remote(s.path) or s.path.startswith("hf:"))]
    data = config.data.model_copy(update={"sources": tuple(local)})
    here = sources_of(config.model_copy(update={"data": data}), say=say) if local else []
    known = {source.path: _found(source) for source in here}
    return [known.get(source.path, Found(source.path, "")) for source in config.data.sources]


def _found(source: Source) -> Found:
    files = find_files([source])
    sizes = [plain_bytes(file) for file in files]
    kept, tokens, looked, read = 0, 0.0, 0.0, 0
    unused, dropped, notes = Counter[str](), Counter[str](), Counter[str]()
    parts = _parts(files, sizes)
    for examples, n_bytes in parts:
        kept += examples.kept
        read += examples.read
        unused.update(examples.unused)
        dropped.update({reason: len(lines) for reason, lines in examples.dropped.items()})
        notes.update(examples.notes)
        tokens += sum(
            len(e.ids) / 4 if e.ids else (len(e.prompt) + len(e.target)) / _CHARACTERS_A_TOKEN
            for e in examples.examples
        )
        looked += n_bytes
        if looked >= _LOOK_BYTES:
            break
    foreign = is_of_another_encoding(read, dropped, notes)
    if kept == 0:
        todo = "docs/reference/formats.md lists what is read."
        if foreign:
            todo = f"{ENCODING_HINT} Here it is {argument('encoding=cp1252')}."
        raise DataError(
            f"{source.path} holds no usable record in its first {looked:,.0f} bytes: "
            f"{reasons_in_words(dropped, {})}. {todo}"
        )
    named = SourceReport(source.path, "", 0, read, kept, dict(unused))
    whole = next(parts, None) is None
    scale = 1.0 if whole else max(1.0, sum(sizes) / looked)
    return Found(
        source.path,
        _kind_of(source),
        files[0].reader.schema(files[0].path),
        len(files),
        _rounded(kept * scale) if scale > 1 else kept,
        round(tokens * scale),
        whole,
        (*unused_in_words([named]), *([ENCODING_HINT] if foreign else [])),
    )


def _parts(
    files: Sequence[SourceFile], sizes: Sequence[int]
) -> Iterator[tuple[BlockExamples, float]]:
    """The examples of every block, and the bytes of its file that it stands for."""
    for file, size in zip(files, sizes, strict=True):
        left = float(size)
        for block in blocks_of(file):
            n_bytes = min(left, float(len(block.payload)))
            left -= n_bytes
            yield examples_in(block, file.reader), n_bytes


def _kind_of(source: Source) -> str:
    if isinstance(source.reader, RecipeReader):
        return RECIPES
    if isinstance(source.reader, PairReader):
        return PAIRS
    return TOKENS if isinstance(source.reader, TokenReader) else DOCUMENTS


def _rounded(count: float) -> int:
    """To two digits: 67,412 is about 67,000."""
    tens: int = 10 ** max(0, len(str(round(count))) - 2)
    return round(count / tens) * tens
