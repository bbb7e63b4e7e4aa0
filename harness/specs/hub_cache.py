"""What the local Hugging Face caches have of models and data sets, and whether its libraries may use a network."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.harness.errors import FOREIGN, NotCached

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec

#: Hugging Face libraries read these when they are imported, so commands set them before they use this file.
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")

_TRUE = ("1", "ON", "YES", "TRUE")

#: Whether the user's environment forbids downloads: read before a command sets it for the libraries.
BY_ENVIRONMENT = any(os.environ.get(name, "").upper() in _TRUE for name in OFFLINE)

#: Whether this command may download; `offline=true`, dry runs and a cluster's jobs may not.
downloads: ContextVar[bool] = ContextVar("downloads", default=True)


def may_download(offline: bool = False) -> bool:
    """Return whether missing files may be downloaded, for a run with this setting of `offline`."""
    return downloads.get() and not offline and not BY_ENVIRONMENT


def way_to_download(offline: bool) -> str:
    """Return the advice of an error line for a run with this setting of `offline`; "" for a cluster's jobs."""
    ways = ["offline=false"] * offline + ["HF_HUB_OFFLINE unset"] * BY_ENVIRONMENT
    return f"{' and '.join(ways)} to download it, or " if ways else ""


def cached_commit(model: ModelSpec) -> str | None:
    """Return the commit of `model.hub` at `model.revision` in the local Hugging Face cache, if it is there."""
    path = cached_file(model, "config.json")
    return None if path is None else path.parent.name


def cached_file(model: ModelSpec, name: str) -> Path | None:
    """Return a file of `model.hub` at `model.revision` in the local Hugging Face cache, if it is there."""
    return file_of_hub(model.hub, name, model.revision)


def file_of_hub(hub: str | None, name: str, revision: str | None) -> Path | None:
    """Return a file of a model's repository in the local Hugging Face cache; None: it is not there, or not an id."""
    # As OFFLINE sets it.
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(str(hub), name, revision=revision)
    except FOREIGN:  # the hub has its own rules for names
        return None
    return Path(path) if isinstance(path, str) else None


def require_cached(model: str, hub: str, revision: str | None, offline: bool) -> Path | None:
    """Return the folder of a model's checkpoint in the local Hugging Face cache; None: what it lacks may be downloaded.

    Raises:
        NotCached: it is not there, and nothing may be downloaded.
    """
    if may_download(offline):
        return None
    config = file_of_hub(hub, "config.json", revision)
    if config is not None:
        return config.parent
    raise NotCached(
        f"model.hub={hub!r} is not in the local Hugging Face cache; valid: model.path=<directory>, or "
        f"{way_to_download(offline)}first, where there is a network: python -m espalier benchmarks prefetch "
        f"<benchmark> model={model}"
    )


def data_set_cached(name: str) -> bool:
    """Return whether the local caches may have a data set: downloaded files, or tables that are prepared from them."""
    # As OFFLINE sets it.
    from huggingface_hub import constants

    owner, _, repository = name.partition("/")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    names = _names_in(prepared, prepared.is_dir() and prepared.stat().st_mtime_ns)
    tables = (table.partition("___")[2] for table in names if table.startswith(f"{owner}___"))
    downloaded = Path(constants.HF_HUB_CACHE, f"datasets--{owner}--{repository}")
    # The library writes a repository's name in its own way: `MMBench_EN` is `mm_bench_en`.
    return not repository or downloaded.is_dir() or _letters(repository) in map(_letters, tables)


@lru_cache(maxsize=1)
def _names_in(folder: Path, changed_ns: int) -> list[str]:
    """Return the names in a folder that changed last at `changed_ns`; a sweep needs them for each cell."""
    return [path.name for path in folder.glob("*")]


def _letters(name: str) -> str:
    """Return the letters and digits of a name in lower case."""
    return "".join(filter(str.isalnum, name)).lower()


def cached_data(name: str, revision: str | None) -> str | None:
    """Return id and commit of a data set in the local Hugging Face cache, if it is there: `owner/name@commit`."""
    # As OFFLINE sets it.
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}")
    reference = folder / "refs" / (revision or "main")
    if reference.is_file():
        return f"{name}@{reference.read_text(encoding='utf-8').strip()}"
    return f"{name}@{revision}" if revision and (folder / "snapshots" / revision).is_dir() else None


def other_format(path: Path) -> str:
    """Return a hint for a place without a checkpoint: it is missing, or of another format; "" for any other."""
    if not os.path.exists(path):
        return ": it does not exist"
    if os.path.isfile(path / "adapter_config.json"):
        return " but a LoRA adapter, to be merged into its model first (merge_and_unload of peft)"
    if path.suffix == ".gguf" or (os.path.isdir(path) and any(path.glob("*.gguf"))):
        return " but GGUF, the format of llama.cpp"
    if os.path.isdir(path) and any(path.glob("*.bin")):
        return " but *.bin, pickles of torch, to be saved as *.safetensors first (save_pretrained)"
    if os.path.isfile(path):
        return ": it is a file"
    return ""


#: Where its libraries keep the setting.
LIBRARY_FLAGS = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_DATASETS_OFFLINE"),
)


def go_offline() -> None:
    """Let the libraries use no network, those that are imported and those that will be, except for `online`."""
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    _set_flags(dict.fromkeys(LIBRARY_FLAGS, True))


@contextmanager
def online() -> Iterator[None]:
    """Let the libraries use the network inside the block, if the user's environment does not forbid it."""
    with restored_network():
        if not BY_ENVIRONMENT:
            for name in OFFLINE:
                os.environ.pop(name, None)
            _set_flags(dict.fromkeys(LIBRARY_FLAGS, False))
        yield


@contextmanager
def restored_network() -> Iterator[None]:
    """Undo `go_offline` at the end of the block, also in libraries that were imported inside it, and `downloads`."""
    token = downloads.set(downloads.get())
    values = {name: os.environ.get(name) for name in OFFLINE}
    by_environment = any((value or "").upper() in _TRUE for value in values.values())
    before = {
        (module, name): getattr(sys.modules[module], name)
        if module in sys.modules
        else by_environment
        for module, name in LIBRARY_FLAGS
    }
    try:
        yield
    finally:
        downloads.reset(token)
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _set_flags(before)


def _set_flags(values: dict[tuple[str, str], bool]) -> None:
    for (module, name), value in values.items():
        if module in sys.modules:
            setattr(sys.modules[module], name, value)
