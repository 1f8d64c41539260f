"""Push an exported folder to a model repository on the Hugging Face Hub.

    check_repository     the name is valid, and huggingface_hub is installed
    write_app            app.py, a Gradio page that classifies photos, and its requirements.txt
    push                 create the repository if it is missing, and upload the folder as a commit

huggingface_hub reads the login and the address from HF_TOKEN (or `hf auth login`) and HF_ENDPOINT.
The folder is complete before the upload starts, and the Hub shows a commit only after all its files
have arrived.
"""

from pathlib import Path
from shlex import quote

from vit.extras.export.model_card import with_photo
from vit.system.files import WeightsError
from vit.system.redact import keep_secret
from vit.weights.programs import ProgramModel

APP = '''"""Classify photos in the browser.

    pip install -r requirements.txt
    python app.py
"""

from collections import Counter
from pathlib import Path

import timm
import torch
from PIL import Image

model = timm.create_model(f"local-dir:{Path(__file__).parent}", pretrained=True).eval()
data = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**data, is_training=False)
names = model.pretrained_cfg.get("label_names") or [f"class {n}" for n in range(model.num_classes)]
uses = Counter(names)
names = [name if uses[name] == 1 else f"{name} ({n})" for n, name in enumerate(names)]


def classify(path):
    """Return the five most probable classes of the photo `path`, with their probabilities."""
    with torch.inference_mode():
        shares = model(transform(<PHOTO>)[None]).softmax(-1)[0]
    return {names[n]: float(shares[n]) for n in shares.argsort(descending=True)[:5].tolist()}


if __name__ == "__main__":
    import gradio

    gradio.Interface(
        classify,
        gradio.Image(type="filepath", image_mode=None, label="Photo"),
        gradio.Label(num_top_classes=5, label="Class"),
        title=<TITLE>,
        flagging_mode="never",
        analytics_enabled=False,
    ).launch()
'''
"""The text of app.py. With these arguments, gradio passes the photo's file through unchanged,
so the page preprocesses the photo exactly as in evaluation. Classes with the same name are shown
with their numbers."""
REASONS = {
    None: "no connection to the hub ({text}): wait for it, or copy the folder elsewhere",
    401: "you are not logged in, or the token is not valid: run `hf auth login` or set HF_TOKEN",
    403: "the token may not write there ({text}): use a token with write permission, and an OWNER"
    " to which you belong (`hf auth whoami`)",
    "other": "the hub refused the upload ({text}): remove the cause",
}
"""Maps an HTTP status to the reason why the upload failed and a remedy. None stands for no
answer."""


def check_repository(name: str) -> None:
    """Raise WeightsError if `name` is not a valid repository name, or if huggingface_hub is
    missing."""
    try:
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        validate_repo_id(name if "/" in name else "")
    except ImportError:
        raise WeightsError(
            f"--to hub {name} needs huggingface_hub, which is not installed: pip install"
            " huggingface_hub"
        ) from None
    except HFValidationError:
        raise WeightsError(
            f"--to hub {name}: not a valid repository name: expected OWNER/NAME of at most 96"
            " letters, digits, '-', '_' and '.' (no '--' or '..')"
        ) from None


def write_app(folder: Path, subject: ProgramModel, title: str) -> None:
    """Write app.py and requirements.txt."""
    (folder / "app.py").write_text(
        with_photo(APP, subject, "path").replace("<TITLE>", repr(title)), encoding="utf-8"
    )
    (folder / "requirements.txt").write_text("gradio\ntimm\n", encoding="utf-8")


def push(folder: Path, repository: str) -> str:
    """Upload `folder`, and return the address of `repository`.

    Raises WeightsError if the user is not logged in or may not write, if the Hub cannot be reached,
    or if the repository contains another model. The message contains the command that uploads the
    folder later.
    """
    import huggingface_hub as hub

    keep_secret(hub.get_token() or "")
    address = f"{hub.constants.ENDPOINT}/{repository}"
    try:
        hub.create_repo(repository, exist_ok=True)
        # Every push of this command adds app.py.
        has_another_model = {"config.json", "app.py"}.intersection(
            hub.list_repo_files(repository)
        ) == {"config.json"}
        if not has_another_model:
            hub.upload_folder(repo_id=repository, folder_path=folder)
    except (OSError, hub.errors.HTTPError, RuntimeError, ValueError) as error:
        raise WeightsError(
            f"{folder} is complete, but was not pushed to {address}: {_reason(error)}, then run"
            f" `hf upload {repository} {quote(str(folder))} .`"
        ) from None
    if has_another_model:
        raise WeightsError(
            f"{folder} is complete, but was not pushed: {address} has another model, which this"
            " command did not write: pass another name, or delete the repository"
        )
    return address


def _reason(error: Exception) -> str:
    """Return why the upload failed, and what to do about it."""
    cause = error if hasattr(error, "response") else error.__cause__ or error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    return REASONS.get(status, REASONS["other"]).format(text=" ".join(str(cause).split()))
