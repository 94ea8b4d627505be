"""Text of a first configuration: its settings, with a comment for each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from toque.config import RunConfig
from toque.config.dump import flow
from toque.config.json_schema import SCHEMA_FILE
from toque.config.schema import TRAINED, ModelConfig
from toque.config.schema_methods import ObjectiveConfig
from toque.errors import in_shell
from toque.runs.typical_speeds import GENERATION_SHARE
from toque.sources.decompress import UTF_8
from toque.units import Duration
from toque.workflows.first_config.init_base import MeasuredBase
from toque.workflows.first_config.model_sizes import POSITIONS
from toque.workflows.first_config.sizing import (
    EVALUATING,
    Choice,
)
from toque.workflows.first_config.source_survey import (
    CONVERSATIONS,
    DOCUMENTS,
    PAIRS,
    PREFERENCES,
    RECIPES,
    TOKENS,
    Survey,
    kinds_of,
    total_records,
    total_tokens,
)
from toque.workflows.first_config.speed_trial import WRITTEN_AT_ONCE
from toque.workflows.first_config.tuning import (
    FORWARD_PASSES_PER_UPDATE,
    Tuning,
    tuned_lr,
)

HELD_OUT_SHARE: Final = 0.05
"""Fraction of the examples to hold out, if no source is held out."""
_EVALUATIONS: Final = 10
"""Number of evaluations in a run."""
_MAX_LOST_MINUTES: Final = 10
"""Minutes of training that a killed run may lose."""
_MAX_HELD_OUT: Final = 512
_MIN_HELD_OUT: Final = 32
_MAX_FINAL_TEXTS: Final = 16
_LR_OF_OBJECTIVE: Final = {"dpo": 0.1, "grpo": 0.4}
"""Peak rate as a fraction of the rate for imitation. For pairs a guess: usual rates are 1e-6 to
1e-5 for all weights (docs/guides/learn-from-preferences.md). For rewards from lab/cookable.md."""
_COMMENT_COLUMN: Final = 29
"""Column of the comments at the ends of lines."""

Plan = Choice | Tuning | None
"""Plan for the available time, or None if the base model was not measured."""


def render_config(
    draft: RunConfig,
    survey: Survey,
    file: Path,
    base: MeasuredBase,
    plan: Plan,
    batch: str,
) -> str:
    """Return the text of `file`, with comments on the settings that users change most."""
    sections = (
        _render_head(file),
        _render_model(draft.model, base, plan),
        _render_data(draft, survey, file, base),
        *_render_objective(draft.objective),
        _render_optim(draft.objective, base, plan),
        _render_train(draft.train.stop_after, plan, batch),
        _render_evaluation(survey, plan),
    )
    lines = "\n".join(sections).splitlines()
    return "".join(f"{_align_comment(line)}\n" for line in lines)


def _render_head(file: Path) -> str:
    return f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
# Written by `toque init`. Edit it as you like. Settings that are not in this file have defaults.
#   toque show {in_shell(file)}      print every setting and its origin
#   toque train {in_shell(file)}     prepare the data and train, or continue a stopped run
# docs/reference/configuration.md explains every setting.

run_dir: {flow(f"runs/{file.stem}")}   # checkpoints, metrics and the finished model
"""


def _render_model(model: ModelConfig, base: MeasuredBase, plan: Plan) -> str:
    if isinstance(plan, Choice):
        return _render_new_model(plan, model.tokenizer)
    tokenizer = ""
    if model.tokenizer != "auto":
        tokenizer = f"  tokenizer: {flow(model.tokenizer)}   # your choice\n"
    return f"""\
model:
  family: auto   # read from the checkpoint
  start_from: {flow(model.start_from)}   # initial weights
{tokenizer}\
{base.adapter}
"""


def _render_new_model(choice: Choice, tokenizer: str) -> str:
    size = choice.size
    setting = choice.tokenizer.setting if tokenizer == "auto" else tokenizer
    origin = "trained on your data" if setting.startswith(TRAINED) else "your choice"
    heads = size.shape["num_attention_heads"]
    return f"""\
model:  # {choice.model}, from random weights
  family: llama   # or t5, gpt2, neox
  shape: {{hidden_size: {size.width}, num_hidden_layers: {size.layers},
          num_attention_heads: {heads}, num_key_value_heads: {heads},
          intermediate_size: {size.inner}, max_position_embeddings: {POSITIONS},
          tie_word_embeddings: true}}
  tokenizer: {flow(setting)}   # {origin}
  # To continue from an existing model, replace family, shape and tokenizer with:
  # {{family: auto, start_from: FOLDER-OR-HUB-NAME}}
"""


def _render_data(
    draft: RunConfig, survey: Survey, file: Path, base: MeasuredBase
) -> str:
    data = draft.data
    columns = data.sources[0].model_dump(mode="json")["columns"]
    column_line = f"\n      columns: {flow(columns)}   # your choice" if columns else ""
    sources = "".join(
        f"\n    - path: {flow(source.path)}  # {source}{column_line}"
        for source in survey
    )
    encoding = ""
    if data.encoding != UTF_8:
        encoding = f"  encoding: {flow(data.encoding)}   # your choice\n"
    held_out = (
        f"  validation_fraction: {HELD_OUT_SHARE}   # held out for the evaluation\n"
    )
    if data.validation:
        validation = "".join(
            f"\n    - path: {flow(source.path)}{column_line}"
            for source in data.validation
        )
        held_out = f"  validation:   # held out for the evaluation{validation}\n"
    return f"""\
data:
  sources:{sources}
{encoding}\
  store: {flow(f"stores/{file.stem}")}   # prepared data, for all runs with these data settings
{held_out}{base.data}{_render_optional_data(kinds_of(survey), base)}"""


def _render_objective(objective: ObjectiveConfig) -> list[str]:
    """Write the section of the objective, unless it is the default."""
    if objective.kind == "dpo":
        return ["objective: {kind: dpo}   # learn from preference pairs\n"]
    if not objective.learns_from_rewards:
        return []
    section = f"""\
objective:   # the model writes, scores rate its texts, and it learns from the scores
  kind: {objective.kind}   # or best_of
  rewards: {flow(objective.rewards)}   # scores and their weights
  samples: {objective.samples}   # texts per prompt
  sft_weight: {objective.sft_weight:g}   # weight of imitation, which keeps the held-out loss low
"""
    return [section]


def _render_optional_data(kinds: set[str], base: MeasuredBase) -> str:
    """Write optional lines of the data section, each commented out."""
    dedup = "  # dedup: near   # also drop nearly equal texts\n"
    if kinds <= {RECIPES, ""}:
        return f"""\
  # min_quality: 0.6   # leave out recipes whose quality score is lower
{dedup}  # tasks: [write, difficulty, nutrition]   # also learn to judge recipes
"""
    if PREFERENCES in kinds:
        return f"{dedup}  # on_overlong: drop   # drop long pairs instead of cutting them\n"
    if CONVERSATIONS in kinds:
        loss_on = """\
  # loss_on: last_answer   # train only on the last answer of each conversation
"""
        template = ""
        if not base.data:
            template = """\
  # chat_template: chatml   # the default is the template of the tokenizer
"""
        return f"{dedup}{loss_on}{template}"
    if PAIRS in kinds:
        return f"{dedup}  # on_overlong: drop   # drop long pairs instead of cutting them\n"
    return dedup


def _render_optim(objective: ObjectiveConfig, base: MeasuredBase, plan: Plan) -> str:
    if isinstance(plan, Choice):
        optimizer = "  name: muon   # for matrices, AdamW for the rest\n"
        peak_lr = plan.size.peak_lr
        schedule = "linear"
        weight_decay = (
            f"  weight_decay: {plan.decay:g}   # more for texts that repeat often\n"
        )
    else:
        optimizer = weight_decay = ""
        peak_lr = tuned_lr(base.parameters, adapted=base.is_adapted)
        share = _LR_OF_OBJECTIVE.get(objective.kind, 1.0)
        peak_lr = float(f"{share * peak_lr:.1g}")
        schedule = "cosine"
    return f"""\
optim:
{optimizer}  peak_lr: {peak_lr}   # lower it if the loss jumps, raise it if the loss hardly moves
  schedule: {schedule}   # warm up for 3 % of the run, then decay to 0
{weight_decay}"""


def _render_train(total: Duration, plan: Plan, batch: str) -> str:
    length = f"  stop_after: {flow(str(total))}   # with preparation and scores; or 3 epochs\n"
    if plan is not None and plan.passes.ends_early:
        limit = flow(str(Duration(total.amount, total.unit)))
        reason = f"time is enough for {plan.passes.possible:,.0f}, but they would be memorised"
        length = f"""\
  stop_after: {plan.passes.useful:g} epochs   # {reason}
  time_limit: {limit}   # for the entire command, in case the machine becomes slower
"""
    return f"""\
train:
{length}  batch: {batch}   # per update
  evaluate_every: {100 // _EVALUATIONS} %
  save_every: {_choose_save_interval(total)}   # a killed run continues from the last save
  # early_stopping: {{patience: 3}}   # stop when the held-out loss no longer falls
"""


def _choose_save_interval(stop_after: Duration) -> str:
    """Return a tenth of the run, but at most `_MAX_LOST_MINUTES`."""
    tenth = (stop_after.seconds or 0.0) / 60 / 10
    return f"{_MAX_LOST_MINUTES} minutes" if tenth > _MAX_LOST_MINUTES else "10 %"


def _render_evaluation(survey: Survey, plan: Plan) -> str:
    held_out = _render_held_out(survey, plan)
    kinds = kinds_of(survey)
    if kinds <= {DOCUMENTS, TOKENS}:
        return f"""\
evaluation:
{held_out}  generate: 0   # plain texts have no prompts
"""
    prompt = '"your own question"'
    if kinds <= {RECIPES, ""}:
        prompt = '"Lentil soup: red lentils, carrots, cumin"'
    affordable, between = _count_affordable_texts(survey, plan)
    final = max(1, affordable)
    final_time = _comment_on_time(final == affordable)
    return f"""\
evaluation:
{held_out}\
  generate: {final}   # texts to generate and score at the end{final_time}
  texts: {between}   # texts to generate per evaluation{_comment_on_time(True)}
  # prompts: [{prompt}]   # for texts at every evaluation
"""


def _render_held_out(survey: Survey, plan: Plan) -> str:
    """Write the line of `evaluation.max_examples`, limited by the time for held-out losses."""
    if plan is None:
        return ""
    share = FORWARD_PASSES_PER_UPDATE * EVALUATING / _EVALUATIONS
    affordable = share * plan.tokens / _tokens_per_record(survey)
    n = max(_MIN_HELD_OUT, round(min(_MAX_HELD_OUT, affordable)))
    comment = f"held-out texts per evaluation{_comment_on_time(n <= affordable)}"
    return f"  max_examples: {n}   # {comment}\n"


def _count_affordable_texts(survey: Survey, plan: Plan) -> tuple[int, int]:
    """Return `evaluation.generate` and `evaluation.texts`, limited by the time for texts."""
    if plan is None:
        return _MAX_FINAL_TEXTS, WRITTEN_AT_ONCE
    seconds = plan.tokens / plan.rate
    writing_rate = plan.writing or GENERATION_SHARE * plan.rate
    tokens = EVALUATING * seconds * writing_rate
    affordable = math.floor(tokens / _tokens_per_record(survey))
    per_evaluation = affordable // _EVALUATIONS
    return min(_MAX_FINAL_TEXTS, affordable), min(WRITTEN_AT_ONCE, per_evaluation)


def _comment_on_time(fits: bool) -> str:  # noqa: FBT001 - the name is the argument
    """Return the end of a comment about a count: whether the work `fits` into the planned time."""
    if fits:
        return f": at most {EVALUATING:.0%} of the time"
    return f", the useful minimum: more than {EVALUATING:.0%} of the time"


def _tokens_per_record(survey: Survey) -> float:
    """Return the mean tokens per record, or 1 if they are unknown."""
    return total_tokens(survey) / max(1, total_records(survey)) or 1.0


def _align_comment(line: str) -> str:
    """Move the comment at the end of a line to the common column."""
    code, mark, comment = line.rpartition("  # ")
    if not code.strip():
        return line
    return f"{code.rstrip():{_COMMENT_COLUMN}} {mark.strip()} {comment}"
