"""Check each host, and the disk that holds the run folder, before the model is created."""

from dataclasses import replace

from vit.checkpoint.checkpoint import checkpoint_folder
from vit.config.schema import Config
from vit.data.decode.images import decoder_name
from vit.distributed.host_differences import compare_hosts
from vit.distributed.process_group import World
from vit.run import Hook
from vit.run_folder.paths import complete_checkpoints
from vit.run_folder.place import Place
from vit.start.needs import DiskNeeds, disk_needs
from vit.start.preflight import check_disk, preflight
from vit.training.run_data import Notes, RunData


class HostCheck(Hook):
    """Rejects a run that its hosts cannot support, and logs notes on settings that make the run
    slow."""

    def opened(self, config: Config, world: World, data: RunData, place: Place) -> Notes:
        """See `Hook`."""
        checked, disk = check_host(config, world, data)
        room = Notes()
        with world.fail_together():
            if world.is_main and not _is_over(place, data.plan.total_steps):
                room = check_disk(disk, place.folder, config.checkpoint.keep_last, place.setting)

        return Notes(
            record={"preflight": checked.record | room.record}, lines=checked.lines + room.lines
        )


def check_host(config: Config, world: World, data: RunData) -> tuple[Notes, DiskNeeds]:
    """Check this host, compare all hosts, and return the disk space that the run needs.

    All ranks must call this. Raises the errors of `preflight`.
    """
    with world.fail_together():
        disk = disk_needs(config, data.plan, data.num_classes)
        checked = preflight(
            config.loader,
            world,
            data.plan,
            data.batches,
            data.eval_batches,
            saved_bytes=disk.checkpoint_bytes,
        )
    # Differences between hosts can make ranks hang or compute different results.
    checked = replace(
        checked, lines=(*checked.lines, *compare_hosts(world, {"JPEG decoder": decoder_name()}))
    )
    return checked, disk


def _is_over(place: Place, total_steps: int) -> bool:
    """Return whether the run's last checkpoint exists, so that nothing is left to save."""
    last = checkpoint_folder(place.folder, total_steps).name
    return any(path.name >= last for path in complete_checkpoints(place.folder))
