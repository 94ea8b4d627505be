#!/usr/bin/env bash
# Sets up a clone: an environment in .venv, the extras that this machine can use, checks, and the line to type next.
# A second run keeps what is there. For Linux and macOS; nothing newer than bash 3.2, which macOS has.
set -euo pipefail
cd "$(dirname "$0")"

PYTHON_OF_VENV=.venv/bin/python
LOCK=requirements.lock   # the versions that were tested
INSTALLED=.venv/.setup # which extras were installed; older than pyproject.toml or the lock: no longer known
CONFIG=my.yaml

usage() {
    cat <<'TEXT'
Usage: ./setup.sh [--dry-run] [--cpu] [--dev] [--extras LIST] [--data SOURCE]

  --dry-run      print what would be done, and do nothing
  --cpu          as on a machine without a GPU
  --dev          besides, what tests and documentation need
  --extras LIST  these optional parts of pyproject.toml, such as data,s3, instead of a choice by this machine
  --data SOURCE  recipes or other texts: a file, a folder, gs://..., s3://... or hf:NAME:SPLIT;
                 writes my.yaml for them

PYTHON=/path/to/python3.11 chooses the interpreter. pip's own settings are honoured: PIP_FIND_LINKS=FOLDER takes
a CPU build of torch from a folder, PIP_INDEX_URL and PIP_EXTRA_INDEX_URL name other indexes.
TEXT
}

refuse() { # SENTENCES: ends with the exit code of wrong usage
    printf '%s\n' "$*" >&2
    exit 2
}

say() { printf '%-13s %s\n' "$1" "$2"; }

run() { # COMMAND ...: runs it; with --dry-run prints it
    if [ "$dry_run" = yes ]; then
        printf '+ %s\n' "$*"
    else
        "$@"
    fi
}

read_arguments() {
    dry_run=no gpu=look extras='' dev=no data=''
    while [ $# -gt 0 ]; do
        case $1 in
        --dry-run) dry_run=yes ;;
        --cpu) gpu='' ;;
        --dev) dev=yes ;;
        --extras | --data)
            [ $# -gt 1 ] || refuse "$1 needs a value. ./setup.sh --help shows how it is used."
            if [ "$1" = --data ]; then data=$2; else extras=$2; fi
            shift
            ;;
        --help | -h)
            usage
            exit 0
            ;;
        *) refuse "./setup.sh does not know $1. It takes --dry-run, --cpu, --dev, --extras LIST and --data SOURCE." ;;
        esac
        shift
    done
}

usable() { # PYTHON: new enough, and able to make an environment
    "$1" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.12 python3.11 python3.13; fi
    for python in "$@"; do
        if usable "$python"; then
            say python "$("$python" --version 2>&1), $(command -v "$python")"
            return
        fi
    done
    refuse "No Python 3.11 or later that can make environments was found; looked for $*. Install one: python3 and" \
        "python3-venv on Debian and Ubuntu, python@3.12 of Homebrew on macOS. Or name one:" \
        "PYTHON=/path/to/python3.12 ./setup.sh"
}

look_at_the_machine() {
    machine="$(uname -s) $(uname -m)"
    say machine "$machine"
    [ "$machine" != 'Darwin x86_64' ] ||
        refuse "There are no builds of torch 2.3 or later for Macs with Intel processors, and Toque needs one." \
            "docs/guides/container.md runs it in a container."
    if [ "$gpu" = look ]; then
        gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed -n 1p) || gpu=''
    fi
    say gpu "${gpu:-none}"
}

found() { # WHAT TEST: says and returns whether the test passes
    if "$2"; then say "$1" 'credentials found'; else
        say "$1" 'no credentials found; needed only for what is private there'
        return 1
    fi
}

has_hub_token() {
    [ -n "${HF_TOKEN:-}" ] || [ -s "${HF_TOKEN_PATH:-${HF_HOME:-$HOME/.cache/huggingface}/token}" ]
}
has_google() {
    [ -n "${GOOGLE_APPLICATION_CREDENTIALS:-}" ] ||
        [ -s "${CLOUDSDK_CONFIG:-$HOME/.config/gcloud}/application_default_credentials.json" ]
}
has_amazon() {
    [ -n "${AWS_ACCESS_KEY_ID:-}" ] || [ -n "${AWS_PROFILE:-}" ] ||
        [ -s "${AWS_SHARED_CREDENTIALS_FILE:-$HOME/.aws/credentials}" ]
}

# Before anything is fetched, since a job that fails at its first upload has cost a day. Never shows a value.
look_at_credentials() {
    local named=${GOOGLE_APPLICATION_CREDENTIALS:-}
    [ -z "$named" ] || [ -f "$named" ] ||
        refuse "GOOGLE_APPLICATION_CREDENTIALS names $named, and there is no such file. Correct it or unset it."
    [ -z "${AWS_ACCESS_KEY_ID:-}" ] || [ -n "${AWS_SECRET_ACCESS_KEY:-}" ] ||
        refuse "AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not. Set both, or neither."
    found 'hf hub' has_hub_token || true
    google=no amazon=no
    ! found 'gs://' has_google || google=yes
    ! found 's3://' has_amazon || amazon=yes
}

choose_extras() {
    if [ -z "$extras" ]; then
        extras=data,serve${gpu:+,gpu}
        case "$google $data" in yes* | *gs://*) extras=$extras,gcs ;; esac
        case "$amazon $data" in yes* | *s3://*) extras=$extras,s3 ;; esac
        [ -z "${WANDB_API_KEY:-}" ] || extras=$extras,wandb
        [ $dev = no ] || extras=$extras,dev
    fi
    "$python" - "$extras" <<'CHECK' || exit 2
import pathlib, sys, tomllib
known = tomllib.loads(pathlib.Path("pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
if unknown := set(sys.argv[1].split(",")) - set(known):
    sys.exit(f"pyproject.toml has no extra {', '.join(sorted(unknown))}. It has {', '.join(known)}.")
CHECK
    say extras "$extras"
}

make_environment() {
    if usable $PYTHON_OF_VENV && $PYTHON_OF_VENV -m pip --version >/dev/null 2>&1; then
        say environment '.venv is there'
    elif [ -e .venv ]; then # half made, or its Python is gone
        say environment '.venv cannot be used; made again'
        run "$python" -m venv --clear .venv
    else
        say environment 'making .venv'
        run "$python" -m venv .venv
    fi
}

warn_of_gigabytes() { # where the index's torch is a build with CUDA whatever the machine has, and pip knows no other
    [ -z "$gpu" ] && [ "$machine" = 'Linux x86_64' ] || return 0
    case "$("$1" -m pip config list 2>/dev/null)" in *find-links=* | *index-url=*) return 0 ;; esac
    say '' "pip's index offers torch with CUDA, some gigabytes; it works here, too. For a CPU build stop this (Ctrl-C)"
    say '' 'and name a folder or an index that has one: PIP_FIND_LINKS=FOLDER ./setup.sh'
}

install() {
    if [ $INSTALLED -nt pyproject.toml ] && [ $INSTALLED -nt $LOCK ] && [ "$(cat $INSTALLED)" = "$extras" ]; then
        say packages 'are there'
        return
    fi
    say packages 'installing; torch is the large part'
    if [ -x $PYTHON_OF_VENV ]; then warn_of_gigabytes $PYTHON_OF_VENV; else warn_of_gigabytes "$python"; fi
    # What installs and builds packages comes first, by the lock, too.
    run $PYTHON_OF_VENV -m pip install --quiet --disable-pip-version-check --constraint $LOCK \
        pip hatchling editables setuptools
    run $PYTHON_OF_VENV -m pip install --quiet --disable-pip-version-check --constraint $LOCK --no-build-isolation \
        --editable ".[$extras]"
    [ $dry_run = yes ] || printf '%s\n' "$extras" >$INSTALLED
}

check() {
    run $PYTHON_OF_VENV -m toque --version
    run torch_computes
    run $PYTHON_OF_VENV -m toque doctor
}

torch_computes() {
    $PYTHON_OF_VENV - "$gpu" <<'CHECK'
import sys
import torch
import toque.api

gpu = sys.argv[1]
if gpu and not torch.cuda.is_available():
    sys.exit(
        f"This machine has a GPU ({gpu}), and torch {torch.__version__} cannot use it. Either it is a CPU build: "
        "unset PIP_FIND_LINKS, remove .venv and run ./setup.sh again. Or the driver is too old for the CUDA "
        f"{torch.version.cuda} of this build: update it. ./setup.sh --cpu goes on without the GPU."
    )
device = "cuda" if gpu else "mps" if torch.backends.mps.is_available() else "cpu"
numbers = torch.arange(64, dtype=torch.float32).reshape(8, 8)  # small integers: their products are exact
product = (numbers.to(device) @ numbers.to(device)).tolist()
exact = [[sum((8 * i + k) * (8 * k + j) for k in range(8)) for j in range(8)] for i in range(8)]
if product != exact:
    sys.exit(f"torch {torch.__version__} computes a product of two small matrices wrongly on {device}.")
print(f"torch {torch.__version__} computes on {device}")
CHECK
}

write_configuration() {
    next='.venv/bin/toque demo'
    [ -n "$data" ] || return 0
    next=".venv/bin/toque train $CONFIG"
    if [ -e $CONFIG ]; then
        say data "$CONFIG is there and is left alone"
    else
        run $PYTHON_OF_VENV -m toque init "$data" --to $CONFIG
    fi
}

read_arguments "$@"
find_python
look_at_the_machine
look_at_credentials
choose_extras
make_environment
install
check
write_configuration
printf '\nNext:\n  %s\n' "$next"
