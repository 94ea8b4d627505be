#!/usr/bin/env bash
# Setup of Toque on this machine, Linux or macOS: environment, extras, checks, and what to type next.
#
#   ./setup.sh                            into .venv, with what the machine has use for
#   ./setup.sh --data SOURCE [...]        besides, writes my.yaml for your recipes or texts: a file, a
#                                         folder, gs://BUCKET/PATH, s3://BUCKET/PATH or hf:NAME
#   ./setup.sh --extras data,gguf         these extras of pyproject.toml, and no others
#   ./setup.sh --dry-run                  say what would be done
#
# From the environment: PYTHON, an interpreter; VENV, the folder in place of .venv; and pip's own
# settings, such as PIP_FIND_LINKS=FOLDER for a CPU build of torch. Done twice, it changes nothing.
set -eu
cd "$(dirname "$0")"

say() { printf '%s\n' "$*"; }
fail() {
  printf 'setup.sh: %s\n' "$*" >&2
  exit 2
}
state() { if [ -n "$1" ]; then printf found; else printf none; fi; }
have() { command -v "$1" >/dev/null 2>&1; }

data=()
extras=""
dry=""
while [ $# -gt 0 ]; do
  case $1 in
    --data)
      shift
      [ $# -gt 0 ] || fail "--data names a source after it: ./setup.sh --data recipes.jsonl"
      while [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; do
        data+=("$1")
        shift
      done
      ;;
    --extras)
      [ $# -gt 1 ] || fail "--extras names some of pyproject.toml after it: --extras data,gguf"
      extras=$2
      shift 2
      ;;
    --dry-run)
      dry=yes
      shift
      ;;
    -h | --help)
      sed -n '2,12s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *) fail "$1 is none of --data, --extras, --dry-run and --help." ;;
  esac
done

# The machine.
system=$(uname -s)
case $system in
  Linux) memory=$(awk '/^MemTotal/ {printf "%d", $2 / 1048576}' /proc/meminfo) ;;
  Darwin) memory=$(($(sysctl -n hw.memsize) / 1073741824)) ;;
  *) fail "this is $system; Toque runs on Linux and macOS." ;;
esac
cores=$(getconf _NPROCESSORS_ONLN)
gpu=""
if have nvidia-smi; then
  gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 || true)
fi
free=$(df -Pk . | awk 'NR == 2 {printf "%d", $4 / 1048576}')
say "Machine: $system, $cores cores, $memory GiB of memory, $free GiB free here, ${gpu:-no NVIDIA GPU}"

# An interpreter that can make environments.
python=""
for name in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
  if "$name" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$name
    break
  fi
done
[ -n "$python" ] || fail "no Python 3.11 or later with venv was found. Install one (Debian: apt install python3-venv; macOS: brew install python), or name it: PYTHON=/path/to/python3 ./setup.sh"

# Credentials, before anything is fetched.
google=${GOOGLE_APPLICATION_CREDENTIALS:-}
if [ -n "$google" ] && [ ! -f "$google" ]; then
  fail "GOOGLE_APPLICATION_CREDENTIALS names $google, and there is no such file. Correct it, or unset it."
fi
[ -n "$google" ] || [ ! -f "$HOME/.config/gcloud/application_default_credentials.json" ] || google=yes
amazon=${AWS_ACCESS_KEY_ID:-${AWS_PROFILE:-}}
[ -n "$amazon" ] || [ ! -f "${AWS_SHARED_CREDENTIALS_FILE:-$HOME/.aws/credentials}" ] || amazon=yes
hub=${HF_TOKEN:-}
[ -n "$hub" ] || [ ! -f "${HF_HOME:-$HOME/.cache/huggingface}/token" ] || hub=yes
wandb=${WANDB_API_KEY:-}
[ -n "$wandb" ] || ! grep -qs 'api.wandb.ai' "$HOME/.netrc" || wandb=yes
say "Credentials: Google $(state "$google"), Amazon $(state "$amazon"), Hugging Face $(state "$hub"), W&B $(state "$wandb")"

needs_google=""
needs_amazon=""
for source in ${data[@]+"${data[@]}"}; do
  case $source in
    gs://*)
      needs_google=yes
      [ -n "$google" ] || say "Note: $source is read without credentials, which only a public bucket allows. Else: gcloud auth application-default login"
      ;;
    s3://*)
      needs_amazon=yes
      [ -n "$amazon" ] || say "Note: $source is read without credentials, which only a public bucket allows. Else: aws configure"
      ;;
    hf:*) [ -n "$hub" ] || say "Note: $source is read without a token, which a public data set allows. Else: hf auth login" ;;
    *) [ -e "$source" ] || compgen -G "$source" >/dev/null || fail "--data $source: there is no such file, folder or pattern." ;;
  esac
done

# Extras by what the machine has and the data need.
if [ -z "$extras" ]; then
  extras=data,gguf
  [ -z "$google$needs_google" ] || extras=$extras,gcs
  [ -z "$amazon$needs_amazon" ] || extras=$extras,s3
  [ -z "$wandb" ] || extras=$extras,wandb
  [ -z "${MLFLOW_TRACKING_URI:-}" ] || extras=$extras,mlflow
fi
for name in $(printf '%s' "$extras" | tr , ' '); do
  grep -q "^$name = \[" pyproject.toml || fail "--extras $name: pyproject.toml has no such extra."
done

# The environment.
venv=${VENV:-.venv}
stamp=$venv/.setup
wanted="$extras $(cksum <pyproject.toml)"
if [ -x "$venv/bin/toque" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  say "Environment: $venv holds Toque with $extras already"
elif [ -n "$dry" ]; then
  say "Environment: would install Toque with $extras into $venv, by $python"
else
  if [ "$system" = Linux ] && [ -z "$gpu" ] && [ -z "${PIP_FIND_LINKS:-}${PIP_EXTRA_INDEX_URL:-}${PIP_INDEX_URL:-}" ]; then
    say "Note: without a GPU a CPU build of torch is enough, and spares some gigabytes: PIP_FIND_LINKS=FOLDER ./setup.sh takes one from a folder."
  fi
  [ "$free" -ge 8 ] || say "Note: with CUDA, torch takes about 8 GiB, and $free are free here."
  [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
  say "Environment: installing Toque with $extras into $venv ..."
  "$venv/bin/pip" install --quiet --disable-pip-version-check --editable ".[$extras]"
  printf '%s' "$wanted" >"$stamp"
fi

# Checks: that the parts fit together, and that torch sees what the machine has.
toque=$venv/bin/toque
if [ -z "$dry" ] || [ -x "$toque" ]; then
  "$toque" show demo >/dev/null
  "$venv/bin/python" - "$gpu" <<'CHECK'
import sys

import torch
import toque

device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "the CPU"
print(f"Checked: toque {toque.__version__}, torch {torch.__version__} on {device}")
if sys.argv[1] and not torch.cuda.is_available():
    print(f"Note: this machine has {sys.argv[1]}, and this build of torch does not see it: the "
          "driver is too old for it, or it is a CPU build.")
CHECK
fi

# The data.
next="$toque demo"
if [ ${#data[@]} -gt 0 ]; then
  next="$toque train my.yaml"
  if [ -e my.yaml ]; then
    say "Data: my.yaml is there already and stays as it is"
  elif [ -n "$dry" ]; then
    say "Data: would look at ${data[*]} and write my.yaml"
  else
    "$toque" init "${data[@]}" --to my.yaml --yes
  fi
fi
say ""
say "Next:  $next"
