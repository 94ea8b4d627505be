"""Evaluation of a run or a model on held-out data, and of texts from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toque.config import load_config
from toque.cooking.prompts import ASKS_FOR
from toque.errors import CheckpointError, ConfigError
from toque.reporter import SILENT, Reporter
from toque.storage.no_follow import refuse_links
from toque.workflows.configure import Configured, configure
from toque.workflows.results import Model, existing_folder

if TYPE_CHECKING:
    from toque.evaluation.text_scores import Scores
    from toque.workflows.score import Evaluation


def evaluate(
    run_or_model: Model,
    config: Configured | None = None,
    *,
    trust_code: bool = False,
    reporter: Reporter = SILENT,
) -> Evaluation:
    """Score a run or a model folder on held-out data; write evaluation.json when it is a run.

    Args:
        run_or_model: what is scored.
        config: whose data to evaluate on; a run's own when None.
        trust_code: import the metrics that the run's own configuration names, as its maker wished.
        reporter: hears of progress.

    Returns:
        Its `metrics` are every score by name; as a text it is a table.

    Raises:
        ConfigError: no run folder and no configuration, or code that nobody vouches for.
        DataError: no prepared store, or one of another tokenizer.
    """
    folder = existing_folder(run_or_model)
    own = folder / "config.yaml"
    if own.exists():
        refuse_links(folder, CheckpointError)
    if config is None and not own.exists():
        raise ConfigError(
            f"{folder} is not a run folder, so it does not say what to evaluate on. Give a "
            "configuration: evaluate(model, config)."
        )
    settings = configure(load_config(own, trust_code=False).config if config is None else config)
    if trust_code:
        settings = settings.with_foreign_code({})
    with reporter.working("loading torch"):
        from toque.workflows.score import score_model

    result = score_model(folder, settings, reporter)
    if own.exists():
        result.write(folder)
    return result


def score(
    texts: Sequence[str],
    references: Sequence[str] | None = None,
    *,
    prompts: Sequence[str] | None = None,
) -> Scores:
    """Score texts, whoever wrote them, as `evaluate` scores those of a model.

    Args:
        texts: what was written.
        references: for each text the one it should be like; ROUGE, BLEU and chrF need it.
        prompts: for each text what it answers; recipes are scored where one was asked for. Without
            them every text is taken for a recipe, of ingredients that nobody named.

    Returns:
        Its `metrics` are every score by its name in evaluation.json; as a text it is a table.

    Raises:
        ConfigError: no text, or not one reference and one prompt for each.
    """
    for name, column in (("texts", texts), ("references", references), ("prompts", prompts)):
        if column is not None and (isinstance(column, str) or not 0 < len(column) == len(texts)):
            found = "one text" if isinstance(column, str) else f"a list of {len(column):,}"
            raise ConfigError(f"{name} is {found}. Give lists of one length, of a text or more.")
    from toque.evaluation.text_samples import Prompt, scored
    from toque.evaluation.text_scores import TextScores

    scores, n = TextScores(), len(texts)
    held: Sequence[str | None] = references or [None] * n
    asked = zip(texts, prompts or [ASKS_FOR] * n, held, strict=True)
    scores.add(scored(Prompt((), p, reference), text) for text, p, reference in asked)
    return scores.result()
