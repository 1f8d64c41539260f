#!/bin/bash
# Evaluate on one or more nodes:
#   sbatch [options of sbatch] slurm/eval.sh --checkpoint runs/vit_b16 [arguments of launch/eval.py]
#
# Submit in the checkout. On any number of nodes, the counts equal those of `python launch/eval.py`
# with the same arguments.
#
# ---- lines 1 and 2 to edit (remove one # from line 1); line 3 is at the top of slurm/common.sh
##SBATCH --partition=gpu --account=ACCOUNT
#SBATCH --nodes=1 --gpus-per-node=8 --cpus-per-task=64 --time=01:00:00
#
#SBATCH --open-mode=append --job-name=vit-eval --output=slurm-%x-%j.out --ntasks-per-node=1

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is not set: start this script with sbatch}"
if [[ ! -f slurm/common.sh ]]; then
  echo "error: $PWD is not the checkout: submit there, with sbatch slurm/eval.sh" >&2
  exit 2
fi
source slurm/common.sh

activate_python
find_nodes
prepare_torchrun
"${torchrun[@]}" launch/eval.py "$@" </dev/null \
  || fail "failed with status $?: see the first error above"
