"""What one process of a run checks of a cell besides the run itself: this machine, the log, what is to be drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence

from espalier.harness.errors import UserError
from espalier.harness.ranks import Ranks
from espalier.harness.runs import preflight, wandb_log
from espalier.harness.runs.preflight import Job
from espalier.harness.runs.result_row import outline
from espalier.harness.specs.comparable import check_comparable
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests

#: Hugging Face libraries read these when they are imported.
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def check_cell(spec: RunSpec, ranks: Ranks, digests: Digests, places: bool = True) -> Job:
    """Return the job of a cell that can run here; see espalier.harness.runs.preflight.check.

    `places=False` leaves out whether its rows can be written, which writes.
    """
    if spec.offline:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))
    if spec.log == "wandb":
        wandb_log.check(spec.log_options)
    if spec.model.device_map is not None and ranks.world > 1:
        raise UserError(
            f"model.device_map={spec.model.device_map!r} lets one process use all devices; "
            f"valid for {ranks.world} processes: null"
        )
    if spec.method.draft is not None and ranks.world > 1:
        raise UserError(
            f"method={spec.method.name!r} has a device for its draft, which {ranks.world} processes would "
            "share; valid: one process"
        )
    ranks.use_device(spec.model.device)
    return preflight.check(spec, digests, places)


def check_drawn(jobs: Sequence[Job]) -> None:
    """Raise UserError if what `curves` or `report` asks for would mix rows of different settings."""
    drawn = [job for job in jobs if job.spec.curves or job.spec.report]
    try:
        check_comparable(map(outline, drawn))
    except UserError as error:
        key = "curves" if drawn[0].spec.curves else "report"
        raise UserError(
            f"{key}={str(getattr(drawn[0].spec, key))!r}: {error}; or {key}=null"
        ) from error
