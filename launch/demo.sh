#!/usr/bin/env bash
# `make demo` trains a ViT on handwritten digits with two DDP ranks, fine-tunes it at a higher
# resolution, evaluates it on all images and writes a report. It needs no download, account or GPU.
# Run `make demo` again to continue a stopped demo. Remove both folders first (`rm -rf runs/demo
# runs/demo_finetune`) to start over. RANKS sets the number of ranks. On a host with a single GPU,
# the default is 1, because two ranks would train on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
# torchrun would also set one thread per rank, but it would print a long note.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
run() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

start=$SECONDS
RANKS=${RANKS:-$(python -c 'import torch; print(1 if torch.cuda.device_count() == 1 else 2)')}
run python -m data_prep.digits --out data/digits
run torchrun --nproc_per_node="$RANKS" launch/train.py --config configs/demo.yaml
run torchrun --nproc_per_node="$RANKS" launch/eval.py --checkpoint runs/demo --finetune configs/demo_finetune.yaml
cat <<TEXT

Done in $((SECONDS - start)) s. The last lines compare three models on the same images: trained at
32 px, evaluated at 48 px without training (which costs accuracy), and fine-tuned at 48 px.

  look      runs/demo/report/index.html      curves and pictures in one file, easy to send
            runs/demo/metrics.jsonl          metrics, one JSON object per line
  resume    after Ctrl-C or kill -9, run make demo again: it resumes from the last checkpoint
            and reaches the same weights
  your data python -m data_prep.imagefolder PATH/TO/class-folders --out data/mine
            python launch/train.py --config configs/photos.yaml data.root=data/mine run.dir=runs/mine
  ImageNet  torchrun --nproc_per_node=8 launch/train.py --config configs/vit_b16.yaml data.root=data/imagenet
  Slurm     sbatch slurm/train.sh            (slurm/README.md: three lines to edit)
TEXT
