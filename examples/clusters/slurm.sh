#!/bin/bash
# A Slurm batch script: sbatch examples/clusters/slurm.sh examples/digits.py
#SBATCH --job-name=kdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
# One GPU a rank, where there are GPUs:
##SBATCH --gpus-per-node=4

set -euo pipefail

# The cluster's own MPI and the environment that holds kdist (from a checkout: pip install '.[mpi]').
module load openmpi 2>/dev/null || true
# shellcheck source=/dev/null
source "${KDIST_VENV:-$HOME/venv}/bin/activate"

if srun --mpi=list 2>&1 | grep -q pmix; then
    # What kdist makes of this job, for a bug report.
    srun --mpi=pmix --label kdist env | grep '^ *0:' || true
    # Slurm starts the ranks itself; its MPI plugin must be the one that the MPI library speaks.
    srun --mpi=pmix --cpu-bind=none --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" python "$@"
else
    # mpirun finds the nodes of the allocation. Bound to one core each, ranks would share it among their threads.
    mpirun -np "$SLURM_NTASKS" --bind-to none python "$@"
fi
