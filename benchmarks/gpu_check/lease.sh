#!/usr/bin/env bash
# Measure a GPU that is lent for minutes, on a machine without internet and without this project's
# packages, in at most 12 minutes. Each stage writes its files to OUT before the next one begins, so
# a machine that is taken away leaves what was measured. `make lease-kit` gathers KIT beforehand.
#
#   OUT=results bash benchmarks/gpu_check/lease.sh build/lease
#   OUT=results DEVICE=cpu EPOCHS=2 bash benchmarks/gpu_check/lease.sh build/lease     # rehearsal
set -uo pipefail
cd "$(dirname "$0")/../.."
kit=${1:?the folder of make lease-kit}
out=${OUT:?a folder for results}
device=${DEVICE:-cuda}
small=()
[[ $device == cpu ]] && small=(--small)
mkdir -p "$out"

site=$(mktemp -d)
# Nothing is installed over the machine's own packages, such as its torch.
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$kit"/wheels/*.whl \
  2>"$out/install.txt" || cat "$out/install.txt"
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# stage SECONDS NAME COMMAND...: run a stage for at most SECONDS, and add its output to log.txt.
stage() {
  local limit_s=$1 name=$2 began_s=$SECONDS left_s=$((720 - SECONDS))
  shift 2
  limit_s=$((limit_s < left_s ? limit_s : left_s))
  if ((limit_s < 20)); then
    echo "== $name: not run, because no time was left" | tee -a "$out/log.txt"
    return
  fi
  echo "== $name" | tee -a "$out/log.txt"
  timeout --kill-after=10 "$limit_s" "$@" 2>&1 | tee -a "$out/log.txt"
  echo "== $name: status ${PIPESTATUS[0]}, $((SECONDS - began_s)) s" | tee -a "$out/log.txt"
}
check() {
  local minutes=$1
  shift
  stage "$((minutes * 60 + 20))" "$*" python3 benchmarks/gpu_check/check.py \
    --device "$device" ${small[@]+"${small[@]}"} --out "$out" --minutes "$minutes" --only "$@"
}

check 3 vit_b16
check 2 slots waits graphs memory
stage 200 "real images" python3 benchmarks/gpu_check/real_images.py "$kit/shards" \
  --out "$out" --device "$device" --epochs "${EPOCHS:-30}"
if [[ $device == cuda ]]; then
  check 2 vit_l16 vit_h14
fi
check 2 levers
