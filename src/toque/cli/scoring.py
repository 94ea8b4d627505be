"""`toque evaluate`: a run or a model against held-out data; and what evaluation.json holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toque.build.batches import build_stream
from toque.build.data import open_store
from toque.build.evaluation import build_heldout, build_sampler, held_out_prompts
from toque.cli.opening import open_model
from toque.config import RunConfig
from toque.data.files import write_whole
from toque.evaluation.sampling import mean_metrics
from toque.train.runtime import Runtime


@dataclass(frozen=True)
class Evaluation:
    """The content of evaluation.json."""

    step: int | None
    heldout: Mapping[str, float]
    texts: Mapping[str, float]
    n_texts: int

    def to_json(self) -> str:
        """Everything, as written."""
        return json.dumps(
            {
                "step": self.step,
                "heldout": dict(self.heldout),
                "generated": {"texts": self.n_texts, **self.texts},
            },
            indent=1,
        )

    def table(self) -> str:
        """For people."""
        tokens = self.heldout["target_tokens"]
        loss, perplexity = self.heldout["loss"], self.heldout["perplexity"]
        lines = [f"held-out loss {loss:.4f} nats a token, perplexity {perplexity:.2f}"]
        lines.append(f"  over {tokens:,.0f} target tokens")
        if self.n_texts:
            lines.append(f"mean over {self.n_texts} written recipes:")
            lines += [
                f"  {name.replace('_', ' '):24}{value:6.3f}" for name, value in self.texts.items()
            ]
        return "\n".join(lines)


def run_evaluation(path: str, settings: RunConfig) -> str:
    """Score `path` on the store of `settings`; write evaluation.json when it is a run."""
    run = Path(path)
    opened = open_model(path)
    store = open_store(settings)
    opened.check_tokenizer(store)
    runtime = Runtime.detect(precision=settings.train.precision, fp16_is_safe=False)
    model = opened.model.to(runtime.device)  # type: ignore[arg-type]
    stream = build_stream(settings, store, model)
    heldout = build_heldout(settings, store, stream, runtime)(model)
    prompts = held_out_prompts(store, settings.evaluation.generate)
    samples = build_sampler(settings, store, prompts)(model)
    result = Evaluation(opened.step, heldout, mean_metrics(samples), len(samples))
    if (run / "config.yaml").exists():
        write_whole(run / "evaluation.json", result.to_json().encode())
    return result.table()
