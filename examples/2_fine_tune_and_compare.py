# %% [markdown]
# # Fine-tune, and compare
#
# The model of the first example learns a second skill, judging how difficult a recipe is, by a small
# adapter beside its frozen weights. Then both are asked the same.
#
# Run `1_first_model` before; both work in `work/`.

# %%
from pathlib import Path

import toque

work = Path("work")
base = work / "first" / "model"
if not base.is_dir():
    raise SystemExit("Run 1_first_model first: this example goes on from its model.")

# %% [markdown]
# ## Train an adapter
#
# The same recipes, turned into another question, so they get a store of their own. The base is tiny,
# so every layer gets an adapter; for a checkpoint of usual size leave `target_modules` out.

# %%
config = toque.configure(
    run_dir=str(work / "difficulty"),
    model={"family": "auto", "start_from": str(base)},
    adapter={"kind": "lora", "r": 16, "target_modules": "all"},
    data={
        "sources": [{"path": str(work / "recipes.jsonl")}],
        "store": str(work / "store-difficulty"),
        "tasks": ["difficulty"],
        "max_prompt_tokens": 416,
        "max_target_tokens": 32,
        "validation_fraction": 0.05,
    },
    optim={"peak_lr": 5e-3, "warmup": "5 %"},
    train={"stop_after": "100 steps", "batch": "4096 tokens", "save_every": "50 steps"},
    evaluation={"generate": 0},
)
run = toque.train(config)
print(f"trained {run.step} steps")

# %% [markdown]
# ## Compare
#
# Accuracy says little alone: most recipes are of medium difficulty, so `majority` is what one gets
# for always saying so.

# %%
scores = toque.evaluate(run).metrics
for name, score in scores.items():
    print(f"{name:40} {score:.3f}")

# %% [markdown]
# Asked about one recipe, with the probability of each answer. The base cannot be asked with the task,
# which it did not learn; given the same choices, it guesses.

# %%
toast = "Toast: 2 slices bread, 1 tablespoon butter"
print(toque.classify(run, toast, task="difficulty")[0])
print(toque.classify(base, toast, choices=["easy", "medium", "hard"])[0])

# %% [markdown]
# ## One model again
#
# An export merges the adapter into its base, reads the result back and compares; as GGUF it runs in
# llama.cpp and Ollama.

# %%
print(toque.export(run, work / "merged"))
