#!/bin/bash
# Two machines of eight GPUs under Slurm: sbatch slurm.sh
# srun starts torchrun once per machine. The first machine hosts the rendezvous.
#SBATCH --job-name=recipes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180          # three minutes before the end, every process saves
#SBATCH --requeue                  # after a machine failure, the same command continues
#SBATCH --open-mode=append

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-endpoint "$first:29400" \
  -m toque train recipe-gpt2-xl run_dir=/shared/runs/recipes data.store=/shared/stores/recipes
code=$?
# torchrun exits with 1 after a signal, when the run has saved, and after the loss of a process. The
# job returns to the queue and continues later.
if [ "$code" != 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
