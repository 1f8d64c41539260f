"""The second head of DeiT's distilled ViT (Touvron et al. 2021, arXiv 2012.12877, section 4).

A second learned token stands behind the class token, and a head of its own reads it. In training
with a teacher that head learns what the teacher says, the first one the labels; later both count.
"""

from __future__ import annotations

from torch import Tensor


def of_two_heads(
    of_labels: Tensor, of_teacher: Tensor, apart: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the mean of both heads' logits, (B, classes) each, or both, if they learn `apart`."""
    return (of_labels, of_teacher) if apart else (of_labels + of_teacher) / 2
