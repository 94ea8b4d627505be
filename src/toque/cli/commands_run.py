"""Commands about runs and models; what is heavy is imported inside a command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from inspect import signature
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from cyclopts import Parameter

from toque.cli.commands_data import Overrides, is_first, load, loading
from toque.cli.console import ConsoleReporter, TextsAsWritten, flag, for_reader, print_drill
from toque.cli.launch import is_secret, start_ranks, starts_ranks
from toque.errors import ConfigError, Interrupted, in_shell
from toque.training.distributed.accelerate import refuse_lone_process
from toque.user_paths import named_path
from toque.workflows.results import advise_on_texts, existing_folder
from toque.workflows.saved_steps import config_of

if TYPE_CHECKING:
    from toque.config import RunConfig
    from toque.workflows.results import Answer, TrainedRun, Written


def demo(*overrides: Overrides, n: int | None = None) -> None:
    """Do the whole job on the embedded cookbook: prepare, train, evaluate, write three recipes.

    Args:
        overrides: settings to change, as section.field=value.
        n: recipes to write into the cookbook; 8000 when left out.
    """
    resolved = load("demo", overrides)
    from toque.workflows.demo import demo as workflow

    run = workflow(resolved, n=n, reporter=ConsoleReporter())
    if run.interrupted:
        _interrupted(run, ["demo", *overrides], {"--n": n})


def train(
    config: str,
    /,
    *overrides: Overrides,
    start: Annotated[str | None, Parameter(name="--from")] = None,
    resume: str | None = None,
    no_upload: bool = False,
    no_prepare: bool = False,
    trust_code: bool = False,
    hardware: str | None = None,
    gpus: int | None = None,
    restarts: int | None = None,
) -> int:
    """Train, or continue: a run folder that holds a whole checkpoint continues exactly.

    A store that is absent is prepared first.

    Args:
        config: YAML file or preset; a run's own config.yaml will do.
        overrides: settings to change, as section.field=value.
        start: begin a new run from this checkpoint's weights.
        resume: continue exactly from this older checkpoint of the run, e.g. step-00000200 or 200;
            newer ones are set aside in the run's folder (and bucket), and nothing is deleted.
        no_upload: leave checkpoint.upload alone in this session; nothing is fetched either.
        no_prepare: refuse to begin when the store is absent, instead of preparing it.
        trust_code: where CONFIG is a run's own, import the metrics and callbacks it names.
        hardware: a card such as rtx-4090; what CONFIG says of it comes on top.
        gpus: share every update among this many processes of this machine, one a GPU; on a machine
            without GPUs they share its cores. torchrun starts ranks on several machines.
        restarts: how often all processes start again from the newest checkpoint when one was
            lost; 3 when left out.
    """
    began = time.monotonic()
    launching = starts_ranks(gpus, restarts)
    # A mistyped key is answered before torch loads.
    resolved = load(config, overrides, trust_code=trust_code or None, hardware=hardware)
    if not launching:
        refuse_lone_process(resolved.config.train.strategy)
    prints = ConsoleReporter()
    if no_prepare and not launching:
        _refuse_unprepared(resolved.config)
    elif not no_prepare and not (Path(resolved.config.data.store) / "manifest.json").exists():
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as for `prepare`
        with loading(prints):
            from toque.workflows.prepare import prepare_before_torch

        prepare_before_torch(resolved.config, start=start, reporter=prints)
    if launching and gpus is not None:
        return start_ranks(gpus, restarts, prints.notice)
    with loading(prints):
        from toque.training.stopping import CommandClock
        from toque.workflows.train import train as workflow

    run = workflow(
        resolved,
        start=start,
        resume=resume,
        upload=not no_upload,
        prepare=not no_prepare,
        clock=CommandClock(began=began),
        reporter=prints,
    )
    if run.interrupted:
        flags = ["--trust-code"] if trust_code else []
        given = {"--hardware": hardware, "--gpus": gpus, "--restarts": restarts}
        _interrupted(run, ["train", config, *overrides, *flags], given)
    if is_first():
        folder = in_shell(run.folder)
        ConsoleReporter().notice(
            f"`toque report {folder}` makes a page of the run; `toque generate {folder} --prompt "
            '"..."` writes with its model.'
        )
    return 0


def _refuse_unprepared(config: RunConfig) -> None:
    """Refuse a store that is absent, before torch loads."""
    from toque.workflows.prepared_store import refuse_unprepared

    refuse_unprepared(config)


def _interrupted(run: TrainedRun, words: Sequence[str], given: Mapping[str, object]) -> NoReturn:
    """End a command that a signal stopped, with the words that continue it."""
    flags = [word for flag, value in given.items() if value is not None for word in (flag, value)]
    shown = [word for word in words if not is_secret(word)]
    again = " ".join(map(in_shell, [*shown, *flags]))
    less = "" if len(shown) == len(words) else " (without the webhook, whose address is a secret)"
    raise Interrupted(
        f"Stopped by a signal and saved at step {run.step}. Continue with{less}: toque {again}"
    )


def evaluate(
    run_or_model: str, config: str | None = None, /, *overrides: Overrides, trust_code: bool = False
) -> None:
    """Score a run or a model folder on held-out data and write evaluation.json.

    Args:
        run_or_model: run folder, checkpoint (RUN/best/step-00000200) or Hugging Face model folder.
        config: YAML file or preset; a run's own is the default.
        overrides: settings to change, as section.field=value.
        trust_code: import the metrics that the run's own config.yaml names.
    """
    if config is not None and "=" in config and not named_path(config).exists():
        overrides, config = (config, *overrides), None
    own, settings = config_of(existing_folder(run_or_model)), None
    if config is not None or own.exists():
        unless_own = None if config else False
        settings = load(config or str(own), overrides, trust_code=trust_code or unless_own).config
    from toque.workflows.evaluate import evaluate as workflow

    print(workflow(run_or_model, settings, reporter=ConsoleReporter()))


def generate(
    run_or_model: str,
    /,
    *,
    prompt: list[str] | None = None,
    file: str | None = None,
    task: str | None = None,
    choices: list[str] | None = None,
    adapter: list[str] | None = None,
    n: int = 1,
    max_new_tokens: int | None = None,
    temperature: float = 0.7,
    top_p: float = 0.95,
    no_repeat_ngram_size: int | None = None,
    seed: int = 0,
    raw: bool = False,
    device: str = "auto",
    precision: Literal["auto", "bf16", "float32"] = "float32",
    must_use: bool = False,
    schema: str | None = None,
    best_of: int = 1,
    by: str | None = None,
    json: bool = False,
) -> None:
    """Write text for one or more prompts, or choose one of a few answers.

    In a terminal a text appears as it is written.

    Args:
        run_or_model: run folder, checkpoint (RUN/best/step-00000200) or Hugging Face model folder.
        prompt: what to write for, e.g. "lentil soup" or "lentil soup: lentils, carrots, cumin"; may
            be given several times.
        file: a prompt a line, or JSON lines with `prompt`, or with `title` and `ingredients`.
        task: ask this, which the model learnt: nutrition, difficulty, cuisine, title, next_step, or
            a task of the run's own, by records with the fields that it asks by (--file), or by a
            text if that is one field. Of a task with classes the answer is one of them, with the
            probability of each; of another a text.
        choices: an answer of your own to choose from, for prompts as they are; given twice or more.
        adapter: adapter folder, or a run that trained one, to write with; may be given several
            times, and each writes every text: the model itself is read once.
        n: texts for each prompt.
        max_new_tokens: longest text; what the model was trained on when left out.
        temperature: 0 takes the likeliest token every time.
        top_p: sample from the likeliest tokens that together have this probability.
        no_repeat_ngram_size: tokens of the shortest run that a text may not hold twice; 0 for no
            such rule. 12 for recipes as text when left out, else 0.
        seed: the same seed writes the same texts.
        raw: send the prompt as it is, not in the form the model was trained on.
        device: auto takes the GPU where there is one; or cpu, cuda, cuda:N.
        precision: of the products that write. bf16 is faster where the processor has it; at two
            tokens about equally likely a text may then part from float32's, and depend on what is
            written beside it. auto: bf16 there alone.
        must_use: hold each recipe to its form and to the ingredients of its prompt: all are listed.
        schema: hold each text to JSON of this schema: a file, or recipe for schema.org's Recipe.
        best_of: texts written for each prompt, of which the best is the answer, with its score and
            the mean of all; with --n, the n best.
        by: what the best is chosen by: recipe_score (where the prompt asks for a recipe), another
            recipe score, or likelihood, the mean log-probability of a text's tokens. Left out, a
            soup or a drink for which an oven is heated comes last.
        json: one JSON object a line, for programs.
    """
    prompts, chosen, prints = prompt or [], choices or [], ConsoleReporter()
    shown = TextsAsWritten() if sys.stdout.isatty() and not json and best_of == 1 else None
    asked: dict[str, Any] = {"file": file, "task": task, "raw": raw}
    asked |= {"device": device, "reporter": prints}
    from toque.workflows.inference import generate as workflow

    texts: Sequence[Written | Answer]
    if chosen or (task is not None and workflow.has_classes(run_or_model, task, adapter or [])):
        for_texts = {
            "adapter": adapter,
            "must_use": must_use,
            "schema": schema,
            "best_of": best_of,
            "by": by,
            "precision": precision,
            "n": n,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "no_repeat_ngram_size": no_repeat_ngram_size,
            "seed": seed,
        }
        usual = signature(generate).parameters
        for name, given in for_texts.items():
            if given != usual[name].default:
                word = flag(f"precision={given}") if name == "precision" else flag(name)
                raise ConfigError(
                    f"{word} is for texts, and --choices, or a --task with classes, weighs the "
                    "answers of one model in float32. Leave one of them out."
                )
        texts = workflow.classify(run_or_model, prompts, choices=chosen, **asked)
    else:
        asked |= {"adapters": adapter or [], "n": n, "must_use": must_use, "on_text": shown}
        asked |= {"schema": schema, "best_of": best_of, "by": by}
        texts = workflow.generate(
            run_or_model,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            no_repeat_ngram_size=no_repeat_ngram_size,
            seed=seed,
            precision=precision,
            **asked,
        )
    if shown is not None and shown.any:
        shown.end()
    else:
        for each in texts:
            whole = dumps(each.record(), ensure_ascii=False) if json else str(each)
            print(for_reader(whole), flush=True)
    if said := advise_on_texts(texts):
        prints.notice(said)


def serve(
    *models: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: Annotated[str | None, Parameter(env_var="TOQUE_TOKEN")] = None,
    rows: int = 32,
    queue: int = 256,
    seconds: float = 300.0,
    device: str = "auto",
    precision: Literal["auto", "bf16", "float32"] = "float32",
) -> None:
    """Serve models to people and programs: a page, and the protocol that OpenAI's clients speak.

    Args:
        models: folders of runs, checkpoints, models or adapters. Each is asked for by its folder's
            name, or by one of your own: NAME=FOLDER.
        host: the address to listen on; one that other machines reach needs a token.
        port: 0 takes any that is free.
        token: what clients must bring; better in the environment, where `ps` does not show it.
        rows: texts written at a time.
        queue: texts that wait beside them; what comes then is refused with 429.
        seconds: longest time for one request.
        device: auto, the GPU where there is one; or cpu, cuda, cuda:N.
        precision: of the products that write. bf16 is faster where the processor has it; at two
            tokens about equally likely a text may then depend on what is written beside it. auto:
            bf16 there alone.
    """
    from toque.workflows.inference.serve import serve as workflow

    workflow(
        models,
        host=host,
        port=port,
        token=token,
        rows=rows,
        queue=queue,
        seconds=seconds,
        device=device,
        precision=precision,
        reporter=ConsoleReporter(),
    )


def export(
    run_or_model: str,
    /,
    *,
    to: str,
    step: int | None = None,
    form: Annotated[str, Parameter(name="--format")] = "hf",
    dtype: str | None = None,
    push_to: str | None = None,
) -> None:
    """Write a run's model for use elsewhere: merged, read back, compared, or refused.

    Args:
        run_or_model: folder of a run, a checkpoint, a model or an adapter.
        to: the folder to write.
        step: take the checkpoint or best model of this step, not the finished model.
        form: hf, a Hugging Face folder; gguf, a file for llama.cpp and Ollama; or adapter, one that
            peft reads beside its base, not merged.
        dtype: type of the weights: f32 (default), bf16 or f16; in the format gguf f16 (default),
            f32, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0.
        push_to: upload a copy to this repository of the hub, owner/name, once it has passed.
    """
    from toque.workflows.export import export as workflow

    with ConsoleReporter().working(f"writing {to}, reading it back and comparing"):
        made = workflow(run_or_model, to, step=step, form=form, dtype=dtype, push_to=push_to)
    print(made)


def drill(
    run: str,
    /,
    *,
    kills: int = 10,
    steps: int = 24,
    seed: int = 1,
    trust_code: bool = False,
    json: bool = False,
) -> None:
    """Do the crash test on this machine and disk: kills, signals, damage.

    Short copies of the run train beside it and are harmed; each must end with the weights,
    optimizer and losses of one that was left alone, bit for bit. The run itself is only read.
    Exit code 1 when something came out otherwise.

    Args:
        run: run folder, finished or not.
        kills: times a run is killed with SIGKILL at a random moment.
        steps: updates of each copy.
        seed: where random moments and bits come from.
        trust_code: import the optimizer and the tasks' metrics that the run's config.yaml names.
        json: print one JSON object instead of a table.
    """
    from toque.workflows.diagnosis.drill import drill as workflow

    told: dict[str, Any] = {"trust_code": trust_code, "reporter": ConsoleReporter()}
    result = workflow(run, kills=kills, steps=steps, seed=seed, **told)
    if json:
        print(dumps(result.record(), indent=1))
    else:
        print_drill(result)
    result.raise_if_failed()


def check(config: str, /, *overrides: Overrides, examples: int = 16) -> None:
    """Prove on your model and data that packing, accumulation and the rest change no number.

    One update is computed in every way and compared with transformers' own, each example alone;
    exit code 1 when a loss or gradient differs by more than rounding.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        examples: examples in the update, from the shortest to the longest of the store.
    """
    settings = load(config, overrides).config
    _refuse_unprepared(settings)
    from toque.workflows.diagnosis.check import check as workflow

    with ConsoleReporter().working("computing one update in every way"):
        found = workflow(settings, examples=examples)
    print(found)
    found.raise_if_failed()


def ablate(
    config: str,
    /,
    *overrides: Overrides,
    seeds: int = 5,
    steps: int | None = None,
    out: str = "runs/ablation",
    trust_code: bool = False,
) -> None:
    """Measure what each improvement is worth on your data: on and off, over several seeds.

    Each is taken from a run that has all and added to one that has none. A killed ablation goes on
    where it was; runs with equal settings are done once.

    Args:
        config: YAML file or preset.
        overrides: settings that hold in all runs, as section.field=value.
        seeds: runs of each combination.
        steps: updates of each run; the configuration's length when left out.
        out: folder of the runs and the results.
        trust_code: where CONFIG is a run's own, import the metrics and callbacks it names.
    """
    from toque.workflows.ablate import ablate as workflow

    told: dict[str, Any] = {"out": out, "trust_code": trust_code, "reporter": ConsoleReporter()}
    print(workflow(config, overrides, seeds=seeds, steps=steps, **told))
