"""What every engine that reads media promises: responses to images, videos and audio are those of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.engines.base import Engine
from lightrft.engines.http import HTTPEngine
from lightrft.engines.native import NativeEngine
from lightrft.engines.served.vllm_media import START_OPTION
from lightrft.engines.served.vllm_server import VLLMServerEngine
from lightrft.engines.vllm import VLLMEngine
from lightrft.engines.vllm_parts.media import SERVED_KINDS, MediaKind
from lightrft.engines.vllm_parts.parameter_names import REPEATED
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.multimodal.merge_inputs import media_token_ids, own_keywords
from lightrft.models.multimodal.submodules import part_of
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.workers.engine_kinds import check_media
from lightrft.workers.local_served import connect_http, local_served
from lightrft.workers.local_vllm import media_kinds
from tests.contracts.test_engine_contract import KEY, own_server
from tests.media_helpers import Piece, Rig, rig
from tests.model_helpers import assert_logprobs_close
from tests.vllm_server import TRAINS, vllm_server

HAS_VLLM = importlib.util.find_spec("vllm") is not None
SIZES = {
    # vLLM computes heads of 32 channels or more on a CPU
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    # the logits of the usual range are so alike that any picture gives the same tokens
    "initializer_range": 0.3,
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"head_dim": 32},
    "qwen2_audio": {
        # the only window that vLLM takes
        "tower": {"max_source_positions": 1500},
        "processor": {"chunk_length": 30},
        # of a model that samples no placeholder here, which transformers would take for a clip
        "seed": 1,
    },
}
PICTURE = ("image", (20, 30, 3))
TWO = ("one ", PICTURE, " two ", ("image", (33, 17, 3)), "?")
CLIP = (("video", (3, 16, 24, 3)), "and then?")
LONG_CLIP = (("video", (40, 16, 24, 3)), "and then?")
SOUND = ("audio", (7000,))
TWO_SOUNDS = ("one ", SOUND, " two ", ("audio", (2501,)), "?")


@dataclass
class Subject:
    engine: Engine
    rig: Rig
    family: str

    @property
    def one(self) -> Piece:
        """An item that the family reads."""
        return SOUND if "audio" in self.family else PICTURE

    @property
    def two(self) -> Sequence[Piece]:
        """A text with two items."""
        return TWO_SOUNDS if "audio" in self.family else TWO

    @property
    def placeholder(self) -> int:
        return self.rig.processor.tokens["audio" if "audio" in self.family else "image"]

    def rows(self) -> list[Sequence[Piece]]:
        rows: list[Sequence[Piece]] = [("what?",), (self.one, "what is it?"), self.two]
        if self.family in ("qwen2_vl", "qwen2_5_vl"):
            rows += [(("video", (2, 16, 24, 3)), "and then?")]
        if self.family == "qwen2_vl":
            rows += [CLIP, (PICTURE, *CLIP)]
        if self.family in ("qwen2_vl", "qwen2_5_vl"):
            # Their time axis is longer than their frames.
            rows += [CLIP, LONG_CLIP, (*LONG_CLIP, PICTURE, "or", *LONG_CLIP), LONG_CLIP[:1]]
        return rows

    def run(self, requests: list[Request], **sampling: Any) -> list[Rollout]:
        return list(self.engine.generate(requests, SamplingConfig(**sampling)))

    def greedy(self, prompt: Prompt, n: int = 8, **more: Any) -> Rollout:
        [found] = self.run([Request(prompt, 1, greedy=True, **more)], max_new_tokens=n)
        return found

    def logits(self, rollout: Rollout) -> torch.Tensor:
        """Of the response tokens, by the plain forward pass of transformers, without what the model reads as media."""
        prompt = rollout.prompt
        ids = torch.tensor([[*prompt.token_ids, *rollout.token_ids]])
        # a sampled placeholder stands for no item
        written = torch.tensor([[*prompt.token_ids, *[-1] * len(rollout)]])
        model, reader = self.rig.actor.model, self.rig.actor.family.reader
        with torch.no_grad():
            logits = model(ids, **own_keywords(model, reader, written, prompt.media)).logits
        banned = media_token_ids(model.config, self.rig.actor.family)
        assert self.placeholder in banned
        logits[..., list(banned)] = -torch.inf
        return logits[0, len(prompt.token_ids) - 1 : -1]

    def check(self, rollout: Rollout) -> None:
        logits = self.logits(rollout)
        assert rollout.token_ids == logits.argmax(-1).tolist()
        assert_logprobs_close(rollout.logprobs, logits.log_softmax(-1).amax(-1), logits)


def engine_of(name: str, made: Rig, media: list[MediaKind] | None = None) -> Engine:
    settings = EngineConfig(max_num_seqs=8)
    if name == "native":
        decoder = KVDecoder(made.actor.model).with_own_weights()
        return NativeEngine(decoder, made.tokenizer, settings, shared=False)
    model = ModelConfig(path=str(made.path))
    kinds = media_kinds(model) if media is None else media
    ends = [made.tokenizer.eos_token_id]
    banned = media_token_ids(made.actor.model.config, made.actor.family)
    return VLLMEngine(
        model, made.tokenizer, settings, ends, torch.float32, media=kinds, banned=banned
    )


@pytest.fixture(
    scope="module",
    params=[
        (name, family)
        for name in ("native", *(["vllm"] if HAS_VLLM else []))
        for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    ]
    + (
        [
            ("vllm", "qwen2_audio"),
            *(("vllm_server", name) for name in ("qwen2_vl", "qwen2_5_vl", "qwen2_audio")),
        ]
        if HAS_VLLM
        else []
    )
    + [("http", "qwen2_5_vl")],
    ids="-".join,
)
def subject(request: Any, tmp_path_factory: Any) -> Iterator[Subject]:
    name, family = request.param
    if name == "http":
        with served_subject(family, tmp_path_factory.mktemp("served")) as found:
            yield found
        return
    if name == "vllm_server":
        with vllm_subject(family, tmp_path_factory.mktemp("served")) as found:
            yield found
        return
    made = rig(family, tmp_path_factory.mktemp("model"), **SIZES, **OWN_SIZES.get(family, {}))
    engine = engine_of(name, made)
    yield Subject(engine, made, family)
    engine.close()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen2_audio"])
def vllm(request: Any, tmp_path_factory: Any) -> Iterator[Subject]:
    """An engine with vLLM, for what it alone refuses."""
    own = OWN_SIZES.get(request.param, {})
    made = rig(request.param, tmp_path_factory.mktemp("vllm"), **SIZES, **own)
    engine = engine_of("vllm", made)
    yield Subject(engine, made, request.param)
    engine.close()


@contextmanager
def served_subject(family: str, folder: Path) -> Iterator[Subject]:
    """An engine over ``lightrft serve``."""
    made = rig(family, folder, **SIZES)
    (folder / "keys").write_text("secret\n")
    with own_server(made.path, folder / "keys") as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, "secret")
        settings = EngineConfig(kind="http", url=url, api_key_env=KEY, max_num_seqs=8)
        engine = HTTPEngine.connect(settings, made.tokenizer, [made.tokenizer.eos_token_id])
        engine.require_updates()
        yield Subject(engine, made, family)
        engine.close()


@contextmanager
def vllm_subject(family: str, folder: Path) -> Iterator[Subject]:
    """An engine over vLLM's own server."""
    made = rig(family, folder, **SIZES, **OWN_SIZES.get(family, {}))
    repair_names(made.path / "model.safetensors")
    model = ModelConfig(path=str(made.path))
    with vllm_server(made.path, *TRAINS, START_OPTION) as server:
        settings = EngineConfig(kind="http", url=server.url, max_num_seqs=8, deadline=300.0)
        decoder, media = KVDecoder(made.actor.model), sorted(SERVED_KINDS[family])
        engine = local_served(
            connect_http,
            model,
            settings,
            made.tokenizer,
            decoder,
            SINGLE_PROCESS,
            torch.device("cpu"),
            trains=True,
            media=media,
        )
        assert isinstance(engine, VLLMServerEngine)
        yield Subject(engine, made, family)
        engine.close()


def repair_names(file: Path) -> None:
    """Write the names that the class of vLLM knows. transformers 5.19 repeats a part of some."""
    wrong, right = REPEATED
    tensors = {name.replace(wrong, right): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def test_greedy_responses_to_media_are_those_of_transformers(subject: Subject) -> None:
    prompts = [subject.rig.prompt(str(k), *row, seed=k) for k, row in enumerate(subject.rows())]
    asked = [Request(prompt, k, greedy=True) for k, prompt in enumerate(prompts)]
    found = subject.run(asked, max_new_tokens=8)
    assert len(found) == len(prompts)
    for rollout in found:
        subject.check(rollout)


def test_samples_have_the_log_probs_of_transformers(subject: Subject) -> None:
    prompt = subject.rig.prompt("0", *subject.two)
    found = subject.run([Request(prompt, k, k) for k in range(6)], max_new_tokens=6)
    assert len({tuple(rollout.token_ids) for rollout in found}) > 1
    # transformers takes a sampled placeholder for a picture
    placeholders = set(subject.rig.processor.tokens.values())
    plain = [rollout for rollout in found if not placeholders & set(rollout.token_ids)]
    assert plain
    for rollout in plain:
        logits = subject.logits(rollout)
        chosen = torch.tensor(rollout.token_ids)[:, None]
        expected = logits.log_softmax(-1).gather(-1, chosen)[:, 0]
        assert_logprobs_close(rollout.logprobs, expected, logits)


def test_equal_texts_with_other_media_get_other_responses(subject: Subject) -> None:
    prompts = [subject.rig.prompt("0", subject.one, "?", seed=seed) for seed in (0, 1)]
    found = [subject.greedy(prompt) for prompt in prompts]
    assert found[0].prompt.token_ids == found[1].prompt.token_ids
    assert found[0].logprobs != found[1].logprobs
    for rollout in found:
        subject.check(rollout)


def test_a_response_to_media_is_resumed_to_the_same_tokens(subject: Subject) -> None:
    prompt = subject.rig.prompt("0", *subject.two)
    whole = subject.greedy(prompt)
    part = subject.greedy(prompt, pause_after_tokens=3)
    assert part.token_ids == whole.token_ids[:3]
    assert subject.greedy(prompt, partial=part).token_ids == whole.token_ids


def test_a_sampled_placeholder_stands_for_nothing_when_its_response_is_resumed(
    subject: Subject,
) -> None:
    if subject.engine.shares_weights or isinstance(subject.engine, NativeEngine):
        pytest.skip("the engine that others are compared with")
    prompt = subject.rig.prompt("0", *subject.two)
    part = subject.greedy(prompt, pause_after_tokens=3)
    part.token_ids[1] = subject.placeholder
    expected = Subject(engine_of("native", subject.rig), subject.rig, "").greedy(
        prompt, partial=part
    )
    found = subject.greedy(prompt, partial=part)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("part", ["tower", "projector", "language"])
def test_new_weights_of_one_part_alone_change_the_responses(subject: Subject, part: str) -> None:
    prompt = subject.rig.prompt("0", *subject.two)
    before = subject.greedy(prompt)
    model = subject.rig.actor.model
    old = {name: tensor.clone() for name, tensor in model.named_parameters()}
    new = {
        name: (tensor * 1.5 if tensor.ndim > 1 else tensor + 0.05)
        if part_of(subject.rig.actor.family, name) == part
        else tensor
        for name, tensor in old.items()
    }
    try:
        subject.engine.load_weights(new.items(), 3)
        model.load_state_dict(new, strict=False)
        after = subject.greedy(prompt)
        assert after.logprobs != before.logprobs
        subject.check(after)
    finally:
        subject.engine.load_weights(old.items(), 4)
        model.load_state_dict(old, strict=False)
    again = subject.greedy(prompt)
    assert again.token_ids == before.token_ids
    subject.check(again)


@pytest.mark.skipif(not HAS_VLLM, reason="make test-vllm installs vLLM")
def test_placeholders_that_vllm_expands_to_another_number_are_refused(vllm: Subject) -> None:
    good, prompt = vllm.rig.prompt("good", "?"), vllm.rig.prompt("short", vllm.one, "?")
    prompt.token_ids.remove(vllm.placeholder)
    with pytest.raises(ModelError, match=r"vLLM expands prompt 'short' to .* differ from token"):
        vllm.run([Request(good, 1), Request(prompt, 2)], max_new_tokens=4)
    # the good one was aborted too, else these would be refused
    vllm.engine.load_weights(vllm.rig.actor.model.named_parameters(), 5)


@pytest.mark.skipif(not HAS_VLLM, reason="make test-vllm installs vLLM")
def test_more_places_than_items_are_refused(vllm: Subject) -> None:
    prompt = vllm.rig.prompt("more", vllm.one, "?")
    prompt.token_ids += [5, vllm.placeholder]
    with pytest.raises(ModelError, match="vLLM cannot read the media of prompt 'more'"):
        vllm.greedy(prompt)


@pytest.mark.skipif(not HAS_VLLM, reason="make test-vllm installs vLLM")
def test_videos_of_a_family_that_was_not_compared_are_refused_by_vllm(vllm: Subject) -> None:
    if vllm.family != "qwen3_vl":
        pytest.skip("its videos were compared, or it reads none")
    with pytest.raises(ConfigError, match="kind video") as error:
        vllm.greedy(vllm.rig.prompt("clip", *CLIP))
    assert "engine.kind=native" in str(error.value)


def test_audio_through_lightrft_serve_gives_the_responses_of_the_native_engine(
    tmp_path: Path,
) -> None:
    with served_subject("qwen2_audio", tmp_path) as subject:
        prompt = subject.rig.prompt("0", ("audio", (16000,)), " or ", ("audio", (2500,)), "?")
        expected = Subject(engine_of("native", subject.rig), subject.rig, "").greedy(prompt)
        found = subject.greedy(prompt)
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_lightrft_serve_refuses_media_that_do_not_fit_the_placeholders(tmp_path: Path) -> None:
    with served_subject("qwen2_vl", tmp_path) as subject:
        prompt = subject.rig.prompt("0", PICTURE, "?")
        prompt.token_ids.remove(subject.rig.processor.tokens["image"])
        with pytest.raises(ConfigError, match="placeholders for image, and its media make"):
            subject.greedy(prompt)
        # the server goes on
        assert len(subject.greedy(subject.rig.prompt("0", PICTURE, "?"))) == 8


def test_a_family_that_was_not_compared_is_refused_at_the_start(tmp_path: Path) -> None:
    made = rig("gemma3", tmp_path)
    model = ModelConfig(path=str(made.path))
    check_media(model, EngineConfig(kind="vllm"), set())
    check_media(model, EngineConfig(), {"image"})
    with pytest.raises(ConfigError, match="kind image for the model type gemma3"):
        check_media(model, EngineConfig(kind="vllm"), {"image"})


def test_windows_of_audio_that_vllm_cannot_take_are_refused_at_the_start(tmp_path: Path) -> None:
    model = ModelConfig(path=str(rig("qwen2_audio", tmp_path).path))
    with pytest.raises(ConfigError, match="this model has windows of 100") as found:
        check_media(model, EngineConfig(kind="vllm"), {"audio"})
    assert "engine.kind=native" in str(found.value)
