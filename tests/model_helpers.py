"""Ragged batches, and arithmetic in true float64, for tests of models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrOCRConfig,
)

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.tiny.text import (
    CHAT_TEMPLATE,
    END,
    PAD,
    PRINTABLE,
    START,
    drawn_model,
    tiny_model,
)
from lightrft.types import Batch, Segments

# Relative: a rollout keeps its log-probs in float32, whatever the model computes in.
STORED = 2**-23
NO_HEAD_DIM = ("qwen2", "phi3", "olmo2")  # their head width is always hidden size over heads

COMMON_FAMILIES = frozenset(
    (
        "deepseek_v3",
        "falcon_h1",
        "gemma2",
        "gemma3_text",
        "glm4_moe",
        "gpt_oss",
        "llama",
        "mamba",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_5_text",
        "qwen2_5_vl",
        "gemma3",
        "qwen2_audio",
    )
)
"""Families that ``make test`` proves, at least one of each kind of layer. CI proves them all."""


def by_family(families: Iterable[str]) -> list[Any]:
    """Return a test parameter for each family, marked as slow unless it is a common one."""
    return [
        pytest.param(family, marks=() if family in COMMON_FAMILIES else pytest.mark.slow, id=family)
        for family in families
    ]


def byte_pairs(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most ``size`` tokens, learned from ``texts``. Its first 259 tokens are 3 special ones and
    the bytes, and its special tokens are those of ``tiny_tokenizer``."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def vllm_model(
    folder: Path,
    seed: int = 0,
    spread: float = 0.3,
    tied: bool = False,
    heads: int = 2,
    kind: str = "qwen2",
    eos: str = END,
) -> Any:
    """Save a model that vLLM can compute on a CPU, where heads have 32 channels or more, with its tokenizer. Return the model."""
    tokenizer = byte_pairs(["the quick brown fox jumps", "one + two = three"], 280)
    tokenizer.eos_token = eos
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=1,
        # the logits of the usual range are so alike that any weights sample the same tokens
        initializer_range=spread,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=tied,
        **(experts if kind != "qwen2" else {}),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def save_scripted_model(folder: Path, after: Mapping[str, str], tokenizer: Any) -> Path:
    """Save a model that writes the token ``after[t]`` after a token ``t``, and ``.`` after others.

    Its config and generation config name the end token of ``tokenizer``, and no other.
    """
    size = len(tokenizer)
    width = -(-size // 64) * 64
    eos = tokenizer.eos_token_id
    fields = {"hidden_size": width, "tie_word_embeddings": False, "eos_token_id": eos}
    model: Any = tiny_model("qwen2", vocab_size=size, **fields)
    with torch.no_grad():
        for layer in model.model.layers:  # the last token alone decides
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        head = model.lm_head.weight.zero_()
        for token, k in tokenizer.get_vocab().items():
            head[tokenizer.convert_tokens_to_ids(after.get(token, ".")), k] = 1.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_random_adapters(base: PreTrainedModel, settings: Any, folder: Path) -> Any:
    """Write adapters with random weights, as plain peft does. Returns the adapted model."""
    from peft import get_peft_model

    adapted = get_peft_model(base, settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(str(folder))
    return adapted


def assert_logprobs_close(
    found: Sequence[float], expected: torch.Tensor, logits: torch.Tensor
) -> None:
    """Equal up to the rounding of float32 in two layers."""
    atol = 64 * torch.finfo(torch.float32).eps * float(logits[logits.isfinite()].abs().max())
    torch.testing.assert_close(torch.tensor(found), expected, atol=atol, rtol=0)


class Float64(TorchFunctionMode):
    """transformers rounds to float32 inside norms, softmax and routers. Here a float64 tensor stays float64 when asked to
    become float32, so that what differs between two layouts is summation order alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        asked = any(a is torch.float32 for a in args[1:]) or kwargs.get("dtype") is torch.float32
        if func is torch.Tensor.float or (func in (torch.Tensor.to, torch.Tensor.type) and asked):
            return first.double()  # positions and frequencies too, which some versions multiply with each other as they are
        is_double = isinstance(first, torch.Tensor) and first.dtype == torch.float64
        if asked and "dtype" in kwargs and (is_double or func is torch.zeros):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def small_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Four query heads over two key heads; the window of sliding layers is 16."""
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family not in NO_HEAD_DIM:
        sizes["head_dim"] = 16
    model = tiny_model(family, dtype=dtype, **{**sizes, **overrides})
    if family == "qwen3_moe" and dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    return model


def unproved_model() -> Any:
    """A causal model of a family that has no row: the decoder of an encoder-decoder, alone."""
    sizes = {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
    }
    tokens = {"pad_token_id": 0, "eos_token_id": 3, "bos_token_id": 1, "decoder_start_token_id": 1}
    config = TrOCRConfig(
        vocab_size=len(PRINTABLE) + 4, max_position_embeddings=256, **sizes, **tokens
    )
    return drawn_model(config, seed=0).eval()


def small_actor(
    family: str, dtype: torch.dtype = torch.float32, layout: str = "prefix_shared", **overrides: Any
) -> Actor:
    return Actor(small_model(family, dtype, **overrides), ModelConfig(layout=layout))


def ragged_batch(
    prompts: list[int], answers: list[int], prompt_of: list[int], seed: int = 0
) -> Batch:
    """Random tokens of the given lengths."""
    generator = torch.Generator().manual_seed(seed)

    def rows(lengths: list[int]) -> list[list[int]]:
        return [torch.randint(4, 99, (n,), generator=generator).tolist() for n in lengths]

    return Batch(
        Segments.of(rows(prompts)),
        Segments.of(rows(answers)),
        torch.tensor(prompt_of, dtype=torch.long),
    )


def hard_batch() -> Batch:
    """Groups of 4, 1, 2 and 0 answers, out of order; answers of length 0 and 1; prompts and answers beyond a window of 16."""
    return ragged_batch([37, 5, 1, 8], [0, 41, 1, 20, 19, 7, 33], [0, 0, 2, 0, 1, 2, 0])


def float32_bound(model: torch.nn.Module) -> float:
    """Relative difference that float32 explains between two orders of the same sums, with a margin of ten.

    Each product of matrices rounds a sum of up to ``size`` terms: about ``eps * sqrt(size)``. The errors
    of ``depth`` products one after another add up like a random walk. Tests in float64 prove equality.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    depth, size = len(matrices), max(p.shape[-1] for p in matrices)
    return rounding(depth * size)


def rounding(terms: int) -> float:
    """Relative error of a float32 result of ``terms`` rounded additions, with a margin of ten.

    Rounding errors add up like a random walk: about ``eps * sqrt(terms)``.
    """
    return 10 * torch.finfo(torch.float32).eps * math.sqrt(terms)


def assert_rounded(
    found: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor, count: int
) -> None:
    """``found`` is a product that adds ``count`` terms in float32, in any order, and is rounded once to its dtype. ``terms`` is
    that of the absolute values, since terms may cancel in the result, but not in its rounding (Higham, Accuracy and Stability of
    Numerical Algorithms, eq. 3.5)."""
    roundoff = count * torch.finfo(torch.float32).eps / 2
    bound = terms.detach() * (roundoff / (1 - roundoff) + torch.finfo(found.dtype).eps)
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= bound).all()


def weights(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.sin(torch.arange(n, dtype=dtype) + 1)


def gradients(
    actor: Actor, batch: Batch, **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, and the gradient of a fixed weighting of them (and of entropies, if asked for) in every parameter."""
    actor.zero_grad()
    scores = actor.score(batch, **options)
    loss = (
        scores.logprobs
        * weights(len(scores.logprobs), scores.logprobs.dtype).to(scores.logprobs.device)
    ).sum()
    if scores.entropy is not None:
        loss = (
            loss
            + (
                scores.entropy
                * weights(len(scores.entropy), scores.entropy.dtype).flip(0).to(loss.device)
            ).sum()
        )
    loss.backward()
    found = {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}
    return scores.logprobs.detach(), found


def plain_rows(actor: Actor, batch: Batch) -> torch.Tensor:
    """The oracle: each row alone through the model's own forward, all logits, plain log-softmax, loops."""
    actor.use_attention("padded")
    out = []
    prompts = batch.prompts.tokens.split(batch.prompts.lengths.tolist())
    for row, answer in enumerate(batch.responses.tokens.split(batch.lengths.tolist())):
        prompt = prompts[int(batch.prompt_of[row])]
        if len(answer):
            logp = (
                actor.base(input_ids=torch.cat([prompt, answer])[None], use_cache=False)
                .logits[0]
                .log_softmax(-1)
            )
            out += [logp[len(prompt) + t - 1, token] for t, token in enumerate(answer)]
    return torch.stack(out)


def gap(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of a parameter's gradient, over that gradient's largest entry (over a millionth of the largest of all
    where that is more: a gradient that is zero in theory has no scale of its own). A key bias moves all scores of a softmax alike,
    so that its gradient is what rounding leaves of the sum that its weight's is made from: it is measured against that one."""
    assert found.keys() == expected.keys()
    floor = 1e-6 * max(float(g.abs().max()) for g in expected.values())
    scale = {
        name: expected[re.sub(r"\b(k_proj|key)\.bias$", r"\1.weight", name)]
        .abs()
        .max()
        .clamp(min=floor)
        for name in expected
    }
    return max(float((found[name] - g).abs().max() / scale[name]) for name, g in expected.items())
