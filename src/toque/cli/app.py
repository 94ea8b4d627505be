"""The commands: `toque VERB [CONFIG] [section.field=value ...]`.

Everything heavy is imported inside a command, so `--help` and a mistyped key answer at once.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from toque import __version__
from toque.cli import launch as several
from toque.cli.redact import without_secrets
from toque.errors import ConfigError, Interrupted, ToqueError

HELP = """Train language models that write recipes, and any other text, on the machine you have.

CONFIG is a YAML file or a preset's name (`toque presets`). Settings are changed at the end of the
line: `toque train my.yaml train.stop_after="1 epoch" optim.peak_lr=1e-3`.

Start here: `toque demo`, then `toque prepare my.yaml` and `toque train my.yaml`.

Exit codes: 0 done; 1 `check` or `drill` failed, or a process of a shared run was lost; 2 wrong
usage or config; 3 data; 4 checkpoint; 5 loss not finite; 75 interrupted, saved and resumable.
`--traceback` after any command shows where an error came from.
"""

app = App(
    name="toque",
    help=HELP,
    version=__version__,
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)
Overrides = Annotated[str, Parameter(help="Settings to change, as section.field=value.")]


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Trackers note the command line they find; a webhook's address is a secret.
    sys.argv[1:] = without_secrets(sys.argv[1:])
    code = _ended(words)
    if several.one_of_several():
        several.leave(code)
    return code


def _ended(words: list[str]) -> int:
    show_traceback = "--traceback" in words
    try:
        several.refuse_repeating(words)
        app([word for word in words if word != "--traceback"], exit_on_error=False)
    except CycloptsError:
        return ConfigError.exit_code  # already printed, with the nearest command or option
    except ToqueError as error:
        if show_traceback:
            raise
        if several.speaks(error):
            print(f"toque: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("toque: stopped by the keyboard before anything needed saving.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `toque presets | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@app.command
def demo(*overrides: Overrides, n: int = 4000) -> None:
    """Do the whole job on the embedded cookbook: prepare, train, evaluate, write three recipes.

    Args:
        overrides: settings to change, as section.field=value.
        n: recipes to write into the cookbook.
    """
    from toque.cli.demo import run_demo

    run_demo(list(overrides), n=n)


@app.command
def prepare(config: str, /, *overrides: Overrides, replace: bool = False) -> None:
    """Turn raw data into a token store, once, and print the data report.

    A killed prepare continues where it stopped; an unchanged one reuses its store.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        replace: delete a store made from other data or settings instead of refusing.
    """
    # A process of one thread forks its workers; numpy would start one for each core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from toque.config import load_config
    from toque.reports.data_table import print_report
    from toque.workflows.prepare import run_prepare, told

    resolved = load_config(config, list(overrides)).config
    result = run_prepare(resolved, replace=replace)
    print_report(result.report)
    print(f"{told(result, resolved)} `toque report {result.store.path}` makes a page of this.")


@app.command
def train(
    config: str,
    /,
    *overrides: Overrides,
    start: Annotated[str | None, Parameter(name="--from")] = None,
    no_upload: bool = False,
) -> None:
    """Train, or continue: a run folder that holds a whole checkpoint continues exactly.

    Args:
        config: YAML file or preset; a run's own config.yaml will do.
        overrides: settings to change, as section.field=value.
        start: begin a new run from this checkpoint's weights.
        no_upload: leave checkpoint.upload alone in this session; nothing is fetched either.
    """
    from toque.config import load_config

    resolved = load_config(config, list(overrides))  # a mistyped key is answered before torch loads
    from toque.workflows.train import run_training

    run = run_training(resolved, start=start, upload=not no_upload)
    if run.interrupted:
        again = shlex.join(["toque", "train", config, *without_secrets(overrides)])
        raise Interrupted(
            f"Stopped by a signal and saved at step {run.step}. Continue with: {again}"
        )


@app.command
def evaluate(run_or_model: str, config: str | None = None, /, *overrides: Overrides) -> None:
    """Score a run or a model folder on held-out data and write evaluation.json.

    Args:
        run_or_model: run folder, or a Hugging Face model folder.
        config: YAML file or preset; a run's own is the default.
        overrides: settings to change, as section.field=value.
    """
    from toque.config import load_config

    if config is not None and "=" in config and not Path(config).exists():
        overrides, config = (config, *overrides), None
    own = Path(run_or_model) / "config.yaml"
    if config is None and not own.exists():
        raise ConfigError(
            f"{run_or_model} is not a run folder, so it does not say what to evaluate on. Name a "
            "configuration after it: toque evaluate MODEL my.yaml."
        )
    settings = load_config(config or str(own), list(overrides)).config
    from toque.workflows.evaluate import run_evaluation

    print(run_evaluation(run_or_model, settings))


@app.command
def generate(
    run_or_model: str,
    /,
    *,
    prompt: list[str] | None = None,
    file: Path | None = None,
    task: str | None = None,
    choices: list[str] | None = None,
    adapter: list[Path] | None = None,
    n: int = 1,
    max_new_tokens: int | None = None,
    temperature: float = 0.7,
    top_p: float = 0.95,
    seed: int = 0,
    raw: bool = False,
    json: bool = False,
) -> None:
    """Write text for one or more prompts, or choose one of a few answers.

    Args:
        run_or_model: run folder, or a Hugging Face model folder.
        prompt: what to write for, e.g. "lentil soup" or "lentil soup: lentils, carrots, cumin"; may
            be given several times.
        file: a prompt a line, or JSON lines with `prompt`, or with `title` and `ingredients`.
        task: ask this instead of writing: nutrition, difficulty or cuisine. The answer is one of
            its classes, with the model's probability of each.
        choices: an answer of your own to choose from, for prompts as they are; given twice or more.
        adapter: adapter folder to write with; may be given several times, and each writes every
            text: the model itself is read once.
        n: texts for each prompt.
        max_new_tokens: longest text; what the model was trained on when left out.
        temperature: 0 takes the likeliest token every time.
        top_p: sample from the likeliest tokens that together have this probability.
        seed: the same seed writes the same texts.
        raw: send the prompt as it is, not in the form the model was trained on.
        json: one JSON object a line.
    """
    from toque.cli.generate_output import SamplingParams, run_generation

    lines = run_generation(
        run_or_model,
        prompts=prompt or [],
        file=file,
        task=task,
        choices=choices or [],
        adapters=adapter or [],
        manner=SamplingParams(
            n=n, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
        ),
        raw=raw,
        as_json=json,
    )
    for line in lines:
        print(line, flush=True)


@app.command
def report(path: Path, /, *, out: Path | None = None) -> None:
    """Write one offline HTML page about a store or a run, finished or not.

    Args:
        path: a store folder, or a run folder.
        out: the file to write; report.html in the folder when left out.
    """
    from toque.reports.write import run_report

    print(run_report(path, out=out))


@app.command
def export(
    run_or_model: str,
    /,
    *,
    to: Path,
    form: Annotated[str, Parameter(name="--format")] = "hf",
) -> None:
    """Write a run's model for use elsewhere: merged, read back, compared, or refused.

    Args:
        run_or_model: run folder, model folder or adapter folder.
        to: the folder to write.
        form: hf, a Hugging Face folder.
    """
    from toque.workflows.export import run_export

    print(run_export(run_or_model, to=to, form=form))


@app.command
def verify(path: Path, /) -> None:
    """Check a store, a checkpoint or a run against its hashes.

    Args:
        path: the folder.
    """
    from toque.workflows.verify import run_verification

    print(run_verification(path))


@app.command
def drill(
    run: Path,
    /,
    *,
    kills: int = 10,
    steps: int = 24,
    seed: int = 1,
    json: bool = False,
) -> None:
    """Do the crash test on this machine and disk: kills, signals, damage, a full disk.

    Short copies of the run train beside it and are harmed; each must end with the weights,
    optimizer and losses of one that was left alone, bit for bit. The run itself is only read.
    Exit code 1 when something came out otherwise.

    Args:
        run: run folder, finished or not.
        kills: times a run is killed with SIGKILL at a random moment.
        steps: updates of each copy.
        seed: where random moments and bits come from.
        json: print one JSON object instead of a table.
    """
    from toque.cli.drill_table import run_drill

    run_drill(run, kills=kills, steps=steps, seed=seed, as_json=json)


@app.command
def check(config: str, /, *overrides: Overrides, examples: int = 16) -> None:
    """Prove on your model and data that packing, accumulation and the rest change no number.

    One update is computed in every way and compared with transformers' own, each example alone;
    exit code 1 when a loss or gradient differs by more than rounding.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        examples: examples in the update, from the shortest to the longest of the store.
    """
    from toque.config import load_config

    settings = load_config(config, list(overrides)).config
    from toque.cli.check_output import run_check

    run_check(settings, examples=examples, say=print)


@app.command
def ablate(
    config: str,
    /,
    *overrides: Overrides,
    seeds: int = 5,
    steps: int | None = None,
    budget: str | None = None,
    out: Path = Path("runs/ablation"),
) -> None:
    """Measure what each improvement is worth on your data: on and off, over several seeds.

    Each is taken from a run that has all and added to one that has none. A killed ablation goes on
    where it was; runs with equal settings are done once.

    Args:
        config: YAML file or preset.
        overrides: settings that hold in all runs, as section.field=value.
        seeds: runs of each combination.
        steps: updates of each run; the configuration's length when left out.
        budget: time for all runs together instead, e.g. "90 minutes".
        out: folder of the runs and the results.
    """
    from toque.workflows.ablate.run import run_ablation

    run_ablation(config, overrides, out=out, seeds=seeds, steps=steps, budget=budget, say=print)


@app.command
def show(config: str, /, *overrides: Overrides, plot: bool = False) -> None:
    """Print the resolved configuration with the origin of every value, and what saves will take.

    Args:
        config: YAML file, preset or run folder.
        overrides: settings to change, as section.field=value.
        plot: draw the learning rate over the run instead, and where a curriculum's stages begin.
    """
    from toque.cli.show import run_show

    for part in run_show(config, overrides, draw=plot):
        print(part)


@app.command
def show_batch(config: str, /, *overrides: Overrides, step: int = 1, most: int = 4) -> None:
    """Print the texts of one update as the model reads them, unpacked and augmented.

    Args:
        config: YAML file or preset.
        overrides: settings to change, as section.field=value.
        step: which update, counted from 1.
        most: examples to show.
    """
    from toque.config import load_config

    settings = load_config(config, list(overrides)).config
    from toque.workflows.batch_preview import run_show_batch

    for line in run_show_batch(settings, step=step, most=most):
        print(line)


@app.command
def presets() -> None:
    """List the complete runs that come with Toque."""
    from toque.config import presets as known

    for name, summary in known().items():
        print(f"{name:24}{summary}")


@app.command
def cookbook(*, out: Path, n: int = 20_000, seed: int = 17) -> None:
    """Write synthetic recipes from the embedded grammar, as JSON lines.

    Args:
        out: the file to write, .jsonl or .jsonl.gz.
        n: how many.
        seed: recipe i depends on the seed and i alone.
    """
    from toque.cooking.cookbook.generate import write_cookbook

    write_cookbook(out, n=n, seed=seed)
    print(f"{n:,} synthetic recipes in {out}")
