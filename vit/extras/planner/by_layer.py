"""Count the operations and parameters of each layer, and the memory for inference and training.

Shapes and operations come from a forward pass on the meta device. Memory is counted with fake
tensors (`vit.extras.planner.memory`). Therefore, counting needs almost no memory or computation,
even for a large model.
"""

import sys
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vit.config.schema import Config
from vit.extras.planner.device_memory import LiveBytes
from vit.extras.planner.memory import drop_memory, step_memory
from vit.layers.image_model import ImageModel
from vit.model import create_model
from vit.system.meter import MIB
from vit.training.model_summary import count_parameters, flops_by_operator, print_shapes
from vit.training.plan import Plan
from vit.training.run_data import with_precision

FROM_IMAGES = 64
"""The smallest batch size for which activations always determine the peak memory of a step. With
smaller batches, the optimizer's update may determine the peak."""


class LayerCost(NamedTuple):
    """The cost of one layer or one encoder block."""

    name: str
    kind: str
    """The class of the module, or "parameter" for a parameter of the model itself."""
    output: str
    """The shape of the output, such as (B, 197, 768), or of the parameter."""
    parameters: int
    flops: int
    """The number of operations in the forward pass for one image. A multiply-add counts as two
    operations."""


def layer_costs(model: ImageModel) -> list[LayerCost]:
    """Return the cost of each layer of `model`, in the order of the forward pass.

    `model` must be on the meta device. Layers without parameters and operations are omitted. All
    parameters of the model are counted.
    """
    layers = _named_layers(model)
    # The hooks add the layers in the order of the forward pass.
    shapes: dict[str, str] = {}

    def note_shape(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            shapes.setdefault(name, f"({', '.join(map(str, ('B', *output.shape[1:])))})")

    handles = [
        layer.register_forward_hook(partial(note_shape, name)) for name, layer in layers.items()
    ]
    counts = flops_by_operator(model, None, None)
    for handle in handles:
        handle.remove()

    rows = [
        LayerCost(name, "parameter", str(tuple(parameter.shape)), parameter.numel(), 0)
        for name, parameter in model.named_parameters(recurse=False)
    ]
    for name in dict.fromkeys([*shapes, *layers]):  # layers without an output come last
        layer = layers[name]
        number = sum(parameter.numel() for parameter in layer.parameters())
        flops = int(sum(counts.get(f"{type(model).__name__}.{name}", {}).values()))
        if number or flops:
            rows.append(LayerCost(name, type(layer).__name__, shapes.get(name, ""), number, flops))

    return rows


def _named_layers(model: ImageModel) -> dict[str, nn.Module]:
    """Return the children of `model` by name, with the encoder blocks in place of their list."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_children():
        if name == "blocks" and isinstance(module, (nn.Sequential, nn.ModuleList)):
            layers |= {f"blocks.{key}": block for key, block in module.named_children()}
        else:
            layers[name] = module

    return layers


class MemoryNeeds(NamedTuple):
    """The bytes that a model needs on one device, computed as in `launch/plan.py`."""

    weights: int
    forward: int
    """The peak temporary memory of a forward pass on one image, without gradients."""
    training: int
    """The memory of a training step with one image per micro-batch: weights, gradients, optimizer
    state and activations."""
    per_image: int
    """The bytes that each additional image in a micro-batch needs."""


def memory_needs(config: Config, num_classes: int) -> MemoryNeeds:
    """Calculate the memory for inference in fp32 and for training with the config's settings."""
    one, some, more = (
        step_memory(config, _plan_of(size), num_classes)
        for size in (1, FROM_IMAGES, 2 * FROM_IMAGES)
    )
    per_image = (more.total - some.total) // FROM_IMAGES

    with torch.device("meta"):
        model: ImageModel = create_model(config.model, num_classes=num_classes).eval()
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        drop_memory(model, torch.device("cpu"))
        images = torch.empty(1, model.in_chans, *model.image_size)
        live.begin(lambda: 0)
        before = live.now
        with torch.no_grad():
            model(images)
        forward = max(live.peak - before, 0)

    return MemoryNeeds(one.weights, forward, one.total, per_image)


def _plan_of(micro_batch_size: int) -> Plan:
    """Return the plan of a run of one step with one micro-batch."""
    return Plan(
        world_size=1,
        global_batch_size=micro_batch_size,
        micro_batch_size=micro_batch_size,
        accumulation_steps=1,
        steps_per_epoch=1,
        dropped_per_epoch=0,
        distinct_images_per_epoch=micro_batch_size,
        total_steps=1,
        warmup_steps=0,
        eval_every_steps=1,
        log_every_steps=1,
    )


# ---- printed tables
# ----------------------------------------------------------------------------------


def print_network(config: Config, num_classes: int) -> None:
    """Print the output shape of each layer of the model."""
    with torch.device("meta"):
        model = create_model(config.model, num_classes=num_classes)
    print_shapes(model, config.model.name)


def print_costs(config: Config, num_classes: int) -> None:
    """Print the parameters and operations of each layer, and the memory of the model."""
    with torch.device("meta"):
        model = create_model(config.model, num_classes=num_classes)
    rows = layer_costs(model)
    flops = sum(row.flops for row in rows)

    table = Table("layer", "kind", "output", "parameters", "GFLOP", "share", box=None)
    for column in table.columns[3:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row.name,
            row.kind,
            row.output,
            f"{row.parameters:,}",
            f"{row.flops / 1e9:.3f}",
            f"{100 * row.flops / max(flops, 1):.1f} %",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)

    config = with_precision(config, has_bf16=True)
    needs = memory_needs(config, num_classes)
    print(
        f"{config.model.name} at {config.model.size_text()}, {num_classes:,} classes:"
        f" {count_parameters(model):,} parameters, {flops / 1e9:.2f} GFLOP per image forward (2 for"
        " each multiply-add)\n"
        f"memory in use: weights {needs.weights / MIB:,.1f} MiB in fp32, and"
        f" {needs.forward / MIB:,.1f} MiB for each image of a batch\n"
        f"memory in training ({config.train.precision}, {config.optim.name}):"
        f" {needs.training / MIB:,.0f} MiB with micro-batches of one image; each image adds"
        f" {needs.per_image / MIB:,.1f} MiB to a large one (see launch/plan.py for a given GPU)"
    )


PRINTERS = {"shapes": print_network, "summary": print_costs}
"""Maps commands of `launch/visualize.py` to the functions that print their output."""
