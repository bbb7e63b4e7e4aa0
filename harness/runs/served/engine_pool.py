"""The engine that stays open between the runs of a sweep, so that a model is loaded once, or the user's server.

Its process has another environment: it reads the plug-in's code and the model's files from folders made here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

from espalier.harness.errors import UserError
from espalier.harness.models.families import ADAPTERS
from espalier.harness.paths import ROOT
from espalier.harness.runs.served.engine_process import EngineProcess
from espalier.harness.runs.served.engine_server import EngineServer
from espalier.harness.settings import table
from espalier.harness.specs.hub_cache import cached_file
from espalier.harness.specs.run_spec import BackendSpec, RunSpec
from espalier.methods.base import Method, TokenReducer
from espalier.serve.families import PLAIN
from espalier.serve.setting import KEY
from espalier.version import __version__

if TYPE_CHECKING:
    from espalier.harness.kinds.kind import OpenMethod
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.specs.run_spec import ModelSpec


#: Tokens of the longest prompt and answer of an engine, if no setting states them.
LONGEST = 4096


@dataclass(frozen=True)
class ServedModel:
    """A model that an engine runs.

    Attributes:
        adapter: prepares its prompts; it has no weights.
        engine: computes the answers.
    """

    adapter: Adapter
    engine: EngineProcess | EngineServer

    def open(self, spec: RunSpec, method: Method) -> AbstractContextManager[OpenMethod]:
        """Return a context manager that yields what answers under a method."""
        # Import transformers, which takes seconds.
        from espalier.harness.kinds.kind import OpenMethod
        from espalier.harness.runs.served.served_session import ServedGenerator, served_prompts

        assert isinstance(method, TokenReducer)  # admission has checked it
        generator = ServedGenerator(spec, self.adapter, method, self.engine, spec.backend.built_in)
        return nullcontext(OpenMethod(generator, self.adapter, prepare=served_prompts))

    @property
    def placement(self) -> dict[str, Any]:
        """The versions of the engine and of its packages, for a row's environment."""
        return {"served": dict(self.engine.versions)}


@dataclass
class EnginePool:
    """Holds one engine and its last model; the engine ends with this process."""

    _engine: EngineProcess | None = field(default=None, repr=False)
    _python: Path | None = None
    _folder: TemporaryDirectory[str] | None = field(default=None, repr=False)
    _key: tuple[Any, ...] | None = None
    _model: ServedModel | None = field(default=None, repr=False)

    def model(self, spec: RunSpec) -> ServedModel:
        """Return the model of a run under its engine; a different one is dropped first.

        Raises:
            UserError: the model's files are missing or do not match, or the engine does not start; one line.
            EngineEnded: the engine ended while it started.
        """
        key = (spec.model, spec.backend, pruning_arguments(spec))
        if self._model is not None and self._key == key and self._model.engine.alive:
            return self._model
        # Imports transformers, which takes seconds.
        from espalier.harness.models.build_adapter import load_adapter_without_weights

        adapter = load_adapter_without_weights(spec.model)
        if spec.backend.url is not None:
            server = EngineServer(spec.backend.url, spec.model)
            self._key, self._model = key, ServedModel(adapter, server)
            return self._model
        engine = self._running(spec.backend)
        self._key = self._model = None
        assert self._folder is not None  # an engine has one
        place = Path(mkdtemp(dir=self._folder.name)) / "model"
        folder = model_folder(place, spec.model, adapter)
        engine.load(engine_arguments(spec, folder, adapter.model.config))
        self._key, self._model = key, ServedModel(adapter, engine)
        return self._model

    def _running(self, backend: BackendSpec) -> EngineProcess:
        """Return the running process if it is of the same environment, else a new one."""
        if self._engine is not None and self._engine.alive and self._python == backend.python:
            return self._engine
        self.close()
        self._folder = TemporaryDirectory(prefix="espalier-engine-")
        assert backend.python is not None  # admission has checked it
        code = code_folder(Path(self._folder.name) / "code")
        self._engine, self._python = EngineProcess(backend.python, code), backend.python
        return self._engine

    def close(self) -> None:
        """End the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._engine = self._folder = self._key = self._model = None


def engine_arguments(
    spec: RunSpec, model: Path, config: Any, setting: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Return the arguments of `vllm.LLM`; those of `backend.options` override derived ones.

    Args:
        spec: the run.
        model: folder of its model.
        config: of the model.
        setting: that requests without one of their own have; None: nothing is removed.

    Raises:
        UserError: `backend.options.hf_overrides` is no table.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", LONGEST)
    options = spec.backend.options
    pruning = pruning_arguments(spec, setting)
    return {
        "model": str(model),
        "dtype": spec.model.dtype,
        "seed": spec.seed,
        "max_model_len": min(context, max(LONGEST, spec.model.longest)),
        "tensor_parallel_size": spec.backend.tensor_parallel,
        "pipeline_parallel_size": spec.backend.pipeline_parallel,
        **({"load_format": "dummy"} if spec.model.weights == "random" else {}),
        **pruning,
        **options,
        "hf_overrides": {
            **pruning["hf_overrides"],
            **table("backend.options.hf_overrides", options.get("hf_overrides")),
        },
    }


def pruning_arguments(spec: RunSpec, setting: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments by which the plug-in prunes, with its setting, or vLLM's own code prunes videos."""
    if not spec.backend.built_in:
        return {"hf_overrides": {KEY: setting or {}}}
    name = ADAPTERS.load(spec.model.adapter).data.model_class.__name__
    return {
        "video_pruning_rate": spec.budget.ratio,
        "video_pruning_method": spec.method.name,
        "hf_overrides": {"architectures": [PLAIN + name]},
    }


#: What an installation would write, so that vLLM finds the plug-in in each of its processes.
ENTRY_POINTS = "[vllm.general_plugins]\nespalier = espalier.serve.plugin:register\n"

#: Files that hold the weights and their configuration; the rest is written from the run's settings.
WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "config.json",
    "generation_config.json",
)


def code_folder(place: Path) -> Path:
    """Make a folder for PYTHONPATH from which another interpreter imports this package, and nothing else."""
    place.mkdir()
    # In a repository the package is a folder of links beside harness/; in an installation it holds harness/ itself.
    package = ROOT / "espalier" if (ROOT / "espalier").is_dir() else ROOT
    (place / "espalier").symlink_to(package, target_is_directory=True)
    record = place / f"espalier_serve-{__version__}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: espalier-serve\nVersion: {__version__}\n", encoding="utf-8"
    )
    (record / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return place


def model_folder(place: Path, spec: ModelSpec, adapter: Adapter) -> Path:
    """Make a folder with the checkpoint's weights, as links, and the run's processor; random weights are none.

    Raises:
        UserError: the checkpoint is not on this machine.
    """
    place.mkdir()
    adapter.processor.save_pretrained(place)
    if spec.weights == "random":
        configuration = adapter.model.config
        configuration.architectures = [type(adapter.model).__name__]
        configuration.save_pretrained(place)
        return place
    config = cached_file(spec, "config.json") if spec.path is None else spec.path / "config.json"
    if config is None:
        raise UserError(
            f"model.hub={spec.hub!r} is not in the local Hugging Face cache; valid: model.path=<directory>"
        )
    for pattern in WEIGHTS:
        for file in config.parent.glob(pattern):
            os.symlink(file.resolve(), place / file.name)
    return place
