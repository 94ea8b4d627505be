"""Flags of `toque generate` and `toque chat` for texts, and the values that they describe."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from toque.cli.console import flag
from toque.errors import ConfigError

if TYPE_CHECKING:
    from toque.models.generation.options import GenerationOptions
    from toque.workflows.inference.generate import GenerationRequest


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags that control the sampling of tokens. The docstring of a field is the flag's help."""

    max_new_tokens: int | None = None
    """maximum tokens of a text. Default: the target length of the training."""
    temperature: float = 0.7
    """randomness of the text. 0 always chooses the most likely token."""
    top_p: float = 0.95
    """sample from the most likely tokens that together have this probability."""
    seed: int = 0
    """the same seed generates the same texts."""
    precision: Literal["auto", "bf16", "int8", "float32"] = "float32"
    """precision of the matmuls. bf16 is faster on processors that support it, but a text can then
    depend on other texts in its batch and differ from float32. auto uses bf16 only on these
    processors. int8 is auto for several texts. One text on a CPU has weights and inputs in 8
    bits, which is three times as fast once the model is loaded. It needs the extra onnx."""

    def to_options(self) -> GenerationOptions:
        """Convert the flags to options.

        Raises:
            ConfigError: A value is not allowed.
        """
        from toque.models.generation.options import GenerationOptions

        return GenerationOptions(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            precision=self.precision,
        )


@dataclass(frozen=True, kw_only=True)
class ChatFlags(SamplingFlags):
    """Flags of `toque chat` for answers."""

    max_new_tokens: int = 512
    """maximum tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class PairFlags(SamplingFlags):
    """Flags of `toque pairs` for texts. By default, they are samples of the model itself."""

    temperature: float = 1.0
    """randomness of the texts. 0 always chooses the most likely token."""
    top_p: float = 1.0
    """sample from the most likely tokens that together have this probability."""


@dataclass(frozen=True, kw_only=True)
class TextFlags(SamplingFlags):
    """Flags of `toque generate` that apply to generated texts, but not to the choice of an answer.

    The docstring of a field is the flag's help.
    """

    no_repeat_ngram_size: int | None = None
    """length in tokens of a sequence that may not appear twice in a text. 0 allows repetition.
    Default: 12 for recipes as text, otherwise 0."""
    min_p: float = 0.0
    """sample only from tokens with at least this fraction of the highest probability."""
    repetition_penalty: float = 1.0
    """above 1, make tokens of the prompt and of the text less likely, as transformers does."""
    presence_penalty: float = 0.0
    """number to subtract from the logit of each token in the text, as OpenAI does."""
    frequency_penalty: float = 0.0
    """number to subtract from the logit of a token for each time it is in the text."""
    adapter: list[str] | None = None
    """adapter folder, or a run that trained an adapter. Repeat it to generate each text with
    several adapters. The base model is loaded once."""
    n: int = 1
    """number of texts per prompt."""
    must_use: bool = False
    """require the recipe format, with all ingredients of the prompt in the list."""
    schema: str | None = None
    """require JSON of this schema: a file, or "recipe" for schema.org's Recipe."""
    best_of: int = 1
    """number of texts to generate per prompt. The best one (with --n, the n best) is printed with
    its score and the mean score."""
    by: str | None = None
    """the score with which --best-of compares texts: cookable, another recipe score, or
    likelihood, the mean log-probability of the tokens. Default: cookable for recipe prompts,
    otherwise likelihood."""

    def refuse_changes(self) -> None:
        """Check that no flag was changed, for a command that chooses answers.

        Raises:
            ConfigError: A flag differs from its default.
        """
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"{flag(field.name)} applies only to generated texts. --choices and tasks with "
                    "classes compare answers with one model in float32. Leave one of the flags out."
                )

    def to_options(self) -> GenerationOptions:
        """Convert the flags to options; see `SamplingFlags`."""
        options = super().to_options()
        return replace(
            options,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )

    def to_request(
        self, prompts: list[str], *, file: str | None, task: str | None, raw: bool
    ) -> GenerationRequest:
        """Convert the flags to a request for texts.

        Raises:
            ConfigError: A value is not allowed, or two flags cannot be combined.
        """
        from toque.cooking.recipe_form import answer_schema
        from toque.evaluation.best_of import BestOf
        from toque.workflows.inference.generate import GenerationRequest

        return GenerationRequest(
            prompts=prompts,
            file=file,
            task=task,
            adapters=self.adapter or [],
            raw=raw,
            n=self.n,
            must_use=self.must_use,
            schema=None if self.schema is None else answer_schema(self.schema),
            options=self.to_options(),
            best=BestOf(self.best_of, self.by),
        )
