"""Compute exact top-1, top-5, loss and calibration error over a data set, with confidence
intervals.

Counts are integers on the device, and losses are summed in fixed point, so the sums do not depend
on the order of batches or the number of ranks. The ranks' sums are added only once, at the end.
"""

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from vit.distributed.process_group import World
from vit.training.loss import cross_entropy

LOSS_UNIT = 2.0**-24
"""The resolution at which losses are summed. A sum over 2**27 samples with losses up to 2**10 then
stays below 2**61."""
FEW_IMAGES = 5000
"""Accuracies on fewer images than this are shown with their confidence interval, which is then
wider than about one point."""
TOP5_CLASSES = 6
"""The smallest number of classes for which top-5 can be below 100 %."""
ECE_BINS = 15
"""The number of confidence bins, as in Guo et al. 2017."""
_Z95 = 1.959964


def correct_in_top_k(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return whether each label (B,) is among the k largest logits (B, classes): (B,) bool.

    Ties favor the lower class number, so that a zero-initialized head is right only by chance. A
    row that contains NaN counts as wrong.
    """
    own = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    ahead = (logits > own) | ((logits == own) & earlier)
    return (ahead.sum(1) < k) & ~logits.isnan().any(1)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the margin of each row: the logit of its label minus the largest other logit, (B,).

    A negative margin means a wrong prediction. The mean margin over epochs is the AUM of Pleiss et
    al. 2020, equation 2. If there is only one class, the margin is infinite.
    """
    own = labels[:, None]
    other_logits = logits.scatter(1, own, -math.inf)
    return logits.gather(1, own).squeeze(1) - other_logits.amax(1)


def predicted_classes(logits: Tensor) -> Tensor:
    """Return the class of the largest logit, (B, classes) -> (B,) int64.

    Ties are resolved as in `correct_in_top_k`. A row that contains NaN gives -1.
    """
    # argmax returns the first of several equal logits.
    return torch.where(logits.isnan().any(1), -1, logits.argmax(1))


def interval95(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of the accuracy `correct` / `total`, in percent.

    Uses Wilson's interval (1927), which is valid even if `correct` is 0 or `total`.
    """
    n = max(total, 1)
    share = correct / n
    unsure = _Z95**2 / n
    middle = (share + unsure / 2) / (1 + unsure)
    half = _Z95 * math.sqrt(share * (1 - share) / n + unsure / (4 * n)) / (1 + unsure)
    return 100.0 * max(middle - half, 0.0), 100.0 * min(middle + half, 1.0)


def format_interval(correct: int, total: int) -> str:
    """Return `interval95` as text, or "" for 0 images and for `FEW_IMAGES` or more."""
    low, high = interval95(correct, total)
    return f"95 % interval {low:.1f} to {high:.1f}" if 0 < total < FEW_IMAGES else ""


def format_top5(percent: float, correct: int, num_classes: int) -> str:
    """Return text such as `, top-5 99.94 % (1794)`, or "" if top-5 is always 100 %."""
    return f", top-5 {percent:.2f} % ({correct})" if num_classes >= TOP5_CLASSES else ""


@dataclass(frozen=True)
class Accuracy:
    """The result of an exact evaluation.

    `top1` and `top5` are in percent. `loss` is the mean cross-entropy, or NaN if a logit was not
    finite. If an image has several accepted classes, their probabilities are summed. `ece` is the
    expected calibration error (Guo et al. 2017, equation 3) in points, which is the mean gap
    between the confidence and the accuracy of predictions over `ECE_BINS` bins of equal width. If
    `loss` is NaN, `ece` is NaN too.
    """

    num_images: int
    correct_top1: int
    correct_top5: int
    top1: float
    top5: float
    loss: float
    ece: float
    num_classes: int
    """The number of classes that the model chooses from; 0 without images."""

    def __str__(self) -> str:
        interval = format_interval(self.correct_top1, self.num_images)
        right = str(self.correct_top1)
        if interval:
            right += f" of {self.num_images}; {interval}"
        return (
            f"top-1 {self.top1:.2f} % ({right})"
            f"{format_top5(self.top5, self.correct_top5, self.num_classes)}, loss {self.loss:.4f}"
        )

    def to_dict(self) -> dict[str, float]:
        """Return all numbers except `num_classes`, keyed by name."""
        numbers = asdict(self)
        del numbers["num_classes"]
        return numbers


class AccuracyCounter:
    """Counts the correct predictions in batches on the device. `result` sums the counts over the
    ranks."""

    def __init__(self, device: torch.device):
        # images, top-1, top-5, loss, rows whose loss is not finite
        self.sums = torch.zeros(5, dtype=torch.int64, device=device)
        # per confidence bin: images, correct predictions, sum of confidences
        self.bins = torch.zeros(3, ECE_BINS, dtype=torch.int64, device=device)
        self.num_classes = 0

    def add(
        self, logits: Tensor, labels: Tensor, weights: Tensor, accepted: Tensor | None = None
    ) -> None:
        """Add a batch.

        Args:
            logits: (B, classes).
            labels: (B,) int64.
            weights: (B,). Rows of weight 0, which pad the last batch, are ignored.
            accepted: (B, n) int64, all accepted classes of each row, padded with -1. These classes
                replace `labels`.
        """
        logits = logits.float()
        self.num_classes = logits.shape[1]
        valid = weights > 0
        columns = [labels] if accepted is None else list(accepted.unbind(1))
        numbers = torch.arange(logits.shape[1], device=logits.device)
        is_right = torch.zeros_like(logits, dtype=torch.bool)
        top1 = torch.zeros_like(valid)
        top5 = torch.zeros_like(valid)
        for column in columns:
            is_class = column >= 0
            classes = column.clamp(min=0)
            is_right |= column[:, None] == numbers
            top1 |= correct_in_top_k(logits, classes, 1) & is_class
            top5 |= correct_in_top_k(logits, classes, 5) & is_class

        if accepted is None:
            loss = cross_entropy(logits, is_right.float())
        else:
            accepted_logits = logits.masked_fill(~is_right, -math.inf)
            loss = logits.logsumexp(1) - accepted_logits.logsumexp(1)

        finite = loss.isfinite()
        counts = (valid, top1, top5, _fixed_point(loss, finite), ~finite)
        self.sums += torch.stack([(row.long() * valid).sum() for row in counts])
        self._add_to_bins(logits, top1, valid)

    def _add_to_bins(self, logits: Tensor, top1: Tensor, valid: Tensor) -> None:
        """Count each row in the bin of its confidence, which is the probability of its prediction.

        Args:
            logits: (B, classes) float32.
            top1: (B,) bool, whether the prediction is correct.
            valid: (B,) bool, whether the row counts.
        """
        confidence = (logits.amax(1) - logits.logsumexp(1)).exp()
        has_confidence = confidence.isfinite()
        # The bins are (0, 1/15], (1/15, 2/15], ...
        number = confidence.nan_to_num().double().mul(ECE_BINS).ceil().long().clamp(1, ECE_BINS)
        in_bin = number[:, None] == torch.arange(1, ECE_BINS + 1, device=logits.device)
        counted = in_bin.long() * (valid & has_confidence)[:, None]
        parts = (torch.ones_like(number), top1.long(), _fixed_point(confidence, has_confidence))
        # Adding by index could wait for the device or change the order of summation, so compare and
        # sum instead.
        self.bins += torch.stack([(counted * part[:, None]).sum(0) for part in parts])

    def result(self, world: World) -> Accuracy:
        """Return the totals over all ranks. Waits for the device."""
        images, top1, top5, loss, not_finite, *bins = world.sum_(
            torch.cat([self.sums, self.bins.flatten()])
        ).tolist()
        share = 100.0 / max(images, 1)
        mean = float("nan") if not_finite else loss * LOSS_UNIT / max(images, 1)

        # A bin's gap is the difference between its number of correct predictions and its sum of
        # confidences.
        right, confidences = bins[ECE_BINS : 2 * ECE_BINS], bins[2 * ECE_BINS :]
        gaps = [abs(r - c * LOSS_UNIT) for r, c in zip(right, confidences, strict=True)]
        ece = float("nan") if not_finite else sum(gaps) * share

        return Accuracy(
            num_images=images,
            correct_top1=top1,
            correct_top5=top5,
            top1=top1 * share,
            top5=top5 * share,
            loss=mean,
            ece=ece,
            num_classes=self.num_classes,
        )


def _fixed_point(values: Tensor, is_valid: Tensor) -> Tensor:
    """Return (B,) floats as int64 multiples of `LOSS_UNIT`; invalid values become 0."""
    return torch.where(is_valid, values, 0.0).double().div(LOSS_UNIT).round().long()


@dataclass(frozen=True)
class PairedDifference:
    """The top-1 difference between two models on the same images, in points, with a 95 %
    interval."""

    num_images: int
    only_first: int
    """The number of images that only the first model classifies correctly."""
    only_second: int
    points: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{self.points:+z.2f} points (95 % interval {self.low:+z.2f} to {self.high:+z.2f}):"
            f" {self.only_second} images fixed, {self.only_first} broken"
        )


def paired_difference(first: Tensor, second: Tensor) -> PairedDifference:
    """Compare two models on the same images. first, second: (N,) bool, whether the model's
    prediction is correct.

    Images on which both models are right, or both wrong, carry no information about the difference,
    so the interval is much narrower than the intervals of two separate accuracies. The method is
    the Wald interval for paired proportions after adding half an image to each of the four cases
    (Agresti & Min 2005, Statistics in Medicine 24, 729-740), which keeps its coverage even for few
    differences.
    """
    count = len(first)
    only_first = int((first & ~second).sum())
    only_second = int((second & ~first).sum())

    n = count + 2.0
    b = only_second + 0.5
    c = only_first + 0.5
    half = _Z95 * math.sqrt(b + c - (b - c) ** 2 / n) / n
    middle = (b - c) / n

    return PairedDifference(
        num_images=count,
        only_first=only_first,
        only_second=only_second,
        points=100.0 * (only_second - only_first) / max(count, 1),
        low=100.0 * (middle - half),
        high=100.0 * (middle + half),
    )
