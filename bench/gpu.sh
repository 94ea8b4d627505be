#!/usr/bin/env bash
# The first measurements on a machine with a CUDA GPU, most important first, within 530 s.
#
#     OUT=results/gpu bench/gpu.sh [python]          # everything
#     OUT=results/gpu PARTS="tests xxl-lora" LIMIT=200 bench/gpu.sh
#     bench/gpu.sh --rehearse [python]               # run every command without a GPU
#     bench/gpu.sh --wheels                          # download missing wheels into .whl/
#     python bench/gpu_results.py results/gpu/results.jsonl     # write the table into lab/performance.md
#
# Every part prints a line when it ends. $OUT/results.jsonl has its record, $OUT/said/PART.txt and
# PART.out have its output. Each part and the script have a time limit, so a part that hangs or fails
# does not stop the next parts. The exit code is 1 if a part failed.
#
# A rehearsal measures nothing. It runs on a fake GPU (tests/fake_cuda, needs g++ and a torch without
# CUDA), whose tensors have shapes and no content. Parts that need content run on the CPU, smaller.
#
# The script needs no network. If the machine has Python 3.12, torch 2.11 with CUDA 13, a C compiler
# and the packages in HAD, the wheels in MISSING must be in .whl/. Three packages are too large to
# carry: bitsandbytes (43 MB; without it tests/gpu skips nf4), TRL and Unsloth (71 MB and more with
# pyarrow and pandas; the step of TRL is that of transformers.Trainer). Only large-against-trainer
# needs shared recipes and tokenizers ($TOQUE_SHARED, shared/ or ../shared); without them it is skipped.
MISSING="accelerate pydantic pydantic-core annotated-types typing-inspection typing-extensions msgspec cyclopts
  docstring-parser rich-rst attrs xxhash filelock packaging pytest pluggy iniconfig pytest-timeout
  pytest-xdist execnet hypothesis sortedcontainers"
HAD="torch triton transformers peft tokenizers safetensors huggingface-hub numpy rich psutil
  pyyaml jinja2 markupsafe"
set -u
cd "$(dirname "$0")/.."

if [ "${1:-}" = --wheels ]; then
  PYTHON=${2:-python3}
  # shellcheck disable=SC2086  # words
  exec "$PYTHON" -m pip download -q --no-deps --only-binary :all: --python-version 3.12 --abi cp312 --abi abi3 \
    --abi none --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform any --constraint requirements.lock --dest .whl $MISSING
fi
REHEARSE=""
if [ "${1:-}" = --rehearse ]; then
  REHEARSE=--rehearsal
  shift
fi
PYTHON=$(command -v "${1:-python3}") || { echo "${1:-python3} does not exist"; exit 2; }
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
OUT=${OUT:-${REHEARSE:+$WORK/}results/gpu}
LIMIT=${LIMIT:-${REHEARSE:+3000}}
LIMIT=${LIMIT:-530}
PARTS=${PARTS:-all}
for shared in "${TOQUE_SHARED:-}" shared ../shared; do
  [ -d "$shared/peers" ] && TOQUE_SHARED=$(cd "$shared" && pwd) && export TOQUE_SHARED && break
done
mkdir -p "$OUT/said"
RESULTS=$OUT/results.jsonl
: >"$RESULTS"
: >"$WORK/failed"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false TOQUE_CACHE="$WORK/cache"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} TORCHINDUCTOR_CACHE_DIR="$WORK/inductor"
export TOQUE_PYTHON=$PYTHON TOQUE_REHEARSAL=$REHEARSE

if ls .whl/*.whl >/dev/null 2>&1 && [ -z "$REHEARSE" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" .whl/*.whl
  export PYTHONPATH="$PYTHONPATH:$WORK/site"
fi

wanted() { [ "$PARTS" = all ] || case " $PARTS " in *" $1 "*) ;; *) return 1 ;; esac; }

limited() { # name, seconds, output lines to keep if there is no record (or 0), note, command...
  local name=$1 limit=$2 words=$3 note=$4 begun=$SECONDS left=$((LIMIT - SECONDS))
  shift 4
  [ -z "$REHEARSE" ] || limit=900
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -lt 10 ]; then
    echo "$name: not started, $left s left"
    return
  fi
  timeout -k 5 "$limit" "$@" >"$OUT/said/$name.out" 2>"$OUT/said/$name.txt"
  local rc=$?
  [ "$rc" -eq 0 ] || echo "$name" >>"$WORK/failed"
  # shellcheck disable=SC2086  # empty or one word
  "$PYTHON" bench/gpu_results.py "$RESULTS" --add "$name" --output "$OUT/said/$name.out" --code "$rc" \
    --said "$OUT/said/$name.txt" --seconds $((SECONDS - begun)) --words "$words" --note "$note" $REHEARSE
}

part() { # name, seconds, script, arguments: a command that prints one JSON record
  wanted "$1" || return 0
  local name=$1 limit=$2 note="" python=$PYTHON
  shift 2
  if [ -n "$REHEARSE" ]; then
    note="rehearsed on a fake GPU" python=tests/fake_cuda/python
    case $1 in # the last value of a repeated argument counts
      bench/speed/sweep.py) set -- "$@" --steps 1 --warmup 1 ;;
      bench/speed/attention_probe.py) set -- "$@" --workers 1 ;;
      bench/robustness/killed_and_continued.py) set -- "$@" --device cpu --steps 8 --save-every 2 && python=$PYTHON ;;
      bench/speed/device_text.py) set -- "$@" --device cpu --rows 1,4 --held-out 4 && python=$PYTHON ;;
      bench/speed/parts.py) set -- "$@" --device cpu --pairs 1 --shape "$WORK/tiny-${name#parts-}.json" && python=$PYTHON ;;
      bench/speed/train.py) set -- "$@" --steps 3 --warmup 1 --shape "$WORK/tiny-t5.json" --precision float32 \
        --baseline-precision fp32 && python=$PYTHON ;;
      bench/quality/plan_beside_sweeps.py) set -- "$@" --workers 2 --floor 0.25 && python=$PYTHON ;;
    esac
    [ "$python" != "$PYTHON" ] || note="rehearsed on the CPU"
  fi
  if [ -z "$REHEARSE" ]; then
    limited "$name" "$limit" 0 "$note" "$python" "$@"
    return
  fi
  while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done # nothing is measured, so two run at the same time
  limited "$name" "$limit" 0 "$note" "$python" "$@" &
}

shape() { echo "$2" >"$WORK/$1.json"; }
shape flan-t5-large '{"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_heads": 16,
  "feed_forward_proj": "gated-gelu", "tie_word_embeddings": false}'
shape tiny-t5 '{"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}'
shape tiny-neox '{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}'

# The machine, the versions, and the missing packages.
any_python=${REHEARSE:+tests/fake_cuda/python}
limited machine 60 0 "" "${any_python:-$PYTHON}" - "$(date -u +'%F %H:%M')" $HAD $MISSING <<'PY'
import importlib.metadata, json, os, platform, shutil, subprocess, sys

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

versions = {"python": platform.python_version()} | {name: version(name) for name in sys.argv[2:]}
missing = [name for name, found in versions.items() if found is None]
print("missing, needed in .whl/:", *missing or ["nothing"], file=sys.stderr)
print("C compiler:", next(filter(shutil.which, ("cc", "gcc", "clang")), "NONE: no FlexAttention"), file=sys.stderr)
import torch

if not torch.cuda.is_available():
    raise SystemExit("No CUDA GPU is visible, so nothing can be measured.")
smi = ["nvidia-smi", "--query-gpu=driver_version,memory.total,memory.used", "--format=csv,noheader"]
driver = subprocess.run(smi, capture_output=True, text=True).stdout.strip() if shutil.which(smi[0]) else "unknown"
print(json.dumps({
    "name": "machine", "device": torch.cuda.get_device_name(), "driver": driver, "begun": sys.argv[1],
    "cores": len(os.sched_getaffinity(0)), "missing": missing,
    "versions": {name: found for name, found in versions.items() if found},
}))
PY
cat "$OUT/said/machine.txt"
if [ -s "$WORK/failed" ]; then exit 1; fi
! wanted doctor || limited doctor 45 1 "${REHEARSE:+rehearsed on a fake GPU}" "${any_python:-$PYTHON}" \
  -m toque doctor

# The next three are not timed. Kernels of FlexAttention: the chosen options and the reasons.
part probe 120 bench/speed/attention_probe.py --workers 6
part continued 150 bench/robustness/killed_and_continued.py &
if wanted tests; then
  "$PYTHON" -c 'import xdist' 2>/dev/null && workers="-n ${REHEARSE:+1}" || workers=""
  [ "$workers" != "-n " ] || workers="-n 6"
  only=${REHEARSE:+not gpu and not slow}
  # shellcheck disable=SC2086  # several words
  limited tests 150 1 "${REHEARSE:+rehearsed on the CPU}" "$PYTHON" -m pytest tests/gpu -m "${only:-gpu}" -q -ra \
    --timeout 150 -p no:cacheprovider $workers -W ignore
fi
wait

# 1.2B GPT-NeoX, rows of 2,048 tokens: MFU of the stated peak (floor 45 %), and transformers.Trainer.
part neox 100 bench/speed/sweep.py --family neox --shape neox-1.2b --rows 8 --target 2048 --compile --beside trainer
# FLAN-T5-large, all weights.
part t5-large 90 bench/speed/sweep.py --family t5 --shape flan-t5-large --rows 16 --source 128 --target 256 \
  --beside trainer
# Four examples per row, packed: block attention against dense masks.
part neox-packed 45 bench/speed/sweep.py --family neox --shape neox-1.2b --rows 8 --target 2048 --examples 4
part neox-packed-dense 40 bench/speed/sweep.py --family neox --shape neox-1.2b --rows 8 --target 2048 \
  --examples 4 --attention dense
# T5 with bias and dropout.
part t5-packed 60 bench/speed/sweep.py --family t5 --shape flan-t5-large-6 --rows 16 --source 512 --target 512 \
  --examples 4 --dropout 0.1
part t5-packed-dense 40 bench/speed/sweep.py --family t5 --shape flan-t5-large-6 --rows 16 --source 512 \
  --target 512 --examples 4 --dropout 0.1 --attention dense
# The model of `neox`, in fp16.
part neox-fp16 60 bench/speed/sweep.py --family neox --shape neox-1.2b --rows 8 --target 2048 --compile \
  --precision fp16
# FLAN-T5-XXL with LoRA, 2 x 256/512 tokens, within 24 GiB.
part xxl-lora 70 bench/speed/sweep.py --family t5 --shape flan-t5-xxl --lora 16 --rows 2 --source 256 \
  --target 512 --recompute --limit-gib 24 --steps 3 --warmup 1
# Texts per second against transformers' `generate`, and evaluation.
part text 60 bench/speed/device_text.py
# Memory by `toque plan` against the measured memory. Needs only the records.
wait
part plan 45 bench/quality/plan_beside_sweeps.py "$RESULTS" --workers 6

# If time is left.
part t5-packed-no-dropout 40 bench/speed/sweep.py --family t5 --shape flan-t5-large-6 --rows 16 --source 512 \
  --target 512 --examples 4
part neox-eager 40 bench/speed/sweep.py --family neox --shape neox-1.2b --rows 4,8 --target 2048
part gpt2-large 30 bench/speed/sweep.py --family gpt2 --shape gpt2-large --rows 16 --target 1024
part large-lora 35 bench/speed/sweep.py --family t5 --shape flan-t5-large --lora 16 --rows 16 --source 128 \
  --target 256
# FLAN-T5-large against transformers.Trainer on real recipes, padding counted (floor 2.2, goal 4).
[ -z "${TOQUE_SHARED:-}" ] || part large-against-trainer 140 bench/speed/train.py --family t5 --pairs 1 --steps 12 \
  --warmup 4 --shape "$WORK/flan-t5-large.json" --baseline-precision bf16
# Each optimisation on and off.
part parts-t5 60 bench/speed/parts.py --family t5 --parts attention,head,prefetch,optimizer,copies
part parts-neox 40 bench/speed/parts.py --family neox --parts attention,head,prefetch,causal,copies
wait
echo "all in $SECONDS s; records in $RESULTS"
if [ -s "$WORK/failed" ]; then
  echo "FAILED: $(tr '\n' ' ' <"$WORK/failed")"
  exit 1
fi
