"""Small steps on a CPU get one thread, large ones all; the number is put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightrft.utils.cpu_threads import WORTH_SHARING, threads_for

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_small_steps_get_one_thread_and_the_number_is_put_back() -> None:
    with threads_for(WORTH_SHARING / 2, CPU):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_error_inside_puts_the_number_back() -> None:
    with pytest.raises(KeyError), threads_for(0, CPU):
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("operations", "device"), [(WORTH_SHARING, CPU), (0.0, torch.device("cuda"))]
)
def test_large_steps_and_other_devices_keep_all_threads(
    operations: float, device: torch.device
) -> None:
    with threads_for(operations, device):
        assert torch.get_num_threads() == 2
