"""Preference pairs without a person: a better text and a weaker text of the model per prompt.

The better text is the target in the training data (self-play, Chen et al. 2024, arXiv 2401.01335),
or the best of several texts of the model.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, get_args

from toque.config import RunConfig
from toque.config.dump import flow
from toque.cooking.prompts import asks_for_a_recipe
from toque.cooking.recipe_scores import NAMES, text_metrics
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError, DataError, argument, in_shell
from toque.evaluation.best_of import LIKELIHOOD, BestOf
from toque.models.generation.options import (
    GenerationOptions,
    Precision,
    refuse_below,
    refuse_non_numbers,
)
from toque.models.loading.provenance import Provenance
from toque.reporter import SILENT, Reporter
from toque.sources.preference_pairs import compare_answers
from toque.storage.atomic import atomic_write, disk_faults
from toque.user_paths import named_path
from toque.workflows.first_config.tuning import tuned_lr
from toque.workflows.prepared_store import open_store
from toque.workflows.results import Model
from toque.workflows.saved_steps import config_of, run_of
from toque.workflows.trained_model.folders import check_model
from toque.workflows.trained_model.prompt_reader import ReadPrompt, read_prompts
from toque.workflows.trained_model.training_record import read_record, writes_recipes

if TYPE_CHECKING:
    from toque.evaluation.rewards import Rewards
    from toque.workflows.inference.open_model import OpenedModel
    from toque.workflows.inference.pair_texts import Prompt, Text

Chosen = Literal["written", "best"]
"""Origin of the chosen text: written by a person, or the best of the model's texts."""
CUT: Final = "the chosen text reached the maximum length"
BETTER_CUT: Final = "all better texts reached the maximum length"
BLANK: Final = "a text is blank"
EQUAL_SCORES: Final = "all texts have the same score"
NOT_A_RECIPE: Final = "the prompt does not ask for a recipe"
_SAMPLES: Final[Mapping[Chosen, int]] = {"written": 1, "best": 8}
"""Default number of texts per prompt."""
_BATCH: Final = 16
"""Pairs per update in the printed configuration."""


@dataclass(frozen=True)
class PairsFile:
    """A file with preference pairs."""

    path: Path
    pairs: int
    """Number of pairs in the file."""
    prompts: int
    """Number of prompts that were read."""
    dropped: Mapping[str, int]
    """Number of dropped prompts by reason."""
    scores: Mapping[str, tuple[float, float]]
    """Mean scores of the chosen and the rejected texts, by the name of the score."""
    usage: str
    """Configuration that learns from the file, and the command that uses it."""

    def __str__(self) -> str:
        """Return the counts, the mean scores, and the usage of the file."""
        lines = [f"{self.path}: {self.pairs:,} pairs from {self.prompts:,} prompts"]
        lines += [f"  dropped {n:,}: {reason}" for reason, n in self.dropped.items()]
        lines += [
            f"  mean {name}: chosen {chosen:.3f}, rejected {rejected:.3f}"
            for name, (chosen, rejected) in self.scores.items()
        ]
        return "\n".join([*lines, "", self.usage])


def pairs(
    run: Model,
    to: str | Path,
    *,
    file: str | Path | None = None,
    chosen: Chosen | None = None,
    samples: int | None = None,
    by: str | None = None,
    limit: int = 1000,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    precision: Precision = "float32",
    device: str = "auto",
    replace: bool = False,
    reporter: Reporter = SILENT,
) -> PairsFile:
    """Write preference pairs from texts of a run's model, for `objective: {kind: dpo}`.

    The same call writes the same file. A text depends only on the weights, the seed and its prompt.

    Args:
        run: The run or checkpoint that generates.
        to: The file to write, in JSON lines with the fields prompt, chosen and rejected.
        file: A file with prompts, one per line, or JSON lines with the fields `prompt` and,
            optionally, `target`. None means the training examples of the run, in random order.
        chosen: written: the target of the prompt. best: the best text of the model. None means
            written if all prompts have a target.
        samples: Texts per prompt. The one with the lowest score is rejected. None means 1 for
            written and 8 for best.
        by: The score that ranks the texts: a recipe score, likelihood, or a function of your own as
            module:function. None means cookable if the prompt asks for a recipe, otherwise
            likelihood.
        limit: Maximum number of prompts.
        max_new_tokens: Longest text, in tokens. None means the longest target in training.
        temperature: Divisor of the logits. 0 always takes the most likely token.
        top_p: Sample from the most likely tokens that together have this probability.
        seed: Seed of the texts and of the order of the training examples.
        precision: Precision of the matmuls, as for `generate`.
        device: auto (the GPU, if present), cpu, cuda or cuda:N.
        replace: Overwrite an existing file.
        reporter: Receives the progress.

    Returns:
        The numbers of pairs and of dropped prompts, and a configuration that learns from the file.

    Raises:
        ConfigError: The model has no prompts, the file exists or is not writable, or an argument is
            not allowed.
        DataError: No pair can be made, or the store does not exist.
        CheckpointError: The run has no checkpoint.
    """
    refuse_non_numbers(limit=limit)
    refuse_below(1, limit=limit)
    folder, target = check_model(run), named_path(to)
    record = _read_run_record(folder)
    _check_target(target, replace=replace)
    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        no_repeat_ngram_size=0,
        seed=seed,
        precision=precision,
    )
    lines = None if file is None else _read_lines(file, record)
    has_targets = all(line.target is not None for line in lines or ())
    choice = _Choice.check(chosen, samples, by, options, has_targets=has_targets)

    with reporter.working(f"reading {folder}"):
        # Torch is loaded only after all arguments are checked.
        from toque.workflows.inference.open_model import open_to_generate
        from toque.workflows.inference.pair_texts import (
            encode_lines,
            generate_texts,
            sample_prompts,
        )

        rewards = choice.find_rewards()
        opened = open_to_generate(folder, precision, device=device, reporter=reporter)
        assert opened.config is not None, "`_read_run_record` refuses other models"
        store = None if lines is not None else _open_store(opened, opened.config)
    dropped: Counter[str] = Counter()
    with reporter.working("reading the prompts"):
        if store is None:
            prompts = encode_lines(lines or (), opened)[:limit]
        else:
            problem_of = partial(choice.problem_of, knows_recipes=record.knows_recipes)
            prompts = sample_prompts(store, opened, problem_of, dropped, limit, seed)

    rows: list[dict[str, Any]] = []
    ranker = _Ranker(choice.by, rewards, knows_recipes=record.knows_recipes)
    for prompt, texts in generate_texts(
        opened, prompts, choice.samples, options, reporter
    ):
        row = _make_row(prompt, ranker.rank(prompt, texts), choice.chosen)
        if isinstance(row, str):
            dropped[row] += 1
        else:
            rows.append(row)
    _refuse_no_rows(rows, dropped)
    _write(rows, target, replace=replace)
    return PairsFile(
        path=target,
        pairs=len(rows),
        prompts=len(rows) + dropped.total(),
        dropped=dict(dropped),
        scores=_mean_scores(rows),
        usage=_describe_usage(folder, opened, store, target, len(rows)),
    )


def _read_run_record(folder: Path) -> Provenance:
    """Read the record of a run or checkpoint.

    Raises:
        ConfigError: The folder is not a run, or its model was trained without prompts.
    """
    if not config_of(folder).is_file():
        raise ConfigError(
            f"{folder} is not a run folder (config.yaml), so it has no training examples. Name a "
            "run such as runs/my, or one of its checkpoints."
        )
    record = read_record(folder)
    if record.form in ("documents", "gaps"):
        raise ConfigError(
            f"{folder} was trained on {record.form}, which have no prompts, but a preference pair "
            "has two answers to a prompt. Name a run with prompts and targets, with conversations "
            "or with recipes."
        )
    return record


def _check_target(path: Path, *, replace: bool) -> None:
    """Check that the file can be written, before texts are generated.

    Raises:
        ConfigError: The file exists, or its name or its folder cannot be used.
    """
    name = argument(f"to={path}")
    if path.suffix != ".jsonl":
        raise ConfigError(
            f"{name}: the file has JSON lines, so its name must end with .jsonl, e.g. "
            f"{path.stem or 'pairs'}.jsonl."
        )
    if path.is_dir() or (path.exists() and not replace):
        raise ConfigError(
            f"{name} already exists. Name another file, or overwrite a file with "
            f"{argument('replace=True')}."
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{name}: the folder {path.parent} does not exist, or you may not write to it. Create "
            "it, or name a file in another folder."
        )


def _read_lines(file: str | Path, record: Provenance) -> list[ReadPrompt]:
    """Read a file of prompts in the model's training format."""
    return read_prompts(
        (), file, task="write", raw=False, recipes=writes_recipes(record)
    )


@dataclass(frozen=True)
class _Choice:
    """Origin of the two texts of a pair."""

    chosen: Chosen
    samples: int
    by: str | None

    @classmethod
    def check(
        cls,
        chosen: Chosen | None,
        samples: int | None,
        by: str | None,
        options: GenerationOptions,
        *,
        has_targets: bool,
    ) -> Self:
        """Complete the arguments of `pairs` with their defaults.

        Raises:
            ConfigError: A value is not allowed, or two values cannot be combined.
        """
        if chosen is None:
            chosen = "written" if has_targets else "best"
        if chosen not in get_args(Chosen):
            raise ConfigError(
                f"{argument('chosen')} must be {' or '.join(get_args(Chosen))}, not {chosen!r}."
            )
        if chosen == "written" and not has_targets:
            raise ConfigError(
                f"{argument('chosen=written')} needs a text for each prompt, but the file has "
                'prompts without a target. Write {"prompt": "...", "target": "..."} on each line, '
                f"or use {argument('chosen=best')}."
            )
        refuse_non_numbers(samples=samples)
        samples = _SAMPLES[chosen] if samples is None else samples
        if samples < 1 or (chosen == "best" and samples < 2):
            raise ConfigError(
                f"{argument('samples')} must be at least 1, and at least 2 for "
                f"{argument('chosen=best')}, which compares texts, not {samples}."
            )
        if samples > 1 and options.is_greedy:
            raise ConfigError(
                f"{argument('samples')} is {samples}, but at {argument('temperature')} 0 all texts "
                "of a prompt would be the same. Use a temperature such as 1.0."
            )
        choice = cls(chosen, samples, by)
        if not choice.has_own_function:
            BestOf(2, by)  # refuses an unknown score
        return choice

    @property
    def has_own_function(self) -> bool:
        """True if the score is a function of the user."""
        return self.by is not None and ":" in self.by

    def find_rewards(self) -> Rewards | None:
        """Import the user's function. Return None for any other score.

        The name comes from the command line or a program, never from the run, so it is trusted.

        Raises:
            ConfigError: The function cannot be imported.
        """
        if self.by is None or not self.has_own_function:
            return None
        from toque.evaluation.rewards import Rewards, find_reward  # loads torch

        function = find_reward(self.by, {}, setting=argument("by"))
        return Rewards({self.by: function}, {self.by: 1.0})

    def problem_of(self, prompt: Prompt, *, knows_recipes: bool) -> str:
        """Return the reason for dropping a prompt before texts are generated, or ""."""
        if self.chosen == "written" and prompt.is_cut:
            return CUT
        if self.by in NAMES and not asks_for_a_recipe(
            prompt.text, knows_recipes=knows_recipes
        ):
            return NOT_A_RECIPE
        return ""


def _open_store(opened: OpenedModel, config: RunConfig) -> TokenStore:
    """Open the store of a run, and check that it has the model's tokenizer."""
    # The run compared its sources when it began.
    store = open_store(config, sources=False)
    opened.check_tokenizer(store)
    return store


class _Ranking(NamedTuple):
    """Texts of a prompt with their scores, the best first."""

    by: str
    """Name of the score."""
    texts: list[tuple[Text, float | None]]
    target_score: float | None
    """Score of the written text. None without a written text, or if it has no score."""


@dataclass(frozen=True)
class _Ranker:
    """Comparison of the texts of a prompt by a score."""

    by: str | None
    rewards: Rewards | None
    """Function of the user, if `by` names one."""
    knows_recipes: bool

    def rank(self, prompt: Prompt, texts: Sequence[Text]) -> _Ranking:
        """Rank the texts of a prompt.

        Raises:
            ConfigError: The user's function fails.
        """
        if self.rewards is not None:
            return self._rank_by_function(self.rewards, prompt, texts)
        ranked = BestOf(2, self.by).rank(
            prompt.text,
            [text.text for text in texts],
            [text.logprobs for text in texts],
            knows_recipes=self.knows_recipes,
        )
        _, best = ranked[0]
        target_score = None
        if prompt.target is not None and best.by != LIKELIHOOD:
            metrics = text_metrics(
                prompt.text, prompt.target, knows_recipes=self.knows_recipes
            )
            target_score = metrics.get(best.by)
        scored = [(texts[number], score.score) for number, score in ranked]
        return _Ranking(best.by, scored, target_score)

    def _rank_by_function(
        self, rewards: Rewards, prompt: Prompt, texts: Sequence[Text]
    ) -> _Ranking:
        """Rank texts by the user's function. Texts with equal scores keep their order."""
        contents = [text.text for text in texts]
        if prompt.target is not None:
            contents.append(prompt.target)
        scores = rewards.score(
            [prompt.text for _ in contents],
            contents,
            [prompt.target or "" for _ in contents],
        ).tolist()
        target_score = None if prompt.target is None else scores[-1]
        scored = list(zip(texts, scores[: len(texts)], strict=True))
        scored.sort(key=lambda item: -item[1])
        return _Ranking(self.by or "", scored, target_score)


def _make_row(
    prompt: Prompt, ranking: _Ranking, origin: Chosen
) -> dict[str, Any] | str:
    """Make the row of a pair, or return the reason for dropping its prompt."""
    worst, worst_score = ranking.texts[-1]
    if origin == "written" and prompt.target is not None:
        chosen, chosen_score = prompt.target, ranking.target_score
    else:
        if ranking.texts[0][1] == worst_score:
            return EQUAL_SCORES
        complete = [scored for scored in ranking.texts if not scored[0].is_cut]
        if not complete or complete[0][1] == worst_score:
            return BETTER_CUT
        best, chosen_score = complete[0]
        chosen = best.text

    rejected = worst.text
    if not chosen.strip() or not rejected.strip():
        return BLANK
    if reason := compare_answers(chosen, rejected):
        return reason
    has_messages = not isinstance(prompt.content, str)
    return {
        "prompt": prompt.content,
        "chosen": _message(chosen) if has_messages else chosen,
        "rejected": _message(rejected) if has_messages else rejected,
        "score": ranking.by,
        "chosen_score": _rounded(chosen_score),
        "rejected_score": _rounded(worst_score),
    }


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 4)


def _mean_scores(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, tuple[float, float]]:
    """Compute the mean scores of the chosen and rejected texts of the pairs with both scores."""
    by_name: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        scores = (row["chosen_score"], row["rejected_score"])
        if None not in scores:
            by_name[row["score"]].append(scores)
    return {
        name: (fmean(chosen), fmean(rejected))
        for name, scores in by_name.items()
        for chosen, rejected in [zip(*scores, strict=True)]
    }


def _refuse_no_rows(rows: Sequence[object], dropped: Mapping[str, int]) -> None:
    """Raise a DataError if no pair was made."""
    if rows:
        return
    reasons = "; ".join(f"{reason} ({n:,})" for reason, n in dropped.items())
    raise DataError(
        f"No pair was made, so no file was written. Reasons and numbers of prompts: {reasons}. Use "
        f"another score ({argument('by')}), more texts per prompt ({argument('samples')}), a "
        f"larger {argument('max_new_tokens')}, or other prompts ({argument('file')})."
    )


def _write(rows: Sequence[object], path: Path, *, replace: bool) -> None:
    """Write rows as JSON lines, atomically.

    Raises:
        ConfigError: The file was created meanwhile.
        DataError: The disk is full, or the folder is not writable.
    """
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    # A model may generate half a surrogate pair, which is not valid UTF-8.
    data = "".join(lines).encode("utf-8", "replace")
    try:
        with disk_faults(path.parent, "writing the pairs", setting=argument("to")):
            atomic_write(path, data, new=not replace)
    except FileExistsError:
        _check_target(path, replace=replace)
        raise


def _peak_lr(opened: OpenedModel) -> float:
    """Return half of the rate that `init` writes for the same model."""
    return tuned_lr(opened.model.num_parameters(), adapted=False) / 2


def _describe_usage(
    folder: Path,
    opened: OpenedModel,
    store: TokenStore | None,
    path: Path,
    n_pairs: int,
) -> str:
    """Return the configuration of a run that learns from the pairs, and how to use it."""
    config = opened.config
    assert config is not None, "`_read_run_record` refuses other models"
    run = run_of(folder) or folder
    start = run / "model"
    advice = ""
    is_complete = (start / "config.json").is_file() and opened.step is None
    if not is_complete:  # an adapter, or a checkpoint of an unfinished run
        start = run.with_name(f"{run.name}-model")
        step = "" if opened.step is None else f" --step {opened.step}"
        advice = (
            "First write the complete model:\n\n"
            f"toque export {in_shell(run)} --to {in_shell(start)}{step}\n\n"
        )

    settings = config.data.model_dump(mode="json")
    if store is not None:
        settings |= store.manifest.settings  # the limits as numbers, not auto
    names = ["max_prompt_tokens", "max_target_tokens"]
    if opened.provenance.form == "conversations":
        names.append("chat_date")
    limits = "".join(f"  {name}: {flow(settings[name])}\n" for name in names)
    batch = max(1, min(_BATCH, n_pairs // 4))
    return (
        f"{advice}To learn from the pairs, save these lines as better.yaml, and run "
        "`toque train better.yaml`:\n\n"
        f"run_dir: {flow(f'{run}-dpo')}\n"
        f"model: {flow({'family': 'auto', 'start_from': str(start)})}\n"
        "data:\n"
        f"  sources: [{flow({'path': str(path)})}]\n"
        f"  store: {flow(f'{config.data.store}-pairs')}\n"
        f"{limits}"
        "objective: {kind: dpo, beta: 0.1}\n"
        f"optim: {{peak_lr: {_peak_lr(opened):.1g}}}\n"
        f'train: {{batch: "{batch} examples", stop_after: "1 epoch"}}'
    )
