#!/usr/bin/env bash
# `make demo` trains a ViT on handwritten digits with two DDP ranks, fine-tunes it at a higher
# resolution, evaluates it exactly and writes a report. It needs no download, account or GPU. Running
# it again continues a stopped demo; `rm -rf runs/demo runs/demo_finetune` starts over. RANKS is the
# number of ranks. With a single GPU it is 1, because two ranks would train on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
# torchrun would also set one thread per rank, but print a long note.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
run() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }

start=$SECONDS
RANKS=${RANKS:-$(python -c 'import torch; print(1 if torch.cuda.device_count() == 1 else 2)')}
run python -m data_prep.digits --out data/digits
run torchrun --nproc_per_node="$RANKS" launch/train.py --config configs/demo.yaml
run torchrun --nproc_per_node="$RANKS" launch/eval.py --checkpoint runs/demo --finetune configs/demo_finetune.yaml
cat <<TEXT

Done in $((SECONDS - start)) s. The last lines compare three models on the same images: as trained
at 32 px; the same at 48 px, where interpolated positions alone cost accuracy; and fine-tuned there.

  look      runs/demo/report/index.html      curves, pictures, record: one file to open or to send
            runs/demo/metrics.jsonl          the record, one JSON object a line
  resume    run it again after Ctrl-C or kill -9: it continues from its last checkpoint,
            to the same weights
  your data python -m data_prep.imagefolder PATH/TO/class-folders --out data/mine
            python launch/train.py --config configs/photos.yaml data.root=data/mine run.dir=runs/mine
  ImageNet  torchrun --nproc_per_node=8 launch/train.py --config configs/vit_b16.yaml data.root=data/imagenet
  Slurm     sbatch slurm/train.sh            (slurm/README.md: three lines to edit)
TEXT
