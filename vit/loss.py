"""Soft-target cross-entropy.

Logits come from the model, soft targets from `vit.data.augment.apply` (one-hot rows, mixed by MixUp
and CutMix). Label smoothing is added here; the step weights and sums the loss of each row.
"""

from __future__ import annotations

from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy (B,) of `logits` (B, classes) with soft `targets` (B, classes), in fp32.

    Smoothing as in Szegedy et al. 2016, section 7: the fraction `label_smoothing` of each target
    is spread over all classes.
    """
    # In fp32 also under autocast: bf16 cannot tell losses apart that differ by less than 0.4 %.
    log_probabilities = logits.float().log_softmax(-1)
    loss = -(targets * log_probabilities).sum(-1)
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * log_probabilities.mean(-1)
    return loss
