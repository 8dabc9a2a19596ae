#!/usr/bin/env bash
# PBS Pro, OpenPBS: one rank per mpiprocs, under the mpirun on the path.
#   qsub -v ARGS="--strategy data-tensor train.py --steps 1000" launcher/pbs.sh
#   qsub -l select=4:ncpus=32:mpiprocs=8 -v ARGS="train.py" launcher/pbs.sh
# Options on the command line win over those below.
#PBS -N distcell
#PBS -l select=2:ncpus=16:mpiprocs=4
#PBS -l walltime=01:00:00
#PBS -j oe
set -euo pipefail

python=${PYTHON:-python}
cd "${PBS_O_WORKDIR:-$PWD}"

# PBS lists a host once for every rank that it takes.
ranks=$(wc -l < "$PBS_NODEFILE")
: "${ARGS:?what to run: qsub -v ARGS=\"train.py\" launcher/pbs.sh}"
# xargs takes words as a shell does: 'two words' is one argument.
mapfile -t arguments < <(xargs -n 1 printf '%s\n' <<< "$ARGS")

case $(mpirun --version 2>&1) in
  *"Open MPI"*) hosts=(--hostfile "$PBS_NODEFILE") ;;
  *) hosts=(-f "$PBS_NODEFILE") ;;
esac

exec mpirun -n "$ranks" "${hosts[@]}" "$python" -m distcell.launch "${arguments[@]}"
