"""The hook and the gradient sum for `train.exact_over_ranks`."""

from torch import nn

from vit.config.schema import Config
from vit.distributed.exact.leaves import Leaves, check_leaves, same_kernels
from vit.distributed.process_group import World
from vit.run import Hook
from vit.run_folder.place import Place
from vit.training.plan import Plan
from vit.training.run_data import Notes, RunData


class ExactFacts(Hook):
    """Requires a resumed run to use the same micro-batch size and kernels, which determine the
    result."""

    def opened(self, config: Config, world: World, data: RunData, place: Place) -> Notes:
        """See `Hook`. Raises the errors of `same_kernels`."""
        train = config.train
        kernels = same_kernels(world) + (", compiled" if train.compile else "")
        if isinstance(train.compile, str):
            kernels += f" with {train.compile}"
        if train.attention != "auto":
            kernels += f", {train.attention} attention"
        return Notes({"micro_batch_size": data.plan.micro_batch_size, "kernels": kernels})


def exact_over_ranks(
    model: nn.Module, config: Config, plan: Plan, world: World, is_filled_later: bool
) -> Leaves:
    """Create the exact gradient sum. `vit.training.reduce.data_parallel` describes the arguments.

    Raises ValueError for a model that `check_leaves` rejects.
    """
    with world.fail_together():
        check_leaves(model)
    return Leaves(model, plan.num_leaves, plan.micro_batch_size, world, config.train.seed)
