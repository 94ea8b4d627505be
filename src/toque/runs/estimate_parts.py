"""Parts of a run's estimate: its work, machine, memory, time and disk space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toque.hardware.cards import Card
from toque.models.forward.outline import OutlinedRows, Where
from toque.runs.generated_texts import GeneratedTexts, GenerationMemory
from toque.runs.outlined_update import OutlinedUpdate
from toque.runs.peak import Peak


@dataclass(frozen=True)
class Work:
    """Work of a run: its rows, updates and tokens."""

    row: OutlinedRows
    """One row with the average number of examples."""
    worst_examples: int
    """Number of examples in a row packed with the longest examples: the worst case for attention
    memory."""
    update_rows: int
    usual_rows: int
    """Default number of rows in a CPU's micro-batch."""
    tokens_per_update: float
    """Source and target tokens per update, without padding."""
    flops_per_token: float
    products: Mapping[tuple[int, int], float]
    """FLOPs per token in matmuls with weights, by the weight's (in, out) size."""
    totals: Mapping[str, float]
    """Steps, epochs, examples and tokens of the entire run. Unknown totals are missing."""
    seconds: float | None
    """Length of the run in seconds, if a time limit ends it."""
    held_out_tokens: float
    how: str
    """Origin of the example lengths, as text."""
    largest_micro_batch: int | None = None
    """Most rows of a micro-batch that training tries. None means all rows of an update."""
    pairs: float | None = None
    """Preference pairs per update. None for objectives without pairs."""
    reference_tokens: float | None = 0.0
    """Tokens of the forward pass over all pairs before training. None if they are unknown."""
    reference_rows: int = 0
    """Answers with a stored log-probability, float32 in the run folder."""
    texts: GeneratedTexts | None = None
    """Texts that the model generates per update. None for objectives without them."""

    @property
    def useful_share(self) -> float:
        """Fraction of the tokens in full rows that are not padding."""
        return min(1.0, self.tokens_per_update / (self.update_rows * self.row.tokens))


@dataclass(frozen=True)
class Machine:
    """Machine for which a run is estimated: this machine or a GPU in the table."""

    name: str
    where: Where
    precision: str
    memory_bytes: int
    """Bytes of memory available to a process."""
    card: Card | None
    """GPU in the table, or None for this machine."""
    peak: Peak
    """Peak speed of the model's matmuls."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of training, in bytes."""

    parts: Mapping[str, int]
    """Bytes of the tensors, by purpose."""
    beside: Mapping[str, int]
    """Bytes in addition to the tensors: the allocator's gaps and free blocks, and on a CPU the
    libraries."""
    room: int
    """Bytes available to a process."""
    micro_batch_rows: int
    recompute: bool
    """True if the backward pass recomputes activations."""
    update: OutlinedUpdate
    """Memory and work of one micro-batch."""
    host: int | None = None
    """Bytes of host memory needed to load the model for a GPU. None on a CPU."""
    generation: GenerationMemory | None = None
    """Bytes while texts are generated, in place of activations. None without such texts."""

    @property
    def total(self) -> int:
        """Bytes of tensors, allocator and libraries."""
        return self.tensors + sum(self.beside.values())

    @property
    def tensors(self) -> int:
        """Bytes of all tensors."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """True if the machine has enough memory."""
        return self.total <= self.room


@dataclass(frozen=True)
class Time:
    """Seconds for an update and for the run, with their origin."""

    update_seconds: float
    """Seconds per update, including the generation of its texts."""
    flops_per_update: float
    """FLOPs per update, without padding and recomputation."""
    peak: Peak
    how: str
    """Origin of `update_seconds`, as text."""
    evaluation_seconds: float
    """Seconds to compute the held-out loss once."""
    run_seconds: float | None
    """Seconds for all updates and held-out losses. None if their number is unknown."""
    measured: bool = False
    """True if the run's own updates, including the GPUs' traffic, were measured."""
    generation_seconds: float = 0.0
    """Seconds per update to generate its texts. 0 if `measured`."""
    generation_how: str = ""
    """Origin of `generation_seconds`, as text."""
    reference_seconds: float | None = 0.0
    """Seconds of the pass over all pairs before training. None if it is unknown."""

    @property
    def utilisation(self) -> float | None:
        """Useful FLOPs as a fraction of the peak, in [0, 1]. None if they exceed the peak.

        The time for generating texts does not count, unless it is measured with the update.
        """
        seconds = self.update_seconds - self.generation_seconds
        share = self.flops_per_update / (seconds * self.peak.flops_per_second)
        # A requested utilisation of 100 % may exceed 1 by a rounding error.
        return min(1.0, share) if share < 1.0 + 1e-9 else None


@dataclass(frozen=True)
class Disk:
    """Disk space of a run in bytes, and bytes sent to a bucket."""

    checkpoint: int
    kept: int
    """Bytes of the retained checkpoints, plus one more of each kind during a save."""
    model: int
    """Bytes of the finished model."""
    store: int
    """Bytes of the prepared data, or 0 before it exists."""
    saves: int
    """Number of saved checkpoints."""
    uploaded: int
    """Bytes sent to the bucket."""
    reference: int = 0
    """Bytes of the reference of dpo in the run folder."""

    @property
    def total(self) -> int:
        """Largest number of bytes on the disk at any time."""
        return self.kept + self.model + self.store + self.reference
