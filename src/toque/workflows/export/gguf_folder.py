"""GGUF folder: what lies beside a model's weights for llama.cpp and Ollama, and how it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from toque.cooking.cookbook.generate import recipes
from toque.cooking.prompts import ASKS_FOR, WITH_INGREDIENTS, write_prompt
from toque.data.prepare.example_rows import asking_bounds, prompt_ids
from toque.data.prepare.prepare_settings import FamilyKind
from toque.data.tokenizer.chat import template_text
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, argument
from toque.models.loading.card_usage import with_gguf_usage
from toque.models.loading.provenance import Provenance, form_named
from toque.workflows.asking.provenance import UNKNOWN, example_prompt, is_recorded, writes_recipes

if TYPE_CHECKING:
    from toque.models.gguf.export import ExportedGguf
    from toque.models.gguf.vocabulary import Asking

N_PROMPTS: Final = 20
"""Prompts by which the file is compared with the model."""
_OLLAMA: Final = """# ollama create {name} -f Modelfile
FROM ./{file}
TEMPLATE \"\"\"{before}{{{{ .Prompt }}}}{after}\"\"\"
PARAMETER num_predict {most}
"""
_RECIPES: Final = """{{%- set asked = messages[-1]['content'] -%}}
{{%- if not asked.startswith({asks!r}) -%}}
{{%- set title = asked.split(':')[0] -%}}
{{%- set foods = asked[title|length + 1:].strip() -%}}
{{%- set asked = {asks!r} + ' ' + title.strip() + ({using!r} + foods if foods else '') -%}}
{{%- endif -%}}
{{{{- asked -}}}}"""
_AS_IT_IS: Final = "{{- messages[-1]['content'] -}}"


def export_gguf_folder(
    source: Path, to: Path, *, kind: str, card: str, record: Provenance, codec: Codec, encoder: bool
) -> ExportedGguf:
    """Write a model's GGUF folder; see `export_gguf`.

    Args:
        source: a model folder or an adapter folder.
        to: the folder to write.
        kind: how weights are stored.
        card: README.md of the model.
        record: what it is asked with.
        codec: its tokenizer.
        encoder: whether it is an encoder-decoder.

    Raises:
        ConfigError: the package gguf is absent, or llama.cpp computes no such model.
        CheckpointError: another model was read back.
    """
    try:
        from toque.models.gguf.export import export_gguf, gguf_name
        from toque.models.gguf.file import TYPES
    except ModuleNotFoundError as error:
        raise ConfigError(
            "The format gguf needs the package gguf, which is not installed. Install it with "
            "pip install 'toque[gguf]'."
        ) from error
    if kind not in TYPES:
        raise ConfigError(
            f"{argument('dtype')} is {kind}. Use one of {', '.join(TYPES)} in the format gguf."
        )
    family: FamilyKind = "encoder-decoder" if encoder else "decoder"
    form = form_named(record.form)
    file = gguf_name(to, kind)
    ends = "" if encoder or asking_bounds(codec, family, form)[1] is None else "\n"
    before = f"{ASKS_FOR} " if record is not UNKNOWN and writes_recipes(record) else ""
    some = [write_prompt(one.title, one.ingredients) for one in recipes(N_PROMPTS, 0)]
    files = {
        "README.md": with_gguf_usage(
            card,
            file=file,
            prompt=example_prompt(record),
            ends=ends,
            encoder=encoder,
            max_new_tokens=record.max_new_tokens,
        ),
        "Modelfile": _OLLAMA.format(
            name=to.name, file=file, before=before, after=ends, most=record.max_new_tokens
        ),
    }
    return export_gguf(
        source,
        to,
        kind=kind,
        tokenizer_json=codec.tokenizer_json,
        asking=_asking(codec, record, encoder=encoder, ends=ends),
        prompts=[prompt_ids(codec, text, family, form) for text in some],
        files=files,
    )


def _asking(codec: Codec, record: Provenance, *, encoder: bool, ends: str) -> Asking:
    from toque.models.gguf.vocabulary import Asking

    kind: FamilyKind = "encoder-decoder" if encoder else "decoder"
    return Asking(
        begin=asking_bounds(codec, kind, form_named(record.form))[0],
        eos=codec.eos_id,
        pad=codec.pad_id,
        unk=codec.unk_id,
        newline=codec.newline_id,
        ends_with_eos=encoder,
        template=chat_template(record, template_text(codec.settings), ends=ends),
    )


def chat_template(record: Provenance, own: str | None, *, ends: str) -> str:
    """Jinja that makes of a conversation's last message the prompt a model was trained on.

    "lentil soup: lentils, cumin" becomes "Generate recipe for: lentil soup using ingredients:
    lentils, cumin" for a model of recipes; others are sent what was typed.

    Args:
        record: what the model is asked with.
        own: the template that came with another's model, which is kept.
        ends: what ends a prompt.
    """
    if not is_recorded(record) and own is not None:
        return own
    asks = record is not UNKNOWN and writes_recipes(record)
    template = _RECIPES.format(asks=ASKS_FOR, using=WITH_INGREDIENTS) if asks else _AS_IT_IS
    return template + (f"{{{{- {ends!r} -}}}}" if ends else "")
