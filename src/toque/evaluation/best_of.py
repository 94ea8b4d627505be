"""Best-of-n: several texts for one prompt, ranked by a score that needs no reference.

The score is a recipe score or the likelihood: the mean log-probability of a text's tokens, in nats,
including the end token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

from toque.cooking.prompts import asks_for_a_recipe
from toque.cooking.recipe_scores import NAMES, text_metrics
from toque.errors import ConfigError, argument
from toque.models.generation.options import GenerationOptions
from toque.runs.metric_names import metric_named

LIKELIHOOD: Final = "likelihood"


@dataclass(frozen=True)
class Chosen:
    """Score of a chosen text, compared with all texts for the prompt."""

    by: str
    """Name of the score."""
    score: float | None
    """Score of the text. None if the text has no such score; it then ranks last."""
    mean: float
    """Mean score of the texts that have one."""
    texts: int
    """Number of texts generated for the prompt."""

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        score = f"no {self.by}" if self.score is None else f"{self.by} {self.score:.3f}"
        return f"[{score}; mean of {self.texts} texts {self.mean:.3f}]"


@dataclass(frozen=True)
class BestOf:
    """Settings of best-of-n generation."""

    n: int = 1
    """Number of texts to choose from. 1 turns the choice off."""
    by: str | None = None
    """Name of the score. Default: cookable for recipe prompts, otherwise likelihood."""

    def __post_init__(self) -> None:
        if self.by is not None and self.by not in (LIKELIHOOD, *NAMES):
            raise ConfigError(
                f"{self.by!r} is not a score for choosing texts. Use {LIKELIHOOD} or, for recipes, "
                f"one of {', '.join(NAMES)}."
            )
        if self.n < 1:
            raise ConfigError(
                f"{argument('best_of')} must be at least 1, not {self.n}."
            )
        if self.by is not None and self.n == 1:
            raise ConfigError(
                f"{self.by} needs several texts per prompt to choose from, but only one is "
                f"generated. Add {argument('best_of=8')}, or leave the score out."
            )

    def check(self, options: GenerationOptions, *, n_results: int) -> None:
        """Check that the `n_results` best texts of a prompt can be chosen.

        Raises:
            ConfigError: All texts would be the same, or there are too few.
        """
        if self.n == 1:
            return
        if options.is_greedy:
            raise ConfigError(
                f"{argument('best_of')} is {self.n}, but at {argument('temperature')} 0 all "
                f"{self.n} texts would be the same. Use a temperature such as 0.7, or leave "
                f"{argument('best_of')} out."
            )
        if n_results > self.n:
            raise ConfigError(
                f"{argument('n')} is {n_results}, but {argument('best_of')} generates only "
                f"{self.n} texts to choose from. {argument('n')} may be up to {self.n}."
            )

    def check_prompts(
        self, prompts: Iterable[str], *, in_json: bool, knows_recipes: bool = True
    ) -> None:
        """Check that the texts for each prompt will have the requested score.

        Args:
            prompts: Prompts in the format that the model expects.
            in_json: Whether the answers follow a JSON schema. Recipe scores do not read JSON.
            knows_recipes: Whether the model was trained on recipes.

        Raises:
            ConfigError: A recipe score is requested for an answer that is not a recipe.
        """
        if self.by in (None, LIKELIHOOD):
            return
        for prompt in prompts:
            if asks_for_a_recipe(prompt, knows_recipes=knows_recipes) and not in_json:
                continue
            reason = "is answered in JSON" if in_json else "does not ask for a recipe"
            raise ConfigError(
                f"{self.by} is a score of recipes, and the prompt {prompt[:100]!r} {reason}. Use "
                f"{LIKELIHOOD}, which every text has, or leave the score out."
            )

    def rank(
        self,
        prompt: str,
        texts: Sequence[str],
        logprobs: Sequence[Sequence[float]],
        *,
        in_json: bool = False,
        knows_recipes: bool = True,
    ) -> list[tuple[int, Chosen]]:
        """Rank the texts for a prompt. Return their indices and scores, the best first.

        Texts without the score come last. If no text has the score, the likelihood replaces it.
        Equal scores are ranked by likelihood, then by index.

        Args:
            prompt: Prompt in the format that the model expects.
            texts: Texts that the model generated for the prompt.
            logprobs: Log-probabilities of each text's tokens.
            in_json: See `check_prompts`.
            knows_recipes: See `check_prompts`.
        """
        asks_recipe = asks_for_a_recipe(prompt, knows_recipes=knows_recipes)
        is_recipe = asks_recipe and not in_json
        by = self.by or ("cookable" if is_recipe else LIKELIHOOD)
        likelihoods = [fmean(values) for values in logprobs]
        metrics: list[Mapping[str, float]] = [{} for _ in texts]
        if by != LIKELIHOOD:
            metrics = [
                text_metrics(prompt, text, knows_recipes=knows_recipes)
                for text in texts
            ]
        scores = [values.get(by) for values in metrics]
        if all(score is None for score in scores):
            by = LIKELIHOOD
            scores = [*likelihoods]
        sign = -1.0 if metric_named(by).better == "lower" else 1.0

        def sort_key(i: int) -> tuple[bool, float, float]:
            """Return a key that is smaller for a better text."""
            score = scores[i]
            return (score is None, -sign * (score or 0.0), -likelihoods[i])

        mean = fmean(score for score in scores if score is not None)
        ranking = sorted(range(len(texts)), key=sort_key)
        return [(i, Chosen(by, scores[i], mean, len(texts))) for i in ranking]
