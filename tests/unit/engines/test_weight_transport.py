"""Weights as bytes in buckets: whatever the sizes and types, what comes out is what went in."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from threading import Thread

import numpy as np
import pytest
import torch
from torch import Tensor

from lightrft.distributed.local_store import keep_gloo_local
from lightrft.engines.sending.tensor_slices import Layout, fill, used
from lightrft.engines.weight_transport import (
    FileHandle,
    ProcessGroupBroadcast,
    WeightBuffer,
    file_handle,
    mapped,
    nameless_file,
    open_meeting,
    opened,
)


def tensors() -> dict[str, Tensor]:
    """Of every kind that a model may hold: large, small, odd, without dimensions, without entries."""
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(37, 29, generator=generator),
        "half": torch.randn(5, 7, generator=generator).bfloat16(),
        "one": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "wide": torch.randn(3, generator=generator).double(),
        "packed": torch.randint(0, 255, (13,), generator=generator, dtype=torch.uint8),
        "turned": torch.randn(6, 11, generator=generator).T,
        "last": torch.randn(2, 3, generator=generator).half(),
    }


class Shelf:
    """What an engine does with weights."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.held |= dict(weights)


@pytest.mark.parametrize("size", [16, 64, 1008, 100_000])
def test_buckets_of_any_size_bring_every_bit_and_none_is_larger(size: int) -> None:
    shelf, sent = Shelf(), tensors()
    inbox = WeightBuffer(shelf.load)
    slots = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    count = 0
    for count, (slot, layout) in enumerate(fill(sent.items(), slots), 1):
        assert slot == (count - 1) % 2 and used(layout) <= size
        inbox.put(slots[slot][: used(layout)].numpy(), layout)
    total = sum(t.numel() * t.element_size() for t in sent.values())
    assert total / size <= count <= total // size + 1 + 16 * len(sent) // size
    assert list(shelf.held) == list(sent)
    for name, tensor in sent.items():
        found = shelf.held[name]
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(found, tensor)


def test_a_bucket_may_be_written_to_again_once_it_was_taken() -> None:
    shelf = Shelf()
    inbox = WeightBuffer(shelf.load)
    slots = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    for slot, layout in fill([("a", torch.arange(4.0))], slots):
        inbox.put(slots[slot][: used(layout)].numpy(), layout)
        slots[slot].zero_()
    assert torch.equal(shelf.held["a"], torch.arange(4.0))


def test_none_among_the_weights_ends_a_bucket_and_an_empty_one_is_not_sent() -> None:
    slots = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    weights = [None, ("a", torch.ones(2)), None, None, ("b", torch.ones(3)), ("c", torch.ones(1))]
    found = [(slot, [piece.name for piece in layout]) for slot, layout in fill(weights, slots)]
    assert found == [(0, ["a"]), (1, ["b", "c"])]


def test_a_worker_takes_the_buckets_of_a_turn_and_leaves_when_its_sender_ends() -> None:
    keep_gloo_local()
    place = open_meeting("127.0.0.1", 1, 1, 20.0)
    shelf, meeting = Shelf(), place.meeting
    inbox = WeightBuffer(shelf.load)

    def send() -> None:
        carrier = ProcessGroupBroadcast((), 64, torch.device("cpu"), 20.0, place)
        for _ in range(2):
            for slot, layout in fill(
                [("a", torch.arange(20.0)), ("b", torch.ones(3))], carrier.slots
            ):
                carrier.send(slot, layout)
            carrier.end_turn()
        carrier.send(0, fill_one(carrier.slots, "late"))
        carrier.close()

    sender = Thread(target=send)
    sender.start()
    inbox.join(meeting.host, meeting.port, 1, 2, 64, "cpu", 20.0)
    assert [inbox.receive(0), inbox.receive(0)] == [2, 2]
    with pytest.raises(RuntimeError, match="sender 0 has ended its transfer"):
        inbox.receive(0)
    with pytest.raises(RuntimeError, match="has left"):
        inbox.receive(0)
    sender.join()
    assert list(shelf.held) == ["a", "b", "late"]
    assert torch.equal(shelf.held["a"], torch.arange(20.0))


def fill_one(slots: list[Tensor], name: str) -> Layout:
    """Write a tensor into the first of ``slots``, and return its layout."""
    return next(fill([(name, torch.ones(1))], slots))[1]


def test_what_was_not_finished_is_forgotten_when_the_sender_leaves() -> None:
    shelf = Shelf()
    inbox = WeightBuffer(shelf.load)
    slots = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    first, *_ = (
        (slots[slot][: used(layout)].numpy().copy(), layout)
        for slot, layout in fill([("a", torch.ones(8))], slots)
    )
    inbox.put(*first)
    inbox.leave()
    for slot, layout in fill([("a", torch.arange(8.0))], slots):
        inbox.put(slots[slot][: used(layout)].numpy(), layout)
    assert torch.equal(shelf.held["a"], torch.arange(8.0))


def test_a_handle_shows_the_memory_itself_in_another_process_also_after_the_file_is_closed() -> (
    None
):
    number = nameless_file(64)
    slot = mapped(number)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        other.submit(attach, file_handle(number)).result()
        os.close(number)
        slot.copy_(torch.arange(64, dtype=torch.uint8))
        np.testing.assert_array_equal(
            other.submit(contents).result(), np.arange(64, dtype=np.uint8)
        )


def test_a_handle_of_another_machine_is_refused() -> None:
    number, unlike = nameless_file(64), nameless_file(64)
    try:
        with pytest.raises(RuntimeError, match="not on this machine"):
            opened(replace(file_handle(number), number=unlike))
        with pytest.raises(RuntimeError, match="cannot be opened"):
            opened(replace(file_handle(number), number=10**6))
    finally:
        os.close(number)
        os.close(unlike)


ATTACHED: list[torch.Tensor] = []


def attach(handle: FileHandle) -> None:
    """Open ``handle`` in this process, and keep it."""
    ATTACHED.append(opened(handle))


def contents() -> np.ndarray:
    """Return what the kept memory holds."""
    return ATTACHED[0].numpy()
