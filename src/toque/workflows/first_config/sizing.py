"""Choice of a model's size and batch for a given text, time and machine, and a forecast.

The table of losses and its fit are from short runs on 68,004 recipes (lab/dial.md). The training
speed of this machine is measured.
"""

from __future__ import annotations

import bz2
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from toque.config.schema import TRAINED
from toque.errors import ConfigError, argument
from toque.reporter import clock_text, millions
from toque.units import Duration
from toque.workflows.first_config.model_sizes import (
    MIN_BATCH_TOKENS,
    SIZES,
    Size,
    tokens_per_update,
)
from toque.workflows.first_config.speed_trial import LONG_EXAMPLE, measure_rate

VOCABULARY: Final = 8192
"""Largest vocabulary of a tokenizer that is trained on the texts. A smaller one has a higher loss,
and a larger one makes updates slower (lab/notes.md)."""
_MIN_ENTRIES: Final = 2048
"""Smallest vocabulary of a tokenizer that is trained on the texts."""
_BYTES_PER_ENTRY: Final = 100.0
"""Bytes of text per entry of the vocabulary. 2,048 entries had the lowest loss on 160,000 bytes,
4,096 on 560,000 bytes and 8,192 on 830,000 bytes."""
BYTES_PER_TOKEN: Final[Mapping[int, float]] = {2048: 3.72, 4096: 4.05, VOCABULARY: 4.17}
"""Bytes of recipes per token of a tokenizer trained on them, by its entries."""


class TextTokenizer(NamedTuple):
    """Tokenizer of a new model."""

    setting: str
    """Value of `model.tokenizer`."""
    bytes_per_token: float
    """Mean bytes of the training texts per token."""
    entries: int = 0
    """Size of the vocabulary, or 0 if it is unknown."""

    def adjust_to(self, like: Measured) -> TextTokenizer:
        """Adjust a trained tokenizer's bytes per token from recipes to texts such as `like`."""
        if not self.setting.startswith(TRAINED):
            return self
        factor = like.bytes_per_token / OF_RECIPES.bytes_per_token
        return self._replace(bytes_per_token=self.bytes_per_token * factor)


def trained_tokenizer(entries: int) -> TextTokenizer:
    """Return a tokenizer of `entries` entries that is trained on recipes."""
    log_entries = np.log(list(BYTES_PER_TOKEN))
    bytes_per_token = np.interp(
        math.log(entries), log_entries, list(BYTES_PER_TOKEN.values())
    )
    return TextTokenizer(f"{TRAINED}{entries}", float(bytes_per_token), entries)


def tokenizer_for_text(text: float) -> TextTokenizer:
    """Return a trained tokenizer with a vocabulary that suits `text` bytes, a power of two."""
    entries = min(max(text / _BYTES_PER_ENTRY, _MIN_ENTRIES), VOCABULARY)
    return trained_tokenizer(2 ** math.floor(math.log2(entries)))


class Fit(NamedTuple):
    """Held-out bits per byte by parameters N and bytes of text D: E + A / N^a + B / D^b.

    The formula is equation 10 of Hoffmann et al. 2022. For repeated text, D is the equivalent
    amount of fresh text by equation 5 of Muennighoff et al. 2023.
    """

    floor: float
    of_size: float
    size_exponent: float
    of_text: float
    text_exponent: float
    repeats: float
    """Maximum benefit from repeating a text, as an equivalent number of copies of fresh text."""

    def bits_per_byte(self, parameters: float, fresh: float) -> float:
        """Predict the held-out bits per byte after `fresh` bytes of text without repeats."""
        size = self.of_size / parameters**self.size_exponent
        text = self.of_text / fresh**self.text_exponent
        return float(self.floor + size + text)

    def fresh(self, read: float, text: float) -> float:
        """Convert `read` bytes of a repeated text of `text` bytes to bytes of fresh text."""
        if read <= text:
            return read
        n_repeats = read / text - 1.0
        return text + text * self.repeats * (1.0 - math.exp(-n_repeats / self.repeats))


FIT: Final = Fit(0.25, 22.02, 0.4, 745.2, 0.5, 4.0)
"""Fit of six runs of 0.2 to 2 M parameters over four and eight million tokens, each within 2 %
(`fit_runs.py`, lab/dial.md). The floor of 0.25 is a guess, because six runs cannot determine it.
With repeats of 4, predictions for eight runs of 5 to 12 passes are 8 % too low to 17 % too high."""
_EARLY_END_RATIO: Final = 1.25
"""Ratio of possible to useful passes above which a run ends early. The speed estimate has an error
of up to 25 %."""
SAMPLE_BYTES: Final = 300_000
"""Size of the sample that is compared with the measured texts, in bytes."""


class Measured(NamedTuple):
    """Losses of short runs over one kind of text, and the compression of such texts."""

    bits: Mapping[str, Mapping[float, float]]
    """Held-out bits per byte, by size and by number of training tokens."""
    bytes_per_token: float
    """Bytes per token of a tokenizer of 8,192 entries that is trained on the texts."""
    compressed: Mapping[int, float]
    """Bits per byte after compression with bz2, by the sample's size in bytes."""
    texts: str
    """Name of the kind of texts."""


OF_RECIPES: Final = Measured(
    {
        "300k": {5e5: 0.9559, 1e6: 0.8037, 2e6: 0.7079, 4e6: 0.6035, 8e6: 0.5712},
        "1m": {5e5: 0.9167, 1e6: 0.7747, 2e6: 0.6128, 4e6: 0.5371, 8e6: 0.4684},
        "3m": {2e6: 0.6146, 4e6: 0.4946, 8e6: 0.4426},
    },
    bytes_per_token=BYTES_PER_TOKEN[VOCABULARY],
    compressed={30_000: 2.203, 100_000: 1.757, SAMPLE_BYTES: 1.496},
    texts="recipes in English",
)
"""Runs over recipes. Below four million tokens the fit does not hold, because a model still learns
to copy the ingredients of the prompt. The forecast corrects the fit by these losses."""
OF_PLAIN_TEXT: Final = Measured(
    {
        "300k": {5e5: 1.8161, 1e6: 1.6414, 2e6: 1.4989},
        "1m": {1e6: 1.5966, 2e6: 1.4150, 4.09e6: 1.2805},
    },
    bytes_per_token=3.75,
    compressed={30_000: 2.682, 100_000: 2.337, SAMPLE_BYTES: 2.094},
    texts="old cookbooks in English",
)
"""Runs over ten books. The runs over recipes predict these losses badly (0.93 bits per byte instead
of 1.28), because no prompt announces a book's sentences."""
_COMPRESSION_EXPONENT: Final = 1.6
"""Exponent of the power law from the compressed size of a text to its held-out loss, both relative
to the measured texts (lab/notes.md).
"""
_ROUGH_DIFFERENCE: Final = 0.1
"""Difference in difficulty above which a forecast states its margin."""
_PASSES: Final = (8.0, 0.2)
"""k and a in the number of useful passes of a run from scratch: k (T / N)^a, with T bytes of text
and N parameters (lab/notes.md)."""
_MIN_PASSES: Final = 6.0
"""Minimum number of useful passes. 6 and 10 passes over 50 recipes reach the same loss."""
_BYTES_PER_PARAMETER: Final = 0.65
"""Bytes of text per parameter that a larger size needs to be tried. With 0.36 bytes the larger of
two sizes was worse, and with 0.7 bytes it was 5 % better."""
TONIGHT: Final = "8 hours"
EVALUATING: Final = 0.05
"""Fraction of the time for held-out losses, and the same fraction for generated texts."""
_PREPARED_PER_SECOND: Final = 740_000
"""Bytes of text that are prepared per second: two Zen 3 cores needed 108 s for 80 MB."""
_ENDING_SECONDS: Final = 15.0
"""Seconds for the start, the last scores and the finished model of a small run."""
_MUCH_OF_A_RUN: Final = 0.1
"""Share of a run's time from which its preparation is reported."""
_MIN_EXAMPLES: Final = 4
"""Minimum number of examples per update."""
_MEASURING: Final = 0.1
"""Fraction of the run's time for measuring its speed. A guess."""


def choose_batch(
    read: float, texts: float, records: int, *, max_tokens: int, longest: int
) -> str:
    """Return `train.batch`, small enough for a sufficient number of updates.

    Args:
        read: Number of training tokens in the run.
        texts: Number of tokens in all texts, or 0 if it is unknown.
        records: Number of texts.
        max_tokens: Maximum tokens per update.
        longest: Length of the longest text in tokens, which must fit into an update.
    """
    tokens = tokens_per_update(read, max_tokens)
    if records and tokens < MIN_BATCH_TOKENS:
        return f"{max(_MIN_EXAMPLES, round(tokens * records / texts))} examples"
    power_of_two = 2 ** math.floor(math.log2(max(MIN_BATCH_TOKENS, tokens)))
    return f"{max(longest, power_of_two)} tokens"


class Passes(NamedTuple):
    """Useful and possible passes over all texts."""

    useful: float
    """Maximum number of useful passes."""
    possible: float
    """Number of passes possible in the available time, or 0 if it is unknown."""

    @property
    def ends_early(self) -> bool:
        """True if the useful passes end clearly before the time is over."""
        return self.possible > _EARLY_END_RATIO * self.useful

    def tokens(self, rate: float, seconds: float) -> float:
        """Return the training tokens of a run at `rate` tokens per second in `seconds`."""
        share = self.useful / self.possible if self.ends_early else 1.0
        return share * rate * seconds

    def describe(self, tokens: float, rate: float, total: Duration) -> str:
        """Describe the tokens and passes in the `total` time, and why a run ends early."""
        time_limit = _without_total(total)
        if not self.ends_early:
            passes = ""
            if self.possible:
                passes = f", {self.possible:.2g} passes over the texts"
            return f"{about(tokens)} tokens in {time_limit}{passes}"

        spare_tokens = (self.possible / self.useful - 1.0) * tokens
        spare_seconds = spare_tokens / rate / (1.0 - EVALUATING)
        needed = clock_text((total.seconds or 0.0) - spare_seconds)
        return (
            f"{about(tokens)} tokens in {self.useful:g} passes over the texts and needs only "
            f"about {needed} of the {time_limit}: the time is enough for {self.possible:,.0f} "
            "passes, but the model would memorise the texts"
        )


class Choice(NamedTuple):
    """Size with the best forecast."""

    name: str
    tokenizer: TextTokenizer
    tokens: float
    """Number of training tokens in the run."""
    rate: float
    """Training speed of this machine, in tokens per second."""
    bits_per_byte: float
    """Forecast for held-out texts."""
    passes: Passes
    like: Measured
    """Measured runs over texts of the same kind."""
    difficulty: float = 1.0
    """Factor from `estimate_difficulty`. 1.0 without a comparison of the texts."""
    writing: float = 0.0
    """Generation speed, in tokens per second. 0.0 means that it was not measured."""
    is_incomplete: bool = False
    """True if larger sizes were not tried, because the measurement took too long."""

    @property
    def size(self) -> Size:
        """Shape, batch and rate of this size."""
        return SIZES[self.name]

    @property
    def decay(self) -> float:
        """Weight decay of the run."""
        passes = min(self.passes.possible, self.passes.useful)
        return self.size.decay(self.tokens, passes)

    @property
    def model(self) -> str:
        """Number of parameters as `train` prints it, and the name of the size."""
        if not self.tokenizer.entries:
            return f"size {self.name}"
        n = self.size.parameters + self.tokenizer.entries * self.size.width
        return f"{millions(n)} parameters (size {self.name})"

    def forecast(self, total: Duration) -> str:
        """Describe the expected loss of a run from scratch, its model and its length."""
        expected = "no held-out loss, because the run reads too little text"
        notes = []
        loss = self.bits_per_byte * math.log(2.0) * self.tokenizer.bytes_per_token
        if loss < self._random_loss():
            expected = (
                f"held-out loss {loss:.2f} ({self.bits_per_byte:.2f} bits per byte)"
            )
            if self._is_rough():
                expected += ", ±17 %"  # eight runs with many passes were within 17 % (lab/notes.md)
            basis = f"runs over {self.like.texts}"
            if self.difficulty != 1.0:
                basis += " and on the compression of your texts"
            notes.append(
                f"The forecast is based on {basis}: docs/explanation/what-to-expect.md."
            )
        if self.is_incomplete:
            notes.append(
                f"Larger models were not tried, because the measurement took {_MEASURING:.0%} of "
                "the time."
            )

        model = f"Model: {self.model}, {self.rate:,.0f} tokens/s on this machine."
        length = self.passes.describe(self.tokens, self.rate, total)
        return " ".join(
            [f"Forecast: {expected}.", model, f"The run reads {length}.", *notes]
        )

    def _random_loss(self) -> float:
        """Return the loss of a random guess. The fit exceeds it if the run reads very little."""
        setting = self.tokenizer.setting
        loss = 8.0 * math.log(2.0) * self.tokenizer.bytes_per_token
        if not setting.startswith(TRAINED):
            return loss
        return min(loss, math.log(int(setting.removeprefix(TRAINED))))

    def _is_rough(self) -> bool:
        """Check whether the run differs in kind from the measured runs."""
        is_trained = self.tokenizer.setting.startswith(TRAINED)
        has_many_passes = self.passes.possible > 2.0
        has_other_texts = abs(self.difficulty - 1.0) > _ROUGH_DIFFERENCE
        return has_many_passes or has_other_texts or not is_trained


def parse_run_time(text: str) -> Duration:
    """Read the time of the entire run.

    Raises:
        ConfigError: The text is not a wall-clock time, or the time is 0.
    """
    try:
        duration = Duration.parse(TONIGHT if text == "tonight" else text)
    except ConfigError:
        duration = None
    if duration is None or not duration.seconds:
        raise ConfigError(
            f'{argument("for_")} must be a time such as "20 minutes" or "1 hour", or "tonight" '
            f'({TONIGHT}), not "{text}". To train for a number of epochs, change train.stop_after '
            "in the file that init writes."
        )
    return replace(duration, total=True)


def _without_total(duration: Duration) -> str:
    return replace(duration, total=False).in_words()


def about(number: float) -> str:
    """Format a number with two significant digits."""
    return f"{float(f'{number:.2g}'):,.0f}"


def choose_size(
    text: float,
    records: int,
    total: Duration,
    *,
    tokenizer: TextTokenizer,
    sample: bytes = b"",
    like: Measured = OF_RECIPES,
    only: str | None = None,
) -> Choice:
    """Choose the best size by the speed of this machine.

    Args:
        text: Number of bytes in all texts, or 0 if it is unknown.
        records: Number of texts, or 0 if it is unknown.
        total: Time of the entire run.
        tokenizer: Tokenizer of the model.
        sample: A sample of the texts.
        like: Measured runs over texts of the same kind.
        only: The only size to consider.

    Raises:
        ConfigError: The time is too short for any training.
    """
    characters: float = LONG_EXAMPLE
    if text:
        characters = min(text / max(1, records), LONG_EXAMPLE)
    total_seconds = total.seconds or 0.0
    deadline = time.monotonic() + _MEASURING * total_seconds
    best = find_best_size(
        text or math.inf,
        training_seconds(text, total),
        lambda size: measure_rate(size, characters, tokenizer.setting),
        only=only,
        is_over=lambda: time.monotonic() > deadline,
        tokenizer=tokenizer,
        like=like,
    )
    difficulty = estimate_difficulty(sample, like)
    return best._replace(
        bits_per_byte=best.bits_per_byte * difficulty, difficulty=difficulty
    )


def remark_on_preparation(text: float, total: Duration) -> list[str]:
    """Report that preparing `text` bytes takes much of a short run."""
    seconds = _seconds_around_training(text)
    if seconds < _MUCH_OF_A_RUN * (total.seconds or math.inf):
        return []
    remark = (
        f"Preparing the texts and writing the model take about {seconds:,.0f} seconds of the "
        f"{_without_total(total)}, and more on a busy machine."
    )
    return [remark]


def _seconds_around_training(text: float) -> float:
    return text / _PREPARED_PER_SECOND + _ENDING_SECONDS


def training_seconds(text: float, total: Duration) -> float:
    """Return the time for training if a run prepares `text` bytes first.

    Raises:
        ConfigError: The time is too short for any training.
    """
    seconds = total.seconds or 0.0
    overhead = _seconds_around_training(text)
    if seconds <= overhead:
        minimum = argument(f'for_="{math.ceil(overhead / 30)} minutes"')
        raise ConfigError(
            f'{argument("for_")} is "{total}", but preparing these texts and writing the model '
            f"take about {overhead:,.0f} seconds, so no time is left to train. Use at least "
            f"{minimum}."
        )
    return (seconds - overhead) * (1.0 - EVALUATING)


def predict_bits(
    name: str, read: float, text: float, like: Measured = OF_RECIPES
) -> float:
    """Predict the held-out bits per byte of a size after `read` bytes of a text of `text` bytes.

    The fit is corrected by the ratio of measured to fitted losses. A size without measurements
    uses the ratio of the largest measured size.
    """
    measured_name = name if name in like.bits else list(like.bits)[-1]
    parameters = SIZES[measured_name].parameters
    measured_bytes = []
    ratios = []
    for tokens, bits in like.bits[measured_name].items():
        n_bytes = tokens * like.bytes_per_token
        measured_bytes.append(n_bytes)
        ratios.append(bits / FIT.bits_per_byte(parameters, n_bytes))
    fresh = FIT.fresh(read, text)
    ratio = float(np.interp(math.log(fresh), np.log(measured_bytes), ratios))
    return FIT.bits_per_byte(SIZES[name].parameters, fresh) * ratio


def estimate_difficulty(sample: bytes, like: Measured = OF_RECIPES) -> float:
    """Estimate the held-out loss of texts like `sample`, relative to the measured texts.

    Return 1.0 for a sample that is too short.
    """
    if len(sample) < min(like.compressed):
        return 1.0
    log_sizes = [math.log(size) for size in like.compressed]
    bits = list(like.compressed.values())
    typical = float(np.interp(math.log(len(sample)), log_sizes, bits))
    compressed = 8 * len(bz2.compress(sample)) / len(sample)
    return math.pow(compressed / typical, _COMPRESSION_EXPONENT)


def find_best_size(
    text: float,
    seconds: float,
    rate: Callable[[Size], float],
    *,
    only: str | None = None,
    tokenizer: TextTokenizer | None = None,
    like: Measured = OF_RECIPES,
    is_over: Callable[[], bool] = bool,
) -> Choice:
    """Find the best size for `text` bytes and `seconds` of training.

    The forecast has one minimum, so the search ends at the first size that is worse.

    Args:
        text: Bytes of all texts.
        seconds: Time for training.
        rate: Function that measures the training speed of a size, in tokens per second.
        only: The only size to consider.
        tokenizer: None for a tokenizer that is trained on the texts.
        like: Measured runs over texts of the same kind, for the forecast.
        is_over: Function that is called before each size except the first. True ends the search.
    """
    text_tokenizer = (tokenizer or tokenizer_for_text(text)).adjust_to(like)
    bytes_per_token = text_tokenizer.bytes_per_token

    def try_size(name: str) -> Choice:
        tokens_per_second = rate(SIZES[name])
        passes = Passes(
            useful=_useful_passes(text, SIZES[name]),
            possible=seconds * tokens_per_second * bytes_per_token / text,
        )
        tokens = passes.tokens(tokens_per_second, seconds)
        bits = predict_bits(name, tokens * bytes_per_token, text)
        return Choice(
            name, text_tokenizer, tokens, tokens_per_second, bits, passes, like
        )

    smallest, *larger = [only] if only else SIZES
    best = try_size(smallest)
    for name in larger:
        if text < _BYTES_PER_PARAMETER * SIZES[name].parameters:
            break
        if is_over():
            best = best._replace(is_incomplete=True)
            break
        choice = try_size(name)
        if choice.bits_per_byte >= best.bits_per_byte:
            break
        best = choice

    # The runs over recipes choose the size also for plain text, because they are longer and cover
    # more sizes. For plain text, this choice was the best of nine runs.
    bits = predict_bits(best.name, best.tokens * bytes_per_token, text, like)
    return best._replace(bits_per_byte=bits)


def _useful_passes(text: float, size: Size) -> float:
    """Return the number of passes over `text` bytes after which a size stops improving."""
    factor, exponent = _PASSES
    useful: float = factor * (text / size.parameters) ** exponent
    if math.isinf(text):  # the amount of text is unknown
        return useful
    return max(_MIN_PASSES, math.floor(useful))
