"""Visual tokens of multimodal models, pruned from Python: in a notebook, a script, beside one's own code.

>>> import espalier
>>> model = espalier.load("seedling")
>>> with espalier.apply(model, "divprune", ratio=0.9) as pruned:
...     answer = pruned.ask("picture.png", "is there a red ring ?")
>>> answer.text, answer.kept, answer.flops.share, answer.show()

`load` takes a model of conf/model or the folder of a checkpoint, `wrap` a model and a processor of transformers that
are in memory already. `apply` puts a method on it for the length of a `with`; inside, `ask` and `ask_many` take
pictures, videos and chats, and return an `Answer`: the text, what was kept, what it cost, and a picture of it. `video`
makes a video out of frames. `evaluate` runs a benchmark as the command line does; `rehearse` one prompt of a run on
simulated cards; `explore` returns a page for a browser or a notebook. `methods()`, `models()` and `benchmarks()` list
the names that it takes. What cannot work raises `UserError`, one line with the argument, its value and what is valid.

docs/python.md has all of it by example.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from espalier import methods
from espalier.version import __version__ as __version__

if TYPE_CHECKING:
    from espalier.harness.api.answer import Answer
    from espalier.harness.api.apply import Applied, apply
    from espalier.harness.api.loaded_models import Model, load, wrap
    from espalier.harness.api.questions import video
    from espalier.harness.errors import UserError
    from espalier.harness.reports import results
    from espalier.harness.runs.interface.choice_frames import benchmarks, models
    from espalier.harness.runs.interface.evaluate import EvaluatedRun, evaluate
    from espalier.harness.tools.explore import explore
    from espalier.harness.tools.rehearsal.rehearse import rehearse


__all__ = [
    "Answer",
    "Applied",
    "EvaluatedRun",
    "Model",
    "UserError",
    "apply",
    "benchmarks",
    "evaluate",
    "explore",
    "load",
    "methods",
    "models",
    "rehearse",
    "results",
    "video",
    "wrap",
]

#: Where each name lives. torch and transformers take seconds to import: a name is fetched when it is first used.
_HOMES = {
    "Answer": "espalier.harness.api.answer",
    "Applied": "espalier.harness.api.apply",
    "EvaluatedRun": "espalier.harness.runs.interface.evaluate",
    "Model": "espalier.harness.api.loaded_models",
    "UserError": "espalier.harness.errors",
    "apply": "espalier.harness.api.apply",
    "benchmarks": "espalier.harness.runs.interface.choice_frames",
    "evaluate": "espalier.harness.runs.interface.evaluate",
    "explore": "espalier.harness.tools.explore",
    "load": "espalier.harness.api.loaded_models",
    "models": "espalier.harness.runs.interface.choice_frames",
    "rehearse": "espalier.harness.tools.rehearsal.rehearse",
    "results": "espalier.harness.reports.results",
    "video": "espalier.harness.api.questions",
    "wrap": "espalier.harness.api.loaded_models",
}


class _MethodPackage(ModuleType):
    """The package of methods, which lists them when it is called: `espalier.methods()`."""

    def __call__(self) -> Any:
        return _module("espalier.harness.runs.interface.choice_frames").methods()


methods.__class__ = _MethodPackage


def _module(name: str) -> ModuleType:
    """Import a module; what only an extra installs is one line."""
    # Imported here: this file itself imports nothing of the harness.
    from espalier.harness.errors import missing_extra

    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        absent = missing_extra(error)
        if absent is None:
            raise
        raise absent from error


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'espalier' has no attribute {name!r}")
    module = _module(_HOMES[name])
    value = module if name == "results" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
