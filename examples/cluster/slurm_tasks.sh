#!/bin/bash
# The same without a launcher of Toque's: srun starts every process, and Toque reads from Slurm's
# variables which is which. A lost process ends the job; nothing starts again by itself.
#SBATCH --job-name=recipes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append

srun \
  toque train recipe-gpt2-xl run_dir=/shared/runs/recipes data.store=/shared/stores/recipes
code=$?
if [ "$code" = 75 ]; then            # stopped by a signal and saved: go on when there is room
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
