#!/bin/bash
# Two machines of eight GPUs under Slurm: sbatch slurm.sh
# One launcher a machine; it starts a process for each GPU.
#SBATCH --job-name=recipes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180          # three minutes before the end every process is told to save
#SBATCH --requeue                  # after a fault of a machine: the same command continues
#SBATCH --open-mode=append

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun \
  toque train recipe-gpt2-xl run_dir=/shared/runs/recipes data.store=/shared/stores/recipes \
  --gpus 8 --nodes 2 --rendezvous "$first:29400"
code=$?
if [ "$code" = 75 ]; then            # stopped by a signal and saved: go on when there is room
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
