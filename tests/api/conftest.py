"""The embedded models for Python callers, and a question about a scene."""

from __future__ import annotations

import pytest
from PIL import Image

import espalier
from espalier.harness.seedling.scene_benchmarks import sample_scene, samples


@pytest.fixture(scope="module")
def model() -> espalier.Model:
    return espalier.load("seedling", device="cpu")


@pytest.fixture(scope="module")
def denoising() -> espalier.Model:
    return espalier.load("seedling_diffusion", device="cpu")


@pytest.fixture(scope="module")
def scene() -> tuple[Image.Image, str]:
    (sample,) = samples("seedling_vqa", "test", 0, 0, 1)
    return sample_scene(sample).to_pil(), sample["question"]
