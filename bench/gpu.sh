#!/usr/bin/env bash
# The tests and figures that need a CUDA GPU, in under nine minutes; what came of them lands in $OUT.
#
#     OUT=results bench/gpu.sh [python]              # everything, in 530 s at most
#     OUT=results PARTS="tests xxl-lora" LIMIT=200 bench/gpu.sh
#
# $OUT/results.jsonl has one JSON record for each part, $OUT/parts.tsv how each ended,
# $OUT/environment.txt the machine, and what a part said on the way stands in $OUT/said.txt. Every
# part has its own time limit and the whole has one, so that what hangs or fails costs itself alone.
#
# Needs no network. Python packages: torch with CUDA and a C compiler (FlexAttention), transformers,
# peft, tokenizers, safetensors, huggingface-hub, numpy, psutil, pyyaml, rich, packaging, jinja2,
# markupsafe, xxhash, pytest (with -timeout and, to be quick, -xdist), hypothesis, and pydantic,
# annotated-types, msgspec, cyclopts with what these need. Wheels of what the machine
# lacks may lie in .whl/ beside pyproject.toml. The comparison with transformers.Trainer reads the
# shared peers (TOQUE_SHARED names their folder) and is left out where they are absent.
set -u
cd "$(dirname "$0")/.."
PYTHON=${1:-python3}
OUT=${OUT:-results/gpu}
LIMIT=${LIMIT:-530}
PARTS=${PARTS:-all}
SHARED=${TOQUE_SHARED:-../shared}
mkdir -p "$OUT"
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
: >"$OUT/results.jsonl"
: >"$OUT/parts.tsv"
: >"$OUT/said.txt"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOQUE_CACHE="$WORK/cache" PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
export TORCHINDUCTOR_CACHE_DIR="$WORK/inductor" TOKENIZERS_PARALLELISM=false

if ls .whl/*.whl >/dev/null 2>&1; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" .whl/*.whl
  export PYTHONPATH="$PYTHONPATH:$WORK/site"
fi

{
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
  "$PYTHON" - <<'PY'
import importlib.metadata, os, platform
print("python", platform.python_version(), "cores", len(os.sched_getaffinity(0)))
for name in ("torch", "triton", "transformers", "peft", "tokenizers", "pydantic", "msgspec", "cyclopts",
             "pytest", "pytest-xdist", "hypothesis"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "MISSING")
PY
  command -v cc gcc clang || echo "no C compiler: FlexAttention will be passed over"
} 2>&1 | tee "$OUT/environment.txt"
"$PYTHON" - <<'PY' || exit 1
import torch
if not torch.cuda.is_available():
    raise SystemExit("No CUDA GPU is visible here: these figures stay 'not yet measured'.")
print(torch.cuda.get_device_name(), "torch", torch.__version__)
PY

wanted() { [ "$PARTS" = all ] || case " $PARTS " in *" $1 "*) ;; *) return 1 ;; esac; }

limited() { # name, seconds, stdout, command...: within its limit and the whole's
  local name=$1 limit=$2 out=$3 begun=$SECONDS left=$((LIMIT - SECONDS))
  shift 3
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -lt 10 ]; then
    printf '%s\tnot begun\t%s s left\n' "$name" "$left" | tee -a "$OUT/parts.tsv"
    return 1
  fi
  echo "== $name, up to $limit s: $*" | tee -a "$OUT/said.txt"
  timeout -k 5 "$limit" "$@" >"$out" 2>"$WORK/err"
  local rc=$?
  tail -n 40 "$WORK/err" >>"$OUT/said.txt"
  printf '%s\t%s\t%s s\n' "$name" "$rc" "$((SECONDS - begun))" | tee -a "$OUT/parts.tsv"
  [ "$rc" -eq 0 ] || tail -n 5 "$WORK/err"
  return 0
}

part() { # name, seconds, script and arguments: one JSON record
  wanted "$1" || return 0
  local name=$1 limit=$2
  shift 2
  limited "$name" "$limit" "$WORK/out" "$PYTHON" "$@" || return 0
  "$PYTHON" - "$name" "$WORK/out" >>"$OUT/results.jsonl" <<'PY'
import json, sys
name, path = sys.argv[1:]
text = open(path).read()
try:
    found = json.loads(text)
except ValueError:
    found = {"unreadable": text[-2000:]}
print(json.dumps({"part": name, "record": found}))
PY
  tail -n 1 "$OUT/results.jsonl" | cut -c1-300
}

if wanted tests; then
  "$PYTHON" -c 'import xdist' 2>/dev/null && workers="-n 6" || workers=""
  # shellcheck disable=SC2086  # two words
  limited tests 170 "$OUT/tests.txt" "$PYTHON" -m pytest tests/gpu -m gpu -q -ra --timeout 150 \
    -p no:cacheprovider $workers -W ignore
  tail -n 25 "$OUT/tests.txt"
fi

# 1.2B GPT-NeoX, full rows of 2,048 tokens: MFU of the stated peak (floor 45 %).
part neox 75 bench/speed/sweep.py --family neox --shape neox-1.2b --rows 4,8 --target 2048 --compile
# Four examples a row: variable-length attention beside masks.
part neox-packed 25 bench/speed/sweep.py --family neox --shape neox-1.2b --rows 8 --target 2048 --examples 4
part neox-packed-dense 25 bench/speed/sweep.py --family neox --shape neox-1.2b --rows 8 --target 2048 \
  --examples 4 --attention dense
# T5 with its bias and dropout, packed: FlexAttention beside masks.
part t5-packed 60 bench/speed/sweep.py --family t5 --shape flan-t5-large-6 --rows 16 --source 512 --target 512 \
  --examples 4 --dropout 0.1
part t5-packed-dense 25 bench/speed/sweep.py --family t5 --shape flan-t5-large-6 --rows 16 --source 512 \
  --target 512 --examples 4 --dropout 0.1 --attention dense
part t5-packed-no-dropout 40 bench/speed/sweep.py --family t5 --shape flan-t5-large-6 --rows 16 --source 512 \
  --target 512 --examples 4
# FLAN-T5-XXL with LoRA, 2 x 256/512 tokens, within 24 GiB.
part xxl-lora 70 bench/speed/sweep.py --family t5 --shape flan-t5-xxl --lora 16 --rows 2 --source 256 \
  --target 512 --recompute --limit-gib 24 --steps 3 --warmup 1
part gpt2-large 30 bench/speed/sweep.py --family gpt2 --shape gpt2-large --rows 16 --target 1024
# Texts a second, and the batch of evaluation.
part text 45 bench/speed/device_text.py
# FLAN-T5-large, all weights and LoRA, the same rows.
part large-full 35 bench/speed/sweep.py --family t5 --shape flan-t5-large --rows 16 --source 128 --target 256
part large-lora 35 bench/speed/sweep.py --family t5 --shape flan-t5-large --lora 16 --rows 16 --source 128 \
  --target 256
# FLAN-T5-large against transformers.Trainer on real recipes (floor 2.2, goal 4).
if [ -d "$SHARED/peers" ]; then
  "$PYTHON" - "$WORK/flan-t5-large.json" <<'PY'
import json, sys
json.dump({"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_heads": 16,
           "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, open(sys.argv[1], "w"))
PY
  TOQUE_SHARED=$SHARED part large-against-trainer 140 bench/speed/train.py --family t5 --pairs 1 --steps 12 \
    --warmup 4 --shape "$WORK/flan-t5-large.json" --baseline-precision bf16
fi
# What each part of the step gives.
part parts-t5 60 bench/speed/parts.py --family t5 --parts attention,head,prefetch,optimizer,copies
part parts-neox 40 bench/speed/parts.py --family neox --parts attention,head,prefetch,causal,copies
echo "all in $SECONDS s; results in $OUT"
