"""The section `loss` of the config (`vit.loss`)."""

from __future__ import annotations

from vit.config.base import Rate, Section


class LossConfig(Section):
    """Cross-entropy with soft targets."""

    label_smoothing: Rate = 0.0
    """Fraction of the target spread evenly over all classes."""
