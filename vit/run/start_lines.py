"""What a run reports to people before its first step."""

from __future__ import annotations

from torch import nn

from vit.config.schema import Config
from vit.data.batches import TrainBatches
from vit.data.shuffle_quality import ShuffleQuality
from vit.data.stream import NOT_EXACT, StreamBatches
from vit.model_summary import count_parameters, flops_per_image
from vit.plan import Plan
from vit.ranks.distributed import World
from vit.run.preflight import filling_note
from vit.run.state import RunState

NOTABLE_INITIAL_SHARE = 0.01
"""Share of the initial weights in the final average above which it is reported."""


def start_lines(
    config: Config,
    plan: Plan,
    world: World,
    model: nn.Module,
    batches: TrainBatches | StreamBatches,
    shuffle: ShuffleQuality | None,
    state: RunState,
) -> list[str]:
    """Return lines about model, batches, what may be set wrong, and where the run stands."""
    micro_steps = ""
    if plan.accumulation_steps > 1:
        micro_steps = f" in {plan.accumulation_steps} micro-steps"
    lines = [
        f"{config.model.name}: {count_parameters(model):,} parameters,"
        f" {flops_per_image(model) / 1e9:.2f} GFLOP per image; {world.size} rank(s) on"
        f" {world.device.type}, {config.train.precision}; {plan.total_steps} steps of"
        f" {config.data.global_batch_size} images{micro_steps}"
    ]
    copies = ""
    if config.data.aug_repeats > 1:
        copies = (
            f"{plan.distinct_images_per_epoch:,} of {batches.order.num_samples:,} images in an"
            f" epoch, {config.data.aug_repeats} copies of each; "
        )
    lines.append(f"streamed, {NOT_EXACT}" if shuffle is None else f"shuffle: {copies}{shuffle}")
    if plan.warmup_steps >= plan.total_steps:
        lines.append(
            f"note: the warm-up takes {plan.warmup_steps} steps, the run has {plan.total_steps}:"
            " the peak learning rate is not reached"
        )
    decay = config.train.ema_decay
    if decay is not None and not config.train.ema_warmup and config.init.checkpoint is None:
        share = decay**plan.total_steps
        if share > NOTABLE_INITIAL_SHARE:
            lines.append(
                f"note: train.ema_decay={decay} over {plan.total_steps} steps leaves {share:.0%} of"
                " the initial weights in the average: train.ema_warmup=true, or a smaller decay"
            )
    filling = filling_note(batches, state.step, plan)
    if filling is not None:
        lines.append(filling)
    if state.restarts:
        lines.append(
            f"resumed at step {state.step} of {plan.total_steps} from {config.run.dir}/checkpoints"
            f" (restart {state.restarts})"
        )
    if state.is_finished(plan):
        best = f", best top-1 {state.best_top1:.2f} %" if state.best_top1 >= 0 else ""
        length = "train.epochs" if config.train.steps is None else "train.steps"
        lines.append(
            f"{config.run.dir} is finished: {state.step} steps{best}; for more: another run.dir,"
            f" or a larger {length} with --allow-change {length}"
        )
    return lines
