"""What every engine promises. An engine whose package is not installed is left out: ``make test-vllm`` installs vLLM."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Engine
from lightrft.engines.fingerprint import checksums
from lightrft.engines.http import HTTPEngine
from lightrft.engines.native import NativeEngine
from lightrft.engines.served.vllm_server import VLLMServerEngine
from lightrft.engines.sglang import SGLangEngine
from lightrft.engines.stop_strings import model_ends
from lightrft.engines.vllm import VLLMEngine
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import END, PAD
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ConfigError, ResourceError
from lightrft.utils.registry import resolve
from tests.architecture.tree import ROOT
from tests.model_helpers import assert_logprobs_close, vllm_model
from tests.serving_helpers import free_port, serve_process, wait_for
from tests.sglang_server import PACKAGE, sglang_server, started_sglang
from tests.vllm_server import TRAINS, vllm_server

ENGINES = [
    "native",
    "custom",
    "http",
    "sglang",
    "sglang_started",
    *(["vllm", "vllm_server", "vllm_server_trained"] if importlib.util.find_spec("vllm") else []),
]
CUSTOM = f"{ROOT}/examples/custom_engine.py:"
KEY = "TEST_KEY_OF_SERVERS"
WORDS = ["the quick brown fox", "jumps over the lazy dog", "one two three four"]


@dataclass
class Subject:
    engine: Engine
    model: Any
    tokenizer: Any

    def run(
        self,
        requests: Sequence[Request],
        stopped: Callable[[], bool] = lambda: False,
        **sampling: Any,
    ) -> list[Rollout]:
        return list(self.engine.generate(requests, SamplingConfig(**sampling), stopped))

    def logits(self, rollout: Rollout) -> torch.Tensor:
        """Of the response tokens, by a plain forward pass of transformers."""
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
        with torch.no_grad():
            return self.model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1]


@contextmanager
def own_server(folder: Path, keys: Path) -> Iterator[str]:
    """Run ``lightrft serve`` in a process, and yield its address."""
    port = free_port()
    words = [f"weights_token_file={keys}", "model.dtype=float32", "engine.max_num_seqs=8"]
    process = serve_process(folder, port, *words, verb="serve")
    try:
        wait_for(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(300)


@pytest.fixture(scope="module", params=ENGINES)
def subject(request: Any, tmp_path_factory: Any) -> Iterator[Subject]:
    folder: Path = tmp_path_factory.mktemp("model")
    # As in base models: the tokenizer and the configs do not name the end of turn.
    model = vllm_model(folder, eos=PAD)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = EngineConfig(max_num_seqs=8)
    ends = model_ends(tokenizer, [tokenizer.eos_token_id])
    if request.param == "http":
        (folder / "keys").write_text("secret\n")
        with own_server(folder, folder / "keys") as url, pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY, "secret")
            served = EngineConfig(kind="http", url=url, api_key_env=KEY, max_num_seqs=8)
            engine = HTTPEngine.connect(served, tokenizer, ends)
            engine.require_updates()
            yield Subject(engine, model, tokenizer)
            engine.close()
        return
    if request.param == "sglang":
        with sglang_server(folder) as (url, _):
            served = EngineConfig(
                kind="sglang", url=url, max_num_seqs=8, weights_dir=str(folder / "updates")
            )
            engine = SGLangEngine.connect(served, tokenizer, ends)
            yield Subject(engine, model, tokenizer)
            engine.close()
        return
    if request.param == "sglang_started":
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(PACKAGE))
            engine = started_sglang(folder, tokenizer, max_num_seqs=8)
            yield Subject(engine, model, tokenizer)
            engine.close()
        return
    if request.param.startswith("vllm_server"):
        words = TRAINS if request.param == "vllm_server_trained" else ()
        with vllm_server(folder, *words) as server:
            served = EngineConfig(kind="http", url=server.url, max_num_seqs=8)
            engine = HTTPEngine.connect(served, tokenizer, ends)
            trained = VLLMServerEngine.over(engine)
            if words:
                trained.require_updates()
            else:
                with pytest.raises(
                    ConfigError, match=r"(?s)takes no new weights.*api_server --model MODEL"
                ):
                    trained.require_updates()
            yield Subject(trained if words else engine, model, tokenizer)
            engine.close()
        return
    if request.param == "custom":
        copy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        plain = resolve(f"{CUSTOM}PlainEngine")
        yield Subject(plain(KVDecoder(copy), tokenizer, settings), model, tokenizer)
        return
    if request.param == "native":
        copy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        engine = NativeEngine(KVDecoder(copy), tokenizer, settings, shared=False)
    else:
        engine = VLLMEngine(ModelConfig(path=str(folder)), tokenizer, settings, ends, torch.float32)
    yield Subject(engine, model, tokenizer)
    engine.close()


def prompts(subject: Subject, n: int = 2) -> list[Prompt]:
    return [Prompt(str(k), subject.tokenizer(WORDS[k])["input_ids"]) for k in range(n)]


def by_seed(found: Sequence[Rollout]) -> dict[int, Rollout]:
    assert len({r.seed for r in found}) == len(found)
    return {r.seed: r for r in found}


def requests_of(asked: Sequence[Prompt], samples: int = 4, **more: Any) -> list[Request]:
    return [
        Request(prompt, 100 * p + k, k, **more)
        for p, prompt in enumerate(asked)
        for k in range(samples)
    ]


def test_greedy_tokens_are_the_likeliest_of_a_plain_forward_pass(subject: Subject) -> None:
    found = subject.run(requests_of(prompts(subject, 3), 1, greedy=True), max_new_tokens=12)
    assert len(found) == 3
    for rollout in found:
        logits = subject.logits(rollout)
        assert rollout.token_ids == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).amax(-1)
        assert_logprobs_close(rollout.logprobs, expected, logits)


def kept(row: torch.Tensor, sampling: dict[str, Any], seen: list[int]) -> torch.Tensor:
    """The logits of one token after penalty, temperature and filters."""
    row = row.clone()
    for token in set(seen):
        factor = sampling.get("repetition_penalty", 1.0)
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    row = row / sampling.get("temperature", 1.0)
    shares = row.softmax(-1)
    order = shares.argsort(descending=True)
    total, keep = 0.0, []
    for place, token in enumerate(order.tolist()):
        if place >= sampling.get("top_k", len(row)) or total >= sampling.get("top_p", 2.0):
            break
        if float(shares[token]) < sampling.get("min_p", 0.0) * float(shares.max()):
            break
        keep.append(token)
        total += float(shares[token])
    dropped = torch.ones_like(row, dtype=torch.bool)
    dropped[keep] = False
    return row.masked_fill(dropped, -torch.inf)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.2},
        {"repetition_penalty": 1.4},
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "penalty"],
)
def test_logprobs_are_of_the_distribution_that_was_sampled_from(
    subject: Subject, sampling: dict[str, Any]
) -> None:
    filters = [name for name in sampling if name != "temperature"]
    if isinstance(subject.engine, SGLangEngine) and filters:
        with pytest.raises(ConfigError, match=rf"{filters[0]} = .*: the log-probs of SGLang"):
            subject.run(requests_of(prompts(subject)), max_new_tokens=12, **sampling)
        return
    for rollout in subject.run(requests_of(prompts(subject)), max_new_tokens=12, **sampling):
        tokens = rollout.token_ids
        rows = subject.logits(rollout)
        before = [[*rollout.prompt.token_ids, *tokens[:k]] for k in range(len(tokens))]
        logits = torch.stack([kept(row, sampling, seen) for row, seen in zip(rows, before)])
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert_logprobs_close(rollout.logprobs, chosen, logits)


def test_a_response_depends_on_its_seed_and_not_on_its_batch(subject: Subject) -> None:
    wanted = requests_of(prompts(subject))
    together = by_seed(subject.run(wanted, max_new_tokens=10))
    alone = by_seed(subject.run([wanted[5]], max_new_tokens=10))
    assert alone[wanted[5].seed].token_ids == together[wanted[5].seed].token_ids
    assert len({tuple(r.token_ids) for r in together.values()}) > len(together) // 2


def test_more_requests_than_rows_are_all_answered_once(subject: Subject) -> None:
    wanted = requests_of(prompts(subject), 12)
    found = by_seed(subject.run(wanted, max_new_tokens=5))
    assert set(found) == {r.seed for r in wanted}
    assert {r.sample for r in found.values()} == set(range(12))


def test_a_response_at_its_limit_ends_by_length_and_an_end_token_by_stop(subject: Subject) -> None:
    [prompt] = prompts(subject, 1)
    [longest] = subject.run([Request(prompt, 3, greedy=True)], max_new_tokens=8)
    assert (longest.finish_reason, len(longest)) == ("length", 8)
    end = longest.token_ids[4]
    first = longest.token_ids.index(end)
    [ended] = subject.run(
        [Request(prompt, 3, greedy=True)], max_new_tokens=8, stop_token_ids=(end,)
    )
    assert ended.finish_reason == "stop"
    assert ended.token_ids == longest.token_ids[: first + 1]


def test_a_response_ends_at_the_end_of_turn_that_the_chat_template_alone_names(
    subject: Subject,
) -> None:
    [prompt] = prompts(subject, 1)
    end = subject.tokenizer.convert_tokens_to_ids(END)
    assert end not in (subject.tokenizer.eos_token_id, subject.model.generation_config.eos_token_id)
    [ended] = subject.run([Request(prompt, 3, greedy=True)], max_new_tokens=60)
    assert ended.finish_reason == "stop"
    assert ended.token_ids.index(end) == len(ended) - 1 > 0


def test_no_end_token_is_sampled_before_the_minimum(subject: Subject) -> None:
    [prompt] = prompts(subject, 1)
    [free] = subject.run([Request(prompt, 3, greedy=True)], max_new_tokens=8)
    end = free.token_ids[0]
    [late] = subject.run(
        [Request(prompt, 3, greedy=True)], max_new_tokens=8, min_new_tokens=4, stop_token_ids=(end,)
    )
    assert len(late) >= 4
    assert end not in late.token_ids[:3]


def test_a_stop_string_stays_in_the_tokens_and_is_cut_from_the_text(subject: Subject) -> None:
    [prompt] = prompts(subject, 1)
    [free] = subject.run([Request(prompt, 3, greedy=True)], max_new_tokens=12)
    stop = subject.tokenizer.decode(free.token_ids[3:5])
    [cut] = subject.run([Request(prompt, 3, greedy=True)], max_new_tokens=12, stop=(stop,))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: len(cut)]
    whole = subject.tokenizer.decode(cut.token_ids, skip_special_tokens=True)
    assert stop in whole
    assert cut.text == whole[: whole.index(stop)]


def test_a_paused_response_is_continued_to_the_same_greedy_tokens(subject: Subject) -> None:
    [prompt] = prompts(subject, 1)
    [whole] = subject.run([Request(prompt, 3, greedy=True)], max_new_tokens=10)
    paused = Request(prompt, 3, greedy=True, pause_after_tokens=4)
    [part] = subject.run([paused], max_new_tokens=10)
    assert (part.finish_reason, part.token_ids) == ("abort", whole.token_ids[:4])
    [done] = subject.run([Request(prompt, 3, greedy=True, partial=part)], max_new_tokens=10)
    assert done.token_ids == whole.token_ids
    assert done.logprobs[:4] == part.logprobs
    assert (done.finish_reason, done.sampled) == ("length", [True] * 10)


def test_abort_returns_every_request_once_with_its_tokens(subject: Subject) -> None:
    looks = 0

    def stopped() -> bool:
        nonlocal looks
        looks += 1
        return looks > 4

    wanted = requests_of(prompts(subject), 8)
    found = by_seed(subject.run(wanted, stopped, max_new_tokens=40))
    assert set(found) == {r.seed for r in wanted}
    assert {r.finish_reason for r in found.values()} <= {"abort", "stop"}
    assert 0 < sum(map(len, found.values())) < 40 * len(wanted)
    for r in found.values():
        assert len(r.logprobs) == len(r.versions) == len(r.sampled) == len(r)
    rest = [Request(r.prompt, r.seed, r.sample, partial=r) for r in found.values()]
    done = by_seed(subject.run(rest, max_new_tokens=41))
    for seed, rollout in done.items():
        assert rollout.token_ids[: len(found[seed])] == found[seed].token_ids


def test_a_response_that_nobody_watches_is_aborted(subject: Subject) -> None:
    [prompt] = prompts(subject, 1)
    seen: list[list[int]] = []

    def watch(tokens: list[int]) -> bool:
        seen.append(tokens)
        return len(tokens) < 3

    [left] = subject.run([Request(prompt, 3, greedy=True, watch=watch)], max_new_tokens=10)
    assert (left.finish_reason, len(left)) == ("abort", 3)
    assert seen == [left.token_ids[:n] for n in (1, 2, 3)]


def test_a_short_response_is_yielded_before_a_long_one_ends(subject: Subject) -> None:
    [prompt] = prompts(subject, 1)
    # long enough for a server whose streams arrive by threads of their own
    long = Request(prompt, 1, greedy=True, max_new_tokens=240)
    short = Request(prompt, 2, greedy=True, max_new_tokens=2)
    # without a minimum, the model ends after 16 tokens
    sampling = SamplingConfig(min_new_tokens=240, max_new_tokens=240)
    with closing(subject.engine.generate([long, short], sampling)) as stream:
        assert next(stream).seed == 2
        last = next(stream)
        assert (last.seed, len(last)) == (1, 240)


def test_an_iterator_that_is_dropped_leaves_nothing_behind(subject: Subject) -> None:
    wanted = requests_of(prompts(subject))
    stream = iter(subject.engine.generate(wanted, SamplingConfig(max_new_tokens=20)))
    next(stream)
    del stream
    found = by_seed(subject.run(wanted, max_new_tokens=4))
    assert set(found) == {r.seed for r in wanted}


def test_two_open_iterators_get_their_own_responses(subject: Subject) -> None:
    asked = prompts(subject)
    sampling = SamplingConfig(max_new_tokens=6)
    first = iter(subject.engine.generate(requests_of(asked[:1]), sampling))
    second = iter(subject.engine.generate(requests_of(asked[1:]), sampling))
    found = [next(first), next(second)]
    found += [*second, *first]
    assert [r.prompt.id for r in found] == ["0", "1", "1", "1", "1", "0", "0", "0"]


def test_a_request_longer_than_the_limit_is_refused_at_once(subject: Subject) -> None:
    [prompt] = prompts(subject, 1)
    with pytest.raises(ResourceError, match="prompt '0'"):
        subject.engine.generate([Request(prompt, 1)], SamplingConfig(max_new_tokens=10**6))


def test_new_weights_change_responses_versions_and_fingerprint_and_continue_paused_ones(
    subject: Subject,
) -> None:
    [prompt] = prompts(subject, 1)
    old = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    new = {name: tensor * 1.2 for name, tensor in old.items()}
    asked = [Request(prompt, 3, greedy=True)]
    [before] = subject.run(asked, max_new_tokens=10)
    paused = Request(prompt, 3, greedy=True, pause_after_tokens=4)
    [part] = subject.run([paused], max_new_tokens=10)
    if isinstance(subject.engine, HTTPEngine) and not subject.engine.is_own:
        with pytest.raises(ConfigError, match="takes no new weights"):
            subject.engine.load_weights(new.items(), 7)
        return
    try:
        assert subject.engine.load_weights(new.items(), 7) == checksums(new.items())
        subject.model.load_state_dict(new)
        [after] = subject.run(asked, max_new_tokens=10)
        assert after.versions == [7] * 10
        logits = subject.logits(after)
        assert after.token_ids == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).amax(-1)
        assert_logprobs_close(after.logprobs, expected, logits)
        # a response that is continued keeps the versions and log-probs of its tokens
        [mixed] = subject.run([Request(prompt, 3, greedy=True, partial=part)], max_new_tokens=10)
        assert mixed.versions == part.versions + [7] * 6
        assert (mixed.token_ids[:4], mixed.logprobs[:4]) == (part.token_ids, part.logprobs)
        logits = subject.logits(mixed)[4:]
        assert mixed.token_ids[4:] == logits.argmax(-1).tolist()
        assert_logprobs_close(mixed.logprobs[4:], logits.log_softmax(-1).amax(-1), logits)
    finally:
        subject.engine.load_weights(old.items(), 8)
        subject.model.load_state_dict(old)
    [again] = subject.run(asked, max_new_tokens=10)
    assert again.token_ids == before.token_ids
    assert again.versions == [8] * 10


def test_a_sleeping_engine_answers_again_after_wake(subject: Subject) -> None:
    [prompt] = prompts(subject, 1)
    asked = [Request(prompt, 3, greedy=True)]
    [before] = subject.run(asked, max_new_tokens=5)
    subject.engine.sleep(1)
    subject.engine.wake()
    [after] = subject.run(asked, max_new_tokens=5)
    assert after.token_ids == before.token_ids
