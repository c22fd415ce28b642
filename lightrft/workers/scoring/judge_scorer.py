"""Score responses by the verdicts of judges, on top of another scorer."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightrft.config.reward import JudgeConfig
from lightrft.config.reward_model.judgement import COMPARED
from lightrft.datasets.judgement.question import LETTERS, Question, Raw, ask, rubric_entries
from lightrft.datasets.row_tables import MalformedRow
from lightrft.rewards.base import RewardScorer
from lightrft.rewards.rules.verdicts import Verdict, VerdictForm, read_verdict
from lightrft.rewards.rules.verdicts import score as first_score
from lightrft.types import Prompt, Rollout
from lightrft.utils.http_client.server_client import Unanswered
from lightrft.utils.seeding import derive_seed
from lightrft.workers.scoring.collecting import CollectingScorer, add_term
from lightrft.workers.scoring.decisive_token import possible, verdict_names
from lightrft.workers.scoring.judge import Judge, Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """A question about some responses to one prompt.

    Attributes:
        members: Index of each response in the order of the question. None for the reference.
        question: The question.
        form: Form of its verdicts.
        seed: Seed of its judgements.
    """

    members: tuple[int | None, ...]
    question: Raw
    form: VerdictForm
    seed: int


class JudgeScorer(CollectingScorer):
    """A scorer that adds the scores of judges to the rewards of another scorer.

    A response whose judgements have no verdict fails. A response without another to be compared
    with fails too.

    Args:
        inner: Scores responses first.
        judges: The judges.

    Attributes:
        events: ``judgements``, those without a verdict (``unparsed``), those whose probabilities
            lack a verdict (``partial``), and those that a server left ``unanswered``.
    """

    events: ClassVar[tuple[str, ...]] = ("judgements", "unparsed", "partial", "unanswered")

    def __init__(self, inner: RewardScorer, judges: Sequence[Judge]) -> None:
        # a comparison needs all responses to a prompt
        super().__init__(inner, None)
        self.judges = judges

    def close(self) -> None:
        """See ``RewardScorer.close``."""
        super().close()
        for judge in self.judges:
            judge.close()

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """See ``CollectingScorer.score``."""
        for judge in self.judges:
            alive = [rollout for rollout in rollouts if not rollout.failed]
            found = self._scores(judge, alive)
            for i, rollout in enumerate(alive):
                if rollout.failed:
                    continue
                if not found[i]:
                    fail(rollout, judge.config, "no judgement has a verdict")
                    continue
                mean = math.fsum(found[i]) / len(found[i])
                add_term(rollout, judge.config.name, judge.config.weight, mean)

    def _scores(self, judge: Judge, rollouts: Sequence[Rollout]) -> Mapping[int, list[float]]:
        """Return the scores of each response, one for each question about it."""
        groups: dict[int, list[int]] = defaultdict(list)
        for i, rollout in enumerate(rollouts):
            groups[id(rollout.prompt)].append(i)
        asked: list[list[JudgeQuestion]] = []
        for members in groups.values():
            try:
                asked.append(list(comparisons(rollouts, members, judge.config)))
            except (ValueError, MalformedRow) as error:
                for i in members:
                    fail(rollouts[i], judge.config, str(error))
        # a group without a question has nothing to share
        asked = [group for group in asked if group]
        scores: dict[int, list[float]] = defaultdict(list)
        if not asked:
            return scores
        flat = itertools.chain.from_iterable(asked)
        for comparison, found in zip(flat, self._read(judge, asked), strict=True):
            for k, member in enumerate(comparison.members):
                if member is None:
                    continue
                if isinstance(found, Unanswered):
                    fail(rollouts[member], judge.config, str(found))
                elif found:
                    scores[member].append(found[k])
        return scores

    def _read(
        self, judge: Judge, asked: Sequence[Sequence[JudgeQuestion]]
    ) -> Sequence[list[float] | Unanswered]:
        """Return the scores of the responses of each question; none without a verdict."""
        if judge.config.read == "probability":
            return self._soft(judge, asked)
        flat = list(itertools.chain.from_iterable(asked))
        if judge.config.read == "text":
            return self._sampled(judge, flat)
        return self._reasoned(judge, flat)

    def _sampled(
        self, judge: Judge, asked: Sequence[JudgeQuestion]
    ) -> list[list[float] | Unanswered]:
        """Return the scores from the texts of sampled judgements."""
        questions, seeds = repeated(asked, judge.config)
        texts = iter(judge.write([one.question for one in questions], seeds))
        found: list[list[float] | Unanswered] = []
        for one in asked:
            said = list(itertools.islice(texts, judge.config.samples))
            answered = [text for text in said if isinstance(text, str)]
            read = [read_verdict(text, one.form) for text in answered]
            verdicts = [verdict for verdict in read if verdict is not None]
            missing = self._counted(said, len(answered), len(verdicts))
            found.append(missing or voted(verdicts, one, judge.config))
        return found

    def _reasoned(
        self, judge: Judge, asked: Sequence[JudgeQuestion]
    ) -> list[list[float] | Unanswered]:
        """Return the expected scores under the probabilities after sampled reasons."""
        questions, seeds = repeated(asked, judge.config)
        forms = [one.form for one in questions]
        rows = iter(judge.reasoned([one.question for one in questions], seeds, forms))
        found: list[list[float] | Unanswered] = []
        for one in asked:
            found.append(self._expected(list(itertools.islice(rows, judge.config.samples)), one))
        return found

    def _soft(
        self, judge: Judge, asked: Sequence[Sequence[JudgeQuestion]]
    ) -> list[list[float] | Unanswered]:
        """Return the expected scores under the probabilities of the verdicts, without reasons."""
        by_form: dict[str, list[int]] = defaultdict(list)
        for k, group in enumerate(asked):
            by_form[group[0].form.choices].append(k)
        made: dict[int, list[list[float] | Unanswered]] = {}
        for members in by_form.values():
            names = verdict_names(asked[members[0]][0].form)
            groups = [[one.question for one in asked[k]] for k in members]
            for k, rows in zip(members, judge.probabilities(groups, names), strict=True):
                made[k] = [
                    self._expected([row], one) for row, one in zip(rows, asked[k], strict=True)
                ]
        return [one for k in range(len(asked)) for one in made[k]]

    def _expected(self, rows: Sequence[Weights], asked: JudgeQuestion) -> list[float] | Unanswered:
        """Return the mean of the expected scores of some judgements of a question.

        Args:
            rows: Probabilities of the verdicts of each judgement.
            asked: The question.
        """
        answered = [row for row in rows if not isinstance(row, Unanswered)]
        read = [row for row in answered if row is not None]
        missing = self._counted(rows, len(answered), len(read))
        if missing:
            return missing
        self.counts["partial"] += sum(0.0 in row for row in read)
        scores = [expected(row, possible(asked.form), asked) for row in read]
        return [math.fsum(column) / len(scores) for column in zip(*scores)]

    def _counted(self, rows: Sequence[object], answered: int, read: int) -> Unanswered | None:
        """Count the judgements of a question, and return the first that is not answered.

        Args:
            rows: The judgements.
            answered: Number of them that were answered.
            read: Number of them that have a verdict.
        """
        self.counts["judgements"] += len(rows)
        self.counts["unanswered"] += len(rows) - answered
        self.counts["unparsed"] += answered - read
        return next((row for row in rows if isinstance(row, Unanswered)), None)


def repeated(
    asked: Sequence[JudgeQuestion], config: JudgeConfig
) -> tuple[list[JudgeQuestion], list[int]]:
    """Return each question as often as it is judged, and the seeds of the judgements."""
    questions = [one for one in asked for _ in range(config.samples)]
    seeds = [derive_seed(one.seed, "judge", k) for one in asked for k in range(config.samples)]
    return questions, seeds


def comparisons(
    rollouts: Sequence[Rollout], members: Sequence[int], config: JudgeConfig
) -> Iterator[JudgeQuestion]:
    """Yield the questions about the responses ``members`` to one prompt.

    Args:
        rollouts: All responses.
        members: Indices of the responses to the prompt.
        config: Settings of the judge.

    Raises:
        ValueError: There is nothing to compare with, or no rubric.
    """
    prompt = rollouts[members[0]].prompt
    for group in shown_together(prompt, members, config):
        rubric = rubric_of(prompt, config) if config.form == "rubric" else ()
        seeds = [rollouts[m].seed for m in group if m is not None]
        request, begun = request_of(prompt)
        texts = [str(prompt.reference) if m is None else begun + rollouts[m].text for m in group]
        is_compared = config.form in COMPARED
        # As the other response, the reference must not be named the reference.
        reference = "" if prompt.reference is None or None in group else str(prompt.reference)
        question = ask(Question(request, texts, reference, rubric), config)
        form = VerdictForm(
            config.form,
            config.verdict,
            LETTERS[: len(group) + config.ties] if is_compared else "",
            *config.scale,
            weights=[weight for _, weight in rubric],
            ties=config.ties,
            pattern=config.pattern,
        )
        yield JudgeQuestion(group, question, form, derive_seed(*seeds, config.name))


def request_of(prompt: Prompt) -> tuple[Raw, str]:
    """Return the request that responses answer, and their text that ``prompt`` ends with."""
    request = list(prompt.request)
    return (request[:-1] if prompt.begun else request) or prompt.text, prompt.begun


def shown_together(
    prompt: Prompt, members: Sequence[int], config: JudgeConfig
) -> list[tuple[int | None, ...]]:
    """Return the responses of each question, in order. None stands for the reference.

    Args:
        prompt: Prompt of the responses.
        members: Indices of its responses.
        config: Settings of the judge.

    Raises:
        ValueError: There is nothing to compare with.
    """
    if config.form not in COMPARED:
        return [(m,) for m in members]
    groups: list[tuple[int | None, ...]]
    if config.against == "reference":
        if prompt.reference is None:
            raise ValueError("the row has no reference to compare with; set against: group")
        groups = [(m, None) for m in members]
    elif len(members) < 2:
        raise ValueError("one response has no other to be compared with; raise the group size")
    elif config.form == "pair":
        groups = list(itertools.combinations(members, 2))
    else:
        groups = [tuple(members)]
    if not config.both_orders:
        return groups
    return [order for group in groups for order in (group, group[::-1])]


def rubric_of(prompt: Prompt, config: JudgeConfig) -> list[tuple[str, float]]:
    """Return the criteria of a row, or of the judge. Raises ``ValueError`` for none."""
    given = prompt.columns.get("rubric")
    if given is None:
        given = [criterion.model_dump() for criterion in config.rubric]
    return rubric_entries(given)


def voted(
    verdicts: Sequence[Verdict], comparison: JudgeQuestion, config: JudgeConfig
) -> list[float]:
    """Return the score of each response by the verdicts of one question, or nothing without any.

    Args:
        verdicts: The verdicts.
        comparison: The question.
        config: Settings of the judge, with the kind of vote.
    """
    if config.vote == "majority" and verdicts:
        counts = Counter(verdicts)
        # verdicts that are equally frequent count alike
        verdicts = [verdict for verdict in counts if counts[verdict] == max(counts.values())]
    rows = [member_scores(verdict, comparison) for verdict in verdicts]
    return [math.fsum(column) / len(rows) for column in zip(*rows)]


def member_scores(verdict: Verdict, comparison: JudgeQuestion) -> list[float]:
    """Return the score, from 0 to 1, that a verdict gives to each response of a question."""
    form = comparison.form
    if not form.choices:
        return [first_score(verdict, form)]
    found = []
    for letter in LETTERS[: len(comparison.members)]:
        # as if this response were the first one
        swap = {letter: "A", "A": letter}
        renamed: Verdict
        if isinstance(verdict, tuple):
            renamed = tuple(swap.get(str(one), str(one)) for one in verdict)
        else:
            renamed = swap.get(str(verdict), str(verdict))
        found.append(first_score(renamed, form))
    return found


def expected(
    probabilities: Sequence[float], verdicts: Sequence[Verdict], comparison: JudgeQuestion
) -> list[float]:
    """Return the expected score of each response of a question.

    Args:
        probabilities: Probability of each verdict.
        verdicts: The verdicts.
        comparison: The question.
    """
    rows = [member_scores(verdict, comparison) for verdict in verdicts]
    return [
        math.fsum(p * score for p, score in zip(probabilities, column, strict=True))
        for column in zip(*rows, strict=True)
    ]


def fail(rollout: Rollout, config: JudgeConfig, why: str) -> None:
    """Fail a response that a judge cannot score.

    Args:
        rollout: The response.
        config: Settings of the judge.
        why: The reason.
    """
    rollout.failed = f"judge {config.name}: {why}"
    rollout.reward = None
