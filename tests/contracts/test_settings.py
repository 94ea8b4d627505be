"""No setting without an effect: change each field in a tiny run and demand a difference.

A new field without a row here fails the test. Fields that later versions fill must refuse
everything but their neutral value.
"""

import gzip
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiny import shape_yaml
from toque.cli import main
from toque.config.error_messages import find_field, section_of, setting_paths
from toque.config.schema_methods import AdapterConfig, ProfileConfig
from toque.cooking.cookbook.recipes import write_cookbook

BASE = """
run_dir: {run}
model: {{family: gpt2, tokenizer: "trained:512",
  shape: {shape}}}
data: {{sources: [{{path: "{source}"}}], store: "{store}", max_prompt_tokens: 64,
  max_target_tokens: 256, dedup: exact}}
optim: {{warmup: "2 steps", peak_lr: 1e-2}}
train: {{stop_after: "6 steps", batch: "1024 tokens", evaluate_every: "2 steps", precision: float32,
  save_every: "2 steps"}}
evaluation: {{max_examples: 4, generate: 0}}
observe: {{log_every: "1 step"}}
"""

# field: (a value that is not the base's, what must differ)
EFFECTS: dict[str, tuple[str, str]] = {
    "run_dir": ("HERE/other-run", "folder"),
    "seed": ("18", "losses"),
    "model.family": ("llama", "refusal"),  # GPT-2's shape is no Llama's
    "model.start_from": ("no/such/folder", "refusal"),
    "model.shape": (shape_yaml("gpt2", layers=1, heads=2, positions=512), "losses"),
    "model.tokenizer": ("trained:600", "store"),
    "data.sources": ('[{path: "OTHER"}]', "store"),
    "data.sources.path": ('[{path: "OTHER"}]', "store"),
    "data.sources.format": ('[{path: "SOURCE", format: text}]', "store"),
    "data.sources.columns": ('[{path: "SOURCE", columns: {title: source}}]', "store"),
    "data.sources.max_files": ('[{path: "SOURCE", max_files: 1}]', "said"),
    "data.sources.weight": ('[{path: "SOURCE", weight: 2.0}]', "losses"),
    "data.sources.licence": ('[{path: "SOURCE", licence: CC-BY-4.0}]', "data_in_card"),
    "model.licence": ("mit", "licence_in_card"),
    "data.engine": ("ray", "said"),
    "data.store": ("HERE/other-store", "store_folder"),
    "data.tasks": ("[difficulty]", "store"),
    "data.tasks.NAME.prompt": (
        "{t: {prompt: 'Why {title}', target: '{title}'}}",
        "store",
    ),
    "data.tasks.NAME.target": (
        "{t: {prompt: '{title}', target: '{title} {directions}'}}",
        "store",
    ),
    "data.tasks.NAME.classes": (
        "{t: {prompt: '{title}', target: '{title}', classes: [a, b]}}",
        "refusal",
    ),  # no recipe's title is one
    "data.tasks.NAME.metrics": (
        "{t: {prompt: '{title}', target: '{title}', metrics: [valid_json]}}",
        "scores",
    ),
    "data.task_weights": ("{next_step: 3.0}", "losses"),
    "data.task_temperature": ("3.0", "losses"),
    "data.max_prompt_tokens": ("12", "store"),
    "data.max_target_tokens": ("40", "store"),
    "data.chat_template": (
        "plain",
        "refusal",
    ),  # of conversations, which recipes are not
    "data.chat_date": ("2026-01-31", "refusal"),
    "data.loss_on": ("last_answer", "refusal"),
    "data.on_overlong": ("drop", "store"),
    "data.validation": ('[{path: "OTHER"}]', "store"),
    "data.validation.path": ('[{path: "OTHER"}]', "store"),
    "data.validation.format": ('[{path: "OTHER", format: text}]', "store"),
    "data.validation.columns": ('[{path: "OTHER", columns: {title: source}}]', "store"),
    "data.validation.max_files": ('[{path: "OTHER", max_files: 1}]', "said"),
    "data.validation.licence": (
        '[{path: "OTHER", licence: CC-BY-4.0}]',
        "data_in_card",
    ),
    "data.validation_fraction": ("0.3", "store"),
    "data.max_examples": ("20", "store"),
    "data.min_quality": ("1.0", "store"),
    "data.max_bad_share": ("0.0", "refusal"),
    "data.encoding": ("cp037", "store"),  # of mainframes: even their letters are others
    "data.dedup": ("none", "store"),
    "span_corruption": ("{}", "losses"),
    "span_corruption.density": ("0.3", "losses"),
    "span_corruption.mean_length": ("9.0", "losses"),
    "augmentation": ("{prompt_formats: true}", "losses"),
    "augmentation.prompt_formats": ("true", "losses"),
    "augmentation.instructions": ("1.0", "losses"),
    "augmentation.paraphrase": ("1.0", "losses"),
    "augmentation.substitute": ("1.0", "losses"),
    "augmentation.tips": ("1.0", "losses"),
    "curriculum": ("{stages: [{from: 0 %, max_steps: 5}]}", "losses"),
    "curriculum.stages": ("[{from: 0 %, max_steps: 5}]", "losses"),
    "curriculum.stages.from": (
        "[{from: 0 %}, {from: 4 steps, max_steps: 5}]",
        "losses",
    ),
    "curriculum.stages.max_difficulty": (
        "[{from: 0 %, max_difficulty: easy}]",
        "losses",
    ),
    "curriculum.stages.min_quality": ("[{from: 0 %, min_quality: 1.0}]", "losses"),
    "curriculum.stages.max_ingredients": (
        "[{from: 0 %, max_ingredients: 6}]",
        "losses",
    ),
    "curriculum.stages.max_steps": ("[{from: 0 %, max_steps: 5}]", "losses"),
    "optim.name": ("muon", "losses"),
    "optim.betas": ("[0.5, 0.6]", "losses"),
    "optim.eps": ("1e-3", "losses"),
    "optim.momentum": ("0.5", "losses"),
    "optim.peak_lr": ("2e-2", "losses"),
    "optim.schedule": ("constant", "losses"),
    "optim.warmup": ("4 steps", "losses"),
    "optim.min_lr": ("5e-3", "losses"),
    "optim.weight_decay": ("0.9", "losses"),
    "optim.max_grad_norm": ("0.01", "losses"),
    "optim.label_smoothing": ("0.1", "losses"),
    # The run starts from scratch and imitates, which each of these refuses.
    "objective.kind": ("dpo", "refusal"),
    "objective.beta": ("0.2", "refusal"),
    "objective.label_smoothing": ("0.1", "refusal"),
    "objective.sft_weight": ("1", "refusal"),
    "objective.length_normalised": ("true", "refusal"),
    "objective.rewards": ("{recipe_score: 1}", "refusal"),
    "objective.samples": ("4", "refusal"),
    "objective.temperature": ("0.7", "refusal"),
    "objective.kl": ("0.1", "refusal"),
    "optim.cycles": ("{first: 2 steps}", "losses"),
    "optim.cycles.first": ("{first: 2 steps}", "losses"),
    "optim.cycles.growth": ("{first: 1 steps, growth: 1}", "losses"),
    "optim.cooldown": ("60 %", "losses"),
    "optim.gradient_noise": ("{eta: 0.1}", "losses"),
    "optim.gradient_noise.eta": ("{eta: 0.2}", "losses"),
    "optim.gradient_noise.gamma": ("{eta: 0.1, gamma: 3.0}", "losses"),
    "optim.ema_decay": ("0.5", "said"),
    "optim.outliers": ("{sigma: 1e-6, window: 2}", "losses"),
    "optim.outliers.sigma": ("{sigma: 1e-6, window: 2}", "warnings"),
    "optim.outliers.window": ("{sigma: 1e-6, window: 2}", "losses"),
    "optim.outliers.roll_back_after": (
        "{sigma: 1e-6, window: 2, roll_back_after: 3}",
        "warnings",
    ),
    "adapter": ("{r: 4}", "losses"),
    "adapter.start_from": ("no/such/folder", "refusal"),
    "adapter.kind": ("dora", "losses"),
    "adapter.r": ("2", "losses"),
    "adapter.alpha": ("64.0", "losses"),
    "adapter.dropout": ("0.5", "losses"),
    "adapter.target_modules": ("all", "losses"),
    "adapter.also_train": ("[embeddings]", "losses"),
    "adapter.quantize_base": ("int8", "losses"),
    "train.stop_after": ("4 steps", "losses"),
    "train.time_limit": ("0.001 seconds", "refusal"),
    "train.batch": ("8 examples", "losses"),
    "train.micro_batch_rows": ("7", "banner"),
    "train.row_tokens": ("512", "rows"),
    "train.pack": ("false", "padding"),
    "train.precision": ("bf16", "precision"),
    "train.compile": ("true", "compiled"),
    "train.gradient_checkpointing": ("true", "recomputed"),
    "train.activation_offload": ("true", "refusal"),  # this is a CPU
    "train.evaluate_every": ("3 steps", "evaluations"),
    "train.save_every": ("3 steps", "saves"),
    "train.keep_last": ("1", "checkpoints"),
    "train.keep_best": ("0", "best"),
    "train.best_by": ("bleu", "goal"),
    "train.early_stopping": ("{patience: 1, min_delta: 9.0}", "losses"),
    "train.early_stopping.patience": ("{patience: 1, min_delta: 9.0}", "losses"),
    "train.early_stopping.min_delta": ("{patience: 1, min_delta: 9.0}", "losses"),
    "train.early_stopping.metric": ("{patience: 1, metric: title_kept}", "losses"),
    "train.readers": ("3", "readers"),
    "train.deterministic": ("false", "deterministic"),
    "checkpoint.layout": ("sharded", "checkpoint_files"),
    "train.optimisations.attention": ("{attention: dense}", "attention"),
    **{
        f"train.optimisations.{name}": (f"{{{name}: false}}", "warnings")
        for name in (
            "dropout",
            "activations",
            "layers",
            "head",
            "prefetch",
            "background_saves",
        )
    },
    "checkpoint.upload": ("s3://pantry/runs/a", "said"),
    "evaluation.max_examples": ("2", "evaluations"),
    "evaluation.generate": ("2", "samples"),
    "evaluation.texts": ("0", "texts"),
    "train.strategy": ("ddp", "refusal"),  # this process is alone
    "evaluation.metrics": ("[bleu]", "scores"),
    "evaluation.prompts": ('["toast: bread, butter"]', "samples"),
    "observe.log_every": ("3 steps", "losses"),
    "observe.summary": ("2 steps", "summaries"),
    "observe.system": ("null", "system"),
    "observe.gradients": ("2 steps", "gradients"),
    "observe.profile": ("{wait: 0, warmup: 1, active: 1, repeat: 1}", "trace"),
    "observe.profile.wait": ("{wait: 1, warmup: 1, active: 1, repeat: 1}", "trace"),
    "observe.profile.warmup": ("{wait: 0, warmup: 2, active: 1, repeat: 1}", "trace"),
    "observe.profile.active": ("{wait: 0, warmup: 1, active: 2, repeat: 1}", "trace"),
    "observe.profile.repeat": ("{wait: 0, warmup: 1, active: 1, repeat: 2}", "trace"),
    "observe.profile.stacks": (
        "{wait: 0, warmup: 1, active: 1, repeat: 1, stacks: true}",
        "trace",
    ),
    "observe.profile.memory": (
        "{wait: 0, active: 1, repeat: 1, memory: false}",
        "trace",
    ),
    "observe.trackers": ("[tensorboard]", "trackers"),
    "observe.webhook": ("http://127.0.0.1:9/nobody", "warnings"),
    "observe.callbacks": ("[stop_watch:AtThree]", "losses"),
}
_PRETRAINED = ("model.start_from=BASE/model", "model.shape={}")
_ADAPTED = (*_PRETRAINED, "adapter={r: 4, dropout: 0.0}")
# Settings that need others to be read: those stand in the run and in what it is compared with.
# Most of the time of so small a run would go to texts.
_TEXTS = ("evaluation.generate=1", "evaluation.texts=1")
_TWO_TASKS = ("data.tasks=[write, next_step]",)
_OWN_TASK = ("data.tasks={t: {prompt: '{title}', target: '{title}'}}",)
_T5 = (
    "model.family=t5",
    f"model.shape={shape_yaml('t5', width=16, layers=1, heads=2, inner=16, dropout=0.0)}",
)
_GAPS = (*_T5, "span_corruption={}")
_PROFILED = ("observe.profile={wait: 0, warmup: 1, active: 1, repeat: 1}",)
BESIDE: dict[str, tuple[str, ...]] = {
    "curriculum.stages.from": (
        "curriculum={stages: [{from: 0 %}, {from: 2 steps, max_steps: 5}]}",
    ),
    "span_corruption": _T5,
    "span_corruption.density": _GAPS,
    "span_corruption.mean_length": _GAPS,
    **{
        f"data.validation.{name}": ("data.validation=[{path: OTHER}]",)
        for name in ("format", "columns", "max_files", "licence")
    },
    "data.task_weights": _TWO_TASKS,
    **dict.fromkeys(
        (f"data.tasks.NAME.{name}" for name in ("prompt", "target", "classes")),
        _OWN_TASK,
    ),
    "data.tasks.NAME.metrics": ("evaluation.generate=1", *_OWN_TASK),
    "data.task_temperature": _TWO_TASKS,
    "train.early_stopping.metric": (*_TEXTS, "train.early_stopping={patience: 1}"),
    "evaluation.metrics": ("evaluation.generate=1",),
    **dict.fromkeys(
        ("train.best_by", "evaluation.generate", "evaluation.texts"), _TEXTS
    ),
    "optim.momentum": ("optim.name=muon",),
    "optim.cycles": ("optim.schedule=cosine_restarts",),
    "optim.cycles.first": ("optim.schedule=cosine_restarts",),
    "optim.cycles.growth": (
        "optim.schedule=cosine_restarts",
        "optim.cycles={first: 1 steps}",
    ),
    "optim.cooldown": ("optim.schedule=wsd",),
    "optim.gradient_noise.eta": ("optim.gradient_noise={eta: 0.1}",),
    "optim.gradient_noise.gamma": ("optim.gradient_noise={eta: 0.1}",),
    "optim.outliers.sigma": ("optim.outliers={window: 2}",),
    "optim.outliers.window": ("optim.outliers={sigma: 1e-6}",),
    "optim.outliers.roll_back_after": (
        "optim.outliers={sigma: 1e-6, window: 2, roll_back_after: 99}",
    ),
    **{f"observe.profile.{name}": _PROFILED for name in ProfileConfig.model_fields},
    "adapter": _PRETRAINED,
    **{f"adapter.{name}": _ADAPTED for name in AdapterConfig.model_fields},
    "train.activation_offload": ("train.gradient_checkpointing=true",),
}


@dataclass(frozen=True)
class Seen:
    """Everything a run shows of itself."""

    code: int
    said: str
    facts: dict[str, object]


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    write_cookbook(folder / "a.jsonl", n=60, seed=3)
    lines = (folder / "a.jsonl").read_text()
    steps = [
        "Bread and butter belong together, as everybody knows.",
        "Such is life in a kitchen.",
    ]
    poor = [{"title": "Toast", "ingredients": ["bread", "butter"], "directions": steps}]
    foods = ["rye", "water", "salt", "time"]
    for n in "abcdef":  # one step alone: there is no next one to ask for
        one = [f"{' '.join(steps)} Nobody in house {n} says how."]
        poor.append({"title": f"Rusk {n}", "ingredients": foods, "directions": one})
    more = "".join(json.dumps(record) + "\n" for record in poor)
    broken = '{"title": }\n'
    (folder / "a.jsonl").write_text(
        lines + lines.splitlines()[0] + "\n" + more + broken
    )
    write_cookbook(folder / "b.jsonl", n=60, seed=4)
    watch = (
        "class AtThree:\n  def on_step_end(self, s):\n    return 'stop' if "
        "s.step > 2 else None\n"
    )
    (folder / "stop_watch.py").write_text(watch)
    sys.path.append(str(folder))
    return folder


_SEEN: dict[tuple[str, ...], Seen] = {}


def seen_with(kitchen: Path, capfd: pytest.CaptureFixture[str], *words: str) -> Seen:
    """What a run shows that has these words on its command line; each is made once."""
    if words in _SEEN:
        return _SEEN[words]
    name = f"run-{len(_SEEN)}" if words else "base"
    data = ("data.", "span_corruption", "model.tokenizer", "model.family=t5")
    prepare = not words or any(word.startswith(data) for word in words)
    store = kitchen / (f"store-{name}" if prepare else "store-base")
    shape = shape_yaml("gpt2", width=16, layers=1, heads=2, positions=512, dropout=0.0)
    text = BASE.format(
        shape=shape, run=kitchen / name, source=kitchen / "a.jsonl", store=store
    )
    (kitchen / f"{name}.yaml").write_text(text)
    given = [str(kitchen / f"{name}.yaml"), *words]
    files = {"OTHER": "b.jsonl", "SOURCE": "a.jsonl", "HERE": "", "BASE": "base"}
    for token, file in files.items():
        given = [word.replace(token, str(kitchen / file)) for word in given]
    code = main(["prepare", *given]) if prepare else 0
    code = code or main(["train", *given])
    said = "".join(capfd.readouterr())
    _SEEN[words] = Seen(code, said, facts_of(kitchen, name, store) if code == 0 else {})
    return _SEEN[words]


def facts_of(kitchen: Path, name: str, store: Path) -> dict[str, object]:
    run = kitchen / name if (kitchen / name).exists() else kitchen / "other-run"
    store = store if store.exists() else kitchen / "other-store"
    events = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    start = next(e for e in events if e["event"] == "start")
    steps = [e for e in events if e["event"] == "step"]
    manifest = json.loads((store / "manifest.json").read_text())
    card = (run / "model" / "README.md").read_text()
    samples, traces = run / "samples.jsonl", run / "trace"
    tables = "".join(path.read_text() for path in sorted(traces.glob("*.txt")))
    spans = b"".join(gzip.decompress(path.read_bytes()) for path in traces.glob("*.gz"))
    return {
        "folder": run.name,
        "store_folder": store.name,
        "losses": [(e["step"], e["loss"], e["lr"]) for e in steps],
        "padding": [e["pad_fraction"] for e in steps],
        "rows": start["row"],
        "precision": start["precision"],
        "deterministic": start["deterministic"],
        "readers": start["readers"],
        "compiled": start["compile"],
        "attention": start["attention"],
        "recomputed": start["gradient_checkpointing"],
        "banner": start["micro_batch_rows"],
        "evaluations": [
            (e["step"], e["metrics"]) for e in events if e["event"] == "evaluation"
        ],
        "texts": [e.get("texts") for e in events if e["event"] == "evaluation"],
        "goal": [sorted(e["best"]) for e in events if e["event"] == "end"],
        "summaries": (run / "training.log").read_text().count("summary at step"),
        "data_in_card": [
            line for line in card.splitlines() if ".jsonl" in line and "|" in line
        ],
        "licence_in_card": [
            line for line in card.splitlines() if line.startswith("license:")
        ],
        "saves": [e["step"] for e in events if e["event"] == "save"],
        "checkpoints": sorted(p.name for p in (run / "checkpoints").glob("step-*")),
        "checkpoint_files": sorted(
            p.name for p in (run / "checkpoints").glob("step-*/*")
        ),
        "best": sorted(p.name for p in (run / "best").glob("step-*")),
        "warnings": [e["message"] for e in events if e["event"] == "warning"],
        "trackers": [p.name for p in run.glob("tensorboard")],
        "system": any(e["event"] == "system" for e in events),
        "gradients": [e["step"] for e in events if e["event"] == "gradients"],
        "trace": (
            sorted(path.name for path in traces.glob("*")),
            spans.count(b'"toque: clip"'),
            [column in tables for column in ("Source Location", "CPU Mem")],
        ),
        "scores": list(json.loads((run / "evaluation.json").read_text())["generated"]),
        "samples": hashlib.sha256(
            samples.read_bytes() if samples.exists() else b""
        ).hexdigest(),
        "store": (manifest["fingerprint"], manifest["tokens"], manifest["splits"]),
    }


@pytest.fixture
def base(kitchen: Path, capfd: pytest.CaptureFixture[str]) -> Seen:
    """The run whose store and model the others use."""
    return seen_with(kitchen, capfd)


def test_every_setting_has_a_row() -> None:
    """A list of sections, or one that may be null, is a setting itself, too."""
    fields = {path: find_field(tuple(path.split("."))) for path in setting_paths()}
    assert set(EFFECTS) == {
        path
        for path, field in fields.items()
        if field and section_of(field) != field.annotation
    }


# torch's compiler reads .grad of every tensor it meets, and warns itself about it.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    "path",
    [
        # Compiling takes minutes on two busy cores, Ray half a minute to start.
        pytest.param(
            path,
            marks=pytest.mark.slow if path in ("train.compile", "data.engine") else (),
        )
        for path in EFFECTS
    ],
)
@pytest.mark.usefixtures("base", "pantry")
def test_a_setting_has_its_effect(
    path: str, kitchen: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if path == "data.engine":
        pytest.importorskip("ray")
    value, what = EFFECTS[path]
    beside = BESIDE.get(path, ())
    base = seen_with(kitchen, capfd, *beside)
    assert base.code == 0, base.said
    setting = ".".join(path.split(".")[:2])
    seen = seen_with(kitchen, capfd, *beside, f"{setting}={value}")
    if what == "refusal":
        assert seen.code in (2, 3), seen.said
        return
    assert seen.code == 0, seen.said
    if what == "said":  # an engine changes how, never what
        words = "max_files is 1" if "max_files" in path else f"{path}={value}"
        assert (words in seen.said, words in base.said) == (True, False)
        assert seen.facts["store"][1:] == base.facts["store"][1:]  # type: ignore[index]
        return
    assert seen.facts[what] != base.facts[what]
    if what == "store":  # not only the hash of the settings: what lies in the store
        assert (
            seen.facts["store"][1:] != base.facts["store"][1:]
            or path == "model.tokenizer"
        )  # type: ignore[index]
