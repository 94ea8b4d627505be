"""Step window: sums and throughput over the updates since the last log line."""

from __future__ import annotations

from dataclasses import dataclass, field

from toque.runs.peak_flops import Peak
from toque.training.callbacks import StepInfo


@dataclass
class Window:
    """Sums over consecutive updates; rates are of those that no observer slowed."""

    n_steps: int = 0
    n_targets: int = 0
    n_tokens: int = 0
    n_computed: int = 0
    seconds: float = 0.0
    data_wait_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """Wall seconds since the window before, by what they went into: `part_clock.PARTS`."""
    slowed_tokens: int = 0
    slowed_seconds: float = 0.0
    last: StepInfo | None = None

    def add(self, info: StepInfo) -> None:
        """Add one update."""
        self.n_steps += 1
        self.n_targets += info.n_targets
        self.n_tokens += info.n_tokens
        self.n_computed += info.n_computed
        self.seconds += info.seconds
        self.data_wait_seconds += info.data_wait_seconds
        for part, seconds in info.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        if info.slowed:
            self.slowed_tokens += info.n_tokens
            self.slowed_seconds += info.seconds
        self.last = info

    @property
    def pad_fraction(self) -> float:
        """Share of the computed tokens that were padding."""
        return 1.0 - self.n_tokens / self.n_computed if self.n_computed else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Throughput: tokens of both sides without padding, per second with data wait.

        Slowed updates count only where there are no others.
        """
        tokens, seconds = self.n_tokens - self.slowed_tokens, self.seconds - self.slowed_seconds
        if tokens == 0:
            tokens, seconds = self.n_tokens, self.seconds
        return tokens / seconds if seconds > 0 else 0.0

    def utilisation(self, flops_per_token: float, peak: Peak) -> float:
        """Model FLOPs utilisation (MFU): FLOP/s the model needs, over the peak.

        Chowdhery et al. 2022 (PaLM), appendix B.
        """
        return flops_per_token * self.tokens_per_second / peak.flops_per_second
