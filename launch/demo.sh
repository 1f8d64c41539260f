#!/usr/bin/env bash
# `make demo`: real handwritten digits, a ViT from scratch on two DDP ranks, an exact evaluation. No download, no account, no GPU.
# The same command again goes on where it was stopped; `rm -rf runs/demo` starts over.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # one thread a rank; torchrun would say so at length
run() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

start=$SECONDS
run python -m data_prep.digits --out data/digits
run torchrun --nproc_per_node="${RANKS:-2}" launch/train.py --config configs/demo.yaml
run python launch/eval.py --checkpoint runs/demo
run python launch/eval.py --checkpoint runs/demo --image-size 48
cat <<TEXT

Done in $((SECONDS - start)) s. What the last line shows: resolution alone, with interpolated positions and nothing trained, costs accuracy.

  look      runs/demo/report/curves.png      the learning curve
            runs/demo/metrics.jsonl          the record, one JSON object a line
  resume    run it again after Ctrl-C or kill -9: it goes on from its last checkpoint, to the same weights
  your data python -m data_prep.imagefolder PATH/TO/class-folders --out data/mine
            torchrun --nproc_per_node=2 launch/train.py --config configs/demo.yaml data.root=data/mine run.dir=runs/mine
  ImageNet  torchrun --nproc_per_node=8 launch/train.py --config configs/vit_b16.yaml data.root=data/imagenet
TEXT
