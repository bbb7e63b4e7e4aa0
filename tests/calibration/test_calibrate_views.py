"""Priors of images that are seen in several views: each view has its own, and position alone says nothing then."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from espalier.harness.cli.calibrate import read_request, run
from espalier.harness.cost.budget import Budget
from espalier.harness.engine import artifacts
from espalier.harness.engine.artifacts import Artifact
from espalier.harness.engine.priors import (
    load_prior,
    prior_artifact,
    require_prior,
    resize_prior,
    save_prior,
)
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.specs.run_spec import ModelSpec
from espalier.harness.tools.calibration.prior_maps import ViewMeans, calibrate
from espalier.methods.base import MethodError, Need, Site
from espalier.methods.d2pruner import D2Pruner, debiased
from tests import tiny
from tests.calibration.test_calibrate import model_spec
from tests.families import FAMILIES
from tests.family_runs import adapter_of, saved
from tests.methods.cases import Tiling, grid_of

#: A global view of 24 x 24 cells and a plane of four crops, as LLaVA-NeXT has them.
ANYRES: Tiling = ((0, 0, 24, 24), (0, 1, 48, 48))


def positional(tiling: Tiling, levels: dict[int, float]) -> tuple[Tensor, Tensor]:
    """Return grid (1, N, 4) and attention (1, N) that depends on the view, the row and the column alone."""
    grid = grid_of(tiling)
    level = torch.tensor([levels[int(view)] for view in grid[:, 1]])
    logits = level * (1 + grid[:, 2].cos() ** 2 + 0.1 * grid[:, 3].sin())
    return grid[None], (logits / (1 + logits.sum()))[None]


def prior_of(*images: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    means = ViewMeans()
    for grid, attention in images:
        means.add(grid, attention)
    return tuple(values.float() for values in means.prior())


# ---------------------------------------------------------------- position alone


def test_positional_attention_is_one_in_every_view_of_an_image_with_crops():
    """With one map for both views it was 0.4 in the global view and 1.6 in the crops."""
    image = positional(ANYRES, {0: 1.0, 1: 4.0})
    relative = debiased(image[1], resize_prior(prior_of(image, image), image[0]))
    assert (relative - 1).abs().max() < 0.01  # eps is 1e-7, the attention 1e-4


def test_the_best_tokens_come_from_all_views():
    """None of the best 320 of 2880 lay in the global view, whatever the image showed."""
    grid, attention = positional(ANYRES, {0: 1.0, 1: 4.0})
    shown = torch.rand(attention.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    relative = debiased(attention * shown, resize_prior(prior_of((grid, attention)), grid))
    best = relative[0].topk(320).indices
    assert float((grid[0, best, 1] == 0).float().mean()) == pytest.approx(1 / 5, abs=0.05)


def test_images_with_other_numbers_of_tiles_leave_position_alone_at_one():
    """More tiles, less attention for each: a tile that only large images have is no less important for that."""
    levels = {0: 2.0, 1: 1.0, 2: 1.5, 3: 3.0}
    tiles = [(0, number, 4, 4) for number in (1, 2, 3)]
    images = [positional((*tiles[:count], (0, 0, 4, 4)), levels) for count in (0, 2, 3, 3)]
    prior = prior_of(*images)
    for grid, attention in images:
        relative = debiased(attention, resize_prior(prior, grid))
        assert float(relative.max() / relative.min()) == pytest.approx(1, abs=1e-4)


def test_views_that_all_images_have_are_plain_means():
    generator = torch.Generator().manual_seed(0)
    grid = grid_of(((0, 0, 2, 2), (0, 1, 2, 3)))[None]
    rows = [torch.rand(1, 10, generator=generator) for _ in range(3)]
    whole, plane = prior_of(*((grid, row) for row in rows))
    mean = torch.cat(rows).double().mean(dim=0).float()
    assert torch.equal(whole.flatten(), mean[:4])
    assert torch.equal(plane.flatten(), mean[4:])


def test_maps_on_other_grids_are_resized_to_the_first_one_of_their_view():
    first = grid_of(((0, 0, 2, 2), (0, 1, 2, 4)))[None]
    second = grid_of(((0, 0, 2, 2), (0, 1, 4, 2)))[None]
    values = torch.arange(12.0)[None]
    _, plane = prior_of((first, values), (second, values))
    resized = interpolate(values[:, 4:].view(1, 1, 4, 2), (2, 4), mode="bilinear")[0, 0]
    assert torch.allclose(plane, (values[0, 4:].view(2, 4) + resized) / 2)


# ---------------------------------------------------------------- on other grids


def slow_prior(prior: tuple[Tensor, ...], tiling: Tiling) -> Tensor:
    """Resize the map of each view by torch and lay the parts one behind the other."""
    parts = []
    for _, view, height, width in tiling:
        values = prior[min(view, len(prior) - 1)]
        parts.append(interpolate(values[None, None], (height, width), mode="bilinear").flatten())
    return torch.cat(parts)


@pytest.mark.parametrize(
    "tiling",
    [
        ((0, 0, 4, 4), (0, 1, 6, 8)),
        ((0, 1, 8, 5), (0, 0, 4, 4), (1, 1, 3, 3), (1, 0, 4, 4)),  # two images, crops first
        ((0, 1, 4, 4), (0, 2, 4, 4), (0, 3, 4, 4), (0, 4, 4, 4), (0, 0, 4, 4)),  # a tile too many
        tuple((frame, 0, 3, 3) for frame in range(5)),  # a video
    ],
    ids=["planes", "two images", "tiles", "frames"],
)
def test_every_view_gets_its_own_map(tiling: Tiling):
    generator = torch.Generator().manual_seed(0)
    prior = tuple(
        torch.rand(size, generator=generator) for size in ((4, 4), (8, 8), (4, 4), (4, 4))
    )
    resized = resize_prior(prior, grid_of(tiling)[None])
    assert torch.allclose(resized[0], slow_prior(prior, tiling), atol=1e-6)


def test_crops_are_refused_where_only_the_global_view_was_calibrated():
    with pytest.raises(MethodError, match="calibrated on images without any"):
        resize_prior((torch.ones(4, 4),), grid_of(((0, 0, 4, 4), (0, 1, 4, 8)))[None])


# ---------------------------------------------------------------- on models


@pytest.mark.parametrize(
    "name", ["llava_next", "onevision_image", "internvl", "deepseek_ocr_gundam"]
)
def test_an_image_is_not_biased_against_itself(name: str):
    """Calibrated on one image, its relative attention is 1 for every token of every view."""
    adapter = adapter_of(name)
    image = tiny.picture(0, 50, 40)
    calibrated = calibrate(adapter, (1,), [image], "w1 w2 w3")
    prior = tuple(values.float() for values in calibrated.means[1].prior())
    assert len(prior) > 1
    recorder = tiny.Recorder((Site("layer", 2),), (Need("last_attention"), Need("prior")))
    with Session(adapter, recorder, Budget("kept", 0.0), prior=prior) as session:
        session.generate(adapter.encode([tiny.chat("w1 w2 w3", image)]), max_new_tokens=1)
    (view,) = recorder.views
    attention, bias = view.signals["last_attention"], view.signals["prior"]
    assert torch.allclose(attention.float(), bias, rtol=1e-5)
    assert len(view.grid[0, :, 1].unique()) == len(prior)


def test_the_prior_of_each_view_is_the_mean_of_eager_attention():
    adapter, eager = adapter_of("llava_next"), adapter_of("llava_next", attention="eager")
    images = [tiny.picture(seed, 56, 56) for seed in range(3)]
    means = calibrate(adapter, (2,), images, "w1 w2", batch_size=2).means[2]
    rows = []
    for image in images:
        inputs = eager.encode([tiny.chat("w1 w2", image)])
        layout = eager.layout(inputs)
        with torch.inference_mode():
            maps = eager.model(**inputs, output_attentions=True).attentions
        rows.append(maps[2][0, :, -1, layout.visual[0]].mean(dim=0))
    wanted = torch.stack(rows).mean(dim=0)
    whole, plane = means.prior()
    assert means.n_maps == [3, 3]
    assert torch.allclose(torch.cat([whole.flatten(), plane.flatten()]), wanted.double(), atol=1e-6)


# ---------------------------------------------------------------- artifacts

MADE_FROM = {"images": 2, "images_sha256": "0" * 64, "source": "test", "prompt": "w1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_llava(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def spec(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    monkeypatch.setattr(artifacts, "DEFAULT_STORE", tmp_path / "local")
    return model_spec(folder)


def test_a_prior_of_several_views_comes_back(spec: ModelSpec):
    prior = (torch.rand(4, 4), torch.rand(3, 5), torch.rand(2, 2))
    path = save_prior(spec, 1, prior, {**MADE_FROM, "maps": [2, 2, 1]})
    loaded = load_prior(spec, 1)
    assert len(loaded) == 3
    assert all(torch.equal(a, b) for a, b in zip(loaded, prior, strict=True))
    described = json.loads(path.with_suffix(".json").read_text())
    assert (described["format"], described["grids"]) == (2, [[4, 4], [3, 5], [2, 2]])
    assert described["maps"] == [2, 2, 1]
    assert require_prior(spec, D2Pruner(), "d2pruner") == (path,)


def test_the_command_stores_a_map_for_each_view(tmp_path: Path):
    store = tmp_path / "store"
    model = replace(FAMILIES["llava_next"].spec, path=saved("llava_next"), weights="trained")
    request = read_request(["layer=1,2", "images=3", "batch_size=2", f"store={store}"])
    request = replace(request, spec=replace(request.spec, model=model), images_dir=tmp_path)
    for seed, size in enumerate([(50, 40), (56, 56), (28, 56)]):
        tiny.picture(seed, *size).save(tmp_path / f"{seed}.png")
    paths = [Path(line) for line in run(request)]
    assert [path.name for path in paths] == ["tiny_layer1.safetensors", "tiny_layer2.safetensors"]
    described = json.loads(paths[0].with_suffix(".json").read_text())
    assert (described["images"], described["maps"]) == (3, [3, 3])
    assert [list(values.shape) for values in load_prior(model, 1, store)] == described["grids"]
    assert described["grids"][0] == [4, 4]


def stored(spec: ModelSpec, tensor: Tensor, **description: object) -> Artifact:
    artifact = prior_artifact(spec, 1)
    artifact.save(tensor, {**MADE_FROM, **description})
    return artifact


@pytest.mark.parametrize(
    ("tensor", "description", "line"),
    [
        (torch.ones(4, 4), {"grid": [4, 4], "maps": 4}, "has one map for all views of an image"),
        (torch.ones(8), {"format": 3, "grids": [[2, 4]], "maps": [2]}, "the unknown format 3"),
        (torch.ones(8), {"format": 2, "grids": [[2, 2], [3, 3]], "maps": [2, 2]}, "on its grids"),
        (-torch.ones(4, 4), {"grid": [4, 4], "maps": 2}, "does not hold attention values"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_command(
    spec: ModelSpec, tensor: Tensor, description: dict, line: str
):
    """The first is what earlier versions left behind for a model whose images have two views."""
    stored(spec, tensor, **description)
    command = r"run: python -m espalier calibrate .*model=tiny layer=1"
    with pytest.raises(UserError, match=f"{line}.*{command}"):
        load_prior(spec, 1)


def test_a_prior_of_mixed_views_is_refused_before_the_model_loads(spec: ModelSpec):
    stored(spec, torch.ones(4, 4), grid=[4, 4], maps=4)
    with pytest.raises(UserError, match="has one map for all views of an image"):
        require_prior(spec, D2Pruner(), "d2pruner")


def test_a_prior_of_one_view_from_an_earlier_version_is_read(spec: ModelSpec):
    stored(spec, torch.ones(4, 4), grid=[4, 4], maps=2)
    assert [tuple(values.shape) for values in load_prior(spec, 1)] == [(4, 4)]
