#!/bin/bash
# Write shards with a job array, one part per task:
#   sbatch --array=0-7 slurm/prep.sh imagefolder SOURCE --out ROOT [arguments of that command]
#
# Submit in the checkout. The first argument names a module of data_prep. The task that finds all
# shards complete writes `_info.json`. After a failure, submit the same line again: complete shards
# are reused. Single tasks: PARTS=8 sbatch --array=3 slurm/prep.sh ...
#
# ---- lines 1 and 2 to edit (remove one # from line 1); line 3 is at the top of slurm/common.sh
##SBATCH --partition=cpu --account=ACCOUNT
#SBATCH --nodes=1 --cpus-per-task=16 --time=04:00:00
#
#SBATCH --requeue --open-mode=append --job-name=vit-prep --output=slurm-%x-%A_%a.out --ntasks=1

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is not set: start this script with sbatch}"
if [[ ! -f slurm/common.sh ]]; then
  echo "error: $PWD is not the checkout: submit there, with sbatch slurm/prep.sh" >&2
  exit 2
fi
source slurm/common.sh

source=${1:-}
[[ -f data_prep/$source.py ]] \
  || fail "'$source' is not a module of data_prep:" \
    "give a module such as imagefolder as the first argument"
shift
part=()
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
  if [[ -z ${PARTS:-} ]]; then  # only an array 0-N shows the number of parts
    # shellcheck disable=SC2153
    (( SLURM_ARRAY_TASK_MIN == 0 && SLURM_ARRAY_TASK_MAX == SLURM_ARRAY_TASK_COUNT - 1 )) \
      || fail "an array of $SLURM_ARRAY_TASK_COUNT tasks," \
        "$SLURM_ARRAY_TASK_MIN to $SLURM_ARRAY_TASK_MAX: submit --array=0-N again (whole shards" \
        "are kept), or set the number of parts: PARTS=8 sbatch --array=3 slurm/prep.sh ..."
    PARTS=$SLURM_ARRAY_TASK_COUNT
  fi
  part=(--shards "$SLURM_ARRAY_TASK_ID/$PARTS")
fi
activate_python
say "job $SLURM_JOB_ID on $(hostname): data_prep.$source ${part[*]}"
exec "${on_one[@]}" python -m "data_prep.$source" --workers "${SLURM_CPUS_PER_TASK:-1}" "$@" "${part[@]}"
