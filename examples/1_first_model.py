# %% [markdown]
# # A first model
#
# Train a model that writes recipes, in a few minutes on a laptop. You need no data: Toque generates a
# cookbook of synthetic recipes. All files go into `work/` next to this file.

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
# The preset `demo` describes a tiny Llama. The arguments replace its sources, its folders and its
# duration.

# %%
config = toque.configure(
    "demo",
    run_dir=str(work / "first"),
    data={
        "sources": [{"path": str(work / "recipes.jsonl")}],
        "store": str(work / "store"),
    },
    train={"stop_after": "2 minutes"},
)

# %% [markdown]
# ## Prepare
#
# `prepare` turns records into token ids in a store on disk. It counts dropped records by reason.

# %%
prepared = toque.prepare(config)
print(prepared.report.kept, "recipes kept")

# %% [markdown]
# ## Train
#
# Interrupt the cell and run it again: training continues from the last step, to the same bits.

# %%
run = toque.train(config)
for step, loss in run.losses[:: max(1, len(run.losses) // 8)]:
    print(f"step {step:5}  loss {loss:.3f}")

# %% [markdown]
# ## Evaluate
#
# Print the loss on held-out recipes and the score of the texts written for 32 of them.

# %%
scores = toque.evaluate(run).metrics
print(f"held-out loss {scores['loss']:.3f}, cookable {scores['cookable']:.2f}")

# %%
for text in toque.generate(run, "Lentil Soup: lentils, carrots, cumin", temperature=0):
    print(text)

# %% [markdown]
# `work/first/model` is an ordinary Hugging Face folder. The next example starts from it.
