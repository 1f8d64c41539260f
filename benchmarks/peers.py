"""Define the contestants of benchmarks/loader.py. They create 224 px batches as their documentation
shows.

    python benchmarks/peers.py NAME PLACE NUM_IMAGES WORKERS BATCH_SIZE       started by loader.py

Each contestant runs in a separate process and waits for requests. A line "train 5" or "eval 5"
requests 5 batches. The answer is a JSON line with the number of images, the seconds and the type.
Training uses a random-resized crop and a flip. Evaluation resizes to 256 and crops the center,
bilinear and antialiased. A contestant's data format is written on the first request.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from inputs.loader_data import NUM_WINDOWS, Data, cut_windows

from vit.data.decode import native

SIZE = 224
RESIZE = 256
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
Batches = Iterator[tuple[Any, Any]]


class Task(NamedTuple):
    """The data, the number of workers and the kind of batches."""

    data: Data
    workers: int
    batch_size: int
    train: bool


def for_ever(epoch: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from epoch()


# ---- ours ----------------------------------------------------------------------------------------


def ours(task: Task, shards: str, copies: int = 1) -> Batches:
    """Yield batches as made in training (`vit.train`) or in `vit.evaluation.evaluate`.

    copies: the number of augmented versions per image in a training batch.
    """
    from vit.config.schema import AugmentConfig, EvalConfig
    from vit.data.batches import EvalBatches, TrainBatches
    from vit.data.image_format import ImageFormat
    from vit.data.loader import Loader
    from vit.data.order import make_order
    from vit.data.storage.opening import open_split

    split = open_split(task.data.place / shards, "train")
    image = ImageFormat((SIZE, SIZE), 3, "bilinear")
    if task.train:
        order = make_order(split.num_samples, task.batch_size, aug_repeats=copies)
        batches = TrainBatches(split, order, AugmentConfig(), image)
        with Loader(batches, 0, sys.maxsize, num_workers=task.workers) as loader:
            for batch in loader:
                yield batch.images, batch.labels
    views = EvalBatches(split, image, EvalConfig(crop_pct=SIZE / RESIZE), task.batch_size)
    while True:
        with Loader(views, 0, len(views), num_workers=task.workers) as loader:
            for number, batch in enumerate(loader):
                num_images = views.num_filled(number)
                yield batch.images[:num_images], batch.labels[:num_images]


untouched = partial(ours, shards="shards")
marked = partial(ours, shards="marked")
marked_copies = partial(ours, shards="marked", copies=2)


# ---- torchvision, and loaders that use its transforms --------------------------------------------


def data_loader(task: Task, dataset: Any, **options: Any) -> Batches:
    from torch.utils.data import DataLoader

    if task.workers:
        options |= {"persistent_workers": True, "prefetch_factor": 2}
    loader = DataLoader(
        dataset, task.batch_size, num_workers=task.workers, drop_last=True, **options
    )
    return for_ever(lambda: loader)


def crop(transforms: Any, train: bool) -> list[Any]:
    """Return the transforms for crop and flip. transforms: torchvision.transforms, or its v2."""
    if train:
        return [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    return [transforms.Resize(RESIZE), transforms.CenterCrop(SIZE)]


def transform_v1(train: bool) -> Any:
    from torchvision import transforms

    steps = [*crop(transforms, train), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    return transforms.Compose(steps)


def image_folder(task: Task, transform: Any = None, **options: Any) -> Batches:
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(task.data.folder, transform, **options)
    return data_loader(task, dataset, shuffle=task.train)


def torchvision_v1(task: Task) -> Batches:
    return image_folder(task, transform_v1(task.train))


def torchvision_v2(task: Task) -> Batches:
    import torch
    from torchvision.transforms import v2

    as_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return image_folder(task, v2.Compose([v2.ToImage(), *crop(v2, task.train), *as_float]))


def torchvision_tensor(task: Task) -> Batches:
    """Yield uint8 batches decoded by torchvision, which must still be normalized on the device."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms import v2

    def load(path: str) -> Any:
        return decode_jpeg(read_file(path), ImageReadMode.RGB)

    return image_folder(task, v2.Compose(crop(v2, task.train)), loader=load)


def torchcodec(task: Task) -> Batches:
    """Yield uint8 batches. torchvision 0.29 deprecates its own decoder in favor of this one."""
    from torchcodec.decoders import decode_jpeg
    from torchvision.transforms import v2

    return image_folder(
        task, v2.Compose(crop(v2, task.train)), loader=partial(decode_jpeg, mode="RGB")
    )


def grain(task: Task) -> Batches:
    """Yield NumPy batches of a torchvision data set, each process with one thread."""
    import grain
    import torch
    from torchvision.datasets import ImageFolder

    transform = transform_v1(task.train)

    class Transform(grain.transforms.RandomMap):
        def random_map(self, element: Any, rng: Any) -> Any:
            torch.manual_seed(rng.integers(2**63))
            return transform(element[0]).numpy(), element[1]

    samples = grain.MapDataset.source(ImageFolder(task.data.folder)).seed(0)
    samples = samples.shuffle() if task.train else samples
    batches = (
        samples.repeat()
        .random_map(Transform())
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=task.batch_size))
        .batch(task.batch_size, drop_remainder=True)
    )
    if task.workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=task.workers))
    return iter(batches)


def timm(task: Task) -> Batches:
    import torch
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", root=str(task.data.folder)),
        (3, SIZE, SIZE),
        task.batch_size,
        is_training=task.train,
        color_jitter=0.0,
        interpolation="bilinear",
        crop_pct=SIZE / RESIZE,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
        pin_memory=False,
        device=torch.device("cpu"),
    )
    return for_ever(lambda: loader)


def webdataset(task: Task) -> Batches:
    import webdataset as wds

    shards = [str(path) for path in sorted(task.data.shards.glob("*.tar"))]
    samples = wds.WebDataset(shards, shardshuffle=100 if task.train else False, empty_check=False)
    samples = samples.shuffle(1000) if task.train else samples
    decoded = samples.decode("pil").to_tuple("jpg", "cls").map_tuple(transform_v1(task.train), int)
    return data_loader(task, decoded)


def energon(task: Task) -> Batches:
    """Yield batches of the same shards. `energon prepare` adds an index next to links to them."""
    from megatron.energon import (
        DefaultTaskEncoder,
        SampleDecoder,
        WorkerConfig,
        get_loader,
        get_train_dataset,
        get_val_dataset,
    )

    def write(out: Path) -> None:
        out.mkdir()
        for shard in task.data.shards.glob("*.tar"):
            (out / shard.name).symlink_to(shard.resolve())
        fields = json.dumps({"image": "jpg", "label": "cls"})
        options = ["--non-interactive", "--split-ratio", "1,0,0", "--field-map", fields]
        options += ["--sample-type", "ImageClassificationSample"]
        program = Path(sys.executable).with_name("energon")
        subprocess.run([program, "prepare", out, *options], check=True)

    transform = transform_v1(task.train)

    class Encoder(DefaultTaskEncoder):
        decoder = SampleDecoder(image_decode="pilrgb")

        def encode_sample(self, sample: Any) -> Any:
            sample.image = transform(sample.image)
            return sample

    options = {
        "split_part": "train",
        "worker_config": WorkerConfig(rank=0, world_size=1, num_workers=task.workers),
        "batch_size": task.batch_size,
        "task_encoder": Encoder(),
    }
    folder = task.data.made("energon", write)
    if task.train:
        samples = get_train_dataset(
            folder, shuffle_buffer_size=100, max_samples_per_sequence=100, **options
        )
    else:
        samples = get_val_dataset(folder, **options)
    loader = get_loader(samples)
    return ((batch.image, batch.label) for batch in for_ever(lambda: loader))


def opencv(task: Task) -> Batches:
    import random

    import cv2
    import numpy as np
    import torch
    from torchvision.transforms import RandomResizedCrop

    cv2.setNumThreads(0)  # as is usual in worker processes

    def load(path: str) -> Any:
        pixels = cv2.imread(path, cv2.IMREAD_COLOR_RGB)
        height, width = pixels.shape[:2]
        if task.train:
            top, left, h, w = RandomResizedCrop.get_params(
                torch.empty(3, height, width), (0.08, 1.0), (3 / 4, 4 / 3)
            )
            # Use INTER_AREA, because it is antialiased.
            pixels = cv2.resize(
                pixels[top : top + h, left : left + w], (SIZE, SIZE), interpolation=cv2.INTER_AREA
            )
            if random.random() < 0.5:
                pixels = pixels[:, ::-1]
        else:
            scale = RESIZE / min(height, width)
            pixels = cv2.resize(
                pixels, (round(width * scale), round(height * scale)), interpolation=cv2.INTER_AREA
            )
            top, left = (pixels.shape[0] - SIZE) // 2, (pixels.shape[1] - SIZE) // 2
            pixels = pixels[top : top + SIZE, left : left + SIZE]
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    return image_folder(task, loader=load)


# ---- loaders with their own formats --------------------------------------------------------------


def encoded_samples(data: Data) -> Iterator[dict[str, Any]]:
    for file in data.files:
        yield {"image": file.read_bytes(), "label": int(file.parent.name[1:])}


def with_pixels(dataset: type, train: bool) -> type:
    """Return a data set class that decodes `encoded_samples` with Pillow and transforms them."""
    from PIL import Image

    transform = transform_v1(train)

    class Samples(dataset):
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return transform(Image.open(io.BytesIO(sample["image"])).convert("RGB")), sample[
                "label"
            ]

    return Samples


def mosaicml(task: Task) -> Batches:
    from streaming import MDSWriter, StreamingDataset

    def write(out: Path) -> None:
        with MDSWriter(out=str(out), columns={"image": "bytes", "label": "int"}) as writer:
            for sample in encoded_samples(task.data):
                writer.write(sample)

    samples = with_pixels(StreamingDataset, task.train)(
        local=str(task.data.made("mds", write)), shuffle=task.train, batch_size=task.batch_size
    )
    return data_loader(task, samples)


def litdata(task: Task) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    def write(out: Path) -> None:
        out.mkdir()
        # `litdata.optimize` uses this writer in its worker processes.
        writer = BinaryWriter(str(out), chunk_bytes="64MB")
        for number, sample in enumerate(encoded_samples(task.data)):
            writer[number] = sample
        writer.done()
        writer.merge()

    samples = with_pixels(StreamingDataset, task.train)(
        str(task.data.made("litdata", write)), shuffle=task.train, drop_last=True
    )
    loader = StreamingDataLoader(
        samples,
        batch_size=task.batch_size,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
    )
    return for_ever(lambda: loader)


def ffcv(task: Task) -> Batches:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    def write(out: Path) -> None:
        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
        DatasetWriter(str(out), fields, num_workers=2).from_indexed_dataset(
            ImageFolder(task.data.folder)
        )

    if task.train:
        decoder = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip()]
    else:
        decoder = [CenterCropRGBImageDecoder((SIZE, SIZE), ratio=SIZE / RESIZE)]
    loader = Loader(
        str(task.data.made("ffcv.beton", write)),
        task.batch_size,
        num_workers=max(1, task.workers),  # threads, of which FFCV needs at least one
        order=OrderOption.RANDOM if task.train else OrderOption.SEQUENTIAL,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [*decoder, ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    return for_ever(lambda: loader)


def dali(task: Task) -> Batches:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=task.batch_size, num_threads=max(1, task.workers), device_id=None)
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            file_root=str(task.data.folder), random_shuffle=task.train, name="reader"
        )
        options = {"device": "cpu", "output_type": types.RGB}
        resize = {"interp_type": types.INTERP_LINEAR, "antialias": True}

        if task.train:
            window = fn.decoders.image_random_crop(
                encoded, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3], **options
            )
            images = fn.flip(
                fn.resize(window, size=(SIZE, SIZE), **resize), horizontal=fn.random.coin_flip()
            )
        else:
            images = fn.crop(
                fn.resize(fn.decoders.image(encoded, **options), resize_shorter=RESIZE, **resize),
                crop=(SIZE, SIZE),
            )

        return images, labels

    built = pipeline()
    built.build()
    batches = DALIGenericIterator(
        [built], ["images", "labels"], reader_name="reader", auto_reset=True
    )
    return (
        (batch[0]["images"].permute(0, 3, 1, 2), batch[0]["labels"])
        for batch in for_ever(lambda: batches)
    )


def spdl(task: Task) -> Batches:
    """Yield uint8 batches. FFmpeg decodes and resizes in threads of this process."""
    import spdl.io
    import torch
    from spdl.pipeline import PipelineBuilder
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import RandomResizedCrop

    samples = ImageFolder(task.data.folder).samples
    describe = partial(spdl.io.get_video_filter_desc, scale_algo="bilinear")
    square = describe(scale_width=SIZE, scale_height=SIZE, scale_mode=None)
    center = describe(
        scale_width=RESIZE,
        scale_height=RESIZE,
        scale_mode="crop",
        crop_width=SIZE,
        crop_height=SIZE,
    )

    def order() -> Iterator[tuple[str, int]]:
        while True:
            numbers = torch.randperm(len(samples)) if task.train else range(len(samples))
            yield from (samples[number] for number in numbers)

    def load(sample: tuple[str, int]) -> Any:
        packets = spdl.io.demux_image(sample[0])
        steps = center
        if task.train:
            size = torch.empty(3, packets.height, packets.width)
            top, left, h, w = RandomResizedCrop.get_params(size, (0.08, 1.0), (3 / 4, 4 / 3))
            flip = "hflip," if torch.rand(()) < 0.5 else ""
            steps = f"crop={w}:{h}:{left}:{top},{flip}{square}"
        return spdl.io.decode_packets(packets, filter_desc=steps), sample[1]

    def batch(decoded: list[Any]) -> Any:
        frames, labels = zip(*decoded, strict=True)
        images = spdl.io.to_torch(spdl.io.convert_frames(list(frames)))
        return images.permute(0, 3, 1, 2), torch.tensor(labels)

    num_threads = max(1, task.workers)
    pipeline = (
        PipelineBuilder()
        .add_source(order())
        .pipe(load, concurrency=num_threads, output_order="input")
        .aggregate(task.batch_size, drop_last=True)
        .pipe(batch)
        .add_sink(2)
        .build(num_threads=num_threads)
    )
    pipeline.start()
    return iter(pipeline)


# ---- limits: only decoding, from bytes in memory -------------------------------------------------


def decoded(encoded: list[bytes], batch_size: int) -> Batches:
    import simplejpeg

    while True:
        for start in range(0, len(encoded) - batch_size + 1, batch_size):
            part = encoded[start : start + batch_size]
            for image in part:
                pixels = simplejpeg.decode_jpeg(image)
            yield pixels, part


def whole_jpegs(task: Task) -> Batches:
    return decoded([file.read_bytes() for file in task.data.files[:NUM_WINDOWS]], task.batch_size)


def windows(task: Task) -> Batches:
    """Yield decoded JPEGs that contain only the blocks of a training window.

    A decoder like libjpeg-turbo must decode at least these bits.
    """
    folder = task.data.made("windows", partial(cut_windows, task.data))
    return decoded([file.read_bytes() for file in sorted(folder.iterdir())], task.batch_size)


# ---- all of them ---------------------------------------------------------------------------------


class Contestant(NamedTuple):
    """A library to compare, and its package."""

    batches: Callable[[Task], Batches]
    module: str
    """The module that must be importable."""
    package: str
    tasks: tuple[str, ...] = ("train", "eval")
    only_without_workers: bool = False
    pip_only: bool = False
    """Whether the contestant runs without the native decoder."""


V1 = "torchvision v1"
FFCV = "FFCV"
WHOLE = "limit: whole JPEGs"
OURS = "ours"
OURS_MARKED = "ours, restart markers"
CONTESTANTS = {
    OURS: Contestant(untouched, "vit._native", "vitline"),
    OURS_MARKED: Contestant(marked, "vit._native", "vitline"),
    f"{OURS}, pip only": Contestant(untouched, "vit", "vitline", pip_only=True),
    f"{OURS_MARKED}, pip only": Contestant(marked, "vit", "vitline", pip_only=True),
    f"{OURS_MARKED}, 2 copies": Contestant(marked_copies, "vit._native", "vitline", ("train",)),
    V1: Contestant(torchvision_v1, "torchvision", "torchvision"),
    "torchvision v2": Contestant(torchvision_v2, "torchvision", "torchvision"),
    "torchvision v2, tensors": Contestant(torchvision_tensor, "torchvision", "torchvision"),
    "torchcodec": Contestant(torchcodec, "torchcodec", "torchcodec"),
    "timm": Contestant(timm, "timm", "timm"),
    "Grain": Contestant(grain, "grain", "grain"),
    "webdataset": Contestant(webdataset, "webdataset", "webdataset"),
    "Energon": Contestant(energon, "megatron.energon", "megatron-energon"),
    "OpenCV": Contestant(opencv, "cv2", "opencv-python-headless"),
    "MosaicML streaming": Contestant(mosaicml, "streaming", "mosaicml-streaming", ("train",)),
    "litdata": Contestant(litdata, "litdata", "litdata", ("train",)),
    FFCV: Contestant(ffcv, "ffcv", "ffcv"),
    "DALI (CPU)": Contestant(dali, "nvidia.dali", "nvidia-dali-cuda130"),
    "SPDL": Contestant(spdl, "spdl.io", "spdl"),
    WHOLE: Contestant(whole_jpegs, "simplejpeg", "simplejpeg", only_without_workers=True),
    "limit: windows of JPEGs": Contestant(windows, "simplejpeg", "simplejpeg", ("train",), True),
}


def version(name: str) -> str | None:
    """Return the version of the contestant's package, or None if it is not installed."""
    contestant = CONTESTANTS[name]
    if contestant.module == "vit._native" and not native.AVAILABLE:
        return None
    try:
        if importlib.util.find_spec(contestant.module) is None:
            return None
        return importlib.metadata.version(contestant.package)
    except ImportError:  # The error may come from the parent package, or be PackageNotFoundError.
        return None


def serve(name: str, data: Data, workers: int, batch_size: int) -> None:
    """Answer requests on standard input until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Keep library output from mixing with the answers on stdout.
    running: dict[str, Batches] = {}

    for request in sys.stdin:
        kind, num_batches = request.split()
        if kind not in running:
            running[kind] = CONTESTANTS[name].batches(
                Task(data, workers, batch_size, kind == "train")
            )
        num_images = 0
        began = time.perf_counter()
        for _ in range(int(num_batches)):
            images, labels = next(running[kind])
            num_images += len(labels)

        answer = {
            "images": num_images,
            "seconds": time.perf_counter() - began,
            "shape": list(images.shape),
            "dtype": str(images.dtype),
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(
        sys.argv[1], Data(Path(sys.argv[2]), int(sys.argv[3])), int(sys.argv[4]), int(sys.argv[5])
    )
