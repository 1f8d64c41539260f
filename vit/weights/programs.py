"""What other programs need beside the weights to open a model of ours, and which of them can.

    Subject: a model, its config and its class names
      -> lacking         what a program has no place for, in words; () if it can hold the model
      -> timm_config     config.json of timm, which transformers opens, too
         huggingface_configs   config.json and preprocessor_config.json of transformers

`View` is how an image becomes the model's input in evaluation (`vit.data.decode.crops`), in the
words of other programs.

A field of `ModelConfig` that this module does not know counts as lacking everywhere but in ONNX,
which holds a graph and not names: a new part of the network is refused until it is added here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from vit.config.schema import Config, ModelConfig
from vit.layers.norm import EPS
from vit.layers.presets import PRESETS, SIZES


@dataclass(frozen=True)
class View:
    """The input of a model, made of an image of any size."""

    size: tuple[int, int]
    """Height and width of the input in pixels."""
    cover: tuple[int, int]
    """Height and width that the resized image covers; its own size with `squash`."""
    squash: bool
    """Whether the image is resized to `cover` without regard to its aspect."""
    interpolation: str
    """bicubic or bilinear, antialiased."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Per channel, of images scaled to [0, 1]."""
    crop_pct: float
    """timm's word: side of the centre over the side of the resized image."""
    apply_exif: bool
    """Whether the image is turned upright first."""

    @classmethod
    def from_config(cls, config: Config) -> View:
        """The view with which the runs of `config` are evaluated."""
        height, width = config.model.height_width()
        view = config.eval
        cover = int(height / view.crop_pct), int(width / view.crop_pct)
        crop_pct = view.crop_pct
        if view.resize_px is not None:
            cover = view.resize_px, view.resize_px
            crop_pct = height / view.resize_px
            while int(height / crop_pct) < view.resize_px:  # timm cuts the fraction off, too
                crop_pct = math.nextafter(crop_pct, 0)
        data = config.data
        channels = config.model.in_chans  # one number counts for all of them
        return cls(
            (height, width),
            cover,
            view.crop_mode == "squash",
            data.interpolation,
            data.mean * channels if len(data.mean) == 1 else data.mean,
            data.std * channels if len(data.std) == 1 else data.std,
            crop_pct,
            bool(view.apply_exif),
        )

    def sentence(self) -> str:
        """What to do with an image, for a person who writes the code."""
        height, width = self.size
        how = f"{self.interpolation}, antialiased"
        if self.squash:
            resized = f"Resize it to {self.cover[0]}x{self.cover[1]} ({how})"
        elif self.cover[0] == self.cover[1]:
            resized = f"Resize it so that its shorter side has {self.cover[0]} pixels ({how})"
        else:
            resized = f"Resize it, keeping its aspect, to cover {self.cover[0]}x{self.cover[1]}"
            resized += f" ({how})"
        turned = "Turn the image as its EXIF orientation says. " if self.apply_exif else ""
        colours = "RGB" if len(self.mean) == 3 else "grey"
        mean = ", ".join(f"{value:g}" for value in self.mean)
        std = ", ".join(f"{value:g}" for value in self.std)
        return (
            f"{turned}Read the image as {colours}. {resized}. Cut out the centre of"
            f" {height}x{width} (height x width). Divide by 255, subtract the mean ({mean}), divide"
            f" by the standard deviation ({std}), each per channel. Inputs are float32, (batch,"
            f" {len(self.mean)}, {height}, {width})."
        )

    def to_dict(self) -> dict[str, Any]:
        """The same for programs, as `preprocessing.json` has it."""
        return {
            "apply_exif": self.apply_exif,
            "input_size": [len(self.mean), *self.size],
            "resize": {
                "to" if self.squash else "cover": list(self.cover),
                "interpolation": self.interpolation,
                "antialias": True,
            },
            "center_crop": list(self.size),
            "scale": 1 / 255,
            "mean": list(self.mean),
            "std": list(self.std),
        }


PROGRAMS = ("timm", "torchvision", "huggingface", "onnx", "npz")
KNOWN_FIELDS = {
    *("name", "image_size", "in_chans", "num_classes", "patch_size", "embed_dim", "depth"),
    *("num_heads", "mlp_ratio", "qkv_bias", "class_token", "global_pool", "pos_embed"),
    *("drop_path_schedule", "drop_path_form", "init_values", "representation_size"),
    *("weight_init", "init_head_bias", "dist_token"),
}
"""Fields of `ModelConfig` that the tables below account for; others end with `_rate`, and matter in
training only."""
FEATURES = {
    "guest": "a model of timm's own (model.name=timm/...)",
    "no_class_token": "no class token (model.class_token=false)",
    "avg": "the mean of the patches before the norm (model.global_pool=avg)",
    "map": "a query that pools the patches (model.global_pool=map)",
    "no_positions": "no added positions (model.pos_embed=none)",
    "dist_token": "a distillation token and its head (model.dist_token)",
    "layer_scale": "LayerScale (model.init_values)",
    "no_qkv_bias": "no bias of queries, keys and values (model.qkv_bias=false)",
    "representation": "a representation layer (model.representation_size)",
    "not_square": "images or patches that are not square",
    "centre_not_square": "the centre cut out of images that are not square",
    "grey": "grey images (model.in_chans=1)",
}
LACKS = {
    "timm": {"representation"},
    "torchvision": {*FEATURES} - {"representation", "centre_not_square"},
    "huggingface": {
        *("guest", "no_class_token", "avg", "map", "no_positions", "layer_scale"),
        *("representation", "grey", "dist_token"),
        "centre_not_square",
    },
    "onnx": set[str](),
    "npz": {*FEATURES} - {"centre_not_square"},
}


@dataclass(frozen=True)
class Subject:
    """A model to hand over."""

    model: Any
    """With its weights, in evaluation mode, on the CPU."""
    config: Config
    num_classes: int
    class_names: list[str]
    """[] if there are none; fewer than `num_classes` if the data had fewer."""

    @property
    def labels(self) -> list[str]:
        """A name for each class, as programs want it that count their classes by names; or []."""
        known = self.class_names
        return known and known + [f"class {n}" for n in range(len(known), self.num_classes)]

    @property
    def view(self) -> View:
        """The model's input."""
        return View.from_config(self.config)


def lacking(program: str, config: Config) -> list[str]:
    """What the model of `config` has that `program` has no place for."""
    model = config.model
    squash = config.eval.crop_mode == "squash"
    height, width = model.height_width()
    patch = model.patch_size
    rectangular = height != width or (isinstance(patch, tuple) and patch[0] != patch[1])
    has = {
        "guest": model.name.startswith("timm/"),
        "no_class_token": model.class_token is False,
        "avg": model.global_pool == "avg",
        "map": model.global_pool == "map",
        "no_positions": model.pos_embed == "none",
        "dist_token": model.dist_token is True,
        "layer_scale": model.init_values is not None,
        "no_qkv_bias": model.qkv_bias is False,
        "representation": model.representation_size is not None,
        "not_square": rectangular,
        "centre_not_square": height != width and not squash,
        "grey": model.in_chans == 1,
    }
    found = [text for name, text in FEATURES.items() if has[name] and name in LACKS[program]]
    if program != "onnx":
        theirs = _TIMM_PARTS if program == "timm" else set[str]()
        found += [f"model.{name}" for name in _unknown_fields(model) if name not in theirs]
    return found


def _unknown_fields(model: ModelConfig) -> list[str]:
    """Fields with values of their own that nobody has told this module about."""
    fields = type(model).model_fields
    return [
        name
        for name, value in model.model_dump().items()
        if name not in KNOWN_FIELDS
        and not name.endswith("_rate")
        and value not in (fields[name].default, None, False)
    ]


def timm_config(subject: Subject) -> dict[str, Any] | None:
    """The `config.json` with which timm and transformers open the weights of `subject`.

    None if timm has no such model. Its models take the sizes as arguments, so any name of a ViT
    there would do; the nearest one is given.
    """
    config = subject.config
    if lacking("timm", config):
        return None
    view = subject.view
    name, arguments = _timm_arguments(subject)
    settings: dict[str, Any] = {
        "custom_load": False,
        "input_size": [len(view.mean), *view.size],
        "fixed_input_size": "img_size" in arguments,
        "interpolation": view.interpolation,
        "crop_pct": view.crop_pct,
        "crop_mode": "squash" if view.squash else "center",
        "mean": list(view.mean),
        "std": list(view.std),
        "num_classes": subject.num_classes,
    }
    own = getattr(subject.model, "pretrained_cfg", None)  # a guest of timm's knows its own layers
    head = ["head", "head_dist"] if config.model.dist_token else "head"
    for key, value in (("first_conv", "patch_embed.proj"), ("classifier", head)):
        settings[key] = own.get(key) if own else value
    content = {
        "architecture": name,
        "num_classes": subject.num_classes,
        "model_args": arguments,
        "pretrained_cfg": settings,
    }
    content |= {"label_names": subject.labels} if subject.labels else {}
    return content | _of_exif(view)


def _of_exif(view: View) -> dict[str, Any]:
    """What no program has a key for: most ignore EXIF, and those who read the file are told."""
    return {"apply_exif": True} if view.apply_exif else {}


def _timm_arguments(subject: Subject) -> tuple[str, dict[str, Any]]:
    """timm's name of a model, and the arguments that make it this one."""
    model = subject.model
    section = subject.config.model
    given = section.model_dump(exclude_none=True, include=_TIMM_ARGUMENTS)
    if section.name.startswith("timm/"):
        name = section.name.removeprefix("timm/")
        sized = {"img_size": list(model.image_size)} if hasattr(model, "patch_embed") else {}
        return name, sized | given
    sizes = {ours: theirs for theirs, ours in SIZES.items()}
    size = sizes.get(section.name.removeprefix("vit_").rstrip("0123456789"), "")
    name = f"vit_{size}_patch{model.patch_size[0]}_224"
    known = _TIMM_NAMES
    if section.dist_token:
        name = f"deit_{size}_distilled_patch16_224"
        known = _TIMM_DISTILLED
    # What follows from the name is stated, too: timm may change a default, these weights do not.
    preset = PRESETS[re.sub(r"^vit_|\d+$", "", section.name)]
    given = {key: value for key, value in preset.items() if key == "mlp_ratio"} | given
    if section.pos_embed == "none":
        given["pos_embed"] = "none"
    shape = {
        "img_size": list(model.image_size),
        "patch_size": list(model.patch_size),
        "embed_dim": model.embed_dim,
        "depth": model.depth,
        "num_heads": model.blocks[0].attn.num_heads,
    }
    return name if name in known else known[0], given | shape


_TIMM_PARTS = {"qk_norm", "norm_layer", "reg_tokens", "no_embed_class"}
_TIMM_ARGUMENTS = {
    *("in_chans", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias"),
    *("class_token", "global_pool", "init_values", *_TIMM_PARTS),
}
"""Fields of `ModelConfig` that timm's ViT has under the same name."""
_TIMM_NAMES: tuple[str, ...] = (
    *("vit_base_patch16_224", "vit_base_patch32_224", "vit_base_patch8_224"),
    *("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_small_patch32_224"),
    *("vit_large_patch16_224", "vit_large_patch14_224", "vit_large_patch32_224"),
    "vit_huge_patch14_224",
)
_TIMM_DISTILLED = tuple(f"deit_{size}_distilled_patch16_224" for size in ("base", "tiny", "small"))


def huggingface_configs(subject: Subject) -> dict[str, dict[str, Any]]:
    """`config.json` and `preprocessor_config.json` of transformers' ViTForImageClassification."""
    model = subject.model
    view = subject.view
    patch = model.patch_size
    names = subject.labels or [f"LABEL_{n}" for n in range(subject.num_classes)]
    config = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.blocks[0].attn.num_heads,
        "intermediate_size": model.blocks[0].mlp.fc1.out_features,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": EPS,
        "image_size": _side_or_pair(model.image_size),
        "patch_size": _side_or_pair(patch),
        "num_channels": model.in_chans,
        "qkv_bias": model.blocks[0].attn.qkv.bias is not None,
        "id2label": {str(n): name for n, name in enumerate(names)},
        "label2id": {name: n for n, name in enumerate(names)},
        "dtype": "float32",
    }
    height, width = view.size
    cover_h, cover_w = view.cover
    # ViT's own processor only squashes; CLIP's cuts out the centre, and knows nothing of models.
    processor = {
        "image_processor_type": "ViTImageProcessor" if view.squash else "CLIPImageProcessor",
        "do_resize": True,
        "size": {"height": cover_h, "width": cover_w}
        if view.squash
        else {"shortest_edge": cover_h},
        "resample": {"bilinear": 2, "bicubic": 3}[view.interpolation],  # Pillow's numbers
        "do_center_crop": (height, width) != (cover_h, cover_w) or not view.squash,
        "crop_size": {"height": height, "width": width},
        "do_convert_rgb": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(view.mean),
        "image_std": list(view.std),
        **_of_exif(view),
    }
    return {"config.json": config, "preprocessor_config.json": processor}


def _side_or_pair(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)
