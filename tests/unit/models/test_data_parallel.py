"""Towers under data parallelism: a process whose micro-batch has no media makes the same calls as those that have some."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightrft.models.families import FAMILIES
from lightrft.models.tiny import ALL_MEDIA_FAMILIES, TORCHVISION_FAMILIES
from lightrft.types import Batch
from tests import warm
from tests.media_helpers import Rig, mixed_batch, mixed_prompts, rig
from tests.model_helpers import Float64, gap, gradients, weights

WITHOUT_TORCHVISION = [name for name in ALL_MEDIA_FAMILIES if name not in TORCHVISION_FAMILIES]
"""Families of the two processes."""


def shares(batch: Batch) -> list[torch.Tensor]:
    """Rows of two processes: all that have media, and those that have none."""
    plain = batch.prompt_of == 0
    return [(~plain).nonzero()[:, 0], plain.nonzero()[:, 0]]


def weighted(actor: Any, batch: Batch, index: torch.Tensor, model: Any) -> torch.Tensor:
    """The share of rows ``index`` in the loss of the whole ``batch``."""
    whole = weights(batch.tokens, torch.float64)
    mine = torch.isin(batch.row_of, index)
    return (model(batch.select(index)).logprobs * whole[mine]).sum()


def work(rank: int, folder: str) -> None:
    """Two steps of each family on this process's share, wrapped by torch's own data parallelism."""
    torch.set_num_threads(1)
    families = Path(folder, "families").read_text().split()
    rigs = {family: rig(family, Path(folder) / str(rank), torch.float64) for family in families}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=600),
    )
    found: dict[str, Any] = {}
    for family, r in rigs.items():
        batch = mixed_batch(mixed_prompts(r))
        model = DistributedDataParallel(r.actor.train(False))
        for _ in range(2):  # what the first step left out would be missed in the second
            r.actor.zero_grad()
            with Float64():
                # Gradients are averaged over the two.
                loss = 2 * weighted(r.actor, batch, shares(batch)[rank], model)
                loss.backward()
        found[family] = {
            name: p.grad for name, p in r.actor.named_parameters() if p.grad is not None
        }
    torch.save(found, f"{folder}/found_{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The gradients of both processes, of the families that were selected."""
    folder = tmp_path_factory.mktemp("parallel")
    asked = [item for item in request.session.items if "found" in vars(item)["fixturenames"]]
    mine = [item for item in asked if item.path == request.path]
    families = [vars(item)["callspec"].params["family"] for item in mine]
    (folder / "families").write_text(" ".join(families))
    warm.spawn(work, folder)
    return [torch.load(folder / f"found_{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("family", WITHOUT_TORCHVISION)
def test_two_processes_of_which_one_has_no_media_get_the_gradient_of_the_joined_batch(
    family, found, tmp_path
):
    r = rig(family, tmp_path, torch.float64)
    batch = mixed_batch(mixed_prompts(r))
    with Float64():
        _, expected = gradients(r.actor, batch)
    for grads in (found[0][family], found[1][family]):
        assert gap({name: grads[name] for name in expected}, expected) < 1e-9
        # parameters that no feature depends on
        assert not any(grad.any() for name, grad in grads.items() if name not in expected)


@pytest.fixture(params=ALL_MEDIA_FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Rig, Batch]:
    r = rig(request.param, tmp_path)
    batch = mixed_batch(mixed_prompts(r))
    return r, batch.select(shares(batch)[1])


def test_a_tower_that_runs_for_nothing_changes_no_number_and_gives_its_parameters_gradients_of_zero(
    made,
):
    r, text = made
    expected, grads = gradients(r.actor, text)
    r.actor.run_towers = True
    found, more = gradients(r.actor, text)
    assert found.equal(expected)
    of = r.actor.part_of
    # Gemma 3n embeds each token by its projectors too, and takes none of it for text.
    assert {of(name) for name, grad in grads.items() if grad.any()} == {"language"}
    assert set(more) == {name for name, p in r.actor.named_parameters() if p.requires_grad}
    assert all(
        grad.equal(grads[name]) if name in grads else not grad.any() for name, grad in more.items()
    )


def test_a_batch_with_one_kind_of_media_runs_the_towers_of_the_others_too(made):
    r, _ = made
    whole = mixed_batch(mixed_prompts(r))
    rich = [p for p, row in enumerate(mixed_prompts(r)) if row.media]
    some = whole.select((whole.prompt_of == rich[0]).nonzero()[:, 0])
    expected, grads = gradients(r.actor, some)
    r.actor.run_towers = True
    found, more = gradients(r.actor, some)
    assert found.equal(expected)
    assert set(more) == {name for name, p in r.actor.named_parameters() if p.requires_grad}
    assert all(more[name].equal(grad) for name, grad in grads.items())


def test_towers_of_one_process_rest_while_there_is_nothing_to_read(made):
    r, _ = made
    assert not r.actor.run_towers


def test_every_tower_of_every_family_has_a_blank():
    readers = {
        name: family.reader for name, family in FAMILIES.items() if family.reader is not None
    }
    assert {
        name for name, reader in readers.items() for tower in reader.towers if tower.blank is None
    } == set()
