"""What a run asks of a cluster, and what its ranks are told, without a cluster."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightrft.algorithms.requirements import Requirements
from lightrft.config.base import build, load_settings
from lightrft.config.launch import LaunchConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.placement import RankPlacement, environments, plan_placement, side_by_side
from lightrft.utils.errors import ConfigError
from lightrft.workers.build_remote import check_workers


def launch(**ray: object) -> LaunchConfig:
    return build(LaunchConfig, {"kind": "ray", "processes": 3, "ray": ray})


def test_each_rank_has_a_bundle_of_its_own_with_a_whole_device_however_little_of_it_it_takes() -> (
    None
):
    plan = plan_placement(launch(cpus=2, devices=0.5), accelerated=True)
    assert plan.bundles == ({"CPU": 2.0, "GPU": 1.0},) * 3
    assert [(slot.bundle, slot.cpus, slot.devices) for slot in plan.ranks] == [
        (i, 2.0, 0.5) for i in range(3)
    ]
    assert plan.asked == {"CPU": 6.0, "GPU": 3.0}


def test_ranks_that_compute_on_processors_ask_for_no_device() -> None:
    plan = plan_placement(launch(cpus=0.5), accelerated=False)
    assert plan.bundles == ({"CPU": 0.5},) * 3
    assert {slot.devices for slot in plan.ranks} == {0.0}


def test_workers_take_what_ranks_leave_of_their_devices_and_else_have_bundles_of_their_own() -> (
    None
):
    plan = plan_placement(
        launch(
            devices=0.5,
            engines=4,
            engine_devices=0.5,
            worker_cpus=2,
            scorers=1,
            teachers=1,
            model_devices=0.25,
        ),
        accelerated=True,
    )
    assert [slot.bundle for name, slot in plan.workers.items() if name.startswith("engine ")] == [
        0,
        1,
        2,
        3,
    ]
    assert plan.bundles == (
        *[{"CPU": 3.0, "GPU": 1.0}] * 3,
        {"CPU": 2.0, "GPU": 0.5},
        {"CPU": 2.0},
        {"CPU": 2.0, "GPU": 0.25},
    )
    assert (plan.workers["scorer 0"].devices, plan.workers["teacher 0"].devices) == (0.0, 0.25)


def test_on_processors_every_worker_has_a_bundle_of_its_own() -> None:
    plan = plan_placement(
        launch(cpus=1, engines=1, references=2, worker_cpus=0.5), accelerated=False
    )
    assert plan.bundles == (*[{"CPU": 1.0}] * 3, *[{"CPU": 0.5}] * 3)
    assert list(plan.workers) == ["engine 0", "reference 0", "reference 1"]


@pytest.mark.parametrize(
    "setting",
    [
        "weights=shared",
        "engine_devices=1",
        "model_devices=1",
        "worker_cpus=2",
        "call_timeout_minutes=1",
    ],
)
def test_a_setting_of_workers_is_refused_without_workers(setting: str) -> None:
    with pytest.raises(
        ConfigError, match=r"launch\.ray\.\w+ = .* changes nothing without launch\.ray\.\w+"
    ):
        load_settings(RLConfig, [], ["launch.kind=ray", f"launch.ray.{setting}"])


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"ray": {"scorers": 1}}, "launch.ray.scorers = 1 changes nothing: reward.terms is empty"),
        (
            {"ray": {"references": 1}},
            "launch.ray.references = 1 changes nothing: no part in force reads a reference",
        ),
        (
            {"ray": {"teachers": 1}},
            "launch.ray.teachers = 1 changes nothing: algorithm.distill is none",
        ),
        (
            {"ray": {"references": 1}, "lora": True},
            "launch.ray.references = 1: model.lora has the policy without its adapters",
        ),
        (
            {"ray": {"references": 1}, "kl": {"where": "loss", "refresh_every": 2}},
            "launch.ray.references = 1: with algorithm.kl.refresh_every = 2 the reference "
            "follows the policy, and only the ranks can move it; set launch.ray.references=0, or",
        ),
    ],
)
def test_workers_of_a_role_that_the_run_lacks_or_keeps_with_the_ranks_are_refused(
    tree: dict[str, Any], said: str
) -> None:
    kl = (
        {"coef": 0.1, **tree["kl"]}
        if "kl" in tree
        else {"coef": 0.1}
        if "lora" in tree
        else {"coef": 0.0}
    )
    config = {
        "launch": {"kind": "ray", "ray": tree["ray"]},
        "model": {"lora": {"rank": 2} if "lora" in tree else None},
        "algorithm": tree.get("algorithm", {"preset": "grpo", "kl": kl}),
    }
    settings = build(RLConfig, config)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_workers(settings, Requirements.of(settings.algorithm))


def test_ranks_of_one_node_follow_one_another_and_see_one_anothers_devices() -> None:
    nodes = [("b", "2"), ("a", "0"), ("b", "0"), ("a", "1")]
    places = [
        RankPlacement(node, f"10.0.0.{node}", 100 + i, (device,))
        for i, (node, device) in enumerate(nodes)
    ]
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
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"], e["WORLD_SIZE"]) for e in told} == {
        ("10.0.0.b", "1234", "4")
    }


@pytest.mark.parametrize(
    "setting",
    [
        "address=auto",
        "cpus=2",
        "placement=SPREAD",
        "restarts=0",
        "placement_timeout_minutes=1",
        "environment={A: b}",
    ],
)
def test_a_setting_of_ray_is_refused_where_nothing_runs_on_ray(setting: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"launch\.ray\.\w+ = .* changes nothing with kind local; set launch\.kind=ray",
    ):
        load_settings(RLConfig, [], [f"launch.ray.{setting}"])
