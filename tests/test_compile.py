"""Test the number of a compiled model's graphs. Training and evaluation must each use one graph for
all blocks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from plain_step import plain_step
from torch.nn.parallel import DistributedDataParallel

from vit.config.schema import AdamWConfig, AugmentConfig
from vit.data.augment.apply import Augment
from vit.data.augment.table import table_layout
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.layers.blocks import Group, set_residual_dtype
from vit.layers.image_sizes import take_sizes
from vit.model import create_model
from vit.optim.ema import Ema
from vit.optim.optimizer import create_optimizer
from vit.start.compiling import checkpoint_activations, compile_blocks
from vit.step import TrainStep
from vit.weights.files import load_weights

DEPTH = 27
"""A depth with nine groups of blocks, because Dynamo's limit is eight graphs per function."""


class Counter:
    """A torch.compile backend that counts graphs and runs each graph unchanged."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], mode: str = "default"
    ) -> torch.fx.GraphModule:
        self.num_graphs += 1
        self.mode = mode
        return graph

    def since(self) -> int:
        count = self.num_graphs
        self.num_graphs = 0
        return count


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Counter()
    torch._dynamo.reset()


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_vit(embed_dim: int, depth: int, **fields) -> torch.nn.Module:
    torch.manual_seed(0)
    return create_model("vit_ti8", 16, 5, embed_dim=embed_dim, depth=depth, num_heads=2, **fields)


def small_step(model: torch.nn.Module, **options) -> TrainStep:
    cpu = torch.device("cpu")
    return plain_step(
        model.train(),
        model,
        create_optimizer(model, AdamWConfig()),
        Augment(AugmentConfig(), 5, (0.5,), (0.25,), cpu),
        World(0, 1, cpu),
        lr_at=lambda step: 1e-3,
        **options,
    )


VIT5 = {"qk_norm": True, "norm_layer": "rmsnorm", "reg_tokens": 4, "rope_type": "axial"}


@pytest.mark.parametrize(
    "fields",
    [
        {"drop_path_rate": 0.1},
        {"init_values": 1e-4, "proj_drop_rate": 0.1},
        {**VIT5, "rope_reg_temperature": 100.0, "init_values": 1e-4, "drop_path_rate": 0.1},
        {"rope_type": "dinov3", "patch_drop_rate": 0.5, "mlp_layer": "swiglu"},
    ],
)
def test_all_blocks_share_one_graph_in_training_and_one_in_evaluation(graphs, fields):
    model = small_vit(16, DEPTH, **fields)
    compile_blocks(model, backend=graphs)
    for rows in (4, 4):
        model(torch.randn(rows, 3, 16, 16)).sum().backward()
    assert graphs.since() == 1, "all blocks must share one graph"
    with torch.no_grad():
        model.eval()(torch.randn(2, 3, 16, 16))
        model(torch.randn(2, 3, 16, 16))
    assert graphs.since() == 1
    model.train()(torch.randn(4, 3, 16, 16)).sum().backward()
    assert graphs.since() == 0, "training after an evaluation must not compile another graph"


FORMS = [
    {"drop_path_rate": 0.3, "init_values": 0.1},
    {"drop_path_rate": 0.3, "drop_path_form": "subset", "drop_path_schedule": "constant"},
    {"drop_path_rate": 0.3, "drop_path_form": "subset"},
    {"rope_type": "axial", "reg_tokens": 2, "qk_norm": True},
]


def gradients(model: torch.nn.Module, precision: str) -> list[torch.Tensor]:
    """Return the logits and the gradients of a step. The random drops are the same in each call."""
    images = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        logits = model(images)
        logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


def distance(values: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative distance between two corresponding tensors."""
    pairs = zip(values, expected, strict=True)
    return max(float((a - b).norm() / (b.norm() + 1e-6)) for a, b in pairs)


@pytest.mark.parametrize("fields", FORMS)
def test_groups_compute_what_single_blocks_compute(fields, graphs, monkeypatch):
    single, grouped = (small_vit(16, 6, **fields) for _ in range(2))
    for model in (single, grouped):
        torch.nn.init.ones_(model.head.weight)
    compile_blocks(grouped, backend="aot_eager")
    expected = gradients(single, "fp32")
    assert distance(gradients(grouped, "fp32"), expected) < 1e-4
    if fields != FORMS[0]:
        return

    for model in (single, grouped):
        model.zero_grad()
        set_residual_dtype(model, "bf16")
    expected = gradients(single, "bf16")
    assert distance(gradients(grouped, "bf16"), expected) < 0.05

    def with_drops_of_another_block(group, x, rope, kept):
        return forward(group, x, rope, kept[::-1])

    forward = Group.forward
    monkeypatch.setattr(Group, "forward", with_drops_of_another_block)
    torch._dynamo.reset()
    compile_blocks(grouped, backend="aot_eager")
    grouped.zero_grad()
    assert distance(gradients(grouped, "bf16"), expected) > 0.2


@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", "reduce-overhead"])
def test_every_mode_needs_the_same_graphs(graphs, mode):
    model = small_vit(16, DEPTH, drop_path_rate=0.1)
    set_residual_dtype(model, "bf16")
    compile_blocks(model, backend=graphs, mode=mode)
    step = small_step(
        model, micro_batch_size=4, precision="bf16", has_cuda_graphs=mode == "reduce-overhead"
    )
    for number in range(3):
        step(make_batch(16), number)
    assert (graphs.since(), graphs.mode) == (1, mode)
    with torch.autocast("cpu", torch.bfloat16):
        evaluate(model, side=16)
    assert graphs.since() == 1
    step(make_batch(16), 3)
    with torch.autocast("cpu", torch.bfloat16):
        evaluate(model, side=16)
    assert graphs.since() == 0


def test_micro_batches_for_cuda_graphs_add_up_to_the_same_weights():
    """A CUDA graph overwrites its results, so separate memory for the gradients must be allocated
    before the first micro-batch."""
    weights = []
    for has_cuda_graphs in (False, True):
        model = small_vit(16, 2)
        step = small_step(model, micro_batch_size=2, has_cuda_graphs=has_cuda_graphs)
        allocated = []
        model.register_forward_pre_hook(
            lambda model, _, seen=allocated: seen.append(
                [None if p.grad is None else p.grad.data_ptr() for p in model.parameters()]
            )
        )
        for number in range(2):
            step(make_batch(16), number)
        if has_cuda_graphs:
            assert None not in allocated[0]
            assert allocated[0] == allocated[3], "micro-batches add to the same memory"
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(("schedule", "in_training"), [("constant", 1), ("linear", 2)])
def test_blocks_that_compute_a_subset_share_their_graphs(graphs, schedule, in_training):
    """The drop rates increase with depth. One graph is needed for the number of rows in the first
    block. A second graph is used for all other numbers of rows."""
    fields = {"drop_path_rate": 0.5, "drop_path_form": "subset", "drop_path_schedule": schedule}
    model = small_vit(16, DEPTH, **fields, **VIT5)
    compile_blocks(model, backend=graphs)
    for _ in range(2):
        model(torch.randn(16, 3, 16, 16)).sum().backward()
    assert graphs.since() == in_training
    with torch.no_grad():
        model.eval()(torch.randn(16, 3, 16, 16))
    assert graphs.since() == 1
    model.train()(torch.randn(16, 3, 16, 16)).sum().backward()
    assert graphs.since() == 0


@pytest.mark.parametrize("form", ["mask", "subset"])
def test_recomputed_activations_need_no_separate_graph(graphs, form):
    fields = {"drop_path_rate": 0.5, "drop_path_form": form, "drop_path_schedule": "constant"}
    model = small_vit(16, DEPTH, **fields, proj_drop_rate=0.1)
    checkpoint_activations(model, 2)
    compile_blocks(model, backend=graphs)
    for _ in range(2):
        model(torch.randn(4, 3, 16, 16)).sum().backward()
    assert graphs.since() == 1
    with torch.no_grad():
        model.eval()(torch.randn(4, 3, 16, 16))
    assert graphs.since() == 1


def make_batch(side: int) -> Batch:
    return Batch(
        torch.zeros(8, 3, side, side, dtype=torch.uint8),
        torch.arange(8) % 5,
        torch.ones(8),
        torch.zeros(8, table_layout(AugmentConfig()).width),
        torch.arange(8),
    )


def evaluate(*models: torch.nn.Module, side: int) -> None:
    for model in models:
        was_training = model.training
        with torch.no_grad():
            model.eval()(torch.randn(6, 3, side, side))
        model.train(was_training)


@pytest.mark.parametrize("size", ["of the base", "larger"])
def test_micro_steps_and_the_average_share_the_graphs(graphs, size):
    """Training steps and evaluations alternate, as in a run. Training at the larger image size
    starts from the weights of the base model."""
    fields = {"embed_dim": 16, "depth": DEPTH, "drop_path_rate": 0.1}
    model = small_vit(**fields)
    side = 16
    if size == "larger":
        side = 24
        weights = model.state_dict()
        model = create_model("vit_ti8", side, 5, num_heads=2, **fields)
        load_weights(model, weights)
    average = Ema(model, 0.9)
    for each in (model, average.module):
        compile_blocks(each, backend=graphs)
    step = small_step(model, micro_batch_size=4, ema=average)
    for number in range(2):
        step(make_batch(side), number)
    assert graphs.since() == 1
    evaluate(model, average.module, side=side)
    assert graphs.since() == 1, "the model and the average share a graph for evaluation"
    step(make_batch(side), 2)
    evaluate(model, average.module, side=side)
    assert graphs.since() == 0


def test_keeps_one_graph_for_each_image_size(graphs):
    """By default, torch compiles a slower graph for all sizes when it encounters a second image
    size."""
    model = small_vit(16, DEPTH, rope_type="axial", drop_path_rate=0.1)
    sides = (8, 24)
    take_sizes(model, [(side, side) for side in sides])
    compile_blocks(model, backend=graphs)
    for side in (*sides, 16):
        for _ in range(2):
            model(torch.randn(4, 3, side, side)).sum().backward()
        assert graphs.since() == 1, side
    with torch.no_grad():
        model.eval()(torch.randn(2, 3, 16, 16))
    assert graphs.since() == 1
    model.train()
    for side in (*sides, 16):
        model(torch.randn(4, 3, side, side)).sum().backward()
    assert graphs.since() == 0


class Doubled(torch.nn.Module):
    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x, *inputs):
        return 2 * self.block(x, *inputs)


@pytest.mark.parametrize("way", ["hook", "replaced"])
def test_a_changed_block_is_compiled_with_its_change(way, graphs):
    model = small_vit(16, 3, drop_path_rate=0.1)
    torch.nn.init.ones_(model.head.weight)
    if way == "hook":
        model.blocks[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        model.blocks[1] = Doubled(model.blocks[1])
    expected = gradients(model, "fp32")
    model.zero_grad()
    compile_blocks(model, backend=graphs)
    assert distance(gradients(model, "fp32"), expected) < 1e-4


def test_buckets_of_ddp_do_not_split_the_graph_of_a_block(graphs, process_group):
    """The test uses 3 MB per block and 1 MB per bucket, which is similar to the ratio for ViT-L (50
    MB and 25 MB)."""
    model = small_vit(256, 2, drop_path_rate=0.1)
    compile_blocks(model, backend=graphs)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
    for _ in range(3):
        wrapped(torch.randn(4, 3, 16, 16)).sum().backward()
    assert graphs.since() == 1


def test_compiles_each_block_of_a_timm_model(graphs):
    """timm's drop path stores its rate as a Python number, so each block needs its own graph. The
    model has more than eight blocks."""
    torch.manual_seed(0)
    depth = 12
    fields = {"depth": depth, "embed_dim": 16, "num_heads": 2, "drop_path_rate": 0.1}
    model = create_model("timm/vit_tiny_patch16_224", 32, 5, **fields).train()
    compile_blocks(model, backend=graphs)
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    assert graphs.since() == depth
    model.eval()(torch.randn(4, 3, 32, 32))
    assert graphs.since() == 2, (
        "expected one graph for the first block, which has no drop path, and one for each other"
    )
