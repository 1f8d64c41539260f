"""Draw the report when a run has finished."""

from __future__ import annotations

from shlex import quote

from vit.distributed.outcome import Outcome
from vit.extras.report.page import make_report
from vit.extras.report.pictures import ClassAccuracy, ConfusedPair
from vit.run import Hook, Run


class Report(Hook):
    """The hook that makes pictures and page of a finished run, also for W&B.

    A stopped run may be killed within seconds, so `launch/report.py` makes its page later.
    """

    def ended(self, run: Run, outcome: Outcome) -> None:
        """See `Hook`."""
        if outcome != "finished":
            return
        run.signals.release_interrupt()
        try:
            report = make_report(run.folder, run.world.device, in_use=False)
        except (Exception, KeyboardInterrupt) as error:  # must not change the outcome of the run
            run.record.say(
                f"no report ({type(error).__name__}: {error}); python launch/report.py"
                f" {quote(str(run.folder))} tries again"
            )
            return
        pictures = report.pictures
        pairs = [list(pair) for pair in pictures.confused_pairs]
        classes = [list(row) for row in pictures.class_accuracies]
        run.record.log_pictures(pictures.paths)
        run.record.log_table("most_confused", list(ConfusedPair._fields), pairs)
        run.record.log_table("classes", list(ClassAccuracy._fields), classes)
        run.record.say(f"report: {report.page}")
