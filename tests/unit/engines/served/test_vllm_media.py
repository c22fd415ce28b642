"""Media in the messages of a vLLM server. ``tests/contracts/test_engine_media.py`` has the real server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.engines.served.vllm_media import ServedMedia, runs_of
from lightrft.engines.served.vllm_server import VLLMServerEngine
from lightrft.models.loading.from_pretrained import model_settings
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.workers.local_vllm import media_kinds
from tests.media_helpers import rig

PICTURE = ("image", (16, 16, 3))


def test_each_run_of_placeholders_is_an_item() -> None:
    assert runs_of([5, 5, 1, 5], 5) == [(0, 2), (3, 1)]
    assert runs_of([1], 5) == []


def test_pictures_without_text_between_them_are_refused(tmp_path: Path) -> None:
    made = rig("qwen2_vl", tmp_path)
    model = ModelConfig(path=str(made.path))
    media = ServedMedia(model_settings(model), media_kinds(model))
    prompt = made.prompt("two", PICTURE, PICTURE)
    found = media.features(prompt, "weights")
    assert len(found["kwargs_data"]["image"]) == 2
    assert len(set(found["mm_hashes"]["image"])) == 2
    assert found["mm_hashes"] != media.features(prompt, "others")["mm_hashes"]
    token = made.processor.tokens["image"]
    prompt.token_ids[:] = sorted(prompt.token_ids, key=lambda id: id == token)
    with pytest.raises(ModelError, match="1 runs of placeholders for image, and 2 items"):
        media.features(prompt, "new weights")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_clip_whose_text_a_server_of_adapters_places_elsewhere_is_refused(
    family: str, tmp_path: Path
) -> None:
    made = rig(family, tmp_path)
    model = ModelConfig(path=str(made.path))
    media = ServedMedia(model_settings(model), media_kinds(model), own_positions=True)
    media.check(made.prompt("short", ("video", (2, 16, 24, 3)), "and then?"))
    long = made.prompt("long", ("video", (40, 16, 24, 3)), "and then?")
    with pytest.raises(ConfigError, match=r"a video reaches position .* in time and 2 in its"):
        media.check(long)
    ServedMedia(model_settings(model), media_kinds(model)).check(long)


@pytest.mark.parametrize(
    ("version", "over", "named"),
    [
        ("0.33.1", {}, "is vLLM 0.33.1"),
        ("0.32.0", {"check_logprobs": False}, "engine.check_logprobs = false"),
        ("0.32.0+cpu", {}, "kind video for the model type qwen3_vl"),
    ],
)
def test_media_that_a_server_may_compute_in_another_way_are_refused(
    version: str, over: dict[str, Any], named: str
) -> None:
    config = EngineConfig(kind="http", url="http://127.0.0.1:1", **over)
    client: Any = SimpleNamespace(ask=lambda method, path: {"version": version})
    engine = VLLMServerEngine(client, SimpleNamespace(), config, [])
    with pytest.raises(ConfigError, match="reads text alone"):
        engine.refuse_media("prompts", ["video"])
    engine.media = ServedMedia(SimpleNamespace(model_type="qwen3_vl"), [])
    with pytest.raises(ConfigError, match=named) as found:
        engine.refuse_media("prompts", ["video"])
    assert "engine.kind=native" in str(found.value) or "engine.check_logprobs=true" in str(
        found.value
    )
