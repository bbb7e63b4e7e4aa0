"""Calibration: `python -m espalier calibrate method=d2pruner model=seedling`, and the same for fitprune.

Two methods need numbers that belong to a model. The model goes over many images with one generic prompt, and what
comes out is written to `<store>/calibration` with its key, never over a file of this repository; runs with the same
store find it by themselves, before what was shipped.

The positional prior of decoder layer l, for D2Pruner (arXiv 2512.19443: 1,000 images), is the mean of the attention
that the last prompt token pays each place of the patch grid in layer l, for each view of an image by itself: global
view, stitched crops, tiles. FitPrune's scheme (arXiv 2409.10197: a few dozen images) is what each layer may drop for a
grid of alphas; also printed is what the paper's bisection finds for `ratio`, the share of the visual tokens' FLOPs to
be saved.

Models whose weights lie in this repository are calibrated on their own training scenes; any other needs `images_dir`.

    images=1000               how many images; 64 for a scheme
    images_dir=<folder>       where they lie (.jpg, .png, ...); `images` of them are drawn with the run's seed
    prompt=<text>             the generic prompt, in the model's own chat template
    layer=<l> or layer=1,4    which layers' priors; without it, those that `method` needs
    batch_size=8              images in one pass; a scheme is fitted image by image

Everything else is a config override as for run.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import Progress

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.engine.artifacts.calibration_files import is_shipped
from espalier.harness.engine.artifacts.fitprune_schemes import save_scheme
from espalier.harness.engine.artifacts.priors import prior_layers, save_prior
from espalier.harness.errors import StoreLost, UserError
from espalier.harness.settings import Text, at_least, read_value
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.commands import command
from espalier.harness.store.files.folder_checks import check_folder
from espalier.harness.tools.calibration.bisection import Fit, Trace, shares, smallest_reaching
from espalier.harness.tools.calibration.calibration_images import (
    ImageDigest,
    folder_images,
    scene_images,
)
from espalier.harness.tools.calibration.fitprune_fit import ALPHAS, trace
from espalier.harness.tools.calibration.prior_maps import Recorder, calibrate
from espalier.methods.base import MethodError
from espalier.methods.fitprune import FitPrune

if TYPE_CHECKING:
    from PIL.Image import Image

    from espalier.harness.models.adapter import Adapter
    from espalier.harness.specs.run_spec import RunSpec

#: The paper's prompt, and the one among the seedling's own questions that asks for nothing in particular.
PROMPT = "Please describe the provided image."
SCENE_PROMPT = "describe the image ."
OPTIONS = ("images", "images_dir", "prompt", "layer", "batch_size")


@dataclass(frozen=True)
class Request:
    """A checked command line: the priors of which layers (none: the scheme) of which model, from which images."""

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
        """Say where the images come from, without any path of this machine."""
        if self.images_dir is None:
            return f"seedling train scenes, seed {self.spec.seed}, 0 to {self.n_images - 1}"
        return f"{self.n_images} images of folder {self.images_dir.name}, seed {self.spec.seed}"


def read_request(argv: Sequence[str]) -> Request:
    """Check a command line before anything is loaded.

    Raises:
        UserError: one line with the key, the value and what is valid.
    """
    flags = [text for text in argv if text.startswith("-")]
    if flags:
        raise UserError(
            f"{flags[0]} is not an option of calibration; valid: key=value, or --help alone"
        )
    own = [text.split("=", 1) for text in argv if text.partition("=")[0] in OPTIONS]
    given = {key: value for key, value in own}
    if len(given) < len(own):
        raise UserError(
            f"{' '.join('='.join(pair) for pair in own)}: a key is given twice; valid: once"
        )
    overrides = [text for text in argv if text.partition("=")[0] not in OPTIONS]
    command = read_command(overrides, typed=True)
    assert command is not None  # flags are refused above
    assert not command.sweep
    spec = build_spec(command.cells[0])
    shipped = is_shipped(spec.model)
    if not shipped and "images_dir" not in given:
        raise UserError(
            f"images_dir is missing: model={spec.model.name!r} needs a folder of images"
        )
    folder = Path(given["images_dir"]).expanduser() if "images_dir" in given else None
    layers = _layers(given.get("layer"), spec)
    if not layers and "batch_size" in given:
        raise UserError("batch_size: a scheme is fitted image by image; valid: without batch_size")
    return Request(
        spec=spec,
        layers=layers,
        n_images=_integer("images", given.get("images", "1000" if layers else "64")),
        images_dir=folder,
        prompt=read_value("prompt", given.get("prompt", SCENE_PROMPT if shipped else PROMPT), Text),
        batch_size=_integer("batch_size", given.get("batch_size", "8")),
    )


def _integer(key: str, text: str, least: int = 1) -> int:
    value = int(text) if text.isdecimal() else text
    number: int = read_value(key, value, Annotated[int, at_least(least)])
    return number


def _layers(given: str | None, spec: RunSpec) -> tuple[int, ...]:
    depth = spec.model.facts.text.layers
    if given is not None:
        layers = tuple(sorted({_integer("layer", text, 0) for text in given.split(",")}))
        Recorder(layers, lambda *_: None).sites(depth)  # raises for a layer outside the model
        return layers
    method = build_method(spec.method.name, spec.method.params)
    layers = prior_layers(method, depth)
    if not layers and not isinstance(method, FitPrune):
        raise UserError(
            f"method={spec.method.name!r} reads no prior and no scheme; "
            "valid: a method that does, or layer=<l>"
        )
    return layers


def run(request: Request) -> list[str]:
    """Calibrate, store what was found and return the lines to print: paths, and what a bisection found."""
    # transformers takes seconds to import, and a request that cannot work is refused without it.
    from espalier.harness.models.adapter import load_adapter
    from espalier.harness.runs.process_checks import OFFLINE

    check_folder("store", request.spec.store)

    images = request.images()  # a folder that cannot serve is refused before the model loads
    if request.spec.offline:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))
    adapter = load_adapter(request.spec.model)
    return (_measure if request.layers else _fit)(request, adapter, images)


def _measure(request: Request, adapter: Adapter, images: Iterator[Image]) -> list[str]:
    """Store one prior for each layer."""
    with _progress("calibrating", request.n_images) as advance:
        found = calibrate(
            adapter, request.layers, images, request.prompt, request.batch_size, advance
        )
    made_from = _made_from(request, found)
    return [
        str(
            save_prior(
                request.spec.model,
                layer,
                means.prior(),
                {**made_from, "maps": means.n_maps},
                request.spec.store,
            )
        )
        for layer, means in found.means.items()
    ]


def _fit(request: Request, adapter: Adapter, images: Iterator[Image]) -> list[str]:
    """Store the scheme, then bisect for the ratio; its last steps ask for alphas between the scheme's."""
    seen = ImageDigest()
    with _progress("calibrating", request.n_images) as advance:
        known = trace(adapter, images, request.prompt, ALPHAS, seen, advance)
    scheme = shares([known[alpha] for alpha in ALPHAS])
    path = save_scheme(request.spec.model, scheme, _made_from(request, seen), request.spec.store)

    def traces_at(alpha: float) -> list[Trace]:
        if alpha not in known:
            with _progress(f"alpha={alpha:g}", request.n_images) as advance:
                known.update(
                    trace(
                        adapter, request.images(), request.prompt, (alpha,), ImageDigest(), advance
                    )
                )
        return known[alpha]

    ratio = request.spec.budget.ratio
    found, last = smallest_reaching(ratio, traces_at, adapter.facts.text)
    return [
        str(path),
        f"smallest alpha that saves {ratio:g} of the visual tokens' FLOPs: {_words(found)}",
        f"last alpha tried, which the released code takes: {_words(last)}",
    ]


def _words(fit: Fit) -> str:
    missed = "" if fit.reached else " (target missed)"
    removed = list(fit.removed)
    return f"{fit.alpha:g}, saves {1 - fit.flops:.4f}{missed}, removed inside each layer {removed}"


def _made_from(request: Request, seen: ImageDigest) -> dict[str, Any]:
    return {
        "images": seen.n_images,
        "images_sha256": seen.pixels.hexdigest(),
        "source": request.source,
        "prompt": request.prompt,
    }


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that moves a bar on standard error; without a terminal it shows nothing."""
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
        lines = run(read_request(argv))
    except (UserError, MethodError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except StoreLost as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
