"""Best-of-n: of several texts that were drawn for one prompt, the best by a score.

A score is one that needs no reference: a recipe score, or the likelihood, which is the mean
log-probability of a text's tokens in nats, the end token among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any, Final

from toque.cooking.prompts import asks_for_a_recipe
from toque.cooking.recipe_scores import NAMES, text_metrics
from toque.errors import ConfigError, argument
from toque.models.generation.options import GenerationOptions
from toque.runs.history import metric_named

LIKELIHOOD: Final = "likelihood"


@dataclass(frozen=True)
class Chosen:
    """The score by which a text was chosen, beside those of the others."""

    by: str
    score: float | None
    """None where this text lacks it, and stands behind those that have it."""
    mean: float
    """Mean over the texts that have the score."""
    texts: int
    """Number of texts that were written for the prompt."""

    def record(self) -> dict[str, Any]:
        """Its content in JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """The choice for people."""
        own = f"no {self.by}" if self.score is None else f"{self.by} {self.score:.3f}"
        return f"[{own}; mean of {self.texts} texts {self.mean:.3f}]"


@dataclass(frozen=True)
class BestOf:
    """The choice among `n` texts for a prompt."""

    n: int = 1
    """Texts to choose among; 1 chooses nothing."""
    by: str | None = None
    """Name of a score; None: recipe_score where a recipe is asked for, those whose `oven_fits` is 0
    behind all others, else likelihood."""

    def __post_init__(self) -> None:
        if self.by is not None and self.by not in (LIKELIHOOD, *NAMES):
            raise ConfigError(
                f"Texts cannot be chosen by {self.by!r}: use {LIKELIHOOD} or, for recipes, one of "
                f"{', '.join(NAMES)}."
            )
        if self.n < 1:
            raise ConfigError(f"{argument('best_of')} is {self.n}; it must be at least 1.")
        if self.by is not None and self.n == 1:
            raise ConfigError(
                f"{self.by} would choose among one text for each prompt. Write several with "
                f"{argument('best_of=8')}, or name no score."
            )

    def check(self, options: GenerationOptions, *, wanted: int) -> None:
        """Raise a ConfigError where `wanted` texts of a prompt cannot be chosen among `n`."""
        if self.n == 1:
            return
        if options.is_greedy:
            raise ConfigError(
                f"{argument('best_of')} is {self.n} and {argument('temperature')} 0, which takes "
                f"the likeliest token every time: all {self.n} texts would be the same. Take a "
                f"temperature such as 0.7, or leave {argument('best_of')} out."
            )
        if wanted > self.n:
            raise ConfigError(
                f"{argument('best_of')} is {self.n}, and {wanted} texts cannot be chosen among "
                f"them. {argument('n')} may be up to {self.n}."
            )

    def check_prompts(
        self, prompts: Iterable[str], *, in_json: bool, knows_recipes: bool = True
    ) -> None:
        """Raise a ConfigError where the texts for a prompt will not have the score that is named.

        Args:
            prompts: as the model reads them.
            in_json: texts are held to a schema; the recipe scores read no JSON.
            knows_recipes: the model was trained on recipes.
        """
        if self.by in (None, LIKELIHOOD):
            return
        asks = partial(asks_for_a_recipe, knows_recipes=knows_recipes)
        other = next((p for p in prompts if in_json or not asks(p)), None)
        if other is not None:
            wrong = "is answered in JSON" if in_json else "asks for no recipe"
            raise ConfigError(
                f"{self.by} is a score of recipes, and the prompt {other[:100]!r} {wrong}. Name no "
                f"score, or {LIKELIHOOD}, which every text has."
            )

    def ranked(
        self,
        prompt: str,
        texts: Sequence[str],
        logprobs: Sequence[Sequence[float]],
        *,
        in_json: bool = False,
        knows_recipes: bool = True,
    ) -> list[tuple[int, Chosen]]:
        """Numbers of a prompt's texts, best first, and how each was judged.

        Equal scores go by likelihood, then by number. A text without the score comes after those
        that have it; where none has it, likelihood decides. Where no score is named, recipes whose
        `oven_fits` is 0 come after the others.

        Args:
            prompt: as the model reads it.
            texts: what was written.
            logprobs: log-probabilities of each text's tokens.
            in_json: see `check_prompts`.
            knows_recipes: see `check_prompts`.
        """
        likelihoods = [fmean(each) for each in logprobs]
        is_recipe = asks_for_a_recipe(prompt, knows_recipes=knows_recipes) and not in_json
        by = self.by or ("recipe_score" if is_recipe else LIKELIHOOD)
        scores: list[float | None] = [*likelihoods]
        misfit = [False] * len(texts)
        if by != LIKELIHOOD:
            metrics_of = partial(text_metrics, prompt, knows_recipes=knows_recipes)
            judged = [metrics_of(text) for text in texts]
            scores = [metrics.get(by) for metrics in judged]
            misfit = [self.by is None and metrics.get("oven_fits") == 0.0 for metrics in judged]
        known = [score for score in scores if score is not None]
        if not known:
            by, scores, known = LIKELIHOOD, [*likelihoods], likelihoods
        sign = -1.0 if metric_named(by).better == "lower" else 1.0

        def place(number: int) -> tuple[bool, bool, float, float]:
            score = scores[number]
            return score is None, misfit[number], -sign * (score or 0.0), -likelihoods[number]

        ranking, mean = sorted(range(len(texts)), key=place), fmean(known)
        return [(number, Chosen(by, scores[number], mean, len(texts))) for number in ranking]
