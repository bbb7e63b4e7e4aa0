"""Calibration of priors: what is measured, how it is stored and found, and its shape on other grids."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from espalier.harness.cli.calibrate import main, read_request
from espalier.harness.cost.budget import Budget
from espalier.harness.engine import artifacts
from espalier.harness.engine.priors import (
    load_prior,
    prior_artifact,
    prior_for,
    prior_layers,
    require_prior,
    resize_prior,
    save_prior,
)
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.specs.run_spec import ModelSpec
from espalier.harness.tools.calibration.calibration_images import folder_images, scene_images
from espalier.harness.tools.calibration.prior_maps import Recorder, calibrate
from espalier.methods.base import MethodError, Site
from espalier.methods.d2pruner import D2Pruner
from espalier.methods.fastv import FastV
from tests import commands, tiny
from tests.methods.cases import grid_of

# ---------------------------------------------------------------- resizing


@pytest.mark.parametrize("size", [(12, 12), (7, 15), (24, 24), (1, 5), (30, 3)])
def test_resizing_equals_bilinear_interpolation(size: tuple[int, int]):
    prior = torch.rand(12, 12, generator=torch.Generator().manual_seed(0))
    wanted = torch.nn.functional.interpolate(
        prior[None, None], size=size, mode="bilinear", align_corners=False
    )
    resized = resize_prior((prior,), grid_of([(0, 0, *size)])[None])
    assert torch.allclose(resized, wanted.flatten()[None], atol=1e-6)


def test_the_calibration_grid_comes_back_bit_for_bit():
    prior = torch.rand(12, 12, generator=torch.Generator().manual_seed(0))
    resized = resize_prior((prior,), grid_of([(0, 0, 12, 12)])[None])
    assert torch.equal(resized, prior.flatten()[None])


def test_every_image_gets_the_prior_on_its_own_grid_and_rows_may_differ():
    prior = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))
    rows = [[(0, 0, 4, 6), (1, 0, 4, 6), (2, 0, 6, 4)], [(0, 0, 8, 9)]]
    resized = resize_prior((prior,), torch.stack([grid_of(tiling) for tiling in rows]))
    alone = [resize_prior((prior,), grid_of([tile])[None])[0] for tile in rows[0]]
    assert torch.equal(resized[0], torch.cat(alone))
    assert torch.equal(resized[1], resize_prior((prior,), grid_of(rows[1])[None])[0])


def test_padding_on_the_right_disturbs_no_real_token():
    prior = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))
    short, long = grid_of([(0, 0, 4, 5)]), grid_of([(0, 0, 6, 6)])
    padded = torch.nn.functional.pad(short, (0, 0, 0, 16))
    resized = resize_prior((prior,), torch.stack([padded, long]))
    assert torch.equal(resized[0, :20], resize_prior((prior,), short[None])[0])


# ---------------------------------------------------------------- measuring


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_llava(tmp_path_factory.mktemp("tiny") / "model")


def model_spec(path: Path, **changes: object) -> ModelSpec:
    base = ModelSpec(
        name="tiny",
        adapter="llava",
        path=path,
        hub=None,
        revision=None,
        dtype="float32",
        attention="sdpa",
        weights="trained",
        device="cpu",
        facts=tiny.LLAVA.facts,
    )
    return replace(base, **changes)


def test_the_prior_is_the_mean_of_eager_attention(folder: Path):
    adapter = tiny.load_llava(folder)
    images = [tiny.picture(seed) for seed in range(5)]
    calibrated = calibrate(adapter, (0, 2), images, "w1 w2", batch_size=2)
    assert calibrated.n_images == 5

    eager = tiny.load_llava(folder, attention="eager")
    maps: dict[int, list[torch.Tensor]] = {0: [], 2: []}
    for image in images:
        content = [{"type": "image", "image": image}, {"type": "text", "text": "w1 w2"}]
        inputs = eager.encode([[{"role": "user", "content": content}]])
        visual = inputs["input_ids"][0] == 3
        with torch.inference_mode():
            attentions = eager.model(**inputs, output_attentions=True).attentions
        for layer, rows in maps.items():
            rows.append(attentions[layer][0, :, -1, visual].mean(dim=0))
    for layer, rows in maps.items():
        wanted = torch.stack(rows).mean(dim=0).view(4, 4).double()
        (prior,) = calibrated.means[layer].prior()
        assert torch.allclose(prior, wanted, atol=1e-6)


def test_recording_drops_nothing_and_refuses_a_layer_outside_the_model(folder: Path):
    adapter = tiny.load_llava(folder)
    seen: list[int] = []
    recorder = Recorder((1, 3), lambda layer, grid, rows: seen.append(layer))
    with Session(adapter, recorder, Budget("kept", 0.0)) as session:
        record = session.generate(adapter.encode(tiny.CHATS[:1]), ["a"], max_new_tokens=1).records[
            0
        ]
    assert seen == [1, 3]
    assert record.entering == (16,) * tiny.DEPTH
    with pytest.raises(MethodError, match="layer=4 is out of range; valid: 0 to 3"):
        Recorder((4,), lambda *_: None).sites(tiny.DEPTH)


def test_the_hash_of_the_images_follows_pixels_and_order(folder: Path):
    adapter = tiny.load_llava(folder)
    images = [tiny.picture(seed) for seed in range(3)]
    digests = [
        calibrate(adapter, (1,), some, "w1", batch_size=size).pixels.hexdigest()
        for some, size in ((images, 1), (images, 2), (images[::-1], 3), (images[:2], 3))
    ]
    assert (digests[0], len(set(digests))) == (digests[1], 3)


# ---------------------------------------------------------------- artifacts


@pytest.fixture
def spec(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    monkeypatch.setattr(artifacts, "DEFAULT_STORE", tmp_path / "store")
    monkeypatch.setattr(artifacts, "SHIPPED", tmp_path / "shipped")
    return model_spec(folder)


MADE_FROM = {"images": 2, "images_sha256": "0" * 64, "source": "test", "prompt": "w1", "maps": 2}


def test_a_stored_prior_comes_back_with_its_description(spec: ModelSpec):
    prior = torch.rand(4, 4, dtype=torch.float64)
    path = save_prior(spec, 1, (prior,), MADE_FROM)
    assert path == prior_artifact(spec, 1).path
    assert torch.equal(load_prior(spec, 1)[0], prior.float())
    described = json.loads(path.with_suffix(".json").read_text())
    assert (described["model"], described["layer"]) == ("tiny", 1)
    assert (described["dtype"], described["grid"]) == ("float32", [4, 4])
    assert set(MADE_FROM) < set(described)
    assert {file.name for file in path.parent.iterdir()} == {
        path.name,
        path.with_suffix(".json").name,
    }


def test_storing_again_gives_the_same_bytes(spec: ModelSpec):
    path = save_prior(spec, 1, (torch.ones(4, 4),), MADE_FROM)
    before = path.read_bytes(), path.with_suffix(".json").read_bytes()
    save_prior(spec, 1, (torch.ones(4, 4),), MADE_FROM)
    assert (path.read_bytes(), path.with_suffix(".json").read_bytes()) == before


def test_a_missing_prior_prints_the_command(spec: ModelSpec):
    command = (
        "python -m espalier calibrate method=d2pruner model=tiny layer=1 "
        f"model.path={spec.path} images_dir=<folder of images>"
    )
    with pytest.raises(UserError, match=f"no positional prior for decoder layer 1; run: {command}"):
        require_prior(spec, D2Pruner(K=2), "d2pruner")
    with pytest.raises(UserError, match="model=tiny layer=3"):
        load_prior(spec, 3)


def test_only_methods_that_read_a_prior_need_one(spec: ModelSpec):
    assert prior_layers(D2Pruner(K=3), tiny.DEPTH) == (2,)
    assert prior_layers(FastV(), tiny.DEPTH) == ()
    assert (require_prior(spec, FastV(), "fastv"), prior_for(spec, FastV())) == ((), None)
    path = save_prior(spec, 2, (torch.ones(4, 4),), MADE_FROM)
    assert require_prior(spec, D2Pruner(K=3), "d2pruner") == (path,)
    assert torch.equal(prior_for(spec, D2Pruner(K=3))[0], torch.ones(4, 4))


def test_the_priors_of_several_layers_are_refused(spec: ModelSpec):
    class Twice(D2Pruner):
        def sites(self, depth: int) -> tuple[Site, ...]:
            return (Site("layer", 2), Site("layer", 3))

    assert prior_layers(Twice(), tiny.DEPTH) == (1, 2)
    with pytest.raises(UserError, match=r"priors of layers \(1, 2\); valid: one layer"):
        prior_for(spec, Twice())


def test_other_weights_make_a_prior_stale(spec: ModelSpec, tmp_path: Path):
    save_prior(spec, 1, (torch.ones(4, 4),), MADE_FROM)
    copy = shutil.copytree(spec.path, tmp_path / "copy")
    assert require_prior(
        replace(spec, path=copy), D2Pruner(), "d2pruner"
    )  # the same weights elsewhere
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(
        UserError, match=r"was made with other weights; run: python -m espalier calibrate"
    ):
        require_prior(replace(spec, path=copy), D2Pruner(), "d2pruner")


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "does not open"),
        (lambda path: path.with_suffix(".json").write_text("{"), "has no readable .json"),
        (
            lambda path: path.with_suffix(".json").write_text(
                path.with_suffix(".json").read_text().replace('"w1"', '"w2"')
            ),
            "has an edited .json",
        ),
    ],
)
def test_a_damaged_artifact_is_one_line(spec: ModelSpec, damage, line: str):
    damage(save_prior(spec, 1, (torch.ones(4, 4),), MADE_FROM))
    with pytest.raises(UserError, match=line):
        load_prior(spec, 1)


def test_tensor_and_description_must_belong_together(spec: ModelSpec):
    path = save_prior(spec, 1, (torch.ones(4, 4),), MADE_FROM)
    description = path.with_suffix(".json").read_bytes()
    save_prior(spec, 1, (torch.ones(4, 4),), {**MADE_FROM, "prompt": "w9"})
    path.with_suffix(".json").write_bytes(description)
    with pytest.raises(UserError, match=r"does not belong to the \.json file"):
        load_prior(spec, 1)


def test_random_weights_have_an_artifact_of_their_own(spec: ModelSpec):
    random = replace(spec, weights="random")
    assert prior_artifact(random, 1).path != prior_artifact(spec, 1).path
    with pytest.raises(UserError, match=r"model\.weights=random"):
        require_prior(random, D2Pruner(), "d2pruner")


# ---------------------------------------------------------------- images and command line


def test_a_folder_is_sampled_without_replacement_and_by_seed(tmp_path: Path):
    for number in range(9):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("not an image")

    def reds(n_images: int, seed: int) -> list[int]:
        return [image.getpixel((0, 0))[0] for image in folder_images(tmp_path, n_images, seed)]

    assert reds(9, 0) == list(range(9))
    assert reds(4, 1) == sorted(set(reds(4, 1)))
    assert reds(4, 1) == reds(4, 1) != reds(4, 2)
    with pytest.raises(UserError, match=r"images=10: .* holds 9 images"):
        folder_images(tmp_path, 10, 0)
    (tmp_path / "3.png").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"'3\.png' does not open as an image"):
        reds(9, 0)


def test_scene_images_are_training_scenes():
    from espalier.harness.seedling.scenes import Scenes

    first, second = scene_images(2, seed=7)
    assert first.tobytes() == Scenes().scene("train", 7, 0).image.tobytes()
    assert first.tobytes() != second.tobytes()


def test_the_command_line_is_read():
    request = read_request(
        ["method=d2pruner_localization", "model=seedling", "images=200", "seed=3"]
    )
    assert request.layers == (4,)
    assert (request.n_images, request.batch_size, request.spec.seed) == (200, 8, 3)
    assert request.prompt == "describe the image ."
    assert request.source == "seedling train scenes, seed 3, 0 to 199"
    assert read_request(["layer=3,1"]).layers == (1, 3)
    fitting = read_request(["method=fitprune", "ratio=0.6"])
    assert (fitting.layers, fitting.n_images, fitting.spec.budget.ratio) == ((), 64, 0.6)


def test_the_shipped_priors_belong_to_the_shipped_weights():

    model = commands.spec_of().model
    for method in (D2Pruner(), D2Pruner(K=5, alpha=0.5)):
        (values,) = prior_for(model, method)
        assert values.shape == (12, 12)
        assert float(values.min()) > 0
        assert float(values.sum()) < 1


def test_calibrating_the_seedling_writes_to_the_store_what_a_run_then_finds_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shipped = {file: file.read_bytes() for file in artifacts.SHIPPED.iterdir()}
    store = f"store={tmp_path}"
    assert main(["method=d2pruner", "model=seedling", "images=3", "batch_size=2", store]) == 0
    path = tmp_path / "calibration" / "seedling_layer1.safetensors"
    assert capsys.readouterr().out.splitlines() == [str(path)]
    assert {file: file.read_bytes() for file in artifacts.SHIPPED.iterdir()} == shipped
    model = read_request(["layer=1"]).spec.model
    assert require_prior(model, D2Pruner(), "d2pruner", store=tmp_path) == (path,)
    priors = [prior_for(model, D2Pruner(), store) for store in (tmp_path, None)]
    ((calibrated,), (shipped_prior,)) = [prior for prior in priors if prior is not None]
    assert calibrated.shape == shipped_prior.shape == (12, 12)
    assert not torch.equal(calibrated, shipped_prior)
    # One of other weights under the same name does not hide what was shipped for these.
    described = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**described, "revision": "other"}))
    assert torch.equal(prior_for(model, D2Pruner(), tmp_path)[0], shipped_prior)
