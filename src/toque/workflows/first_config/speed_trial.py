"""Speed trial: training and generation speed of this machine, measured on random texts.

The speed depends only on the length of the texts and on the tokenizer.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec

from toque.errors import ConfigError
from toque.hardware.processor import WORTH_WHILE, ProcessorUse
from toque.reporter import SILENT
from toque.units import Cursor
from toque.workflows.configure import configure
from toque.workflows.first_config.model_sizes import Size, model_settings

if TYPE_CHECKING:
    from toque.workflows.build import Run

P = ParamSpec("P")

WRITTEN_AT_ONCE: Final = 4
"""Maximum number of texts in an evaluation between updates."""
LONG_EXAMPLE: Final = 2048
"""Number of characters above which an example is split."""
_MIN_UPDATES: Final = 2
"""Minimum number of updates in a measurement."""
_MIN_SECONDS: Final = 1.0
"""Minimum seconds of a measurement."""
_MAX_BATCH_TOKENS: Final = 4096
"""Maximum tokens per update of a measurement. A large size would take a minute with more."""
_REMEMBERED_SECONDS: Final = 600.0
"""Time after which a speed is measured again, because other programs may have started."""
_TEXTS: Final = 200
_LONG_PROMPT: Final = 200
"""Maximum length of a prompt for measuring the generation speed, in characters."""
_WORDS: Final = 4000
_LETTERS: Final = "etaoinshrdlu"
_LETTERS_PER_WORD: Final = 6.5
"""Mean number of characters of a random word and the space after it."""


def _remember(measure: Callable[P, float]) -> Callable[P, float]:
    """Return a function that measures a speed again only after `_REMEMBERED_SECONDS`.

    A speed is not remembered if other programs kept the processor busy.
    """
    speeds: dict[str, tuple[float, float]] = {}

    @wraps(measure)
    def remember(*args: P.args, **kwargs: P.kwargs) -> float:
        key = repr((args, kwargs))
        now = time.monotonic()
        if key in speeds and now - speeds[key][0] <= _REMEMBERED_SECONDS:
            return speeds[key][1]
        before = ProcessorUse.now()
        speed = measure(*args, **kwargs)
        if ProcessorUse.now().others_since(before) <= WORTH_WHILE:
            speeds[key] = (now, speed)
        return speed

    return remember


@_remember
def measure_rate(size: Size, characters: float, tokenizer: str) -> float:
    """Measure the training speed of this machine, in tokens per second.

    Args:
        size: Size of the model.
        characters: Characters per text.
        tokenizer: Value of `model.tokenizer`.
    """
    batch = f"{min(size.batch_tokens, _MAX_BATCH_TOKENS)} tokens"
    model = model_settings(size, tokenizer)
    optim = {"name": "muon", "peak_lr": size.peak_lr}
    with _trial_run(model, characters, batch, optim=optim) as run:
        cursor = Cursor()
        rates: list[float] = []
        deadline = time.perf_counter() + _MIN_SECONDS
        while len(rates) < _MIN_UPDATES or time.perf_counter() < deadline:
            step = run.stream.at(cursor)
            start = time.perf_counter()
            float(run.trainer.step(step).loss)  # waits for the device
            rates.append(step.n_tokens / (time.perf_counter() - start))
            cursor = step.cursor
        # The first update allocates the optimizer's state.
        return statistics.median(rates[1:])


@_remember
def measure_writing_rate(
    model: Mapping[str, Any], characters: float, n_texts: int = WRITTEN_AT_ONCE
) -> float:
    """Measure this machine's generation speed, in tokens per second.

    Args:
        model: Settings of the model.
        characters: Characters per text.
        n_texts: Number of texts that are generated together.
    """
    # Torch is loaded only if a rate is measured.
    from toque.workflows.run_length import estimate_texts_seconds

    characters = min(characters, LONG_EXAMPLE)
    texts = _random_texts(characters)[:n_texts]
    evaluation = {"prompts": [text[:_LONG_PROMPT] for text in texts]}
    n_tokens = max(1, round(characters / _LETTERS_PER_WORD))
    with _trial_run(model, characters, "4 examples", evaluation=evaluation) as run:
        sampler = run.evaluator.sampler
        seconds = estimate_texts_seconds(run.evaluator, sampler, n_tokens)
        return n_texts * n_tokens / seconds


@contextmanager
def _trial_run(
    model: Mapping[str, Any],
    characters: float,
    batch: str,
    **sections: Mapping[str, Any],
) -> Iterator[Run]:
    """Build a run over random texts of about `characters` characters, in a temporary folder."""
    # Torch is loaded only if a rate is measured.
    from toque.training.distributed.collectives import Ranks
    from toque.training.stopping import CommandClock
    from toque.workflows.build import build_run
    from toque.workflows.prepare import prepare

    evaluation = {"generate": 0, "texts": 0, "max_examples": 1}
    with _make_scratch_folder() as folder:
        config = configure(
            run_dir=f"{folder}/run",
            model=model,
            data={"store": f"{folder}/store"},
            optim=sections.get("optim", {}),
            # Compiling each size would take longer than the measurement.
            train={"batch": batch, "compile": False},
            evaluation=evaluation | dict(sections.get("evaluation", {})),
        )
        store = prepare(config, data=_random_texts(characters)).store
        yield build_run(
            config,
            store,
            Ranks(),
            watchers=None,
            uploads=None,
            clock=CommandClock(),
            reporter=SILENT,
        )


def _make_scratch_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(
            prefix="toque-init-", ignore_cleanup_errors=True
        )
    except OSError as error:
        raise ConfigError(
            f"The folder for temporary files cannot be used: {error.strerror}. The measurement of "
            "the training speed needs it. Set TMPDIR to a folder with a few megabytes of space."
        ) from error


def _random_texts(characters: float) -> list[str]:
    """Return texts of about `characters` characters. Every call returns the same texts."""
    rng = random.Random(17)  # a fixed seed, so that measurements are comparable
    words = ["".join(rng.choices(_LETTERS, k=rng.randint(2, 9))) for _ in range(_WORDS)]
    n_words = max(2, round(characters / _LETTERS_PER_WORD))
    texts = []
    for _ in range(_TEXTS):
        length = rng.randint(n_words // 2, n_words * 3 // 2)
        texts.append(" ".join(rng.choices(words, k=length)))
    return texts
