"""What Hugging Face's data sets record of their columns: which hold images, which classes.

The schema of each parquet file has it as JSON, or the data set's README.md as YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data_prep.errors import readable


@dataclass
class Features:
    """Columns of a data set; both empty if nothing is recorded."""

    images: list[str] = field(default_factory=list)
    class_names: dict[str, list[str]] = field(default_factory=dict)
    """Column of class labels -> name of each label."""


def features_of_schema(metadata: Mapping[bytes, bytes] | None) -> Features:
    """What `datasets` writes into the schema of a parquet file."""
    features = Features()
    try:
        recorded = json.loads((metadata or {}).get(b"huggingface", b"{}"))
    except ValueError:
        return features  # of another program
    for name, kind in recorded.get("info", {}).get("features", {}).items():
        if kind.get("_type") == "Image":
            features.images.append(name)
        elif kind.get("_type") == "ClassLabel":
            features.class_names[name] = list(kind["names"])
    return features


def features_of_readme(path: Path, columns: Sequence[str]) -> Features:
    """What `dataset_info` in the YAML of a README.md says of these columns. Raises PrepError."""
    features = Features()
    with readable(path, (UnicodeError, yaml.YAMLError), "its YAML cannot be read"):
        text = path.read_text("utf-8-sig")
        head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        recorded: Any = (yaml.safe_load(head[1]) or {}).get("dataset_info") if head else None
    for info in recorded if isinstance(recorded, list) else [recorded or {}]:
        listed = info.get("features") or []
        if {column["name"] for column in listed} != set(columns):
            continue  # of another configuration
        for column in listed:
            kind = column["dtype"]
            if kind == "image":
                features.images.append(column["name"])
            elif isinstance(kind, dict) and "class_label" in kind:
                names = kind["class_label"]["names"]
                in_order = [names[key] for key in sorted(names, key=int)]
                features.class_names[column["name"]] = [str(name) for name in in_order]
        break
    return features
