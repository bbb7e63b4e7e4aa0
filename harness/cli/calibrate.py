"""Calibrate a method for a model.

    espalier calibrate method=d2pruner model=seedling
    espalier calibrate method=fitprune model=llava15_7b ratio=0.6 images_dir=/data/images

Two methods need numbers that depend on the model. The model processes many images with one generic prompt, and the
result is written to `<store>/calibration` with its key, never over a file of this repository; runs with the same store
find it automatically, before the shipped files.

D2Pruner's positional prior of decoder layer l (arXiv 2512.19443: 1,000 images) is the mean attention of the last prompt
token to each position of the patch grid in layer l, separately for each view of an image: global view, stitched crops,
tiles. FitPrune's scheme (arXiv 2409.10197: a few dozen images) is what each layer may drop for a grid of alphas; the
result of the paper's bisection for `ratio`, the share of the visual tokens' FLOPs to be saved, is printed as well.

Models with weights in this repository are calibrated on their own training scenes; any other model needs `images_dir`.

    images=1000               how many images; 64 for a scheme
    images_dir=<folder>       their folder (.jpg, .png, ...); `images` of them are drawn with the run's seed
    prompt=<text>             the generic prompt, in the model's own chat template
    layer=<l> or layer=1,4    layers of the priors; without it, those that `method` needs
    batch_size=8              images in one pass; a scheme is fitted image by image

Everything else is a config override as for `espalier run`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from rich.console import Console
from rich.progress import Progress

from espalier.harness.config.build_spec import specs_of
from espalier.harness.engine.artifacts import is_shipped, save_scheme
from espalier.harness.engine.priors import prior_layers, save_prior
from espalier.harness.errors import UserError, print_lines
from espalier.harness.paths import located
from espalier.harness.settings import Text, at_least, read_value
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.commands import command
from espalier.harness.specs.hub_cache import go_offline
from espalier.harness.store.files.folder_checks import check_folder
from espalier.harness.tools.calibration.calibration_images import (
    ImageDigest,
    folder_images,
    scene_images,
)
from espalier.harness.tools.calibration.fitprune_fit import (
    ALPHAS,
    Fit,
    Trace,
    shares,
    smallest_reaching,
    trace,
)
from espalier.harness.tools.calibration.prior_maps import Recorder, calibrate
from espalier.methods.base import MethodError
from espalier.methods.fitprune import FitPrune

if TYPE_CHECKING:
    from PIL.Image import Image

    from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.run_spec import RunSpec

#: The paper's prompt, and the most generic question of the seedling's own.
PROMPT = "Please describe the provided image."
SCENE_PROMPT = "describe the image ."
OPTIONS = ("images", "images_dir", "prompt", "layer", "batch_size")


@dataclass(frozen=True)
class CalibrationRequest:
    """A checked command line: the layers of the priors (none: the scheme), the model, and the images."""

    spec: RunSpec
    layers: tuple[int, ...]
    n_images: int
    images_dir: Path | None
    prompt: str
    batch_size: int

    def images(self) -> Iterator[Image]:
        """Return the calibration images."""
        if self.images_dir is None:
            return scene_images(self.n_images, self.spec.seed)
        return folder_images(self.images_dir, self.n_images, self.spec.seed)

    @property
    def source(self) -> str:
        """Describe the origin of the images, without a path of this machine."""
        if self.images_dir is None:
            return f"seedling train scenes, seed {self.spec.seed}, 0 to {self.n_images - 1}"
        return f"{self.n_images} images of folder {self.images_dir.name}, seed {self.spec.seed}"


def read_request(argv: Sequence[str]) -> CalibrationRequest:
    """Check a command line before anything is loaded.

    Raises:
        UserError: one line with the key, the value and what is valid.
    """
    flags = [text for text in argv if text.startswith("-")]
    if flags:
        raise UserError(
            f"{flags[0]} is not an option of calibration; valid: key=value, or --help alone"
        )
    pairs = [text.split("=", 1) for text in argv if text.partition("=")[0] in OPTIONS]
    options = {key: value for key, value in pairs}
    if len(options) < len(pairs):
        raise UserError(
            f"{' '.join('='.join(pair) for pair in pairs)}: a key is given twice; valid: once"
        )
    overrides = [text for text in argv if text.partition("=")[0] not in OPTIONS]
    spec = specs_of(*overrides, typed=True)[0]
    shipped = is_shipped(spec.model)
    if not shipped and "images_dir" not in options:
        raise UserError(
            f"images_dir is missing: model={spec.model.name!r} needs a folder of images"
        )
    folder = located(options["images_dir"]) if "images_dir" in options else None
    layers = _layers(options.get("layer"), spec)
    if not layers and "batch_size" in options:
        raise UserError("batch_size: a scheme is fitted image by image; valid: without batch_size")
    return CalibrationRequest(
        spec=spec,
        layers=layers,
        n_images=_integer("images", options.get("images", "1000" if layers else "64")),
        images_dir=folder,
        prompt=read_value(
            "prompt", options.get("prompt", SCENE_PROMPT if shipped else PROMPT), Text
        ),
        batch_size=_integer("batch_size", options.get("batch_size", "8")),
    )


def _integer(key: str, text: str, minimum: int = 1) -> int:
    value = int(text) if text.isdecimal() else text
    return cast("int", read_value(key, value, Annotated[int, at_least(minimum)]))


def _layers(layer_text: str | None, spec: RunSpec) -> tuple[int, ...]:
    depth = spec.model.facts.text.layers
    if layer_text is not None:
        layers = tuple(sorted({_integer("layer", text, 0) for text in layer_text.split(",")}))
        Recorder(layers, lambda *_: None).sites(depth)  # raises for a layer outside the model
        return layers
    method = build_method(spec.method.name, spec.method.params, spec.method.code)
    layers = prior_layers(method, depth)
    if not layers and not isinstance(method, FitPrune):
        raise UserError(
            f"method={spec.method.name!r} reads no prior and no scheme; "
            "valid: a method that does, or layer=<l>"
        )
    return layers


def run(request: CalibrationRequest) -> list[str]:
    """Calibrate, store the result and return the lines to print: paths, and the result of the bisection."""
    # transformers takes seconds to import; invalid requests are refused without it.
    from espalier.harness.kinds.checkpoint_check import check_model
    from espalier.harness.models.build_adapter import load_adapter
    from espalier.harness.store.files.digests import Digests

    check_folder("store", request.spec.store)
    images = request.images()  # an unusable folder is refused before the model is loaded
    go_offline()
    check_model(request.spec.model, request.spec.offline, Digests())
    return (_measure if request.layers else _fit)(request, load_adapter(request.spec.model), images)


def _measure(request: CalibrationRequest, adapter: Adapter, images: Iterator[Image]) -> list[str]:
    """Store one prior for each layer."""
    with _progress("calibrating", request.n_images) as advance:
        calibration = calibrate(
            adapter, request.layers, images, request.prompt, request.batch_size, advance
        )
    spec, about = request.spec, _made_from(request, calibration)
    paths = (
        save_prior(spec.model, layer, means.prior(), {**about, "maps": means.n_maps}, spec.store)
        for layer, means in calibration.means.items()
    )
    return list(map(str, paths))


def _fit(request: CalibrationRequest, adapter: Adapter, images: Iterator[Image]) -> list[str]:
    """Store the scheme, then bisect for the ratio; its last steps need alphas between the scheme's."""
    images_seen = ImageDigest()
    with _progress("calibrating", request.n_images) as advance:
        traces = trace(adapter, images, request.prompt, ALPHAS, images_seen, advance)
    scheme = shares([traces[alpha] for alpha in ALPHAS])
    path = save_scheme(
        request.spec.model, scheme, _made_from(request, images_seen), request.spec.store
    )

    def traces_at(alpha: float) -> list[Trace]:
        if alpha not in traces:
            with _progress(f"alpha={alpha:g}", request.n_images) as advance:
                traces.update(
                    trace(
                        adapter, request.images(), request.prompt, (alpha,), ImageDigest(), advance
                    )
                )
        return traces[alpha]

    budget, ratio = request.spec.budget, request.spec.budget.ratio
    if budget.count is not None:
        raise UserError(
            f"keep={budget.count}: the bisection saves a share of FLOPs; valid: ratio=<share saved>"
        )
    smallest, last = smallest_reaching(ratio, traces_at, adapter.facts.text)
    return [
        str(path),
        f"smallest alpha that saves {ratio:g} of the visual tokens' FLOPs: {_words(smallest)}",
        f"last alpha tried, which the released code takes: {_words(last)}",
    ]


def _words(fit: Fit) -> str:
    missed = "" if fit.reached else " (target missed)"
    removed = list(fit.removed)
    return f"{fit.alpha:g}, saves {1 - fit.flops:.4f}{missed}, removed inside each layer {removed}"


def _made_from(request: CalibrationRequest, images: ImageDigest) -> dict[str, Any]:
    return {
        "images": images.n_images,
        "images_sha256": images.pixels.hexdigest(),
        "source": request.source,
        "prompt": request.prompt,
    }


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a bar on standard error; without a terminal it shows nothing."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda n: bar.advance(task, n)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after one line on standard error."""
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) == ["--help"]:
        sys.stdout.write(f"{__doc__}")
        return 0
    try:
        print_lines(*run(read_request(argv)))
    except MethodError as error:
        raise UserError(str(error)) from error
    return 0
