#!/usr/bin/env bash
# Benchmarks that need a CUDA GPU, in under nine minutes; JSON records land in $OUT.
#
#     OUT=results bench/gpu.sh [python]
#
# Needs torch with CUDA, transformers, peft and numpy, and no network. Each part has its own time
# limit, so that one that hangs costs itself alone; what failed leaves its last words in NAME.err.
# The comparison with transformers.Trainer reads the shared peers (TOQUE_SHARED names their folder)
# and is left out where they are absent.
set -u
cd "$(dirname "$0")/.."
PYTHON=${1:-python3}
OUT=${OUT:-results/gpu}
SHARED=${TOQUE_SHARED:-../shared}
mkdir -p "$OUT"
export HF_HUB_OFFLINE=1 PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}

part() { # name, seconds, command...
  local name=$1 limit=$2 begun=$SECONDS
  shift 2
  echo "== $name: $*"
  timeout "$limit" "$PYTHON" "$@" >"$OUT/$name.json" 2>"$OUT/$name.err"
  local rc=$?
  echo "   ended with $rc after $((SECONDS - begun)) s"
  [ "$rc" -eq 0 ] || tail -n 3 "$OUT/$name.err"
}

"$PYTHON" - <<'PY' || exit 1
import torch
if not torch.cuda.is_available():
    raise SystemExit("No CUDA GPU is visible here: these figures stay 'not yet measured'.")
print(torch.cuda.get_device_name(), "torch", torch.__version__)
PY
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$OUT/gpu.csv"

# 1.2B GPT-NeoX, micro-batches of 2,048 tokens: MFU of the stated peak (floor 45 %).
part neox-sweep 110 bench/speed/sweep.py --family neox --shape neox-1.2b --rows 2,4,8 --target 2048 --compile
# FLAN-T5-XXL with LoRA, 2 x 256/512 tokens, within 24 GiB.
part xxl-lora 80 bench/speed/sweep.py --family t5 --shape flan-t5-xxl --lora 16 --rows 2 --source 256 \
  --target 512 --recompute --limit-gib 24 --steps 3 --warmup 1
# FLAN-T5-large, all weights and LoRA, the same rows.
part large-full 45 bench/speed/sweep.py --family t5 --shape flan-t5-large --rows 16 --source 128 --target 256
part large-lora 45 bench/speed/sweep.py --family t5 --shape flan-t5-large --lora 16 --rows 16 --source 128 \
  --target 256
# What each part of the step gives, T5's masked attention included.
part parts-t5 70 bench/speed/parts.py --family t5 --parts packing,head,attention,bf16,optimizer,causal,copies
part parts-neox 50 bench/speed/parts.py --family neox --parts packing,head,attention,causal,copies
# FLAN-T5-large against transformers.Trainer on real recipes (floor 2.2, goal 4).
if [ -d "$SHARED/peers" ]; then
  "$PYTHON" - "$OUT/flan-t5-large.json" <<'PY'
import json, sys
json.dump({"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_heads": 16,
           "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, open(sys.argv[1], "w"))
PY
  TOQUE_SHARED=$SHARED part large-against-trainer 140 bench/speed/train.py --family t5 --pairs 1 --steps 12 \
    --warmup 4 --shape "$OUT/flan-t5-large.json" --baseline-precision bf16
fi
echo "all in $SECONDS s; results in $OUT"
