import json
import random

import numpy as np
import pytest
import torch

from lightrft.utils.errors import CheckpointError
from lightrft.utils.seeding import (
    RandomStream,
    capture_rng,
    derive_seed,
    numpy_generator,
    restore_rng,
    seed_everything,
    torch_generator,
)
from lightrft.utils.state_io import load_state, save_state


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


@pytest.mark.parametrize("old", [False, True])
def test_every_rank_takes_up_the_state_of_the_device_that_the_first_drew_on(monkeypatch, old):
    """Without a device: what is asked of torch for it."""
    advanced, fresh, given = torch.tensor([1]), torch.tensor([0]), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # A device without an index is that which the process has taken for itself, here its first.
    of = {torch.device("cuda"): advanced, 0: advanced, torch.device("cuda:0"): advanced}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: of.get(device, fresh))
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: given.append((state, device))
    )
    saved = capture_rng(torch.device("cuda"))
    if old:  # as states of all devices that the first rank saw
        saved["cuda"] = [advanced, fresh]
    restore_rng(saved, torch.device("cuda"))
    assert given == [(advanced, torch.device("cuda"))]


def test_a_state_of_another_kind_of_device_is_left_out_with_a_warning(caplog):
    restore_rng({**capture_rng(), "cuda": torch.tensor([1])}, torch.device("cpu"))
    assert "the random state of a cuda device was saved, and this run is on cpu" in caplog.text
    restore_rng(capture_rng(), torch.device("cuda"))
    assert "the random state of no accelerator was saved, and this run is on cuda" in caplog.text


SEED = 9031061017462425079
ORDERS = [
    [4, 0, 2, 3, 1, 5],
    [3, 0, 1, 5, 4, 2],
    [1, 5, 3, 4, 2, 0],
    [1, 5, 2, 3, 0, 4],
    [3, 2, 1, 5, 4, 0],
]
PERMUTATION = [4, 2, 3, 0, 5, 1]


def test_the_seeds_and_orders_of_runs_are_those_of_earlier_versions():
    """A resumed run goes on with the data and the responses of the version that began it."""
    assert derive_seed(5, 2, 0, 1, 3) == SEED
    assert [list(numpy_generator(5, stream, 1).permutation(6)) for stream in RandomStream] == ORDERS
    assert (
        torch.randperm(6, generator=torch_generator(derive_seed(5, "mini-batches", 2, 0))).tolist()
        == PERMUTATION
    )


def test_each_use_and_index_of_a_generator_has_its_own_numbers():
    drawn = {
        numpy_generator(5, stream, *index).random()
        for stream in RandomStream
        for index in ((1,), (2,), (1, 2))
    }
    assert len(drawn) == 3 * len(RandomStream)
