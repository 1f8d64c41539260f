"""Write the table of misclassified validation images.

The classes and probabilities come from `predictions.npz`, and the file names from the index of the
validation split.
"""

import csv
import io

import numpy as np

from vit.extras.report.source import ReportSource
from vit.run_folder.paths import REPORT_FOLDER
from vit.system.files import replacing

MISTAKES_FILE = f"{REPORT_FOLDER}/mistakes.csv"


def write_mistakes(source: ReportSource) -> int:
    """Write `report/mistakes.csv` for the last evaluation, and return its number of rows.

    The columns are file, true and predicted class, and the probability of the predicted class. The
    most confident mistakes come first. An image whose logits were NaN has an empty prediction.
    Raises ValueError if the run has no predictions, or if its validation images have changed.
    """
    predictions, labels, _ = source.predictions
    probabilities = source.probabilities
    source.check_same_images()
    mistakes = np.flatnonzero(predictions != labels)
    order = mistakes[np.argsort(-probabilities[mistakes], kind="stable")]

    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["file", "true", "predicted", "probability"])
    for image in order.tolist():
        is_known = predictions[image] >= 0
        predicted = source.class_names[predictions[image]] if is_known else ""
        share = f"{probabilities[image]:.4f}" if is_known else ""
        table.writerow(
            [source.val_split.key(image), source.class_names[labels[image]], predicted, share]
        )

    path = source.run_dir / MISTAKES_FILE
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        # Without the byte order mark, Excel does not read names as UTF-8.
        file.write(text.getvalue().encode("utf-8-sig"))
    return len(order)
