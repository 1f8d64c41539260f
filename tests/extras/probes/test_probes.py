"""Compare k-NN and the linear probe with scikit-learn, on any number of ranks and through the
command line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from processes import TINY, run, run_here, write_config
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from vit.data.storage.opening import open_split
from vit.distributed.process_group import World
from vit.evaluation.features import extract_features
from vit.extras.probes import knn, linear_probe
from vit.inference.predictor import load
from vit.system.files import WeightsError

WORLD = World(0, 1, torch.device("cpu"))
WORDS = ["--knn", "--k", "3,20", "--linear-probe", "--l2", "0.01", "--device", "cpu", "--json"]


def blobs(num: int, dim: int, num_classes: int, seed: int, spread: float = 1.5):
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(7).normal(size=(num_classes, dim))
    labels = rng.integers(num_classes, size=num)
    return centers[labels] + spread * rng.normal(size=(num, dim)), labels


@pytest.mark.parametrize("block", [knn.NEIGHBORS, 100])
def test_neighbors_vote_as_in_scikit_learn(block, monkeypatch):
    monkeypatch.setattr(knn, "NEIGHBORS", block)
    features, labels = blobs(430, 16, 8, seed=0)
    queries, own = blobs(300, 16, 8, seed=1)
    ks = (1, 20, 150)
    train = (torch.from_numpy(features), torch.from_numpy(labels))
    queries_and_labels = (torch.from_numpy(queries), torch.from_numpy(own))
    for voted in knn.classify(*train, *queries_and_labels, ks, 8, WORLD):
        theirs = KNeighborsClassifier(
            voted.k,
            metric="cosine",
            algorithm="brute",
            weights=lambda distance: np.exp(-distance / 0.07),
        ).fit(features, labels)
        probabilities = theirs.predict_proba(queries)
        assert (voted.predictions.numpy() == probabilities.argmax(1)).all()
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, :5]
        is_in = (best == own[:, None]).any(1) & (probabilities[range(300), own] > 0)
        assert (voted.in_top5.numpy() == is_in).all()


def test_the_nearest_neighbors_are_found_among_all_pairs():
    features = torch.randn(97, 5, generator=torch.Generator().manual_seed(0))
    similarity, places = knn.nearest(features[:9], features, 4)
    unit = (features / features.norm(dim=1, keepdim=True)).double()
    expected, order = (unit[:9] @ unit.T).sort(1, descending=True)
    assert (places == order[:, :4]).all()
    assert (places[:, 0] == torch.arange(9)).all()
    assert torch.allclose(similarity.double(), expected[:, :4], atol=1e-6)


def theirs(features: np.ndarray, labels: np.ndarray, l2: float) -> LogisticRegression:
    """Train scikit-learn's classifier. scikit-learn sums the loss over N images instead of
    averaging it, so C = 1 / (l2 N)."""
    return LogisticRegression(C=1 / (l2 * len(labels)), tol=1e-8, max_iter=5000).fit(
        features, labels
    )


@pytest.mark.parametrize("l2", [1e-1, 1e-3])
def test_the_linear_probe_has_the_same_optimum_as_scikit_learn(l2, monkeypatch):
    monkeypatch.setattr(linear_probe, "ROWS", 64)
    features, labels = blobs(333, 10, 4, seed=0)
    features[:, 3] = 2.5
    features = 4 + 3 * features
    inputs = torch.from_numpy(features)
    probe, scale = linear_probe.fit_probe(inputs, torch.from_numpy(labels), 4, WORLD, l2)
    assert probe.is_optimal
    deviation = features.std(0)
    standard = (features - features.mean(0)) / np.where(deviation < 1e-9, np.inf, deviation)
    expected = theirs(standard, labels, l2)
    # The norm of the final gradient is at most 1e-5, and the curvature of the loss is at least l2.
    assert np.abs(probe.weight.numpy() - expected.coef_).max() < 3e-5 / l2
    ours = linear_probe.logits_of(probe, scale, inputs).softmax(1).numpy()
    assert np.abs(ours - expected.predict_proba(standard)).max() < 1e-3
    assert (probe.weight[:, 3] == 0).all()


def test_chooses_the_penalty_that_is_best_on_held_out_images():
    features, labels = blobs(240, 40, 3, seed=0, spread=4)
    tensors = (torch.from_numpy(features), torch.from_numpy(labels))
    probe, _ = linear_probe.fit_probe(*tensors, 3, WORLD)
    held = np.arange(240) % 10 == 9
    standard = (features - features.mean(0)) / features.std(0)
    right = {
        l2: theirs(standard[~held], labels[~held], l2).score(standard[held], labels[held])
        for l2 in (1e-1, 1e-2, 1e-3, 1e-4)
    }
    assert right[probe.l2] == max(right.values())
    assert min(right.values()) < max(right.values())


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    folder = tmp_path_factory.mktemp("base")
    config = write_config(folder, shards, steps=3)
    run_here("launch/train.py", "--config", config, *TINY, f"run.dir={folder / 'run'}")
    return folder / "run"


def test_features_are_the_inputs_of_the_head(base, shards):
    trained = load(base)
    split = open_split(shards, "val")
    augment = trained.preprocess.augment
    features_of_images = extract_features(
        trained.model, split, trained.config, augment, WORLD, wanted_by="--knn"
    )
    pixels = [
        trained.preprocess.pixels(split.read(sample)) for sample in range(len(features_of_images))
    ]
    tokens = trained.model.forward_features(trained.preprocess.normalize(torch.stack(pixels)))
    expected = trained.model.fc_norm(tokens[:, 0])
    # Features are stored in fp16, which has an 11-bit significand.
    assert torch.allclose(features_of_images.float(), expected, rtol=2**-11, atol=1e-6)
    logits = trained.model.head(expected)
    assert torch.allclose(logits, trained(trained.preprocess.normalize(torch.stack(pixels))))


def test_the_command_compares_checkpoints_by_their_features(base, capfd):
    capfd.readouterr()
    best = base / "weights" / "last.safetensors"
    run_here("launch/eval.py", base, best, *WORDS, "--batch-size", 5)
    printed = capfd.readouterr()
    first, second = json.loads(printed.out)["checkpoints"]
    assert list(first["probes"]) == ["knn 3", "knn 20", "linear probe"]
    assert first["probes"] != second["probes"]
    for probe in first["probes"].values():
        assert (probe["num_images"], probe["num_train"]) == (23, 60)
        assert probe["top1_low"] < probe["top1"] <= probe["top1_high"]
    [difference] = json.loads(printed.out)["difference"]
    for name, probe in difference.items():
        if name != "val":
            gained = second["probes"][name]["correct_top1"] - first["probes"][name]["correct_top1"]
            assert probe["only_second"] - probe["only_first"] == gained, name
    assert "features: 83 x 32 in fp16" in printed.err
    rows = [line.split() for line in printed.err.splitlines() if line.startswith("knn 3 ")]
    assert rows[0][-2:] == ["-", "-"]


@pytest.mark.full
def test_two_ranks_have_the_results_of_one(base, capfd):
    capfd.readouterr()
    arguments = [base, *WORDS, "--batch-size", "5"]
    run_here("launch/eval.py", *arguments)
    alone = json.loads(capfd.readouterr().out)["probes"]
    done = run("launch/eval.py", *arguments, ranks=2)
    assert json.loads(done.stdout)["probes"] == alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--l2", "0.1"], "--l2 0.1 requires --linear-probe"),
        (["--knn", "--k", "0"], "--k 0: expected distinct positive numbers"),
        (["--knn", "--k", "5,5"], "--k 5,5: expected distinct positive numbers"),
        (["--linear-probe", "--l2", "-1"], "--l2 -1: expected a number above 0"),
        (["--knn", "--finetune", "demo"], "--knn: run eval.py on the fine-tuned run instead"),
    ],
)
def test_reports_impossible_arguments_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        run_here("launch/eval.py", "--checkpoint", "runs/none", *arguments)
    assert "\n" not in str(caught.value)


def test_reports_data_without_a_training_split(base, shards, tmp_path):
    alone = shutil.copytree(shards, tmp_path / "alone")
    info = json.loads((alone / "_info.json").read_text())
    del info["splits"]["train"]
    (alone / "_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match="no split 'train', only val"):
        run_here("launch/eval.py", base, "--linear-probe", "--device", "cpu", "--data", alone)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """Return a folder with a backbone without a head, and timm's model of the same folder."""
    folder = tmp_path_factory.mktemp("backbone")
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **arguments)
    saved = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 0,
        "model_args": arguments,
        "pretrained_cfg": {"input_size": [3, 32, 32], "num_classes": 0, "crop_pct": 1.0},
    }
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(saved))
    return folder, timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def test_features_of_a_backbone_without_a_head_equal_timms(backbone, shards):
    folder, theirs_ = backbone
    trained = load(folder)
    inputs = torch.rand(5, 3, 32, 32)
    expected = theirs_(inputs).detach()
    assert torch.equal(trained(inputs), expected)
    assert torch.equal(trained.model.forward_features(inputs), theirs_.forward_features(inputs))
    split = open_split(shards, "val")
    features = extract_features(
        trained.model, split, trained.config, trained.preprocess.augment, WORLD, wanted_by="--knn"
    )
    images = trained.preprocess(*(split.read(sample) for sample in range(split.num_samples)))
    assert torch.allclose(features.float(), theirs_(images).detach(), rtol=2**-11, atol=1e-6)
    with pytest.raises(WeightsError, match=r"has no head, so it cannot classify: fine-tune it"):
        trained.classify(split.read(0))


def test_a_backbone_without_a_head_is_evaluated_by_probes_alone(backbone, shards, capfd):
    folder, theirs_ = backbone
    trained = load(folder)
    sets = [open_split(shards, name) for name in ("train", "val")]
    train, val = (
        theirs_(trained.preprocess(*(split.read(n) for n in range(split.num_samples)))).detach()
        for split in sets
    )
    labels = [torch.from_numpy(split.index["label"].astype(np.int64)) for split in sets]
    train, val = train.half(), val.half()
    [voted] = knn.classify(train, labels[0], val, labels[1], (20,), 3, WORLD)
    capfd.readouterr()
    run_here("launch/eval.py", folder, "--data", shards, *WORDS)
    printed = capfd.readouterr()
    results = json.loads(printed.out)
    assert "top1" not in results
    assert list(results["probes"]) == ["knn 3", "knn 20", "linear probe"]
    right = int((voted.predictions == labels[1]).sum())
    assert results["probes"]["knn 20"]["correct_top1"] == right
    assert "20-NN over 60 images" in printed.err
    for command in (
        ["launch/eval.py", folder, "--data", shards],
        ["launch/predict.py", "--checkpoint", folder, shards],
        ["launch/export.py", folder, "--to", "onnx"],
    ):
        with pytest.raises(ValueError, match=r"--knn or --linear-probe"):
            run_here(*command)


def test_a_backbone_is_compared_with_a_run_by_their_probes(backbone, base, shards, capfd):
    capfd.readouterr()
    run_here("launch/eval.py", base, backbone[0], *WORDS)
    [difference] = json.loads(capfd.readouterr().out)["difference"]
    assert list(difference) == ["knn 3", "knn 20", "linear probe"]
    run_here("launch/eval.py", backbone[0], base, "--data", shards, *WORDS)
    assert list(json.loads(capfd.readouterr().out)["difference"][0]) == list(difference)
