"""Plot gold reward against learned reward over the distance to the start model, as Gao et al. (arXiv 2210.10760).

    python benchmarks/overoptimization.py world [--pairs 400] [--steps 150] [--seeds 0 1 2] [--dir runs/overoptimization]
    python benchmarks/overoptimization.py plot RUN --gold exact_match --proxy reward_model --out curve.svg

``world`` makes all that the curve needs: a policy of random texts, a reward model of noisy pairs of
them, best-of-n by this reward model, and PPO with a critic and a KL term on its scores. The gold
utility of a text is known: ``lightrft.datasets.synthetic.utility`` with a negative curvature, which
pairs of random texts hardly show. All of it is made again for each seed. ``plot`` takes any run of
``lightrft rl`` with both terms and a KL term.

The distance is ``d = sqrt(KL)``, in nats of a whole response. Best-of-n has ``KL = log n - (n - 1)
/ n``, and PPO ``policy/kl`` times ``response/length``, the median over neighboring steps. Dashed lines are fits to the
gold reward: ``d (alpha - beta d)`` for best-of-n, and ``d (alpha - beta log d)`` for RL.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrft.datasets.synthetic.utility import PROMPT, utility

HERE = Path(__file__).resolve()
LENGTH = 8
CURVATURE = 0.15
MOST = 1024
"""Largest n of best-of-n."""
SAMPLES = 16384
"""Texts that best-of-n takes its subsets from."""
SPAN = 10
"""Steps before and after a step over which the median of its KL is taken."""
Points = list[tuple[float, float]]
Shape = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One method: gold and learned reward over the distance, from 0 at the start.

    Attributes:
        name: Name of the method.
        gold: Distances and gold rewards.
        proxy: Distances and learned rewards.
        bend: The second term of the fit, ``d^2`` or ``d log d``.
    """

    name: str
    gold: Points
    proxy: Points
    bend: Shape


def gold(rollout: Any) -> float:
    """Return the utility of a response. It is a reward of ``lightrft rl``."""
    return utility(rollout.text, CURVATURE)


def quadratic(d: float) -> float:
    return d * d


def logarithmic(d: float) -> float:
    return d * math.log(d) if d > 0 else 0.0


def fit(points: Iterable[tuple[float, float]], bend: Shape) -> tuple[float, float]:
    """Return ``alpha`` and ``beta`` of ``alpha d - beta bend(d)`` by least squares."""
    rows = [(d, -bend(d), y) for d, y in points if d > 0]
    aa, ab, bb = (math.fsum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (math.fsum(r[i] * r[2] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if not determinant:
        return (ay / aa if aa else 0.0), 0.0
    return (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant


# ---------------------------------------------------------------- curves


def of_run(folder: Path, gold_term: str, proxy_term: str, scale: tuple[float, float]) -> Curve:
    """Return the curve of a run of ``lightrft rl``.

    Args:
        folder: Folder of the run.
        gold_term: Name of the gold reward among the terms.
        proxy_term: Name of the learned reward among the terms.
        scale: Standard deviations of both over responses of the start model.
    """
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    terms = [f"reward/{gold_term}", f"reward/{proxy_term}"]
    needed = ["policy/kl", "response/length", *terms]
    steps = [row for row in rows if all(row.get(name) is not None for name in needed)]
    if not steps:
        raise SystemExit(f"{folder}: no step has {', '.join(needed)}; a KL term is needed")
    divergences = [row["policy/kl"] * row["response/length"] for row in steps]
    distances = []
    for i in range(len(steps)):
        # the estimate of one step has a heavy tail
        near = divergences[max(0, i - SPAN) : i + SPAN + 1]
        distances.append(math.sqrt(max(statistics.median(near), 0.0)))
    found: list[Points] = []
    for name, deviation in zip(terms, scale, strict=True):
        start = steps[0][name]
        values = [(row[name] - start) / deviation for row in steps]
        found.append(sorted(zip(distances, values, strict=True)))
    return Curve("PPO", *found, logarithmic)


def best_of_n(scored: Sequence[tuple[float, float]]) -> Curve:
    """Return the curve of best-of-n by the learned reward.

    The expected gold reward of the best of n is the mean over all subsets of n of ``scored``
    (Nakano et al., arXiv 2112.09332, appendix I).

    Args:
        scored: Learned and gold reward of responses of the start model, standardised.
    """
    ranked = sorted(scored)
    total = len(ranked)
    curves: tuple[Points, Points] = ([], [])
    n = 1
    while n <= MOST:
        distance = math.sqrt(math.log(n) - (n - 1) / n)
        # probability that the response of rank i is the best of n distinct ones
        chance = n / total
        sums = [0.0, 0.0]
        for i in range(total - 1, n - 2, -1):
            for k in (0, 1):
                sums[k] += chance * ranked[i][k]
            chance *= (i - n + 1) / i if i else 0.0
        curves[1].append((distance, sums[0]))
        curves[0].append((distance, sums[1]))
        n *= 2
    return Curve("best-of-n", *curves, quadratic)


# ---------------------------------------------------------------- the world


def run(verb: str, tree: dict[str, Any]) -> Path:
    """Run a verb unless it is finished, and return its folder."""
    from lightrft.api.start import import_function
    from lightrft.config.base import build
    from lightrft.trainer.run_summary import finished_summary
    from lightrft.verbs import VERBS

    folder = Path(tree["run"]["dir"]) / tree["run"]["name"]
    if finished_summary(folder) is None:
        row = VERBS[verb]
        import_function(row.function, 1)(build(row.settings_class(), tree))
    return folder


def rows_of(kind: str, **options: Any) -> dict[str, Any]:
    path = f"lightrft.datasets.synthetic.utility:{kind}"
    return {"sources": [{"path": path, "options": {"length": LENGTH, **options}}]}


def world(args: argparse.Namespace, seed: int) -> list[Curve]:
    """Train policy, reward model and PPO, and return both curves."""
    base = args.dir.resolve() / f"seed_{seed}"
    start = make_model(base / "start", seed)

    def tree(name: str, model: Path, **more: Any) -> dict[str, Any]:
        return {
            "run": {"dir": str(base), "name": name, "seed": seed, "threads": 1},
            "model": {"path": str(model), "dtype": "float32"},
            "log": {"tensorboard": False, "rollouts_every": 0}
            if name == "ppo"
            else {"tensorboard": False},
            "checkpoint": {"every": 1000, "keep": 1},
            **more,
        }

    learning = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 10}
    texts = rows_of("texts", count=12800, seed=seed)
    sft = run("sft", tree("sft", start, data=texts, batch_size=64, optimizer=learning)) / "model"
    pairs = rows_of("pairs", count=args.pairs, seed=seed, curvature=CURVATURE)
    judged = tree("rm", sft, data=pairs, batch_size=64, train={"epochs": 4}, optimizer={"lr": 3e-3})
    reward = run("rm", {**judged, "reward_model": {"pooling": "mean"}}) / "model"
    sampling = {"max_new_tokens": LENGTH + 1, "min_new_tokens": LENGTH}
    ppo = tree(
        "ppo",
        sft,
        data=rows_of("texts", count=4096, seed=seed),
        sampling=sampling,
        rollout={"prompts_per_step": 64, "group_size": 4},
        reward={
            "terms": [{"function": f"{HERE}:gold", "weight": 0.0, "name": "gold"}],
            "models": [{"path": str(reward), "name": "proxy"}],
        },
        algorithm={"preset": "ppo", "kl": {"coef": args.kl}},
        critic={"optimizer": {"lr": 1e-3}},
        train={"steps": args.steps},
        optimizer={"lr": args.lr},
    )
    done = run("rl", ppo)
    scored = score_texts(reward, SAMPLES, seed)
    proxies, golds = zip(*scored, strict=True)
    means = statistics.fmean(proxies), statistics.fmean(golds)
    deviations = statistics.pstdev(proxies), statistics.pstdev(golds)
    standard = [
        ((proxy - means[0]) / deviations[0], (value - means[1]) / deviations[1])
        for proxy, value in scored
    ]
    return [best_of_n(standard), of_run(done, "gold", "proxy", (deviations[1], deviations[0]))]


def make_model(folder: Path, seed: int) -> Path:
    """Write a tiny model with random weights, unless it is there."""
    from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

    if not (folder / "config.json").is_file():
        tokenizer = tiny_tokenizer()
        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        tiny_model("llama", seed=seed, vocab_size=len(tokenizer), **sizes).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def score_texts(path: Path, count: int, seed: int) -> list[tuple[float, float]]:
    """Return learned and gold reward of random texts, which the start model has learned."""
    import torch

    from lightrft.config.model import ModelConfig
    from lightrft.datasets.synthetic.utility import texts
    from lightrft.models.loading.from_pretrained import load_tokenizer
    from lightrft.models.reward.reward_model import RewardModel
    from lightrft.types import Batch, Segments

    model = RewardModel.open(path).eval()
    tokenizer = load_tokenizer(ModelConfig(path=str(path)))
    said = [row["response"] for row in texts(count, seed + 1, LENGTH)]
    prompt = tokenizer(PROMPT, add_special_tokens=False).input_ids
    found: list[tuple[float, float]] = []
    for first in range(0, count, 1024):
        part = said[first : first + 1024]
        ids = tokenizer(part, add_special_tokens=False).input_ids
        ended = [[*row, tokenizer.eos_token_id] for row in ids]
        batch = Batch(
            Segments.of([prompt]), Segments.of(ended), torch.zeros(len(part), dtype=torch.long)
        )
        with torch.no_grad():
            scores = model.score(batch)[model.reward_name].scores.tolist()
        golds = [utility(text, CURVATURE) for text in part]
        found += zip(scores, golds, strict=True)
    return found


# ---------------------------------------------------------------- the plot

STYLE = """\
text{font:12px system-ui,sans-serif;fill:#33312d}.m{fill:#605c55}.x{stroke:#e3e0d8}rect{fill:#fff}path{fill:none;stroke-width:1.5}
.gold{stroke:#b7791f}.proxy{stroke:#1f5fd0}.fit{stroke:#605c55;stroke-dasharray:5 4;stroke-width:1.5}
@media(prefers-color-scheme:dark){text{fill:#ecebe7}.m{fill:#a8a59e}.x{stroke:#2d3035}rect{fill:#191b1e}.gold{stroke:#e3b341}
.proxy{stroke:#82b1ff}.fit{stroke:#a8a59e}}"""
WIDTH, HEIGHT, LEFT, TOP = 400, 260, 46, 44


def plot(methods: Sequence[Sequence[Curve]]) -> str:
    """Return an SVG image with a panel for each method. Each seed has a line."""
    width = (WIDTH + LEFT) * len(methods) + 16
    parts = [f'<rect width="{width}" height="{HEIGHT + TOP + 40}"/>']
    for i, curves in enumerate(methods):
        parts.append(f'<g transform="translate({i * (WIDTH + LEFT) + LEFT},{TOP})">')
        parts += [*panel(curves), "</g>"]
    label = "Gold and learned reward over the square root of the KL divergence"
    size = f'viewBox="0 0 {width} {HEIGHT + TOP + 40}" width="{width}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def panel(curves: Sequence[Curve]) -> list[str]:
    """Return the elements of one method. The fit is over all seeds."""
    first = curves[0]
    pooled = [point for curve in curves for point in curve.gold]
    alpha, beta = fit(pooled, first.bend)
    longest = max(d for d, _ in pooled) or 1.0
    grid = [longest * k / 60 for k in range(61)]
    fitted = [(d, alpha * d - beta * first.bend(d)) for d in grid]
    lines = [("proxy", curve.proxy) for curve in curves]
    lines += [*(("gold", curve.gold) for curve in curves), ("fit", fitted)]
    values = [y for _, line in lines for _, y in line] + [0.0]
    low, high = min(values), max(values)
    high += (high == low) * 1.0

    def at(x: float, y: float) -> str:
        return f"{x / longest * WIDTH:.1f},{HEIGHT - (y - low) / (high - low) * HEIGHT:.1f}"

    seeds = f", {len(curves)} seeds" if len(curves) > 1 else ""
    parts = [f'<text x="0" y="-26">{first.name}{seeds}</text>']
    shape = "d" if first.bend is quadratic else "log d"
    note = f"gold (yellow), learned (blue), fit d ({alpha:.2f} - {beta:.2f} {shape})"
    parts.append(f'<text class="m" x="0" y="-10">{note}</text>')
    for k in range(5):
        x, y = longest * k / 4, low + (high - low) * k / 4
        across, up = at(x, low).split(",")[0], at(0, y).split(",")[1]
        parts.append(f'<line class="x" x1="0" x2="{WIDTH}" y1="{up}" y2="{up}"/>')
        parts.append(f'<text class="m" x="-6" y="{up}" text-anchor="end">{y:.1f}</text>')
        bottom = f'x="{across}" y="{HEIGHT + 18}" text-anchor="middle"'
        parts.append(f'<text class="m" {bottom}>{x:.1f}</text>')
    for name, line in lines:
        points = " L".join(at(x, y) for x, y in line)
        parts.append(f'<path class="{name}" d="M{points}"/>')
    middle = f'x="{WIDTH / 2}" y="{HEIGHT + 34}" text-anchor="middle"'
    parts.append(f'<text class="m" {middle}>d = sqrt(KL), in nats</text>')
    return parts


def summary(methods: Sequence[Sequence[Curve]]) -> list[str]:
    """Return a table with the fit and the best point of each method, one line for each seed."""
    lines = [
        "| method | alpha | beta | most gold | at d | gold at the end | learned at the end | d |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for curve in (curve for curves in methods for curve in curves):
        alpha, beta = fit(curve.gold, curve.bend)
        at, most = max(curve.gold, key=lambda point: point[1])
        (last, end), (_, learned) = curve.gold[-1], curve.proxy[-1]
        lines.append(
            f"| {curve.name} | {alpha:.2f} | {beta:.2f} | {most:.2f} | {at:.2f} | {end:.2f} | "
            f"{learned:.2f} | {last:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    made = verbs.add_parser("world")
    made.add_argument("--pairs", type=int, default=400)
    made.add_argument("--steps", type=int, default=150)
    made.add_argument("--kl", type=float, default=0.01)
    made.add_argument("--lr", type=float, default=1e-3)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--dir", type=Path, default=Path("runs/overoptimization"))
    shown = verbs.add_parser("plot")
    shown.add_argument("run", type=Path)
    shown.add_argument("--gold", required=True)
    shown.add_argument("--proxy", required=True)
    for one in (made, shown):
        one.add_argument(
            "--out", type=Path, default=HERE.parent / "results/overoptimization-x86_64-2cores.svg"
        )
    args = parser.parse_args()
    if args.verb == "world":
        methods = list(zip(*(world(args, seed) for seed in args.seeds), strict=True))
    else:
        methods = [(of_run(args.run, args.gold, args.proxy, (1.0, 1.0)),)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(plot(methods), encoding="utf-8")
    print("\n".join([*summary(methods), f"image: {args.out}"]))


if __name__ == "__main__":
    main()
