"""Compare the speed of predicting many files with its two limits: the loader alone and the model
alone.

    python benchmarks/predict.py [--rounds 5] [--images 1000] [--workers N] [--quick]

The files are the JPEGs of `loader.py`, in the page cache. Contestants take turns:

    loader alone   the same batches from the same workers, discarded
    model alone    the same number of forward passes on one batch in memory
    predict        the loop of `launch/predict.py`, including its CSV

If the loader and the model compute on the same cores, prediction cannot reach either limit, because
their CPU times add up. Each model therefore has two tables. The first contains images per second,
limited on a GPU by the slower of the two. The second contains images per CPU second, including
workers. On a CPU, these rates are limited by 1 / (1 / loader + 1 / model), which is in the last
line.
"""

from __future__ import annotations

import argparse
import math
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from inputs.loader_data import make_data
from measure import CORES, Result, as_result, rows_of, show

from vit.config import io as config_io
from vit.data.augment.apply import create_augment
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.inference.inputs import ImagePlace, find_inputs
from vit.inference.output import csv_file, write_rows
from vit.inference.predict import PlaceBatches, predict
from vit.inference.predictor import Preprocess, Trained
from vit.model import create_model
from vit.weights.files import LoadedWeights

NUM_CLASSES = 1000
MODELS = {
    "a model of the demo's size at 32 px, which waits for the loader": {
        "name": "vit_ti8",
        "image_size": 32,
        "embed_dim": 128,
        "depth": 4,
        "num_heads": 4,
    },
    "ViT-S/16 at 224 px": {"name": "vit_s16", "image_size": 224},
}
LOADER = "loader alone"
MODEL = "model alone"
PREDICT = "predict"


def create_trained(model: dict[str, object], device: torch.device) -> Trained:
    """Return a model with random weights, which is as fast as a trained model."""
    values = {"model": model, "data": {"root": "."}, "train": {"steps": 1, "precision": "fp32"}}
    config = config_io.from_dict(values, "benchmark")
    network = create_model(config.model, num_classes=NUM_CLASSES).to(device).eval()
    augment = create_augment(config.augment, config.data, NUM_CLASSES, device)
    preprocess = Preprocess(
        ImageFormat.from_config(config.model, config.data), config.eval, augment
    )
    names = tuple(f"class {number}" for number in range(NUM_CLASSES))
    return Trained(network, preprocess, names, config, LoadedWeights(Path("none"), {}))


def processor_s() -> float:
    """Return the CPU seconds of this process and its finished children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def load_only(trained: Trained, places: list[ImagePlace], batch_size: int, workers: int) -> None:
    """Load all batches and discard them."""
    preprocess = trained.preprocess
    batches = PlaceBatches(places, preprocess.image_format, preprocess.view, batch_size)
    with Loader(batches, 0, len(batches), num_workers=workers, device=trained.device) as loader:
        for _ in loader:
            pass


def compute_only(trained: Trained, num_images: int, batch_size: int) -> None:
    """Run forward passes on a single batch, and read only the last result."""
    inputs = torch.zeros(
        batch_size, 3, *trained.preprocess.image_format.size, device=trained.device
    )
    for _ in range(math.ceil(num_images / batch_size)):
        logits = trained(inputs)
    logits.sum().item()


def predict_all(trained: Trained, places: list[ImagePlace], batch_size: int, workers: int) -> None:
    """Predict all files like launch/predict.py, and write the CSV file."""
    with tempfile.TemporaryDirectory() as folder:
        with csv_file(Path(folder, "out.csv"), 5) as writer:
            for predictions in predict(
                trained, places, 5, batch_size=batch_size, num_workers=workers
            ):
                write_rows(writer, predictions, places, trained.class_names)


def measured(
    title: str, contestants: Mapping[str, Callable[[], None]], num_images: int, rounds: int
) -> list[Result]:
    """Run contestants alternately. Return their images per second and per CPU second."""
    per_s: dict[str, list[float]] = {name: [] for name in contestants}
    per_cpu_s: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, contestant in contestants.items():
            began_s = time.perf_counter()
            used_s = processor_s()
            contestant()
            if turn:  # Skip the warm-up round.
                per_s[name].append(num_images / (time.perf_counter() - began_s))
                per_cpu_s[name].append(num_images / (processor_s() - used_s))

    pairs = zip(per_cpu_s[LOADER], per_cpu_s[MODEL], strict=True)
    per_cpu_s["both, one after the other"] = [1 / (1 / a + 1 / b) for a, b in pairs]
    slower = zip(per_s[LOADER], per_s[MODEL], strict=True)
    per_s["the slower of both"] = [min(pair) for pair in slower]

    return [
        as_result(f"{title}: images/s", "images/s", per_s, ["the slower of both"]),
        as_result(
            f"{title}: images per processor second",
            "images/CPU-s",
            per_cpu_s,
            ["both, one after the other"],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--images", type=int, default=1000, metavar="N")
    parser.add_argument("--workers", type=int, default=CORES, metavar="N")
    parser.add_argument("--quick", action="store_true", help="few images; figures are meaningless")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    place = Path(tempfile.gettempdir(), "vit-benchmark-loader")
    parser.add_argument("--data", type=Path, default=place, metavar="FOLDER")
    args = parser.parse_args()

    num_images = 64 if args.quick else args.images
    rounds = 1 if args.quick else args.rounds
    data = make_data(args.data, num_images)
    places = find_inputs([str(data.folder)]).places[:num_images]
    device = torch.device(args.device)

    for title, model in MODELS.items():
        trained = create_trained(dict(model), device)
        # Use fewer images for models that are a thousand times slower than the loader.
        chosen = places if device.type == "cuda" or model["image_size"] == 32 else places[:160]
        batch_size = 32 if device.type == "cpu" else 256
        contestants = {
            LOADER: partial(load_only, trained, chosen, batch_size, args.workers),
            MODEL: partial(compute_only, trained, len(chosen), batch_size),
            PREDICT: partial(predict_all, trained, chosen, batch_size, args.workers),
        }
        for result in measured(title, contestants, len(chosen), rounds):
            show(result["title"], rows_of(result))


if __name__ == "__main__":
    main()
