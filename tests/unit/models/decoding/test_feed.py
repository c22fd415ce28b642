"""Several tokens per row in one step, and their removal: the logits are those of the model's own forward."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import pytest
import torch

from lightrft.models.decoding.kv_decoder import KVDecoder, PlanDecodeSession
from lightrft.models.tiny.text_families import family_model
from lightrft.types import Prompt
from tests.model_helpers import Float64

PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20, 21, 22], [30])
ROWS = (0, 1, 0, 2, 0)
"""Prompt of each row."""


def random_tokens(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(4, 90, (count,), generator=generator).tolist()


@pytest.mark.parametrize(
    "family", ["qwen2", "gemma2", "gemma3_text", "deepseek_v3", "qwen3_moe", "opt", "phi3"]
)
def test_fed_and_removed_tokens_give_the_logits_of_a_plain_forward(family: str) -> None:
    model = family_model(family, dtype=torch.float64, eos_token_id=None)
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    decoder = KVDecoder(model)
    with Float64(), decoder.running():
        session = decoder.session()
        assert isinstance(session, PlanDecodeSession)
        session.reserve(3, 10, 5, 40, 1000)
        handles, _ = session.prefill([Prompt(str(k), p) for k, p in enumerate(PROMPTS)])
        session.admit([handles[k] for k in ROWS])
        grown: list[list[int]] = [[] for _ in ROWS]
        for turn in range(6):
            counts = np.array([1 + (turn * 3 + row) % 5 for row in range(len(ROWS))])
            fed = [random_tokens(generator, int(n)) for n in counts]
            flat = torch.tensor(list(chain.from_iterable(fed)))
            logits = session.feed(flat, counts).split(counts.tolist())
            for row, (new, found) in enumerate(zip(fed, logits)):
                ids = torch.tensor([[*PROMPTS[ROWS[row]], *grown[row], *new]])
                with no_plan(decoder):
                    own = model(input_ids=ids, use_cache=False).logits[0, -len(new) :]
                torch.testing.assert_close(found, own, atol=1e-9, rtol=0)
                grown[row] += new
            removed = np.array([(turn + row) % int(n) for row, n in enumerate(counts)])
            session.roll_back(removed)
            for row, n in enumerate(removed.tolist()):
                del grown[row][len(grown[row]) - n :]
            # a plain step among the others, and rows that leave
            last = torch.tensor([random_tokens(generator, 1)[0] for _ in ROWS])
            logits_of_step = session.step(last)
            for row, token in enumerate(last.tolist()):
                grown[row].append(token)
                ids = torch.tensor([[*PROMPTS[ROWS[row]], *grown[row]]])
                with no_plan(decoder):
                    own = model(input_ids=ids, use_cache=False).logits[0, -1]
                torch.testing.assert_close(logits_of_step[row], own, atol=1e-9, rtol=0)


@contextmanager
def no_plan(decoder: KVDecoder) -> Generator[None]:
    """Give the model the attention that it was loaded with, inside the context."""
    config = decoder._config
    before, config._attn_implementation = config._attn_implementation, decoder._own_attention
    try:
        yield
    finally:
        config._attn_implementation = before
