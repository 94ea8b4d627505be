# %% [markdown]
# # A first model
#
# From raw recipes to a model that writes new ones, in a few minutes on a laptop. Nothing is fetched:
# the recipes come from an embedded cookbook of synthetic ones.
#
# Everything is written into `work/` beside this file.

# %%
from pathlib import Path

import toque
from toque.cooking.cookbook.recipes import write_cookbook

work = Path("work")
work.mkdir(exist_ok=True)
write_cookbook(work / "recipes.jsonl", n=4000, seed=17)
print((work / "recipes.jsonl").read_text().splitlines()[0][:300], "...")

# %% [markdown]
# ## Settings
#
# The preset `demo` is a tiny Llama-shaped model. What is given here replaces what it says: where to
# read, where to write, how long to train.

# %%
config = toque.configure(
    "demo",
    run_dir=str(work / "first"),
    data={"sources": [{"path": str(work / "recipes.jsonl")}], "store": str(work / "store")},
    train={"stop_after": "2 minutes"},
)

# %% [markdown]
# ## Prepare
#
# Records become token ids in a store on disk; what was dropped is counted by reason.

# %%
prepared = toque.prepare(config)
print(prepared.report.kept, "recipes kept")

# %% [markdown]
# ## Train
#
# Interrupt it and run the cell again: it continues where it was, to the same bits.

# %%
run = toque.train(config)
for step, loss in run.losses[:: max(1, len(run.losses) // 8)]:
    print(f"step {step:5}  loss {loss:.3f}")

# %% [markdown]
# ## Look at what it learnt
#
# The loss on recipes it has not seen, and how well the texts it wrote for 32 of them are formed.

# %%
scores = toque.evaluate(run).metrics
print(f"held-out loss {scores['loss']:.3f}, recipe score {scores['recipe_score']:.2f}")

# %%
for text in toque.generate(run, "Lentil Soup: lentils, carrots, cumin", temperature=0):
    print(text)

# %% [markdown]
# `work/first/model` is an ordinary Hugging Face folder. The next example goes on from it.
