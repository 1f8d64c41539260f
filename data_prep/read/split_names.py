"""Recognize splits by the names of folders and files, in any case.

The words are those of Hugging Face's `datasets` (src/datasets/data_files.py). A folder may also
have a filler (`training_set`, `Test Images`, `val2017`), or a prefix or suffix that it shares with
the folder of another split (`seg_train` and `seg_test`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_FILLER = r"(?:sets?|data|images?|imgs?|folder|split|photos?|pictures?|[\W\d_])*"
_WORD = f"({'|'.join(sorted(SPLIT_WORDS, key=len, reverse=True))})"
_WITH_FILLER = re.compile(f"{_FILLER}{_WORD}{_FILLER}")
_IN_NAME = re.compile(rf"(?<![^\W\d_]){_WORD}(?![^\W\d_])")
_UNLABELLED = re.compile(r"(?<![^\W\d_])(pred|predict|prediction|unlabell?ed)(?![^\W\d_])")


def split_of(name: str) -> str | None:
    """Return the split that a name means: "train", "val", "test", or None."""
    match = _WITH_FILLER.fullmatch(name.lower())
    return SPLIT_WORDS[match[1]] if match else None


def splits_of_folders(names: Iterable[str]) -> dict[str, str]:
    """Map the names of neighboring folders that mean splits to these splits.

    A class may contain such a word ("training shoes", "test tube"), so a name with other words
    counts only if it differs from the name of another split in nothing else.
    """
    found = {}
    with_rest = defaultdict[str, dict[str, str]](dict)
    for name in names:
        words = _IN_NAME.findall(name.lower())
        if split := split_of(name):
            found[name] = split
        elif len(words) == 1:
            with_rest[_IN_NAME.sub("", name.lower())][name] = SPLIT_WORDS[words[0]]
    for group in with_rest.values():
        if "train" in group.values() and len(set(group.values())) > 1:
            found |= group
    return found


def means_unlabelled(name: str) -> bool:
    """Return whether the name of a folder says that its images have no labels."""
    return _UNLABELLED.search(name.lower()) is not None
