"""Corruption of decoded media."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.datasets.media.image import RATIO, SHARE, _crop, corrupted


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**63 - 1))
def test_a_corrupted_image_or_clip_has_its_shape_and_depends_on_the_seed_alone(
    height: int, width: int, frames: int, seed: int
) -> None:
    clip = np.random.default_rng(0).integers(0, 256, (frames, height, width, 3)).astype(np.uint8)
    found = corrupted(clip, "video", seed)
    assert found.shape == clip.shape and found.dtype == clip.dtype
    assert np.array_equal(found, corrupted(clip, "video", seed))
    # every frame is cropped alike
    assert np.array_equal(found[0], corrupted(clip[0], "image", seed))


def test_a_crop_keeps_up_to_a_fifth_of_the_image() -> None:
    for seed in range(300):
        top, left, rows, columns = _crop(400, 600, np.random.default_rng(seed))
        assert 0 <= top <= 400 - rows and 0 <= left <= 600 - columns
        assert SHARE[0] * 0.9 < rows * columns / 240_000 < SHARE[1] * 1.1
        assert RATIO[0] * 0.95 < columns / rows < RATIO[1] * 1.05


def test_the_colours_of_a_corrupted_image_are_those_of_its_crop() -> None:
    image = np.zeros((60, 60, 3), np.uint8)
    image[:, :30] = 200
    shades = {int(corrupted(image, "image", seed).mean()) for seed in range(60)}
    # crops of the left half, of the right half and across the border
    assert {0, 200} <= shades and len(shades) > 2


@pytest.mark.parametrize("length", [1, 3, 1000])
def test_a_corrupted_sound_repeats_a_part_of_itself(length: int) -> None:
    sound = np.arange(length, dtype=np.float32)
    found = corrupted(sound, "audio", 3)
    assert found.shape == sound.shape and found.dtype == sound.dtype
    assert len(set(found.tolist())) <= max(1, 0.2 * length + 1)
    assert set(found.tolist()) <= set(sound.tolist())
