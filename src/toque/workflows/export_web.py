"""Export of a model as a web page that generates texts without a server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment
from transformers import PretrainedConfig

from toque.cooking.prompts import ASKS_FOR, MAX_PROMPT_INGREDIENTS, WITH_INGREDIENTS
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError
from toque.models.config_values import head_size, max_positions
from toque.models.loading.from_scratch import config_in
from toque.models.loading.provenance import Provenance
from toque.models.onnx_files.onnx_export import FOLDER
from toque.serving.static_files import SITE, read_style
from toque.storage.atomic import FolderWriter
from toque.workflows.browser_packages import package_files, packages_notice
from toque.workflows.trained_model.training_record import writes_recipes

PAGE: Final = SITE.parent / "offline"
_SHARED: Final = ("chips.js", "dom.js", "recipe_text.js", "toque.svg")
"""Files of the application that the page uses too."""
_WASM: Final = "ort-wasm-simd-threaded.wasm"
_N_SAMPLES: Final = 5  # number of prompts for which the page checks its tokenizer


class WebPage:
    """Page of a model: the files next to the ONNX files and the tokenizer."""

    def __init__(self, name: str, record: Provenance, packages: Path | None) -> None:
        """Collect the files.

        Raises:
            ConfigError: The model answers conversations, or `packages` has other versions.
            DataError: The packages cannot be downloaded.
        """
        if record.form == "conversations":
            raise ConfigError(
                "The web page has no conversations, and this model was trained on them. Use the "
                "format onnx, or `toque serve`."
            )
        self._name = name
        self._record = record
        self._is_recipe_model = writes_recipes(record)
        self._packages = package_files(packages)

    def write(
        self, writer: FolderWriter, codec: Codec, prompts: Mapping[str, Sequence[int]]
    ) -> None:
        """Write the files of the page next to the files of the model.

        Args:
            writer: Writer of the folder.
            codec: Tokenizer of the model.
            prompts: Prompts with their ids, which the page compares with its own.
        """
        for file, content in self._packages.items():
            writer.put(file, content)
        for file in _SHARED:
            writer.put(file, (SITE / file).read_bytes())
        for file in ("offline.js", "writer.js"):
            writer.put(file, (PAGE / file).read_bytes())
        writer.put("style.css", read_style())
        writer.put("packages.txt", packages_notice().encode())
        config = config_in(writer.folder)
        settings = self._settings(config, codec, writer.folder)
        settings["samples"] = [
            {"prompt": prompt, "ids": list(ids)}
            for prompt, ids in islice(prompts.items(), _N_SAMPLES)
        ]
        writer.put("settings.json", _to_json(settings))
        writer.put("app.webmanifest", _to_json(self._manifest()))
        page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        index = page.from_string((PAGE / "index.html").read_text(encoding="utf-8"))
        rendered = index.render(
            name=self._name,
            recipes=self._is_recipe_model,
            continues=self._record.form == "documents",
        )
        writer.put("index.html", rendered.encode())
        writer.put("service.js", self._service(writer.folder))

    def _settings(
        self, config: PretrainedConfig, codec: Codec, folder: Path
    ) -> dict[str, Any]:
        is_encoder = bool(config.is_encoder_decoder)
        values: Any = config
        heads = getattr(values, "num_key_value_heads", values.num_attention_heads)
        recipes = {
            "asks": ASKS_FOR,
            "using": WITH_INGREDIENTS,
            "max_ingredients": MAX_PROMPT_INGREDIENTS,
        }
        graphs = sorted((folder / FOLDER).iterdir())
        files = [_WASM, *(f"{FOLDER}/{graph.name}" for graph in graphs)]
        return {
            "recipes": recipes if self._is_recipe_model else None,
            "max_new_tokens": self._record.max_new_tokens,
            "no_repeat_ngram_size": self._record.no_repeat_ngram_size,
            "context": max_positions(config),
            "ends": codec.ordered_ends,
            "start": values.decoder_start_token_id if is_encoder else None,
            "heads": heads,
            "head_size": values.d_kv if is_encoder else head_size(config),
            "bytes": {name: (folder / name).stat().st_size for name in files},
        }

    def _manifest(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "short_name": self._name,
            "start_url": "./",
            "display": "standalone",
            "icons": [{"src": "toque.svg", "sizes": "any", "type": "image/svg+xml"}],
        }

    def _service(self, folder: Path) -> bytes:
        """Write the list of all files, and a version that changes with their content."""
        digest = hashlib.sha256()
        names = ["./"]
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                names.append(file.relative_to(folder).as_posix())
                digest.update(file.read_bytes())
        text = (PAGE / "service.js").read_text(encoding="utf-8")
        text = text.replace("{{ version }}", digest.hexdigest()[:16])
        return text.replace("{{ files }}", json.dumps(names)).encode()


def _to_json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
