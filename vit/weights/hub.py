"""Weights of the Hugging Face hub by name: fetched into the hub's own cache, then read as a folder.

    timm/NAME.TAG                   the repository of that name
    hf-hub:OWNER/REPO[@REVISION]    any other one; `hf_hub:`, too
        -> a folder of the cache, with safetensors and json only, never a pickle
        -> where they are from: repository, commit, licence

Only rank 0 reads weights, so only rank 0 fetches. Cache, login and address are the hub's own:
HF_HOME, HF_TOKEN or `hf auth login`, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vit.system.files import WeightsError
from vit.system.spelling import did_you_mean
from vit.weights.published_models import KNOWN

WEIGHTS_FILES = ("model.safetensors", "model.safetensors.index.json")
"""A repository has one of them, or no weights that are read here."""
FETCHED = (*WEIGHTS_FILES, "model-*-of-*.safetensors", "config.json", "preprocessor_config.json")
"""Patterns of the files that are fetched."""
_NAME = re.compile(r"(?:hf[-_]hub:)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_LICENCE = re.compile(r"[\w.+-]{1,60}")
"""A licence is text of a stranger, which is printed and written into cards."""
_LICENCE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class HubCopy:
    """A repository's files in the cache of this machine."""

    folder: Path
    source: dict[str, str]
    """repository, commit, and licence where its card states one."""


def is_hub_name(given: str | os.PathLike[str]) -> bool:
    """Return whether `given` names a repository of the hub; what exists here is a path."""
    names = ("timm/", "hf-hub:", "hf_hub:")
    return str(given).startswith(names) and not Path(given).exists()


def in_words(source: Mapping[str, str]) -> str:
    """Return repository, commit and licence for people."""
    licence = source.get("licence", "not stated")
    commit = source["commit"][:12]
    return f"{source['repository']} on the Hugging Face hub, commit {commit}, licence {licence}"


def fetch(given: str) -> HubCopy:
    """Fetch the repository that `given` names, or take what the cache has where nothing answers.

    Raises WeightsError, each with its own remedy: not a name, huggingface_hub is not installed, no
    such repository or revision, a repository that asks for consent, one without safetensors, a hub
    that cannot be reached, a cache that cannot be written.
    """
    parts = _NAME.fullmatch(given)
    if parts is None:
        raise WeightsError(
            f"{given} is no name of the hub: give hf-hub:OWNER/REPO, or timm/NAME.TAG"
        )
    repository = parts[1]
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError:
        raise WeightsError(
            f"{given} is on the Hugging Face hub, and huggingface_hub, which fetches it, is not"
            " installed: pip install huggingface_hub"
        ) from None
    hub = constants.ENDPOINT
    try:
        path = snapshot_download(repository, revision=parts[2], allow_patterns=list(FETCHED))
    except errors.RevisionNotFoundError:
        raise WeightsError(
            f"{given}: {repository} has no revision {parts[2]}: give a branch, a tag or a commit"
        ) from None
    except errors.GatedRepoError:
        raise WeightsError(
            f"{given}: the hub hands out {repository} only to users who have accepted its terms:"
            f" accept them at {hub}/{repository}, then log in by `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        nearest = did_you_mean(repository, [f"timm/{known.name}" for known in KNOWN])
        raise WeightsError(
            f"{given}: no such file or folder here, and no public repository {repository} on"
            f" {hub}{nearest}: correct the name, or log in by `hf auth login` if it is private"
        ) from None
    except (OSError, errors.HTTPError) as error:
        if getattr(error, "errno", None) is not None:
            raise WeightsError(
                f"{given}: the hub's cache cannot be written ({error}): free some space, or set"
                " HF_HOME to another folder"
            ) from None
        raise WeightsError(
            f"{given}: no such file or folder here, and {hub} cannot be reached: run `hf download"
            f" {repository} --local-dir DIR` on a machine that reaches it and give DIR in place of"
            " the name (init.checkpoint=DIR), or set HF_HOME to a cache that has it"
        ) from None
    folder = Path(path)
    if not any((folder / name).exists() for name in WEIGHTS_FILES):
        raise WeightsError(
            f"{given}: {repository} has no model.safetensors, and nothing else is fetched, as a"
            " pickle can run code: take another copy of the model, such as timm's"
            " (https://huggingface.co/timm)"
        )
    source = {"repository": repository, "commit": folder.name}
    return HubCopy(folder, source | _licence(repository, folder.name))


def _licence(repository: str, commit: str) -> dict[str, str]:
    """Return the licence that the card of `repository` states; {} if none, or without the hub."""
    from huggingface_hub import HfApi, errors

    with suppress(OSError, errors.HTTPError):
        facts = HfApi().model_info(repository, revision=commit, timeout=_LICENCE_TIMEOUT_S)
        licence = str(getattr(facts.card_data, "license", None) or "")
        return {"licence": licence} if _LICENCE.fullmatch(licence) else {}
    return {}
