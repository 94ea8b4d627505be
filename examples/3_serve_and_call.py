# %% [markdown]
# # Serve, and call
#
# Starts `toque serve` with the model of `1_first_model` (run that first, in the same folder), asks
# it as programs do, and stops it. Needs `pip install 'toque[serve]' openai`. Half a minute.

# %%
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import NotFoundError, OpenAI

run = Path("work/first")

# %% [markdown]
# In a terminal this is `toque serve work/first`. Port 0 takes any that is free; the first line
# says which.

# %%
server = subprocess.Popen(
    [sys.executable, "-m", "toque", "serve", str(run), "--port", "0"],
    stdout=subprocess.PIPE,
    text=True,
)
address = server.stdout.readline().split()[0]
print(address)

# %% [markdown]
# The client of OpenAI's API, unchanged. The text arrives as it is written.

# %%
client = OpenAI(base_url=f"{address}/v1", api_key="none")
print([model.id for model in client.models.list()])

dish = [{"role": "user", "content": "Lentil Soup: lentils, carrots, cumin"}]
stream = client.chat.completions.create(
    model="first", messages=dish, temperature=0, max_tokens=120, stream=True
)
streamed = ""
for event in stream:
    piece = event.choices[0].delta.content or ""
    streamed += piece
    print(piece, end="", flush=True)

# %% [markdown]
# Eight requests at once share one batch. Nobody's text depends on who else is asking: the soup is
# the same.


# %%
def written(dish: str) -> str:
    """One greedy answer, all at once."""
    answer = client.chat.completions.create(
        model="first",
        messages=[{"role": "user", "content": dish}],
        temperature=0,
        max_tokens=120,
    )
    return answer.choices[0].message.content


dishes = [f"{name} Salad: rice, beans, oil" for name in ("Red", "Green", "Warm", "Cold", "Big")]
with ThreadPoolExecutor(8) as threads:
    texts = list(
        threads.map(written, ["Lentil Soup: lentils, carrots, cumin", *dishes, *dishes[:2]])
    )
assert texts[0] == streamed
print(f"{len(texts)} texts; the soup is the same as alone")

# %% [markdown]
# A request that cannot be answered says so in the protocol's own way.

# %%
try:
    client.chat.completions.create(model="second", messages=dish)
except NotFoundError as error:
    print(error)

# %% [markdown]
# SIGTERM lets what is being written end, then the server stops.

# %%
server.terminate()
print("ended with", server.wait(timeout=60))
