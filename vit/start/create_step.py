"""Create the training step: compile and wrap the model, and create the optimizer."""

from vit.config.schema import Config
from vit.data.augment.apply import create_augment
from vit.distributed.process_group import World
from vit.feature import CreateReduce
from vit.layers.blocks import set_residual_dtype
from vit.layers.image_model import ImageModel
from vit.optim.ema import create_average
from vit.optim.optimizer import create_optimizer
from vit.start.attention import choose_attention
from vit.start.compiling import checkpoint_activations, compile_models
from vit.step import TrainStep
from vit.training.objective import Objective
from vit.training.plan import Plan, rates
from vit.training.reduce import data_parallel


def create_train_step(
    config: Config,
    plan: Plan,
    num_classes: int,
    model: ImageModel,
    world: World,
    objective: Objective,
    create_reduce: CreateReduce = data_parallel,
    is_filled_later: bool = False,
) -> TrainStep:
    """Move `model` to its device, compile and wrap it, and return its training step.

    is_filled_later: whether a checkpoint is loaded afterwards, which replaces all weights on every
    rank.
    """
    model.to(world.device)
    with world.fail_together():
        set_residual_dtype(model, config.train.residual_dtype)
        choose_attention(model, config.train, world.device)

    # The order matters. The EMA copies the model, so it is created before compilation. The
    # optimizer refers to the parameters, so it is created after wrapping. DDP does not replace the
    # parameters. With `fully_shard`, which does, the EMA would also have to be created after
    # wrapping.
    ema = create_average(model, config.ema, plan.steps_per_epoch)
    with world.fail_together():
        checkpoint_activations(model, config.train.activation_checkpointing)

    # The EMA is evaluated as often as the model, so compile both.
    averages = [] if ema is None else [ema.module]
    why_eager = compile_models(config.train, [model, *averages, *objective.models], world)

    reduce = create_reduce(model, config, plan, world, is_filled_later)
    augment = create_augment(
        config.augment,
        config.data,
        num_classes,
        world.device,
        compiled=bool(config.train.compile) and not why_eager,
    )

    probes = None
    if config.log.norms_every_steps is not None:
        # Import the module only here, because few runs measure norms.
        from vit.training.norm_probes import create_probes

        with world.fail_together():
            probes = create_probes(model, config, augment, plan.micro_batch_size, plan.total_steps)

    learning_rate, weight_decay = rates(config, plan)
    return TrainStep(
        model,
        create_optimizer(model, config.optim),
        augment,
        objective,
        reduce,
        lr_at=learning_rate,
        weight_decay_at=weight_decay,
        micro_batch_size=plan.micro_batch_size,
        precision=config.train.precision,
        clip_grad_norm=config.optim.clip_grad_norm,
        ema=ema,
        probes=probes,
        seed=config.train.seed,
        why_eager=why_eager,
        has_cuda_graphs=config.train.compile == "reduce-overhead" and not why_eager,
    )
