"""Drawing, scoring, filtering and refilling: what is used, what is not, and what becomes of every token."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.algorithms.requirements import Requirements
from lightrft.config.base import build, deep_merge
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.engines.base import never_stop
from lightrft.observability.timers import Timers
from lightrft.roles import Roles
from lightrft.rollout.accounting import (
    GREEDY,
    CollectedRollouts,
    FilterResult,
    rollout_metrics,
    tokens_of,
)
from lightrft.rollout.collate import collate
from lightrft.rollout.collect import collect_rollouts
from lightrft.rollout.generation import (
    GroupQuota,
    generate_and_score,
    refuse_huge,
    requests_for,
)
from lightrft.trainer.checks.check_rollout import check_rollout
from lightrft.trainer.rl_step import collect_settings
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ConfigError, GenerationInterrupted, RankError, RewardError
from lightrft.utils.seeding import derive_seed


class FakeEngine:
    """One token a row and step, all rows at once; answer lengths depend on the seed alone, and pauses on requests. ``raises`` after
    that many steps."""

    shared_by_all_ranks = False
    tensor_parallel_size = 1
    shares_weights = True

    def wake(self) -> None: ...

    def sleep(self, level: int) -> None: ...

    def __init__(self, longest: int = 6, raises: int = 10**9) -> None:
        self.longest, self.raises, self.calls = longest, raises, 0

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        self.calls += 1
        rows = [(r, random.Random(r.seed).randint(0, self.longest)) for r in requests]
        self.tokens = 0
        for step in range(self.longest + 1):
            if step == self.raises:
                raise ZeroDivisionError("the engine broke")
            if stopped():
                left = [
                    (r, r.num_generated + max(0, step - 1))
                    for r, length in rows
                    if length >= r.num_generated + step
                ]
                self.tokens += sum(tokens - r.num_generated for r, tokens in left)
                yield from (answer(r, tokens, "abort") for r, tokens in left)
                return
            out = [
                (r, r.num_generated + step, length)
                for r, length in rows
                if r.num_generated + step in (length, r.pause_after_tokens)
            ]
            rows = [
                (r, length)
                for r, length in rows
                if r.num_generated + step not in (length, r.pause_after_tokens)
            ]
            self.tokens += sum(tokens - r.num_generated for r, tokens, _ in out)
            yield from (
                answer(r, tokens, "stop" if tokens == length else "abort")
                for r, tokens, length in out
            )


def answer(request: Request, length: int, reason: Any) -> Rollout:
    column = [request.seed % 97 + t for t in range(length)]
    ones = [True] * length
    return Rollout(
        request.prompt,
        column,
        ones,
        [-1.0] * length,
        [0] * length,
        reason,
        request.seed,
        request.sample,
    )


@dataclass
class FakeScorer:
    """Rewards by the seed; one in ``fails`` answers fails. What is not waited for comes back late, and in any order."""

    rewards: tuple[float, ...] = (0.0, 1.0)
    fails: int = 0
    late: int = 0
    seen: list[int] = field(default_factory=list)
    _held: list[Rollout] = field(default_factory=list)

    def submit(self, rollout: Rollout) -> None:
        assert rollout.finish_reason != "abort"
        dice = random.Random(rollout.seed + 1)
        if self.fails and dice.randrange(self.fails) == 0:
            rollout.failed = "raised"
        else:
            rollout.reward = dice.choice(self.rewards)
        self.seen.append(rollout.seed)
        self._held.append(rollout)

    def results(self, wait: bool) -> Iterator[Rollout]:
        random.Random(len(self._held) + self.late).shuffle(self._held)
        while self._held and (wait or len(self._held) > self.late):
            yield self._held.pop()

    def check_sources(self, sources: Iterable[str]) -> None: ...

    def close(self) -> None: ...


class Prompts:
    """Prompt after prompt, and how many were asked for at a time."""

    def __init__(self, carried: Any = ()) -> None:
        self.asked: list[int] = []
        self.carried = list(carried)
        self.partial: list[Any] = []

    def draw(self, count: int) -> list[Prompt]:
        start = sum(self.asked)
        self.asked.append(count)
        return [Prompt(f"p{start + i}", [1]) for i in range(count)]

    def record_results(self, collected: CollectedRollouts) -> None:
        self.carried, self.partial = collected.carried, collected.partial


def config_of(**over: Any) -> RLConfig:
    tree = {
        "rollout": {"prompts_per_step": 3, "group_size": 4},
        "algorithm": {"preset": None, "advantage": {"name": "grpo"}},
    }
    return build(RLConfig, deep_merge(tree, over))


@dataclass
class Threads:
    """Ranks that are threads of this process."""

    rank: int
    meeting: threading.Barrier
    told: list[Any]
    minutes: float = 1 / 3

    @property
    def size(self) -> int:
        return self.meeting.parties

    def gather(self, value: Any) -> list[Any]:
        self.told[self.rank] = value
        self._meet()
        found = list(self.told)
        self._meet()
        return found

    def _meet(self) -> None:
        try:
            self.meeting.wait(60 * self.minutes)
        except threading.BrokenBarrierError as error:
            raise RankError("a rank is missing") from error

    def sum(self, tensor: Any) -> Any:
        first, *others = self.gather(tensor)
        return sum(others, start=first)


def of_all_ranks(work: Callable[[Threads], Any], count: int, minutes: float = 1 / 3) -> list[Any]:
    """What ``work`` gives on each of so many ranks."""
    meeting, told = threading.Barrier(count), [None] * count
    with ThreadPoolExecutor(count) as pool:
        return list(
            pool.map(lambda rank: work(Threads(rank, meeting, told, minutes)), range(count))
        )


def run(
    config: RLConfig,
    scorer: FakeScorer,
    engine: FakeEngine | None = None,
    step: int = 0,
    **more: Any,
) -> CollectedRollouts:
    roles = Roles(
        SimpleNamespace(ranks=more.pop("ranks", SINGLE_PROCESS)),
        None,
        engine or FakeEngine(),
        scorer,
        None,
    )
    return collect_rollouts(
        roles,
        collect_settings(config, Requirements.of(config.algorithm)),
        step,
        more.pop("prompts", Prompts()),
        Timers(),
        **more,
    )


def conserves(got: CollectedRollouts) -> bool:
    """The account, counted again from the rollouts themselves."""
    tokens = got.tokens
    assert tokens["sampled"] == tokens_of(got.rollouts)
    assert tokens["trained"] == sum(map(tokens_of, got.groups))
    assert tokens["carried_out"] == sum(map(tokens_of, got.carried))
    assert tokens["failed"] == sum(len(r) for r in got.rollouts if r.failed)
    assert tokens["filtered"] == sum(got.filtered.values())
    assert 0 <= tokens["dropped"] <= tokens["sampled"]
    left = tokens["trained"] + tokens["filtered"] + tokens["failed"] + tokens["carried_out"]
    return tokens["sampled"] + tokens["carried_in"] == left


FILTER_SETS = st.lists(
    st.sampled_from(
        [
            {"name": "zero_variance"},
            {"name": "reward_bounds", "options": {"low": 0.3}},
            {"name": "pass_rate", "options": {"low": 0.2, "high": 0.9}},
            {"name": "perplexity", "options": {"high": 2.0}},
            {"name": "repeated_answers", "options": {"limit": 0.3}},
            {"name": "repeated_ngrams", "options": {"limit": 0.9, "n": 1}},
        ]
    ),
    max_size=2,
)
SELECTS = st.sampled_from(
    [
        None,
        {"name": "top_k", "options": {"keep": 2}},
        {"name": "balanced", "options": {"keep": 3}},
        {"name": "balanced", "options": {"keep": 2, "threshold": 1.0}},
        {"name": "max_variance", "options": {"keep": 2}},
        {"name": "random", "options": {"keep": 1}},
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    filters=FILTER_SETS,
    select=SELECTS,
    oversample=st.sampled_from([1.0, 1.4, 3.0]),
    carry=st.booleans(),
    greedy=st.booleans(),
    rewards=st.sampled_from([(0.0, 1.0), (0.0,), (-1.0, 0.0, 0.25, 2.0)]),
    fails=st.sampled_from([0, 2, 7]),
    late=st.sampled_from([0, 3, 50]),
    seed=st.integers(0, 99),
    samples=st.integers(1, 5),
)
def test_every_token_is_trained_filtered_failed_or_carried_over(
    filters: Any,
    select: Any,
    oversample: float,
    carry: bool,
    greedy: bool,
    rewards: Any,
    fails: int,
    late: int,
    seed: int,
    samples: int,
) -> None:
    config = config_of(
        run={"seed": seed},
        rollout={
            "group_size": samples,
            "select": select,
            "oversample": oversample,
            "carry_over": carry,
            "max_rounds": 3,
        },
        algorithm={"filters": filters, "advantage": {"name": "remax" if greedy else "grpo"}},
    )
    scorer, carried, whole = FakeScorer(rewards, fails, late), [], Counter()
    for step in range(3):
        try:
            got = run(config, scorer, step=step, prompts=Prompts(carried))
        except RewardError:
            return
        assert conserves(got)
        assert len(got.groups) <= 3
        assert all(
            r.reward is not None and not r.failed and r.finish_reason == "stop"
            for g in got.groups
            for r in g
        )
        assert all(
            r.sample != GREEDY and (r.baseline is not None) is greedy for g in got.groups for r in g
        )
        assert got.rounds == 3 or len(got.groups) == 3
        assert sum(got.dropped.values()) + len(got.groups) + len(got.carried) >= 3 * (
            got.rounds > 0
        )
        assert bool(got.carried) <= (carry and oversample > 1)
        whole.update(got.tokens)
        carried = got.carried
    assert whole["sampled"] == whole["trained"] + whole["filtered"] + whole["failed"] + sum(
        map(tokens_of, carried)
    )
    assert not scorer._held


@pytest.mark.parametrize("late", [0, 5, 100])
def test_what_is_used_does_not_depend_on_how_fast_scoring_is(late: int) -> None:
    over = {
        "rollout": {"oversample": 2.0, "carry_over": True},
        "algorithm": {"filters": ["zero_variance"]},
    }
    fast, slow = (run(config_of(**over), FakeScorer(late=n)) for n in (0, late))
    assert seeds_of(fast.groups) == seeds_of(slow.groups)
    assert seeds_of(fast.carried) == seeds_of(slow.carried)
    assert fast.tokens == slow.tokens
    assert [r.finish_reason for r in fast.rollouts] == [r.finish_reason for r in slow.rollouts]


def seeds_of(groups: Any) -> list[list[int]]:
    return [[r.seed for r in group] for group in groups]


def test_without_oversampling_no_answer_is_ever_cut_short() -> None:
    prompts = Prompts()
    got = run(config_of(algorithm={"filters": ["zero_variance"]}), FakeScorer(), prompts=prompts)
    assert {r.finish_reason for r in got.rollouts} == {"stop"}
    assert set(got.dropped) <= {"zero_variance"}
    assert prompts.asked[0] == 3


def test_drawing_ends_as_soon_as_enough_groups_have_passed() -> None:
    prompts, engine, scorer = Prompts(), FakeEngine(), FakeScorer()
    got = run(config_of(rollout={"oversample": 2.5}), scorer, engine, prompts=prompts)
    assert prompts.asked == [8]
    assert engine.calls == got.rounds == 1
    assert len(got.groups) == 3
    assert got.dropped["aborted"] + got.dropped["surplus"] == 5
    assert got.dropped["aborted"] > 0
    longest = max(len(r) for group in got.groups for r in group)
    assert all(len(r) <= longest for r in got.rollouts)
    aborted = {r.prompt.id for r in got.rollouts if r.finish_reason == "abort"}
    assert got.filtered["aborted"] == sum(len(r) for r in got.rollouts if r.prompt.id in aborted)
    metrics = rollout_metrics(got).compute()
    assert metrics["rollout/num_aborted"] == sum(r.finish_reason == "abort" for r in got.rollouts)
    assert metrics["rollout/tokens_filtered/aborted"] == got.filtered["aborted"]
    assert metrics["rollout/frac_dropped"] == pytest.approx(
        1 - got.tokens["trained"] / got.tokens["sampled"]
    )


def test_after_an_early_stop_nothing_of_the_step_comes_back_in_the_next() -> None:
    scorer, config = FakeScorer(late=7), config_of(rollout={"oversample": 3.0})
    first = run(config, scorer)
    before = set(scorer.seen)
    second = run(config, scorer, step=1)
    assert first.dropped["aborted"] > 0
    assert not {r.seed for r in second.rollouts} & before
    assert {r.seed for r in first.rollouts if r.finish_reason == "stop"} == before


def test_a_run_that_is_asked_to_stop_leaves_nothing_behind_and_uses_nothing() -> None:
    scorer = FakeScorer(late=7)
    with pytest.raises(GenerationInterrupted):
        run(config_of(), scorer, stopped=lambda: len(scorer.seen) > 5)
    assert 0 < len(scorer.seen) < 12
    assert not scorer._held
    assert run(config_of(), FakeScorer(), stopped=lambda: False).groups


def test_an_engine_that_breaks_leaves_nothing_with_the_scorer() -> None:
    scorer = FakeScorer(late=50)
    with pytest.raises(ZeroDivisionError):
        run(config_of(), scorer, FakeEngine(raises=3))
    assert scorer.seen
    assert not scorer._held


def test_answers_that_do_not_come_back_are_an_error() -> None:
    class Forgetful(FakeScorer):
        def results(self, wait: bool) -> Iterator[Rollout]:
            yield from ()

    with pytest.raises(RuntimeError, match="12 responses did not come back"):
        run(config_of(), Forgetful())


def test_groups_that_are_left_over_come_first_in_the_next_step() -> None:
    config = config_of(rollout={"oversample": 3.0, "carry_over": True})
    engine = FakeEngine(longest=0)  # all answers are done at once
    first = run(config, FakeScorer(), engine)
    assert (len(first.groups), len(first.carried)) == (3, 3)
    assert first.dropped == {"surplus": 3}
    prompts = Prompts(first.carried)
    second = run(config, FakeScorer(), engine, step=1, prompts=prompts)
    assert seeds_of(second.groups) == seeds_of(first.carried)
    assert (prompts.asked, second.rounds, second.rollouts, second.carried) == ([], 0, [], [])


def test_groups_that_are_carried_over_are_counted_where_they_are_drawn_and_where_they_are_used() -> (
    None
):
    config = config_of(
        rollout={
            "oversample": 3.0,
            "carry_over": True,
            "select": {"name": "top_k", "options": {"keep": 2}},
        }
    )
    one = next(
        got
        for seed in range(50)
        if len((got := run(config, FakeScorer(), step=seed)).carried) in (1, 2)
    )
    two = run(config, FakeScorer(), step=99, prompts=Prompts(one.carried))
    assert conserves(one)
    assert conserves(two)
    assert one.tokens["carried_out"] == two.tokens["carried_in"] == sum(map(tokens_of, one.carried))
    values = rollout_metrics(one).compute() | {
        "in": rollout_metrics(two).compute()["rollout/tokens_carried_in"]
    }
    assert values["rollout/tokens_carried_out"] == values["in"] == one.tokens["carried_out"]
    assert (
        "rollout/tokens_carried_in" not in rollout_metrics(run(config_of(), FakeScorer())).compute()
    )


def test_the_greedy_answer_of_a_prompt_is_the_baseline_of_its_answers() -> None:
    got = run(
        config_of(algorithm={"advantage": {"name": "remax"}}), FakeScorer(rewards=(0.0, 0.5, 1.0))
    )
    greedy = {r.prompt.id: r for r in got.rollouts if r.sample == GREEDY}
    assert len(greedy) == len(got.groups) == 3
    for group in got.groups:
        assert [r.sample for r in group] == [0, 1, 2, 3]
        assert {r.baseline for r in group} == {greedy[group[0].prompt.id].reward}
    batch = collate(got.groups)
    assert batch.baselines is not None
    assert batch.baselines.tolist() == [r.baseline for group in got.groups for r in group]
    assert got.filtered == Counter(baseline=tokens_of(list(greedy.values())))
    metrics = rollout_metrics(got).compute()
    assert metrics["rollout/baseline"] == pytest.approx(
        sum(r.reward or 0 for r in greedy.values()) / 3
    )
    assert metrics["reward/mean"] == pytest.approx(
        sum(r.reward or 0 for g in got.groups for r in g) / 12
    )


def test_without_a_need_for_it_no_greedy_answer_is_drawn() -> None:
    got = run(config_of(), FakeScorer())
    assert all(r.sample >= 0 and r.baseline is None for r in got.rollouts)
    assert collate(got.groups).baselines is None
    assert [r.greedy for r in requests_for([Prompt("p", [1])], 2, 0, greedy=True)[0]] == [
        True,
        False,
        False,
    ]


def test_a_group_whose_baseline_was_not_scored_is_dropped_and_counted() -> None:
    class NoBaseline(FakeScorer):
        def submit(self, rollout: Rollout) -> None:
            super().submit(rollout)
            if rollout.sample == GREEDY and rollout.prompt.id in {"p0", "p2"}:
                rollout.reward, rollout.failed = None, "raised"

    got = run(config_of(algorithm={"advantage": {"name": "remax"}}), NoBaseline())
    assert got.dropped == {"baseline_failed": 2}
    assert got.failures == {"raised": 2}
    assert [g[0].prompt.id for g in got.groups] == ["p1", "p3", "p4"]
    assert conserves(got)


def test_a_selection_leaves_the_others_out_of_training_and_counts_them() -> None:
    got = run(
        config_of(rollout={"select": {"name": "top_k", "options": {"keep": 2}}}),
        FakeScorer(rewards=(0, 1, 2, 3)),
    )
    for group in got.groups:
        everyone = [r for r in got.rollouts if r.prompt.id == group[0].prompt.id]
        assert sorted(r.reward or 0 for r in group) == sorted(r.reward or 0 for r in everyone)[-2:]
    assert set(got.filtered) == {"not_selected"}
    assert got.filtered["not_selected"] == got.tokens["sampled"] - got.tokens["trained"]
    assert not got.dropped


def test_a_group_of_which_too_little_is_selected_is_dropped() -> None:
    alone = {"name": "random", "options": {"keep": 1}}
    got = run(config_of(rollout={"select": alone, "max_rounds": 2}), FakeScorer())
    assert got.dropped == {"too_few_selected": 6}
    assert got.groups == []
    assert conserves(got)


def test_the_rounds_of_a_step_are_bounded() -> None:
    prompts = Prompts()
    filters = ["zero_variance"]
    got = run(
        config_of(rollout={"max_rounds": 4}, algorithm={"filters": filters}),
        FakeScorer((1.0,)),
        prompts=prompts,
    )
    assert prompts.asked == [3, 3, 3, 3]
    assert got.rounds == 4
    assert rollout_metrics(got).compute()["rollout/frac_dropped"] == 1.0


def test_each_group_is_judged_once() -> None:
    judged: list[str] = []

    def judge(group: Any) -> FilterResult:
        judged.append(group[0].prompt.id)
        return FilterResult(group)

    requests = requests_for(Prompts().draw(5), 2, 0)
    quota = GroupQuota(2, judge)
    groups = generate_and_score(
        FakeEngine(), FakeScorer(late=3), requests, SamplingConfig(), Timers(), quota=quota
    )
    for index, group in enumerate(groups):
        quota.of(index, group)
    assert sorted(judged) == [f"p{i}" for i in range(5)]
    assert sum(quota.uses(i) for i in range(5)) == 2


def test_seeds_depend_on_all_of_their_parts() -> None:
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)
    assert len({derive_seed(1, 2), derive_seed(2, 1), derive_seed(12), derive_seed(1, 2, 0)}) == 4


@settings(max_examples=60, deadline=None)
@given(
    oversample=st.sampled_from([1.0, 1.5, 3.0]),
    step_tokens=st.sampled_from([1, 2, 4, None]),
    carry=st.booleans(),
    fails=st.sampled_from([0, 3]),
    filters=FILTER_SETS,
    late=st.integers(0, 5),
)
def test_answers_that_go_on_in_the_next_step_are_counted_once_and_none_is_lost(
    oversample: float,
    step_tokens: int | None,
    carry: bool,
    fails: int,
    filters: list[str],
    late: int,
) -> None:
    over = {
        "oversample": oversample,
        "max_tokens_per_step": step_tokens,
        "partial": True,
        "carry_over": carry,
        "max_rounds": 3,
    }
    config = config_of(rollout=over, algorithm={"filters": filters})
    scorer, source = FakeScorer((0.0, 1.0), fails, late), Prompts()
    prompts: set[str] = set()
    for step in range(6):
        engine = Counting()
        before = sum(map(tokens_of, [*source.partial, *source.carried]))
        try:
            got = run(config, scorer, engine, step=step, prompts=source)
        except RewardError:
            return
        after = sum(map(tokens_of, [*source.partial, *source.carried]))
        tokens = got.tokens
        assert tokens["sampled"] == engine.total
        assert (
            before + tokens["sampled"]
            == tokens["trained"] + tokens["filtered"] + tokens["failed"] + after
        )
        assert (
            tokens["sampled"] + tokens["carried_in"]
            == tokens["trained"] + tokens["filtered"] + tokens["failed"] + tokens["carried_out"]
        )
        assert "aborted" not in got.dropped
        assert len(got.groups) <= 3
        for group in got.groups:
            assert len({r.prompt.id for r in group}) == 1 and all(
                r.finish_reason == "stop" for r in group
            )
            assert group[0].prompt.id not in prompts
            prompts.add(group[0].prompt.id)
            assert all(len(r) == random.Random(r.seed).randint(0, 6) for r in group)
    assert len(scorer.seen) == len(set(scorer.seen))


class OfAll(FakeEngine):
    shared_by_all_ranks = True


@pytest.mark.parametrize("oversample", [1.0, 2.0])
def test_an_engine_of_all_ranks_is_asked_by_the_first_and_all_of_them_get_what_one_process_would(
    oversample: float,
) -> None:
    config = config_of(
        rollout={"oversample": oversample, "max_rounds": 5},
        algorithm={"filters": [{"name": "zero_variance"}]},
    )
    engines, scorers = [OfAll() for _ in range(3)], [FakeScorer() for _ in range(3)]
    got = of_all_ranks(lambda r: run(config, scorers[r.rank], engines[r.rank], ranks=r), 3)
    alone = run(config, FakeScorer())
    for found in got:
        assert [[r.seed for r in group] for group in found.groups] == [
            [r.seed for r in group] for group in alone.groups
        ]
        assert found.tokens == alone.tokens and conserves(found)
    assert engines[0].calls and not (
        engines[1].calls or engines[2].calls or scorers[1].seen or scorers[2].seen
    )


class Counting(FakeEngine):
    """Counts the tokens of all its calls."""

    total = 0

    def generate(self, *args: Any) -> Iterator[Rollout]:
        yield from super().generate(*args)
        self.total += self.tokens


def test_what_is_begun_goes_on_before_new_prompts_are_drawn() -> None:
    config = config_of(rollout={"partial": True, "max_tokens_per_step": 2})
    source = Prompts()
    first = run(config, FakeScorer(), prompts=source)
    begun = [group[0].prompt.id for group in source.partial]
    assert first.rounds == 1 and len(first.groups) + len(begun) == 3 and begun
    run(config, FakeScorer(), step=1, prompts=source)
    assert sum(source.asked) == 3 + (3 - len(begun))


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"partial": True}, "rollout.partial = True changes nothing"),
        ({"max_tokens_per_step": 4}, "needs rollout.partial"),
        (
            {"partial": True, "max_tokens_per_step": 4096},
            "rollout.max_tokens_per_step = 4096 changes nothing",
        ),
    ],
)
def test_settings_of_partial_answers_that_would_do_nothing_are_refused(
    over: dict[str, Any], said: str
) -> None:
    config = config_of(rollout=over)
    with pytest.raises(ConfigError, match=said):
        check_rollout(config, Requirements.of(config.algorithm))


def test_answers_that_could_not_be_graded_are_counted_and_are_not_part_of_a_mean() -> None:
    graded, ungraded = (
        Rollout(Prompt("p", [1]), [2], [True], [-1.0], [0], "stop", 0, reward=reward, terms=terms)
        for reward, terms in ((1.0, {"math": 1.0}), (0.0, {"math": 0.0, "math/ungraded": 1.0}))
    )
    values = rollout_metrics(CollectedRollouts(rollouts=[graded, ungraded])).compute()
    assert values["rollout/num_ungraded"] == 1 and values["reward/math"] == 0.5
    assert "reward/math/ungraded" not in values


@pytest.mark.parametrize("value", [1e200, -1e200, 1.7e308, 1.1e15])
@pytest.mark.parametrize("as_term", [False, True])
def test_a_reward_that_no_step_can_square_fails_its_response(value: float, as_term: bool) -> None:
    rollout = Rollout(Prompt("a", [1]), [1], [True], [0.0], [0], "stop", seed=0, reward=value)
    if as_term:
        rollout.terms, rollout.weights, rollout.reward = {"big": value}, {"big": 0.0}, 0.0
    refuse_huge(rollout)
    assert rollout.reward is None and f"{value:g}, beyond" in rollout.failed
    fine = replace(rollout, reward=1e15, terms={"shown": value}, weights={}, failed="")
    refuse_huge(fine)
    assert (fine.reward, fine.failed) == (1e15, "")
