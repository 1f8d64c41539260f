#!/bin/bash
# Train one run per array task, with different seeds or with settings from the lines of a file:
#   sbatch --array=0-4 slurm/sweep.sh run.dir=runs/seeds [arguments of launch/train.py]
#   SWEEP=rates.txt sbatch --array=0-2 slurm/sweep.sh run.dir=runs/rates [arguments ...]
#
# Task K trains in runs/seeds/K with train.seed=K, or with the settings in line K (from 0) of SWEEP.
# Each task is saved, requeued and resumed like a job of slurm/train.sh. All tasks form one W&B
# group. The last task prints a table of the runs. `python launch/sweep.py runs/seeds` prints it at
# any time.
#
# ---- lines 1 and 2 to edit (remove one # from line 1); line 3 is at the top of slurm/common.sh
##SBATCH --partition=gpu --account=ACCOUNT
#SBATCH --nodes=1 --gpus-per-node=8 --cpus-per-task=64 --time=24:00:00
#
#SBATCH --signal=B:USR1@120
#SBATCH --requeue --open-mode=append --job-name=vit-sweep --output=slurm-%x-%A_%a.out
#SBATCH --ntasks-per-node=1

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is not set: start this script with sbatch}"
if [[ ! -f slurm/common.sh ]]; then
  echo "error: $PWD is not the checkout: submit there, with sbatch slurm/sweep.sh" >&2
  exit 2
fi
source slurm/common.sh

task=${SLURM_ARRAY_TASK_ID:-}
[[ -n $task ]] || fail "not an array job: use sbatch --array=0-4 slurm/sweep.sh ..."
for word in "$@"; do
  case $word in
    run.dir=*) folder=${word#run.dir=} ;;
  esac
done
[[ -n ${folder:-} ]] || fail "run.dir=FOLDER is missing: give a folder for the run folders of all tasks"
settings=("train.seed=$task")
if [[ -n ${SWEEP:-} ]]; then
  [[ -f $SWEEP ]] || fail "SWEEP=$SWEEP: no such file"
  mapfile -t lines < <(tr -d '\r' <"$SWEEP" | grep -v '^[[:space:]]*\(#\|$\)')
  (( ${#lines[@]} )) || fail "SWEEP=$SWEEP: the file has no settings"
  (( task < ${#lines[@]} )) \
    || fail "task $task: $SWEEP has ${#lines[@]} lines: use --array=0-$(( ${#lines[@]} - 1 ))"
  split_words settings "${lines[task]}" || fail "$SWEEP: a quote is not closed: ${lines[task]}"
fi
export WANDB_RUN_GROUP=${WANDB_RUN_GROUP:-$(basename "$folder")}

# Runs when slurm/train.sh ends, because both scripts share this shell, which receives Slurm's
# signals. The last task prints the table, even if other tasks failed.
print_table() {
  local if_finished=(--when-finished "$SLURM_ARRAY_TASK_COUNT")
  if [[ $folder == *://* ]]; then
    say "no table: $folder is not a local folder"
    return
  fi
  activate_python
  # Slurm or the task itself may requeue an ended task, so it is not the last.
  [[ ${ended:-no} == yes ]] || ! is_last || if_finished=()
  "${on_one[@]}" python launch/sweep.py "$folder" "${if_finished[@]}" || true
  (( ${#if_finished[@]} )) || rm -f "$folder/.ended.$SLURM_ARRAY_JOB_ID".*
}

# True if all other tasks have left the queue or reached this line. It may be true for two tasks
# that reach it simultaneously.
is_last() {
  local other ended_here="$folder/.ended.$SLURM_ARRAY_JOB_ID"
  mkdir -p "$folder"
  touch "$ended_here.$task"
  ls -a "$folder" >/dev/null  # makes new files of other nodes visible over NFS
  for other in $(squeue --noheader --array --jobs="$SLURM_ARRAY_JOB_ID" --format=%K); do
    [[ -e $ended_here.$other ]] || return 1
  done
}
trap print_table EXIT
say "task $task of $folder: ${settings[*]}; W&B group $WANDB_RUN_GROUP"
set -- "$@" "${settings[@]}" "run.dir=$folder/$task"
source slurm/train.sh
