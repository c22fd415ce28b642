"""Servers that are wrong, broken or gone: the engine over HTTP names the cause, or gives the same tokens in spite of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.config.base import build
from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import EvaluateConfig
from lightrft.engines import http
from lightrft.engines.fingerprint import checksums
from lightrft.engines.http import HTTPEngine, TextAlone
from lightrft.engines.native import NativeEngine
from lightrft.engines.served.start_checks import served_model
from lightrft.engines.served.weight_buckets import read_bucket
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.trainer.inference import run_eval
from lightrft.types import Prompt, Ragged, Request, Rollout
from lightrft.utils.errors import ConfigError, ModelError, ResourceError
from lightrft.utils.http_client import server_client
from lightrft.utils.http_client.server_client import OpenStream, Passing
from lightrft.workers.local_served import check_server_media
from tests.model_helpers import byte_pairs
from tests.serving_helpers import advanced_clock, altered, free_port, model_server, skip_waits

KEY = "TEST_KEY_OF_SERVERS"
VOCABULARY = len(tiny_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with model_server(folder, name="tiny", engine={"max_cache_tokens": 400}) as (url, _):
        yield url


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the token that the variable of ``KEY`` holds."""
    monkeypatch.setenv(KEY, "secret")
    file = tmp_path / "keys"
    file.write_text("secret\n")
    return file


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.01)


@dataclass
class Opened:
    """An engine over a server."""

    engine: HTTPEngine

    def run(self, count: int = 4, **sampling: Any) -> dict[int, Rollout]:
        return {
            r.seed: r for r in self.engine.generate(requests(count), SamplingConfig(**sampling))
        }


def requests(count: int = 4, **more: Any) -> list[Request]:
    prompt = Prompt("p", tiny_tokenizer()("1+1=")["input_ids"])
    return [Request(prompt, 10 + k, k, **more) for k in range(count)]


def opened(
    url: str, tokenizer: Any = None, vocabulary: int | None = None, **settings: Any
) -> Opened:
    tokenizer = tokenizer or tiny_tokenizer()
    config = EngineConfig(kind="http", url=url, **settings)
    return Opened(HTTPEngine.connect(config, tokenizer, [tokenizer.eos_token_id], vocabulary))


def native(folder: Path, **sampling: Any) -> dict[int, Rollout]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig())
    return {r.seed: r for r in engine.generate(requests(), SamplingConfig(**sampling))}


def test_the_tokens_of_a_seed_are_those_of_the_native_engine(url: str, folder: Path) -> None:
    expected = native(folder, max_new_tokens=9)
    found = opened(url).run(max_new_tokens=9)
    assert {s: r.token_ids for s, r in found.items()} == {
        s: r.token_ids for s, r in expected.items()
    }


def test_only_the_native_engine_continues_a_response_as_if_it_had_not_paused(
    url: str, folder: Path
) -> None:
    """As docs/engines.md says: other engines sample the rest with another seed."""
    limits = SamplingConfig(max_new_tokens=12)
    native_engine = NativeEngine(
        KVDecoder(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()),
        AutoTokenizer.from_pretrained(folder),
        EngineConfig(),
    )
    served = opened(url).engine
    whole = {r.seed: r.token_ids for r in native_engine.generate(requests(), limits)}
    paused = list(served.generate(requests(pause_after_tokens=4), limits))
    assert all(r.token_ids == whole[r.seed][:4] for r in paused)
    rest = [Request(r.prompt, r.seed, r.sample, partial=r) for r in paused]
    assert {r.seed: r.token_ids for r in native_engine.generate(rest, limits)} == whole
    for rollout in served.generate(rest, limits):
        assert rollout.token_ids[:4] == whole[rollout.seed][:4]
        assert rollout.token_ids[4:] != whole[rollout.seed][4:]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"served_model": "tini"}, r"engine\.served_model = 'tini'.*did you mean 'tiny'"),
        ({"digest": "sha256:000000000000"}, r"engine\.digest = 'sha256:000000000000'"),
        ({"api_key_env": "TEST_NO_SUCH_VARIABLE"}, "this environment variable is not set"),
    ],
    ids=["model", "digest", "key"],
)
def test_another_model_or_key_is_refused_at_the_start(
    settings: dict[str, Any], named: str, url: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        opened(url, **settings)


def test_the_only_model_is_found_beside_adapters_that_the_server_has() -> None:
    listed = [{"id": "base", "parent": None}, {"id": "adapter", "parent": "base"}]
    client = SimpleNamespace(ask=lambda method, path: {"data": listed})
    config = EngineConfig(kind="http", url="http://127.0.0.1:1")
    assert served_model(client, config)["id"] == "base"  # type: ignore[arg-type]
    listed.append({"id": "other"})
    with pytest.raises(ConfigError, match=r"serves 2 models \(base, other\)"):
        served_model(client, config)  # type: ignore[arg-type]


def test_a_folder_for_adapters_that_nothing_would_read_is_refused(
    url: str, folder: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "label": "2"}\n')
    tree = {
        "model": {"path": str(folder)},
        "reward": {"terms": ["math"]},
        "eval": {"data": {"sources": [str(rows)]}},
        "engine": {"kind": "http", "url": url, "weights_dir": str(tmp_path)},
        "run": {"dir": str(tmp_path)},
    }
    with pytest.raises(ConfigError, match=r"engine\.weights_dir = .* changes nothing here"):
        run_eval(build(EvaluateConfig, tree))


def test_another_tokenizer_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"another tokenizer.*serve the model of model\.path"):
        opened(url, byte_pairs(["another"], 270))


def without(*names: str) -> Any:
    def edit(number: int, event: dict[str, Any]) -> dict[str, Any]:
        for choice in event["choices"]:
            for name in names:
                choice.pop(name, None)
        return event

    return edit


def raw(number: int, event: dict[str, Any]) -> dict[str, Any]:
    """Log-probs as if neither temperature nor filters had been applied."""
    for choice in event["choices"]:
        choice["sampled_logprobs"] = [-1.2 for _ in choice["token_ids"]]
    return event


@pytest.mark.parametrize(
    ("edit", "error", "named"),
    [
        (without("token_ids"), TextAlone, "the answers have no token_ids"),
        (without("sampled_logprobs"), ModelError, "tokens with 0 log-probs"),
        (raw, ConfigError, "not those of the distribution that is sampled from"),
    ],
    ids=["ids", "logprobs", "raw"],
)
def test_answers_that_no_training_can_use_are_refused_at_the_start(
    edit: Any, error: type[Exception], named: str, url: str
) -> None:
    with altered(url, edit) as other, pytest.raises(error, match=named):
        opened(other)


@pytest.mark.parametrize("odd", [VOCABULARY, 10**20, -1, 5.0, True, None, "5"])
def test_a_token_id_that_the_policy_does_not_know_is_refused(odd: object, url: str) -> None:
    is_odd: list[bool] = []

    def edit(number: int, event: dict[str, Any]) -> dict[str, Any]:
        for choice in event["choices"] if is_odd else ():
            choice["token_ids"] = [odd for _ in choice["token_ids"]]
        return event

    with altered(url, edit) as other:
        found = opened(other, vocabulary=VOCABULARY)
        is_odd.append(True)
        named = (
            rf"engine\.url = 'http.*' returned token id {odd!r}, .*its vocabulary of {VOCABULARY};"
        )
        with pytest.raises(ModelError, match=named) as caught:
            found.run(max_new_tokens=9)
    assert "\n" not in str(caught.value)


def test_a_token_id_that_only_a_larger_model_knows_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ModelError, match=r"returned token id \d+, .*its vocabulary of 1;"):
        opened(url, vocabulary=1)


def test_token_ids_that_are_no_list_are_refused(url: str) -> None:
    def edit(number: int, event: dict[str, Any]) -> dict[str, Any]:
        for choice in event["choices"]:
            choice["token_ids"] = 5
        return event

    with (
        altered(url, edit) as other,
        pytest.raises(ModelError, match=r"returned 5 in place of a list of token ids"),
    ):
        opened(other)


def test_a_stream_that_breaks_is_asked_for_again_and_gives_the_same_tokens(
    url: str, folder: Path
) -> None:
    breaks: list[bool] = []

    def edit(number: int, event: dict[str, Any]) -> dict[str, Any] | None:
        return None if breaks and breaks.pop() else event

    with altered(url, edit) as other:
        found = opened(other)
        breaks += [True, False] * 3
        rollouts = found.run(max_new_tokens=12)
        assert found.engine.take_counts()["retries"] == 3
    expected = native(folder, max_new_tokens=12)
    for seed, rollout in rollouts.items():
        assert rollout.token_ids == expected[seed].token_ids
        assert rollout.logprobs == pytest.approx(expected[seed].logprobs, abs=1e-5)


def test_a_stream_that_stalls_is_asked_for_again_and_gives_the_same_tokens(
    url: str, folder: Path
) -> None:
    over, stalls = threading.Event(), []

    def edit(number: int, event: dict[str, Any]) -> dict[str, Any]:
        if stalls and stalls.pop():
            over.wait(900)
        return event

    with altered(url, edit) as other:
        try:
            start = time.monotonic()
            found = opened(other, timeout=1.0)
            stalls += [True, False]
            rollouts = found.run(max_new_tokens=12)
            assert time.monotonic() - start < 300
        finally:
            over.set()
    expected = native(folder, max_new_tokens=12)
    assert {s: r.token_ids for s, r in rollouts.items()} == {
        s: r.token_ids for s, r in expected.items()
    }


def test_a_stream_that_answers_lets_other_requests_through_even_if_it_is_rejected(url: str) -> None:
    client = opened(url).engine.client
    for _ in range(client.breaker.after):
        client.breaker.failed("silent")
    events: list[Any] = []

    def take(event: Any) -> bool:
        events.append(event)
        if len(events) == 1:
            assert client.ask("GET", "/v1/models")["data"]
            raise Passing("these are other weights")
        return True

    body = {"prompt": [5, 6], "max_tokens": 1, "stream": True}
    client.stream("/v1/completions", lambda: body, take, 300.0, OpenStream())
    assert len(events) > 1 and client.breaker.silent_for == 0


def test_a_watched_response_is_seen_once_in_spite_of_a_broken_stream(url: str) -> None:
    seen: list[list[int]] = []
    breaks: list[bool] = []
    with altered(url, lambda _, event: None if breaks and breaks.pop() else event) as other:
        engine = opened(other).engine
        breaks += [True, False, False]
        watched = requests(1, watch=lambda tokens: seen.append(tokens) or True)
        [found] = engine.generate(watched, SamplingConfig(max_new_tokens=9))
    assert seen == [found.token_ids[:n] for n in range(1, len(seen) + 1)]
    assert len(seen) >= len(found) - 1


def test_a_server_that_breaks_for_good_ends_the_run_with_the_cause(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken: list[bool] = []
    with altered(url, lambda _, event: None if is_broken else event) as other:
        found = opened(other)
        found.engine.client.deadline = 100.0
        is_broken.append(True)
        skip_waits(monkeypatch)
        with pytest.raises(ResourceError, match=r"the server broke.*The same command resumes"):
            found.run(max_new_tokens=12)


def test_a_refused_port_ends_the_run_after_the_deadline() -> None:
    with pytest.raises(
        ResourceError, match=r"engine\.url = .*did not answer within deadline = 0\.3"
    ):
        opened(f"http://127.0.0.1:{free_port()}", deadline=0.3)


@pytest.mark.parametrize("timeout", [1.5, 900.0])
def test_a_server_that_freezes_ends_the_run_by_the_deadline_whatever_the_timeout(
    timeout: float, url: str
) -> None:
    over = threading.Event()
    freezes: list[bool] = []

    def edit(number: int, event: dict[str, Any]) -> dict[str, Any]:
        if freezes:
            over.wait(900)
        return event

    with altered(url, edit) as other:
        found = opened(other, timeout=timeout)
        found.engine.client.deadline = 2.0
        freezes.append(True)
        start = time.monotonic()
        try:
            with pytest.raises(
                ResourceError, match=r"did not answer within deadline = 2 s: .*resumes"
            ):
                found.run(max_new_tokens=12)
            # as long as trials of ``timeout`` go on, without the deadline
            assert 1.9 < time.monotonic() - start < 300
        finally:
            over.set()
        assert found.engine.client.patience < 2


def test_steady_tokens_are_not_cut_by_a_deadline_that_all_of_them_exceed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: list[float] = []

    def edit(number: int, event: dict[str, Any]) -> dict[str, Any]:
        for seconds in slow:
            advance(seconds)
            time.sleep(1.6)  # longer than a look at the deadline
        return event

    with altered(url, edit) as other:
        found = opened(other, timeout=600.0)
        advance = advanced_clock(monkeypatch)
        slow.append(200.0)
        [done] = found.engine.generate(requests(1), SamplingConfig(max_new_tokens=4))
    assert len(done) == 4
    assert found.engine.take_counts()["retries"] == 0


def test_a_key_that_expires_ends_the_run_at_once(folder: Path, keys: Path) -> None:
    with model_server(folder, http={"token_file": str(keys)}) as (url, _):
        found = opened(url, api_key_env=KEY)
        keys.write_text("secret 2020-01-01T00:00:00Z\n")
        with pytest.raises(ConfigError, match=r"status 401: .*the token expired"):
            found.run()


def test_a_request_that_is_too_long_for_the_server_is_named(url: str) -> None:
    found = opened(url)
    assert found.engine.context == 400
    with pytest.raises(ResourceError, match="holds 400; lower max_new_tokens"):
        found.run(max_new_tokens=399)


def test_media_are_refused_by_a_model_of_texts_and_by_other_servers(url: str) -> None:
    rows = Ragged(torch.zeros(1, 2), torch.tensor([1]))
    asked = [Request(Prompt("p", [5, 6], media={"pixel_values": rows}), 1)]
    engine = opened(url).engine
    with pytest.raises(ConfigError, match="the model reads text alone"):
        list(engine.generate(asked, SamplingConfig(max_new_tokens=4)))
    engine.is_own = False
    with pytest.raises(ConfigError, match="not lightrft serve, and cannot generate for prompt 'p'"):
        engine.generate(asked, SamplingConfig(max_new_tokens=4))
    with pytest.raises(ConfigError, match="prompts with media of kind image"):
        check_server_media(engine, {"image"})


def test_a_model_that_is_replaced_during_a_run_ends_it(url: str) -> None:
    over: dict[str, str] = {}
    with altered(url, lambda _, event: {**event, **over}) as other:
        found = opened(other)
        over["system_fingerprint"] = "sha256:other"
        with pytest.raises(ModelError, match="were replaced by sha256:other"):
            found.run(max_new_tokens=12)


def test_an_endpoint_of_text_alone_evaluates_if_nothing_compares_its_log_probs(
    url: str, folder: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "2+2=", "label": "4"}\n')
    sampling = {"max_new_tokens": 5, "temperature": 0.0}
    tree: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": "float32"},
        "reward": {"terms": ["math"]},
        "eval": {"data": {"sources": [str(rows)]}, "sampling": sampling},
        "run": {"dir": str(tmp_path), "name": "local"},
    }
    expected = run_eval(build(EvaluateConfig, tree))
    with altered(url, without("token_ids")) as other:
        tree["run"]["name"] = "served"
        tree["engine"] = {"kind": "http", "url": other}
        with pytest.raises(ConfigError, match=r"set engine\.check_logprobs=false"):
            run_eval(build(EvaluateConfig, tree))
        tree["engine"]["check_logprobs"] = False
        found = run_eval(build(EvaluateConfig, tree))
    assert found.metrics["eval/reward"] == expected.metrics["eval/reward"]


def test_an_update_that_the_server_forgets_begins_again(
    folder: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, updates = http._put, []

    def interrupted(client: Any, update: str, number: int, bucket: bytes) -> None:
        if not updates:
            # a restarted server knows no update, and neither does one that another has begun
            client.ask("POST", "/v1/weights/begin", {"version": 0})
        updates.append(update)
        put(client, update, number, bucket)

    monkeypatch.setattr(http, "_put", interrupted)
    limits = {"max_body_mb": 0.05}
    with model_server(folder, weights_token_file=str(keys), http=limits) as (url, _):
        engine = opened(url, api_key_env=KEY).engine
        engine.require_updates()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        weights = {name: tensor * 2 for name, tensor in model.named_parameters()}
        assert engine.load_weights(weights.items(), 3) == checksums(weights.items())
        assert len(set(updates)) == 2 and len(updates) > 3
        [found] = engine.generate(requests(1), SamplingConfig(max_new_tokens=3))
        assert found.versions == [3] * 3


def test_an_update_sends_only_what_the_server_lacks_and_all_of_it_after_a_restart(
    folder: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, sent = http._put, []

    def counted(client: Any, update: str, number: int, bucket: bytes) -> None:
        _, layout = read_bucket(bucket, shapes)
        sent.extend(piece.name for piece in layout)
        put(client, update, number, bucket)

    monkeypatch.setattr(http, "_put", counted)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with model_server(folder, weights_token_file=str(keys)) as (url, _):
        engine = opened(url, api_key_env=KEY).engine
        engine.require_updates()
        engine.load_weights(weights.items(), 0)
        assert sent == []
        first, second, third = [name for name in weights if name.endswith("proj.weight")][:3]
        for version, name in enumerate((first, second, first), 1):
            # the third update gives the first tensor back its value of the start
            weights[name] = weights[name] * (0.5 if version == 3 else 2)
            found = engine.load_weights(weights.items(), version)
            assert found == checksums(weights.items())
            assert sent == [name]
            assert engine.take_counts()["update_bytes"] == weights[name].nbytes
            sent.clear()
    with model_server(folder, weights_token_file=str(keys)) as (other, _):
        engine.client = opened(other, api_key_env=KEY).engine.client
        weights[third] = weights[third] * 2
        assert engine.load_weights(weights.items(), 4) == checksums(weights.items())
        assert sorted(sent) == sorted([second, third])


def test_an_update_is_read_copied_and_sent_bucket_by_bucket(
    folder: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, read, sent = http._put, [0], [0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    largest = max(tensor.nbytes for tensor in start.values())

    def scaled(by: float) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in start.items():
            read[0] += tensor.nbytes
            yield name, tensor * by

    def noted(client: Any, update: str, number: int, bucket: bytes) -> None:
        sent[0] += len(bucket)
        # one tensor may be in two buckets
        assert read[0] <= sent[0] + largest
        put(client, update, number, bucket)

    monkeypatch.setattr(http, "_put", noted)
    with model_server(folder, weights_token_file=str(keys), http={"max_body_mb": 0.05}) as (
        url,
        _,
    ):
        engine = opened(url, api_key_env=KEY).engine
        engine.require_updates()
        engine.load_weights(scaled(2.0), 1)
        assert sent[0] > read[0] > 3 * largest
        copies = {name: tensor.data_ptr() for name, tensor in engine._kept.items()}
        engine.load_weights(scaled(3.0), 2)
        assert {name: tensor.data_ptr() for name, tensor in engine._kept.items()} == copies


def test_a_run_on_a_server_that_another_run_updated_survives_its_restart(
    folder: Path, keys: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    limits = SamplingConfig(max_new_tokens=3)
    with model_server(folder, weights_token_file=str(keys)) as (url, _):
        earlier = opened(url, api_key_env=KEY).engine
        earlier.require_updates()
        weights = {name: tensor * 2 for name, tensor in start.items()}
        earlier.load_weights(weights.items(), 7)
        engine = opened(url, api_key_env=KEY).engine
        engine.require_updates()
        # the server holds all of them already
        engine.load_weights(weights.items(), 1)
        [expected] = engine.generate(requests(1), limits)
    with model_server(folder, weights_token_file=str(keys)) as (other, _):
        engine.client = opened(other, api_key_env=KEY).engine.client
        [found] = engine.generate(requests(1), limits)
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert engine.counts["weights_resent"] == 1


def test_an_update_ends_if_its_weights_do_not_fit_before_any_has_changed(
    folder: Path, keys: Path
) -> None:
    with model_server(folder, weights_token_file=str(keys)) as (url, _):
        assert httpx.post(f"{url}/v1/weights/begin", json={"version": 1}).status_code == 401
        engine = opened(url, api_key_env=KEY).engine
        engine.require_updates()
        with pytest.raises(ModelError, match="'other' of shape"):
            engine.load_weights([("other", torch.zeros(2))], 1)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "1"}).status_code == 200
        assert engine._held()["is_whole"]


def test_a_server_with_a_part_of_an_update_answers_no_one_until_a_run_sends_all_weights(
    folder: Path, keys: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {name: tensor * 2 for name, tensor in model.named_parameters()}
    limits = {"max_body_mb": 0.05}
    with model_server(folder, weights_token_file=str(keys), http=limits) as (url, _):
        engine = opened(url, api_key_env=KEY).engine
        engine.require_updates()
        with pytest.raises(ModelError, match="'other' of shape"):
            engine.load_weights([*weights.items(), ("other", torch.zeros(2))], 1)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "1"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "has begun, and has not ended" in answer.text
        # a run that may send no weights waits for those of another
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(ResourceError, match="has begun, and has not ended"),
        ):
            skip_waits(patch)
            opened(url)
        # one that may does not wait for an answer first
        later = opened(url, api_key_env=KEY).engine
        assert isinstance(later, HTTPEngine) and later.is_paused
        later.require_updates()
        later.load_weights(weights.items(), 1)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "1"}).status_code == 200
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["digest"].startswith("update:")


def test_a_request_that_waits_while_others_get_tokens_has_not_failed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: list[int] = []

    def edit(number: int, event: dict[str, Any]) -> dict[str, Any] | None:
        # the first stream is longer than the deadline, and goes on until the second one has waited
        if slow:
            slow.append(number)
            while len(slow) == 12 and found.engine.client.counts["retries"] < 2:
                time.sleep(0.01)
            advance(100.0)
        return event

    with altered(url, edit, max_requests=1) as other:
        found = opened(other)
        advance = advanced_clock(monkeypatch)
        slow.append(0)
        # watched, so that each is a call of its own
        asked = requests(2, watch=lambda tokens: True)
        done = list(found.engine.generate(asked, SamplingConfig(max_new_tokens=12)))
    assert len(done) == 2 and len(slow) > 12


@pytest.mark.parametrize("has_bucket", [False, True], ids=["begun", "partly sent"])
def test_an_update_whose_run_is_gone_ends_by_itself(
    has_bucket: bool, folder: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {name: tensor * 2 for name, tensor in model.named_parameters()}
    put, sent = http._put, []

    def killed(client: Any, update: str, number: int, bucket: bytes) -> None:
        if has_bucket and not sent:
            sent.append(number)
            put(client, update, number, bucket)
            return
        raise KeyboardInterrupt

    limits = {"max_body_mb": 0.05, "timeout": 600.0}
    with model_server(folder, weights_token_file=str(keys), http=limits) as (url, server):
        updates = server.service.updates
        assert updates is not None
        engine = opened(url, api_key_env=KEY).engine
        engine.require_updates()
        start = engine._held()
        with monkeypatch.context() as patch:
            patch.setattr(http, "_put", killed)
            with pytest.raises(KeyboardInterrupt):
                engine.load_weights(weights.items(), 1)
        ask = {"prompt": "1+1=", "seed": 0}
        assert httpx.post(f"{url}/v1/completions", json=ask).status_code == 503
        assert updates._timer is not None and updates._timer.interval == 600
        # as if the time of the next request were over
        with updates._lock:
            monkeypatch.setattr(updates, "patience", 0.0)
            updates._await_next()
        until = time.monotonic() + 300
        while httpx.post(f"{url}/v1/completions", json=ask).status_code == 503:
            assert time.monotonic() < until
            time.sleep(0.1)
        monkeypatch.setattr(updates, "patience", 600.0)
        assert engine._held() == start
        # a later run is served as if there had been none
        again = opened(url, api_key_env=KEY).engine
        again.require_updates()
        assert again.load_weights(weights.items(), 3) == checksums(weights.items())
