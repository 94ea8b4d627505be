# %% [markdown]
# # Serve a model and call it
#
# Start `toque serve` with the model of `1_first_model`, send requests with OpenAI's client, and stop
# the server. Run `1_first_model` first, in the same folder. This example needs
# `pip install 'toque[serve]' openai` and takes half a minute.

# %%
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import NotFoundError, OpenAI

run = Path("work/first")

# %% [markdown]
# In a terminal this is `toque serve work/first`. Port 0 selects a free port, and the first line of
# the output is the address.

# %%
server = subprocess.Popen(
    [sys.executable, "-m", "toque", "serve", str(run), "--port", "0"],
    stdout=subprocess.PIPE,
    text=True,
)
address = server.stdout.readline().split()[0]
print(address)

# %% [markdown]
# OpenAI's client works unchanged. Stream a text as the model writes it.

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
# Send eight requests at the same time. They share one batch, but no text depends on the other
# requests: the soup is the same.


# %%
def written(dish: str) -> str:
    """Return one greedy answer, without streaming."""
    answer = client.chat.completions.create(
        model="first",
        messages=[{"role": "user", "content": dish}],
        temperature=0,
        max_tokens=120,
    )
    return answer.choices[0].message.content


dishes = [
    f"{name} Salad: rice, beans, oil"
    for name in ("Red", "Green", "Warm", "Cold", "Big")
]
with ThreadPoolExecutor(8) as threads:
    texts = list(
        threads.map(
            written, ["Lentil Soup: lentils, carrots, cumin", *dishes, *dishes[:2]]
        )
    )
assert texts[0] == streamed
print(f"{len(texts)} texts; the soup is the same as alone")

# %% [markdown]
# A request for an unknown model raises an error of the client.

# %%
try:
    client.chat.completions.create(model="second", messages=dish)
except NotFoundError as error:
    print(error)

# %% [markdown]
# On SIGTERM the server finishes running requests and stops.

# %%
server.terminate()
print("ended with", server.wait(timeout=60))
