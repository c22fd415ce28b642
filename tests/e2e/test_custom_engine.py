"""An engine of one file, ``examples/custom_engine.py``, in a run of ``lightrft rl``."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError
from tests.architecture.tree import ROOT

KIND = f"{ROOT}/examples/custom_engine.py:KIND"


def config(tree: dict[str, Any], **engine: Any) -> RLConfig:
    over = {"engine": {"kind": KIND, **engine}, "train": {"steps": 2}}
    return build(RLConfig, deep_merge(tree, over))


def test_a_run_trains_with_an_engine_of_one_file_whose_log_probs_and_weights_are_checked(
    rl_tree: dict[str, Any], tmp_path: Any
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def spread(rollout):\n    return len(set(rollout.token_ids)) / 6\n")
    run_rl(config(deep_merge(rl_tree, {"reward": {"terms": [f"{reward}:spread"]}})))
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows if row.get("policy/grad_norm", 0) > 0] == [1, 2], rows


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"options": {"sed": 1}}, r"unknown setting sed; did you mean seed\?"),
        ({"kind": f"{KIND[:-4]}Options"}, "names a .*, and not an EngineKind"),
        ({"kind": f"{KIND[:-4]}KIN"}, "has no 'KIN'; did you mean 'KIND'"),
    ],
)
def test_what_such_an_engine_does_not_know_is_refused_by_name(
    rl_tree: dict[str, Any], engine: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run_rl(config(rl_tree, **engine))


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"url": "http://a"}, r"engine\.url = http://a needs engine\.kind sglang or http"),
        ({"kind": "native", "options": {"seed": 1}}, r"needs engine\.kind package\.module:NAME"),
        ({"kind": "nativ"}, r"no engine; did you mean 'native'\? Known: native, vllm"),
    ],
)
def test_settings_of_other_kinds_of_engines_are_refused(
    rl_tree: dict[str, Any], engine: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        config(rl_tree, **engine)
