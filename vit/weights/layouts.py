"""Convert ViT weight names between this project and other programs, with one table per program.

This project uses timm's names. A table maps each name to the other program's name. In a row, `{n}`
is the block number, and `{p}` is "weight" or "bias":

    "blocks.{n}.mlp.fc1.{p}": LayoutRow(("vit.encoder.layer.{n}.intermediate.dense.{p}",))

A `LayoutRow` may list several weights that this project concatenates (query, key, value), and may
state a different memory layout. `to_ours` and `from_ours` only rename, transpose, concatenate and
split, so the bits of each value do not change. A weight without a row cannot be exported to that
program.

    torchvision    pytorch/vision:torchvision/models/vision_transformer.py
    huggingface    huggingface/transformers:src/transformers/models/vit/modeling_vit.py
    npz            google-research/vision_transformer:vit_jax/models_vit.py; also reads
                   big_vision's names (google-research/big_vision:big_vision/models/vit.py)
    mmpretrain     open-mmlab/mmpretrain:mmpretrain/models/backbones/vision_transformer.py
    dino, dinov2   facebookresearch/dino:vision_transformer.py,
                   facebookresearch/dinov2:dinov2/models/vision_transformer.py

Programs that wrap a network in a class of their own add a prefix to its names (`model.`,
`net.backbone.`). `without_prefix` removes everything before the patch embedding's name.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path

import torch
from torch import Tensor

from vit.system.files import WeightsError
from vit.system.spelling import few
from vit.weights.formats import renamed


@dataclass(frozen=True)
class Turn:
    """A conversion of a weight's memory layout, in both directions.

    Flax stores input dimensions before output dimensions, and has a separate dimension for
    attention heads.
    """

    forth: Callable[[Tensor, int], Tensor]
    """Converts this project's weight, given the number of heads, to the other program's weight."""
    back: Callable[[Tensor], Tensor]


TURNS = {
    "same": Turn(lambda ours, heads: ours, lambda theirs: theirs),
    "linear": Turn(lambda ours, heads: ours.t(), lambda theirs: theirs.t()),
    "conv": Turn(
        lambda ours, heads: ours.permute(2, 3, 1, 0), lambda theirs: theirs.permute(3, 2, 0, 1)
    ),
    # (H*d, D) -> (D, H, d); a bias (H*d,) -> (H, d)
    "to_heads": Turn(
        lambda ours, heads: ours.t().unflatten(-1, (heads, -1)),
        lambda theirs: theirs.flatten(-2).t(),
    ),
    # (D, H*d) -> (H, d, D)
    "from_heads": Turn(
        lambda ours, heads: ours.t().unflatten(0, (heads, -1)),
        lambda theirs: theirs.flatten(0, 1).t(),
    ),
}


@dataclass(frozen=True)
class LayoutRow:
    """The name and memory layout that another program uses for one weight of this project.

    Args:
        theirs: One name, or the names of query, key and value.
        turn: A key of `TURNS`.
    """

    theirs: tuple[str, ...]
    turn: str = "same"


@dataclass(frozen=True)
class WeightsLayout:
    """The table of weight names for one other program."""

    name: str
    block: str
    """The prefix of weight names before the block number."""
    rows: dict[str, LayoutRow]
    sign: str
    """A regular expression that matches a weight name only in this program's files."""
    dropped: tuple[str, ...] = ()
    """The name prefixes of weights that classification does not use."""
    other_names: tuple[tuple[str, str], ...] = ()
    """(pattern, replacement) pairs that convert names of other versions to the names in `rows`."""


def _torchvision() -> WeightsLayout:
    """Describe the names of torchvision's VisionTransformer."""
    block = "encoder.layers.encoder_layer_{n}"
    return WeightsLayout(
        "torchvision",
        "encoder.layers.encoder_layer_",
        {
            "cls_token": LayoutRow(("class_token",)),
            "pos_embed": LayoutRow(("encoder.pos_embedding",)),
            "patch_embed.proj.{p}": LayoutRow(("conv_proj.{p}",)),
            "blocks.{n}.norm1.{p}": LayoutRow((f"{block}.ln_1.{{p}}",)),
            "blocks.{n}.attn.qkv.weight": LayoutRow((f"{block}.self_attention.in_proj_weight",)),
            "blocks.{n}.attn.qkv.bias": LayoutRow((f"{block}.self_attention.in_proj_bias",)),
            "blocks.{n}.attn.proj.{p}": LayoutRow((f"{block}.self_attention.out_proj.{{p}}",)),
            "blocks.{n}.norm2.{p}": LayoutRow((f"{block}.ln_2.{{p}}",)),
            "blocks.{n}.mlp.fc1.{p}": LayoutRow((f"{block}.mlp.0.{{p}}",)),
            "blocks.{n}.mlp.fc2.{p}": LayoutRow((f"{block}.mlp.3.{{p}}",)),
            "norm.{p}": LayoutRow(("encoder.ln.{p}",)),
            "pre_logits.fc.{p}": LayoutRow(("heads.pre_logits.{p}",)),
            "head.{p}": LayoutRow(("heads.head.{p}",)),
        },
        sign=r"conv_proj\.weight|encoder\.pos_embedding",
        other_names=(
            # Published files still use the names from before torchvision 0.13.
            (r"\.mlp\.linear_1\.", ".mlp.0."),
            (r"\.mlp\.linear_2\.", ".mlp.3."),
            # Tutorials replace the head by `model.heads = nn.Linear(...)`.
            (r"^heads\.(0\.)?(weight|bias)$", r"heads.head.\2"),
        ),
    )


def _huggingface() -> WeightsLayout:
    """Describe the names of transformers' ViTForImageClassification and ViTModel."""
    block = "vit.encoder.layer.{n}"
    attention = f"{block}.attention"
    qkv = tuple(f"{attention}.attention.{name}.{{p}}" for name in ("query", "key", "value"))

    return WeightsLayout(
        "huggingface",
        "vit.encoder.layer.",
        {
            "cls_token": LayoutRow(("vit.embeddings.cls_token",)),
            "pos_embed": LayoutRow(("vit.embeddings.position_embeddings",)),
            "patch_embed.proj.{p}": LayoutRow(("vit.embeddings.patch_embeddings.projection.{p}",)),
            "blocks.{n}.norm1.{p}": LayoutRow((f"{block}.layernorm_before.{{p}}",)),
            "blocks.{n}.attn.qkv.{p}": LayoutRow(qkv),
            "blocks.{n}.attn.proj.{p}": LayoutRow((f"{attention}.output.dense.{{p}}",)),
            "blocks.{n}.norm2.{p}": LayoutRow((f"{block}.layernorm_after.{{p}}",)),
            "blocks.{n}.mlp.fc1.{p}": LayoutRow((f"{block}.intermediate.dense.{{p}}",)),
            "blocks.{n}.mlp.fc2.{p}": LayoutRow((f"{block}.output.dense.{{p}}",)),
            "norm.{p}": LayoutRow(("vit.layernorm.{p}",)),
            "head.{p}": LayoutRow(("classifier.{p}",)),
        },
        sign=r"(vit\.)?embeddings\.patch_embeddings\.projection\.weight",
        dropped=("vit.pooler.", "vit.embeddings.mask_token", "decoder."),
        other_names=(
            (r"^(embeddings|encoder|layers|layernorm|pooler)\.", r"vit.\1."),  # ViTModel, no head
            # Version 5 uses these names in memory, but its files still have the names in `rows`.
            (r"^vit\.layers\.", "vit.encoder.layer."),
            (r"\.attention\.q_proj\.", ".attention.attention.query."),
            (r"\.attention\.k_proj\.", ".attention.attention.key."),
            (r"\.attention\.v_proj\.", ".attention.attention.value."),
            (r"\.attention\.o_proj\.", ".attention.output.dense."),
            (r"\.mlp\.fc1\.", ".intermediate.dense."),
            (r"\.mlp\.fc2\.", ".output.dense."),
        ),
    )


def _npz() -> WeightsLayout:
    """Describe the `.npz` files of google-research/vision_transformer and big_vision."""
    block = "Transformer/encoderblock_{n}"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    kernels = tuple(f"{attention}/{name}/kernel" for name in ("query", "key", "value"))
    biases = tuple(f"{attention}/{name}/bias" for name in ("query", "key", "value"))

    rows = {
        "cls_token": LayoutRow(("cls",)),
        "pos_embed": LayoutRow(("Transformer/posembed_input/pos_embedding",)),
        "patch_embed.proj.weight": LayoutRow(("embedding/kernel",), "conv"),
        "patch_embed.proj.bias": LayoutRow(("embedding/bias",)),
        "blocks.{n}.attn.qkv.weight": LayoutRow(kernels, "to_heads"),
        "blocks.{n}.attn.qkv.bias": LayoutRow(biases, "to_heads"),
        "blocks.{n}.attn.proj.weight": LayoutRow((f"{attention}/out/kernel",), "from_heads"),
        "blocks.{n}.attn.proj.bias": LayoutRow((f"{attention}/out/bias",)),
    }

    linear = {
        "blocks.{n}.mlp.fc1": f"{block}/MlpBlock_3/Dense_0",
        "blocks.{n}.mlp.fc2": f"{block}/MlpBlock_3/Dense_1",
        "pre_logits.fc": "pre_logits",
        "head": "head",
    }
    norms = {
        "blocks.{n}.norm1": f"{block}/LayerNorm_0",
        "blocks.{n}.norm2": f"{block}/LayerNorm_2",
        "norm": "Transformer/encoder_norm",
    }

    for ours, theirs in linear.items():
        rows[f"{ours}.weight"] = LayoutRow((f"{theirs}/kernel",), "linear")
        rows[f"{ours}.bias"] = LayoutRow((f"{theirs}/bias",))
    for ours, theirs in norms.items():
        rows[f"{ours}.weight"] = LayoutRow((f"{theirs}/scale",))
        rows[f"{ours}.bias"] = LayoutRow((f"{theirs}/bias",))

    return WeightsLayout(
        "npz",
        "Transformer/encoderblock_",
        rows,
        sign=r"(opt/target/|params/(img/)?)?embedding/kernel",
        dropped=("opt/", "params/"),
        other_names=(
            (r"^(opt/target/|params/img/|params/)", ""),
            # names in big_vision
            (r"^pos_embedding$", "Transformer/posembed_input/pos_embedding"),
            (
                r"(encoderblock\w*)/MultiHeadDotProductAttention_0/",
                r"\1/MultiHeadDotProductAttention_1/",
            ),
            (r"(encoderblock\w*)/MlpBlock_0/", r"\1/MlpBlock_3/"),
            (r"(encoderblock\w*)/LayerNorm_1/", r"\1/LayerNorm_2/"),
        ),
    )


def _mmpretrain() -> WeightsLayout:
    """Describe the names of mmpretrain's VisionTransformer."""
    block = "layers.{n}"
    return WeightsLayout(
        "mmpretrain",
        "layers.",
        {
            **{name: LayoutRow((name,)) for name in ("cls_token", "dist_token", "pos_embed")},
            "patch_embed.proj.{p}": LayoutRow(("patch_embed.projection.{p}",)),
            "blocks.{n}.norm1.{p}": LayoutRow((f"{block}.ln1.{{p}}",)),
            "blocks.{n}.attn.qkv.{p}": LayoutRow((f"{block}.attn.qkv.{{p}}",)),
            "blocks.{n}.attn.proj.{p}": LayoutRow((f"{block}.attn.proj.{{p}}",)),
            "blocks.{n}.ls1.gamma": LayoutRow((f"{block}.attn.gamma1.weight",)),
            "blocks.{n}.norm2.{p}": LayoutRow((f"{block}.ln2.{{p}}",)),
            "blocks.{n}.mlp.fc1.{p}": LayoutRow((f"{block}.ffn.layers.0.0.{{p}}",)),
            "blocks.{n}.mlp.fc2.{p}": LayoutRow((f"{block}.ffn.layers.1.{{p}}",)),
            "blocks.{n}.ls2.gamma": LayoutRow((f"{block}.ffn.gamma2.weight",)),
            "norm.{p}": LayoutRow(("ln1.{p}",)),
            "fc_norm.{p}": LayoutRow(("ln2.{p}",)),
            "pre_logits.fc.{p}": LayoutRow(("head.layers.pre_logits.{p}",)),
            "head.{p}": LayoutRow(("head.layers.head.{p}",)),
            "head_dist.{p}": LayoutRow(("head.layers.head_dist.{p}",)),
        },
        sign=r"patch_embed\.projection\.weight",
        dropped=("mask_token",),
        other_names=(
            (r"^head\.fc\.", "head.layers.head."),
            (r"\.gamma2\.scale$", ".gamma2.weight"),
        ),
    )


_MAE = WeightsLayout(
    "mae", "blocks.", {}, sign="decoder_pos_embed", dropped=("decoder_", "mask_token")
)
"""The layout of MAE's pre-training weights: timm's names and a decoder."""

_DINOV2 = WeightsLayout(
    "dinov2",
    "blocks.",
    {},
    sign="mask_token",
    dropped=("mask_token",),
    other_names=(
        (r"^register_tokens$", "reg_token"),
        (r"\.mlp\.w12\.", ".mlp.fc1."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    ),
)
"""The layout of DINOv2's backbones: timm's names and a mask token."""

_DINO = WeightsLayout(
    "dino",
    "blocks.",
    {},
    sign=r"(dino_)?head\.last_layer\..*",
    dropped=("head.mlp.", "head.last_layer.", "dino_head.", "ibot_head.", "mask_token"),
)
"""The layout of DINO's training checkpoints: timm's names and projection heads."""

LAYOUTS = {
    layout.name: layout
    for layout in (_torchvision(), _huggingface(), _npz(), _mmpretrain(), _MAE, _DINO, _DINOV2)
}


FAMILIES = {
    r"(.*\.)?(visual\.class_embedding|visual\.conv1\.weight|logit_scale|text_model\..*"
    r"|vision_model\.embeddings\..*|embeddings\.class_embedding)": "CLIP or SigLIP",
    r"(.*\.)?encoder\.layer\.\d+\.layer_scale1\.lambda1": "DINOv2 of transformers",
    r"(.*\.)?(teacher|student)\.backbone\..*": "DINO's training",
    r"(.*\.)?relative_position_bias_table": "Swin or BEiT",
    r"(.*\.)?layer[1-4]\.0\.conv1\.weight": "a ResNet",
    r"(.*\.)?(features|stages|blocks)\.\d.*\.(conv_dw|dwconv|block\.0\.0)\.weight": "a"
    " convolutional network",
    r"(.*\.)?(to_qkv|to_patch_embedding\..*)\.weight": "vit-pytorch",
}
"""Maps patterns of weight names to the other model families that they identify."""


def family_of(names: Iterable[str]) -> str:
    """Return the non-ViT model family that uses `names`, or "" if unknown."""
    return FAMILIES.get(_first_sign(FAMILIES, names), "")


def layout_of(names: Iterable[str]) -> WeightsLayout | None:
    """Return the layout that uses `names`, or None if the names are timm's or unknown."""
    by_sign = {layout.sign: layout for layout in LAYOUTS.values()}
    return by_sign.get(_first_sign(by_sign, names))


def without_prefix(
    tensors: Mapping[str, Tensor], path: Path
) -> tuple[dict[str, Tensor], list[str]]:
    """Return one network's weights without the prefix of their names, and a note about the prefix.

    Among several networks, an average is preferred, as in timm. Raises WeightsError if none or
    several of them are averages.
    """
    signs = (each.sign for each in LAYOUTS.values() if each.rows)
    patches = "|".join((r"patch_embed\.proj\.weight", *signs))
    found = (re.fullmatch(rf"(?P<prefix>(?:.+?\.)??)(?:{patches})", name) for name in tensors)
    prefixes = sorted({match["prefix"] for match in found if match})
    if not prefixes or "" in prefixes:
        return dict(tensors), []

    chosen = [
        each
        for each in prefixes
        if len(prefixes) == 1 or re.search(r"(^|[._])(ema|averaged?)[._]", each)
    ]
    if len(chosen) != 1:
        raise WeightsError(
            f"{path} contains {len(prefixes)} networks ({few(prefixes)}): save only one of them"
        )

    [prefix] = chosen
    others = tuple(each for each in prefixes if each != prefix)
    own = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) or not name.startswith(others)
    }

    def rename(name: str) -> str:
        """Return `name` without the parts that it shares with the beginning of `prefix`.

        The class around the network may contain the head: net.backbone.norm.bias, net.head.bias.
        """
        parts = name.split(".")
        num_shared = sum(takewhile(bool, map(eq, parts, prefix.split("."))))
        return ".".join(parts[num_shared:])

    num_prefixed = sum(name.startswith(prefix) for name in own)
    which = "all" if num_prefixed == len(own) else f"{num_prefixed} of {len(own)}"
    note = (
        f"{prefix} is used, {few(others)} in the same file is ignored"
        if others
        else f"the prefix {prefix} of {which} names is removed"
    )
    return renamed(own, rename, path), [note]


def _first_sign(signs: Iterable[str], names: Iterable[str]) -> str:
    """Return the first pattern in `signs` that matches any of `names`, or "" if none does."""
    text = "\n".join(names)
    return next((sign for sign in signs if re.search(rf"(?m)^(?:{sign})$", text)), "")


def to_ours(
    layout: WeightsLayout, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights under this project's names, and a note about dropped weights.

    Weights without a row keep their names, so that `load_weights` reports them as unknown.
    """
    source: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, current in layout.other_names:
            name = re.sub(pattern, current, name)
        source |= _one_of_each_block(name, tensor)

    ours: dict[str, Tensor] = {}
    for name, row in _each(layout, source, layout.block):
        if all(theirs in source for theirs in row.theirs):
            pieces = [TURNS[row.turn].back(source.pop(theirs)) for theirs in row.theirs]
            ours[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    dropped = [name for name in source if layout.dropped and name.startswith(layout.dropped)]
    notes = [f"dropped, not used for classification: {few(dropped)}"] if dropped else []
    return ours | {name: source[name] for name in source if name not in dropped}, notes


def from_ours(
    layout: WeightsLayout, weights: Mapping[str, Tensor], num_heads: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights under the other program's names, and the names that have no row."""
    remaining = dict(weights)
    theirs: dict[str, Tensor] = {}
    for name, row in _each(layout, weights, "blocks."):
        if name in remaining:
            pieces = remaining.pop(name).chunk(len(row.theirs))
            for their_name, piece in zip(row.theirs, pieces, strict=True):
                theirs[their_name] = TURNS[row.turn].forth(piece, num_heads).contiguous()
    return theirs, list(remaining)


def _one_of_each_block(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return {name: tensor}. A big_vision tensor, which stacks all blocks, is split by block."""
    begin, stacked, end = name.partition("Transformer/encoderblock/")
    if not stacked:
        return {name: tensor}
    return {f"{begin}Transformer/encoderblock_{n}/{end}": block for n, block in enumerate(tensor)}


def _each(
    layout: WeightsLayout, names: Iterable[str], begin: str
) -> Iterator[tuple[str, LayoutRow]]:
    """Yield all rows for the blocks in `names`, with block numbers and parts filled in.

    begin: the prefix of `names` before the block number.
    """
    pattern = re.compile(rf"{re.escape(begin)}(\d+)\b")
    numbers = [int(match[1]) for match in map(pattern.match, names) if match]
    for ours, row in layout.rows.items():
        for number in range(max(numbers, default=-1) + 1) if "{n}" in ours else (0,):
            for part in ("weight", "bias") if "{p}" in ours else ("",):
                theirs = tuple(name.format(n=number, p=part) for name in row.theirs)
                yield ours.format(n=number, p=part), LayoutRow(theirs, row.turn)
