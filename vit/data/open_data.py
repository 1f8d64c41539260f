"""Open the data that a config specifies, on all ranks.

`open_split` opens one split of shards. `IndexedShards` selects training samples from one or several
sources. For streams, `vit.extras.stream` takes the place of `IndexedShards`.
`vit.data.storage.opening.open_split` opens a split without a config.
"""

from typing import Any, Protocol

import numpy as np

from vit.config.schema import Config, DataConfig, ModelConfig
from vit.data.batches import AugmentedBatches, TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.order import Order
from vit.data.overlap import find_trained
from vit.data.shards.split import Split
from vit.data.sources import Sources, TrainSet, train_set_of, train_set_of_sources
from vit.data.storage import opening
from vit.distributed.process_group import World
from vit.system.files import ShardError
from vit.system.retry import RetryPolicy
from vit.system.urls import resolve


def open_split(
    config: Config, split: str, world: World | None = None, root: str | None = None
) -> Split:
    """Open `split` of `root` (by default `data.root`) with the config's cache and retry settings.

    For shards at a URL, rank 0 requests their versions and broadcasts them. One rank per host
    checks all rows of the index. Raises ShardError.
    """

    def open_checked(*, is_checked: bool = False, versions: list[Any] | None = None) -> Split:
        opened = opening.open_split(
            resolve(root or config.data.root),
            split,
            cache_dir=config.loader.cache_dir,
            cache_gib=config.loader.cache_gib,
            retry=RetryPolicy(config.loader.patience_s),
            is_checked=is_checked,
            versions=versions,
        )
        if not opened.num_classes:
            raise ShardError(
                f"{opened.root}: the images have no labels: choose data with classes, or classify"
                f" these images with python launch/predict.py {opened.root}"
            )

        return opened

    if world is None:
        return open_checked()

    # Only rank 0 requests the shards. Requests from a thousand ranks for every shard would overload
    # the server, and ranks might see different versions of a shard.
    return world.main_then_others(
        open_checked,
        lambda opened: opened.versions,
        lambda versions: open_checked(is_checked=not world.is_local_main, versions=versions),
    )


class TrainReader(Protocol):
    """Reads the training data."""

    def open_splits(self, config: Config, world: World | None = None) -> list[Split]:
        """Open the training split, or one split per source. Returns [] if the data have no random
        access."""

    def choose(
        self,
        config: Config,
        splits: list[Split],
        val_split: Split,
        world: World | None = None,
        num_classes: int | None = None,
    ) -> TrainSet:
        """Select the training samples from `splits`, the result of `open_splits`.

        Args:
            num_classes: The number of classes, if it is larger than that of `val_split`.

        Raises ShardError or ValueError if a setting names samples that do not exist, or if an image
        of `val_split` is also a training sample.
        """

    def create_batches(
        self,
        config: Config,
        train_set: TrainSet,
        order: Order,
        image_format: ImageFormat,
        world: World,
        *,
        rows: range,
        num_batches: int,
    ) -> AugmentedBatches:
        """Return this rank's batches of `train_set`. Arguments: see `TrainBatches`."""


class IndexedShards:
    """Reads shards through an index, so that it can create any batch. See `TrainReader`."""

    def open_splits(self, config: Config, world: World | None = None) -> list[Split]:
        """See `TrainReader`."""
        data = config.data
        if not data.sources:
            return [open_split(config, data.train_split, world)]
        return [
            open_split(config, source.split or data.train_split, world, source.root)
            for source in data.sources
        ]

    def choose(
        self,
        config: Config,
        splits: list[Split],
        val_split: Split,
        world: World | None = None,
        num_classes: int | None = None,
    ) -> TrainSet:
        """See `TrainReader`."""
        data = config.data

        def choose() -> TrainSet:
            if data.sources:
                weights = [source.weight for source in data.sources]
                train_set = train_set_of_sources(
                    splits, data.sources, weights, val_split, config.order.block_samples
                )
            else:
                train_set = train_set_of(splits[0], data)
            _check_held_out(data, train_set, val_split)
            return train_set

        return choose() if world is None else world.main_first(choose)

    def create_batches(
        self,
        config: Config,
        train_set: TrainSet,
        order: Order,
        image_format: ImageFormat,
        world: World,
        *,
        rows: range,
        num_batches: int,
    ) -> AugmentedBatches:
        """See `TrainReader`."""
        return TrainBatches(
            train_set.split,
            order,
            config.augment,
            image_format,
            rows=rows,
            num_batches=num_batches,
            on_bad_image=config.loader.on_bad_image,
            changes=train_set.changes,
        )


INDEXED_SHARDS = IndexedShards()


def open_train_set(config: Config, val_split: Split, num_classes: int | None = None) -> TrainSet:
    """Open and select the training samples of shards with an index, on this rank alone."""
    return INDEXED_SHARDS.choose(
        config, INDEXED_SHARDS.open_splits(config), val_split, num_classes=num_classes
    )


def _check_held_out(data: DataConfig, train_set: TrainSet, val_split: Split) -> None:
    """Raise ValueError if images of `val_split` are also training images."""
    trained = find_trained(train_set, val_split)
    count = np.count_nonzero(np.any(trained, axis=0))
    if not count:
        return

    settings = []
    for number, split in enumerate(train_set.split.splits):
        if trained[number].any():
            key = f"data.sources[{number}].split" if data.sources else "data.train_split"
            settings.append(f"{key}={split.name}")
    raise ValueError(
        f"data.val_split={val_split.name}: {count:,} of its {val_split.num_samples:,} images"
        f" are also training images of {', '.join(settings)}: hold them out, for instance with"
        " data.train_split=train[:99%] and data.val_split=train[99%:], or evaluate on them as"
        " one of eval.sets"
    )


def choose_num_classes(model: ModelConfig, data: DataConfig, *splits: Split | Sources) -> int:
    """Return the size of the head: `model.num_classes`, or the number of classes of `splits`.

    Raises ValueError if `model.num_classes` is less than the number of classes in the data.
    """
    in_data = max(split.num_classes for split in splits)
    if model.num_classes is not None and model.num_classes < in_data:
        raise ValueError(
            f"model.num_classes={model.num_classes}, but {data.root} has {in_data} classes: set"
            " model.num_classes=null"
        )
    return model.num_classes or in_data
