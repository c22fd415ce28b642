import json
import random

import numpy as np
import pytest
import torch

from lightrft.utils.errors import CheckpointError
from lightrft.utils.seeding import capture_rng, restore_rng, seed_everything
from lightrft.utils.state import load_state, save_state


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


@pytest.fixture(autouse=True)
def own_generators():
    saved = capture_rng()
    yield
    restore_rng(saved)


def test_equal_seeds_give_equal_draws_from_every_generator():
    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(draw(), first))


def test_captured_state_survives_a_file_and_gives_the_same_draws(tmp_path):
    seed_everything(3)
    draw()  # the odd half of a pair of gaussians is part of the state
    save_state(tmp_path / "rng", capture_rng())
    expected = draw()
    seed_everything(99)
    restore_rng(load_state(tmp_path / "rng"))
    assert draw() == expected


def test_captured_state_is_plain_data():
    state = capture_rng()
    json.dumps({k: v for k, v in state.items() if k in ("python", "numpy")})
    assert state["torch"].dtype == torch.uint8


def test_a_malformed_state_is_a_clear_error():
    state = capture_rng()
    del state["numpy"]
    with pytest.raises(CheckpointError, match="numpy"):
        restore_rng(state)
