# %% [markdown]
# # A first model
#
# From nothing to a model that writes recipes, in about two minutes on two CPU cores: synthetic
# recipes, a token store, 45 seconds of training, scores, and two new recipes. Everything lands in
# `recipes.jsonl`, `stores/first` and `runs/first` below the folder you start this in. Run it
# again, and what is done is not done twice.

# %%
from pathlib import Path

import toque
from toque.cooking.cookbook.generate import write_cookbook

if not Path("recipes.jsonl").exists():
    write_cookbook("recipes.jsonl", n=2000, seed=1)

# %% [markdown]
# A configuration says what differs from a preset or from the defaults. Change `sources` to train
# on recipes of yours; `toque init YOUR-RECIPES` writes a whole configuration for them.

# %%
config = toque.configure(
    "demo",
    run_dir="runs/first",
    data={"sources": [{"path": "recipes.jsonl"}], "store": "stores/first"},
    train={"stop_after": "45 seconds"},
    evaluation={"generate": 16},
)

# %% [markdown]
# Text becomes tokens once. The report counts what was left out, and why.

# %%
counted = toque.prepare(config).report
print(f"{counted.read:,} recipes read, {counted.train:,} examples, {counted.validation:,} held out")

# %% [markdown]
# Training ends with scores on recipes that were held out. A run that is interrupted continues when
# this is called again.

# %%
run = toque.train(config, reporter=toque.ConsoleReporter(progress=False))
first, last = run.losses[0][1], run.losses[-1][1]
print(f"{run.step:,} updates; loss {first:.2f} at the first, {last:.2f} at the last")

# %%
for name in ("loss", "recipe_score", "ingredient_coverage"):
    print(f"{name:24}{run.metrics[name]:.3f}")

# %% [markdown]
# Ask it. After so short a training the form is right and much else is not: see which ingredients
# it forgot.

# %%
asked = ["Lentil Soup: lentils, carrots, cumin", "Baked Potatoes: potatoes, olive oil, sour cream"]
for text in toque.generate(run, asked, temperature=0.0, max_new_tokens=160):
    print(text, end="\n\n")

# %% [markdown]
# `runs/first/model` is a Hugging Face folder that any program reads. Next: `fine_tune_and_compare`
# teaches it more, `serve_and_call` puts it to use.
