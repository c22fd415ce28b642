"""Train reward models from scratch, and policies by GRPO on their scores, and compare the two."""

from __future__ import annotations

from pathlib import Path

from lightrft.config.demo import DemoConfig, LearnedRewardConfig
from lightrft.config.reward import ScoringModelConfig
from lightrft.config.run import RunConfig
from lightrft.config.verbs import RLConfig
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary, read_rows
from lightrft.rewards.success import Success
from lightrft.trainer.demo import finished, make_start, phase_of, sum_up
from lightrft.trainer.reward_model.run import run_reward_model
from lightrft.trainer.rl import run_rl
from lightrft.trainer.run_summary import samples
from lightrft.trainer.sft import run_sft
from lightrft.utils.atomic_files import disk_errors, write_json
from lightrft.utils.errors import ConfigError

PROXY = "reward_model"
"""Name of the learned reward in metrics."""


def run_reward_demo(config: DemoConfig, observer: Observer | None = None) -> Summary:
    """Run the remaining phases of ``learned_rewards``, write ``summary.json`` and return it.

    Each part has a folder with the files that a report reads. An interrupted demo resumes where it
    stopped, and finished phases are skipped.
    """
    check_gold(config)
    base = config.run.folder
    parts: dict[str, Summary] = {}
    with disk_errors(base, "free some space, or set run.overwrite=true to start over"):
        for name, part in config.learned_rewards.items():
            summary = run_part(part, part_run(config.run, name), observer)
            if not summary.get("finished"):
                return {**summary, "verb": "demo"}
            parts[name] = summary
        whole = {
            "verb": "demo",
            "finished": True,
            **{
                key: sum(summary[key] for summary in parts.values())
                for key in ("steps", "steps_trained", "seconds")
            },
            "reward_models": {name: summary["reward_model"] for name, summary in parts.items()},
            "policies": {
                name: {key: summary[key] for key in POLICY if key in summary}
                for name, summary in parts.items()
            },
            "next": [command for summary in parts.values() for command in summary["next"][:1]],
        }
        write_json(base / "summary.json", whole)
        return whole


def check_gold(config: DemoConfig) -> None:
    """Raise ``ConfigError`` unless one term of weight 0 measures each policy."""
    for name, part in config.learned_rewards.items():
        terms = part.rl.reward.terms
        if len(terms) != 1 or terms[0].weight != 0:
            given = [f"{term.function} of weight {term.weight:g}" for term in terms]
            raise ConfigError(
                f"learned_rewards.{name}.rl.reward.terms ({', '.join(given) or 'none'}) must be "
                "one term of weight 0, which measures the policy, e.g. [{function: exact_match, "
                "weight: 0}]"
            )


POLICY = ("heldout_before", "heldout_after", "proxy_before", "proxy_after", "seconds_rl")
"""Numbers of a policy in the summary."""
REWARD_MODEL = ("heldout_before", "heldout_after", "pair_accuracy", "steps", "seconds")
"""Numbers of a reward model in the summary."""


def part_run(demo: RunConfig, name: str) -> RunConfig:
    """Return the run settings of the part ``name`` of a demo."""
    return demo.model_copy(update={"dir": str(Path(demo.dir) / demo.name), "name": name})


def run_part(
    config: LearnedRewardConfig, run: RunConfig, observer: Observer | None = None
) -> Summary:
    """Train a reward model and a policy on its scores, and return their summary.

    Args:
        config: settings of the phases.
        run: settings of the part's run.
        observer: shows the progress.
    """
    base = run.folder
    start = base / "start"
    if run.overwrite or not (start / "config.json").exists():
        make_start(config, start, run.seed)
    rm = phase_of(run, config.rm, base, "rm", start)
    scored = finished(base / "rm", run) or run_reward_model(rm, observer)
    if not scored.get("finished"):
        return scored
    sft = phase_of(run, config.sft, base, "sft", start)
    warm = finished(base / "sft", run) or run_sft(sft, observer)
    if not warm.get("finished"):
        return warm
    model = base / "sft" / "model"
    rl = phase_of(run, on_scores(config.rl, base / "rm" / "model"), base, "rl", model)
    result = finished(base / "rl", run) or run_rl(rl, observer)
    if not result.get("finished"):
        return result
    (term,) = rl.reward.terms
    gold = term.name or term.function
    before, after = samples(base / "rl", Success(rl.reward, rl.eval.threshold))
    write_json(base / "rl" / "samples.json", {"before": before, "after": after})
    found = {
        "reward_model": {key: scored[key] for key in REWARD_MODEL if key in scored},
        **before_and_after(base / "rl" / "metrics.jsonl", gold, "heldout"),
        **before_and_after(base / "rl" / "metrics.jsonl", PROXY, "proxy"),
        "gold": gold,
    }
    return sum_up(base, {"rm": scored, "sft": warm, "rl": result}, found)


def on_scores(rl: RLConfig, model: Path) -> RLConfig:
    """Return the settings of a policy that learns from the scores of ``model``."""
    scores = ScoringModelConfig(path=str(model), name=PROXY)
    reward = rl.reward.model_copy(update={"models": (scores,)})
    return rl.model_copy(update={"reward": reward})


def before_and_after(metrics: Path, term: str, name: str) -> dict[str, float]:
    """Return the mean of a reward term at the first and at the last evaluation.

    Args:
        metrics: file of the metrics.
        term: name of the term.
        name: begin of the names of both numbers.
    """
    key = f"eval/terms/{term}"
    means = {row["step"]: row[key] for row in read_rows(metrics) if key in row}
    found = {}
    if 0 in means:
        found[f"{name}_before"] = means[0]
    if means and max(means):
        found[f"{name}_after"] = means[max(means)]
    return found
