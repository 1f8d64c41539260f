"""Download weights by name from the Hugging Face hub into the hub's cache.

    timm/NAME.TAG                   the repository with that name
    hf-hub:OWNER/REPO[@REVISION]    any repository; `hf_hub:` is also accepted
        -> a folder of the cache, with safetensors and json only, never a pickle
        -> the source of the weights: repository, commit, license

Only rank 0 reads weights, so only rank 0 downloads them. The hub's client reads the cache folder,
login and address from HF_HOME, HF_TOKEN (or `hf auth login`), HF_ENDPOINT and HF_HUB_OFFLINE.
"""

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
"""The supported weights files. A repository must have one of them."""
FETCHED = (*WEIGHTS_FILES, "model-*-of-*.safetensors", "config.json", "preprocessor_config.json")
"""The patterns of the files to download."""

_NAME = re.compile(r"(?:hf[-_]hub:)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_LICENSE = re.compile(r"[\w.+-]{1,60}")
"""Matches valid license names. Names from the hub are untrusted, but are printed and written to
model cards."""
_LICENSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class HubCopy:
    """A local copy of a repository, in the cache of this machine."""

    folder: Path
    source: dict[str, str]
    """`repository`, `commit`, and `license` if the model card states a license."""


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is the name of a hub repository and no such path exists."""
    return str(path).startswith(("timm/", "hf-hub:", "hf_hub:")) and not Path(path).exists()


def in_words(source: Mapping[str, str]) -> str:
    """Return the repository, commit and license as a phrase for messages."""
    return (
        f"{source['repository']} on the Hugging Face hub, commit {source['commit'][:12]}, license"
        f" {source.get('license', 'not stated')}"
    )


def fetch(name: str) -> HubCopy:
    """Download the repository `name`, or return the cached copy if the hub is unreachable.

    Raises:
        WeightsError: `name` is not a hub name; huggingface_hub is not installed; the repository or
            revision does not exist; the repository requires consent, or lacks safetensors; the hub
            cannot be reached and nothing is cached; the cache cannot be written.
    """
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise WeightsError(
            f"{name} is not a valid repository name: use hf-hub:OWNER/REPO, or timm/NAME.TAG"
        )

    repository, revision = parts.groups()
    folder = _download(name, repository, revision)
    if not any((folder / name).exists() for name in WEIGHTS_FILES):
        raise WeightsError(
            f"{name}: {repository} has no model.safetensors, and pickles are not fetched because"
            " they can run code: use another copy of the model, such as timm's"
            " (https://huggingface.co/timm)"
        )

    return HubCopy(
        folder,
        {"repository": repository, "commit": folder.name} | _license(repository, folder.name),
    )


def _download(name: str, repository: str, revision: str | None) -> Path:
    """Return a repository's folder in the hub's cache, after downloading missing files.

    name: the name that the user gave, for messages. Raises WeightsError.
    """
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError:
        raise WeightsError(
            f"{name} is on the Hugging Face hub, but huggingface_hub is not installed: pip install"
            " huggingface_hub"
        ) from None

    hub = constants.ENDPOINT
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FETCHED)))
    except errors.RevisionNotFoundError:
        raise WeightsError(
            f"{name}: {repository} has no revision {revision}: use a branch, a tag or a commit"
        ) from None
    except errors.GatedRepoError:
        raise WeightsError(
            f"{name}: {repository} is only available to users who have accepted its terms:"
            f" accept them at {hub}/{repository}, then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        nearest = did_you_mean(repository, [f"timm/{model.name}" for model in KNOWN])
        raise WeightsError(
            f"{name}: no such file or folder, and no public repository {repository} on"
            f" {hub}{nearest}: correct the name, or log in with `hf auth login` if it is private"
        ) from None
    except (OSError, errors.HTTPError) as error:
        if getattr(error, "errno", None) is not None:
            raise WeightsError(
                f"{name}: the hub's cache cannot be written ({error}): free some space, or set"
                " HF_HOME to another folder"
            ) from None
        raise WeightsError(
            f"{name}: no such file or folder, and {hub} cannot be reached: run `hf download"
            f" {repository} --local-dir DIR` on a machine with access and pass DIR instead of the"
            " name (init.checkpoint=DIR), or set HF_HOME to a cache with this repository"
        ) from None


def _license(repository: str, commit: str) -> dict[str, str]:
    """Return {"license": ...} from the model card, or {} if there is none or the hub is
    unreachable."""
    from huggingface_hub import HfApi, errors

    with suppress(OSError, errors.HTTPError):
        facts = HfApi().model_info(repository, revision=commit, timeout=_LICENSE_TIMEOUT_S)
        license = str(getattr(facts.card_data, "license", None) or "")
        return {"license": license} if _LICENSE.fullmatch(license) else {}
    return {}
