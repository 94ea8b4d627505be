#!/bin/bash
# Two machines of eight GPUs under Slurm: sbatch slurm.sh
# srun starts every process, and Toque reads from Slurm's variables which is which.
#SBATCH --job-name=recipes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180          # three minutes before the end every process is told to save
#SBATCH --requeue                  # after a fault of a machine: the same command continues
#SBATCH --open-mode=append

srun \
  toque train recipe-gpt2-xl run_dir=/shared/runs/recipes data.store=/shared/stores/recipes
code=$?
# 75: stopped by a signal and saved. 1: a process was lost, which is tried again a few times.
# The job goes back into the queue, and continues when there is room.
if [ "$code" = 75 ] || { [ "$code" = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
