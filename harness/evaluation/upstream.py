"""All patches of libraries: one context manager each, with the package, its version and the reason.

A replacement that calls the original gets it as its first argument.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import datasets.load
import fsspec.spec
import huggingface_hub
import lmms_eval.api.task
import lmms_eval.evaluator
import PIL.Image
import yaml
from lmms_eval.api.task import ConfigurableTask, TaskConfig
from lmms_eval.tasks._task_utils import mmmu_mcq_utils
from lmms_eval.utils import ignore_constructor
from PIL import ImageFile
from tenacity import stop_after_attempt
from tqdm import tqdm

Patch = AbstractContextManager[Any]


def _replaced(holder: Any, name: str, function: Callable[..., Any]) -> Patch:
    """Call `function` in place of a library's, in a form that binds to instances."""
    original = getattr(holder, name)

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        return function(original, *args, **options)

    return mock.patch.object(holder, name, call)


#: The letter of an option that cannot be read: no option has it.
UNREAD = ""

# ---------------------------------------------------------------------- lmms-eval: loading


def one_download_attempt() -> Patch:
    """lmms-eval 0.7.3, `ConfigurableTask.download`: it retries four times with pauses, which is useless offline."""
    return mock.patch.object(ConfigurableTask.download.retry, "stop", stop_after_attempt(1))


def task_download(load: Callable[..., None]) -> Patch:
    """lmms-eval 0.7.3, `ConfigurableTask.download`: it loads a task's data anew each time."""
    return _replaced(ConfigurableTask, "download", load)


class _TaskFileLoader(yaml.CFullLoader if yaml.__with_libyaml__ else yaml.FullLoader):  # type: ignore[misc]
    """Reads a task file without the functions in it."""


_TaskFileLoader.add_constructor("!function", ignore_constructor)


def task_files_read_in_c() -> Patch:
    """lmms-eval 0.7.3, `load_yaml_config`: it reads 3,000 files for an index in Python, 7 s instead of 1."""
    return mock.patch.object(yaml, "full_load", partial(yaml.load, Loader=_TaskFileLoader))


def task_configuration(make: Callable[..., TaskConfig]) -> Patch:
    """lmms-eval 0.7.3, `lmms_eval.api.task.TaskConfig`: the class of a task's configuration is fixed."""
    return mock.patch.object(lmms_eval.api.task, "TaskConfig", make)


def damaged_images_refused() -> Patch:
    """lmms-eval 0.7.3 makes Pillow fill the missing part of a truncated image with grey."""
    return mock.patch.object(ImageFile, "LOAD_TRUNCATED_IMAGES", False)


def rows_mapped_here() -> Patch:
    """Datasets 5.2.0, `Dataset.map`: tasks use child processes, which may hang when forked from torch's threads."""
    return _replaced(
        datasets.Dataset,
        "map",
        lambda original, *args, **options: original(*args, **options | {"num_proc": None}),
    )


# ---------------------------------------------------------------------- the hub


@contextmanager
def hub_home(home: Path, cache: Path) -> Iterator[None]:
    """huggingface_hub 2.4.0, `constants.HF_HOME`: read once at import; tasks unpack archives below it."""
    environment = {"HF_HOME": str(home), "HF_DATASETS_CACHE": str(cache)}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(huggingface_hub.constants, "HF_HOME", str(home)),
    ):
        yield


def dataset_builder(build: Callable[..., Any]) -> Patch:
    """Datasets 5.2.0, `load_dataset_builder`: it looks a data set's name up on the hub only."""
    return _replaced(datasets.load, "load_dataset_builder", build)


@contextmanager
def hub_downloads(
    served: Mapping[str, Callable[..., Any]], active: Callable[[], bool]
) -> Iterator[None]:
    """huggingface_hub 2.4.0, `snapshot_download` and `hf_hub_download`: tasks call them for data sets.

    Args:
        served: what is called instead for data sets, by the name of the function.
        active: returns whether data sets are served; a task may keep a function after the block.
    """

    def replacement(serve: Callable[..., Any]) -> Callable[..., Any]:
        def call(original: Callable[..., Any], repo_id: str, *args: Any, **options: Any) -> Any:
            is_served = active() and options.get("repo_type") == "dataset"
            return (serve if is_served else original)(repo_id, *args, **options)

        return call

    functions = {name: getattr(huggingface_hub, name) for name in served}
    # One pass over thousands of modules, at each loading and scoring.
    holders = [
        module
        for module in list(sys.modules.values())
        if not functions.keys().isdisjoint(getattr(module, "__dict__", {}).keys())
    ]
    with ExitStack() as stack:
        for name, function in functions.items():
            call = replacement(served[name])
            for module in dict.fromkeys([huggingface_hub, *holders]):
                if getattr(module, name, None) is function:
                    stack.enter_context(_replaced(module, name, call))
        yield


# ---------------------------------------------------------------------- media of the data


def column_decoded(column: type, decode: Callable[..., Any]) -> Patch:
    """Datasets 5.2.0, `decode_example` of columns with files: it opens any path or address in the data."""
    return _replaced(column, "decode_example", decode)


def image_opened(opened: Callable[..., Any]) -> Patch:
    """Pillow 13.0.0, `Image.open`: tasks open paths from their data."""
    return _replaced(PIL.Image, "open", opened)


def file_system_made(make: Callable[..., Any]) -> Patch:
    """Fsspec 2026.9.0, `_Cached.__call__`: it makes a file system for any protocol in the data, also the web."""
    return _replaced(fsspec.spec._Cached, "__call__", make)


# ---------------------------------------------------------------------- lmms-eval: scoring


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """lmms-eval 0.7.3 and datasets 5.2.0: their progress bars disturb the run's bar."""

    def silent(*args: Any, **options: Any) -> Any:
        return tqdm(*args, **options | {"disable": True})

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(lmms_eval.evaluator, "tqdm", silent))
        stack.enter_context(mock.patch.object(lmms_eval.api.task, "tqdm", silent))
        if datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        yield


def without_commit() -> Patch:
    """lmms-eval 0.7.3, `evaluator`: it starts git at each evaluation, for a commit that nothing here reads."""
    names = ("get_git_commit_hash", "get_git_branch_name", "get_lmms_eval_version_string")
    return mock.patch.dict(vars(lmms_eval.evaluator), dict.fromkeys(names, str))


def without_guesses() -> Patch:
    """lmms-eval 0.7.3, MMMU's reader of letters: it draws a random option if it can read none.

    Here such an answer is wrong. The released scorer draws as well, so that its scores of unreadable answers are those
    of chance and depend on the state of the generator.
    """
    return mock.patch.object(
        mmmu_mcq_utils, "random", SimpleNamespace(choice=lambda options: UNREAD)
    )


@contextmanager
def tokens_remembered() -> Iterator[None]:
    """Pycocoevalcap 1.2, `PTBTokenizer.tokenize`: each aggregation starts a Java process for all captions.

    Within the block each caption is tokenised once: its tokens depend on the caption only. Nothing is patched if no
    task has imported it.
    """
    module = sys.modules.get("pycocoevalcap.tokenizer.ptbtokenizer")
    if module is None:
        yield
        return
    original, tokens = module.PTBTokenizer.tokenize, dict[str, str]()

    def tokenize(self: Any, captions: dict[Any, list[dict[str, Any]]]) -> dict[Any, list[str]]:
        texts = dict.fromkeys(
            caption["caption"] for group in captions.values() for caption in group
        )
        new = [text for text in texts if text not in tokens]
        if new:
            results = original(
                self, {number: [{"caption": text}] for number, text in enumerate(new)}
            )
            tokens.update({text: results[number][0] for number, text in enumerate(new)})
        return {
            name: [tokens[caption["caption"]] for caption in group]
            for name, group in captions.items()
        }

    with mock.patch.object(module.PTBTokenizer, "tokenize", tokenize):
        yield
