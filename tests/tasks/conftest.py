"""Tasks of lmms-eval, loaded once for a file."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def tasks(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The tasks of FOLDERS, which are those of METRICS."""
    from lmms_eval.tasks import TaskManager, get_task_dict

    folders, metrics = request.module.FOLDERS, request.module.METRICS
    manager = TaskManager(include_path=[*map(str, folders)], include_defaults=False)
    assert set(manager.all_tasks) == set(metrics)
    return get_task_dict(list(metrics), manager, task_type="chat")
