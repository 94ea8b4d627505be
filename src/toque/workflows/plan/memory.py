"""Memory of a plan, by part, from outlined updates."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.loader.row_lengths import usual_rows
from toque.models.families import family_of, head_size, vocabulary_rows
from toque.models.flops import parameter_counts
from toque.models.forward.cross_entropy import logits_bytes
from toque.models.lora.frozen import frozen_matrices
from toque.models.lora.layers import is_adapted
from toque.models.lora.quantised import quantised_layers
from toque.storage.cache_folder import cache_folder
from toque.training.autotune.machine_cache import MachineCache, machine_facts
from toque.training.autotune.micro_batch import HEADROOM, evenly
from toque.training.planning.outlined_update import OutlinedUpdate, outline_update
from toque.version import __version__
from toque.workflows.plan.ahead import Ahead
from toque.workflows.plan.machine import Machine

_SMALLEST: Final = """
import resource, sys
import toque
from toque.cooking.cookbook.recipes import write_cookbook
folder = sys.argv[1]
write_cookbook(folder + "/recipes.jsonl", n=40, seed=1)
toque.train({
    "run_dir": folder + "/run",
    "model": {"family": "llama", "tokenizer": "trained:512", "shape": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 512}},
    "data": {"sources": [{"path": folder + "/recipes.jsonl"}], "store": folder + "/store"},
    "train": {"stop_after": "2 steps", "batch": "1024 tokens", "compile": False},
    "evaluation": {"max_examples": 4, "generate": 2},
})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
"""A training of next to no model: what it takes is the interpreter's and the libraries'."""
_KIB: Final = 1024
_HOLES_BESIDE_WHAT_STAYS: Final = {False: 1.1, True: 0.35}
"""By whether the model is an encoder-decoder."""
_HOLES_OF_COMPUTING: Final = 0.30
_ELSE_BYTES: Final = 260 << 20
"""What a CPU's heap takes beside the tensors: for those that stay, for a micro-batch's, and else.

Freed memory is kept (`training.glibc_malloc`), so tensors that come and go in different sizes leave
holes: of a GPT-NeoX of 28 M, 1,412 MB are in use at most, and the heap grows to 1,675 MB in the
first update and to 2,389 in ten (mallinfo2). A T5's smaller matrices leave fewer. Fitted to the six
trainings of bench/quality/plan_against_truth.py with two threads and glibc 2.36, so those cannot
prove it; two others, a T5 of 48 M and a Llama of 12 layers and 23 M, came out at -0.1 and +1.4 %
when 128 compiled products were kept and the bytes were 200 MiB. Other allocators are not known. The
bytes are what evaluating, exporting and oneDNN's compiled products (`models.onednn`) add to the
demo's shape.
"""


@dataclass(frozen=True)
class Memory:
    """Bytes at the fullest moment of training; the parts add up to `total`."""

    parts: Mapping[str, int]
    room: int
    micro_batch_rows: int
    recompute: bool
    update: OutlinedUpdate
    """What one micro-batch of so many rows takes."""
    host: int | None = None
    """Bytes of the machine's own memory while a card's model is read; None on a CPU."""

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the machine has so much."""
        return self.total <= self.room


def memory_of(
    config: RunConfig,
    model: PreTrainedModel,
    ahead: Ahead,
    machine: Machine,
    *,
    rows: int | None = None,
    recompute: bool | None = None,
    optimizer: str | None = None,
) -> Memory:
    """Memory by part; inside `outlining`.

    Args:
        config: of the run.
        model: outlined.
        ahead: its rows and updates.
        machine: that it is for.
        rows: at once, instead of what the settings say.
        recompute: with activation checkpointing or not, instead of what they say.
        optimizer: instead of theirs.
    """
    train = config.train
    asked = train.gradient_checkpointing if recompute is None else recompute
    attempt = _Attempt(config, model, ahead, machine, optimizer or config.optim.name)
    wanted = rows if rows is not None else train.micro_batch_rows
    if isinstance(wanted, int):
        wanted = min(wanted, ahead.update_rows)
    made = attempt.of(wanted, recompute=asked is True)
    if asked == "auto" and not made.fits and made.micro_batch_rows == 1:
        made = attempt.of(wanted, recompute=True)
    return made


@dataclass(frozen=True)
class _Attempt:
    config: RunConfig
    model: PreTrainedModel
    ahead: Ahead
    machine: Machine
    optimizer: str

    def of(self, wanted: int | str, *, recompute: bool) -> Memory:
        if isinstance(wanted, int):
            return self._at(wanted, recompute=recompute)
        if self.machine.where == "cpu":
            # The largest size that is tried, and what the heap keeps though a smaller be chosen.
            guess = usual_rows(self.ahead.row.tokens)
            return self._at(evenly(self.ahead.update_rows, guess), recompute=recompute)
        one = self._at(1, recompute=recompute)
        if not one.fits or self.ahead.update_rows == 1:
            return one
        two = self._at(2, recompute=recompute)
        each = max(1, two.total - one.total)
        most = max(1, 1 + (one.room - one.total) // each)
        rows = evenly(self.ahead.update_rows, most)
        while rows > 1 and not (found := self._at(rows, recompute=recompute)).fits:
            rows = evenly(self.ahead.update_rows, int(0.85 * rows))
        return one if rows == 1 else found

    def _at(self, rows: int, *, recompute: bool) -> Memory:
        machine, config = self.machine, self.config
        update = outline_update(
            self.model,
            replace(self.ahead.row, rows=rows, examples=self.ahead.worst_examples),
            where=machine.where,
            precision=machine.precision,
            optimizer=self.optimizer,
            accumulates=rows < self.ahead.update_rows,
            recompute=recompute,
            smoothing=config.optim.label_smoothing,
            masked=config.train.optimisations.attention == "dense",
        )
        return Memory(
            parts=self._parts(update, rows, recompute=recompute),
            room=machine.room,
            micro_batch_rows=rows,
            recompute=recompute,
            update=update,
            host=host_bytes(config, self.model) if machine.where == "cuda" else None,
        )

    def _parts(self, update: OutlinedUpdate, rows: int, *, recompute: bool) -> dict[str, int]:
        vocabulary, positions = vocabulary_rows(self.model), rows * self.ahead.row.target
        chunk = logits_bytes(vocabulary, self.machine.where, positions=positions)
        logits = min(chunk, update.computing)
        averages = _averages(self.config, update)
        computing = update.computing - logits
        if self.config.train.activation_offload and recompute:
            computing = max(0, computing - _inputs_of_blocks(self.model, self.ahead, rows))
        parts = weights_by_part(self.model, update.weights) | {
            "16-bit copies of weights": update.copies,
            "gradients": update.gradients,
            "optimizer states": update.optimizer,
            "averages of weights": averages,
            "logits": logits,
            "activations and their gradients": computing,
        }
        # Activations are not there while the optimizer steps, texts are written or a save begins.
        parts["the optimizer's step"] = max(0, update.step - update.computing)
        room = max(update.step, update.computing)
        if self.machine.where == "cpu":
            texts = texts_bytes(self.config, self.model, self.ahead)
            parts["evaluation: keys and values"] = max(0, texts - room)
            saved = update.gradients + update.optimizer + averages
            saved += update.gradients if self.config.train.keep_best else 0
            parts["a save's copies"] = max(0, saved - max(room, texts))
            parts["Python and its libraries"] = resident_bytes()
            beside = _HOLES_BESIDE_WHAT_STAYS[family_of(self.model.config).is_encoder_decoder]
            holes = beside * update.fixed + _HOLES_OF_COMPUTING * room
            parts["allocator's rest"] = round(holes) + _ELSE_BYTES
        else:
            held = sum(parts.values())
            parts["allocator's rest"] = round(held / HEADROOM) - held
        return parts


def texts_bytes(config: RunConfig, model: PreTrainedModel, ahead: Ahead) -> int:
    """Keys and values of the texts that the final evaluation writes side by side, in float32."""
    shape, texts = model.config, config.evaluation.generate
    if family_of(shape).is_encoder_decoder:
        width, layers = shape.num_heads * shape.d_kv, shape.num_decoder_layers
        tokens = ahead.row.source + ahead.row.target  # its own, and the prompt's across
    else:
        heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        width, layers, tokens = heads * head_size(shape), shape.num_hidden_layers, ahead.row.target
    return 2 * 4 * int(layers) * int(width) * tokens * texts


def resident_bytes() -> int:
    """Bytes of a training process with next to no model, measured once on this machine."""
    cache = MachineCache(cache_folder("measured"))
    versions = {"toque": __version__, "torch": torch.__version__}
    key = machine_facts(torch.device("cpu")) | versions | {"transformers": transformers.__version__}
    key |= {"about": "resident bytes of the smallest training"}
    known = cache.get(key)
    if known is None:
        with tempfile.TemporaryDirectory() as folder:
            said = subprocess.run(  # noqa: S603  # this interpreter and the text above
                [sys.executable, "-c", _SMALLEST, folder],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        known = {"bytes": int(said.split()[-1]) * _KIB}
        cache.put(key, known)
    return int(known["bytes"])


def _averages(config: RunConfig, update: OutlinedUpdate) -> int:
    averaging = config.optim.averaging
    if averaging is None:
        return 0
    points = averaging.last or 5 if averaging.kind == "last" else 1
    return points * update.gradients


def weights_by_part(model: PreTrainedModel, total: int) -> dict[str, int]:
    """Bytes of the weights: of quantised matrices and their constants, of the adapter, of the rest.

    FLAN-T5-XXL in nf4: 8.86e9 weights in 4 bits are 4.13 GiB, their constants 0.13 GiB.
    """
    held = [layer.held_bytes() for _, layer in quantised_layers(model)]
    parts = {
        "quantised matrices": sum(sizes["codes"] for sizes in held),
        "constants of their blocks": sum(sizes["constants"] for sizes in held),
    }
    if is_adapted(model):
        trained = (p for p in model.parameters() if p.requires_grad)
        parts["adapter"] = sum(p.numel() * p.element_size() for p in trained)
    return {"weights": total - sum(parts.values())} | parts


def host_bytes(config: RunConfig, model: PreTrainedModel) -> int:
    """Bytes of the machine's own memory while the model is read: all of it in float32.

    Beside an adapter the matrices are read one by one, so it is what is none, and the largest.
    """
    if config.adapter is None or config.adapter.kind == "dora":
        return 4 * parameter_counts(model).total
    matrices = [cast("Tensor", layer.weight) for layer in frozen_matrices(model).values()]
    sizes = [m.numel() for m in matrices] + [q.shape.numel() for _, q in quantised_layers(model)]
    read = {id(m) for m in matrices}
    kept = sum(p.numel() for p in model.parameters() if id(p) not in read)
    return 4 * (kept + max(sizes))


def _inputs_of_blocks(model: PreTrainedModel, ahead: Ahead, rows: int) -> int:
    """Bytes of the float32 hidden states that all blocks but one start from."""
    shape, row = model.config, ahead.row
    if family_of(shape).is_encoder_decoder:
        sides = shape.num_layers * row.source + shape.num_decoder_layers * row.target
        return 4 * int(shape.d_model) * rows * (int(sides) - max(row.source, row.target))
    return 4 * int(shape.hidden_size) * rows * (int(shape.num_hidden_layers) - 1) * row.target
