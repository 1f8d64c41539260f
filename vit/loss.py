"""Soft-target cross-entropy.

The data's story: logits come from the model, soft targets from `vit.data.augment.apply` (one-hot
rows, mixed by MixUp and CutMix); label smoothing is laid over them here; one loss for each row goes
to the step, which weights and sums them.
"""

from __future__ import annotations

from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy (B,) of `logits` (B, classes) with soft `targets` (B, classes), in fp32.

    Smoothing as in Szegedy et al. 2016, equation 8: the share `label_smoothing` of each target is
    spread over all classes.
    """
    log_probabilities = logits.float().log_softmax(-1)
    loss = -(targets * log_probabilities).sum(-1)
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * log_probabilities.mean(-1)
    return loss
