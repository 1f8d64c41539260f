"""Compare the model with independent implementations: timm, torchvision and brute force."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from model.random_weights import randomise, relative_difference
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn

from vit.layers.drop_path import DropPaths
from vit.layers.posemb import sincos2d_posemb
from vit.model import VisionTransformer, create_model
from vit.training.model_summary import count_parameters, flops_per_image
from vit.weights.files import load_weights

TINY = {"embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 10}


CONFIGURATIONS = {
    "class token": {},
    "mean of patches, no class token": {"class_token": False, "global_pool": "avg"},
    "mean of patches beside a class token": {"global_pool": "avg"},
    "LayerScale": {"init_values": 1e-1},
    "no qkv bias, narrow MLP": {"qkv_bias": False, "mlp_ratio": 2.5},
    "gray, oblong patches": {"in_chans": 1, "patch_size": (16, 8)},
}


def oracle(image_size: tuple[int, int], weights: dict, **fields) -> nn.Module:
    """Return timm's model, which shares the memory of `weights`. timm's model computes attention
    with matmul and softmax, but our model uses a fused kernel."""
    with torch.device("meta"):
        guest = TimmVisionTransformer(img_size=image_size, weight_init="skip", **fields)
    guest.load_state_dict(weights, assign=True)
    for block in guest.blocks:
        block.attn.fused_attn = False
    return guest.eval()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_b16", 86_567_656),
        ("vit_b32", 88_224_232),
        ("vit_l16", 304_326_632),
        ("vit_l32", 306_535_400),
        ("vit_h14", 632_045_800),
    ],
)
def test_parameter_counts_equal_those_in_the_paper(name, expected):
    with torch.device("meta"):
        assert count_parameters(create_model(name)) == expected


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("vit_ti16", "vit_tiny_patch16_224"),
        ("vit_s16", "vit_small_patch16_224"),
        ("vit_s8", "vit_small_patch8_224"),
        ("vit_g14", "vit_giant_patch14_224"),
        ("vit_G14", "vit_gigantic_patch14_224"),
    ],
)
def test_presets_beyond_the_papers_equal_timm(ours, theirs):
    with torch.device("meta"):
        model = create_model(ours)
        guest = create_model(f"timm/{theirs}")
    shapes, expected = (
        {name: tensor.shape for name, tensor in network.state_dict().items()}
        for network in (model, guest)
    )
    assert shapes == expected
    assert model.blocks[0].attn.num_heads == guest.blocks[0].attn.num_heads
    assert model.blocks[0].norm1.eps == model.norm.eps == guest.norm.eps


@pytest.mark.parametrize("fields", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_state_dict_logits_and_gradients_equal_timm(fields):
    fields = TINY | {"patch_size": 16} | fields
    model = randomise(VisionTransformer(image_size=(64, 96), **fields))
    guest = oracle(
        model.image_size,
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        **fields,
    )
    assert list(model.state_dict()) == list(guest.state_dict())

    images = torch.randn(3, model.in_chans, 64, 96, generator=torch.Generator().manual_seed(1))
    assert (
        relative_difference(model.forward_features(images), guest.forward_features(images)) < 1e-5
    )
    gradients = []
    for network in (model, guest):
        logits = network(images)
        loss = F.cross_entropy(logits, torch.tensor([3, 0, 9]))
        gradients.append((logits.detach(), *torch.autograd.grad(loss, list(network.parameters()))))
    for name, ours, theirs in zip(
        ["logits", *dict(model.named_parameters())], *gradients, strict=True
    ):
        assert relative_difference(ours, theirs) < 2e-5, name


def difference_after_resampling(name: str, sizes: list, **fields) -> dict:
    """Map each image size to the relative difference between our logits and timm's. The weights are
    for images of 224 pixels."""
    model = randomise(create_model(name, **fields))
    weights = model.state_dict()
    fields = {
        field: getattr(model, field)
        for field in ("patch_size", "embed_dim", "depth", "num_classes")
    }
    fields["num_heads"] = model.blocks[0].attn.num_heads
    differences = {}
    for size in sizes:
        with torch.device("meta"):
            resized = VisionTransformer(size, **fields)
        # The models for all sizes share their block weights. Only the positions need new memory, so
        # H/14 fits into the memory of a small machine.
        resized.load_state_dict(
            {**weights, "pos_embed": torch.zeros(resized.pos_embed.shape)}, assign=True
        )
        load_weights(resized.eval(), weights)
        theirs = resample_abs_pos_embed(
            weights["pos_embed"], new_size=list(resized.grid_size), num_prefix_tokens=1
        )
        guest = oracle(resized.image_size, {**weights, "pos_embed": theirs}, **fields)
        images = torch.randn(1, 3, *resized.image_size, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            differences[size] = relative_difference(resized(images), guest(images))
    return differences


@pytest.mark.parametrize(
    ("name", "sizes"), [("vit_b16", [224, 384, (192, 288)]), ("vit_h14", [224, 392, (196, 294)])]
)
def test_logits_equal_timm_at_other_sizes(name, sizes):
    differences = difference_after_resampling(name, sizes, **TINY)
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "fields"),
    # ViT-L and ViT-H have their full width but only a few blocks, because initializing 2.5 GB of
    # weights would take two minutes.
    [
        ("vit_b16", [224, 384, (192, 288)], {}),
        ("vit_l16", [224, 384, (192, 288)], {"depth": 6}),
        ("vit_h14", [224, 392, (196, 294)], {"depth": 4}),
    ],
)
def test_full_size_logits_equal_timm(name, sizes, fields):
    for size, difference in difference_after_resampling(name, sizes, **fields).items():
        print(
            f"{name} at {size}: largest relative difference of the logits from timm's"
            f" {difference:.1e}"
        )
        assert difference < 1e-4, (name, size)


@pytest.mark.parametrize("representation_size", [None, 48])
def test_logits_equal_torchvision(representation_size):
    model = randomise(
        VisionTransformer(image_size=64, representation_size=representation_size, **TINY)
    )
    guest = torchvision.models.VisionTransformer(
        64, 16, 2, 4, 64, 256, num_classes=10, representation_size=representation_size
    ).eval()
    renames = [
        ("patch_embed.proj", "conv_proj"),
        ("cls_token", "class_token"),
        ("pos_embed", "encoder.pos_embedding"),
        ("blocks.", "encoder.layers.encoder_layer_"),
        ("norm1", "ln_1"),
        ("norm2", "ln_2"),
        ("attn.qkv.", "self_attention.in_proj_"),
        ("attn.proj", "self_attention.out_proj"),
        ("mlp.fc1", "mlp.0"),
        ("mlp.fc2", "mlp.3"),
        ("norm.", "encoder.ln."),
        ("pre_logits.fc", "heads.pre_logits"),
        ("head.", "heads.head."),
    ]
    weights = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in renames:
            name = name.replace(ours, theirs)
        weights[name] = tensor
    guest.load_state_dict(weights)
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert relative_difference(model(images), guest(images)) < 1e-5


def test_sincos_positions_follow_the_formula():
    height = 3
    width = 5
    dim = 16
    positions = sincos2d_posemb((height, width), dim, num_prefix_tokens=1)
    assert positions.dtype == torch.float32
    assert not positions[0, 0].any()
    for y in range(height):
        for x in range(width):
            waves = ((math.sin, x), (math.cos, x), (math.sin, y), (math.cos, y))
            expected = [
                wave(place / 10_000 ** (i / (dim // 4 - 1)))
                for wave, place in waves
                for i in range(dim // 4)
            ]
            assert positions[0, 1 + y * width + x].tolist() == pytest.approx(expected, abs=1e-6)


def test_sincos_positions_are_fixed_and_stored_in_checkpoints():
    model = VisionTransformer(image_size=32, pos_embed="sincos2d", **TINY)
    assert "pos_embed" in model.state_dict()
    assert "pos_embed" not in dict(model.named_parameters())
    assert torch.equal(model.pos_embed, sincos2d_posemb((2, 2), 64, 1))


def test_initial_weights_have_their_stated_spread():
    torch.manual_seed(0)
    model = VisionTransformer(image_size=64, init_values=1e-4, **TINY)
    assert model.blocks[1].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.patch_embed.proj.weight.std().item() == pytest.approx(
        (3 * 16 * 16) ** -0.5, rel=0.02
    )
    assert model.cls_token.abs().max() < 1e-5
    assert model.cls_token.any()
    assert (model.blocks[0].ls1.gamma == 1e-4).all()
    assert not any(
        parameter.any() for name, parameter in model.named_parameters() if name.endswith("bias")
    )
    assert not model(torch.randn(2, 3, 64, 64)).any()


def test_drop_path_drops_whole_samples_at_its_rate_and_keeps_the_mean():
    torch.manual_seed(0)
    samples = 20_000
    rate = 0.3
    x = torch.ones(samples, 2, 3)
    layer = DropPaths(rate, 2, "linear", "mask")
    undropped, _, factors, other = layer(x)
    assert not torch.equal(factors, other)
    assert factors.shape == (samples, 1, 1)
    torch.testing.assert_close(factors.unique(), torch.tensor([0.0, 1 / (1 - rate)]))
    deviation = math.sqrt(rate * (1 - rate) / samples)
    assert abs((factors == 0).float().mean().item() - rate) < 4 * deviation
    assert torch.equal(undropped, torch.ones(samples, 1, 1))
    assert layer.eval()(x) == ()


def test_drop_path_grows_linearly_as_in_timm_or_is_uniform():
    fields = TINY | {"depth": 5, "drop_path_rate": 0.4}
    rates = VisionTransformer(image_size=32, **fields).drop_paths.rates[::2]
    guest = TimmVisionTransformer(img_size=32, **fields)
    assert rates == pytest.approx(
        [0.0, *(block.drop_path1.drop_prob for block in guest.blocks[1:])]
    )


@pytest.mark.parametrize(
    "field", ["pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"]
)
def test_dropout_follows_the_seed_and_stops_in_evaluation(field):
    model = randomise(VisionTransformer(image_size=32, **TINY, **{field: 0.5}))
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    def logits(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(images)

    assert torch.equal(logits(0), logits(1))
    model.train()
    assert torch.equal(logits(0), logits(0))
    assert not torch.equal(logits(0), logits(1))


@pytest.mark.parametrize("in_chans", [1, 2, 5])
def test_accepts_any_number_of_channels(in_chans):
    model = VisionTransformer(image_size=(32, 48), in_chans=in_chans, **TINY)
    assert model.grid_size == (2, 3)
    assert model.image_size == (32, 48)
    assert model.patch_size == (16, 16)
    assert model.forward_features(torch.randn(2, in_chans, 32, 48)).shape == (2, 7, 64)
    assert model(torch.randn(2, in_chans, 32, 48)).shape == (2, 10)


@pytest.mark.parametrize("fields", [{}, {"representation_size": 24}, {"global_pool": "avg"}])
def test_autocast_computes_in_bfloat16_up_to_the_head(fields):
    """If logits were rounded to bf16, many would be equal, and the predicted class would depend on
    the class order."""
    model = randomise(VisionTransformer(image_size=64, **TINY, **fields))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = model(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model.blocks[0].attn.qkv(torch.zeros(1, 64)).dtype == torch.bfloat16
            tokens = model.forward_features(images)
            logits = model(images)
        assert torch.equal(logits, model.forward_head(tokens.float())), (
            "the head must compute in fp32"
        )
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    assert relative_difference(logits, exact) < 0.05


def test_ddp_and_fsdp2_compute_the_same_as_the_bare_model(tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    fields = TINY | {"image_size": 32, "init_values": 0.1, "representation_size": 32}
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([1, 2])
    bare = randomise(VisionTransformer(**fields))
    F.cross_entropy(bare(images), labels).backward()
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for wrap in ("ddp", "fsdp2"):
            model = randomise(VisionTransformer(**fields))
            if wrap == "ddp":
                wrapped = nn.parallel.DistributedDataParallel(model)
            else:
                mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
                for block in model.blocks:
                    fully_shard(block, mesh=mesh)
                wrapped = fully_shard(model, mesh=mesh)
            F.cross_entropy(wrapped(images), labels).backward()
            for (name, expected), parameter in zip(
                bare.named_parameters(), model.parameters(), strict=True
            ):
                gradient = parameter.grad.full_tensor() if wrap == "fsdp2" else parameter.grad
                assert relative_difference(gradient, expected.grad) < 1e-5, (wrap, name)
    finally:
        destroy_process_group()


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.full])]
)
def test_a_compiled_model_computes_the_same(backend):
    model = randomise(VisionTransformer(image_size=32, **TINY))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert relative_difference(compiled(images), model(images)) < 1e-5
    model.train()
    compiled(images).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_flops_equal_the_closed_form_and_counting_changes_nothing():
    with torch.device("meta"):
        model = create_model("vit_b16")
    n, d = 197, 768
    block = 2 * n * d * (3 * d + d + 8 * d) + 2 * 2 * n * n * d
    assert flops_per_image(model) == 2 * 196 * d * 768 + 12 * block + 2 * d * 1000
    assert flops_per_image(model) / 1e9 == pytest.approx(35.1, abs=0.05)

    guest = timm.create_model("resnet10t", num_classes=5, drop_path_rate=0.1)
    guest.image_size = (64, 64)
    guest.in_chans = 3
    before = torch.get_rng_state()
    state = {name: tensor.clone() for name, tensor in guest.state_dict().items()}
    assert flops_per_image(guest) > 0
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(tensor, state[name]) for name, tensor in guest.state_dict().items())
