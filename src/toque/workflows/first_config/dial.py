"""Dial: what a machine makes the best of some text in some time, from scratch or from a model.

The table and the fit come from short runs on 68,004 real recipes (lab/dial.md). How fast
this machine trains a size is measured.
"""

from __future__ import annotations

import bz2
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from toque.config.schema import TRAINED
from toque.errors import ConfigError, argument
from toque.reporter import SILENT, clock_text, millions
from toque.units import Cursor, Duration
from toque.workflows.configure import configure

if TYPE_CHECKING:
    from toque.workflows.build import Run

HEAD_WIDTH: Final = 32
POSITIONS: Final = 1024  # tokens of prompt and target together that a new model can read
VOCABULARY: Final = 8192
"""Most entries of a tokenizer that is learnt from the texts. After as many tokens, 64 wide, 68,004
recipes had 0.965 bits a byte with 2,048 entries, 0.866 with 4,096, 0.816 with 8,192, 0.807 with
16,384. An update takes 1.0 to 1.3 times as long with 8,192 as with 2,048, and longer with 16,384
(lab/notes.md)."""
_FEWEST_ENTRIES: Final = 2048
_BYTES_AN_ENTRY: Final = 100.0
"""Bytes of text for an entry. 2,048, 4,096 and 8,192 entries had 1.382, 1.404 and 1.439 bits a byte
of 160,000 bytes, 1.088, 1.024 and 1.076 of 560,000, and 1.320, 1.238 and 1.210 of 830,000."""
BYTES_A_TOKEN: Final[Mapping[int, float]] = {2048: 3.72, 4096: 4.05, VOCABULARY: 4.17}
"""Bytes of recipes in a token of a tokenizer that was learnt from them, by its entries."""


class TextTokenizer(NamedTuple):
    """The tokenizer of a new model."""

    setting: str  # of `model.tokenizer`
    bytes_a_token: float  # of the texts to train on
    entries: int = 0  # tokens that it has; 0 if that is not known yet

    def of(self, like: Measured) -> TextTokenizer:
        """The same, which has tokens of other lengths where it is learnt from other texts."""
        if not self.setting.startswith(TRAINED):
            return self
        as_long = like.bytes_a_token / OF_RECIPES.bytes_a_token
        return self._replace(bytes_a_token=self.bytes_a_token * as_long)


def learnt(entries: int) -> TextTokenizer:
    """A tokenizer of so many entries that is learnt from the texts."""
    known = np.log(list(BYTES_A_TOKEN))
    each = float(np.interp(math.log(entries), known, list(BYTES_A_TOKEN.values())))
    return TextTokenizer(f"{TRAINED}{entries}", each, entries)


def learnt_from(text: float) -> TextTokenizer:
    """A tokenizer that is learnt from `text` bytes, with as many entries as they are enough for."""
    entries = min(max(text / _BYTES_AN_ENTRY, _FEWEST_ENTRIES), VOCABULARY)
    return learnt(2 ** math.floor(math.log2(entries)))


class Size(NamedTuple):
    """A Llama from scratch, and how it is trained."""

    width: int
    layers: int
    batch_tokens: int
    peak_lr: float  # of Muon, falling to nothing in a straight line

    @property
    def shape(self) -> dict[str, Any]:
        """`model.shape` of it."""
        heads = self.width // HEAD_WIDTH
        return {
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": self.inner,
            "max_position_embeddings": POSITIONS,
            "tie_word_embeddings": True,
        }

    @property
    def inner(self) -> int:
        """Width of the layers' inner part: 11/4 of the width, a multiple of the head's."""
        return -(-self.width * 11 // 4 // HEAD_WIDTH) * HEAD_WIDTH

    @property
    def parameters(self) -> int:
        """Parameters without the table of tokens."""
        layer = self.width * (4 * self.width + 3 * self.inner + 2)
        return self.layers * layer + self.width

    def decay(self, tokens: float, passes: float) -> float:
        """`optim.weight_decay` of a run that reads so many tokens, in so many passes.

        What the weights forget by it in the whole run is the same for short and long ones (Wang &
        Aitchison 2024, arXiv 2405.13698), and more where texts come again, which are learnt by
        heart else (Kim et al. 2025, arXiv 2509.14786).
        """
        least, of_a_pass = _FORGOTTEN
        an_update = max(_FEWEST_TOKENS, _an_update(tokens, self.batch_tokens))
        forgotten = max(least, of_a_pass * passes)
        return min(_MOST_DECAY, float(f"{forgotten / (self.peak_lr * tokens / an_update):.2g}"))


SIZES: Final[Mapping[str, Size]] = {
    "300k": Size(64, 3, 2048, 1e-2),
    "1m": Size(128, 4, 2048, 5e-3),
    "3m": Size(192, 5, 2048, 2.5e-3),
    "6m": Size(256, 6, 2048, 2e-3),
    "14m": Size(384, 7, 4096, 1.5e-3),
    "30m": Size(512, 8, 8192, 1e-3),
}
"""A size is named by its parameters with 2,048 tokens. The rates of the three largest are guesses
that go on as measured: of 4 million tokens 2.5e-3 is better than 5e-3 for 3m, and at 1e-2 it learns
badly; 1m has as much from 1e-2 as from 5e-3 of many texts and less of few, 300k from 1e-2. With
6m's, beside no other, an hour of 22 million tokens came out as foreseen (lab/dial.md)."""


class Fit(NamedTuple):
    """Held-out bits a byte by parameters N and bytes of text D: E + A / N^a + B / D^b.

    Hoffmann et al. 2022, equation 10. A text that is read again is worth less each time: D is then
    the fresh text worth as much, by Muennighoff et al. 2023, equation 5.
    """

    floor: float
    of_size: float
    size_exponent: float
    of_text: float
    text_exponent: float
    repeats: float

    def bits_per_byte(self, parameters: float, fresh: float) -> float:
        """Held-out bits a byte after `fresh` bytes of text that is not read again."""
        size = self.of_size / parameters**self.size_exponent
        return float(self.floor + size + self.of_text / fresh**self.text_exponent)

    def fresh(self, read: float, text: float) -> float:
        """Bytes of fresh text that are worth as much as `read` bytes of a text of `text` bytes."""
        if read <= text:
            return read
        again = read / text - 1.0
        return text + text * self.repeats * (1.0 - math.exp(-again / self.repeats))


FIT: Final = Fit(0.25, 22.02, 0.4, 745.2, 0.5, 4.0)
"""The fit of `fit_runs.py` through six runs of 0.2 to 2 M parameters of four and eight million
tokens; each is within 2 % of it, and within 5 % of one through the five others. So few cannot tell
the floor, 0.25, which is a guess with plausible exponents. Repeats of 4 are a compromise: eight
runs with weight decay over 500 to 2,400 recipes, 5 to 12 times, are foreseen 8 % too low to 17 %
too high with 4, 15 % too low to 13 % too high with 8; and of 500 recipes 1m is better than 300k,
which 4 says and 5 does not."""
_CLEARLY: Final = 1.25
"""Passes in the time, relative to the most that are useful, above which a run ends early. The speed
is an estimate within a quarter."""
MOST_PASSES: Final = 4.0
"""Passes over its texts after which a pretrained model stops: up to four are worth nearly as much
as fresh text (Muennighoff et al. 2023). Of 498 recipes the held-out loss turned in the fourth pass
(lab/dial.md)."""
SAMPLE_BYTES: Final = 300_000
"""Bytes of texts by which they are compared with those that were measured."""


class Measured(NamedTuple):
    """Losses that short runs over one kind of text reached, and how such texts compress."""

    bits: Mapping[str, Mapping[float, float]]  # held-out bits a byte, by size and tokens read
    bytes_a_token: float  # of a tokenizer of 8,192 entries that was learnt from them
    compressed: Mapping[int, float]  # bits a byte to which bz2 compresses so many bytes of them
    texts: str  # in words


OF_RECIPES: Final = Measured(
    {
        "300k": {5e5: 0.9559, 1e6: 0.8037, 2e6: 0.7079, 4e6: 0.6035, 8e6: 0.5712},
        "1m": {5e5: 0.9167, 1e6: 0.7747, 2e6: 0.6128, 4e6: 0.5371, 8e6: 0.4684},
        "3m": {2e6: 0.6146, 4e6: 0.4946, 8e6: 0.4426},
    },
    bytes_a_token=BYTES_A_TOKEN[VOCABULARY],
    compressed={30_000: 2.203, 100_000: 1.757, SAMPLE_BYTES: 1.496},
    texts="recipes in English",
)
"""Below four million tokens a model still learns to copy what the prompt lists, and no fit holds:
there these are the forecast, in proportion to the fit."""
OF_PLAIN_TEXT: Final = Measured(
    {
        "300k": {5e5: 1.8161, 1e6: 1.6414, 2e6: 1.4989},
        "1m": {1e6: 1.5966, 2e6: 1.4150, 4.09e6: 1.2805},
    },
    bytes_a_token=3.75,
    compressed={30_000: 2.682, 100_000: 2.337, SAMPLE_BYTES: 2.094},
    texts="old cookbooks in English",
)
"""Ten books, whose sentences no prompt foretells: by the runs over recipes, and how well bz2
compresses both, a run of four million tokens of them would have 0.93 bits a byte; it has 1.28. By
these, a play of a megabyte is foreseen 11 % too high (64 wide, 3.3 passes)."""
_OF_COMPRESSION: Final = 1.6
"""Power of a collection's compressed size, relative to that of as much measured text, that its
held-out loss goes with: 0.94, 1.20 and 1.22 had 0.91, 1.37 and 1.42 of the loss, but 1.03 0.92
(lab/notes.md)."""
_UNLIKE: Final = 0.1
"""Difference in difficulty from which a forecast is called a rough one."""
_PASSES: Final = (8.0, 0.2)
"""k and a of the passes over few texts after which a run from scratch ends: k (T / N)^a, by their
bytes T and the parameters N. With weight decay, of 128 wide at T / N = 0.7 8 passes are far better
than 4 and than 16, at 1 those of 5 and 10 nearly alike, at 3.5 12 are 4 % better than 6; of 64 wide
8 and 10 better than 5 and 6 at 1 and 3.5 (lab/notes.md)."""
_FEWEST_PASSES: Final = 6.0
"""Passes of a size where that would be fewer: 50 recipes have as much of 6 as of 10."""
_BYTES_A_PARAMETER: Final = 0.65
"""Bytes of text for a parameter that a larger size must have to be tried: 744 recipes have 0.36 for
192 wide, which is worse than 128 wide, 500 have 0.7 for 128 wide, which is 5 % better than 64."""
_FORGOTTEN: Final = (1.5, 0.5)
"""Sum of rate times decay over all updates of a run, were the rate constant: the least, and for a
pass over the texts. Held-out bits a byte at 0.1, 1.5 and 5: 68,004 recipes 64 wide, a million
tokens 0.816, 0.804, 0.844, 128 wide, two million 0.629, 0.613, 0.649. At 0.1, 0.7, 2.4 and 7: 744
recipes in 4.9 passes 1.188, 1.168, 1.143, 1.254; in 9.9 at 2.4, 5 and 10 1.233, 1.139, 1.135; one
magazine in 6.1 at 0.1, 3 and 10 0.580, 0.518, 0.520 (lab/notes.md)."""
_MOST_DECAY: Final = 2.0
"""Most weight decay: at 2.0 and below the best runs over few texts were; at 3.0 six passes over 50
and 150 recipes have 3 and 5 % more loss than without any."""

TONIGHT: Final = "8 hours"
EVALUATING: Final = 0.05  # share of the time that held-out losses may take, and that texts may
WRITTEN_AT_ONCE: Final = 4  # texts of an evaluation between updates, at most
_PREPARED_A_SECOND: Final = 740_000
"""Bytes of text that are prepared in a second: two cores of a Zen 3 took 108 s for 80 MB."""
_ENDING_SECONDS: Final = 15.0  # start, last scores and the finished model of a small run
_LONG_EXAMPLE: Final = 2048  # characters of an example where longer ones are split

_UPDATES: Final = 300  # fewest updates that larger ones are made for
MOST_TOKENS: Final = 16_384  # of an update of a pretrained model
_FEWEST_TOKENS: Final = 1024  # of an update; below it examples are counted
_FEWEST_EXAMPLES: Final = 4  # of an update where texts are few
_TUNED_LR: Final = (1e-4, 135e6)
"""AdamW's peak rate for all weights of a model of so many parameters, that goes with the root of
their inverse. Held-out bits a byte of 500 recipes at 1e-4, 3e-4 and 1e-3: 15 M in four passes
0.791, 0.766 and 0.812; 135 M in one pass 0.512 and 0.515 (lab/dial.md)."""
_HIGHEST_TUNED_LR: Final = 5e-4
_ADAPTER_LR: Final = 1e-3  # a guess


def tuned_lr(parameters: int, *, adapted: bool) -> float:
    """AdamW's peak rate for a pretrained model; of 0 parameters where nobody has looked at it."""
    if adapted:
        return _ADAPTER_LR
    rate, usual = _TUNED_LR
    return float(f"{min(_HIGHEST_TUNED_LR, rate * math.sqrt(usual / (parameters or usual))):.1g}")


def _an_update(read: float, most: int) -> float:
    """Tokens of an update of a run that reads `read`: `most`, or less for enough updates."""
    return min(most, read / _UPDATES)


def batch_for(read: float, texts: float, records: int, *, most: int, longest: int) -> str:
    """`train.batch` of a run that reads `read` tokens: enough updates, of few examples if need be.

    Args:
        read: tokens that the run reads.
        texts: tokens of all texts, 0 where nobody has looked.
        records: texts.
        most: tokens of an update where much is read.
        longest: tokens of the longest text, which an update must hold.
    """
    wanted = _an_update(read, most)
    if records and wanted < _FEWEST_TOKENS:
        return f"{max(_FEWEST_EXAMPLES, round(wanted * records / texts))} examples"
    return f"{max(longest, 2 ** math.floor(math.log2(max(_FEWEST_TOKENS, wanted))))} tokens"


class Passes(NamedTuple):
    """Passes over all texts: the most that a run makes, and those there is time for."""

    most: float
    of_time: float  # 0 where nobody has looked at the texts

    @property
    def ends_early(self) -> bool:
        """True if the run ends after `most`, clearly before the time is over."""
        return self.of_time > _CLEARLY * self.most

    def tokens(self, rate: float, seconds: float) -> float:
        """Tokens that are read at `rate` tokens per second, with `seconds` to train in."""
        share = self.most / self.of_time if self.ends_early else 1.0
        return share * rate * seconds

    def in_words(self, tokens: float, rate: float, whole: Duration) -> str:
        """Say that the run reads `tokens` in the `whole` time, or in less time and why."""
        if not self.ends_early:
            passes = f", {self.of_time:.2g} passes over the texts" if self.of_time else ""
            return f"{_about(tokens)} tokens in {_without_total(whole)}{passes}"
        spare = (self.of_time / self.most - 1.0) * tokens / rate / (1.0 - EVALUATING)
        needed = clock_text((whole.seconds or 0.0) - spare)
        return (
            f"{_about(tokens)} tokens in {self.most:g} passes over the texts and needs only about "
            f"{needed} of the {_without_total(whole)}: the time is enough for "
            f"{self.of_time:,.0f} passes, but the model would memorise the texts"
        )


class Choice(NamedTuple):
    """The size that the forecast is best for."""

    name: str
    tokenizer: TextTokenizer
    tokens: float  # that are read
    rate: float  # tokens a second
    bits_per_byte: float  # expected of held-out texts
    passes: Passes
    like: Measured
    difficulty: float = 1.0  # the factor of `difficulty_of`; 1.0 where texts were not compared
    writing: float = 0.0  # tokens per second of the texts that it writes; 0.0: not measured
    cut_short: bool = False  # larger sizes were not tried, as measuring took too long

    @property
    def size(self) -> Size:
        """Shape, batch and rate of it."""
        return SIZES[self.name]

    @property
    def decay(self) -> float:
        """Weight decay of the run."""
        return self.size.decay(self.tokens, min(self.passes.of_time, self.passes.most))

    @property
    def model(self) -> str:
        """Parameters of the model as `train` prints them, and the name of the size."""
        if not self.tokenizer.entries:
            return f"size {self.name}"
        n = self.size.parameters + self.tokenizer.entries * self.size.width
        return f"{millions(n)} parameters (size {self.name})"

    def forecast(self, whole: Duration) -> str:
        """The sentence on what a run from scratch will reach."""
        loss = self.bits_per_byte * math.log(2.0) * self.tokenizer.bytes_a_token
        compared = self.difficulty != 1.0
        beside = ", and by how well your texts compress beside those" if compared else ""
        # Eight runs that read a small collection often are foreseen within 17 % (lab/notes.md).
        is_learnt = self.tokenizer.setting.startswith(TRAINED)  # no other was measured
        unlike = abs(self.difficulty - 1.0) > _UNLIKE or not is_learnt
        margin = ", each a sixth more or less," if self.passes.of_time > 2.0 or unlike else ","
        expected = (
            f"{self.bits_per_byte:.2f} bits a byte of held-out text, a loss of {loss:.2f}{margin}"
        )
        by_what = (
            f" That is by runs over {self.like.texts}{beside}: docs/explanation/what-to-expect.md."
        )
        # Of far less than any run read, the fit may lie above a guess among all tokens, or bytes.
        guesses = [8.0 * math.log(2.0) * self.tokenizer.bytes_a_token]
        if is_learnt:
            guesses.append(math.log(int(self.tokenizer.setting.removeprefix(TRAINED))))
        if loss >= min(guesses):
            expected, by_what = "no loss that can be foreseen, for so little is read,", ""
        return (
            f"Expected: {expected} by a model of {self.model}, of which this machine "
            f"just trained {self.rate:,.0f} tokens a second. It reads "
            f"{self.passes.in_words(self.tokens, self.rate, whole)}.{by_what}{self._untried()}"
        )

    def _untried(self) -> str:
        if not self.cut_short:
            return ""
        return (
            f" Larger models were not tried: measuring took more than {_MEASURING:.0%} of the time."
        )


def time_of(text: str) -> Duration:
    """Read the time of the entire run.

    Raises:
        ConfigError: The text is not a time by the clock, or the time is 0.
    """
    try:
        duration = Duration.parse(TONIGHT if text == "tonight" else text)
    except ConfigError:
        duration = None
    if duration is None or not duration.seconds:
        raise ConfigError(
            f'{argument("for_")} must be a time such as "20 minutes" or "1 hour", or tonight '
            f'({TONIGHT}), not "{text}". To train for a number of epochs, change '
            "train.stop_after in the file that init writes."
        )
    return replace(duration, total=True)


class Tuning(NamedTuple):
    """Further training of a pretrained model in some time."""

    batch: str
    tokens: float  # that are read
    rate: float  # tokens a second
    passes: Passes
    writing: float = 0.0  # tokens per second of the texts that it writes; 0.0: not measured

    def forecast(self, whole: Duration) -> str:
        """Sentences on what the run reads."""
        return (
            f"This machine trains about {_about(self.rate)} tokens a second of this model. It "
            f"reads {self.passes.in_words(self.tokens, self.rate, whole)}. What loss that gives "
            "depends on the model, and is not foreseen; SmolLM2-135M had 0.51 bits a byte of "
            "recipes after 340,000 tokens, 0.44 after 2,300,000: "
            "docs/explanation/what-to-expect.md."
        )


def _without_total(whole: Duration) -> str:
    return replace(whole, total=False).in_words()


def _about(number: float) -> str:
    """A number of which two digits are known."""
    return f"{float(f'{number:.2g}'):,.0f}"


def tuning_for(texts: float, records: int, seconds: float, rate: float, *, longest: int) -> Tuning:
    """The settings for `texts` tokens in so many records, 0 of both where nobody has looked.

    Args:
        texts: tokens of all texts that are trained, once limits on lengths have cut them.
        records: texts.
        seconds: time to train in.
        rate: tokens a second of this machine.
        longest: tokens of the longest text, which an update must hold.
    """
    passes = Passes(MOST_PASSES, rate * seconds / texts if texts else 0.0)
    read = passes.tokens(rate, seconds)
    batch = batch_for(read, texts, records, most=MOST_TOKENS, longest=longest)
    return Tuning(batch, read, rate, passes)


def choice_for(
    text: float,
    records: int,
    whole: Duration,
    *,
    tokenizer: TextTokenizer,
    sample: bytes = b"",
    like: Measured = OF_RECIPES,
    only: str | None = None,
) -> Choice:
    """The best size for `text` bytes in so many records; 0 of both where nobody has looked.

    Args:
        text: bytes of all texts.
        records: texts.
        whole: time of the whole run.
        tokenizer: of the model.
        sample: some of the texts.
        like: runs over such texts.
        only: forecast this size alone.

    Raises:
        ConfigError: nothing of the time is left to train in.
    """
    each = min(text / max(1, records), _LONG_EXAMPLE) if text else _LONG_EXAMPLE
    training = training_seconds(text, whole)
    ends = time.monotonic() + _MEASURING * (whole.seconds or 0.0)
    best = best_for(
        text or math.inf,
        training,
        lambda size: rate_of(size, each, tokenizer.setting),
        only=only,
        is_over=lambda: time.monotonic() > ends,
        tokenizer=tokenizer,
        like=like,
    )
    difficulty = difficulty_of(sample, like)
    return best._replace(bits_per_byte=best.bits_per_byte * difficulty, difficulty=difficulty)


def training_seconds(text: float, whole: Duration) -> float:
    """Seconds to train in when `text` bytes are prepared before; a ConfigError if none are left."""
    seconds, before = whole.seconds or 0.0, text / _PREPARED_A_SECOND + _ENDING_SECONDS
    if seconds <= before:
        least = argument(f'for_="{math.ceil(before / 30)} minutes"')
        raise ConfigError(
            f'{argument("for_")} is "{whole}", and preparing these texts and writing the model '
            f"take about {before:,.0f} seconds: nothing is left to train in. Use at least {least}."
        )
    return (seconds - before) * (1.0 - EVALUATING)


def expected_of(name: str, read: float, text: float, like: Measured = OF_RECIPES) -> float:
    """Held-out bits a byte of a size after reading so many bytes of a text of `text` bytes.

    The fit, times what was measured at as many relative to it; of a size that was never trained,
    times what was measured of the largest that was.
    """
    trained = name if name in like.bits else list(like.bits)[-1]
    size, known, measured = SIZES[name], SIZES[trained], like.bits[trained]
    fresh, at = FIT.fresh(read, text), [n * like.bytes_a_token for n in measured]
    ratios = [
        bits / FIT.bits_per_byte(known.parameters, n)
        for n, bits in zip(at, measured.values(), strict=True)
    ]
    ratio = np.interp(math.log(fresh), np.log(at), ratios)
    return FIT.bits_per_byte(size.parameters, fresh) * float(ratio)


def difficulty_of(sample: bytes, like: Measured = OF_RECIPES) -> float:
    """Held-out bits a byte of texts like `sample`, as a multiple of those that were measured.

    1.0 for a sample that is too short to tell.
    """
    if len(sample) < min(like.compressed):
        return 1.0
    sizes = [math.log(n) for n in like.compressed]
    usual = np.interp(math.log(len(sample)), sizes, list(like.compressed.values()))
    compressed = 8 * len(bz2.compress(sample)) / len(sample)
    return math.pow(compressed / float(usual), _OF_COMPRESSION)


def best_for(
    text: float,
    seconds: float,
    rate: Callable[[Size], float],
    *,
    only: str | None = None,
    tokenizer: TextTokenizer | None = None,
    like: Measured = OF_RECIPES,
    is_over: Callable[[], bool] = bool,
) -> Choice:
    """The best size for `text` bytes to learn from in `seconds` of training.

    `rate` measures tokens a second of a size; larger ones than the best are not measured once a
    larger one was worse, for the forecast has one minimum. `only`: forecast this size alone.
    `tokenizer`: None for one that is learnt from the texts. `like`: runs over such texts, which
    give the forecast. `is_over`: asked before each size but the first, True to try no other.
    """
    best: Choice | None = None
    tokenizer = (tokenizer or learnt_from(text)).of(like)
    each, (factor, exponent) = tokenizer.bytes_a_token, _PASSES
    for name in [only] if only else SIZES:
        size = SIZES[name]
        if best is not None and text < _BYTES_A_PARAMETER * size.parameters:
            break
        if best is not None and is_over():
            best = best._replace(cut_short=True)
            break
        measured = rate(size)
        most = factor * (text / size.parameters) ** exponent
        if not math.isinf(text):
            most = max(_FEWEST_PASSES, math.floor(most))
        passes = Passes(most, seconds * measured * each / text)
        tokens = passes.tokens(measured, seconds)
        bits = expected_of(name, tokens * each, text)
        if best is not None and bits >= best.bits_per_byte:
            break
        best = Choice(name, tokenizer, tokens, measured, bits, passes, like)
    assert best is not None  # there are sizes
    # The best size is that by recipes, whose runs are longer and of more sizes: of plain text it
    # was the best of nine, where the two sizes that were measured of it would have taken 300k.
    bits = expected_of(best.name, best.tokens * each, text, like)
    return best._replace(bits_per_byte=bits)


_TRIED_UPDATES, _TRIED_SECONDS = 2, 1.0
"""Fewest updates and seconds that a rate is measured by."""
_MEASURING: Final = 0.1  # share of the run's time that measuring its speed may take; a guess
_TRIED_BATCH: Final = 4096  # most tokens of such an update, or a large size would take a minute
_TRIED_TEXTS: Final = 200
_LONG_PROMPT: Final = 200  # characters of a prompt that is written for
_WORDS, _LETTERS, _LETTERS_A_WORD = 4000, "etaoinshrdlu", 6.5


def rate_of(size: Size, characters: float, tokenizer: str) -> float:
    """Tokens a second that this machine trains: prompts, targets and the optimizer's step.

    Measured by a few updates of random texts of so many characters, as long as the user's, with
    that `model.tokenizer`: a rate depends on nothing else of them.
    """
    batch = f"{min(size.batch_tokens, _TRIED_BATCH)} tokens"
    optim = {"name": "muon", "peak_lr": size.peak_lr}
    with _tried_run(model_of(size, tokenizer), characters, batch, optim=optim) as run:
        cursor, rates, begun = Cursor(), list[float](), time.perf_counter()
        while len(rates) < _TRIED_UPDATES or time.perf_counter() < begun + _TRIED_SECONDS:
            step, began = run.stream.at(cursor), time.perf_counter()
            float(run.trainer.step(step).loss)  # waits for the device
            rates.append(step.n_tokens / (time.perf_counter() - began))
            cursor = step.cursor
        return statistics.median(rates[1:])  # the first makes the optimizer's state


def writing_rate_of(model: Mapping[str, Any], characters: float) -> float:
    """Measure the tokens per second that this machine writes, `WRITTEN_AT_ONCE` texts at a time.

    Args:
        model: settings of the model.
        characters: characters of each text.
    """
    # Torch is loaded only if a rate is measured.
    from toque.workflows.run_length import texts_seconds

    characters = min(characters, _LONG_EXAMPLE)
    prompts = [text[:_LONG_PROMPT] for text in _random_texts(characters)[:WRITTEN_AT_ONCE]]
    n = max(1, round(characters / _LETTERS_A_WORD))
    with _tried_run(model, characters, "4 examples", evaluation={"prompts": prompts}) as run:
        return WRITTEN_AT_ONCE * n / texts_seconds(run.evaluator, run.evaluator.sampler, n)


def model_of(size: Size, tokenizer: str) -> dict[str, Any]:
    """Settings of a new model."""
    return {"family": "llama", "shape": size.shape, "tokenizer": tokenizer}


@contextmanager
def _tried_run(
    model: Mapping[str, Any], characters: float, batch: str, **sections: Mapping[str, Any]
) -> Iterator[Run]:
    """Build a run over random texts of so many characters, in a temporary folder."""
    # Torch is loaded only if a rate is measured.
    from toque.training.distributed.collectives import Ranks
    from toque.training.stopping import CommandClock
    from toque.workflows.build import build_run
    from toque.workflows.prepare import prepare

    evaluation = {"generate": 0, "texts": 0, "max_examples": 1}
    with _scratch() as folder:
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


def _scratch() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="toque-init-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"There is no folder for temporary files: {error.strerror}. How fast this machine "
            "trains is measured in one; name a folder with some megabytes in the variable TMPDIR."
        ) from error


def _random_texts(characters: float) -> list[str]:
    """Texts of about so many characters, the same each time."""
    draw = random.Random(17)  # no secret
    words = ["".join(draw.choices(_LETTERS, k=draw.randint(2, 9))) for _ in range(_WORDS)]
    n = max(2, round(characters / _LETTERS_A_WORD))
    return [
        " ".join(draw.choices(words, k=draw.randint(n // 2, n * 3 // 2)))
        for _ in range(_TRIED_TEXTS)
    ]
