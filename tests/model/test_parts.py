"""Test model options that are not in the ViT paper. With equal weights, results must match timm's.
The initialization, the weight decay and the operation counts must be correct as well."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import timm
import torch
from model.random_weights import randomise, relative_difference
from timm.layers import Mlp as TimmMlp
from timm.layers import SwiGLU, SwiGLUPacked
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn

from vit.model import VisionTransformer, create_model
from vit.training.model_summary import count_parameters, flops_per_image
from vit.weights.files import load_weights

SIZE = (32, 48)
TINY = {"embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10, "patch_size": 8}
PARTS = {
    "head_dim": {"head_dim": 4},
    "mlp_tanh": {"mlp_layer": "mlp_tanh"},
    "swiglu": {"mlp_layer": "swiglu"},
    "swiglu_packed": {"mlp_layer": "swiglu_packed"},
    "rmsnorm": {"norm_layer": "rmsnorm"},
    "qk_norm": {"qk_norm": True},
    "registers": {"reg_tokens": 4},
    "map": {"global_pool": "map"},
    "avg": {"global_pool": "avg", "class_token": False},
    "norm_avg": {"global_pool": "norm_avg"},
    "sincos2d": {"pos_embed": "sincos2d"},
    "no positions": {"pos_embed": "none"},
    "no_embed_class": {"no_embed_class": True},
    "axial": {"rope_type": "axial"},
    "dinov3": {"rope_type": "dinov3"},
    "patch norms": {"dual_patch_norm": True},
    "LayerScale": {"init_values": 0.1},
    "drops": {"patch_drop_rate": 0.5, "drop_path_rate": 0.1, "mlp_drop_rate": 0.1},
    "pre-logits": {"representation_size": 12, "init_head_bias": -6.9},
}


WITHOUT_EFFECT = [
    {"no_embed_class": True, "pos_embed": "none"},
    {"no_embed_class": True, "global_pool": "avg", "class_token": False},
]
"""Pairs of options that are rejected, because the class token and the registers would have no
positions."""


def images(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 3, *SIZE, generator=torch.Generator().manual_seed(1))


def gated(layer):
    return lambda *args, act_layer, **fields: layer(*args, **fields)


def outcomes(model: nn.Module) -> list[torch.Tensor]:
    logits = model(images())
    gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    return [logits.detach(), *gradients]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"qk_norm": True}, {}),
        ({"norm_layer": "rmsnorm", "qk_norm": True, "init_values": 0.1}, {}),
        ({"reg_tokens": 4}, {}),
        ({"reg_tokens": 4, "no_embed_class": True}, {}),
        ({"reg_tokens": 2, "global_pool": "avg", "class_token": False}, {}),
        ({"global_pool": "norm_avg"}, {"global_pool": "avg", "fc_norm": False}),
        (
            {"global_pool": "norm_avg", "reg_tokens": 2, "class_token": False},
            {"global_pool": "avg", "fc_norm": False},
        ),
        ({"mlp_layer": "mlp_tanh"}, {"mlp_layer": TimmMlp, "act_layer": "gelu_tanh"}),
        (
            {"mlp_layer": "mlp_tanh", "global_pool": "map"},
            {"mlp_layer": TimmMlp, "act_layer": "gelu_tanh"},
        ),
        ({"mlp_layer": "swiglu"}, {"mlp_layer": gated(SwiGLU)}),
        ({"mlp_layer": "swiglu_packed"}, {"mlp_layer": gated(SwiGLUPacked)}),
        ({"global_pool": "map", "reg_tokens": 1}, {}),
        ({"global_pool": "map", "class_token": False, "norm_layer": "rmsnorm"}, {}),
        ({"pos_embed": "none"}, {}),
    ],
    ids=" ".join,
)
def test_names_logits_and_gradients_equal_timm(ours, theirs):
    model = randomise(VisionTransformer(SIZE, **TINY, **ours))
    guest = TimmVisionTransformer(SIZE, weight_init="skip", **TINY, **{**ours, **theirs}).eval()
    assert list(model.state_dict()) == list(guest.state_dict())
    assert guest.no_weight_decay() - {"dist_token"} <= model.no_weight_decay()
    guest.load_state_dict(model.state_dict())
    # Results differ by rounding errors, because attention is computed with separate operations or
    # with a different kernel.
    names = ["logits", *dict(model.named_parameters())]
    for name, mine, other in zip(names, outcomes(model), outcomes(guest), strict=True):
        assert relative_difference(mine, other) < 2e-5, name


EVA = {"use_rot_pos_emb": True, "rope_type": "cat", "use_fc_norm": None}
ROTARY = {
    "timm's SBB": (
        {"rope_type": "axial", "ref_feat_shape": 5, "class_token": False, "reg_tokens": 1}
        | {"pos_embed": "none", "global_pool": "avg"},
        EVA
        | {"ref_feat_shape": (5, 5), "class_token": False, "num_reg_tokens": 1}
        | {"use_abs_pos_emb": False, "global_pool": "avg"},
    ),
    "EVA-02": (
        {"rope_type": "axial", "ref_feat_shape": (4, 6), "mlp_layer": "swiglu", "mlp_ratio": 2.5},
        EVA
        | {"ref_feat_shape": (4, 6), "swiglu_mlp": True, "swiglu_align_to": 8, "mlp_ratio": 2.5}
        | {"global_pool": "token"},
    ),
    "DINOv3": (
        {"rope_type": "dinov3", "reg_tokens": 4, "pos_embed": "none", "init_values": 0.1},
        EVA
        | {"rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True}
        | {"num_reg_tokens": 4, "use_abs_pos_emb": False, "init_values": 0.1}
        | {"use_fc_norm": False, "global_pool": "token"},
    ),
}


def as_eva(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value
        for name, value in weights.items()
    }


@pytest.mark.parametrize(("ours", "theirs"), ROTARY.values(), ids=ROTARY)
def test_rotary_models_equal_timm_even_at_another_size(ours, theirs):
    fields = {**TINY, "qkv_bias": False}
    model = randomise(VisionTransformer(SIZE, **fields, **ours))
    guest = Eva(SIZE, **fields, **theirs).eval()
    guest.load_state_dict(as_eva(model.state_dict()))
    assert guest.no_weight_decay() <= model.no_weight_decay()
    names = dict(model.named_parameters())
    expected = outcomes(guest)
    gradients = dict(zip(dict(guest.named_parameters()), expected[1:], strict=True))
    gradients_of_ours = dict(zip(as_eva(names), outcomes(model)[1:], strict=True))
    assert gradients_of_ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_difference(gradients_of_ours[name], gradient) < 5e-5, name

    other = (56, 24)
    guest.set_input_size(img_size=other)
    larger = VisionTransformer(other, **fields, **ours).eval()
    load_weights(larger, model.state_dict(), model.grid_size)
    picture = torch.randn(2, 3, *other, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert relative_difference(model(images()), expected[0]) < 1e-5
        assert relative_difference(larger(picture), guest(picture)) < 1e-5


def test_dinov3_equals_transformers():
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    fields = {"rope_type": "dinov3", "reg_tokens": 4, "pos_embed": "none", "init_values": 0.1}
    model = randomise(VisionTransformer(SIZE, **TINY, **fields))

    config = transformers.DINOv3ViTConfig(
        image_size=SIZE, patch_size=8, hidden_size=32, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_register_tokens=4, layer_norm_eps=1e-6, layerscale_value=0.1,
        query_bias=True, key_bias=True, value_bias=True,
    )  # fmt: skip
    guest = transformers.DINOv3ViTModel(config).eval()

    renames = [
        ("attention.o_proj", "attn.proj"),
        ("layer_scale1.lambda1", "ls1.gamma"),
        ("layer_scale2.lambda1", "ls2.gamma"),
        ("mlp.up_proj", "mlp.fc1"),
        ("mlp.down_proj", "mlp.fc2"),
        ("embeddings.cls_token", "cls_token"),
        ("embeddings.register_tokens", "reg_token"),
        ("embeddings.patch_embeddings", "patch_embed.proj"),
        ("layer.", "blocks."),
    ]

    ours = model.state_dict()
    weights = {}
    for name, value in guest.state_dict().items():
        mine = name.removeprefix("model.")
        for theirs, our in renames:
            mine = mine.replace(theirs, our)
        part = ("q_proj", "k_proj", "v_proj", "mask_token")
        indices = [number for number, word in enumerate(part) if word in mine]
        if not indices:
            weights[name] = ours[mine]
        elif indices == [3]:
            weights[name] = value
        else:
            mine = mine.replace(f"attention.{part[indices[0]]}", "attn.qkv")
            weights[name] = ours[mine].chunk(3)[indices[0]]

    guest.load_state_dict(weights)
    with torch.no_grad():
        expected = guest(images()).last_hidden_state
        assert relative_difference(model.forward_features(images()), expected) < 1e-5


def test_patch_norms_apply_before_and_after_the_embedding():
    """The test follows the formula in the paper: `unfold` cuts the image into patches, which pass
    through LayerNorm, a linear layer and a second LayerNorm."""
    embed = randomise(VisionTransformer(SIZE, **TINY, dual_patch_norm=True)).patch_embed
    patches = torch.nn.functional.unfold(images(), 8, stride=8).transpose(1, 2)
    pixels = nn.functional.layer_norm(
        patches, patches.shape[2:], embed.norm_input.weight, embed.norm_input.bias, 1e-6
    )
    linear = pixels @ embed.proj.weight.flatten(1).T + embed.proj.bias
    expected = nn.functional.layer_norm(linear, (32,), embed.norm.weight, embed.norm.bias, 1e-6)
    assert relative_difference(embed(images()), expected) < 1e-5


def test_heads_may_have_any_width_and_dropout_may_be_limited_to_the_mlp():
    model = VisionTransformer(SIZE, **TINY, head_dim=12, proj_drop_rate=0.25, mlp_drop_rate=0.5)
    attn = model.blocks[0].attn
    assert (attn.qkv.weight.shape, attn.proj.weight.shape) == ((144, 32), (32, 48))
    assert (attn.proj_drop.p, model.blocks[0].mlp.drop1.p) == (0.25, 0.5)
    assert VisionTransformer(SIZE, **TINY, proj_drop_rate=0.25).blocks[0].mlp.drop1.p == 0.25
    q, _, _ = attn.project(torch.randn(1, 5, 32))
    assert q.shape == (1, 4, 5, 12)


def test_initial_values_have_the_spread_of_their_sources():
    torch.manual_seed(0)
    fields = {**TINY, "embed_dim": 512, "depth": 1, "reg_tokens": 16, "mlp_layer": "swiglu"}
    model = VisionTransformer(
        SIZE, **fields, global_pool="map", qk_norm=True, dual_patch_norm=True, init_head_bias=-6.9
    )
    assert model.reg_token.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].mlp.fc1_g.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert model.attn_pool.kv.weight.std().item() == pytest.approx(0.02, rel=0.01)
    # Truncating a normal distribution at two standard deviations reduces its standard deviation to
    # 0.88.
    cut = 0.8796 * 512**-0.5
    assert model.attn_pool.latent.std().item() == pytest.approx(cut, rel=0.15)
    assert model.attn_pool.latent.abs().max() <= 2 * 512**-0.5
    norms = (model.blocks[0].attn.q_norm, model.patch_embed.norm, model.patch_embed.norm_input)
    assert all((norm.weight == 1).all() and not norm.bias.any() for norm in norms)
    assert (model.head.bias == torch.tensor(-6.9)).all()
    assert not model.head.weight.any()


def test_initializes_all_parts():
    """Parameters that are moved from the meta device contain uninitialized memory. The test fills
    this memory with NaN."""
    for first, second in itertools.combinations_with_replacement(PARTS.values(), 2):
        fields: dict[str, object] = {**second, **first}
        if fields in WITHOUT_EFFECT:
            continue
        with torch.device("meta"):
            late = VisionTransformer(SIZE, **TINY, **fields)
        late.to_empty(device="cpu")
        tensors = [*late.parameters(), *late.buffers()]
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(math.nan)
        torch.manual_seed(0)
        late.init_weights()
        assert all(tensor.isfinite().all() for tensor in tensors), fields
        if first is second:
            model = VisionTransformer(SIZE, **TINY, **fields)
            torch.manual_seed(0)
            model.init_weights()
            made_at_once = (*model.parameters(), *model.buffers())
            assert all(map(torch.equal, tensors, made_at_once)), fields


def test_decays_only_weights_of_linear_maps():
    for fields in PARTS.values():
        with torch.device("meta"):
            model = VisionTransformer(SIZE, **TINY, **fields)
        linear = {
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, nn.Conv2d))
        }
        decayed = {name for name, tensor in model.named_parameters() if tensor.ndim > 1}
        assert decayed - model.no_weight_decay() == linear


def test_operations_equal_the_closed_form():
    fields = {"qk_norm": True, "reg_tokens": 3, "rope_type": "axial", "dual_patch_norm": True}
    with torch.device("meta"):
        model = VisionTransformer(
            SIZE, **TINY, **fields, head_dim=12, mlp_layer="swiglu", global_pool="map",
            patch_drop_rate=0.5,
        )  # fmt: skip
    dim, wide, hidden, pixels, patches = 32, 48, 128, 3 * 64, 24

    def expected(num_patches: int) -> int:
        n = 4 + num_patches
        block = 2 * n * dim * 4 * wide + 4 * n * n * wide + 3 * 2 * n * dim * hidden
        # Keys and values are computed for all patches. The query has its own projection, attention,
        # output projection and MLP.
        pool = 2 * num_patches * dim * 2 * dim + 4 * num_patches * dim + 2 * dim * 2 * dim
        pool += 2 * 2 * dim * hidden
        return 2 * patches * pixels * dim + 2 * block + pool + 2 * dim * 10

    assert flops_per_image(model) == expected(patches)
    # The query is the same for all images, so it is projected only once.
    shared = 2 * dim * dim
    assert flops_per_image(model, 4) == expected(patches // 2) - shared * 3 // 4


def test_so400m_has_the_same_shape_as_in_timm():
    with torch.device("meta"):
        model = create_model("vit_so400m14", class_token=False, global_pool="map")
        guest = create_model("timm/vit_so400m_patch14_siglip_224")
    shapes, expected = (
        {name: tensor.shape for name, tensor in network.state_dict().items()}
        for network in (model, guest)
    )
    assert shapes == expected


@pytest.mark.parametrize("rope_type", [None, "axial", "dinov3"])
def test_drops_random_patches_in_training_and_none_in_evaluation(rope_type):
    """The result must equal that of a model that gets only the remaining patches, at their original
    positions."""
    fields = {"patch_drop_rate": 0.4, "rope_type": rope_type, "reg_tokens": 2}
    model = randomise(VisionTransformer(SIZE, **TINY, **fields))
    plain = randomise(VisionTransformer(SIZE, **TINY, **{**fields, "patch_drop_rate": 0.0}))
    x = images()
    assert torch.equal(model(x), plain(x))
    seen = []
    hook = model.blocks.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    torch.manual_seed(0)
    logits = model.train()(x)
    hook.remove()
    tokens, table, _ = seen[0]
    all_tokens = plain.add_tokens(plain.patch_embed(x))
    assert tokens.shape == (3, 3 + int(24 * 0.6), 32)
    assert torch.equal(tokens[:, :3], all_tokens[:, :3])
    for row in range(3):
        places = [(all_tokens[row] == token).all(1).nonzero().item() for token in tokens[row]]
        assert len(set(places)) == len(places)
        turns = None
        if rope_type is not None:
            turns = plain.rope.table[:, :, :, places]
            assert torch.equal(table[:, row : row + 1], turns)
        alone = plain.norm(plain.blocks(all_tokens[row : row + 1, places], turns))
        assert relative_difference(logits[row : row + 1], plain.forward_head(alone)) < 1e-5


def test_drops_each_patch_equally_often():
    model = VisionTransformer(SIZE, **TINY, patch_drop_rate=0.5).train()
    torch.manual_seed(0)
    numbers = torch.arange(25.0).expand(4000, -1).unsqueeze(2)
    kept_numbers, _ = model.patch_drop(numbers, None)
    counts = kept_numbers.long().flatten().bincount(minlength=25)
    assert counts[0] == 4000
    deviation = math.sqrt(4000 * 0.5 * 0.5)
    assert (counts[1:] - 2000).abs().max() < 4.5 * deviation


@pytest.mark.parametrize("patch_drop_rate", [0.0, 0.5])
def test_subsets_of_samples_keep_the_rotations_of_their_samples(patch_drop_rate):
    """The drop rate is so low that each subset contains all samples, in a different order."""
    fields = {"rope_type": "axial", "reg_tokens": 1, "patch_drop_rate": patch_drop_rate}
    plain = randomise(VisionTransformer(SIZE, **TINY, **fields)).train()
    form = {"drop_path_rate": 0.01, "drop_path_form": "subset"}
    model = randomise(VisionTransformer(SIZE, **TINY, **fields, **form)).train()
    logits = []
    for network in (plain, model):
        torch.manual_seed(0)
        logits.append(network(images(6)))
    torch.testing.assert_close(logits[1], logits[0])


@pytest.mark.parametrize(
    "fields", [{"qk_norm": True, "norm_layer": "rmsnorm"}, {"rope_type": "axial"}]
)
def test_the_residual_path_is_fp32_under_autocast(fields):
    model = randomise(
        VisionTransformer(
            SIZE, **TINY, **fields, pos_embed="none", class_token=False, global_pool="avg"
        )
    )
    with torch.no_grad():
        exact = model(images())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tokens = model.forward_features(images())
            logits = model(images())
    assert tokens.dtype == logits.dtype == torch.float32
    assert relative_difference(logits, exact) < 0.05


@pytest.mark.parametrize(
    ("name", "theirs", "fields", "more"),
    [
        (
            "vit_b16",
            {"model_name": "vit_base_patch16_rope_reg1_gap_256"},
            {"class_token": False, "global_pool": "avg", "reg_tokens": 1, "ref_feat_shape": 16}
            | {"pos_embed": "none", "rope_type": "axial", "init_values": 1e-5},
            12 * 768,  # timm's model has no key biases
        ),
        (
            "vit_b16",
            {"model_name": "vit_base_patch16_dinov3", "global_pool": "token", "img_size": 256},
            {"reg_tokens": 4, "rope_type": "dinov3", "pos_embed": "none", "init_values": 1e-5}
            | {"qkv_bias": False},
            0,
        ),
        (
            "vit_g14",
            {"model_name": "vit_giant_patch14_dinov2", "img_size": 256, "patch_size": 16},
            {"embed_dim": 1536, "num_heads": 24, "mlp_layer": "swiglu_packed", "patch_size": 16}
            | {"mlp_ratio": 5.33334, "init_values": 1e-5},
            0,
        ),
    ],
)
def test_models_in_docs_recipes_have_as_many_weights_as_in_timm(name, theirs, fields, more):
    with torch.device("meta"):
        model = create_model(name, 256, 1000, **fields)
        guest = timm.create_model(num_classes=1000, **theirs)
    assert count_parameters(model) - count_parameters(guest) == more


@pytest.mark.parametrize("source", ["timm", "jax", "mha"])
def test_initial_weights_have_the_same_spread_as_in_timm(source):
    """The test compares the standard deviation and the largest value of each parameter over ten
    random initializations."""
    fields = {"embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 10}

    def draws(create: Callable[[], nn.Module]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        states = [create().state_dict() for _ in range(10)]
        return {name: torch.stack([state[name] for state in states]) for name in states[0]}

    ours = draws(lambda: VisionTransformer(32, 4, **fields, weight_init=source))

    def create_theirs() -> nn.Module:
        rule = "jax" if source == "jax" else ""
        theirs = TimmVisionTransformer(img_size=32, patch_size=4, **fields, weight_init=rule)
        if source == "mha":
            for block in theirs.blocks:
                block.attn.qkv.weight = nn.MultiheadAttention(64, 4).in_proj_weight
        return theirs

    theirs = draws(create_theirs)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if source == "jax" and name.endswith("qkv.weight"):
            # timm initializes query, key and value as a single matrix, but the source initializes
            # three separate matrices.
            expected = expected * 2**0.5
        spread = ours[name].std().item()
        assert spread == pytest.approx(expected.std().item(), rel=0.1, abs=1e-12), name
        if expected.abs().max() > 0 and expected.numel() > 5000:
            largest = expected.abs().max().item()
            assert ours[name].abs().max().item() == pytest.approx(largest, rel=0.25), name
