"""Write configs that let other programs open this project's models, or list unsupported features.

    Subject: a model, its config and its class names
      -> lacking         the features that a program lacks; [] if it can open the model
      -> timm_config     config.json of timm, which transformers also opens
         huggingface_configs   config.json and preprocessor_config.json of transformers

`View` describes the evaluation preprocessing (`vit.data.decode.crops`) in the terms of other
programs.

A field of `ModelConfig` that is not listed in this module is assumed to be unsupported by all
programs except ONNX, which stores a graph. Models with a new feature are therefore not exported
until this module lists the feature.
"""

from dataclasses import dataclass
from typing import Any, Self

from vit.config.schema import Config, ModelConfig
from vit.layers.norm import EPS
from vit.layers.presets import PRESETS, SIZES


@dataclass(frozen=True)
class View:
    """The preprocessing of a model's input images."""

    size: tuple[int, int]
    """The height and width of the input in pixels."""
    cover: tuple[int, int]
    """The minimum height and width of the resized image, or its exact size if `squash` is set."""
    squash: bool
    """Whether images are resized to exactly `cover`, which changes their aspect ratio."""
    interpolation: str
    """The interpolation, `bicubic` or `bilinear`, with antialiasing."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """`mean` and `std` per channel, for images scaled to [0, 1]."""
    crop_pct: float
    """The ratio of the center crop's side to the resized image's side, as in timm."""
    apply_exif: bool
    """Whether images are first rotated according to their EXIF orientation."""

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Return the evaluation preprocessing that `config` sets."""
        height, width = config.model.height_width()
        view = config.eval
        data = config.data
        channels = config.model.in_chans  # A single mean or std applies to all channels.

        return cls(
            size=(height, width),
            cover=(int(height / view.crop_pct), int(width / view.crop_pct)),
            squash=view.crop_mode == "squash",
            interpolation=data.interpolation,
            mean=data.mean * channels if len(data.mean) == 1 else data.mean,
            std=data.std * channels if len(data.std) == 1 else data.std,
            crop_pct=view.crop_pct,
            apply_exif=bool(view.apply_exif),
        )

    def sentence(self) -> str:
        """Describe the preprocessing steps in English, for programmers who reimplement them."""
        height, width = self.size
        method = f"{self.interpolation}, antialiased"
        if self.squash:
            resized = f"Resize it to {self.cover[0]}x{self.cover[1]} ({method})"
        elif self.cover[0] == self.cover[1]:
            resized = f"Resize it so that its shorter side has {self.cover[0]} pixels ({method})"
        else:
            resized = (
                f"Resize it, keeping its aspect ratio, to cover {self.cover[0]}x{self.cover[1]}"
                f" ({method})"
            )

        turned = "Rotate the image by its EXIF orientation. " if self.apply_exif else ""
        colors = "RGB" if len(self.mean) == 3 else "grayscale"
        mean = ", ".join(f"{value:g}" for value in self.mean)
        std = ", ".join(f"{value:g}" for value in self.std)

        return (
            f"{turned}Read the image as {colors}. {resized}. Crop the center of"
            f" {height}x{width} (height x width). Divide by 255, subtract the mean ({mean}), divide"
            f" by the standard deviation ({std}), each per channel. Inputs are float32, (batch,"
            f" {len(self.mean)}, {height}, {width})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `preprocessing.json`."""
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
    "name",
    "image_size",
    "in_chans",
    "num_classes",
    "patch_size",
    "embed_dim",
    "depth",
    "num_heads",
    "mlp_ratio",
    "mlp_layer",
    "qkv_bias",
    "class_token",
    "global_pool",
    "pos_embed",
    "drop_path_schedule",
    "drop_path_form",
    "init_values",
    "representation_size",
    "weight_init",
    "init_head_bias",
    "dist_token",
}
"""The `ModelConfig` fields that the tables below cover. Fields that end in `_rate` affect only
training."""

FEATURES = {
    "guest": "a model from timm (model.name=timm/...)",
    "no_class_token": "no class token (model.class_token=false)",
    "avg": "the mean of the patches before the norm (model.global_pool=avg)",
    "norm_avg": "the mean of the patches after the norm (model.global_pool=norm_avg)",
    "tanh": "the tanh approximation of GELU (model.mlp_layer=mlp_tanh)",
    "gated": "a gate in the MLP (model.mlp_layer)",
    "map": "a query that pools the patches (model.global_pool=map)",
    "no_positions": "no added positions (model.pos_embed=none)",
    "dist_token": "a distillation token and its head (model.dist_token)",
    "layer_scale": "LayerScale (model.init_values)",
    "no_qkv_bias": "no bias of queries, keys and values (model.qkv_bias=false)",
    "representation": "a representation layer (model.representation_size)",
    "not_square": "images or patches that are not square",
    "center_not_square": "a center crop of images that are not square",
    "gray": "grayscale images (model.in_chans=1)",
}

LACKS = {
    "timm": {"representation", "gated"},
    "torchvision": {*FEATURES} - {"representation", "center_not_square"},
    "huggingface": {
        "guest",
        "no_class_token",
        "avg",
        "norm_avg",
        "gated",
        "map",
        "no_positions",
        "layer_scale",
        "representation",
        "gray",
        "dist_token",
        "center_not_square",
    },
    "onnx": set[str](),
    "npz": {*FEATURES} - {"center_not_square"},
}


@dataclass(frozen=True)
class ProgramModel:
    """A trained model to export, with its config."""

    model: Any
    """The model with its weights, in evaluation mode on the CPU."""
    config: Config
    num_classes: int
    class_names: list[str]
    """The class names; [] if unknown. If the data had fewer classes than `num_classes`, there are
    fewer names."""

    @property
    def labels(self) -> list[str]:
        """Return one name per class, from which other programs infer the number of classes; [] if
        unknown."""
        names = self.class_names
        return names and names + [f"class {n}" for n in range(len(names), self.num_classes)]

    @property
    def view(self) -> View:
        """Return the preprocessing of input images."""
        return View.from_config(self.config)


def lacking(program: str, config: Config) -> list[str]:
    """List the model features in `config` that `program` does not support."""
    model = config.model
    height, width = model.height_width()
    patch = model.patch_size

    has = {
        "guest": model.name.startswith("timm/"),
        "no_class_token": model.class_token is False,
        "avg": model.global_pool == "avg",
        "norm_avg": model.global_pool == "norm_avg",
        "tanh": model.mlp_layer == "mlp_tanh",
        "gated": model.mlp_layer in ("swiglu", "swiglu_packed"),
        "map": model.global_pool == "map",
        "no_positions": model.pos_embed == "none",
        "dist_token": model.dist_token is True,
        "layer_scale": model.init_values is not None,
        "no_qkv_bias": model.qkv_bias is False,
        "representation": model.representation_size is not None,
        "not_square": height != width or (isinstance(patch, tuple) and patch[0] != patch[1]),
        "center_not_square": height != width and config.eval.crop_mode != "squash",
        "gray": model.in_chans == 1,
    }

    obstacles = [text for name, text in FEATURES.items() if has[name] and name in LACKS[program]]
    if program != "onnx":
        theirs = _TIMM_PARTS if program == "timm" else set[str]()
        obstacles += [f"model.{name}" for name in _unknown_fields(model) if name not in theirs]
    return obstacles


def _unknown_fields(model: ModelConfig) -> list[str]:
    """List the fields with non-default values that this module does not cover."""
    uncovered = {
        name: value
        for name, value in model.model_dump().items()
        if name not in KNOWN_FIELDS and not name.endswith("_rate")
    }
    return [
        name
        for name, value in uncovered.items()
        if value not in (type(model).model_fields[name].default, None, False)
    ]


def timm_config(subject: ProgramModel) -> dict[str, Any]:
    """Return a `config.json` that lets timm and transformers open the weights of `subject`.

    timm must support all features of the model (see `lacking`). Sizes are passed as arguments, so
    any ViT name of timm would work. The most similar name is used.
    """
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

    own = getattr(subject.model, "pretrained_cfg", None)  # timm's models state these names
    head = ["head", "head_dist"] if subject.config.model.dist_token else "head"
    for key, value in (("first_conv", "patch_embed.proj"), ("classifier", head)):
        settings[key] = own.get(key) if own else value

    content = {
        "architecture": name,
        "num_classes": subject.num_classes,
        "model_args": arguments,
        "pretrained_cfg": settings,
    }
    content |= {"label_names": subject.labels} if subject.labels else {}
    return content | _exif_entry(view)


def _exif_entry(view: View) -> dict[str, Any]:
    """Return an entry that explains EXIF handling to readers. Programs ignore this key."""
    return {"apply_exif": True} if view.apply_exif else {}


def _timm_arguments(subject: ProgramModel) -> tuple[str, dict[str, Any]]:
    """Return the most similar timm model name, and the arguments for the sizes of `subject`."""
    model = subject.model
    section = subject.config.model
    arguments = section.model_dump(exclude_none=True, include=_TIMM_ARGUMENTS)
    arguments |= (
        {"global_pool": "avg", "fc_norm": False} if section.global_pool == "norm_avg" else {}
    )
    arguments |= {"act_layer": "gelu_tanh"} if section.mlp_layer == "mlp_tanh" else {}

    if section.name.startswith("timm/"):
        name = section.name.removeprefix("timm/")
        sized = {"img_size": list(model.image_size)} if hasattr(model, "patch_embed") else {}
        return name, sized | arguments

    # A name such as vit_s16 consists of a preset and the patch size.
    preset = section.name.removeprefix("vit_").rstrip("0123456789")
    size = {ours: theirs for theirs, ours in SIZES.items()}.get(preset, "")
    name = f"vit_{size}_patch{model.patch_size[0]}_224"
    timm_names = _TIMM_NAMES
    if section.dist_token:
        name = f"deit_{size}_distilled_patch16_224"
        timm_names = _TIMM_DISTILLED

    # timm may change its defaults, so state even the arguments that the name implies.
    implied = {key: value for key, value in PRESETS[preset].items() if key == "mlp_ratio"}
    arguments = implied | arguments
    if section.pos_embed == "none":
        arguments["pos_embed"] = "none"
    shape = {
        "img_size": list(model.image_size),
        "patch_size": list(model.patch_size),
        "embed_dim": model.embed_dim,
        "depth": model.depth,
        "num_heads": model.blocks[0].attn.num_heads,
    }
    return name if name in timm_names else timm_names[0], arguments | shape


_TIMM_PARTS = {"qk_norm", "norm_layer", "reg_tokens", "no_embed_class"}
_TIMM_ARGUMENTS = {
    "in_chans",
    "patch_size",
    "embed_dim",
    "depth",
    "num_heads",
    "mlp_ratio",
    "qkv_bias",
    "class_token",
    "global_pool",
    "init_values",
    *_TIMM_PARTS,
}
"""The `ModelConfig` fields that timm's ViT accepts as arguments of the same name."""

_TIMM_NAMES: tuple[str, ...] = (
    "vit_base_patch16_224",
    "vit_base_patch32_224",
    "vit_base_patch8_224",
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_small_patch32_224",
    "vit_large_patch16_224",
    "vit_large_patch14_224",
    "vit_large_patch32_224",
    "vit_huge_patch14_224",
)
_TIMM_DISTILLED = tuple(f"deit_{size}_distilled_patch16_224" for size in ("base", "tiny", "small"))


def huggingface_configs(subject: ProgramModel) -> dict[str, dict[str, Any]]:
    """Return both config files for transformers' ViTForImageClassification, keyed by file name."""
    model = subject.model
    view = subject.view
    is_tanh = subject.config.model.mlp_layer == "mlp_tanh"
    names = subject.labels or [f"LABEL_{n}" for n in range(subject.num_classes)]

    config = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.blocks[0].attn.num_heads,
        "intermediate_size": model.blocks[0].mlp.fc1.out_features,
        "hidden_act": "gelu_pytorch_tanh" if is_tanh else "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": EPS,
        "image_size": _side_or_pair(model.image_size),
        "patch_size": _side_or_pair(model.patch_size),
        "num_channels": model.in_chans,
        "qkv_bias": model.blocks[0].attn.qkv.bias is not None,
        "id2label": {str(n): name for n, name in enumerate(names)},
        "label2id": {name: n for n, name in enumerate(names)},
        "dtype": "float32",
    }

    height, width = view.size
    cover_h, cover_w = view.cover
    # ViT's image processor can only squash. CLIP's image processor can crop the center, and works
    # with any model.
    processor = {
        "image_processor_type": "ViTImageProcessor" if view.squash else "CLIPImageProcessor",
        "do_resize": True,
        "size": {"height": cover_h, "width": cover_w}
        if view.squash
        else {"shortest_edge": cover_h},
        "resample": {"bilinear": 2, "bicubic": 3}[view.interpolation],  # Pillow's constants
        "do_center_crop": (height, width) != (cover_h, cover_w) or not view.squash,
        "crop_size": {"height": height, "width": width},
        "do_convert_rgb": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(view.mean),
        "image_std": list(view.std),
        **_exif_entry(view),
    }

    return {"config.json": config, "preprocessor_config.json": processor}


def _side_or_pair(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)
