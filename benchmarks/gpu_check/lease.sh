#!/usr/bin/env bash
# Measure a GPU that is lent for minutes, on a machine without internet and without this project's
# packages, in at most 12 minutes. Each stage writes its files to OUT before the next stage begins.
# The files of finished stages therefore remain if the machine is taken away. `make lease-kit`
# gathers KIT beforehand.
#
#   OUT=results bash benchmarks/gpu_check/lease.sh build/lease
#   OUT=results DEVICE=cpu EPOCHS=2 bash benchmarks/gpu_check/lease.sh build/lease     # rehearsal
set -uo pipefail
: "${1:?the folder of make lease-kit}" "${OUT:?a folder for results}"
kit=$(realpath -m "$1")
out=$(realpath -m "$OUT")
cd "$(dirname "$0")/../.."
device=${DEVICE:-cuda}
small=()
[[ $device == cpu ]] && small=(--small)
if [[ ! -d $kit/wheels || ! -d $kit/shards ]]; then
  echo "error: $kit: expected folders wheels and shards: run make lease-kit IMAGES=FOLDER" >&2
  exit 2
fi
mkdir -p "$out" && touch "$out/log.txt" || exit 2
exec > >(tee -a "$out/log.txt") 2>&1

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
# Each stage runs in the background. Otherwise, bash would handle a signal only after the stage, and
# would then begin the next stage.
stop() {
  local process
  for process in $(jobs -p); do
    # `timeout` makes itself the leader of a group. Until then, bash would lose a signal to it.
    until kill -- "-$process" 2>/dev/null || ! kill -0 "$process" 2>/dev/null; do sleep 0.05; done
    wait "$process"
  done
  exit 143
}
trap stop INT TERM
# No package replaces one of the machine's own packages, such as its torch.
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$kit"/wheels/*.whl
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# stage SECONDS NAME COMMAND...: run a stage for at most SECONDS.
stage() {
  local limit_s=$1 name=$2 began_s=$SECONDS left_s=$((720 - SECONDS)) status
  shift 2
  limit_s=$((limit_s < left_s ? limit_s : left_s))
  if ((limit_s < 20)); then
    echo "== $name: not run, because no time was left"
    return
  fi
  echo "== $name"
  timeout --kill-after=10 "$limit_s" "$@" &
  wait $!
  status=$?
  echo "== $name: status $status, $((SECONDS - began_s)) s"
}
check() {
  local minutes=$1
  shift
  stage "$((minutes * 60 + 20))" "$*" python3 benchmarks/gpu_check/check.py \
    --device "$device" ${small[@]+"${small[@]}"} --out "$out" --minutes "$minutes" --only "$@"
}

check 3 vit_b16
check 2 slots waits graphs memory
stage 200 "real images" python3 benchmarks/gpu_check/photos.py "$kit/shards" \
  --out "$out" --device "$device" --epochs "${EPOCHS:-30}"
if [[ $device == cuda ]]; then
  check 2 vit_l16 vit_h14
fi
check 2 levers
