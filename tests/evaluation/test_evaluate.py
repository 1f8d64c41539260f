"""Test that an evaluation on any number of ranks returns the same counts as a plain loop over the
images."""

from __future__ import annotations

import json
import multiprocessing
from contextlib import closing

import numpy as np
import pytest
import torch
from processes import run, train, write_config

from vit.config.io import from_dict
from vit.data.augment.apply import create_augment
from vit.data.decode.crops import decode_center
from vit.data.eval_sets import EvalSet
from vit.data.image_format import ImageFormat
from vit.data.storage.opening import open_split
from vit.distributed.process_group import World
from vit.evaluation.evaluate import Evaluator
from vit.model import create_model
from vit.weights.files import load_weights, read_weights


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory, shards):
    folder = tmp_path_factory.mktemp("evaluated")
    train(write_config(folder, shards), folder / "run", "ema.decay=null")
    return folder / "run"


def evaluate(run_dir, *arguments, ranks=0) -> dict:
    done = run("launch/eval.py", "--checkpoint", run_dir, "--json", *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_results_are_equal_on_1_2_and_3_ranks_and_with_other_batches(trained_run):
    reference = evaluate(trained_run)
    assert reference["num_images"] == 23
    for ranks in (1, 2, 3):
        assert evaluate(trained_run, ranks=ranks) == reference
    other = evaluate(trained_run, "--batch-size", 5, "--num-workers", 2, ranks=2)
    assert {k: other[k] for k in ("num_images", "correct_top1", "correct_top5")} == {
        k: reference[k] for k in ("num_images", "correct_top1", "correct_top5")
    }
    assert other["loss"] == pytest.approx(reference["loss"], abs=1e-5)


def test_evaluation_equals_a_plain_loop_over_the_images(trained_run, shards):
    trained = read_weights(trained_run)
    config = from_dict(trained.config, "test")
    model = create_model(config.model, num_classes=trained.num_classes).eval()
    load_weights(model, trained.weights)
    split = open_split(shards, "val")
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (config.data.mean, config.data.std))
    predicted = []
    probabilities = []
    loss = 0.0
    with torch.no_grad():
        for i in range(split.num_samples):
            image = decode_center(split.read(i), (16, 16), config.eval, "bilinear")
            logits = model(((image / 255 - mean) / std)[None])
            predicted.append(int(logits.argmax()))
            probabilities.append(float(logits.softmax(1).max()))
            loss += torch.nn.functional.cross_entropy(
                logits, torch.tensor([int(split.index["label"][i])])
            ).item()
    result = evaluate(trained_run)
    labels = split.index["label"]
    right = int((np.array(predicted) == labels).sum())
    assert (result["correct_top1"], result["top1"]) == (right, pytest.approx(100 * right / 23))
    assert result["loss"] == pytest.approx(loss / 23, rel=1e-4)
    assert result["correct_top5"] == 23, (
        "with three classes, each image must be correct in the top 5"
    )
    saved = np.load(trained_run / "predictions.npz")
    assert (saved["predictions"].tolist(), saved["labels"].tolist(), int(saved["step"])) == (
        predicted,
        labels.tolist(),
        12,
    )
    np.testing.assert_allclose(saved["probabilities"], probabilities, rtol=1e-4)


@pytest.mark.slow
def test_predictions_come_from_all_ranks_in_the_order_of_the_split(tmp_path, shards):
    train(write_config(tmp_path, shards), tmp_path / "run", "ema.decay=null", ranks=3)
    saved = np.load(tmp_path / "run" / "predictions.npz")
    assert saved["labels"].tolist() == open_split(shards, "val").index["label"].tolist()
    assert (
        int((saved["predictions"] == saved["labels"]).sum())
        == evaluate(tmp_path / "run")["correct_top1"]
    )
    assert not (tmp_path / "run" / ".predictions.npz").exists()


def test_the_record_and_the_command_agree(trained_run):
    from processes import metrics

    last = metrics(trained_run, "eval")[-1]
    result = evaluate(trained_run)
    assert result.keys() - last.keys() == {"top1_low", "top1_high"}, (
        "the record must omit only these values, which follow from the counts"
    )
    assert {key: last[key] for key in result.keys() & last.keys()} == {
        key: result[key] for key in result.keys() & last.keys()
    }


def test_another_resolution_interpolates_positions_without_training(trained_run):
    done = run("launch/eval.py", "--checkpoint", trained_run, "--image-size", 32, 24)
    assert done.returncode == 0, done.stderr
    assert "23 images at 32x24" in done.stdout
    assert "positions resampled from 2x2 to 4x3" in done.stdout


def test_accepts_a_checkpoint_folder_and_a_weights_file(trained_run):
    reference = evaluate(trained_run)
    assert evaluate(trained_run / "checkpoints" / "step_00000012") == reference
    assert evaluate(trained_run / "weights" / "last.safetensors") == reference


def test_uses_and_names_the_newest_run_without_a_checkpoint(trained_run, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(trained_run)
    done = run("launch/eval.py", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "using the newest run, runs/mine" in done.stderr
    assert json.loads(done.stdout) == evaluate(trained_run)


def test_one_worker_pool_serves_all_evaluations_even_after_an_interruption(shards):
    values = {"data": {"root": str(shards)}, "train": {"steps": 1}, "eval": {"batch_size": 4}}
    config = from_dict(values | {"model": {"name": "vit_ti8", "image_size": 16}}, "test")
    model = create_model(config.model, num_classes=3)
    world = World(0, 1, torch.device("cpu"))

    def evaluator(num_workers: int) -> Evaluator:
        return Evaluator(
            (EvalSet("val", open_split(shards, "val")),),
            ImageFormat.from_config(config.model, config.data),
            create_augment(config.augment, config.data, 3, world.device),
            world,
            config.eval,
            num_workers=num_workers,
        )

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    expected = evaluator(0).evaluate({"model": model})["val"]["model"]
    with closing(evaluator(2)) as ours:
        assert ours.took is None
        results = [ours.evaluate({"model": model})["val"]["model"]]
        crew = {process.pid for process in multiprocessing.active_children()}
        assert len(crew) == 2
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                ours.evaluate({"model": model}, interrupt)
            results.append(ours.evaluate({"model": model})["val"]["model"])
        assert {process.pid for process in multiprocessing.active_children()} == crew
        assert ours.took is not None
        assert 0 <= ours.took.data_wait_s <= ours.took.seconds
    assert not multiprocessing.active_children()
    for result in results:
        assert result.accuracy == expected.accuracy
        assert torch.equal(result.predictions, expected.predictions)


def test_models_return_to_training_mode_even_after_an_interruption(shards):
    values = {"data": {"root": str(shards)}, "train": {"steps": 1}}
    config = from_dict(values | {"model": {"name": "vit_ti8", "image_size": 16}}, "test")
    model = create_model(config.model, num_classes=3).train()
    world = World(0, 1, torch.device("cpu"))
    evaluator = Evaluator(
        (EvalSet("val", open_split(shards, "val")),),
        ImageFormat.from_config(config.model, config.data),
        create_augment(config.augment, config.data, 3, world.device),
        world,
        config.eval,
    )

    def interrupt(done: int, total: int) -> None:
        assert not model.training
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluator.evaluate({"model": model}, interrupt)
    assert all(module.training for module in model.modules())
    evaluator.evaluate({"model": model})
    assert all(module.training for module in model.modules())
