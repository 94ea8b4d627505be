# %% [markdown]
# # Your own rows, from an empty machine
#
# Installs Toque, trains a small model on rows of a program, scores what it writes and exports it: ten
# minutes on two CPU cores, three of them for the training. No data is fetched.

# %%
import subprocess
import sys

# The clone in which this notebook lies. Elsewhere: "git+" and the address that you would clone.
REPOSITORY = ".."
subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", REPOSITORY], check=True)

# %% [markdown]
# ## Rows
#
# A list of dicts, a DataFrame, a `datasets.Dataset` or anything else that gives rows. Here questions
# about a kitchen, of which every fifth is kept aside, to be asked later.

# %%
kept = {
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
    for food, place in kept.items()
    for dish, time in minutes.items()
]
test = rows[::5]
rows = [row for row in rows if row not in test]
print(len(rows), "rows to train on,", len(test), "kept aside")

# %% [markdown]
# ## Settings
#
# A small Llama from scratch, and a tokenizer that is learnt from the rows. What is not said is a
# default; `toque show` lists them all.

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
# Interrupt it and run the cell again: it continues where it was, to the same bits.

# %%
run = toque.train(config, data=rows)
print(f"{run.step} updates; the last loss is {run.losses[-1][1]:.3f}")

# %% [markdown]
# ## The losses of every update

# %%
from IPython.display import SVG, display

highest, last = max(loss for _, loss in run.losses), run.losses[-1][0]
line = " ".join(
    f"{step / last * 600:.1f},{200 - loss / highest * 190:.1f}" for step, loss in run.losses
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
# The rows that were kept aside, which it has never seen.

# %%
prompts = [row["prompt"] for row in test]
texts = [written.text for written in toque.generate(run, prompts, temperature=0, max_new_tokens=30)]
for prompt, text in zip(prompts[:5], texts[:5], strict=True):
    print(prompt, "->", text)

# %% [markdown]
# ## Score it
#
# By your own rule, and by the scores that `toque evaluate` has, with intervals.

# %%
right = sum(text.strip() == row["target"] for text, row in zip(texts, test, strict=True))
print(f"{right} of {len(test)} answers are right")
print(toque.score(texts, [row["target"] for row in test], prompts=prompts))

# %% [markdown]
# ## Take it along
#
# A folder that plain transformers loads, read back and compared. `README.md` in it is a model card
# with what was measured, as the hub reads it; `push_to="owner/name"` would upload it.

# %%
print(toque.export(run, "work/kitchen-exported"))
