"""Write the report when a run has finished."""

from __future__ import annotations

from shlex import quote

from vit.distributed.outcome import Outcome
from vit.extras.report.page import make_report
from vit.extras.report.pictures import ClassAccuracy, ConfusedPair
from vit.run import Hook, Run


class Report(Hook):
    """A hook that writes the report of a finished run and logs its pictures to W&B.

    A stopped run gets no report, because its process may be killed within seconds.
    """

    def ended(self, run: Run, outcome: Outcome) -> None:
        """See `Hook`."""
        if outcome != "finished":
            return
        run.signals.release_interrupt()
        try:
            report = make_report(run.folder, run.world.device, in_use=False)
        except (
            Exception,
            KeyboardInterrupt,
        ) as error:  # a failure must not change the outcome of the run
            run.record.say(
                f"no report ({type(error).__name__}: {error}); to try again, run python"
                f" launch/report.py {quote(str(run.folder))}"
            )
            return
        pictures = report.pictures
        pairs = [list(pair) for pair in pictures.confused_pairs]
        classes = [list(row) for row in pictures.class_accuracies]
        run.record.log_pictures(pictures.paths)
        run.record.log_table("most_confused", list(ConfusedPair._fields), pairs)
        run.record.log_table("classes", list(ClassAccuracy._fields), classes)
        run.record.say(f"report: {report.page}")
