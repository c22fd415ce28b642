"""``lightrft serve-tinker`` under the real client of tinker, which is not changed.

What it computes is compared with transformers, peft and torch alone.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightrft.config.base import build
from lightrft.config.generation.serving import ServeTinkerConfig
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.serving.tinker import service
from lightrft.serving.tinker.tinker_server import open_tinker_server
from lightrft.utils.errors import ConfigError
from tests.serving_helpers import free_port, serve_process, served, wait_for

tinker = pytest.importorskip("tinker")
types = tinker.types

NAME = "tiny"
PROMPT = [5, 6, 7]
SEQUENCES = [list(range(5, 45)), [11, 12, 13], [5, 6, *range(60, 90)]]
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def serving(model: Path, folder: Path, **settings: Any) -> Generator[str]:
    tree = {
        "model": {"path": str(model), "dtype": "float32"},
        "name": NAME,
        "dir": str(folder),
        "device": "cpu",
        **settings,
    }
    tree["http"] = {"port": 0, **tree.get("http", {})}
    with served(open_tinker_server(build(ServeTinkerConfig, tree))) as (url, _):
        yield url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def url(model: Path, folder: Path) -> Iterator[str]:
    # The sequences are two micro-batches.
    with serving(model, folder, max_tokens_per_micro_batch=64) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with connected(url) as found:
        yield found


@contextmanager
def connected(url: str) -> Generator[Any]:
    found = tinker.ServiceClient(base_url=url, api_key="tml-test")
    yield found
    found.close("success").result()


def datum(tokens: list[int], **inputs: Any) -> Any:
    """A sequence whose targets are its next tokens."""
    arrays = {
        name: np.array(list(map(float, value)), dtype=np.float32) for name, value in inputs.items()
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **arrays},
    )


def supervised() -> list[Any]:
    return [datum(s, weights=np.linspace(0.5, 2, len(s) - 1)) for s in SEQUENCES]


def own_logprobs(model: Any, tokens: list[int]) -> Tensor:
    """Log-probs of the tokens after the first, by transformers alone."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def folder_of(folder: Path, path: str) -> Path:
    return folder / path.removeprefix("tinker://")


def adapted(model: Path, checkpoint: Path, *, trained: bool = False) -> Any:
    """The model with the adapters of a checkpoint, by peft alone."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(checkpoint), is_trainable=trained).eval()


def trained(client: Any, steps: int = 1, **settings: Any) -> Any:
    found = client.create_lora_training_client(NAME, **{"rank": 4, "seed": 3, **settings}).result()
    for _ in range(steps):
        step(found)
    return found


def step(training: Any, data: Any = None, loss: str = "cross_entropy", config: Any = None) -> Any:
    """One optimizer step. Both requests are sent before the first is answered."""
    first = training.forward_backward(data or supervised(), loss, config)
    second = training.optim_step(types.AdamParams(**ADAM))
    return first.result(), second.result()


def logprobs_of(output: Any) -> list[list[float]]:
    return [one["logprobs"].tolist() for one in output.loss_fn_outputs]


def weights_of(training: Any, folder: Path, name: str) -> dict[str, Tensor]:
    path = training.save_weights_for_sampler(name).result().path
    return load_file(folder_of(folder, path) / "adapter_model.safetensors")


def sample(sampler: Any, count: int = 1, prompt: Any = PROMPT, **options: Any) -> Any:
    names = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
    given = {"max_tokens": 6, "seed": 1, **{n: options.pop(n) for n in names if n in options}}
    text = types.ModelInput.from_ints(prompt)
    return sampler.sample(text, count, types.SamplingParams(**given), **options).result()


def test_log_probs_of_a_forward_pass_are_those_of_transformers(client, model, folder):
    training = trained(client, steps=2)
    found = logprobs_of(training.forward(supervised(), "cross_entropy").result())
    path = training.save_weights_for_sampler("forward").result().path
    alone = adapted(model, folder_of(folder, path))
    with torch.no_grad():
        for own, tokens in zip(found, SEQUENCES, strict=True):
            assert own == pytest.approx(own_logprobs(alone, tokens).tolist(), abs=1e-4)


def clipped(ratio: Tensor, low: float, high: float, advantages: Tensor) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


RATIO_LOSSES: dict[str, tuple[dict[str, float], Callable[..., Tensor]]] = {
    "importance_sampling": ({}, lambda logp, ratio, a: -(ratio * a).sum()),
    "ppo": ({}, lambda logp, ratio, a: -clipped(ratio, 0.8, 1.2, a).sum()),
    "ppo, bounds given": (
        {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
        lambda logp, ratio, a: -clipped(ratio, 0.95, 1.05, a).sum(),
    ),
    "cispo": ({}, lambda logp, ratio, a: -(ratio.clamp(0, 4).detach() * a * logp).sum()),
}


@pytest.mark.parametrize("name", ["cross_entropy", *RATIO_LOSSES])
def test_a_step_is_that_of_torch_by_hand_on_the_same_adapters(client, model, folder, name):
    training = trained(client)
    tag = name.replace(", ", "-").replace(" ", "-")
    start = folder_of(folder, training.save_weights_for_sampler(f"{tag}-0").result().path)
    alone = adapted(model, start, trained=True)
    generator = torch.Generator().manual_seed(0)
    total, data = torch.zeros(()), []
    for tokens in SEQUENCES:
        logprobs = own_logprobs(alone, tokens)
        noise = torch.randn(2, len(logprobs), generator=generator)
        old, advantages = logprobs.detach() + 0.3 * noise[0], noise[1]
        if name == "cross_entropy":
            data.append(datum(tokens, weights=advantages))
            total = total - (advantages * logprobs).sum()
        else:
            data.append(datum(tokens, logprobs=old, advantages=advantages))
            ratio = (logprobs - old).exp()
            total = total + RATIO_LOSSES[name][1](logprobs, ratio, advantages)
    total.backward()
    parameters = [p for p in alone.parameters() if p.requires_grad]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    # The client has taken a step before, whose moments the second step by hand needs too.
    config = RATIO_LOSSES.get(name, ({},))[0]
    fresh = client.create_training_client_from_state(
        training.save_state(f"{tag}-state").result().path
    ).result()
    output, stepped = step(fresh, data, name.partition(",")[0], config or None)
    torch.optim.AdamW(
        parameters,
        lr=ADAM["learning_rate"],
        betas=(ADAM["beta1"], ADAM["beta2"]),
        eps=ADAM["eps"],
        weight_decay=0.0,
    ).step()
    assert output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
    assert stepped.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    found = weights_of(fresh, folder, f"{tag}-1")
    by_hand = {n.replace(".default.", "."): p for n, p in alone.named_parameters() if "lora" in n}
    before = load_file(start / "adapter_model.safetensors")
    assert found.keys() == by_hand.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, by_hand[key].detach(), atol=2e-4, rtol=1e-3)
    assert any(not torch.equal(found[key], before[key]) for key in found)


def test_a_gradient_is_the_sum_over_calls_and_over_parts_of_a_call(client, folder):
    whole, parts = trained(client, 0), trained(client, 0)
    # More than the 1024 sequences that the client sends at once.
    data = [datum([k % 90 + 4, (k * 7) % 90 + 4], weights=[1.0]) for k in range(1030)]
    both, _ = step(whole, data)
    first = parts.forward_backward(data[:400], "cross_entropy")
    _, stepped = step(parts, data[400:])
    assert len(both.loss_fn_outputs) == 1030 and first.result().metrics["loss:sum"] > 0
    assert stepped.metrics["grad_norm"] > 0
    found, expected = (weights_of(c, folder, "parts") for c in (parts, whole))
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-4, rtol=1e-3)


def test_settings_of_the_optimizer_are_those_of_adamw(client, folder):
    training = trained(client, 0)
    before = weights_of(training, folder, "before")
    training.forward_backward(supervised(), "cross_entropy")
    given = types.AdamParams(learning_rate=0.1, weight_decay=0.5, grad_clip_norm=1e-30, eps=1.0)
    training.optim_step(given).result()
    after = weights_of(training, folder, "after")
    # The gradient is clipped to nothing, so only the decay is left.
    for key, tensor in after.items():
        torch.testing.assert_close(tensor, before[key] * (1 - 0.1 * 0.5))


def test_a_loss_of_the_program_has_the_gradient_of_the_builtin_one(client, folder):
    one, other = trained(client), trained(client)
    step(one)

    def cross_entropy(data: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        pairs = zip(data, logprobs, strict=True)
        return -sum((d.loss_fn_inputs["weights"].to_torch() * p).sum() for d, p in pairs), {}

    other.forward_backward_custom(supervised(), cross_entropy)
    other.optim_step(types.AdamParams(**ADAM)).result()
    found, expected = (weights_of(c, folder, "custom") for c in (other, one))
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key])


def test_several_targets_of_a_token_count_by_their_weights(client, model):
    training = trained(client, 0)
    targets = torch.zeros(3, 4, dtype=torch.long)
    targets[1] = torch.tensor([9, 10, 11, 12])
    weights = (targets > 0) * 0.25
    # Both are mostly zeros, and the client sends them as sparse tensors.
    data = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    output = training.forward([data], "cross_entropy").result()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        own = base(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1).gather(1, targets)
    found = output.loss_fn_outputs[0]["logprobs"].to_torch()
    torch.testing.assert_close(found, own, atol=1e-4, rtol=1e-4)
    assert output.metrics["loss:sum"] == pytest.approx(-float(own[1].mean()), rel=1e-4)


def test_training_clients_of_one_model_do_not_change_each_other(client, folder):
    alone = trained(client, 2)
    one, other = trained(client, 0), trained(client, 0, rank=2, seed=9, train_unembed=False)
    for _ in range(2):
        step(one)
        step(other, [datum([20, 21, 22], weights=[1, 1])])
    expected = weights_of(alone, folder, "alone")
    found = weights_of(one, folder, "beside")
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    small = weights_of(other, folder, "other")
    assert {t.shape[0] for k, t in small.items() if "lora_A" in k} == {2}
    assert any("lm_head" in key for key in found) and not any("lm_head" in key for key in small)
    assert other.get_info().lora_rank == 2


def test_samples_are_of_the_saved_weights_and_their_log_probs_are_those_of_the_client(client):
    training = trained(client, 3)
    sampler = training.save_weights_and_get_sampling_client().result()
    first = sample(sampler, 4, include_prompt_logprobs=True)
    lines = [PROMPT + s.tokens for s in first.sequences]
    data = [datum(line, weights=[0.0] * (len(line) - 1)) for line in lines]
    scores = logprobs_of(training.forward(data, "cross_entropy").result())
    for own, sequence in zip(scores, first.sequences, strict=True):
        assert own[len(PROMPT) - 1 :] == pytest.approx(sequence.logprobs, abs=1e-4)
        assert first.prompt_logprobs[1:] == pytest.approx(own[: len(PROMPT) - 1], abs=1e-4)
    assert first.prompt_logprobs[0] is None
    assert len({tuple(s.tokens) for s in first.sequences}) > 1
    # A snapshot stays as it is, whatever is trained or sampled meanwhile.
    step(training)
    base = client.create_sampling_client(base_model=NAME).result()
    of_base = sample(base, 4)
    again = sample(sampler, 4)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in first.sequences]
    assert [s.tokens for s in of_base.sequences] != [s.tokens for s in first.sequences]
    assert sample(sampler, 4, seed=2).sequences[0].tokens != first.sequences[0].tokens


def test_a_saved_sampler_is_the_model_at_that_time(client):
    training = trained(client, 2)
    live = training.save_weights_and_get_sampling_client().result()
    path = training.save_weights_for_sampler("named").result().path
    step(training)
    saved = client.create_sampling_client(model_path=path).result()
    assert sample(saved, 3).sequences[2].tokens == sample(live, 3).sequences[2].tokens
    assert saved.get_base_model() == NAME


def test_requests_of_many_samplers_at_once_get_the_answers_of_each(client):
    samplers = [trained(client, k).save_weights_and_get_sampling_client().result() for k in (1, 2)]
    alone = [sample(one, 2, prompt=[p, 9]) for p in range(4, 8) for one in samplers]
    params = types.SamplingParams(max_tokens=6, seed=1)
    futures = [
        one.sample(types.ModelInput.from_ints([p, 9]), 2, params)
        for p in range(4, 8)
        for one in samplers
    ]
    found = [[s.tokens for s in future.result().sequences] for future in futures]
    assert found == [[s.tokens for s in one.sequences] for one in alone]


def test_settings_of_sampling_act(client):
    base = client.create_sampling_client(base_model=NAME).result()
    greedy = sample(base, temperature=0.0).sequences[0]
    assert sample(base, 3, top_k=1, seed=8).sequences[2].tokens == greedy.tokens
    assert sample(base, 3, top_p=1e-6, seed=8).sequences[2].tokens == greedy.tokens
    assert (len(greedy.tokens), greedy.stop_reason) == (6, "length")
    assert len(sample(base, temperature=0.0, max_tokens=2).sequences[0].tokens) == 2
    last = greedy.tokens[-1]
    ended = greedy.tokens[: greedy.tokens.index(last) + 1]
    # The token itself, and its text.
    for stop in ([last], tiny_tokenizer().decode(last)):
        found = sample(base, temperature=0.0, stop=stop).sequences[0]
        assert (found.tokens, found.stop_reason) == (ended, "stop")
    unseeded = {tuple(sample(base, seed=None).sequences[0].tokens) for _ in range(4)}
    assert len(unseeded) > 1


def test_likely_tokens_are_those_of_transformers(client, model):
    base = client.create_sampling_client(base_model=NAME).result()
    found = sample(
        base,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        prompt_logprobs_last_n=1,
    )
    tokens = PROMPT + found.sequences[0].tokens
    alone = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        scores = alone(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    best = scores.topk(3)
    assert found.prompt_logprobs[:2] == [None, None]
    assert found.prompt_logprobs[2] == pytest.approx(float(scores[1, tokens[2]]), abs=1e-4)
    assert found.topk_prompt_logprobs[:2] == [None, None]
    rows = [found.topk_prompt_logprobs[2], *found.sequences[0].topk_logprobs]
    for place, row in enumerate(rows, 1):
        assert [id for id, _ in row] == best.indices[place, : len(row)].tolist()
        values = best.values[place, : len(row)].tolist()
        assert [value for _, value in row] == pytest.approx(values, abs=1e-4)
    assert [len(row) for row in rows] == [3] + [2] * 6


def test_a_loop_of_reinforcement_learning_raises_the_reward(client):
    training = client.create_lora_training_client(NAME, rank=8, seed=0).result()
    rewards = []
    for turn in range(12):
        sampler = training.save_weights_and_get_sampling_client().result()
        found = sample(sampler, 32, seed=turn).sequences
        scores = np.array([sum(t % 2 == 0 for t in s.tokens) / len(s.tokens) for s in found])
        rewards.append(scores.mean())
        skipped = [0.0] * (len(PROMPT) - 1)
        data = [
            datum(
                PROMPT + s.tokens,
                logprobs=skipped + s.logprobs,
                advantages=skipped + [score - scores.mean()] * len(s.tokens),
            )
            for s, score in zip(found, scores, strict=True)
        ]
        step(training, data, "importance_sampling")
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards


@pytest.mark.slow
def test_a_client_goes_on_from_its_checkpoint_after_the_server_was_killed(model, started, tmp_path):
    words = ("name=tiny", f"dir={tmp_path / 'tinker'}", "model.dtype=float32")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    started.append(serve_process(model, port, *words, verb="serve-tinker"))
    wait_for(url)
    first = tinker.ServiceClient(base_url=url, api_key="tml-test")
    training = trained(first, 2)
    path = training.save_state("here", user_metadata={"note": "mine"}).result().path
    step(training)
    uninterrupted = logprobs_of(training.forward(supervised(), "cross_entropy").result())
    started[-1].send_signal(signal.SIGKILL)
    started[-1].wait(60)
    started.append(serve_process(model, port, *words, verb="serve-tinker"))
    wait_for(url)
    with pytest.raises(tinker.NotFoundError, match="create it again, from a checkpoint"):
        training.forward(supervised(), "cross_entropy").result()
    with connected(url) as again:
        resumed = again.create_training_client_from_state_with_optimizer(path).result()
        step(resumed)
        found = logprobs_of(resumed.forward(supervised(), "cross_entropy").result())
        assert found == uninterrupted
        # Without the state of the optimizer, the same step differs.
        fresh = again.create_training_client_from_state(path).result()
        step(fresh)
        assert logprobs_of(fresh.forward(supervised(), "cross_entropy").result()) != found


def test_load_state_takes_a_client_back(client):
    training = trained(client, 2)
    path = training.save_state("back").result().path
    step(training)
    after = training.forward(supervised(), "cross_entropy").result().metrics
    with pytest.warns(FutureWarning):
        training.load_state_with_optimizer(path).result()
    step(training)
    assert training.forward(supervised(), "cross_entropy").result().metrics == after
    info = tinker.RestClient(base_url=client._base_url, api_key="tml-test")
    found = info.get_weights_info_by_tinker_path(path).result()
    assert (found.base_model, found.lora_rank, found.train_unembed) == (NAME, 4, True)


def test_a_checkpoint_of_another_model_is_refused(client, model, tmp_path, folder):
    path = trained(client).save_state("other-model").result().path
    other = tmp_path / "other"
    tiny_model("llama", seed=5).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    with serving(other, folder) as url, connected(url) as there:
        with pytest.raises(tinker.RequestFailedError, match="checkpoint of another base model"):
            there.create_training_client_from_state(path).result()
        with pytest.raises(tinker.BadRequestError, match="checkpoint of another base model"):
            there.create_sampling_client(model_path=path).result()


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a loss": (lambda c, t: t.forward_backward(supervised(), "dro"), "loss_fn = 'dro'"),
    "a setting of a loss": (
        lambda c, t: t.forward(supervised(), "cross_entropy", {"beta": 0.1}),
        r"loss_fn_config.beta = 0.1: this loss does not read it",
    ),
    "a bound": (
        lambda c, t: t.forward(supervised(), "ppo", {"clip_low_threshold": 1.5}),
        "clip_low_threshold = 1.5: it must be from 0 to 1",
    ),
    "an input": (
        lambda c, t: t.forward([datum([5, 6], weights=[1], advantages=[1])], "cross_entropy"),
        "advantages, target_tokens, weights, and this loss reads exactly target_tokens, weights",
    ),
    "lengths": (
        lambda c, t: t.forward([datum([5, 6, 7], weights=[1])], "cross_entropy"),
        r"weights has the shape \[1\], with 2 tokens",
    ),
    "a token": (
        lambda c, t: t.forward([datum([5, 1000], weights=[1])], "cross_entropy"),
        "target_tokens must be token ids, one or more, from 0 to",
    ),
    "an optimizer": (
        lambda c, t: t.optim_step(types.DimuonParams(learning_rate=0.1)),
        "optimizer_params = .* is not supported",
    ),
    "an optimizer of a new client": (
        lambda c, t: c.create_lora_training_client(NAME, optimizer=types.DimuonOptimizerConfig()),
        "dimuon",
    ),
    "a number": (
        lambda c, t: t.optim_step(types.AdamParams(beta1=1.5)),
        "adam_params.beta1 = 1.5",
    ),
    "no gradient": (lambda c, t: t.optim_step(types.AdamParams()), "there is no gradient"),
    "a rank": (lambda c, t: c.create_lora_training_client(NAME, rank=0), "rank = 0"),
    "a model": (lambda c, t: c.create_lora_training_client("big"), "base_model = 'big'"),
    "an expiry": (lambda c, t: t.save_state("x", ttl_seconds=3600), "ttl_seconds = 3600"),
    "a name": (lambda c, t: t.save_state("../x"), "name = '../x'"),
    "a path": (
        lambda c, t: c.create_sampling_client(model_path="tinker://a/weights/../../b"),
        "it must be tinker://ID/weights/NAME",
    ),
    "a missing checkpoint": (
        lambda c, t: c.create_sampling_client(model_path="tinker://a/weights/b"),
        "is no checkpoint of this server",
    ),
    "inflight weights": (
        lambda c, t: t.save_weights_and_get_sampling_client(kind="inflight"),
        "kind = 'inflight' is not supported",
    ),
    "another format": (lambda c, t: t.save_weights_external("x"), "no such address"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_server_does_not_do_is_refused_by_name(client, what):
    call, message = REFUSED[what]
    with pytest.raises(tinker.TinkerError, match=message):
        call(client, trained(client, 0)).result()


SAMPLES_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no end": ({"stop": []}, r"stop = \[\]"),
    "no token left": ({"top_k": 0}, "top_k = 0"),
    "a temperature": ({"temperature": -1.0}, "temperature = -1"),
    "a share": ({"top_p": 1.5}, "top_p = 1.5"),
    "too many tokens": ({"max_tokens": 5000}, "max_tokens = 5000 after 3 tokens"),
    "no tokens": ({"max_tokens": 0}, "max_tokens = 0"),
    "a token of the prompt": ({"prompt": [5, -1]}, "prompt must be token ids"),
    "an empty prompt": ({"prompt": []}, "prompt must be token ids"),
    "other draws": ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k = 2 is not supported"),
    "targets": (
        {
            "target_prompt_logprobs": types.TensorData(
                data=np.array([1, 2]), dtype="int64", shape=[2, 1]
            )
        },
        "target_prompt_logprobs = .* is not supported",
    ),
}


@pytest.mark.parametrize("what", SAMPLES_REFUSED)
def test_a_request_for_samples_that_the_server_cannot_follow_is_refused_by_name(client, what):
    options, message = SAMPLES_REFUSED[what]
    base = client.create_sampling_client(base_model=NAME).result()
    with pytest.raises(tinker.BadRequestError, match=message):
        sample(base, **options)


def test_no_step_is_taken_with_a_part_of_a_gradient(client, folder):
    training = trained(client, 0)
    before = weights_of(training, folder, "part-before")
    first = training.forward_backward(supervised(), "cross_entropy")
    bad = training.forward_backward([datum([5, 1000], weights=[1])], "cross_entropy")
    late = training.forward_backward(supervised(), "cross_entropy")
    stepped = training.optim_step(types.AdamParams(**ADAM))
    assert first.result().metrics == late.result().metrics
    with pytest.raises(tinker.RequestFailedError, match="target_tokens must be token ids"):
        bad.result()
    with pytest.raises(tinker.RequestFailedError, match="gradients since the last step were drop"):
        stepped.result()
    after = weights_of(training, folder, "part-after")
    assert all(torch.equal(tensor, before[key]) for key, tensor in after.items())
    step(training)
    assert trained(client).forward(supervised(), "cross_entropy").result().metrics == (
        training.forward(supervised(), "cross_entropy").result().metrics
    )


def test_a_gradient_that_is_not_finite_is_dropped(client):
    training = trained(client, 0)
    huge = [datum([5, 6], logprobs=[-1e4], advantages=[1e38])]
    training.forward_backward(huge, "importance_sampling").result()
    with pytest.raises(tinker.RequestFailedError, match="not finite, and was dropped"):
        training.optim_step(types.AdamParams(**ADAM)).result()
    assert math.isfinite(step(training)[1].metrics["grad_norm"])


def test_a_checkpoint_is_overwritten_only_on_request_and_never_holds_half_a_step(client):
    training = trained(client)
    training.save_state("twice").result()
    with pytest.raises(tinker.RequestFailedError, match="is there already; take another name"):
        training.save_state("twice").result()
    training.save_state("twice", overwrite=True).result()
    training.forward_backward(supervised(), "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="call optim_step before save_state"):
        training.save_state("thrice").result()


def test_the_end_of_a_session_frees_its_clients(model, tmp_path):
    with serving(model, tmp_path) as url:
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        training = trained(client)
        sampler = training.save_weights_and_get_sampling_client().result()
        later = tinker.ServiceClient(base_url=url, api_key="tml-test")
        other = trained(later)
        client.close("success", "done").result()
        gone = {
            "session_heartbeat": {"session_id": training.model_id.partition(":")[0]},
            "get_info": {"model_id": training.model_id},
            "create_sampling_session": {
                "session_id": training.model_id.partition(":")[0],
                "sampling_session_seq_id": 5,
                "base_model": NAME,
            },
        }
        codes = [post(url, name, body).status_code for name, body in gone.items()]
        assert codes == [410, 404, 410]
        info = httpx.get(f"{url}/api/v1/samplers/{sampler._sampling_session_id}")
        assert info.status_code == 404 and "its session is finished" in info.json()["error"]
        assert step(other)[1].metrics["grad_norm"] > 0
        later.close("success").result()


def test_a_session_without_a_heartbeat_ends(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(service, "EXPIRY_SECONDS", 0.0)
    with serving(model, tmp_path) as url:
        gone = trained(tinker.ServiceClient(base_url=url, api_key="tml-test"))
        with connected(url) as later:
            trained(later)
            with pytest.raises(tinker.NotFoundError, match="its session is finished"):
                gone.forward(supervised(), "cross_entropy").result()
        assert "had no heartbeat" in caplog.text


def test_old_snapshots_are_dropped_and_old_checkpoints_are_read_again(client, monkeypatch):
    monkeypatch.setattr(service, "KEPT_SNAPSHOTS", 1)
    training = trained(client)
    live = training.save_weights_and_get_sampling_client().result()
    path = training.save_weights_for_sampler("kept").result().path
    saved = client.create_sampling_client(model_path=path).result()
    before = sample(saved).sequences[0].tokens
    training.save_weights_and_get_sampling_client().result()
    assert sample(saved).sequences[0].tokens == before
    with pytest.raises(tinker.RequestFailedError, match="the server keeps the latest 1"):
        sample(live)


def test_only_clients_with_a_token_are_answered(model, tmp_path):
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("tml-secret\n", encoding="utf-8")
    with serving(model, tmp_path / "tinker", http={"token_file": str(tokens)}) as url:
        with pytest.raises(tinker.AuthenticationError, match="not one of this server's"):
            trained(tinker.ServiceClient(base_url=url, api_key="tml-wrong"))
        right = tinker.ServiceClient(base_url=url, api_key="tml-secret")
        assert step(trained(right))[1].metrics["grad_norm"] > 0
        right.close("success").result()


def test_adapters_in_the_settings_are_refused(model):
    with pytest.raises(ConfigError, match="each client gives the rank"):
        build(ServeTinkerConfig, {"model": {"path": str(model), "lora": {"rank": 4}}})


RAW: dict[str, tuple[str, dict[str, Any], str]] = {
    "a field that is missing": ("session_heartbeat", {}, "the request has no 'session_id'"),
    "a field that is unknown": (
        "session_heartbeat",
        {"session": "x"},
        "unknown field 'session'; did you mean 'session_id'",
    ),
    "an unknown session": ("session_heartbeat", {"session_id": "x"}, "there is no session 'x'"),
    "an unknown request": ("retrieve_future", {"request_id": "x"}, "there is no request 'x'"),
    "an unknown sampler": (
        "asample",
        {"sampling_session_id": "x", "seq_id": 0},
        "there is no sampling client 'x'",
    ),
    "data as JSON": ("forward_backward", {"model_id": "x"}, "send a message of protobuf"),
    "no weights": (
        "create_sampling_session",
        {"session_id": "", "sampling_session_seq_id": 0},
        "give base_model or model_path",
    ),
}


@pytest.mark.parametrize("what", RAW)
def test_a_request_that_no_client_sends_is_refused_in_a_sentence(url, what):
    name, body, message = RAW[what]
    if "session_id" in body and not body["session_id"]:
        body = {**body, "session_id": post(url, "create_session", {}).json()["session_id"]}
    answer = post(url, name, body)
    assert 400 <= answer.status_code < 500
    assert message in answer.json()["error"] and answer.json()["category"] == "user"


def post(url: str, name: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/api/v1/{name}", json=body)


def test_a_repeated_request_is_computed_once_and_a_late_one_is_refused(client, url):
    training = trained(client, 0)
    model_id = training.model_id
    training.forward_backward(supervised(), "cross_entropy").result()
    body = {"model_id": model_id, "seq_id": 2, "adam_params": ADAM}
    first, second = (post(url, "optim_step", body).json() for _ in range(2))
    assert first == second == {"model_id": model_id, "request_id": f"{model_id}:2"}
    assert "metrics" in post(url, "retrieve_future", {"request_id": f"{model_id}:2"}).json()
    late = post(url, "optim_step", {**body, "seq_id": 1.0})
    assert late.status_code == 400 and "send in order" in late.json()["error"]
