"""The loss against torch's own cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from vit.loss import cross_entropy


def soft_targets(num_rows: int, num_classes: int) -> torch.Tensor:
    """Two classes a row, as MixUp leaves them."""
    labels = torch.randint(num_classes, (2, num_rows))
    share = torch.rand(num_rows, 1)
    return share * F.one_hot(labels[0], num_classes) + (1 - share) * F.one_hot(
        labels[1], num_classes
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_torchs_with_soft_targets(label_smoothing, dtype):
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
def test_hard_targets_are_one_hot_soft_ones(label_smoothing):
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
