#!/bin/bash
# Train on one or more nodes:
#   sbatch [options of sbatch] slurm/train.sh [arguments of launch/train.py]
#
# Without arguments, this trains configs/vit_b16.yaml. Submit in the checkout. Before the time
# limit, the run is saved, requeued and resumed. slurm/README.md lists all cases.
#
# ---- lines 1 and 2 to edit (remove one # from line 1); line 3 is at the top of slurm/common.sh
##SBATCH --partition=gpu --account=ACCOUNT
#SBATCH --nodes=1 --gpus-per-node=8 --cpus-per-task=64 --time=24:00:00
#
# This script gets SIGUSR1 this many seconds before the time limit (Slurm: up to 60 s earlier). A
# step, eight evaluation batches and a save must fit into this time.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue --open-mode=append --job-name=vit --output=slurm-%x-%j.out --ntasks-per-node=1

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is not set: start this script with sbatch}"
if [[ ! -f slurm/common.sh ]]; then
  echo "error: $PWD is not the checkout: submit there, with sbatch slurm/train.sh" >&2
  exit 2
fi
source slurm/common.sh

ended=no  # yes after SIGTERM, from scancel or because Slurm requeues the job
warned=no  # yes after SIGUSR1, because the time limit is near
# The last task of an array has the job id of the array, with which Slurm's commands would signal
# and requeue all of its tasks.
job=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
# signals the job's steps, not this script
ask_to_save() { scancel --quiet --signal=USR1 "$job" || true; }
on_time_limit() {
  warned=yes
  say "SIGUSR1: the time limit is near; asking the trainer to save and stop"
  ask_to_save
}
trap 'ended=yes' TERM
trap on_time_limit USR1

# ---- 1. Python, config and nodes: report an error once, in one line
activate_python
find_nodes
[[ " $* " == *" --config"* ]] || set -- --config configs/vit_b16.yaml "$@"
world_size=$(( ${#nodes[@]} * ranks ))
[[ -z ${STAGE:-} ]] || set -- "$@" "loader.cache_dir=$STAGE"
described=$(WORLD_SIZE=$world_size "${on_one[@]}" python launch/train.py "$@" --print-config \
  </dev/null) || fail "not started: the config, see above"
# rank 0's run folder on this node, or its working copy for a run at a URL
run=$("${on_one[@]}" python -c 'import sys, yaml
from vit.config.schema import RunConfig
from vit.run_folder.place import local_folder
print(local_folder(RunConfig(**yaml.safe_load(sys.stdin)["run"])))' <<<"$described")
sed -n '/^# derived/,$p' <<<"$described"
prepare_torchrun

# Run a step to its end, and set `status`. The step runs in the background, because bash delays
# traps until a foreground command ends, and staging may take hours.
run_step() {
  local step waited_s=0
  "$@" </dev/null &
  step=$!
  status=0
  while kill -0 "$step" 2>/dev/null; do
    if [[ $warned == no ]]; then
      wait "$step" || true  # a signal interrupts `wait`, and then its trap runs
    else
      waited_s=$(( waited_s + 1 ))
      if (( waited_s % 10 == 0 )); then  # a starting trainer may have missed the signal
        ask_to_save
      fi
      sleep 1 || true  # SIGTERM also ends it
    fi
  done
  wait "$step" || status=$?
}

# ---- 2. copy shards to a disk of each node, if STAGE is set; training caches the rest
if [[ -n ${STAGE:-} && " $* " != *" --check "* ]]; then
  say "staging shards in $STAGE on each node"
  run_step "${on_each[@]}" python -m vit.data.warm "$@"
  [[ $ended == no ]] || fail
  [[ $status == 0 ]] \
    || say "note: not all shards were staged, see above; training fetches the rest when needed"
fi

# Print the identity of the trainer's `stopped_early`. `ls` first makes another node's new file
# visible over NFS.
marker() {
  ls -a "$run" >/dev/null 2>&1
  stat -c '%i %y' "$run/stopped_early" 2>/dev/null || true
}
checkpoint() { cat "$run/checkpoints/latest" 2>/dev/null || echo "no checkpoint"; }

# True if this attempt stopped early and saved.
stopped_early() { [[ -n $marker_now && $marker_now != "$marker_before" ]]; }

# ---- 3. train, and retry after a failure while each attempt leaves a newer checkpoint
while true; do
  marker_before=$(marker)
  checkpoint_before=$(checkpoint)
  say "training in $run, from $checkpoint_before"
  [[ $warned == no ]] || say "note: the signal came before training began:" \
    "use a longer --time to train more than a few steps"
  run_step "${torchrun[@]}" launch/train.py "$@"
  marker_now=$(marker)
  if [[ $status == 0 || $ended == yes || $(checkpoint) == "$checkpoint_before" ]] || stopped_early
  then
    break
  fi
  say "failed with status $status, but advanced from $checkpoint_before to $(checkpoint):" \
    "starting again from there"
  # HyperPod replaces nodes within a job.
  SLURM_JOB_NODELIST=$(squeue --noheader --jobs="$job" --format=%N)
  find_nodes
  prepare_torchrun
done

# ---- 4. report the outcome. The exit status is not enough, because torchrun exits with 1 after
# SIGTERM even if everything was saved
if ! stopped_early; then
  if [[ " $* " == *" --check "* ]]; then
    say "checked, and nothing was started; exit status $status"
  elif [[ $status == 0 ]]; then
    say "finished: $run"
  elif [[ $ended == yes ]]; then
    say "ended by SIGTERM before the trainer could save; its last checkpoint: $(checkpoint)"
  else
    say "failed with status $status without a new checkpoint, not queued again:" \
      "see the first error above"
  fi
elif [[ $ended == yes ]]; then
  say "stopped and saved: $(<"$run/stopped_early")." \
    "Not queued again by this script, because the job itself was asked to end"
else
  say "stopped and saved: $(<"$run/stopped_early"). Queueing job $job again"
  status=0
  trap 'ended=yes; exit 0' TERM  # Slurm's signal to a job that it requeues
  scontrol requeue "$job" \
    || fail "Slurm did not requeue the job: submit the same command again to resume"
  sleep 600 &
  wait $!
fi
exit "$status"
