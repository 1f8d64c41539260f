"""Find the image and label columns and the class names of Hugging Face data sets.

Columns and classes are recorded as JSON in each parquet file's schema, or as YAML in README.md.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data_prep.errors import PrepError, readable
from vit.system.spelling import did_you_mean

IMAGE_NAMES = ("image", "img")
LABEL_NAMES = ("label", "labels", "class", "class_name", "category")


@dataclass
class Features:
    """The columns recorded for a data set, or empty if none are recorded."""

    images: list[str] = field(default_factory=list)
    class_names: dict[str, list[str]] = field(default_factory=dict)


def recorded_features(schema: Any, readmes: Sequence[Path]) -> Features:
    """Return the features in a parquet schema, or in the first README.md that records them.

    Raises PrepError for a README.md that cannot be read.
    """
    recorded = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    kinds: dict[str, Any] = {
        name: "image" if kind["_type"] == "Image" else {"class_label": kind}
        for name, kind in recorded.get("info", {}).get("features", {}).items()
        if isinstance(kind, dict) and kind.get("_type") in ("Image", "ClassLabel")
    }
    for readme in readmes:
        kinds = kinds or _kinds_in_readme(readme, schema.names)

    features = Features()
    for name, kind in kinds.items():
        if kind == "image":
            features.images.append(name)
        elif "class_label" in kind:
            names = kind["class_label"].get("names") or []
            if isinstance(names, dict):  # README.md maps numbers, written as text, to names.
                names = [names[number] for number in sorted(names, key=int)]
            features.class_names[name] = [str(name) for name in names]

    return features


def _kinds_in_readme(path: Path, columns: Sequence[str]) -> dict[str, Any]:
    """Return the type of each column in the `dataset_info` entry that has these columns."""
    with readable(path, (UnicodeError, yaml.YAMLError), "its YAML cannot be read"):
        head = re.match(r"---\n(.*?)\n---", path.read_text("utf-8-sig"), re.DOTALL)
        infos = (yaml.safe_load(head[1]) or {}).get("dataset_info") or [] if head else []
    for info in infos if isinstance(infos, list) else [infos]:
        kinds = {column["name"]: column.get("dtype", "") for column in info.get("features") or []}
        if kinds.keys() == set(columns):
            return kinds
    return {}


def choose_column(
    place: object,
    flag: str,
    name: str | None,
    candidates: Sequence[str],
    columns: Sequence[str],
    usual_names: Sequence[str] = LABEL_NAMES,
) -> str:
    """Return the column `name`, the only candidate, or the only candidate with a usual name.

    Args:
        place: The file to name in a PrepError.
        name: The value of `flag`, if the user gave it.
    """
    listed = ", ".join(columns)
    if name is not None:
        if name in columns:
            return name
        raise PrepError(
            f"{flag} {name}: {place} has no such column{did_you_mean(name, columns)}; its columns"
            f" are {listed}"
        )

    usual = [column for column in candidates if column.lower() in usual_names]
    possible = usual if len(usual) == 1 else candidates
    if len(possible) == 1:
        return possible[0]
    choice = f"{', '.join(possible)} are possible" if possible else "no name is a usual one"
    raise PrepError(f"{place}: the columns are {listed}, and {choice}: choose one with {flag}")
