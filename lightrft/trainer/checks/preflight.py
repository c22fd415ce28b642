"""Reject settings with which a run would learn nothing, or less than configured, before loading."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from lightrft.algorithms.requirements import Requirements
from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig
from lightrft.config.rollout import EvalConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    PolicyConfig,
    RLConfig,
    SFTConfig,
    TrainingConfig,
)
from lightrft.engines.constrained.grammars import check_constraint
from lightrft.engines.requests import unsupported_settings
from lightrft.models.loading.adapter_base import has_adapters
from lightrft.rewards.success import Success
from lightrft.utils.errors import ConfigError
from lightrft.utils.statistics.repeated_samples import powers_of_two
from lightrft.workers.engine_kinds import kind_of

log = logging.getLogger(__name__)

EVAL_METRICS = (
    *("accuracy", "pass", "failed", "length", "truncated", "reward", "media_errors"),
    *("accuracy_stderr", "accuracy_low", "accuracy_high"),
)
"""Metrics of an evaluation, under ``eval/`` or ``eval/<data source>/``."""
OF_K = re.compile(r"pass[@^](\d+)")
"""Metrics of an evaluation with several samples: pass@k and pass^k."""
COUNTS_RIGHT = re.compile(r"^-?eval/(.*/)?(accuracy(_\w+)?|pass([@^]\d+)?)$")
"""Metrics that count right responses."""
ORDER_METRICS = ("loss", "pair_accuracy", "margin", "reward_chosen", "reward_rejected")
VALIDATION_METRICS = {
    "sft": ("loss", "perplexity"),
    "distill": ("loss", "divergence", "nll"),
    "dpo": ORDER_METRICS,
    "kto": ORDER_METRICS,
}
"""Metrics of ``validation``, under ``eval/``, by verb."""
LESS_IS_BETTER = ("loss", "perplexity", "divergence", "nll")
"""Metrics that fall while a model learns."""
NAMESPACES = (
    "reward",
    "response",
    "rollout",
    "policy",
    "critic",
    "cost_critic",
    "lagrangian",
    "prm",
    "ptx",
    "staleness",
    "curriculum",
    "preference",
    "sft",
    "distill",
    "reward_model",
    "process_model",
    "time",
)
"""Prefixes of the other metrics."""
BARE = ("loss", "seconds", "tokens_per_second")
"""Metrics without a prefix."""
GENERATING = (RLConfig, DPOConfig, DistillVerbConfig)
"""Settings with ``sampling``."""
VALIDATED = (SFTConfig, DistillVerbConfig, DPOConfig)
"""Settings with ``validation``."""


LARGE_LR = 1e-3
"""Largest usual learning rate of a policy."""


def check_trained_weights(model: ModelConfig) -> None:
    """Raise ``ConfigError`` if the weights of ``model`` are quantised and it has no adapters."""
    if model.load_in_4bit and not has_adapters(model):
        raise ConfigError(
            "model.load_in_4bit = true: weights in 4 bits cannot be trained, so that embeddings "
            "and norms alone would change; train adapters, e.g. model.lora.rank=16, or leave "
            "model.load_in_4bit out"
        )


def check_learning(config: RLConfig, requirements: Requirements) -> None:
    """Raise ``ConfigError`` with every setting that prevents the policy from learning."""
    problems = [*_sampling(config, requirements), *weightless_rewards(config.reward)]
    _raise([*problems, *evaluation_problems(config)])
    if not config.optimizer.lr and not any(config.optimizer.lr_of.values()):
        log.warning("optimizer.lr = %g: the policy does not change", config.optimizer.lr)
    if config.optimizer.lr > LARGE_LR:
        log.warning(
            "optimizer.lr = %g is above %g: a policy may collapse within a few steps; lower it if "
            "rewards or response lengths fall (usual: 1e-6 to 1e-3)",
            config.optimizer.lr,
            LARGE_LR,
        )


def check_evaluation(config: PolicyConfig) -> None:
    """Raise ``ConfigError`` with every setting of evaluations and best checkpoints that cannot
    work.
    """
    _raise(evaluation_problems(config))


def evaluation_problems(config: PolicyConfig) -> list[str]:
    """Return the problems of ``eval`` and ``checkpoint.best``."""
    validates = isinstance(config, VALIDATED) and bool(config.validation.sources)
    return [
        *_engine(config),
        *_unused_engine(config),
        *_without_data(config.eval, validates),
        *_success(config),
        *_stop_at(config.eval),
        *_best(config, validates),
    ]


def _engine(config: PolicyConfig) -> Iterator[str]:
    """Yield settings ``sampling`` that the engine cannot apply."""
    settings = {"eval.sampling": config.eval.sampling}
    if isinstance(config, GENERATING):
        settings["sampling"] = config.sampling
        if config.sampling.constraint is not None:
            yield (
                "sampling.constraint: training computes log-probs of the policy without the "
                "constraint, so its updates would be of another distribution than the one that is "
                "sampled from; leave it out and reward the form, or generate with lightrft "
                "generate and train on its output"
            )
    for branch, sampling in settings.items():
        if problem := _problem(check_constraint, sampling.constraint):
            yield f"{branch}: {problem}"
        kind = kind_of(config.engine)
        if kind.shares_weights:
            continue
        unsupported, check = list(unsupported_settings(sampling)), kind.check_sampling
        if check and not unsupported and (problem := _problem(check, sampling, branch)):
            yield problem
        for field in unsupported:
            name = f"{branch}.{field}"
            yield (
                f"{name} = {getattr(sampling, field)}: engine.kind = {config.engine.kind} cannot "
                f"apply it; set engine.kind=native, or leave out {name}"
            )


def _problem(check: Callable[..., None], *given: object) -> str:
    """Return the message of the ``ConfigError`` that ``check`` raises. It is empty without one."""
    try:
        check(*given)
    except ConfigError as error:
        return str(error)
    return ""


def _unused_engine(config: PolicyConfig) -> Iterator[str]:
    """Yield ``engine.kind`` if it would load a second model or ask a server for nothing."""
    uses = generates(config) or config.eval.data.sources
    if not kind_of(config.engine).shares_weights and not uses:
        yield (
            f"engine.kind = {config.engine.kind} changes nothing: no step generates responses, and "
            "eval.data.sources is empty; name the eval set, or leave out engine"
        )


def generates(config: TrainingConfig) -> bool:
    """Return True if training steps generate responses."""
    if isinstance(config, DistillVerbConfig):
        return config.distill.on_policy > 0
    if isinstance(config, DPOConfig):
        return config.online.group_size > 0
    return isinstance(config, RLConfig)


def check_best(best: str | None, values: Mapping[str, float]) -> None:
    """Raise ``ConfigError`` if ``checkpoint.best`` names a metric that is not in ``values``."""
    # A leading minus says that less is better.
    name = (best or "").lstrip("-")
    # Metrics of an evaluation come later than the first step. ``_best`` has checked their names.
    if not name or name in values or name.startswith("eval/"):
        return
    near = difflib.get_close_matches(name, values, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it reports {', '.join(sorted(values))}"
    raise ConfigError(f"checkpoint.best = {best!r}: the first step reports no such metric; {hint}")


def check_enough(setting: str, wanted: int, found: int, what: str) -> None:
    """Raise ``ConfigError`` if a step takes more distinct items than the data has.

    Args:
        setting: name of the setting that gives the number per step.
        wanted: value of that setting.
        found: number of items in the data.
        what: name of the items, for the message.
    """
    if found < wanted:
        raise ConfigError(
            f"{setting} = {wanted}, and the data has {found} {what}: a step would take some of "
            f"them twice; lower {setting} to {found} or less, or add data"
        )


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _sampling(config: RLConfig, requirements: Requirements) -> Iterator[str]:
    """Yield problems of sampling that generates the same response to a prompt every time."""
    why = greedy_setting(config.sampling)
    if not why:
        return
    if requirements.groups:
        name = config.algorithm.advantage.name
        yield (
            f"{why}: all responses of a group are the same, and advantage {name!r} compares "
            "them, so nothing would be learned; sample, e.g. with sampling.temperature=1"
        )
    elif config.rollout.group_size > 1:
        log.warning(
            "%s: the %d responses to a prompt are all the same", why, config.rollout.group_size
        )


def greedy_setting(sampling: SamplingConfig) -> str:
    """Return the setting that makes sampling greedy, as ``name = value``, or "" if none does."""
    # Each leaves only the most probable token.
    for name, value in (("temperature", 0), ("top_k", 1), ("min_p", 1)):
        # The filters act on the first token too, which has its own temperature.
        is_varied = name == "temperature" and sampling.first_token_temperature is not None
        if getattr(sampling, name) == value and not is_varied:
            return f"sampling.{name} = {value}"
    return ""


def check_whole_rewards(reward: RewardConfig, verb: str) -> None:
    """Raise ``ConfigError`` for rewards of steps in a verb that compares whole responses.

    Raise it too for an outcome term in a verb that evaluates nothing.
    """
    if reward.success and verb in ("generate", "label-steps"):
        raise ConfigError(
            f"reward.success = {list(reward.success)} changes nothing: {verb} measures no "
            "accuracy; leave it out"
        )
    for i, model in enumerate(reward.models):
        if model.aggregate == "tokens":
            raise ConfigError(
                f"reward.models.{i}.aggregate = 'tokens' gives rewards to tokens, and {verb} "
                f"scores whole responses; set reward.models.{i}.aggregate=min"
            )


def weightless_rewards(reward: RewardConfig) -> Iterator[str]:
    """Yield the lists of reward terms whose weighted sum is always 0."""
    if any(model.weight for model in (*reward.models, *reward.judges)):
        return
    lists = {"reward.terms": reward.terms}
    for source, terms in reward.per_source.items():
        lists[f"reward.per_source.{source}"] = terms
    for name, terms in lists.items():
        weights = {term.weight for term in terms}
        if weights == {0}:
            yield f"{name}: every weight is 0, so every reward is; give one of them a weight"


def _without_data(settings: EvalConfig, validates: bool) -> Iterator[str]:
    """Yield settings that ask for an evaluation while no eval set is configured.

    ``validates`` is True if held-out examples are measured with each evaluation.
    """
    if settings.data.sources:
        return
    unread = ("stop_at", "limit", "samples")
    for name in unread if validates else ("every", *unread):
        given = getattr(settings, name)
        if given != EvalConfig.model_fields[name].default:
            yield (
                f"eval.{name} = {given} changes nothing: eval.data.sources is empty; name "
                "the eval set, e.g. eval.data.sources=[test.jsonl]"
            )


def _success(config: PolicyConfig) -> Iterator[str]:
    """Yield problems of the rule for right responses, which evaluations count."""
    costs = config.algorithm.lagrangian.names if isinstance(config, RLConfig) else frozenset()
    success = Success(config.reward, config.eval.threshold, costs)
    if not config.eval.data.sources:
        if config.reward.success:
            yield (
                f"reward.success = {list(config.reward.success)} changes nothing: it says which "
                "responses to the eval set are right, and eval.data.sources is empty"
            )
        return
    problems = list(success.problems())
    yield from problems
    if problems or any(success.judges(source) for source in success.sources()):
        return
    asks = {"eval.stop_at": config.eval.stop_at, "checkpoint.best": config.checkpoint.best}
    for setting, value in asks.items():
        if value is not None and (setting == "eval.stop_at" or COUNTS_RIGHT.search(str(value))):
            yield (
                f"{setting} = {value!r} needs a term of the reward that says if a response is "
                "right, and none does; name one in reward.success, or take eval/reward"
            )


def _stop_at(settings: EvalConfig) -> Iterator[str]:
    if settings.stop_at is not None and settings.data.sources and not settings.every:
        yield (
            f"eval.stop_at = {settings.stop_at} needs eval.every, which is 0: without it, "
            "accuracy is only measured before the first step and after the last; set "
            "eval.every, e.g. to 10"
        )


def _best(config: PolicyConfig, validates: bool) -> Iterator[str]:
    """Yield a problem if no step reports ``checkpoint.best``.

    ``validates`` is True if held-out examples are measured with each evaluation.
    """
    best, settings = config.checkpoint.best, config.eval
    name = (best or "").lstrip("-")
    if not name:
        return
    head, _, rest = name.partition("/")
    leaf = name.rpartition("/")[2]
    measured = VALIDATION_METRICS[config.verb] if isinstance(config, VALIDATED) else ()
    # Each data source has a loss of its own in lightrft sft.
    by_source = isinstance(config, SFTConfig) and leaf == "loss"
    problem = ""
    if leaf in LESS_IS_BETTER and best == name:
        problem = f"keeps the checkpoint where it is highest, and less is better; take -{name}"
    elif head != "eval":
        # Most metrics are known only after a step, which ``check_best`` then looks at.
        known = head in NAMESPACES if rest else head in BARE
        if not known:
            problem = "is not a metric; take e.g. eval/accuracy, -eval/length or reward/mean"
    elif rest in measured or by_source:
        if not validates:
            problem = "is never measured: it needs validation.sources"
    elif not settings.data.sources:
        problem = "is never measured: eval.data.sources is empty; name the eval set"
    elif of_k := OF_K.fullmatch(leaf):
        reported = powers_of_two(settings.samples)[1:]
        if int(of_k[1]) not in reported:
            ks = ", ".join(map(str, reported)) or "none"
            problem = f"is not measured with eval.samples = {settings.samples}; k can be: {ks}"
    elif leaf not in EVAL_METRICS:
        near = difflib.get_close_matches(leaf, EVAL_METRICS, n=1, cutoff=0.5)
        names = ", ".join(f"eval/{metric}" for metric in EVAL_METRICS)
        hint = f"did you mean eval/{near[0]}?" if near else f"an evaluation reports {names}"
        problem = f"is not a metric; {hint}"
    elif leaf == "pass" and settings.samples == 1:
        problem = "is only measured with eval.samples above 1; take eval/accuracy"
    if not problem and head == "eval" and not settings.every:
        problem = (
            "needs eval.every, which is 0: only the last checkpoint would have it; set "
            "eval.every, e.g. to 10"
        )
    if problem:
        yield f"checkpoint.best = {best!r} {problem}"
