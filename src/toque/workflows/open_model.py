"""Model in use, opened from a run folder (finished or not) or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from toque.config import RunConfig, load_config
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.codec import Codec, load_codec
from toque.data.tokenizer.folder import resolve_tokenizer
from toque.errors import CheckpointError, DataError
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.lora.files import is_adapter_folder, merged
from toque.training.checkpoint.state_tensors import load_model_tensors
from toque.training.checkpoint.store import CheckpointStore
from toque.workflows.assembly.batches import build_language_model


@dataclass(frozen=True)
class OpenedModel:
    """A model with its tokenizer, and the run's configuration when it came from a run."""

    model: PreTrainedModel
    codec: Codec
    config: RunConfig | None
    step: int | None

    def check_tokenizer(self, store: TokenStore) -> None:
        """Refuse a store of another tokenizer.

        Raises:
            DataError: the ids would mean other text.
        """
        theirs = store.manifest.tokenizer
        if theirs.sha256 != self.codec.sha256:
            raise DataError(
                f"The store {store.path} was prepared with the tokenizer {theirs.name} "
                f"({theirs.vocab_size} entries), and the model has another ({self.codec.name}, "
                f"{self.codec.vocab_size}). Prepare one with model.tokenizer set to the model's."
            )


def open_model(path: str) -> OpenedModel:
    """The finished model of a run, else its newest checkpoint; or a Hugging Face model.

    Raises:
        CheckpointError: a run without a checkpoint, or a damaged one.
        ConfigError: neither a run, a model folder nor a hub name.
    """
    folder = Path(path)
    config = None
    if (folder / "config.yaml").exists():
        config = load_config(str(folder / "config.yaml"), []).config
        finished = folder / "model"
        if not (finished / "config.json").exists() and not is_adapter_folder(finished):
            return _from_checkpoint(folder, config)
        path = str(folder / "model")
    elif folder.is_dir() and not ((folder / "config.json").exists() or is_adapter_folder(folder)):
        raise CheckpointError(
            f"{path} holds neither a run (config.yaml), a model (config.json) nor an adapter "
            "(adapter_config.json). Name a run folder such as runs/cookbook, or a Hugging Face "
            "model folder."
        )
    adapted = is_adapter_folder(Path(path))
    model = load_with_adapter(Path(path)) if adapted else load_model(path)
    return OpenedModel(model, load_codec(resolve_tokenizer(path)), config, None)


def _from_checkpoint(folder: Path, config: RunConfig) -> OpenedModel:
    checkpoints = CheckpointStore(folder / "checkpoints")
    found = checkpoints.best() or checkpoints.newest_valid()
    if found is None:
        raise CheckpointError(
            f"The run {folder} has no checkpoint yet. Let it reach its first save "
            f"(train.save_every={config.train.save_every}), or name a finished run."
        )
    store = TokenStore.open(config.data.store)
    model = build_language_model(config, store)
    tensors = found.tensors("model")
    load_model_tensors(model, tensors, where=str(found.path))
    model.train(mode=False)
    return OpenedModel(merged(model), store.codec(), config, found.step)
