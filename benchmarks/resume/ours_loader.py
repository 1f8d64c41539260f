"""Resume with this project's loader in a plain loop.

docs/own_loop.md: "`create_loader(..., start=step)` starts at the batch of that step. The loader has
no other state to save." "Each rank gets its rows of the global batch."
"""

from ours_data import SIDE_PX, make_shards, read_pixels
from probe import BATCH, EPOCHS, SEED, WORKERS, Training

import vit


def main() -> None:
    training = Training()
    split = vit.open_split(str(make_shards()), "train")
    with vit.create_loader(
        split,
        BATCH,
        image_size=SIDE_PX,
        epochs=EPOCHS,
        start=training.done,
        seed=SEED,
        mean=(0, 0, 0),
        std=(1, 1, 1),
        num_workers=WORKERS,
    ) as loader:
        for images, _ in loader:
            number, augmentation = read_pixels(images)
            training.step({"number": number, "augmentation": augmentation})
            if training.save_is_due:
                training.save()


if __name__ == "__main__":
    main()
