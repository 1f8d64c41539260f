"""Recognize splits by the names of folders and files, in any case.

The recognized words are those of Hugging Face's `datasets` (src/datasets/data_files.py). The name
of a folder may also contain a filler (`training_set`, `Test Images`, `val2017`), or other words
that it shares with the folder of another split (`seg_train` and `seg_test`).
"""

import re
from collections import defaultdict
from collections.abc import Iterable

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_FILLER = r"sets?|data|images?|imgs?|folder|split|photos?|pictures?|[\W\d_]"
_WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(SPLIT_WORDS)})(?=$|{_FILLER})")
UNLABELED = re.compile(
    r"(?<![^\W\d_])(pred|prediction|unlabell?ed|no.?label|unknown)s?(?![^\W\d_])", re.IGNORECASE
)
"""Matches folder names that indicate unlabeled images."""
OF_IMAGES = re.compile(r"images?|imgs?|photos?|pictures?|data", re.IGNORECASE)
"""Matches folder names that do not describe the images."""


def split_of(name: str) -> str | None:
    """Return the split that a name stands for: "train", "val", "test", or None."""
    return splits_of_folders([name]).get(name)


def splits_of_folders(names: Iterable[str]) -> dict[str, str]:
    """Map the names of neighboring folders to splits, for names that stand for a split.

    A class name may contain such a word ("training shoes", "test tube"). Names with other words
    therefore count only if they belong to several splits and share these other words.
    """
    # Maps the other words to the names that contain them, and each name to its split.
    by_rest = defaultdict[str, dict[str, str]](dict)
    for name in sorted(names):  # The order of a set would depend on Python's hash seed.
        words = _WORD.findall(name.lower())
        if len(words) == 1:
            rest = re.sub(_FILLER, "", _WORD.sub("", name.lower()))
            by_rest[rest][name] = SPLIT_WORDS[words[0]]

    found = by_rest.pop("", {})
    if "train" not in found.values():
        # Use the first group that contains train and another split.
        groups = (group for group in by_rest.values() if {"train"} < set(group.values()))
        found |= next(groups, {})
    return found
