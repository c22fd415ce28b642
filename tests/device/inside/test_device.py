"""The counting device itself: what it counts and what it refuses."""

from __future__ import annotations

import pytest
import torch

from lightrft.utils.device_transfer import to_device
from lightrft.utils.seeding import capture_rng, restore_rng
from tests.device.counting_device import NAME, allocated, counted


def test_it_is_the_current_accelerator(device: torch.device) -> None:
    assert torch.accelerator.current_accelerator() == torch.device(NAME)
    assert torch.accelerator.device_count() == 1
    assert str(torch.zeros(2, device=device)) == f"tensor([0., 0.], device='{NAME}:0')"


def test_bytes_are_counted_to_the_last(device: torch.device) -> None:
    before = allocated()
    tensor = torch.empty(1000, device=device)
    assert allocated() - before == 4000 == torch.accelerator.memory_allocated() - before
    view = tensor[:10]
    del tensor
    assert allocated() - before == 4000
    del view
    assert allocated() == before


def test_an_operation_that_mixes_devices_is_refused_except_with_a_scalar(
    device: torch.device,
) -> None:
    here, there = torch.ones(3), torch.ones(3, device=device)
    for mix in (torch.add, torch.mul, torch.maximum, torch.dot):
        with pytest.raises(RuntimeError, match="same device"):
            mix(there, here)
    assert (there + torch.tensor(2.0)).cpu().tolist() == [3, 3, 3]


def test_waits_and_transfers_are_counted(device: torch.device) -> None:
    host = torch.arange(4)
    with counted() as counts:
        there = to_device(host, device)
        there = there + 1
        there.sum()
    assert (counts.waits, counts.to_device, counts.to_host) == (0, 1, 0)
    for wait in (
        lambda: host.to(device),
        there.cpu,
        there.tolist,
        there.sum().item,
        there.nonzero,
        lambda: there[there > 2],
    ):
        with counted() as counts:
            wait()
        assert counts.waits == 1
    with counted() as counts:
        there[host]  # an index may be on the host, as on a GPU
    assert counts.waits >= 1


def test_random_numbers_are_those_of_the_cpus_generator_and_its_state_is_resumed(
    device: torch.device,
) -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device=device).cpu(), expected)
    state = capture_rng(device)
    first = torch.randn(4, device=device).cpu()
    torch.manual_seed(0)
    restore_rng(state, device)
    assert torch.equal(torch.randn(4, device=device).cpu(), first)
