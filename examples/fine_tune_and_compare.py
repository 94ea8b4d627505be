# %% [markdown]
# # Fine-tune, and compare
#
# Takes the model of `first_model` (run that first, in the same folder), shows it soups alone, once
# with a LoRA adapter and once with all weights, and compares the three on soups that none of them
# has seen. About a minute and a half.

# %%
import json
from pathlib import Path

import toque
from toque.cooking.cookbook.generate import write_cookbook

base = Path("runs/first/model")
assert base.exists(), "Run first_model in this folder first: it makes runs/first."

# %% [markdown]
# Soups of another seed, so other ones than the model was trained on.

# %%
if not Path("soups.jsonl").exists():
    write_cookbook("cookbook.jsonl", n=4000, seed=2)
    lines = Path("cookbook.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    soups = [line for line in lines if "soup" in json.loads(line)["tags"]]
    Path("soups.jsonl").write_text("".join(soups), encoding="utf-8")

# %% [markdown]
# Two configurations that differ in what is trained, and in the learning rate that suits it.


# %%
def on_soups(name: str, peak_lr: float, **how: object) -> toque.RunConfig:
    """A short run on the soups, from the base."""
    return toque.configure(
        run_dir=f"runs/{name}",
        model={"family": "auto", "start_from": str(base)},
        data={
            "sources": [{"path": "soups.jsonl"}],
            "store": "stores/soups",
            "max_prompt_tokens": 96,
            "max_target_tokens": 320,
            "validation_fraction": 0.1,
        },
        optim={"peak_lr": peak_lr, "warmup": "5 %"},
        train={"stop_after": "15 seconds", "batch": "1024 tokens"},
        evaluation={"generate": 0},
        **how,
    )


adapted = on_soups("adapted", 3e-3, adapter={"kind": "lora", "r": 8, "target_modules": "all"})
tuned = on_soups("tuned", 5e-4)

# %%
runs = {config.run_dir: toque.train(config) for config in (adapted, tuned)}

# %% [markdown]
# The same held-out soups for all three. The difference between two losses is worth believing only
# where it is larger than what another seed would change: `toque ablate` measures that.


# %%
def megabytes(folder: Path) -> float:
    """Of the weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


print(f"{'':16}{'loss':>8}{'perplexity':>12}{'weights':>12}")
for name, model in {"base": base, **{name: run.model for name, run in runs.items()}}.items():
    scores = toque.evaluate(model, tuned).metrics
    row = f"{scores['loss']:>8.3f}{scores['perplexity']:>12.3f}{megabytes(model):>9.1f} MB"
    print(f"{name:16}{row}")

# %% [markdown]
# An adapter is small because its base is not in it. `toque export` merges the two into one
# ordinary model, and compares what it wrote before it hands it over.

# %%
if not Path("merged-soups").exists():
    print(toque.export(runs["runs/adapted"], "merged-soups"))
