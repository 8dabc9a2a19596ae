#!/usr/bin/env bash
# One machine: starts RANKS ranks (default: one per core) under the mpirun beside this Python.
#   RANKS=8 launcher/local.sh --strategy tensor train.py --steps 100
set -euo pipefail

python=${PYTHON:-python}
ranks=${RANKS:-$(nproc)}

exec "$python" -m distcell.launch -n "$ranks" "$@"
