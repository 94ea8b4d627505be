"""Export of a run's model, merged, for transformers, or for llama.cpp and Ollama."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from toque.cooking.cookbook.recipes import recipes
from toque.cooking.prompts import ASKS_FOR, WITH_INGREDIENTS, write_prompt
from toque.data.tokenizer.chat import chat_template_of, prompt_ids, template_text
from toque.data.tokenizer.codec import Codec, FamilyKind, asking_bounds
from toque.data.tokenizer.tokenizer_folder import is_toques, read_folder
from toque.errors import CheckpointError, ConfigError, DataError, argument, needing
from toque.models.loading.card_usage import with_gguf_usage, with_usage
from toque.models.loading.hub import hub_name, push, refuse_push, resolve_folder
from toque.models.loading.provenance import Provenance
from toque.storage.no_follow import refuse_endless_files, refuse_links_elsewhere
from toque.user_paths import named_path
from toque.version import __version__
from toque.workflows.asking import (
    FOREIGN,
    UNKNOWN,
    codec_in,
    example_prompt,
    form_in_words,
    model_files,
    provenance_in,
    template_asked_by,
    tokenizer_of,
    writes_recipes,
)
from toque.workflows.card_head import head_as
from toque.workflows.results import Model, existing_folder
from toque.workflows.saved_steps import folder_of_step, run_of, steps_in_words

if TYPE_CHECKING:
    from toque.models.gguf.gguf_export import ExportedGguf
    from toque.models.loading.model_export import Exported

DEFAULT_DTYPES: Final = {"hf": "f32", "gguf": "f16", "adapter": "f32"}
_SAMPLE: Final = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "1. Two eggs,\n  beaten."},
    {"role": "user", "content": "And then?"},
)  # a conversation by which chat templates are compared
N_PROMPTS: Final = 20  # prompts by which the file is compared with the model
_OLLAMA: Final = """# ollama create {name} -f Modelfile
FROM ./{file}
{asks}
PARAMETER num_predict {most}
"""
_AROUND: Final = 'TEMPLATE """{before}{{{{ .Prompt }}}}{after}"""'
_TALKS: Final = """# Ollama talks by the chat template in the file where it knows that one.
# Another must be written here in Ollama's words: TEMPLATE ...
{stops}"""
_RECIPES: Final = """{{%- set asked = messages[-1]['content'] -%}}
{{%- if not asked.startswith({asks!r}) -%}}
{{%- set title = asked.split(':')[0] -%}}
{{%- set foods = asked[title|length + 1:].strip() -%}}
{{%- set asked = {asks!r} + ' ' + title.strip() + ({using!r} + foods if foods else '') -%}}
{{%- endif -%}}
{{{{- asked -}}}}"""
_AS_IT_IS: Final = "{{- messages[-1]['content'] -}}"


def export(
    run_or_model: Model,
    to: str | Path,
    *,
    step: int | None = None,
    form: str = "hf",
    dtype: str | None = None,
    push_to: str | None = None,
) -> Exported | ExportedGguf:
    """Write a model for use elsewhere, by default merged; read it back and compare.

    Args:
        run_or_model: a run, a checkpoint, a model or an adapter folder.
        to: the folder to write; nothing may lie there.
        step: the step of a run's checkpoint or best model; None for its finished model.
        form: hf, a Hugging Face folder; gguf, a file for llama.cpp and Ollama; or adapter, one that
            peft reads beside its base.
        dtype: of the weights: f32, bf16 or f16; in the format gguf also q8_0, q5_1, q5_0, q4_1 or
            q4_0. None for f32 in the format hf and f16 in the format gguf.
        push_to: a repository on the hub, owner/name, that gets a copy once it has passed; made
            private where it does not exist. None for none.

    Raises:
        ConfigError: neither a run nor a model, a format or type that is not known, a model that
            the format cannot hold, or no permission to push.
        CheckpointError: the run is not finished, or what was written is not the same model.
    """
    if form not in DEFAULT_DTYPES:
        raise ConfigError(f"{argument('form')} is {form!r}. Use {' or '.join(DEFAULT_DTYPES)}.")
    if push_to is not None:
        refuse_push(push_to)
    given, target = existing_folder(run_or_model), named_path(to)
    if step is not None:
        given = folder_of_step(given, step)
    with _model_folder(given, target) as source:
        refuse_endless_files(source)
        refuse_links_elsewhere(source)
        if form == "adapter":
            _refuse_adapter(source, dtype, push_to=push_to)
        card = head_as(_card_in(source, otherwise=f"# {target.name}\n"), form)
        writers: dict[str, Callable[[Path, Path, str, str, Provenance], Exported | ExportedGguf]]
        writers = {"hf": _hf_folder, "gguf": _gguf_folder, "adapter": _adapter_folder}
        made = writers[form](
            source, target, dtype or DEFAULT_DTYPES[form], card, provenance_in(given)
        )
    if push_to is not None:
        push(made.folder, push_to)
    return made


@contextmanager
def _model_folder(given: Path, target: Path) -> Iterator[Path]:
    """The model folder of a run or a model; of a checkpoint one that is removed again."""
    if run_of(given) is not None:
        from toque.models.loading.model_export import refuse_taken  # with torch

        refuse_taken(target)
        with TemporaryDirectory(prefix="toque-export-") as temporary:
            source = Path(temporary) / "model"
            _write_checkpoint(given, source)
            yield source
        return
    source = given
    if (given / "config.yaml").exists():
        source = given / "model"
        if not source.exists():
            raise CheckpointError(
                f"The run {given} has no finished model yet. Let `toque train` end first, or "
                f"name a checkpoint with {argument('step=N')}. {steps_in_words(given)}"
            )
    # Without torch, so that a wrong name is answered at once.
    if not any((source / name).exists() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(
            f"{given} is neither a run, a checkpoint, a model folder nor an adapter folder. Name a "
            "run such as runs/cookbook."
        )
    yield source


def _write_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write the model of a checkpoint as the end of its run would write it."""
    from toque.workflows.final_model import keep_model  # with torch
    from toque.workflows.inference.open_model import checkpoint_model

    trained = checkpoint_model(checkpoint)
    run = run_of(checkpoint)
    name = "the run" if run is None else run.name
    card = (
        f"# {name}, step {trained.step:,}\n\nThe weights of a run by Toque {__version__} after "
        f"{trained.step:,} updates. Their scores are not measured here, and the licence is not "
        f"recorded.\n\n{form_in_words(trained.record)}\n"
    )
    keep_model(
        trained.model,
        trained.codec,
        folder,
        card=card,
        record=trained.record,
        base_hash=trained.base_hash,
    )


def _card_in(folder: Path, *, otherwise: str) -> str:
    """The card of a model folder, which anyone may have written; CheckpointError for no UTF-8."""
    readme = folder / "README.md"
    try:
        return readme.read_text(encoding="utf-8") if readme.is_file() else otherwise
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{readme} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}), "
            "and it would become the card of what is written. Save it as UTF-8, or move it away: a "
            "new one is written then."
        ) from error


def _hf_folder(source: Path, to: Path, dtype: str, card: str, record: Provenance) -> Exported:
    from toque.models.loading.model_export import DTYPES, export_model  # with torch

    if dtype not in DTYPES:
        raise ConfigError(
            f"{argument('dtype')} is {dtype}. Use {', '.join(DTYPES)} in the format hf."
        )
    tokenizer = tokenizer_of(source)
    if record is FOREIGN and not is_toques(source):  # of another's model nothing is known to add
        ends: list[int] = []
        with suppress(CheckpointError):  # a tokenizer that Toque cannot read is copied as it is
            ends = codec_in(source, record).ordered_ends
        made = export_model(
            source, to, codec_folder=tokenizer, card=card, dtype=dtype, end_ids=ends
        )
        return _compared(tokenizer, made)
    codec, encoder, most = codec_in(source, record), _has_encoder(source), record.max_new_tokens
    files, portable = model_files(codec, record, encoder=encoder)
    asked = example_prompt(record)
    card = with_usage(card, prompt=asked, encoder=encoder, max_new_tokens=most, portable=portable)
    made = export_model(
        source,
        to,
        codec_folder=tokenizer,
        card=card,
        dtype=dtype,
        files=files,
        record=record,
        end_ids=codec.ordered_ends,
    )
    return _compared(tokenizer, made)


def _adapter_folder(
    source: Path, to: Path, _dtype: str, card: str, _record: Provenance
) -> Exported:
    from toque.models.loading.model_export import export_adapter  # with torch

    return export_adapter(source, to, card=card)


def _refuse_adapter(source: Path, dtype: str | None, *, push_to: str | None) -> None:
    """Refuse, with a ConfigError, what is no adapter, or one to push whose base nobody else has."""
    from toque.models.lora.adapter_files import CONFIG, is_adapter_folder, read_config

    if dtype is not None or not is_adapter_folder(source):
        raise ConfigError(
            f"{argument('form')} is adapter, and "
            + (f"{argument('dtype')} is set" if dtype else f"{source} holds a whole model")
            + ": an adapter is copied as it was trained. Use the form hf."
        )
    base = str(read_config(source).base_model_name_or_path)
    if push_to is not None and hub_name(base) is None:
        raise ConfigError(
            f"The base of the adapter {source} is {base}, a folder of this machine, which nobody "
            "has who downloads the adapter. If the hub has it, write its name into "
            f"base_model_name_or_path of {source / CONFIG}; otherwise use the form hf."
        )


def _compared(source: Path, made: Exported) -> Exported:
    """The folder; removed, by a CheckpointError, where its chat template writes other tokens."""
    there, here = _conversation_in(made.folder), _conversation_in(source)
    if there is None and (here is None or is_toques(source)):  # older runs had their base's
        return made
    if there is None or there != here:
        shutil.rmtree(made.folder, ignore_errors=True)
        raise CheckpointError(
            f"The chat template in {made.folder} writes other tokens than that of {source}, so it "
            "was removed. Please report this."
        )
    told = f" Its chat template was compared, too: it writes the same {len(there)} tokens."
    return replace(made, template=told)


def _conversation_in(folder: Path) -> list[int] | None:
    """Text that transformers' `apply_chat_template` makes of a sample; None where it makes none."""
    if not (folder / "tokenizer.json").is_file():
        return None
    with suppress(DataError):  # it refuses the sample, or Toque cannot read its tokenizer
        template = chat_template_of(Codec(read_folder(folder, plain=True)))
        return None if template is None else template.ids(_SAMPLE).result()
    return None


def _has_encoder(source: Path) -> bool:
    """True if the model of a folder, or the base of an adapter, is an encoder-decoder."""
    from toque.models.loading.from_scratch import config_in
    from toque.models.lora.adapter_files import is_adapter_folder, read_config

    if is_adapter_folder(source):
        source = resolve_folder(str(read_config(source).base_model_name_or_path))
    return bool(config_in(source).is_encoder_decoder)


def _gguf_folder(source: Path, to: Path, kind: str, card: str, record: Provenance) -> ExportedGguf:
    kind = kind.lower()
    with needing("gguf", "The format gguf"):
        from toque.models.gguf.gguf_export import TYPES, export_gguf, gguf_name
        from toque.models.gguf.gguf_vocabulary import PromptTokens
    if kind not in TYPES:
        raise ConfigError(
            f"{argument('dtype')} is {kind}. Use one of {', '.join(TYPES)} in the format gguf."
        )
    codec, encoder, most = codec_in(source, record), _has_encoder(source), record.max_new_tokens
    template_asked_by(codec, record)  # whose turns the codec ends as it does
    family: FamilyKind = "encoder-decoder" if encoder else "decoder"
    begin, end = asking_bounds(codec, family, record.form)
    file, ends = gguf_name(to, kind), "" if encoder or end is None else "\n"
    asked = example_prompt(record)
    usage = with_gguf_usage(
        card, file=file, prompt=asked, ends=ends, encoder=encoder, max_new_tokens=most
    )
    own = template_text(codec.settings)
    template = chat_template(record, own, ends=ends)
    before = f"{ASKS_FOR} " if record is not UNKNOWN and writes_recipes(record) else ""
    asks = _AROUND.format(before=before, after=ends)
    if template == own:
        pieces = [json.dumps(codec.piece(i), ensure_ascii=False) for i in codec.ordered_ends]
        asks = _TALKS.format(stops="\n".join(f"PARAMETER stop {piece}" for piece in pieces))
    modelfile = _OLLAMA.format(name=to.name, file=file, asks=asks, most=most)
    some = [write_prompt(one.title, one.ingredients) for one in recipes(N_PROMPTS, 0)]
    tokens = PromptTokens(
        begin=begin,
        # Also where prompts do not begin with it.
        bos=codec.pieces().get(codec.special_tokens.get("bos_token", "")),
        ends=codec.ordered_ends,
        pad=codec.pad_id,
        unk=codec.unk_id,
        newline=codec.newline_id,
        ends_with_eos=encoder,
        template=template,
    )
    return export_gguf(
        source,
        to,
        kind=kind,
        tokenizer_json=codec.tokenizer_json,
        tokens=tokens,
        prompts=[prompt_ids(codec, text, family, record.form) for text in some],
        files={"README.md": usage, "Modelfile": modelfile},
    )


def chat_template(record: Provenance, own: str | None, *, ends: str) -> str:
    """Jinja that makes of a conversation's last message the prompt a model was trained on.

    "lentil soup: lentils, cumin" becomes "Generate recipe for: lentil soup using ingredients:
    lentils, cumin" for a model of recipes; others are sent what was typed.
    `own` came with another's model and is kept; `ends` ends a prompt.
    """
    known = record is UNKNOWN or record is FOREIGN or record.form == "conversations"
    if known and own is not None:
        return own
    asks = record is not UNKNOWN and writes_recipes(record)
    template = _RECIPES.format(asks=ASKS_FOR, using=WITH_INGREDIENTS) if asks else _AS_IT_IS
    return template + (f"{{{{- {ends!r} -}}}}" if ends else "")
