# %% [markdown]
# # Train on your own rows
#
# Install Toque, train a small model on rows in memory, score its texts and export it. This takes ten
# minutes on two CPU cores, with three minutes of training. No data is downloaded.

# %%
import subprocess
import sys

# The clone that contains this notebook. In another folder, use "git+" and the address of the clone.
REPOSITORY = ".."
subprocess.run(
    [sys.executable, "-m", "pip", "install", "--quiet", REPOSITORY], check=True
)

# %% [markdown]
# ## Rows
#
# Rows can be a list of dicts, a DataFrame, a `datasets.Dataset` or any iterable of rows. These rows
# are questions about a kitchen. Every fifth row is held out for testing.

# %%
places = {
    "sugar": "a dry jar",
    "flour": "a closed tin",
    "milk": "the fridge",
    "basil": "a glass of water",
    "bread": "a linen bag",
    "peas": "the freezer",
    "potatoes": "a dark box",
    "garlic": "a hanging net",
    "oil": "the cupboard",
    "eggs": "a cool shelf",
}
minutes = {
    "lentil soup": 40,
    "an omelette": 8,
    "rice pudding": 35,
    "a green salad": 10,
    "pea risotto": 30,
    "garlic bread": 15,
    "a potato pie": 75,
    "a pancake": 20,
    "a sponge cake": 50,
    "tomato sauce": 25,
    "a boiled egg": 6,
    "a fruit tart": 60,
}
rows = [
    {
        "prompt": f"Where is {food} kept, and how long does {dish} take?",
        "target": f"The place for {food} is {place}, and {dish} takes {time} minutes.",
    }
    for food, place in places.items()
    for dish, time in minutes.items()
]
test = rows[::5]
rows = [row for row in rows if row not in test]
print(len(rows), "rows to train on,", len(test), "held out")

# %% [markdown]
# ## Settings
#
# A small Llama from scratch, with a tokenizer trained on the rows. All other settings have defaults,
# which `toque show` lists.

# %%
import toque

config = toque.configure(
    run_dir="work/kitchen",
    data={"store": "work/kitchen-store", "validation_fraction": 0.1},
    model={
        "family": "llama",
        "tokenizer": "trained:512",
        "shape": {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        },
    },
    optim={"peak_lr": 2e-3, "warmup": "5 %"},
    train={"stop_after": "3 minutes", "batch": "1024 tokens"},
)

# %% [markdown]
# ## Train
#
# Interrupt the cell and run it again: training continues from the last step, to the same bits.

# %%
run = toque.train(config, data=rows)
print(f"{run.step} updates; the last loss is {run.losses[-1][1]:.3f}")

# %% [markdown]
# ## Plot the loss

# %%
from IPython.display import SVG, display

highest, last = max(loss for _, loss in run.losses), run.losses[-1][0]
line = " ".join(
    f"{step / last * 600:.1f},{200 - loss / highest * 190:.1f}"
    for step, loss in run.losses
)
display(
    SVG(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 220" width="600" height="220">'
        f'<polyline points="{line}" fill="none" stroke="teal" stroke-width="1.5"/>'
        f'<text x="4" y="14" font-size="12">{highest:.2f}</text>'
        f'<text x="596" y="216" font-size="12" text-anchor="end">update {last}</text></svg>'
    )
)

# %% [markdown]
# ## Ask it
#
# Ask the questions of the held-out rows, which the model has never seen.

# %%
prompts = [row["prompt"] for row in test]
texts = [
    written.text
    for written in toque.generate(run, prompts, temperature=0, max_new_tokens=30)
]
for prompt, text in zip(prompts[:5], texts[:5], strict=True):
    print(prompt, "->", text)

# %% [markdown]
# ## Score it
#
# Count correct answers, and compute the scores of `toque evaluate` with intervals.

# %%
right = sum(
    text.strip() == row["target"] for text, row in zip(texts, test, strict=True)
)
print(f"{right} of {len(test)} answers are right")
print(toque.score(texts, [row["target"] for row in test], prompts=prompts))

# %% [markdown]
# ## Export
#
# Export a folder that transformers can load. Toque reads it back and compares it. Its `README.md` is
# a model card with the measured scores. `push_to="owner/name"` uploads the folder to the hub.

# %%
print(toque.export(run, "work/kitchen-exported"))
