"""What a run asks of a cluster, and what its ranks are told, without a cluster."""

from __future__ import annotations

import pytest

from lightrft.config import LaunchConfig, RLConfig
from lightrft.trainer.launch.placement import Place, environments, layout, side_by_side
from lightrft.utils.errors import ConfigError
from lightrft.utils.settings import build, load_settings


def launch(**ray: object) -> LaunchConfig:
    return build(LaunchConfig, {"kind": "ray", "processes": 3, "ray": ray})


def test_each_rank_has_a_bundle_of_its_own_with_a_whole_device_however_little_of_it_it_takes() -> None:
    plan = layout(launch(cpus=2, devices=0.5), accelerated=True)
    assert plan.bundles == ({"CPU": 2.0, "GPU": 1.0},) * 3
    assert [(slot.bundle, slot.cpus, slot.devices) for slot in plan.ranks] == [(i, 2.0, 0.5) for i in range(3)]
    assert plan.asked == {"CPU": 6.0, "GPU": 3.0}


def test_ranks_that_compute_on_processors_ask_for_no_device() -> None:
    plan = layout(launch(cpus=0.5), accelerated=False)
    assert plan.bundles == ({"CPU": 0.5},) * 3
    assert {slot.devices for slot in plan.ranks} == {0.0}


def test_ranks_of_one_node_follow_one_another_and_see_one_anothers_devices() -> None:
    nodes = [("b", "2"), ("a", "0"), ("b", "0"), ("a", "1")]
    places = [Place(node, f"10.0.0.{node}", 100 + i, (device,)) for i, (node, device) in enumerate(nodes)]
    order = side_by_side(places)
    assert order == [0, 2, 1, 3]
    told = environments([places[i] for i in order], port=1234)
    assert [(e["RANK"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"], e["GROUP_RANK"]) for e in told] == [
        ("0", "0", "2", "0"),
        ("1", "1", "2", "0"),
        ("2", "0", "2", "1"),
        ("3", "1", "2", "1"),
    ]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in told] == ["2,0", "2,0", "0,1", "0,1"]
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"], e["WORLD_SIZE"]) for e in told} == {("10.0.0.b", "1234", "4")}


@pytest.mark.parametrize("setting", ["address=auto", "cpus=2", "placement=SPREAD", "restarts=0", "wait=1", "environment={A: b}"])
def test_a_setting_of_ray_is_refused_where_nothing_runs_on_ray(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.ray\.\w+ = .* changes nothing with kind local; set launch\.kind=ray"):
        load_settings(RLConfig, [], [f"launch.ray.{setting}"])
