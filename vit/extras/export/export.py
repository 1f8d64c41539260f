"""Export weights to a folder that another library loads with its documented call.

    run, checkpoint or file -> model with its weights                      `read_subject`
      -> an error if the library does not support a part of the model      `check_holds`
      -> weights under the library's names, config, preprocessing, card    `export`
      -> check: compare ONNX outputs with the model's, or convert names back and compare weights
      -> for the Hugging Face Hub, also a page that classifies photos   `vit.extras.export.hub`

The folder is written under a hidden name and renamed once all files are complete.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit.config import io as config_io
from vit.extras.export.hub import write_app
from vit.extras.export.model_card import Origin, model_card
from vit.layers.parts import grid_size
from vit.model import create_model
from vit.system.files import (
    WeightsError,
    flush,
    locked_folder,
    remove_leftovers,
    sha256_of,
    temporary_beside,
    write_json,
)
from vit.weights.class_names import check_head
from vit.weights.files import LoadedWeights, load_weights, read_weights
from vit.weights.layouts import LAYOUTS, from_ours, to_ours
from vit.weights.positions import readings
from vit.weights.programs import PROGRAMS, ProgramModel, huggingface_configs, lacking, timm_config
from vit.weights.published import with_published_config
from vit.weights.save import save_weights
from vit.weights.transformers_config import ODD_MARGINS

ONNX_TOLERANCE = 1e-3
"""The maximum allowed difference between logits, relative to the largest logit. Logits differ
slightly, because kernels sum numbers in different orders."""
ONNX_FILE_BYTES = 2**31 - 2**20
"""The size limit of a protobuf file, just below 2 GiB. Larger weights are written to a second
file."""


def read_subject(path: str, model_name: str | None) -> tuple[ProgramModel, LoadedWeights, str]:
    """Return the model to export, its loaded weights, and a description of published weights.

    path: a run, a checkpoint, or another library's file or folder. model_name: the timm name of the
    model, needed if the file does not contain it. Raises ValueError.
    """
    loaded = read_weights(path)
    published = ""
    if loaded.config is None:
        loaded, published_model = with_published_config(loaded, model_name, data_root="unknown")
        check_head(loaded)
        if published_model.top1 is None:
            published = f"{published_model.name}, trained elsewhere: {published_model.source}"
        else:
            published = (
                f"{published_model.name}: top-1 {published_model.top1:.2f} % (published,"
                f" {published_model.source})"
            )
    elif model_name is not None:
        raise ValueError(
            f"--model {model_name}: {loaded.path} was saved by this project and contains its"
            " model's name: omit --model"
        )

    assert loaded.config is not None, "a config was added to published weights above"
    assert loaded.num_classes is not None, "the number of classes comes with the config"
    config = config_io.from_dict(loaded.config, str(loaded.path))
    model = create_model(config.model, num_classes=loaded.num_classes)

    size = _size_of_file(loaded, model)
    if size not in (None, model.image_size):
        config = config_io.with_settings(config, {"model.image_size": size})
        model = create_model(config.model, num_classes=loaded.num_classes)

    notes = load_weights(model, loaded.weights, loaded.grid_size)
    subject = ProgramModel(model.eval(), config, loaded.num_classes, loaded.class_names or [])
    return subject, replace(loaded, notes=(*loaded.notes, *notes)), published


def _size_of_file(loaded: LoadedWeights, model: Any) -> tuple[int, int] | None:
    """Return the image size (height, width) that a file's position embeddings were trained for.

    Return None if the size is unknown. The size may differ from the default size of `model`,
    because weights can be trained at any size.
    """
    grid = grid_size(model)
    target = model.state_dict()
    if grid is None or "pos_embed" not in loaded.weights.keys() & target.keys():
        return None

    possible = readings(loaded.weights, target, grid, loaded.grid_size)
    if not possible:
        return None
    rows, columns = possible[0].grid

    height, width = model.image_size
    return height * rows // grid[0], width * columns // grid[1]


def check_holds(target: str, subject: ProgramModel) -> None:
    """Raise WeightsError if the library that opens `target` does not support a part of the model.

    target: a library, or `hub`, where timm opens the folder. The error lists the unsupported parts,
    and the libraries that support them.
    """
    program = "timm" if target == "hub" else target
    missing = lacking(program, subject.config)
    if missing:
        able = [name for name in PROGRAMS if not lacking(name, subject.config)]
        raise WeightsError(
            f"--to {target}: the model has {' and '.join(missing)}, which {program} does not"
            f" support: export to {' or '.join(able)} instead"
        )


def export(
    program: str, subject: ProgramModel, origin: Origin, folder: Path, *, replaces: bool = False
) -> list[str]:
    """Write the folder atomically, and return lines that describe its files.

    If `replaces` is set, the folder replaces an earlier one. Raises WeightsError if the library
    does not support the model, the folder exists, or the disk is full.
    """
    check_holds(program, subject)
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_new and not replaces:
        raise WeightsError(f"{folder} already exists: remove it, or pass another folder with --out")

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent, folder.name)
        earlier = temporary_beside(folder)
        temporary, descriptor = locked_folder(folder)
        try:
            lines = _fill(program, subject, origin, temporary)
            temporary.chmod(0o777 & ~_umask())
            if folder.exists():
                os.rename(folder, earlier)
            os.rename(temporary, folder)
            flush(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(earlier, ignore_errors=True)
            os.close(descriptor)
    except OSError as error:
        raise WeightsError(
            f"{folder}: cannot be written ({error.strerror}); nothing was written: free some"
            " space or fix the permissions, and run the same command again"
        ) from error

    return lines


def _umask() -> int:
    """Return the umask of the process. Reading the umask requires setting it."""
    bits = os.umask(0o077)
    os.umask(bits)
    return bits


def _fill(program: str, subject: ProgramModel, origin: Origin, folder: Path) -> list[str]:
    """Write all files to the empty `folder`, and return the lines that describe them."""
    if program == "onnx":
        path, lines = _write_onnx(subject, folder)
    else:
        path, lines = _write_weights(subject, folder, program)

    if not (folder / "config.json").exists():
        write_json(
            folder / "preprocessing.json",
            {**subject.view.to_dict(), "class_names": subject.labels or None},
        )

    # ONNX stores weights above 2 GiB in a second file.
    hashes = {file.name: sha256_of(file) for file in [path, *folder.glob(f"{path.name}.data")]}

    if origin.repository:
        write_app(folder, subject, origin.name)
    for picture in origin.pictures:
        shutil.copyfile(picture, folder / picture.name)

    (folder / "README.md").write_text(
        model_card(program, subject, origin, hashes), encoding="utf-8"
    )

    for file in folder.iterdir():
        flush(file)
    flush(folder)
    return [*lines, *(f"sha256 of {name}: {sha256}" for name, sha256 in hashes.items())]


def _write_weights(subject: ProgramModel, folder: Path, program: str) -> tuple[Path, list[str]]:
    """Write the weights and config files for a library that loads tensors by name."""
    weights = subject.model.state_dict()
    line = f"{len(weights)} weights under their names in timm, which are ours"
    if program != "timm":
        weights, line = _renamed(program, subject)

    if program == "npz":
        path = folder / "model.npz"
        np.savez(path, **{name: tensor.numpy() for name, tensor in weights.items()})
    else:
        path = folder / "model.safetensors"
        save_weights(path, weights, {"format": "pt"})

    if program == "timm":
        write_json(folder / "config.json", timm_config(subject))
    if program == "huggingface":
        for name, content in huggingface_configs(subject).items():
            write_json(folder / name, content)

    crops = program == "huggingface" and not subject.view.squash
    return path, [line, ODD_MARGINS] if crops else [line]


def _renamed(program: str, subject: ProgramModel) -> tuple[dict[str, Tensor], str]:
    """Rename the weights for `program`, and check that the renaming can be reversed exactly."""
    ours = subject.model.state_dict()
    theirs, unmapped = from_ours(LAYOUTS[program], ours, subject.model.blocks[0].attn.num_heads)
    if unmapped:
        raise WeightsError(f"--to {program} has no name for {', '.join(unmapped)}: try --to onnx")
    converted, _ = to_ours(LAYOUTS[program], theirs)
    assert converted.keys() == ours.keys(), "every name converts back"
    assert all(torch.equal(converted[name], ours[name]) for name in ours), (
        "every value converts back"
    )
    return theirs, (
        f"{len(ours)} weights as {len(theirs)} under the names of {program}; converted back, equal"
        " to the bit"
    )


def _write_onnx(subject: ProgramModel, folder: Path) -> tuple[Path, list[str]]:
    """Write a graph for batches of any size, and compare onnxruntime's logits with the model's."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  torch's exporter imports it
    except ImportError as error:
        raise WeightsError(
            f"--to onnx needs {error.name}, which is not installed: pip install onnx onnxscript"
            " onnxruntime"
        ) from None

    path = folder / "model.onnx"
    model = subject.model
    images = torch.randn(2, model.in_chans, *model.image_size)
    num_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())

    torch.onnx.export(
        model,
        (images,),
        str(path),
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=num_bytes > ONNX_FILE_BYTES,
        verbose=False,
    )

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest = _largest_difference(model, session, [images, torch.randn(3, *images.shape[1:])])
    if not largest <= ONNX_TOLERANCE:  # also true for NaN
        raise WeightsError(
            f"--to onnx: the logits of onnxruntime {onnxruntime.__version__} differ from the"
            f" model's by {largest:.2g} of the largest logit, expected at most {ONNX_TOLERANCE:g}:"
            " please report it"
        )

    opset = next(iter(onnx.load(path, load_external_data=False).opset_import)).version
    return path, [
        f"opset {opset}; logits of onnxruntime {onnxruntime.__version__} differ from the model's by"
        f" at most {largest:.1e} of the largest logit, on 2 and 3 images"
    ]


def _largest_difference(model: nn.Module, session: Any, batches: list[Tensor]) -> float:
    """Return the largest difference between onnxruntime's logits and the model's.

    The difference is relative to the largest logit of the batch. It is NaN if a logit is NaN.
    """
    differences = []
    for images in batches:
        with torch.inference_mode():
            expected = model(images)
        logits = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
        largest_logit = expected.abs().max().clamp(min=1e-6)
        differences.append((logits - expected).abs().max() / largest_logit)

    return float(torch.stack(differences).max())  # Python's max() could drop a NaN
