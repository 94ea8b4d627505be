"""Export of a run's model for transformers, or for llama.cpp and Ollama."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from toque.cooking.prompts import ASKS_FOR, WITH_INGREDIENTS
from toque.data.tokenizer.chat import chat_template_of, template_text
from toque.data.tokenizer.codec import Codec, FamilyKind, generation_bounds
from toque.data.tokenizer.tokenizer_folder import is_toques, read_folder
from toque.errors import CheckpointError, ConfigError, DataError, argument, needing
from toque.models.loading.card_usage import with_gguf_usage, with_usage
from toque.models.loading.hub import hub_name, push, refuse_push
from toque.models.loading.provenance import Provenance
from toque.storage.no_follow import refuse_endless_files, refuse_links_elsewhere
from toque.user_paths import named_path
from toque.version import __version__
from toque.workflows.compared_prompts import has_encoder, sample_prompts
from toque.workflows.results import Model, resolve_model
from toque.workflows.saved_steps import find_step, list_steps, run_of
from toque.workflows.trained_model.model_codec import (
    find_chat_template,
    find_tokenizer,
    model_files,
    open_codec,
)
from toque.workflows.trained_model.prompt_format import describe_prompts, example_prompt
from toque.workflows.trained_model.training_record import (
    FOREIGN,
    UNKNOWN,
    read_record,
    writes_recipes,
)

if TYPE_CHECKING:
    from toque.models.gguf.gguf_export import ExportedGguf
    from toque.models.gguf.gguf_vocabulary import PromptTokens
    from toque.models.loading.model_export import Exported
    from toque.models.onnx_files.onnx_export import ExportedOnnx

DEFAULT_DTYPES = {
    "hf": "f32",
    "gguf": "f16",
    "onnx": "f32",
    "web": "f16",
    "adapter": "f32",
}
_LIBRARIES = {"gguf": "gguf", "onnx": "transformers.js", "web": "transformers.js"}
_SAMPLE = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "1. Two eggs,\n  beaten."},
    {"role": "user", "content": "And then?"},
)
"""Conversation with which chat templates are compared."""
_MODELFILE = """# ollama create {name} -f Modelfile
FROM ./{file}
{template}
PARAMETER num_predict {max_tokens}
"""
_OLLAMA_TEMPLATE = 'TEMPLATE """{before}{{{{ .Prompt }}}}{after}"""'
_OLLAMA_CHAT = """# Ollama uses the chat template in the file if it supports it.
# Otherwise write the template here in Ollama's language: TEMPLATE ...
{stops}"""
_RECIPE_TEMPLATE = """{{%- set asked = messages[-1]['content'] -%}}
{{%- if not asked.startswith({asks!r}) -%}}
{{%- set title = asked.split(':')[0] -%}}
{{%- set foods = asked[title|length + 1:].strip() -%}}
{{%- set asked = {asks!r} + ' ' + title.strip() + ({using!r} + foods if foods else '') -%}}
{{%- endif -%}}
{{{{- asked -}}}}"""
_UNCHANGED_TEMPLATE = "{{- messages[-1]['content'] -}}"


def export(
    run_or_model: Model,
    to: str | Path,
    *,
    step: int | None = None,
    form: str = "hf",
    dtype: str | None = None,
    push_to: str | None = None,
    packages: str | Path | None = None,
) -> Exported | ExportedGguf | ExportedOnnx:
    """Write a model for other programs. Read it back and compare it with the original.

    Args:
        run_or_model: A run, a checkpoint, a model or an adapter folder.
        to: A new folder for the export.
        step: Step of a run's checkpoint or best model. None means the finished model.
        form: hf (a Hugging Face folder with the adapter merged), gguf (a file for llama.cpp and
            Ollama), onnx (files for onnxruntime and transformers.js), web, or adapter (a folder for
            peft, without its base). The format web is a page that generates texts in a browser,
            without a server.
        dtype: Type of the weights: f32, bf16 or f16, for gguf also q8_0, q5_1, q5_0, q4_1 or q4_0,
            and for onnx and web f32, f16 or int8. None means f16 for gguf and web, and f32 for hf
            and onnx.
        packages: web: a folder node_modules with the JavaScript packages. None means that they are
            downloaded once.
        push_to: A repository on the hub, owner/name, that receives a copy of the verified export.
            A new repository is private.

    Raises:
        ConfigError: The folder is not a run or model, the format or type is unknown, the format
            does not support the model, or you may not push.
        CheckpointError: The run is not finished, or the export differs from the model.
    """
    if form not in DEFAULT_DTYPES:
        raise ConfigError(
            f"{argument('form')} must be one of {', '.join(DEFAULT_DTYPES)}, not {form!r}."
        )
    if push_to is not None:
        refuse_push(push_to)
    folder = resolve_model(run_or_model)
    if step is not None:
        folder = find_step(folder, step)
    target = named_path(to)
    with _model_folder(folder, target) as source:
        refuse_endless_files(source)
        refuse_links_elsewhere(source)
        if form == "adapter":
            _refuse_adapter(source, dtype, push_to=push_to)
        original_card = _card_in(source, otherwise=f"# {target.name}\n")
        card = _convert_front_matter(original_card, form)
        record = read_record(folder)
        dtype = dtype or DEFAULT_DTYPES[form]
        exported: Exported | ExportedGguf | ExportedOnnx
        if form == "hf":
            exported = _export_hf(source, target, dtype, card, record)
        elif form == "gguf":
            exported = _export_gguf(source, target, dtype.lower(), card, record)
        elif form in ("onnx", "web"):
            with needing("onnx", f"The format {form}"):
                from toque.workflows.export_onnx import export_onnx, export_web
            arguments = (source, target, dtype, card, record)
            if form == "onnx":
                exported = export_onnx(*arguments)
            else:
                exported = export_web(*arguments, packages)
        else:
            from toque.models.loading.model_export import export_adapter  # loads torch

            exported = export_adapter(source, target, card=card)
    if push_to is not None:
        push(exported.folder, push_to)
    return exported


@contextmanager
def _model_folder(folder: Path, target: Path) -> Iterator[Path]:
    """Yield the model folder of a run or model, or a temporary one for a checkpoint.

    Raises:
        ConfigError: The folder is not a run or a model.
        CheckpointError: The run has no finished model.
    """
    if run_of(folder) is not None:
        from toque.models.loading.model_export import refuse_nonempty  # loads torch

        # Reading a checkpoint takes time, so the target is checked first.
        refuse_nonempty(target)
        with TemporaryDirectory(prefix="toque-export-") as temporary:
            source = Path(temporary) / "model"
            _write_checkpoint(folder, source)
            yield source
        return

    source = folder
    if (folder / "config.yaml").exists():
        source = folder / "model"
        if not source.exists():
            raise CheckpointError(
                f"The run {folder} has no finished model yet. Wait until `toque train` ends, or "
                f"name a checkpoint with {argument('step=N')}. {list_steps(folder)}"
            )
    # This check needs no torch, so a wrong name fails immediately.
    names = ("config.json", "adapter_config.json")
    if not any((source / name).exists() for name in names):
        raise ConfigError(
            f"{folder} is not a run, checkpoint, model folder or adapter folder. Name a run such "
            "as runs/cookbook."
        )
    yield source


def _write_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write the model of a checkpoint in the format of a finished model."""
    from toque.workflows.final_model import write_trained  # loads torch
    from toque.workflows.inference.open_model import checkpoint_model

    trained = checkpoint_model(checkpoint)
    run = run_of(checkpoint)
    name = "the run" if run is None else run.name
    card = (
        f"# {name}, step {trained.step:,}\n\nThe weights of a run by Toque {__version__} after "
        f"{trained.step:,} updates. They were not scored, and their licence is not recorded.\n\n"
        f"{describe_prompts(trained.record)}\n"
    )
    write_trained(trained, folder, card=card)


def _card_in(folder: Path, *, otherwise: str) -> str:
    """Read the card of a model folder, or return `otherwise`.

    Raises:
        CheckpointError: The card is not UTF-8.
    """
    readme = folder / "README.md"
    try:
        return readme.read_text(encoding="utf-8") if readme.is_file() else otherwise
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{readme} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}), "
            "so it cannot become the card of the exported model. Save it as UTF-8, or move it away "
            "to get a new card."
        ) from error


def _export_hf(
    source: Path, to: Path, dtype: str, card: str, record: Provenance
) -> Exported:
    """Export a Hugging Face folder. A model that Toque did not train keeps its tokenizer files."""
    from toque.models.loading.model_export import DTYPES, export_model  # loads torch

    if dtype not in DTYPES:
        raise ConfigError(
            f"{argument('dtype')} must be one of {', '.join(DTYPES)} in the format hf, not {dtype}."
        )
    tokenizer = find_tokenizer(source)
    if record is FOREIGN and not is_toques(source):
        end_ids: list[int] = []
        with suppress(CheckpointError):  # an unreadable tokenizer is copied unchanged
            end_ids = open_codec(source, record).ordered_ends
        exported = export_model(
            source, to, codec_folder=tokenizer, card=card, dtype=dtype, end_ids=end_ids
        )
        return _compare_chat_templates(tokenizer, exported)

    codec = open_codec(source, record)
    encoder = has_encoder(source)
    files, portable = model_files(codec, record, encoder=encoder)
    card = with_usage(
        card,
        prompt=example_prompt(record),
        encoder=encoder,
        max_new_tokens=record.max_new_tokens,
        portable=portable,
    )
    exported = export_model(
        source,
        to,
        codec_folder=tokenizer,
        card=card,
        dtype=dtype,
        files=files,
        record=record,
        end_ids=codec.ordered_ends,
    )
    return _compare_chat_templates(tokenizer, exported)


def _convert_front_matter(card: str, form: str) -> str:
    """Convert the front matter of a card for an export in `form`: hf, gguf or adapter."""
    head, mark, text = card.partition("\n---\n")
    if not card.startswith("---\n") or form == "adapter":
        return card
    head = head.replace("\nlibrary_name: peft", "\nlibrary_name: transformers")
    head = head.replace(
        "\nbase_model_relation: adapter", "\nbase_model_relation: finetune"
    )
    library = _LIBRARIES.get(form, "transformers")
    head = head.replace("\nlibrary_name: transformers", f"\nlibrary_name: {library}")
    return head + mark + text


def _refuse_adapter(source: Path, dtype: str | None, *, push_to: str | None) -> None:
    """Raise a ConfigError for a complete model, or for a base that is not on the hub."""
    from toque.models.lora.adapter_files import CONFIG, is_adapter_folder, read_config

    if dtype is not None:
        raise ConfigError(
            f"{argument('form=adapter')} and {argument('dtype')} cannot be combined, because an "
            f"adapter is copied unchanged. Use {argument('form=hf')}."
        )
    if not is_adapter_folder(source):
        raise ConfigError(
            f"{argument('form=adapter')} needs an adapter, but {source} has a complete model. Use "
            f"{argument('form=hf')}."
        )
    base = str(read_config(source).base_model_name_or_path)
    if push_to is not None and hub_name(base) is None:
        raise ConfigError(
            f"The base of the adapter {source} is {base}, a folder on this machine, so other users "
            "cannot use the adapter. If the hub has the base, write its name as "
            f"base_model_name_or_path in {source / CONFIG}. Otherwise use {argument('form=hf')}."
        )


def _compare_chat_templates(source: Path, exported: Exported) -> Exported:
    """Compare the chat templates of a model and its export, and add the result to the export.

    Raises:
        CheckpointError: The chat templates produce different tokens. The export is removed.
    """
    original_ids = _encode_sample(source)
    exported_ids = _encode_sample(exported.folder)
    if exported_ids is None and (original_ids is None or is_toques(source)):
        return exported
    if exported_ids is None or exported_ids != original_ids:
        shutil.rmtree(exported.folder, ignore_errors=True)
        raise CheckpointError(
            f"The chat template in {exported.folder} produces different tokens from the template "
            f"in {source}, so the export was removed. Please report this bug."
        )
    result = f" Its chat template produces the same {len(exported_ids)} tokens as the original."
    return replace(exported, template=result)


def _encode_sample(folder: Path) -> list[int] | None:
    """Encode the sample conversation with a folder's chat template. Return None on failure."""
    if not (folder / "tokenizer.json").is_file():
        return None
    # The template may refuse the sample, or the tokenizer may be unreadable.
    with suppress(DataError):
        template = chat_template_of(Codec(read_folder(folder, plain=True)))
        return None if template is None else template.ids(_SAMPLE).result()
    return None


def _export_gguf(
    source: Path, to: Path, kind: str, card: str, record: Provenance
) -> ExportedGguf:
    """Export a GGUF file with a Modelfile for Ollama."""
    with needing("gguf", "The format gguf"):
        from toque.models.gguf.gguf_export import TYPES, export_gguf, gguf_name
    if kind not in TYPES:
        raise ConfigError(
            f"{argument('dtype')} must be one of {', '.join(TYPES)} in the format gguf, not {kind}."
        )
    codec = open_codec(source, record)
    find_chat_template(codec, record)  # also lets texts end at the end of a turn
    encoder = has_encoder(source)
    family: FamilyKind = "encoder-decoder" if encoder else "decoder"
    begin, end = generation_bounds(codec, family, record.form)
    # A line break ends a decoder's prompt, unless the model continues the prompt.
    ends = "" if encoder or end is None else "\n"
    file = gguf_name(to, kind)
    usage = with_gguf_usage(
        card,
        file=file,
        prompt=example_prompt(record),
        ends=ends,
        encoder=encoder,
        max_new_tokens=record.max_new_tokens,
    )

    template = chat_template(record, template_text(codec.settings), ends=ends)
    modelfile = _MODELFILE.format(
        name=to.name,
        file=file,
        template=_ollama_template(codec, record, template, ends=ends),
        max_tokens=record.max_new_tokens,
    )
    return export_gguf(
        source,
        to,
        kind=kind,
        tokenizer_json=codec.tokenizer_json,
        tokens=_prompt_tokens(codec, begin, template, encoder=encoder),
        prompts=list(sample_prompts(codec, family, record).values()),
        files={"README.md": usage, "Modelfile": modelfile},
    )


def _prompt_tokens(
    codec: Codec, begin: int | None, template: str, *, encoder: bool
) -> PromptTokens:
    """Return the special tokens and the chat template for the file."""
    from toque.models.gguf.gguf_vocabulary import PromptTokens  # needs the extra gguf

    return PromptTokens(
        begin=begin,
        # llama.cpp needs the token even if prompts do not begin with it.
        bos=codec.pieces().get(codec.special_tokens.get("bos_token", "")),
        ends=codec.ordered_ends,
        pad=codec.pad_id,
        unk=codec.unk_id,
        newline=codec.newline_id,
        ends_with_eos=encoder,
        template=template,
    )


def _ollama_template(
    codec: Codec, record: Provenance, template: str, *, ends: str
) -> str:
    """Return the lines of a Modelfile that turn messages into prompts, which end in `ends`."""
    if template == template_text(codec.settings):
        pieces = [codec.piece(token) for token in codec.ordered_ends]
        stops = [
            f"PARAMETER stop {json.dumps(piece, ensure_ascii=False)}"
            for piece in pieces
        ]
        return _OLLAMA_CHAT.format(stops="\n".join(stops))
    before = f"{ASKS_FOR} " if _needs_recipe_prompts(record) else ""
    return _OLLAMA_TEMPLATE.format(before=before, after=ends)


def chat_template(record: Provenance, own_template: str | None, *, ends: str) -> str:
    """Return a Jinja template that turns the last message into a prompt for the model.

    For a model of recipes, "lentil soup: lentils, cumin" becomes "Generate recipe for: lentil soup
    using ingredients: lentils, cumin". Other models receive the message unchanged.

    Args:
        record: Record of the model.
        own_template: Template in the model's files. It is kept if Toque did not train the model, or
            trained it on conversations.
        ends: Text at the end of a prompt.
    """
    keeps_template = (
        record is UNKNOWN or record is FOREIGN or record.form == "conversations"
    )
    if keeps_template and own_template is not None:
        return own_template
    template = _UNCHANGED_TEMPLATE
    if _needs_recipe_prompts(record):
        template = _RECIPE_TEMPLATE.format(asks=ASKS_FOR, using=WITH_INGREDIENTS)
    return template + (f"{{{{- {ends!r} -}}}}" if ends else "")


def _needs_recipe_prompts(record: Provenance) -> bool:
    """Return whether the model is known to generate recipes from titles and ingredients."""
    return record is not UNKNOWN and writes_recipes(record)
