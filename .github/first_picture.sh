#!/usr/bin/env bash
# Uses an installed package in an empty folder: makes data, trains for 40 steps, evaluates, reports.
# cibuildwheel runs it with each Python (pyproject.toml). docs/experiments/project.md has its times.
set -euo pipefail
start=$SECONDS
python -m data_prep.digits --out data/digits
vitline train --config demo train.epochs=null train.steps=40 schedule.warmup_steps=4 log.wandb=off
grep -q '<img' runs/demo/report/index.html
echo "first picture: $((SECONDS - start)) s after the installation"
vitline eval runs/demo
vitline report runs/demo
python - <<'CODE'
import platform, torch, vit
from vit.data.decode import native
print(f"Python {platform.python_version()}, torch {torch.__version__}, {vit.__file__}")
print(f"C decoder: {native.AVAILABLE}", native.UNAVAILABLE_REASON or "")
CODE
