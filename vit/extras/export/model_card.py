"""Write the model card of an exported folder: the model, its accuracy, and code to open it.

front matter      metadata for the Hugging Face Hub
table             model, data, accuracy with its interval, hashes, commands
preprocessing     one sentence
opening it        Python code that loads the folder
recipe            the settings that differ from the defaults
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vit.config import io as config_io
from vit.config.schema import Config
from vit.system.redact import shown
from vit.training.metrics import format_top5, interval95
from vit.training.model_summary import count_parameters
from vit.weights.hub import in_words
from vit.weights.programs import ProgramModel


@dataclass(frozen=True)
class Origin:
    """The origin of the exported weights."""

    name: str
    """The name of the run or the file."""
    export_command: str
    sha256: str
    """The sha256 of the source file."""
    step: int | None = None
    averaged: bool = False
    start: dict[str, Any] | None = None
    """The last `start` line of the run's metrics.jsonl."""
    evaluation: dict[str, Any] | None = None
    """The metrics.jsonl line of the evaluation at `step`."""
    published: str = ""
    """A description of published weights, or "" for weights trained in this run."""
    source: dict[str, str] | None = None
    """The Hugging Face Hub repository, commit and license of the exported weights."""
    repository: str = ""
    """The Hugging Face Hub repository to which the folder is pushed, or ""."""
    pictures: tuple[Path, ...] = ()
    """The pictures of the run's report to show on the card."""

    def begun_from(self) -> dict[str, str] | None:
        """Return the Hub repository, commit and license of the exported or initial weights."""
        return self.source or (self.start or {}).get("init_source")


_CARD = """---
{front_matter}---
# {name}

A Vision Transformer for image classification.

| | |
|---|---|
{rows}{pictures}
## Preprocessing

{preprocessing}

## Opening it

`pip install torch pillow {packages}`; then{where}:

```python
{code}```
{sections}"""

_APP = """
## Classify photos in the browser

```sh
hf download {repository} --local-dir model
cd model && pip install -r requirements.txt && python app.py
```
"""

_RECIPE = """
## Recipe

The settings that differ from the defaults of the training program:

```yaml
{settings}
```
"""


def model_card(
    program: str, subject: ProgramModel, origin: Origin, hashes: Mapping[str, str]
) -> str:
    """Return the text of README.md. hashes: the sha256 of each weights file, by file name."""
    config = subject.config
    height, width = config.model.height_width()
    rows = {
        "Model": f"`{config.model.name}` at {height}x{width} pixels (height x width),"
        f" {count_parameters(subject.model):,} parameters, {subject.num_classes:,} classes",
        "Data": _data(subject, origin),
        "Accuracy": _accuracy(origin, subject.num_classes),
        "Weights": _weights(origin),
        **{f"sha256 of `{file}`": f"`{sha256}`" for file, sha256 in hashes.items()},
        "sha256 of the source file": f"`{origin.sha256}`",
        "Exported by": f"`{origin.export_command}`",
    }

    source = origin.begun_from()
    if source is not None:
        rows["From" if origin.source else "Started from"] = in_words(source)

    start = origin.start
    if start is not None:
        rows["Trained by"] = (
            f"`{start.get('command')}`, commit {start.get('git')}, torch {start.get('torch')},"
            f" {start.get('world_size')} rank(s) on {start.get('device')}"
        )

    sections = []
    if origin.repository:
        sections.append(_APP.format(repository=origin.repository))
    if not origin.published:
        settings = config_io.dump_yaml(_without_defaults(config)).strip()
        sections.append(_RECIPE.format(settings=settings))

    return _CARD.format(
        front_matter=_front_matter(program, subject, origin),
        name=origin.name,
        rows="".join(f"| {name} | {_cell(text)} |\n" for name, text in rows.items()),
        pictures="".join(f"\n![Report: {file.stem}]({file.name})\n" for file in origin.pictures),
        preprocessing=subject.view.sentence(),
        packages=FORMATS[program].packages,
        where="" if origin.repository else ", in this folder",
        code=opening_code(program, subject, origin.repository),
        sections="".join(sections),
    )


def _front_matter(program: str, subject: ProgramModel, origin: Origin) -> str:
    """Return the metadata for the Hugging Face Hub as YAML.

    The license of weights from the Hub is included only if the weights are unchanged.
    """
    metadata: dict[str, Any] = {
        "library_name": FORMATS[program].library,
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", *FORMATS[program].tags],
    }

    top1 = (origin.evaluation or {}).get("top1_ema" if origin.averaged else "top1")
    if top1 is not None:
        data = shown(subject.config.data.root).rstrip("/").rpartition("/")[2]
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": data, "type": data, "split": "validation"},
            "metrics": [{"type": "accuracy", "value": round(top1 / 100, 6)}],
        }
        metadata["model-index"] = [{"name": origin.name, "results": [result]}]

    source = origin.begun_from()
    if source is not None:
        metadata["base_model"] = source["repository"]
        if origin.source and "license" in source:
            metadata["license"] = source["license"]
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)


def _cell(text: str) -> str:
    """Return the text of a table's cell, which must not end the cell or its row."""
    return text.replace("|", "\\|").replace("\n", " ")


def _data(subject: ProgramModel, origin: Origin) -> str:
    if origin.published:
        return "not known"
    data = subject.config.data
    text = f"{shown(data.root)}, trained on split `{data.train_split}`"
    plan = (origin.start or {}).get("plan") or {}
    if {"steps_per_epoch", "global_batch_size"} <= plan.keys():
        num_images = plan["steps_per_epoch"] * plan["global_batch_size"]
        num_images += plan.get("dropped_per_epoch", 0)
        text += f" of {num_images:,} images an epoch"
    return text


def _accuracy(origin: Origin, num_classes: int) -> str:
    """Return the top-1 and top-5 accuracy of the exported weights, if they were evaluated."""
    if origin.published:
        return origin.published

    line = origin.evaluation or {}
    suffix = "_ema" if origin.averaged else ""
    right, total = line.get(f"correct_top1{suffix}"), line.get("num_images")
    if right is None or not total:
        return "not measured at this step"

    right5 = line[f"correct_top5{suffix}"]
    low, high = interval95(right, total)
    return (
        f"top-1 {100 * right / total:.2f} % ({right:,} of {total:,} images of the validation split;"
        f" 95 % interval {low:.1f} to {high:.1f})"
        f"{format_top5(100 * right5 / total, right5, num_classes)}"
    )


def _weights(origin: Origin) -> str:
    if origin.step is None:
        return "trained elsewhere"
    kind = "exponential moving average of the weights" if origin.averaged else "weights"
    return f"{kind} after {origin.step:,} steps"


def _without_defaults(config: Config) -> dict[str, Any]:
    """Return the settings that differ from the defaults, except paths."""
    least = {"data": {"root": "-"}, "optim": {"name": config.optim.name}, "train": {"steps": 1}}
    plain = config_io.to_dict(config_io.from_dict(least, "defaults"))
    # The defaults of the other optim settings depend on the optimizer, so always include its name.
    values: dict[str, Any] = {"optim": {"name": config.optim.name}}
    for key, (_, new) in config_io.differences(plain, config_io.to_dict(config)).items():
        section, _, name = key.partition(".")
        if section not in ("run", "log") and key != "data.root":
            values.setdefault(section, {})[name] = shown(new) if isinstance(new, str) else new
    return values


# --- code -----------------------------------------------------------------------------------------

_TOP = """
share = logits.softmax(-1)[0]
for number in share.argsort(descending=True)[:5].tolist():
    print(f"{names[number]}: {share[number]:.1%}")
"""


def opening_code(program: str, subject: ProgramModel, repository: str = "") -> str:
    """Return Python code that loads the current folder, or `repository` from the Hugging Face Hub
    with timm, and classifies `photo.jpg`."""
    code = with_photo(FORMATS[program].code, subject, '"photo.jpg"')
    model, view = subject.model, subject.view
    values: dict[str, Any] = {
        "TIMM_NAME": f"hf-hub:{repository}" if repository else "local-dir:.",
        "REPOSITORY": repository or ".",
        "NUM_CLASSES": subject.num_classes,
        "RESIZED": list(view.cover) if view.squash else view.cover[0],
        "INTERPOLATION": view.interpolation.upper(),
        "COVER": view.cover,
        "SIZE": view.size,
        "SQUASH": view.squash,
        "MEAN": view.mean,
        "STD": view.std,
        "CROP_PCT": view.crop_pct,
    }

    if program in ("torchvision", "npz"):
        values |= {
            "IMAGE_SIZE": model.image_size[0],
            "PATCH_SIZE": model.patch_size[0],
            "DEPTH": model.depth,
            "HEADS": model.blocks[0].attn.num_heads,
            "WIDTH": model.embed_dim,
            "HIDDEN": model.blocks[0].mlp.fc1.out_features,
            "MLP_RATIO": subject.config.model.mlp_ratio or 4.0,
            "REPRESENTATION": subject.config.model.representation_size,
        }

    for name, value in values.items():
        code = code.replace(f"<{name}>", str(value))
    return code.strip() + "\n" + _TOP


def with_photo(code: str, subject: ProgramModel, path: str) -> str:
    """Replace <PHOTO> in `code` by an expression that opens the image `path` for the model."""
    photo = f"Image.open({path})"
    if subject.view.apply_exif:
        code = code.replace("import Image\n", "import Image, ImageOps\n")
        photo = f"ImageOps.exif_transpose({photo})"
    mode = "RGB" if len(subject.view.mean) == 3 else "L"
    return code.replace("<PHOTO>", f'{photo}.convert("{mode}")')


class Format(NamedTuple):
    """The library that opens an exported folder."""

    library: str
    """The library's name on the Hugging Face Hub."""
    packages: str
    """The packages that are needed in addition to torch and pillow."""
    code: str
    """Python code that loads the folder. `<NAME>` stands for a value of `opening_code`."""
    tags: tuple[str, ...] = ()
    """Additional tags for the Hugging Face Hub."""


FORMATS = {
    "timm": Format(
        library="timm",
        packages="timm",
        code="""
import timm
import torch
from PIL import Image

model = timm.create_model("<TIMM_NAME>", pretrained=True).eval()
data = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**data, is_training=False)
with torch.inference_mode():
    logits = model(transform(<PHOTO>)[None])
names = model.pretrained_cfg.get("label_names") or range(model.num_classes)
# The same for transformers: AutoModelForImageClassification.from_pretrained("<REPOSITORY>")
""",
        tags=("timm", "transformers"),
    ),
    "huggingface": Format(
        library="transformers",
        packages="transformers torchvision",
        code="""
import torch
from PIL import Image
from transformers import AutoImageProcessor, ViTForImageClassification

processor = AutoImageProcessor.from_pretrained(".")
model = ViTForImageClassification.from_pretrained(".").eval()
inputs = processor(<PHOTO>, return_tensors="pt")
with torch.inference_mode():
    logits = model(**inputs).logits
names = model.config.id2label
""",
    ),
    "torchvision": Format(
        library="torchvision",
        packages="torchvision safetensors",
        code="""
import json

import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.models.vision_transformer import VisionTransformer
from torchvision.transforms import v2

model = VisionTransformer(
    image_size=<IMAGE_SIZE>,
    patch_size=<PATCH_SIZE>,
    num_layers=<DEPTH>,
    num_heads=<HEADS>,
    hidden_dim=<WIDTH>,
    mlp_dim=<HIDDEN>,
    num_classes=<NUM_CLASSES>,
    representation_size=<REPRESENTATION>,
).eval()
model.load_state_dict(load_file("model.safetensors"))
transform = v2.Compose(
    [
        v2.PILToTensor(),
        v2.Resize(<RESIZED>, interpolation=v2.InterpolationMode.<INTERPOLATION>, antialias=True),
        v2.CenterCrop(<SIZE>),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(<MEAN>, <STD>),
    ]
)
with torch.inference_mode():
    logits = model(transform(<PHOTO>)[None])
names = json.load(open("preprocessing.json"))["class_names"] or range(<NUM_CLASSES>)
""",
    ),
    "npz": Format(
        library="timm",
        packages="timm",
        code="""
import json

import timm
import torch
from PIL import Image

# timm reads Google's files; in JAX, `numpy.load` gives the parameters by their names in Flax.
model = timm.create_model(
    "vit_base_patch16_224",
    img_size=<IMAGE_SIZE>,
    patch_size=<PATCH_SIZE>,
    embed_dim=<WIDTH>,
    depth=<DEPTH>,
    num_heads=<HEADS>,
    mlp_ratio=<MLP_RATIO>,
    num_classes=<NUM_CLASSES>,
).eval()
model.load_pretrained("model.npz")
transform = timm.data.create_transform(
    input_size=(3, *<SIZE>),
    interpolation="<INTERPOLATION>".lower(),
    crop_pct=<CROP_PCT>,
    crop_mode="squash" if <SQUASH> else "center",
    mean=<MEAN>,
    std=<STD>,
)
with torch.inference_mode():
    logits = model(transform(<PHOTO>)[None])
names = json.load(open("preprocessing.json"))["class_names"] or range(<NUM_CLASSES>)
""",
    ),
    "onnx": Format(
        library="onnx",
        packages="onnxruntime",
        code="""
import json

import numpy as np
import onnxruntime
import torch
from PIL import Image

image = <PHOTO>
cover, size, squash = <COVER>, <SIZE>, <SQUASH>
short = min(image.size)
scale = max(cover[0] / image.height, cover[1] / image.width)
if squash:
    resized = (cover[1], cover[0])  # Pillow: width first
elif cover[0] == cover[1]:
    resized = tuple(int(cover[0] * side / short) for side in image.size)
else:
    resized = tuple(round(side * scale) for side in image.size)
image = image.resize(resized, Image.Resampling.<INTERPOLATION>)
left, top = round((image.width - size[1]) / 2), round((image.height - size[0]) / 2)
image = image.crop((left, top, left + size[1], top + size[0]))
pixels = np.asarray(image, np.float32).reshape(*size, -1) / 255
pixels = (pixels - np.array(<MEAN>, np.float32)) / np.array(<STD>, np.float32)
images = pixels.transpose(2, 0, 1)[None]  # batches of any size work
session = onnxruntime.InferenceSession("model.onnx")
logits = torch.from_numpy(session.run(["logits"], {"images": images})[0])
names = json.load(open("preprocessing.json"))["class_names"] or range(<NUM_CLASSES>)
""",
    ),
}
