"""Best-of-n: what choosing the best of 1, 2, 4, 8 and 16 texts gains, and what it costs.

    python bench/quality/best_of.py --model RUN [--prompts 200] [--by ingredients_used]
    python bench/quality/best_of.py --model MODEL --file prompts.jsonl

The first held-out prompts of RUN's own store, or those of a file, are written n times each and the
best text of each is scored as `toque evaluate` scores texts: every recipe score with its 95 %
interval by resampling prompts. The n texts of a prompt are drawn anew for each n. Seconds are of
writing and choosing alone, and tokens those of all texts, chosen or not. Quality: the score that is
chosen by gets no worse from the least n to the largest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from toque.data.store.token_store import TokenStore
from toque.evaluation.best_of import LIKELIHOOD, BestOf
from toque.evaluation.text_samples import Prompt, held_out_prompts, scored
from toque.evaluation.text_scores import TextScores
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.runs.history import metric_named
from toque.workflows.asking import read_prompts, writes_recipes
from toque.workflows.inference.open_model import OpenedModel, open_model


def asked(opened: OpenedModel, a: argparse.Namespace) -> list[Prompt]:
    """The prompts of the file, else the first that are held out in the run's store."""
    if a.file is not None:
        record = opened.provenance
        texts = read_prompts((), a.file, task="write", raw=False, recipes=writes_recipes(record))
        ids = [opened.prompt_ids(text, record.form) for text in texts[: a.prompts]]
        return [Prompt(tuple(one), text) for one, text in zip(ids, texts, strict=False)]
    if opened.config is None:
        raise harness.Skipped(f"{a.model} is no run folder; name prompts with --file")
    data = opened.config.data
    return held_out_prompts(TokenStore.open(data.store), a.prompts, data)[: a.prompts]


def best_texts(
    opened: OpenedModel, prompts: Sequence[Prompt], best: BestOf, options: GenerationOptions
) -> dict[str, Any]:
    """The best of `best.n` texts for each prompt, and the tokens of all of them."""
    codec, n = opened.codec, best.n
    logprobs = [list[float]() for _ in range(n * len(prompts))]
    written = generate(
        opened.model,
        [prompt.ids for prompt in prompts for _ in range(n)],
        options,
        eos_id=codec.eos_id,
        pad_id=codec.pad_id,
        on_logprob=(lambda number, log: logprobs[number].append(log)) if n > 1 else None,
        on_notice=harness.note,
    )
    texts, tokens = [codec.decode(ids) for ids in written], sum(map(len, written))
    if n > 1:
        every = [slice(at, at + n) for at in range(0, len(texts), n)]
        texts = [
            texts[some][best.ranked(prompt.text, texts[some], logprobs[some])[0][0]]
            for prompt, some in zip(prompts, every, strict=True)
        ]
    return {"texts": texts, "tokens": tokens}


def measure(a: argparse.Namespace) -> harness.Result:
    """Every n, one after the other."""
    if a.model is None:
        raise harness.Skipped("no model was named: --model RUN, a finished run over recipes")
    opened = open_model(a.model, device=a.device)
    prompts = asked(opened, a)
    options = opened.provenance.completed(
        GenerationOptions(
            max_new_tokens=a.max_new_tokens,
            temperature=a.temperature,
            top_p=a.top_p,
            seed=a.seed,
            precision=a.precision,
        )
    )
    found: dict[str, Any] = {}
    for n in sorted(a.n):
        best = BestOf(n, a.by if n > 1 else None)
        best.check(options, wanted=1)
        best.check_prompts([prompt.text for prompt in prompts], in_json=False)
        run = harness.timed(lambda best=best: best_texts(opened, prompts, best, options))
        scores = TextScores(groups=("recipe", "repetition"))
        scores.add([scored(p, text) for p, text in zip(prompts, run.value["texts"], strict=True)])
        found[str(n)] = {
            "seconds": round(run.wall, 2),
            "tokens": run.value["tokens"],
            "tokens_per_second": round(run.value["tokens"] / run.wall, 1),
            "scores": {
                name: {k: v if v is None else round(v, 4) for k, v in asdict(e).items()}
                for name, e in scores.result().overall.items()
            },
        }
        harness.note(f"best of {n}: {found[str(n)]}")
    by = a.by or "recipe_score"
    details = {"prompts": len(prompts), "by": a.by, "device": str(opened.model.device)}
    result = harness.Result(ours=found, details=details)
    least, most = (found[str(pick(a.n))]["scores"].get(by) for pick in (min, max))
    sign = -1 if metric_named(by).better == "lower" else 1
    if least and most and sign * (most["value"] - least["value"]) < 0:
        result.void(f"{by} is worse for the most texts than for the fewest")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--model", type=Path, help="a finished run over recipes, or a model's folder")
    p.add_argument("--file", type=Path, help="prompts: one a line, or JSON lines")
    p.add_argument("--prompts", type=int, default=200, help="the most prompts")
    p.add_argument(
        "--by", help=f"a recipe score, or {LIKELIHOOD}; what toque generate takes if left out"
    )
    p.add_argument("--n", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="texts of a prompt")
    p.add_argument("--temperature", type=float, default=0.7)
    p.add_argument("--top-p", type=float, default=0.95)
    p.add_argument("--max-new-tokens", type=int, default=None)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--precision", default="float32", choices=["auto", "bf16", "float32"])
    p.add_argument("--device", default="auto")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
