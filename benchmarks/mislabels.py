"""Measure how well a run's losses find wrong labels, compared with cleanlab's confident learning.

    python -m data_prep.digits --out data/digits
    python benchmarks/mislabels.py --data data/digits --work build/mislabels [--rates 0.01 0.03 0.1]
    python benchmarks/mislabels.py --data data/digits --work build/mislabels --pairs 5

Wrong labels are planted in the demo's digits. A fraction of the *originals* is given another class,
together with all renderings, so that correct renderings of an original do not reveal the error. One
training run produces the losses and margins by which `launch/samples.py` ranks images. Confident
learning (Northcutt et al. 2021; cleanlab's `get_label_quality_scores` and `find_label_issues`)
needs predictions for images that the model has not seen, so `--folds` further runs are split by
original. For comparison, it also uses the predictions of the first run's last weights, which need
no extra training. Run the same command again to resume an interrupted benchmark.

For each fraction, the benchmark prints the area under the ROC curve, and the precision of the k
top-ranked images, where k is the number of planted labels.

`--pairs` plants 3 % wrong labels with each of several seeds, and excludes or corrects the images
that `launch/samples.py` ranks first. The changed run equals the first one in everything else. The
difference between their accuracies therefore varies less than between runs with different seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import roc_auc_score

from vit.data.storage.opening import open_split
from vit.extras.report.source import ReportSource
from vit.loggers.lines import read_metrics
from vit.run_folder.paths import METRICS_FILE

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def plant(source: Path, out: Path, rate: float, seed: int) -> NDArray[np.bool_]:
    """Copy the data with wrong labels for a fraction `rate` of the training originals.

    Returns a mask (N,) of the samples with wrong labels.
    """
    if not out.exists():
        shutil.copytree(source, out, copy_function=os.link)

    index_file = out / "train.index.npy"
    true = np.load(source / "train.index.npy")
    split = open_split(source, "train")
    originals = np.array([split.key(i).partition("_")[0] for i in range(len(split))])
    names, original_of = np.unique(originals, return_inverse=True)

    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(names), round(rate * len(names)), replace=False)
    shift = np.zeros(len(names), np.int32)
    shift[chosen] = rng.integers(1, split.num_classes, len(chosen))
    rows = true.copy()
    rows["label"] = (rows["label"] + shift[original_of]) % split.num_classes

    index_file.unlink()
    np.save(index_file, rows)
    return rows["label"] != true["label"]


def train(root: Path, run_dir: Path, overrides: list[str]) -> None:
    """Train the demo's model with AdamW unless the run is already finished."""
    line = [sys.executable, str(ROOT / "launch" / "train.py"), "--config"]
    line += [str(ROOT / "benchmarks" / "inputs" / "digits_adamw.yaml")]
    line += [f"data.root={root}", f"run.dir={run_dir}"]
    line += ["log.wandb=off", "log.report=false", *overrides]
    subprocess.run(line, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)


@torch.no_grad()
def probabilities(run_dir: Path) -> NDArray[np.float64]:
    """Evaluate a run on its training split, and return the class probabilities as an (N, classes)
    array."""
    source = ReportSource(run_dir, CPU)
    split = open_split(source.config.data.root, source.config.data.train_split)
    batches = []
    for start in range(0, len(split), 200):
        samples = range(start, min(start + 200, len(split)))
        images = torch.stack([source.eval_image(i, split) for i in samples])
        batches.append(source.model(source.augment.normalize(images)).double().softmax(1))
    return torch.cat(batches).numpy()


def out_of_fold(root: Path, work: Path, folds: int, overrides: list[str]) -> NDArray[np.float64]:
    """Return probabilities (N, classes) from models that were not trained on the image's
    original."""
    split = open_split(root, "train")
    keys = [split.key(i) for i in range(len(split))]
    fold_of = np.array([int(key[5:9]) % folds for key in keys])
    predicted = np.zeros((len(keys), split.num_classes))
    for fold in range(folds):
        out = work / f"fold{fold}"
        out.mkdir(parents=True, exist_ok=True)
        excluded = [key for key, number in zip(keys, fold_of, strict=True) if number == fold]
        (out / "exclude.txt").write_text("\n".join(excluded) + "\n")
        train(root, out / "run", [*overrides, f"data.exclude={out / 'exclude.txt'}"])
        predicted[fold_of == fold] = probabilities(out / "run")[fold_of == fold]
    return predicted


def measure(wrong: NDArray[np.bool_], suspicion: NDArray[np.float64]) -> dict[str, float]:
    """Return the area under the ROC curve, and the precision at the number of wrong labels."""
    first = np.argsort(-suspicion, kind="stable")[: wrong.sum()]
    return {"auc": float(roc_auc_score(wrong, suspicion)), "precision": float(wrong[first].mean())}


def compare(
    data: Path, work: Path, rate: float, folds: int, overrides: list[str], score: bool
) -> dict[str, dict[str, float]]:
    """Return each method's figures for one fraction of wrong labels."""
    root = work / f"data_{rate:g}"
    wrong = plant(data, root, rate, seed=0)
    run_dir = work / f"run_{rate:g}"
    train(root, run_dir, overrides)
    crossed = out_of_fold(root, work / f"folds_{rate:g}", folds, overrides)
    if not score:
        return {}
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    from vit.extras.report.training_images.curves import read_curves

    labels = open_split(root, "train").index["label"].astype(np.int64)
    curves = read_curves(ReportSource(run_dir, CPU))
    figures = {
        "mean margin (samples.py)": measure(wrong, -curves.mean_margin),
        "mean loss": measure(wrong, curves.mean_loss),
        "margin of the last epoch": measure(wrong, -np.nan_to_num(curves.margins[-1])),
    }
    for name, predicted in (("the same training", probabilities(run_dir)), ("folds", crossed)):
        for method in ("self_confidence", "normalized_margin"):
            quality = get_label_quality_scores(labels, predicted, method=method)
            figures[f"cleanlab {method}, {name}"] = measure(wrong, -quality)
        issues = find_label_issues(labels, predicted, filter_by="prune_by_noise_rate")
        figures[f"cleanlab issues, {name}"] = {
            "auc": float("nan"),
            "precision": float(wrong[issues].mean()) if issues.any() else float("nan"),
            "found": float(wrong[issues].sum() / wrong.sum()),
        }
    return figures


def compare_pairs(data: Path, work: Path, num_seeds: int, overrides: list[str]) -> None:
    """Print the accuracies and differences of runs with and without the suspicious images."""
    true = open_split(data, "train").index["label"]
    top1 = dict[str, list[float]]()
    for seed in range(num_seeds):
        folder = work / f"pair_{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        root = folder / "data"
        wrong = plant(data, root, 0.03, seed)
        train(root, folder / "plain", [*overrides, f"train.seed={seed}"])

        suspects = folder / "suspects.txt"
        line = [sys.executable, str(ROOT / "launch" / "samples.py"), str(folder / "plain")]
        line += ["--worst", str(wrong.sum()), "--exclude", str(suspects)]
        subprocess.run(line, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)

        split = open_split(root, "train")
        number_of = {split.key(number): number for number in range(len(split))}
        keys = suspects.read_text().split()
        precision = wrong[[number_of[key] for key in keys]].mean()
        labels = [f"{key},label={true[number_of[key]]}\n" for key in keys]
        (folder / "labels.csv").write_text("".join(labels))

        arms = {
            "excluded": [f"data.exclude={suspects}", f"train.seed={seed}"],
            "corrected": [f"data.relabel={folder / 'labels.csv'}", f"train.seed={seed}"],
            "excluded, another seed": [f"data.exclude={suspects}", f"train.seed={seed + 100}"],
        }
        for name, settings in arms.items():
            train(root, folder / name.replace(", ", "_"), [*overrides, *settings])
        for name in ("plain", *arms):
            lines = read_metrics(folder / name.replace(", ", "_") / METRICS_FILE)
            evaluations = [line for line in lines if line["kind"] == "eval"]
            top1.setdefault(name, []).append(evaluations[-1]["top1"])

        row = ", ".join(f"{name} {values[-1]:.2f} %" for name, values in top1.items())
        print(f"seed {seed}: {precision:.0%} of {len(keys)} suspects are wrong; {row}", flush=True)

    for name in ("excluded", "corrected", "excluded, another seed"):
        differences = np.array(top1[name]) - np.array(top1["plain"])
        half = stats.t.ppf(0.975, num_seeds - 1) * differences.std(ddof=1) / num_seeds**0.5
        print(f"{name}: {differences.mean():+.2f} points, interval +-{half:.2f}")


def main() -> None:
    """Print the table, and write it to the work folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.01, 0.03, 0.1])
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--pairs", type=int, metavar="SEEDS", help="compare changed runs instead")
    parser.add_argument("--train-only", action="store_true", help="only train, without cleanlab")
    parser.add_argument("overrides", nargs="*", help="settings such as section.key=value")
    args = parser.parse_intermixed_args()

    if args.pairs:
        compare_pairs(args.data, args.work, args.pairs, args.overrides)
        return

    results = {}
    for rate in args.rates:
        print(f"{rate:.0%} of the originals", flush=True)
        figures_by_method = compare(
            args.data, args.work, rate, args.folds, args.overrides, not args.train_only
        )
        for name, figures in figures_by_method.items():
            text = ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
            print(f"  {name:45} {text}", flush=True)
        results[f"{rate:g}"] = figures_by_method

    (args.work / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
