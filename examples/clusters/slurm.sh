#!/bin/bash
# A Slurm batch script: sbatch examples/clusters/slurm.sh examples/digits.py
#SBATCH --job-name=kdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
# One GPU a rank, where there are GPUs:
##SBATCH --gpus-per-node=4
# Started again after it was preempted, or at its time limit, where the training has BackupAndRestore and Preemption:
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120

set -euo pipefail

# The environment that holds kdist (from a checkout: pip install '.[mpi,examples]'), and the cluster's own MPI, if it has one.
module load openmpi 2>/dev/null || true
# shellcheck source=/dev/null
source "${KDIST_VENV:-$HOME/venv}/bin/activate"

# Slurm's plugin must be the one that the MPI speaks: `SLURM_MPI_TYPE=pmi2 sbatch ...` names another one of
# `srun --mpi=list`. With `none` the ranks talk over TCP, by TensorFlow's collective ops, and need no MPI.
if [[ -z ${SLURM_MPI_TYPE:-} ]]; then
    SLURM_MPI_TYPE=$(grep -qw pmix <<<"$(srun --mpi=list 2>&1)" && echo pmix || echo none)
fi
export SLURM_MPI_TYPE

# Bound to one core each, ranks would share it among their threads.
cores=(--cpu-bind=none --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")

if [[ -z ${SLURM_RESTART_COUNT:-} ]]; then
    # What kdist makes of this job, for a bug report.
    srun "${cores[@]}" --label kdist env 2>/dev/null | grep '^ *0:' || true
fi

# A rank that fails before the others have met it ends them after a minute.
status=0
srun "${cores[@]}" --wait=60 python "$@" || status=$?

# The code of Preemption, after which Slurm starts the job again where slurm.conf has RequeueExit=75.
if ((status == 75)) && ! grep -Eq '^RequeueExit .*\b75\b' <<<"$(scontrol show config)"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
