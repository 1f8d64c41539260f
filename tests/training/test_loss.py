"""Compare our losses with those of torch and timm."""

import numpy as np
import pytest
import timm.loss
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from sklearn.utils.class_weight import compute_class_weight
from timm.data.mixup import mixup_target

from vit.config.schema import Config, LossConfig
from vit.data.order import Share
from vit.data.shards.split import Split
from vit.data.shards.tar import INDEX_DTYPE
from vit.data.sources import TrainSet
from vit.training.loss import (
    binary_cross_entropy,
    choose_class_weights,
    create_loss,
    cross_entropy,
    describe_class_weights,
)


def soft_targets(num_rows: int, num_classes: int) -> torch.Tensor:
    labels = torch.randint(num_classes, (2, num_rows))
    share = torch.rand(num_rows, 1)
    return share * F.one_hot(labels[0], num_classes) + (1 - share) * F.one_hot(
        labels[1], num_classes
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_equal_torch_with_soft_targets(label_smoothing, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(7, 11) * 5).to(dtype)
    targets = soft_targets(7, 11)
    ours, theirs = logits.clone().requires_grad_(), logits.float().requires_grad_()
    loss = cross_entropy(ours, targets, label_smoothing)
    expected = F.cross_entropy(theirs, targets, reduction="none", label_smoothing=label_smoothing)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad.to(dtype))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_hard_targets_equal_one_hot_soft_targets(label_smoothing):
    torch.manual_seed(0)
    logits = torch.randn(6, 5)
    labels = torch.randint(5, (6,))
    expected = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    torch.testing.assert_close(
        cross_entropy(logits, F.one_hot(labels, 5).float(), label_smoothing), expected
    )


def test_first_loss_of_a_zero_head_is_the_entropy_of_a_guess():
    targets = F.one_hot(torch.arange(4), 1000).float()
    torch.testing.assert_close(
        cross_entropy(torch.zeros(4, 1000), targets, 0.1), torch.full((4,), 1000.0).log()
    )


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    torch.testing.assert_close(
        cross_entropy(logits, torch.tensor([[0.0, 1.0, 0.0]])), torch.tensor([2e4])
    )


def test_classes_are_weighted_as_in_torch():
    torch.manual_seed(0)
    logits = torch.randn(7, 4)
    targets = soft_targets(7, 4)
    weights = (0.5, 2.0, 0.0, 1.0)
    for fields in ({}, {"label_smoothing": 0.2}):
        loss = create_loss(LossConfig(**fields), weights, logits.device)
        expected = F.cross_entropy(
            logits, targets, torch.tensor(weights), reduction="none", **fields
        )
        torch.testing.assert_close(loss(logits, targets), expected)
    binary = create_loss(LossConfig(name="bce"), weights, logits.device)
    expected = F.binary_cross_entropy_with_logits(logits, targets, torch.tensor(weights))
    torch.testing.assert_close(binary(logits, targets).mean(), expected)


def train_set_of_labels(labels: np.ndarray, num_draws: int, *shares: Share) -> TrainSet:
    index = np.zeros(len(labels), INDEX_DTYPE)
    index["label"] = labels
    split = Split("nowhere", "train", ["train-0.tar"], [len(labels)], index, 6, [*"abcdef"])
    return TrainSet(split, num_draws, shares)


def test_balanced_weights_equal_scikit_learn_for_the_drawn_images():
    labels = np.random.default_rng(0).choice(6, 300, p=[0.3, 0.25, 0.2, 0.1, 0.1, 0.05])
    chosen = np.flatnonzero(np.arange(300) % 3)
    balanced = LossConfig(class_weights="balanced")
    for numbers, shares in (
        (np.arange(300), ()),
        (chosen, (Share(len(chosen), len(chosen), 0, chosen),)),
    ):
        train_set = train_set_of_labels(labels, len(numbers), *shares)
        ours = choose_class_weights(balanced, train_set, 6)
        theirs = compute_class_weight("balanced", classes=np.arange(6), y=labels[numbers])
        assert ours == pytest.approx(theirs)
    # The first 200 samples come from a source with 400 samples per epoch. The remaining samples
    # come from a source with 50 samples per epoch.
    shares = (Share(400, 200, 0), Share(50, 50, 200, np.arange(50)))
    drawn = np.concatenate([labels[:200], labels[:200], labels[200:250]])
    ours = choose_class_weights(balanced, train_set_of_labels(labels, 450, *shares), 6)
    theirs = compute_class_weight("balanced", classes=np.arange(6), y=drawn)
    assert ours == pytest.approx(theirs)
    [line] = describe_class_weights(ours, [*"abcdef"])
    least, most = np.argmin(theirs), np.argmax(theirs)
    assert line == (
        f"class weights: {theirs[least]:.3g} ('{'abcdef'[least]}') to {theirs[most]:.3g}"
        f" ('{'abcdef'[most]}')"
    )


def test_reports_class_weights_that_fit_no_classes_in_one_line():
    train_set = train_set_of_labels(np.array([0, 0, 2]), 3)
    with pytest.raises(ValueError, match=r"has 2 numbers, but the model has 3 classes: give one"):
        choose_class_weights(LossConfig(class_weights=(1.0, 2.0)), train_set, 3)
    with pytest.raises(ValueError, match=r"1 of 3 classes have no training images \('b'\): give"):
        choose_class_weights(LossConfig(class_weights="balanced"), train_set, 3)
    assert choose_class_weights(LossConfig(), train_set, 3) is None
    stream = {"urls": "pipe:cat a.tar", "num_samples": 9}
    with pytest.raises(ValidationError, match=r"=balanced needs .* which is unknown for a stream"):
        Config(
            data={"root": "a"},
            stream=stream,
            loss={"class_weights": "balanced"},
            train={"steps": 1},
        )


@pytest.mark.parametrize("sum_classes", [False, True])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_of_labels_equals_timm(smoothing, threshold, sum_classes):
    torch.manual_seed(0)
    logits = torch.randn(6, 9).requires_grad_()
    other = logits.detach().clone().requires_grad_()
    labels = torch.randint(9, (6,))
    theirs = timm.loss.BinaryCrossEntropy(smoothing, threshold, sum_classes=sum_classes)
    ours = binary_cross_entropy(
        logits, F.one_hot(labels, 9).float(), smoothing, threshold, sum_classes
    ).mean()
    torch.testing.assert_close(ours, theirs(other, labels))
    ours.backward()
    theirs(other, labels).backward()
    torch.testing.assert_close(logits.grad, other.grad)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_of_mixed_targets_equals_timm(smoothing):
    """timm smooths the targets during mixing. Its loss does not change these targets."""
    torch.manual_seed(0)
    logits = torch.randn(6, 9)
    labels = torch.randint(9, (6,))
    hot = F.one_hot(labels, 9).float()
    mixed = 0.3 * hot + 0.7 * hot.flip(0)
    theirs = mixup_target(labels, 9, 0.3, smoothing)
    for threshold in (None, 0.2):
        expected = timm.loss.BinaryCrossEntropy(target_threshold=threshold)(logits, theirs)
        ours = binary_cross_entropy(logits, mixed, smoothing, threshold).mean()
        torch.testing.assert_close(ours, expected)


def test_deit_iii_gives_each_class_of_a_mixture_full_weight():
    """DeiT's engine.py computes `targets.gt(0.0)` and then applies torch's BCEWithLogitsLoss."""
    torch.manual_seed(0)
    logits = torch.randn(6, 9)
    targets = soft_targets(6, 9)
    loss = create_loss(LossConfig(name="bce", bce_target_thresh=0.0), None, logits.device)
    expected = torch.nn.BCEWithLogitsLoss()(logits, targets.gt(0.0).type(targets.dtype))
    torch.testing.assert_close(loss(logits, targets).mean(), expected)


def test_the_sum_over_classes_equals_the_sigmoid_loss_of_big_vision():
    """In big_vision/utils.py, sigmoid_xent is -sum(labels log p + (1 - labels) log(1 - p))."""
    torch.manual_seed(0)
    logits = torch.randn(6, 9, dtype=torch.float64)
    targets = soft_targets(6, 9).double()
    loss = create_loss(LossConfig(name="bce", bce_sum=True), None, logits.device)(logits, targets)
    p = logits.sigmoid()
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(-1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_a_loss_in_fp32(dtype):
    loss = binary_cross_entropy(torch.zeros(3, 4, dtype=dtype), torch.zeros(3, 4))
    torch.testing.assert_close(loss, torch.full((3,), 2.0).log())
