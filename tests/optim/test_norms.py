"""Compare the norms of layers with simple loops over the parameters, and compare attention logits
with values computed from the attention kernel's inputs."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from plain_step import plain_step
from processes import run

from vit.config.optim_section import AdafactorConfig, AdamWConfig, LambConfig, MuonConfig, SgdConfig
from vit.config.schema import AugmentConfig
from vit.data.augment.apply import Augment
from vit.data.augment.draw import draw_table, sample_keys
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.model import create_model
from vit.optim.norms import Norms
from vit.optim.optimizer import create_optimizer
from vit.start.compiling import compile_blocks
from vit.step import TrainStep
from vit.training.attention_logits import largest_logits
from vit.training.freeze import freeze

CPU = torch.device("cpu")
CONFIG = AugmentConfig(hflip_prob=0.0)
LAYERS = ("embed", "blocks.0", "blocks.1", "head")
FIELDS = {"embed_dim": 32, "depth": 2, "num_heads": 2}
OPTIMIZERS = {
    "adamw": AdamWConfig(),
    "sgd": SgdConfig(name="sgd"),
    "lamb": LambConfig(name="lamb"),
    "muon": MuonConfig(name="muon", layer_decay=0.9),
    "adafactorbv": AdafactorConfig(name="adafactorbv"),
}


def make_model(**fields) -> torch.nn.Module:
    torch.manual_seed(0)
    model = create_model("vit_ti8", 16, 5, **{**FIELDS, **fields})
    torch.nn.init.normal_(model.head.weight, std=0.1)
    return model


def make_batch(rows: int = 8, seed: int = 0, config: AugmentConfig = CONFIG) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    sizes = np.full(rows, 16)
    table = draw_table(config, sample_keys(0, 0, np.arange(rows)), sizes, sizes, (16, 16))
    return Batch(
        torch.randint(0, 256, (rows, 3, 16, 16), dtype=torch.uint8, generator=generator),
        torch.randint(0, 5, (rows,), generator=generator),
        torch.ones(rows),
        torch.from_numpy(table),
        torch.arange(rows),
    )


def make_step(model=None, optim=OPTIMIZERS["adamw"], every=1, **options) -> TrainStep:
    model = make_model() if model is None else model
    return plain_step(
        model,
        model,
        create_optimizer(model, optim),
        Augment(CONFIG, 5, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), CPU),
        World(0, 1, CPU),
        **{
            "lr_at": lambda step: 1e-2,
            "micro_batch_size": 4,
            "clip_grad_norm": 0.01,
            "norms": Norms(model, every, 9) if every else None,
            **options,
        },
    )


def layer_of(name: str) -> str:
    if name.startswith("blocks."):
        return name[: name.index(".", 7)]
    return "head" if name.startswith(("head", "norm")) else "embed"


def plain_norms(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, float]:
    squares = dict.fromkeys(LAYERS, 0.0)
    for name, value in named:
        squares[layer_of(name)] += torch.linalg.vector_norm(value.detach()).item() ** 2
    return {layer: math.sqrt(square) for layer, square in squares.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_norms_equal_a_plain_loop_over_parameters(name, precision):
    if precision == "fp16" and name not in ("adamw", "muon"):
        return
    step = make_step(optim=OPTIMIZERS[name], every=2, precision=precision)
    if precision == "fp16":
        # With a loss scale of 65,536, gradients would overflow, and updates would be skipped until
        # the scale is low enough.
        step.loss_scale.value.fill_(2.0**8)
    assert step(make_batch(), 0).read().norms is None
    before = copy.deepcopy(step.model)
    batch = make_batch(seed=1)
    result = step(batch, 1).read()
    F.cross_entropy(before((batch.images / 255 - 0.5) / 0.25), batch.labels).backward()
    moved = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    changes = ((name, p - moved[name]) for name, p in before.named_parameters())
    gradients = plain_norms((name, p.grad) for name, p in before.named_parameters())
    # float16 has a precision of 11 bits, and rounding errors occur in two blocks.
    tolerance = 1e-4 if precision == "fp32" else 0.02
    close = partial(pytest.approx, rel=tolerance)
    assert tuple(result.norms["grad_norm"]) == LAYERS
    assert result.norms["grad_norm"] == close(gradients)
    assert math.hypot(*gradients.values()) == close(result.grad_norm)
    assert result.grad_norm > step.clip_grad_norm
    weights = plain_norms(before.named_parameters())
    updates = plain_norms(changes)
    assert result.norms["weight_norm"] == pytest.approx(weights, rel=1e-5)
    assert result.norms["update_norm"] == pytest.approx(updates, rel=1e-5)
    ratios = {layer: updates[layer] / weights[layer] for layer in LAYERS}
    assert result.norms["update_ratio"] == pytest.approx(ratios, rel=1e-5)
    assert min(ratios.values()) > 0


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_a_skipped_update_has_zero_change_and_a_nan_gradient_norm(name):
    step = make_step(optim=OPTIMIZERS[name])
    batch = make_batch()
    batch.weights[3] = float("nan")
    norms = step(batch, 0).read().norms
    assert norms["update_norm"] == norms["update_ratio"] == dict.fromkeys(LAYERS, 0.0)
    assert all(math.isnan(value) for value in norms["grad_norm"].values())
    assert all(value > 0 for value in norms["weight_norm"].values())


def test_a_layer_whose_gradient_overflows_is_named():
    step = make_step(precision="fp32")
    step.model.blocks[1].mlp.fc1.bias.register_hook(lambda gradient: gradient * torch.inf)
    gradient_norms = step(make_batch(), 0).read().norms["grad_norm"]
    assert [layer for layer in LAYERS if not math.isfinite(gradient_norms[layer])] == ["blocks.1"]


def test_norms_are_measured_at_the_interval_and_at_the_end():
    norms = Norms(make_model(), 4, 10)
    assert [step + 1 for step in range(10) if norms.is_due(step)] == [4, 8, 10]


def test_measures_only_trained_layers():
    model = make_model()
    freeze(model, 1)
    assert Norms(model, 1, 9).layers == ("blocks.1", "head")
    guest = timm.create_model("test_resnet", num_classes=5)
    assert Norms(guest, 1, 9).layers[0] == "layers.0"
    with pytest.raises(ValueError, match="Linear does not list its layers"):
        Norms(torch.nn.Linear(2, 2), 1, 9)


def test_measuring_does_not_change_the_training():
    fields = {"drop_path_rate": 0.5, "proj_drop_rate": 0.5, "patch_drop_rate": 0.5}
    steps = [make_step(make_model(**fields), every=every) for every in (1, None)]
    for number in range(2):
        losses = [step(make_batch(seed=number), number).read().loss for step in steps]
        assert losses[0] == losses[1]
    pairs = zip(*(step.model.parameters() for step in steps), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
    assert steps[0].model.training


# --- attention logits -----------------------------------------------------------------------------


@pytest.fixture
def largest_of_calls(monkeypatch) -> list[torch.Tensor]:
    """Return a list that receives the largest logit of each image in each call of the attention
    kernel."""
    seen = []
    kernel = F.scaled_dot_product_attention

    def spy(q, k, v, *arguments, **options):
        logits = (q.double() @ k.double().mT) / math.sqrt(q.shape[-1])
        seen.append(logits.flatten(1).amax(1))
        return kernel(q, k, v, *arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize(
    "create",
    [
        partial(make_model, qk_norm=True, rope_type="dinov3", reg_tokens=2, drop_path_rate=0.5),
        partial(make_model, proj_drop_rate=0.5, global_pool="map", class_token=False),
        partial(timm.create_model, "test_vit", img_size=32, num_classes=5),
    ],
    ids=["qk_norm and rope", "map", "timm"],
)
def test_the_largest_logit_is_computed_from_the_inputs_of_attention(create, largest_of_calls):
    torch.manual_seed(1)
    model = create().train()
    images = torch.randn(3, 3, *getattr(model, "image_size", (32, 32)))
    with torch.no_grad():
        model.eval()(images)
    expected = torch.stack(largest_of_calls[: len(model.blocks)])
    torch.testing.assert_close(largest_logits(model.train(), images).double(), expected)
    assert model.training
    assert len(largest_logits(timm.create_model("test_resnet"), images)) == 0


def test_searches_the_largest_logit_in_the_first_mixed_images(largest_of_calls):
    """The images must be chosen independently of the micro-batch size (4) and of the mixing group
    size (6)."""
    step = make_step(micro_batch_size=6)
    mixing = AugmentConfig(hflip_prob=0.0, mixup_alpha=1.0, mix_group_size=6)
    step.augment.config = mixing
    batch = make_batch(12, config=mixing)
    batch.table[:, 0] = 0.3
    inputs, _ = step.augment.finish(batch.images, batch.labels, batch.table)
    with torch.no_grad():
        step.model.eval()(inputs[:8])
    step.model.train()
    expected = [logits.max().item() for logits in largest_of_calls]
    largest = step(batch, 0).read().norms["max_attn_logit"]
    assert list(largest) == ["blocks.0", "blocks.1"]
    assert list(largest.values()) == pytest.approx(expected, rel=1e-5)


def test_compiled_blocks_need_no_additional_graphs():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = make_step(micro_batch_size=12, every=2)
    compile_blocks(step.model, backend)
    assert step(make_batch(12), 0).read().norms is None
    made = len(graphs)
    assert step(make_batch(12), 1).read().norms is not None
    assert len(graphs) == made > 0


# --- several ranks --------------------------------------------------------------------------------

RANKS = """
import json
import torch
from torch.distributed.fsdp import fully_shard
from vit.config.schema import AugmentConfig
from vit.config.optim_section import SgdConfig
from vit.data.augment.apply import Augment
from vit.data.augment.table import table_layout
from vit.data.batches import Batch
from vit.model import create_model
from vit.optim.norms import Norms
from vit.optim.optimizer import create_optimizer
from vit.distributed.process_group import join_world, wrap
from vit.distributed.exit import leave_world
from vit.training.loss import cross_entropy
from vit.training.objective import Objective
from vit.training.norm_probes import Probes
from vit.training.reduce import DataParallel
from vit.step import TrainStep

world = join_world("cpu")
config = AugmentConfig()
share = 16 // world.size
generator = torch.Generator().manual_seed(0)
batch = Batch(
    torch.randint(0, 256, (16, 3, 16, 16), dtype=torch.uint8, generator=generator),
    torch.randint(0, 5, (16,), generator=generator),
    torch.ones(16),
    torch.ones(16, table_layout(config).width),
    torch.arange(16),
).rows(world.rank * share, (world.rank + 1) * share)
found = []
for kind in ("ddp", "fsdp2") if world.size > 1 else ("plain",):
    torch.manual_seed(0)
    model = create_model("vit_ti8", 16, 5, embed_dim=32, depth=2, num_heads=2)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    if kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    wrapped = None if kind == "fsdp2" else wrap(model, world)
    augment = Augment(config, 5, (0.5,), (0.25,), world.device)
    step = TrainStep(
        model,
        create_optimizer(model, SgdConfig(name="sgd")),
        augment,
        Objective(cross_entropy),
        DataParallel(model, world, wrapped),
        lr_at=lambda step: 1e-2,
        micro_batch_size=16,
        probes=Probes(Norms(model, 1, 9), model, augment, 16),
    )
    if kind == "fsdp2":
        # The step itself does not know shards yet.
        step._update = lambda *_: step.optimizer.step()
        step.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        *_, norms = step._queue(batch, 0, False, (0.0,))
        found.append(norms.named(norms.values.tolist()))
    else:
        found.append(step(batch, 0).read().norms)
if world.is_main:
    print(json.dumps(found))
leave_world(world)
"""


@pytest.mark.slow
@pytest.mark.full
def test_any_number_of_ranks_measures_the_same(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    results = []
    for ranks in (1, 2):
        done = run(script, ranks=ranks, timeout_s=240)
        assert done.returncode == 0, done.stderr
        results += json.loads(done.stdout)
    alone, *together = results
    assert len(together) == 2
    for kind, values in zip(("ddp", "fsdp2"), together, strict=True):
        for key in alone:
            assert values[key] == pytest.approx(alone[key], rel=1e-4), (kind, key)
