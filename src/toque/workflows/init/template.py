"""Template of a new configuration: the settings a user would turn, each with a comment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from toque.config.dump import flow
from toque.errors import in_shell
from toque.sources.decompress import UTF_8
from toque.units import Duration
from toque.workflows.init.survey import DOCUMENTS, TOKENS, Found

POSITIONS: Final = 1024
"""Tokens of prompt and target together that a new model can read."""


@dataclass(frozen=True)
class Size:
    """A model from scratch, and how it is trained. The numbers are guesses that train."""

    about: str
    width: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    batch: int
    peak_lr: str

    def shape(self) -> dict[str, Any]:
        """`model.shape` of a Llama."""
        return {
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "intermediate_size": self.inner,
            "max_position_embeddings": POSITIONS,
            "tie_word_embeddings": True,
        }


SIZES: Final[Mapping[str, Size]] = {
    "tiny": Size("1 million parameters, learns on a laptop", 128, 4, 4, 352, 2048, 2048, "3e-3"),
    "small": Size("6 million parameters", 256, 6, 8, 704, 4096, 4096, "1e-3"),
    "medium": Size("30 million parameters, wants a GPU", 512, 8, 8, 1408, 8192, 16384, "6e-4"),
}
SMALL_FROM_TOKENS: Final = 2_000_000
"""From so much text on a tiny model is too small. A guess."""
USUAL_BATCH: Final = 16_384
"""Tokens of an update that goes on from a model."""
_UPDATES, _EPOCHS, _FEWEST_EXAMPLES, _LONG_EXAMPLE = 100, 12, 4, 512
"""Guesses: of a run, at least; of one that no epochs end; of an update; in tokens, when split."""


def batch_for(found: Sequence[Found], stop_after: Duration, usual: int) -> tuple[str, float | None]:
    """`train.batch`, of few examples where texts are few; and the run's updates where known."""
    tokens, records = (sum(getattr(one, name) for one in found) for name in ("tokens", "records"))
    epochs = stop_after.amount if stop_after.unit == "epochs" else None
    wanted = tokens * (epochs or _EPOCHS) / _UPDATES
    if not all(one.tokens for one in found) or wanted >= usual:
        return f"{usual} tokens", None
    each = min(_LONG_EXAMPLE, tokens / records)
    examples = max(_FEWEST_EXAMPLES, round(wanted / each))
    return f"{examples} examples", epochs and tokens * epochs / (examples * each)


def written(
    found: Sequence[Found], *, file: str, name: str, size: str, start_from: str, stop_after: str,
    tokenizer: str, encoding: str, batch: str,
) -> str:  # fmt: skip
    """The text of the file.

    Args:
        found: the sources.
        file: the configuration's own name, for its comments.
        name: of the run and the store.
        size: one of `SIZES`; of a model from scratch.
        start_from: "scratch", a model folder or a hub name.
        stop_after: length of the run.
        tokenizer: as model.tokenizer.
        encoding: as data.encoding.
        batch: as train.batch.
    """
    kinds = {one.kind for one in found}
    parts = [
        _HEAD.format(file=in_shell(file), name=flow(f"runs/{name}")),
        _scratch(SIZES[size], size, tokenizer)
        if start_from == "scratch"
        else _checkpoint(start_from, tokenizer),
        "\ndata:\n  sources:",
        *(f"    - path: {flow(one.path)}  # {one}" for one in found),
        "" if encoding == UTF_8 else f"  encoding: {flow(encoding)}   # as you said",
        _DATA.format(name=flow(f"stores/{name}")),
        "" if kinds & {DOCUMENTS, TOKENS} else _RECIPES,
        _loop("1e-4" if start_from != "scratch" else SIZES[size].peak_lr, stop_after, batch),
        _WRITING if kinds - {DOCUMENTS, TOKENS} else _NO_WRITING,
    ]
    text = "\n".join(part.rstrip("\n") for part in parts if part)
    return "".join(f"{_aligned(line)}\n" for line in text.splitlines())


def _aligned(line: str) -> str:
    """With the comment that ends the line in the column of the others."""
    code, mark, comment = line.rpartition("  # ")
    return f"{code.rstrip():29} {mark.strip()} {comment}" if code.strip() else line


_HEAD = """\
# Written by `toque init`; yours to change. What is not named here has its default:
#   toque show {file}      every setting, and where its value is from
#   toque train {file}     prepares the data, then trains; Ctrl-C saves, the same command goes on
# docs/reference/configuration.md explains every setting.

run_dir: {name}   # checkpoints, figures and the finished model
"""

_DATA = """\
  store: {name}   # the prepared data; runs with the same data settings can share it
  validation_fraction: 0.05   # held out from training, to measure by
  # min_quality: 0.6          # leave out recipes whose quality score is lower
  # dedup: near               # drop nearly equal texts too, not only equal ones
"""

_RECIPES = """\
  # tasks: [write, difficulty, nutrition]   # learn to judge recipes, too
"""

_WRITING = """
evaluation:
  generate: 16                # texts written at the end and scored
  # prompts: ["Lentil soup: red lentils, carrots, cumin"]   # shown at every evaluation
"""

_NO_WRITING = """
evaluation:
  generate: 0                 # plain texts have no prompt to write for
"""


def _scratch(size: Size, name: str, tokenizer: str) -> str:
    own = f"trained:{size.vocabulary}" if tokenizer == "auto" else tokenizer
    origin = "learnt from your data" if own.startswith("trained:") else "as you said"
    shape = ",\n          ".join(
        ", ".join(f"{key}: {flow(value)}" for key, value in some)
        for some in _thirds(list(size.shape().items()))
    )
    return f"""
model:                        # {name}: {size.about}; from random weights
  family: llama               # or t5, gpt2, neox
  shape: {{{shape}}}
  tokenizer: {flow(own)}   # {origin}
  # To go on from a model you have, replace family, shape and tokenizer by:
  # {{family: auto, start_from: FOLDER-OR-HUB-NAME}}
"""


def _checkpoint(start_from: str, tokenizer: str) -> str:
    own = "" if tokenizer == "auto" else f"  tokenizer: {flow(tokenizer)}   # as you said\n"
    return f"""
model:
  family: auto                # read from the checkpoint
  start_from: {flow(start_from)}   # what training begins with
{own}# adapter: {{kind: lora}}       # train a small adapter and leave the model's own weights alone
"""


def _loop(peak_lr: str, stop_after: str, batch: str) -> str:
    return f"""
optim:
  peak_lr: {peak_lr}               # lower it if the loss jumps; raise it if it hardly moves
  schedule: cosine            # warms up for 3 % of the run, then falls to nothing by its end

train:
  stop_after: {flow(stop_after)}    # or 3 epochs; "30 minutes total" counts evaluating, too
  batch: {batch}          # what one update sees
  evaluate_every: 10 %
  save_every: 10 %            # a killed run goes on from here
  # early_stopping: {{patience: 3}}   # end when the held-out loss has stopped falling
"""


def _thirds(items: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    return [items[at : at + 3] for at in range(0, len(items), 3)]
