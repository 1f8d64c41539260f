"""A linear probe: multinomial logistic regression on frozen features, solved to the optimum.

    features -> standardized by the training images -> W, b that minimize
                mean cross-entropy + l2 / 2 |W|^2   -> logits of the validation images

The problem is convex, so the result does not depend on learning rate, epochs, order or seed. CLIP
(arXiv 2103.00020, A.3) and DINOv2 (dinov2/eval/log_regression.py) also fit such a probe. The probes
of big_vision and MAE approximate the optimum by SGD with augmentation. Features are standardized,
as in MAE, so that an `l2` has a similar effect for every model.

Rank 0 runs the optimizer (scipy's L-BFGS-B, which scikit-learn uses). All ranks compute loss and
gradient of their blocks of rows and add these in fixed point, so the result does not depend on the
number of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from vit.distributed.process_group import World
from vit.system.meter import Meter

L2_GRID = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""The penalties to try, from strong to weak. Each fit starts from the previous solution."""
WORSE = 2
"""The search ends after this many consecutive penalties that are worse than the best."""
HELD_OUT = 10
"""Every 10th training image is held out to choose `l2`."""
MAX_ITERATIONS = 1000
"""CLIP's limit. A fit usually ends earlier, at `GRADIENT_TOLERANCE`."""
GRADIENT_TOLERANCE = 1e-5
"""A fit ends when no gradient entry exceeds this value. scikit-learn's default is 1e-4."""
ROWS = 8192
"""The number of rows in a block, equal for any number of ranks, so all products have one shape."""
UNIT = 2.0**-28
"""The resolution of sums. A sum over 2**21 images with losses up to 2**12 then stays below
2**62."""


class Probe(NamedTuple):
    """A fitted probe."""

    weight: Tensor
    """(classes, D) float64 on the CPU, for standardized features."""
    bias: Tensor
    """(classes,) float64 on the CPU."""
    l2: float
    iterations: int
    is_optimal: bool
    """Whether the fit ended before `MAX_ITERATIONS`."""


class Scale(NamedTuple):
    """The mean and factor that standardize features, (D,) float32 each."""

    mean: Tensor
    factor: Tensor

    def apply(self, features: Tensor) -> Tensor:
        """Standardize features: (B, D) of any float dtype -> (B, D) float32."""
        return (features.float() - self.mean) * self.factor


def scale_of(features: Tensor) -> Scale:
    """Return the scale that standardizes `features`, (N, D). Constant features become 0."""
    total = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
    squares = torch.zeros_like(total)
    for rows in features.split(ROWS):
        total += rows.double().sum(0)
    mean = total / len(features)
    for rows in features.split(ROWS):
        squares += (rows.double() - mean).square().sum(0)
    deviation = (squares / len(features)).sqrt()
    # Do not scale the rounding errors of constant features to standard deviation 1.
    is_constant = deviation <= 1e-6 * mean.abs().clamp(min=1e-6)
    factor = torch.where(is_constant, 0.0, 1 / deviation)
    return Scale(mean.float(), factor.float())


class Objective:
    """The loss and gradient over the rows `chosen`, summed over all ranks."""

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        chosen: Tensor,
        scale: Scale,
        num_classes: int,
        world: World,
    ):
        self.world = world
        self.scale = scale
        self.num_classes = num_classes
        self.features = features
        self.labels = labels
        self.blocks = chosen.split(ROWS)
        self.num_rows = len(chosen)
        self.shape = (num_classes, features.shape[1] + 1)

    def at(self, parameters: Tensor, l2: float) -> tuple[float, Tensor]:
        """Return the objective and its gradient, (classes, D + 1) float64 on the CPU.

        parameters: (classes, D + 1) float64 on the CPU; the last column is the bias. All ranks must
        call this.
        """
        device = self.features.device
        weight = parameters[:, :-1].float().to(device)
        bias = parameters[:, -1].float().to(device)
        sums = torch.zeros(1 + parameters.numel(), dtype=torch.int64, device=device)
        for block in self.blocks[self.world.rank :: self.world.size]:
            rows = self.scale.apply(self.features[block])
            labels = self.labels[block, None]
            logs = (rows @ weight.T + bias).log_softmax(1)
            loss = -logs.gather(1, labels).double().sum()
            slopes = logs.exp()
            slopes.scatter_add_(1, labels, torch.full_like(slopes[:, :1], -1.0))
            gradient = torch.cat([slopes.T @ rows, slopes.sum(0)[:, None]], 1)
            flat = torch.cat([loss[None], gradient.double().flatten()])
            sums += flat.div(UNIT).round().long()
        means = self.world.sum_(sums).cpu().double() * (UNIT / self.num_rows)
        gradient = means[1:].view(self.shape)
        gradient[:, :-1] += l2 * parameters[:, :-1]
        return float(means[0] + l2 / 2 * parameters[:, :-1].square().sum()), gradient


def fit(objective: Objective, l2: float, start: Tensor | None = None) -> Probe:
    """Minimize `objective` from `start` (default: zeros). All ranks get the same probe.

    start: (classes, D + 1) float64.
    """
    world = objective.world
    shape = objective.shape
    current = torch.zeros(shape, dtype=torch.float64) if start is None else start.clone()
    # The first entry is 1 if the other entries are parameters to evaluate, and 0 if they are the
    # solution.
    order = torch.zeros(1 + current.numel(), dtype=torch.float64)
    outcome = torch.zeros(2, dtype=torch.float64)
    if world.is_main:
        latest = [0.0]
        meter = Meter(f"linear probe, l2 {l2:g}", MAX_ITERATIONS, "iterations")

        def evaluate(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            order[0] = 1
            order[1:] = torch.from_numpy(values)
            world.broadcast_([order])
            latest[0], gradient = objective.at(order[1:].view(shape), l2)
            return latest[0], gradient.numpy().ravel()

        def count(_: NDArray[np.float64]) -> None:
            outcome[0] += 1
            meter.update(int(outcome[0]), f"objective {latest[0]:.5f}")

        with meter:
            optimum = minimize(
                evaluate,
                current.numpy().ravel(),
                method="L-BFGS-B",
                jac=True,
                callback=count,
                options={
                    "maxiter": MAX_ITERATIONS,
                    "maxfun": 2 * MAX_ITERATIONS,
                    "gtol": GRADIENT_TOLERANCE,
                    "ftol": 0.0,
                },
            )
        # A failed line search also counts as optimal, because it has reached the rounding of the
        # sums.
        outcome[1] = float(optimum.nit < MAX_ITERATIONS and optimum.nfev < 2 * MAX_ITERATIONS)
        order[0] = 0
        order[1:] = torch.from_numpy(optimum.x)
        world.broadcast_([order])
    else:
        world.broadcast_([order])
        while order[0]:
            objective.at(order[1:].view(shape), l2)
            world.broadcast_([order])
    world.broadcast_([outcome])
    solution = order[1:].view(shape)
    return Probe(
        solution[:, :-1].clone(), solution[:, -1].clone(), l2, int(outcome[0]), bool(outcome[1])
    )


def fit_probe(
    features: Tensor, labels: Tensor, num_classes: int, world: World, l2: float | None = None
) -> tuple[Probe, Scale]:
    """Fit a probe to the training `features` (N, D) and `labels` (N,), equal on all ranks.

    l2: None tries `L2_GRID` with every `HELD_OUT`-th image held out, and chooses the value with the
    most correct held-out images, preferring larger values. The final fit uses all images.
    """
    labels = labels.to(features.device)
    scale = scale_of(features)
    everything = torch.arange(len(features), device=features.device)

    def objective_of(chosen: Tensor) -> Objective:
        return Objective(
            features, labels, chosen=chosen, scale=scale, num_classes=num_classes, world=world
        )

    start = None
    if l2 is None:
        is_held = everything % HELD_OUT == HELD_OUT - 1
        training_part = objective_of(everything[~is_held])
        fits: list[tuple[int, float, Tensor]] = []
        for value in L2_GRID:
            # Weaker penalties need more iterations and give worse results, so stop.
            if len(fits) > WORSE and max(fits[-WORSE:])[0] < max(fits)[0]:
                break
            probe = fit(training_part, value, start)
            start = torch.cat([probe.weight, probe.bias[:, None]], 1)
            logits = logits_of(probe, scale, features[is_held])
            # With different kernels, ranks could choose different penalties and wait for each
            # other, so all ranks use rank 0's count.
            right = (logits.argmax(1) == labels[is_held]).sum()
            world.broadcast_([right])
            fits.append((int(right), value, start))
        _, l2, start = max(fits, key=lambda each: each[:2])
    return fit(objective_of(everything), l2, start), scale


def logits_of(probe: Probe, scale: Scale, features: Tensor) -> Tensor:
    """Return the logits of features: (M, D) -> (M, classes) float32 on the same device."""
    weight = probe.weight.float().to(features.device)
    bias = probe.bias.float().to(features.device)
    return torch.cat([scale.apply(rows) @ weight.T + bias for rows in features.split(ROWS)])
