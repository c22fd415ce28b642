"""Attention by parts against the same attention from a mask that is written down pair by pair."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from lightrft.models.attention.segment_plan import AttentionSpans, SegmentPlan

WINDOWS = (None, 1, 2, 3, 5, 9)


def visible(prompts, answers, spans, window):
    """``[T, T]``: query i sees key j. An answer's tokens follow its prompt's; ``spans`` are ``(start, length)`` in the row."""
    place, owner, seen_by = [], [], []
    run = 0
    for n, group in zip(prompts, answers):
        head = run
        for length, first in [(n, 0), *((m, n) for m in group)]:
            place += range(first, first + length)
            owner += [run] * length
            seen_by.append({run, head})
            run += 1
    block = {i: s for s, n in spans for i in range(s, s + n)}
    total = len(place)
    mask = torch.zeros(total, total, dtype=torch.bool)
    for i, j in itertools.product(range(total), repeat=2):
        causal = owner[j] in seen_by[owner[i]] and place[j] <= place[i]
        both_ways = i in block and block.get(j) == block[i]
        near = window is None or place[j] > place[i] - window
        mask[i, j] = (causal or both_ways) and near
    return mask, torch.tensor(place)


def plan_of(prompts, answers, spans, positions):
    runs, shared, heads, at = [], [], [], 0
    for n, group in zip(prompts, answers):
        head = (at, n)
        at += n
        members = []
        for m in group:
            members.append((at, m))
            at += m
        runs += [head, *members]
        if members:
            shared.append((head, members))
            heads.append(head)
    return SegmentPlan(runs, shared, positions, heads, last_layer=1, spans=AttentionSpans(spans))


def dense(query, key, value, mask, scale, softcap):
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def cut(draw, start, length):
    """AttentionSpans inside one run: neighbours may touch, one may have a single token, one may fill the run."""
    spans, at = [], 0
    while at < length and draw(st.booleans()):
        at += draw(st.integers(0, min(3, length - at)))
        n = draw(st.integers(0, length - at))
        if n:
            spans.append((start + at, n))
        at += n
    return spans


@st.composite
def rows(draw):
    prompts = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    answers = [draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)) for _ in prompts]
    spans, at = [], 0
    for n, group in zip(prompts, answers):
        for length in (n, *group):
            spans += cut(draw, at, length)
            at += length
    return prompts, answers, spans


def assert_as_masked(prompts, answers, spans, window, softcap, last=False):
    mask, positions = visible(prompts, answers, spans, window)
    total = len(positions)
    generator = torch.Generator().manual_seed(total)
    inputs = [
        torch.randn(1, h, total, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for h in (4, 2, 2)
    ]
    weight = torch.randn(1, total, 4, 8, dtype=torch.float64, generator=generator)
    plan = plan_of(prompts, answers, spans, positions)
    if last:
        for start, length in plan.heads:
            weight[:, start : start + length - 1] = 0
    found = plan.attend(int(last), *inputs, scale=0.3, softcap=softcap, window=window)
    expected = dense(*inputs, mask, 0.3, softcap)
    grads = torch.autograd.grad((found * weight).sum(), inputs)
    truth = torch.autograd.grad((expected * weight).sum(), inputs)
    read = weight.abs().sum((0, 2, 3)) > 0
    assert (found - expected)[:, read].abs().max() < 1e-10
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(grads, truth))


@settings(max_examples=60, deadline=None)
@given(rows(), st.sampled_from(WINDOWS), st.sampled_from([None, 2.0]))
def test_attention_with_spans_is_that_of_the_mask_from_their_definition_forward_and_backward(
    row, window, softcap
):
    assert_as_masked(*row, window, softcap)


@settings(max_examples=25, deadline=None)
@given(rows(), st.sampled_from(WINDOWS))
def test_the_last_layer_reads_only_the_ends_of_shared_prompts_and_they_are_right(row, window):
    assert_as_masked(*row, window, None, last=True)


@pytest.mark.parametrize("window", WINDOWS)
def test_tokens_of_a_span_longer_than_the_window_see_all_that_follows_in_it_and_the_window_before_them(
    window,
):
    assert_as_masked([20], [[4, 6]], [(3, 12)], window, None)
    mask, _ = visible([20], [[4, 6]], [(3, 12)], window)
    assert mask[3, 14] and not mask[2, 3] and not mask[15, 16]
    assert mask[14, 3] == (window is None or window >= 12)


def test_a_plan_without_spans_has_no_part_for_them():
    _, positions = visible([6, 4], [[3], []], [], None)
    assert not plan_of([6, 4], [[3], []], [], positions).parts(None).ahead
    assert not plan_of([6, 4], [[3], []], [(2, 1)], positions).parts(None).ahead
