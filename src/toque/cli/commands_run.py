"""Commands about runs and models. Slow imports are inside the commands."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NoReturn

from cyclopts import Parameter

from toque.cli.commands_data import Overrides, load, loading
from toque.cli.console import (
    ConsoleReporter,
    StreamPrinter,
    for_terminal,
    print_drill,
)
from toque.cli.launch import (
    check_rank_flags,
    is_first_rank,
    is_secret,
    start_ranks,
    starts_ranks,
)
from toque.cli.text_flags import PairFlags, TextFlags
from toque.errors import Interrupted, in_shell
from toque.training.distributed.accelerate import refuse_lone_process
from toque.user_paths import named_path
from toque.workflows.results import advise_on_texts, resolve_model
from toque.workflows.saved_steps import config_of

if TYPE_CHECKING:
    from toque.config import RunConfig
    from toque.workflows.results import Answer, TrainedRun, Written

_DEFAULT_TEXTS: Final = TextFlags()
_DEFAULT_PAIRS: Final = PairFlags()


def demo(*overrides: Overrides, n: int | None = None) -> None:
    """Prepare a synthetic cookbook, train a model, evaluate it and generate three recipes.

    Args:
        overrides: settings to change, as section.field=value.
        n: number of recipes in the cookbook. Default: 8000.
    """
    resolved = load("demo", overrides)
    from toque.workflows.demo import demo as workflow

    run = workflow(resolved, n=n, reporter=ConsoleReporter())
    if run.interrupted:
        _raise_interrupted(run, ["demo", *overrides], {"--n": n})


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
    """Train a model, or continue a run exactly from its newest checkpoint.

    If the store is missing, it is prepared first.

    Args:
        config: YAML file, preset, or config.yaml of a run.
        overrides: settings to change, as section.field=value.
        start: start a new run with the weights of this run or checkpoint.
        resume: continue exactly from this older checkpoint of the run, e.g. step-00000200 or 200.
            Newer checkpoints are set aside in the run folder and bucket. Nothing is deleted.
        no_upload: do not use checkpoint.upload in this session, for uploads or for downloads.
        no_prepare: stop with an error if the store is missing.
        trust_code: import the metrics and callbacks that a run's config.yaml names.
        hardware: a GPU such as rtx-4090, to apply the settings that CONFIG has for it.
        gpus: number of processes on this machine that share every update, one per GPU. Without
            GPUs, they share the processor cores. For several machines, use torchrun.
        restarts: how many times all processes may restart from the newest checkpoint after one
            of them was lost. Default: 3.
    """
    began = time.monotonic()
    check_rank_flags(gpus, restarts)
    is_launcher = starts_ranks(gpus)
    # Before torch loads, so that a mistyped setting is reported immediately.
    resolved = load(config, overrides, trust_code=trust_code, hardware=hardware)
    if not is_launcher:
        refuse_lone_process(resolved.config.train.strategy)

    reporter = ConsoleReporter()
    has_store = (Path(resolved.config.data.store) / "manifest.json").exists()
    if not no_prepare and not has_store:
        _prepare_before_torch(resolved.config, start, reporter)
    elif no_prepare and not is_launcher:
        _refuse_unprepared(resolved.config)

    if is_launcher and gpus is not None:
        return start_ranks(gpus, restarts, reporter)
    with loading(reporter):
        from toque.training.stopping import CommandClock
        from toque.workflows.train import train as workflow

    run = workflow(
        resolved,
        start=start,
        resume=resume,
        upload=not no_upload,
        prepare=not no_prepare,
        clock=CommandClock(began=began),
        reporter=reporter,
    )
    if run.interrupted:
        trust_flag = ["--trust-code"] if trust_code else []
        flags = {"--hardware": hardware, "--gpus": gpus, "--restarts": restarts}
        _raise_interrupted(run, ["train", config, *overrides, *trust_flag], flags)
    if is_first_rank():
        folder = in_shell(run.folder)
        reporter.notice(
            f"`toque report {folder}` writes a page about the run. `toque generate {folder} "
            '--prompt "..."` generates text with its model.'
        )
    return 0


def _prepare_before_torch(
    config: RunConfig, start: str | None, reporter: ConsoleReporter
) -> None:
    """Prepare the store of a run while no library has started threads."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as for `prepare`
    with loading(reporter):
        from toque.workflows.prepare import prepare_before_torch

    prepare_before_torch(config, start=start, reporter=reporter)


def _refuse_unprepared(config: RunConfig) -> None:
    """Check that the store exists. Do not load torch.

    Raises:
        DataError: The store is missing.
    """
    from toque.workflows.prepared_store import refuse_unprepared

    refuse_unprepared(config)


def _raise_interrupted(
    run: TrainedRun, words: Sequence[str], flags: Mapping[str, object]
) -> NoReturn:
    """Raise the error for a command that a signal stopped, with the command that continues.

    Args:
        run: The interrupted run.
        words: Words of the command.
        flags: Values of its flags. A flag without a value is None.
    """
    shown_words: list[object] = [word for word in words if not is_secret(word)]
    note = ""
    if len(shown_words) < len(words):
        note = " (add the webhook again: its address is a secret)"
    for name, value in flags.items():
        if value is not None:
            shown_words += [name, value]
    command = " ".join(map(in_shell, shown_words))
    raise Interrupted(
        f"Stopped by a signal and saved at step {run.step}. Continue with{note}: toque {command}"
    )


def evaluate(
    run_or_model: str,
    config: str | None = None,
    /,
    *overrides: Overrides,
    trust_code: bool = False,
) -> None:
    """Evaluate a run or a model on held-out data, and write evaluation.json.

    Args:
        run_or_model: run folder, checkpoint (RUN/best/step-00000200) or Hugging Face model folder.
        config: YAML file or preset. Default: the configuration of the run.
        overrides: settings to change, as section.field=value.
        trust_code: import the metrics that the run's config.yaml names.
    """
    if config is not None and "=" in config and not named_path(config).exists():
        # Without CONFIG, as in `toque evaluate RUN evaluation.texts=4`.
        overrides = (config, *overrides)
        config = None
    run_config = config_of(resolve_model(run_or_model))
    settings = None
    if config is not None:
        settings = load(config, overrides, trust_code=trust_code).config
    elif run_config.exists():
        from toque.config import load_config

        # The folder may come from anyone, so code needs the flag.
        settings = load_config(run_config, overrides, trust_code=trust_code).config
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
    flags: Annotated[TextFlags, Parameter(name="*")] = _DEFAULT_TEXTS,
    raw: bool = False,
    device: str = "auto",
    json: bool = False,
) -> None:
    """Generate text for one or more prompts, or choose one of several answers.

    In a terminal, the text appears token by token.

    Args:
        run_or_model: run folder, checkpoint (RUN/best/step-00000200) or Hugging Face model folder.
        prompt: the text to respond to, e.g. "lentil soup" or "lentil soup: lentils, carrots,
            cumin". Repeat it for several prompts.
        file: file with one prompt per line, or JSON lines with `prompt`, or with `title` and
            `ingredients`.
        task: a task that the model was trained on: nutrition, difficulty, cuisine, title,
            next_step, or a task that the run defines. Its prompts are records with the fields of
            the task (--file), or a text if it has one field. If the task has classes, the answer is
            one of them, with the probability of each class.
        choices: a possible answer to an unchanged prompt. Repeat it for every answer.
        flags: flags for texts.
        raw: use the prompt unchanged, without the format of the training data.
        device: cpu, cuda, cuda:N, or auto: a GPU if the machine has one.
        json: print one JSON object per line.
    """
    from toque.workflows.inference import generate as workflow
    from toque.workflows.inference.classify import classify

    reporter = ConsoleReporter()
    prompts = prompt or []
    printer: StreamPrinter | None = None
    texts: Sequence[Written | Answer]
    chooses = bool(choices)
    if task is not None and not chooses:
        chooses = workflow.has_classes(run_or_model, task, flags.adapter or [])
    if chooses:
        flags.refuse_changes()
        texts = classify(
            run_or_model,
            prompts,
            file=file,
            task=task,
            choices=choices or [],
            raw=raw,
            device=device,
            reporter=reporter,
        )
    else:
        if sys.stdout.isatty() and not json and flags.best_of == 1:
            printer = StreamPrinter()
        texts = workflow.generate_texts(
            run_or_model,
            flags.to_request(prompts, file=file, task=task, raw=raw),
            device=device,
            on_text=printer,
            reporter=reporter,
        )

    if printer is not None and printer.has_started:
        printer.end()
    else:
        _print_texts(texts, json=json)
    if hint := advise_on_texts(texts):
        reporter.notice(hint)


def _print_texts(texts: Sequence[Written | Answer], *, json: bool) -> None:
    """Print texts or answers below their prompts, or as JSON lines."""
    for text in texts:
        line = dumps(text.record(), ensure_ascii=False) if json else str(text)
        print(for_terminal(line), flush=True)


def pairs(
    run: str,
    /,
    *,
    to: str,
    file: str | None = None,
    chosen: Literal["written", "best"] | None = None,
    samples: int | None = None,
    by: str | None = None,
    limit: int = 1000,
    flags: Annotated[PairFlags, Parameter(name="*")] = _DEFAULT_PAIRS,
    device: str = "auto",
    replace: bool = False,
) -> None:
    """Write preference pairs for `objective: {kind: dpo}` from texts of a run's model.

    Prints the number of pairs, and a configuration that learns from them. The same command writes
    the same pairs.

    Args:
        run: run folder or checkpoint (RUN/best/step-00000200).
        to: file to write, e.g. own-pairs.jsonl.
        file: file with one prompt per line, or JSON lines with `prompt` and, optionally, `target`.
            Default: training examples of the run, in random order.
        chosen: written, the target of a prompt; or best, the best text of the model. Default:
            written if all prompts have a target.
        samples: number of texts per prompt. The one with the lowest score is rejected. Default: 1
            for written and 8 for best.
        by: the score: cookable, another recipe score, likelihood (the mean log-probability of the
            tokens), or a function of your own as module:function. Default: cookable for recipe
            prompts, otherwise likelihood.
        limit: maximum number of prompts.
        flags: flags for texts.
        device: cpu, cuda, cuda:N, or auto: a GPU if the machine has one.
        replace: overwrite an existing file.
    """
    from toque.workflows.inference.pairs import pairs as workflow

    result = workflow(
        run,
        to,
        file=file,
        chosen=chosen,
        samples=samples,
        by=by,
        limit=limit,
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        seed=flags.seed,
        precision=flags.precision,
        device=device,
        replace=replace,
        reporter=ConsoleReporter(),
    )
    print(result)


def serve(
    *models: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: Annotated[str | None, Parameter(env_var="TOQUE_TOKEN")] = None,
    rows: int = 32,
    queue: int = 256,
    seconds: float = 300.0,
    device: str = "auto",
    precision: Literal["auto", "bf16", "int8", "float32"] = "float32",
) -> None:
    """Serve models on a web page and with OpenAI's API.

    Args:
        models: folders of runs, checkpoints, models or adapters. The name of a model is the name of
            its folder. To choose another name, write NAME=FOLDER.
        host: the address to listen on. An address that other machines can reach needs a token.
        port: the port to listen on. 0 chooses a free port.
        token: secret that clients must send. Prefer the environment variable TOQUE_TOKEN, because
            `ps` shows flags.
        rows: number of texts in a batch.
        queue: number of texts that may wait for a batch. More are refused with status 429.
        seconds: time limit for a request, in seconds.
        device: cpu, cuda, cuda:N, or auto: a GPU if the machine has one.
        precision: precision of the matmuls. bf16 is faster on processors that support it, but a
            text can then depend on other texts in its batch. auto uses bf16 only on these
            processors. int8 is auto for several texts. One text on a CPU has weights and inputs in
            8 bits, which is three times as fast. It needs the extra onnx.
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


def average(
    run: str,
    /,
    *,
    to: str | None = None,
    last: int | None = None,
    replace: bool = False,
) -> None:
    """Average the weights of a run, and keep the average if no checkpoint is better.

    Averages the newest checkpoints. With optim.ema_decay, the newest checkpoint also has an
    exponential average. Prints the held-out losses of the averages, of the newest checkpoint and
    of the best model. If an average has the lowest loss, it is written as a model folder. Otherwise
    the exit code is 1.

    Args:
        run: run folder. The run may be training.
        to: the folder to write. Default: RUN/average.
        last: number of newest checkpoints, at least 2, to measure only their average. Default: all
            that the run has (train.keep_last).
        replace: replace an earlier average.
    """
    from toque.workflows.average import average as workflow

    result = workflow(run, to, last=last, replace=replace, reporter=ConsoleReporter())
    print(result)
    result.raise_if_failed()


def export(
    run_or_model: str,
    /,
    *,
    to: str,
    step: int | None = None,
    form: Annotated[str, Parameter(name="--format")] = "hf",
    dtype: str | None = None,
    push_to: str | None = None,
    packages: str | None = None,
) -> None:
    """Export a model for other programs, and compare the exported model with the original.

    Adapters are merged into the model, except with --format adapter.

    Args:
        run_or_model: folder of a run, a checkpoint, a model or an adapter.
        to: the folder to write.
        step: export the checkpoint or best model of this step. Default: the finished model.
        form: hf, a Hugging Face folder; gguf, a file for llama.cpp and Ollama; onnx, files for
            onnxruntime and transformers.js; web; or adapter, a folder that peft loads together with
            the base model. The format web is a page that generates texts in a browser, also on a
            phone, without a server or network.
        dtype: type of the weights: f32 (default), bf16 or f16. With --format gguf: f16 (default),
            f32, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0. With onnx or web: f32, f16 (default of web)
            or int8.
        push_to: repository on the Hugging Face hub, owner/name, for an upload of the result after
            the comparison.
        packages: with --format web, a folder node_modules with the JavaScript packages of the page,
            for use without internet. Default: they are downloaded once.
    """
    from toque.workflows.export import export as workflow

    with ConsoleReporter().working(f"writing {to}, reading it back and comparing"):
        result = workflow(
            run_or_model,
            to,
            step=step,
            form=form,
            dtype=dtype,
            push_to=push_to,
            packages=packages,
        )
    print(result)


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
    """Test on this machine that a run survives kills, signals and damaged files.

    Trains short copies of the run, and interrupts or damages each copy. The weights, optimizer
    state and losses of every copy must be bitwise identical to an undisturbed copy. Otherwise the
    exit code is 1. The run itself is only read.

    Args:
        run: run folder, finished or not.
        kills: number of kills with SIGKILL at random moments.
        steps: number of updates per copy.
        seed: seed of the random moments and of the damage.
        trust_code: import the optimizer and metrics that the run's config.yaml names.
        json: print one JSON object instead of a table.
    """
    from toque.workflows.diagnosis.drill import drill as workflow

    result = workflow(
        run,
        kills=kills,
        steps=steps,
        seed=seed,
        trust_code=trust_code,
        reporter=ConsoleReporter(),
    )
    if json:
        print(dumps(result.record(), indent=1))
    else:
        print_drill(result)
    result.raise_if_failed()


def check(config: str, /, *overrides: Overrides, examples: int = 16) -> None:
    """Check that packing, gradient accumulation and kernels do not change loss or gradients.

    Computes one update of your model on your data in each of these ways, and compares it with the
    update of transformers on one example at a time. The exit code is 1 if a difference is larger
    than the rounding error.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        examples: number of examples in the update, from the shortest to the longest of the store.
    """
    settings = load(config, overrides).config
    _refuse_unprepared(settings)
    from toque.workflows.diagnosis.check import check as workflow

    with ConsoleReporter().working("computing one update in every way"):
        result = workflow(settings, examples=examples)
    print(result)
    result.raise_if_failed()


def ablate(
    config: str,
    /,
    *overrides: Overrides,
    seeds: int = 5,
    steps: int | None = None,
    out: str = "runs/ablation",
    trust_code: bool = False,
) -> None:
    """Measure the effect of each improvement on your data, with several seeds.

    Removes each improvement from a run with all improvements, and adds it to a run without any.
    After a kill, the same command continues. Runs with equal settings are trained once.

    Args:
        config: YAML file or preset.
        overrides: settings of all runs, as section.field=value.
        seeds: number of runs per combination.
        steps: number of updates per run. Default: the length in the configuration.
        out: folder of the runs and the results.
        trust_code: import the metrics and callbacks that a run's config.yaml names.
    """
    from toque.workflows.ablate import ablate as workflow

    table = workflow(
        config,
        overrides,
        seeds=seeds,
        steps=steps,
        out=out,
        trust_code=trust_code,
        reporter=ConsoleReporter(),
    )
    print(table)
