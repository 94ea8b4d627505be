# %% [markdown]
# # Fine-tune, and compare
#
# Train a small adapter on the model of the first example, so that it rates the difficulty of a
# recipe. Then ask both models the same question.
#
# Run `1_first_model` first. Both examples use the folder `work/`.

# %%
from pathlib import Path

import toque

work = Path("work")
base = work / "first" / "model"
if not base.is_dir():
    raise SystemExit("Run 1_first_model first: this example starts from its model.")

# %% [markdown]
# ## Train an adapter
#
# The same recipes become different examples, so they need a second store. The base is tiny, so every
# layer gets an adapter. For a model of usual size, leave out `target_modules`.

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
# Most recipes have medium difficulty. Compare the accuracy with `majority`, the accuracy of always
# answering "medium".

# %%
scores = toque.evaluate(run).metrics
for name, score in scores.items():
    print(f"{name:40} {score:.3f}")

# %% [markdown]
# Ask both models about one recipe and print the probability of each answer. The base model did not
# learn the task, so it gets the choices instead, and guesses.

# %%
toast = "Toast: 2 slices bread, 1 tablespoon butter"
print(toque.classify(run, toast, task="difficulty")[0])
print(toque.classify(base, toast, choices=["easy", "medium", "hard"])[0])

# %% [markdown]
# ## Export
#
# An export merges the adapter into its base, reads the result back and compares it. With
# `form="gguf"` it runs in llama.cpp and Ollama.

# %%
print(toque.export(run, work / "merged"))
