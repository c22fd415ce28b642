"""What a setting can act on, each seen in a way that costs little: a probe gives plain data that two configs can be compared by."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pytest import MonkeyPatch

from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.token_masks import with_token_masks
from lightrft.api.start import program
from lightrft.cli.main import main
from lightrft.config.base import build, to_yaml
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import RLConfig
from lightrft.datasets import open_source
from lightrft.datasets.media import MediaReader, Workers, fetch
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.distributed import ray_cluster
from lightrft.distributed import ray_launcher as launcher
from lightrft.distributed.placement import RankPlacement, plan_placement
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.engines.http import HTTPEngine
from lightrft.engines.native import NativeEngine
from lightrft.engines.sglang import SGLangEngine
from lightrft.learner import forward_passes
from lightrft.learner.controllers import Controllers
from lightrft.learner.policy_update import Objective, with_loss_weights
from lightrft.learner.sft_step import PretrainingLoss
from lightrft.models import actor as actors
from lightrft.models.actor import Actor, TokenScores
from lightrft.models.decoding.kv_decoder import PlanDecodeSession
from lightrft.models.loading.from_pretrained import AutoConfig, load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.observability.observer import NullObserver
from lightrft.observability.trackers import read_rows
from lightrft.rewards.base import NullScorer
from lightrft.rewards.scorer import Scorer
from lightrft.rollout.evaluation import load_eval_prompts
from lightrft.rollout.prompt_stream import PromptStream
from lightrft.strategy import activation_offload, single
from lightrft.trainer.rl import run_rl
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import DataError, ResourceError, UserError
from lightrft.utils.stop_signal import StopFlag
from lightrft.workers.build_remote import RemoteRoleBuilder
from lightrft.workers.local import with_reward_models
from lightrft.workers.local_served import own_server_options
from lightrft.workers.scoring.collecting import CombiningScorer
from lightrft.workers.scoring.judge import LocalJudge, open_judges
from lightrft.workers.scoring.judge_scorer import JudgeScorer
from lightrft.workers.scoring.judge_scorer import comparisons as judge_questions
from lightrft.workers.scoring.model_scorer import ModelScorer, scoring_models
from tests import warm
from tests.advantage_helpers import with_advantages
from tests.numbers.test_explained_numbers import batch
from tests.serving_helpers import Seen, altered, judge_at, model_server, skip_waits
from tests.sglang_server import SGLangServer, sglang_server

Tree = dict[str, Any]
CLOCK = ("time/", "seconds", "tokens_per_second", "throughput", "memory")


def objective(tree: Tree, folder: Path) -> Any:
    """Three steps of advantages, loss and gradient on one batch, with what moves from step to step."""
    config = build(RLConfig, tree)
    algorithm, controls = config.algorithm, Controllers.of(config.algorithm)
    found = []
    for step in range(3):
        whole = with_loss_weights(
            with_advantages(batch(), config, controls, Requirements.of(config.algorithm)),
            config.algorithm,
            config.sampling.max_new_tokens,
        )
        whole = with_token_masks(
            whole, algorithm.token_masks, algorithm.loss, torch.Generator().manual_seed(step)
        )
        objective = Objective.of(algorithm, Requirements.of(algorithm), controls, whole, step)
        leaf = whole.logprobs.clone().requires_grad_()  # type: ignore[union-attr]
        loss, _ = objective(whole, TokenScores(leaf, (leaf * 0.3).sin() + 2))
        (gradient,) = torch.autograd.grad(loss, leaf)
        found.append((float(loss.detach()), gradient.tolist(), whole.returns.tolist()))  # type: ignore[union-attr]
        controls.update_from_batch(whole)
    return found


def prompts(tree: Tree, folder: Path) -> Any:
    """The first prompts that are drawn."""
    config = build(RLConfig, tree)
    drawn = PromptStream.of(config.data, load_tokenizer(config.model), config.run.seed).draw(8)
    return [as_plain(p) for p in drawn]


def as_plain(p: Prompt) -> Any:
    """What a prompt is made of, with the question to a judge if it is one."""
    row = (p.id, p.token_ids, p.text, p.label, p.reference, p.data_source)
    return (*row, p.columns.get("judgement"))


def questions(tree: Tree, folder: Path) -> Any:
    """The held-out prompts."""
    config = build(RLConfig, tree)
    found = load_eval_prompts(
        config.eval.data, load_tokenizer(config.model), config.run.seed, config.eval.limit
    )
    return [as_plain(p) for p in found]


def lessons(tree: Tree, folder: Path) -> Any:
    """The conversations that are learned beside the rollouts."""
    config = build(RLConfig, tree)
    ptx = PretrainingLoss.of(config.ptx, load_tokenizer(config.model), config.run.seed)
    if ptx is None:
        return None
    examples = [ptx.dataset[i] for i in ptx.sampler.next(12)]
    return [(e.prompt_ids, e.response_ids, e.weights, e.weight) for e in examples]


def stored(tree: Tree, folder: Path) -> Any:
    """The token ids that stay on disk for the next start, and where."""
    config = config_in(tree, folder)
    tokenizer = load_tokenizer(config.model)
    PromptStream.of(config.data, tokenizer, config.run.seed)
    load_eval_prompts(config.eval.data, tokenizer, config.run.seed, config.eval.limit)
    PretrainingLoss.of(config.ptx, tokenizer, config.run.seed)
    return sorted(
        (str(p.parent.relative_to(folder)), p.stat().st_size) for p in folder.rglob("*.arrow")
    )


LATE = """
import sys, time
from lightrft.utils.errors import RankError
from lightrft.distributed.process_group import init_process_group

with init_process_group(float(sys.argv[1])) as ranks:
    time.sleep(3 * ranks.rank)
    try:
        found = ranks.gather(ranks.rank)
    except RankError:
        found = "too late"
    if ranks.rank == 0:
        print(found, flush=True)
"""


def side_by_side(tree: Tree, folder: Path) -> Any:
    """What the first rank hears of the others, the second of which is three seconds late."""
    config = build(RLConfig, tree)
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "late.py"
    script.write_text(LATE)
    processes = config.launch.processes
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = warm.run(
        [*torchrun, script, str(config.strategy.timeout_minutes)],
        env=os.environ,
        seats=processes,
        timeout=600,
    )
    return done.stdout.splitlines()[:1]


class NoRoom:
    """What the launcher uses of the package ray, on a cluster that never has room; it keeps what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.util = self

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.asked.append(options)

    def placement_group(self, bundles: Any, strategy: str) -> Any:
        self.asked.append((bundles, strategy))
        return self

    def wait(self, seconds: float) -> bool:
        self.asked.append("waited")
        return False

    def remove_placement_group(self, group: Any) -> None:
        self.asked.append("gave up")

    def shutdown(self) -> None:
        self.asked.append("left")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 64.0, "GPU": 8.0}

    def available_resources(self) -> dict[str, float]:
        return {}

    def nodes(self) -> list[dict[str, Any]]:
        return []


def on_ray(tree: Tree, folder: Path) -> Any:
    """What is asked of Ray, what each rank is told, and what is said of two that are lost. Each look at the clock takes a second."""
    config, there = config_in(tree, folder), NoRoom()
    called = type(program("lightrft.trainer.rl:run_rl", config)).__name__
    if config.launch.kind == "local":
        return called
    driver = launcher.RayLauncher("a:b", config, NullObserver(), StopFlag())
    driver.places = tuple(RankPlacement("n", "10.0.0.1", i) for i in range(config.launch.processes))
    said = [
        refusal(lambda *_: driver.after(launcher.RankLost("rank 1")), {}, folder)
        for driver.losses in (1, 2)
    ]
    plan = plan_placement(config.launch, accelerated=True)
    with MonkeyPatch.context() as patch:
        patch.setattr(ray_cluster, "package", lambda: there)
        patch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=itertools.count().__next__))
        patch.setenv("RAY_AUTH_TOKEN", "0")
        with (
            contextlib.suppress(ResourceError),
            ray_cluster.cluster(config.launch.ray),
            ray_cluster.create_placement_group(plan, config.launch, StopFlag()),
        ):
            there.asked.append("never")
    told = [order.environment for order in driver.orders(1, plan)]
    return (
        called,
        there.asked,
        [slot.devices for slot in plan.ranks],
        dict(plan.workers),
        told,
        said,
        handed(config),
    )


def handed(config: RLConfig) -> Any:
    """What engines in workers are given, and what is borne of them."""
    strategy = SimpleNamespace(device=torch.device("cpu"))
    engines = RemoteRoleBuilder(config, SINGLE_PROCESS, lambda kind, make: (), "here").engine(
        SimpleNamespace(model=torch.nn.Linear(1, 1)), strategy
    )
    return str(engines.delivery.settings), str(engines.group.limits)


def decoded(tree: Tree, folder: Path) -> Any:
    """The tokens and media of rows twice over, and how they were come by: threads, decodings, downloads and the files that they left."""
    config = config_in(tree, folder)
    tokenizer = load_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer)
    seen: Counter[str] = Counter()

    def download(url: str, file: Any, bounds: Any) -> None:
        seen[f"{url} {bounds}"] += 1
        file.write((Path(config.model.path).parent / url.rpartition("/")[2]).read_bytes())

    def loaded(reader: MediaReader, item: Any, content: Any) -> Any:
        seen["decoded"] += 1
        return made(reader, item, content)

    def started(workers: Workers) -> Any:
        seen[f"{workers.count} threads"] = 1
        return start(workers)

    made, start = MediaReader._made, Workers._started
    with MonkeyPatch.context() as patch:
        patch.setattr(fetch, "receive", download)
        patch.setattr(MediaReader, "_made", loaded)
        patch.setattr(Workers, "_started", started)
        if "ptx" in tree:
            options = {"max_tokens": config.ptx.max_tokens, "seed": 0, "processor": processor}
            lessons = SFTDataset(config.ptx.data, tokenizer, **options)
            both = [example for _ in range(2) for example in lessons.fetch([0, 1])]
            found = [(example.prompt_ids, example.prompt_media) for example in both]
        else:
            data = config.eval.data if "eval" in tree else config.data
            dataset = PromptDataset(data, tokenizer, seed=0, processor=processor)
            both = [prompt for _ in range(2) for prompt in dataset.fetch([0, 1])]
            found = [(prompt.token_ids, prompt.media) for prompt in both]
    media = [
        (ids, {name: (r.values.tolist(), r.lengths.tolist()) for name, r in one.items()})
        for ids, one in found
    ]
    # Two threads may want the same one.
    seen["decoded"] = seen["decoded"] if not any(k.endswith("threads") for k in seen) else 0
    return media, seen, sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def loaded(tree: Tree, folder: Path) -> Any:
    """A model as it is after loading."""
    config = build(RLConfig, tree).model
    with recording() as seen:
        actor = Actor.load(config)
        with torch.no_grad():
            actor.score(batch())
    adapters = [
        (n, getattr(m, "scaling", None)) for n, m in actor.named_modules() if hasattr(m, "scaling")
    ]
    trained = [n for n, p in actor.named_parameters() if p.requires_grad]
    implementation = actor.base.config._attn_implementation
    kept = (
        str(actor.base.dtype),
        actor.base.is_gradient_checkpointing,
        implementation,
        actor.layout,
    )
    return (repr(actor.model), adapters, trained, kept, seen)


def asked_of_the_hub(tree: Tree, folder: Path) -> Any:
    """What the loaders of models pass on: revisions and code matter only to models that are not a plain folder."""
    with recording() as seen:
        run_rl(config_in(tree, folder))
    return seen


def asked_of_datasets(tree: Tree, folder: Path) -> Any:
    """What is asked of the hub of data sets."""

    def asked(*names: Any, **options: Any) -> Any:
        raise DataError(f"{names} {options}")

    with MonkeyPatch.context() as patch:
        patch.setattr(open_source, "_load", asked)
        asking = prompts if tree["data"]["sources"] else lessons if "ptx" in tree else questions
        return refusal(asking, tree, folder)


def run(tree: Tree, folder: Path) -> Any:
    """A whole run: metrics, files, answers, exported weights, and how often the models were asked."""
    with recording() as seen:
        run_rl(config_in(tree, folder))
    return (left_behind(folder), seen)


def run_again(tree: Tree, folder: Path) -> Any:
    """A run in the folder of an earlier one that sampled otherwise."""
    run_rl(
        config_in(
            {
                **tree,
                "run": {**tree["run"], "resume": "auto", "overwrite": False},
                "sampling": {"max_new_tokens": 2},
            },
            folder,
        )
    )
    run_rl(config_in(tree, folder))
    return left_behind(folder)


def go_on(tree: Tree, folder: Path) -> Any:
    """A run that goes on from an earlier one by a step."""
    run_rl(config_in({**tree, "run": {**tree["run"], "resume": "auto"}}, folder))
    run_rl(config_in({**tree, "train": {**tree["train"], "steps": 2}}, folder))
    return left_behind(folder)


def command(tree: Tree, folder: Path) -> Any:
    """The command line: what is said while a run goes on, and the threads that it is given."""
    before = torch.get_num_threads()
    (folder / "config.yaml").write_text(to_yaml(config_in(tree, folder)))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main(["rl", str(folder / "config.yaml")])
        return torch.get_num_threads(), "1/1" in said.getvalue(), "best" in said.getvalue()
    finally:
        torch.set_num_threads(before)


def workers(tree: Tree, folder: Path) -> Any:
    """The processes that score, once they have all started."""
    config = config_in(tree, folder).reward
    with Scorer(config) as scorer:
        until = time.monotonic() + 300
        while len(scorer._workers) < config.workers and time.monotonic() < until:
            time.sleep(0.01)
        return len(scorer._workers)


def judged(tree: Tree, folder: Path) -> Any:
    """The scores of reward models for two responses to a prompt, and the calls that they took."""
    config = config_in(tree, folder)
    tokenizer = load_tokenizer(config.model)
    prompt = Prompt("0", [5, 6, 7])
    rollouts = [
        Rollout(prompt, ids, [True] * 2, [0.0] * 2, [0] * 2, "stop", seed=0, text=text)
        for ids, text in (([4, 5], "ab\nc"), ([8, 9], "a b\nc d\ne"))
    ]
    device = torch.device("cpu")
    scorer: Any = with_reward_models(
        NullScorer(0.0), config.reward, config.model, tokenizer, device
    )
    models = scorer.inner.models if isinstance(scorer, CombiningScorer) else scorer.models
    calls: list[str] = []
    for model in models:
        model.model.register_forward_hook(lambda *_, name=model.name: calls.append(name))
        model.model.to = lambda place, name=model.name: calls.append(f"{name} to {place}")
    for rollout in rollouts:
        scorer.submit(rollout)
    return [(one.reward, one.terms) for one in scorer.results(wait=True)], calls


@contextlib.contextmanager
def judges_at(folder: Path, terms: Sequence[Tree]) -> Generator[tuple[list[Tree], Seen]]:
    """Serve ``folder`` for ``terms`` that ask for it, and later than a short deadline."""
    deadline = min(term.get("deadline", 600.0) for term in terms)
    together = min(2, *(term.get("max_in_flight", 2) for term in terms))
    seconds = 1.5 * deadline if deadline < 60 else 0.0
    with MonkeyPatch.context() as patch, judge_at(folder, seconds, together) as (url, seen):
        skip_waits(patch)
        # a free port is known only now
        place = {"http://judge": url}
        yield [{**term, "url": place.get(term["url"], term["url"])} for term in terms], seen


def served(tree: Tree, folder: Path) -> Any:
    """The rewards by a served model, the tokens that it got, and the most requests at once."""
    (root,) = {Path(tree["model"]["path"]).parent}
    with judges_at(root / "judge", tree["reward"]["models"]) as (models, seen):
        config = config_in({**tree, "reward": {**tree["reward"], "models": models}}, folder)
        tokenizer = load_tokenizer(config.model)
        device = torch.device("cpu")
        terms = scoring_models(config.reward.models, config.model, tokenizer, device)
        scorer = ModelScorer(NullScorer(0.0), terms, device)
        for prompt in (Prompt("0", [5, 6, 7]), Prompt("1", [8, 9])):
            scorer.submit(Rollout(prompt, [4, 5], [True] * 2, [0.0] * 2, [0] * 2, "stop", seed=0))
        rewards = [one.reward for one in scorer.results(wait=True)]
        scorer.close()
    return rewards, sorted(seen.tokens), seen.most


def verdicts(tree: Tree, folder: Path) -> Any:
    """The questions to judges about three responses, the judgements and scores, and the calls that they took."""
    config = config_in(tree, folder)
    prompt = Prompt("0", [5, 6], "say", reference="c", request=[{"role": "user", "content": "say"}])
    rollouts = [
        Rollout(prompt, [4], [True], [0.0], [0], "stop", seed=k, text=text)
        for k, text in enumerate(("a", "b", "c"))
    ]
    judges = open_judges(config.reward, config.model, torch.device("cpu"))
    calls: list[str] = []
    for judge in judges:
        assert isinstance(judge, LocalJudge)
        judge.actor.base.register_forward_hook(lambda *_: calls.append("forward"))
        judge.actor.to = lambda place: calls.append(f"to {place}")  # ty: ignore[invalid-assignment]
    asked = [str(one) for j in judges for one in judge_questions(rollouts, [0, 1, 2], j.config)]
    said = [j.write(["say"], [1]) for j in judges if j.config.read == "text"]
    scorer = JudgeScorer(NullScorer(0.0), judges)
    for rollout in rollouts:
        scorer.submit(rollout)
    scores = [(one.reward, one.terms, one.failed) for one in scorer.results(wait=True)]
    return asked, said, scores, scorer.take_counts(), len(calls)


def asked_over_http(tree: Tree, folder: Path) -> Any:
    """The scores by a served judge, the keys that the server got, and the most requests at once."""
    (root,) = {Path(tree["model"]["path"]).parent}
    with judges_at(root / "policy", tree["reward"]["judges"]) as (judges, seen):
        config = config_in({**tree, "reward": {**tree["reward"], "judges": judges}}, folder)
        request = [{"role": "user", "content": "say"}]
        prompt = Prompt("0", [5, 6], "say", request=request)
        judged = open_judges(config.reward, config.model, torch.device("cpu"))
        scorer = JudgeScorer(NullScorer(0.0), judged)
        for k, text in enumerate(("a", "b")):
            scorer.submit(Rollout(prompt, [4], [True], [0.0], [0], "stop", seed=k, text=text))
        scores = [one.reward for one in scorer.results(wait=True)]
        scorer.close()
    return scores, scorer.take_counts(), sorted(seen.tokens), seen.most


def sampled_from_a_server(tree: Tree, folder: Path) -> Any:
    """The tokens of a server that breaks twice and stalls once, the repetitions, the key, and the folder of an update."""
    root = Path(tree["model"]["path"]).parent
    given, troubles = tree["engine"], []

    def edit(number: int, event: dict[str, Any]) -> dict[str, Any] | None:
        trouble = troubles.pop() if troubles else ""
        if trouble == "stalls" and given.get("timeout", 120.0) < 60:
            time.sleep(1.5 * given["timeout"])
        return None if trouble == "breaks" else event

    with contextlib.ExitStack() as servers:
        skip_waits(servers.enter_context(MonkeyPatch.context()))
        if given["kind"] == "sglang":
            url, server = servers.enter_context(sglang_server(root / "policy"))
        else:
            url, server = servers.enter_context(model_server(root / "policy"))
            url = servers.enter_context(altered(url, edit))
        given = {**given, "url": url if given["url"] == "http://engine" else given["url"]}
        config = config_in({**tree, "engine": given}, folder).engine
        tokenizer = load_tokenizer(ModelConfig(path=str(root / "policy")))
        kind = SGLangEngine if config.kind == "sglang" else HTTPEngine
        engine = kind.connect(config, tokenizer, [tokenizer.eos_token_id])
        troubles += ["stalls", "breaks", "breaks"]
        request = Request(Prompt("0", [5, 6]), 1)
        [found] = engine.generate([request], SamplingConfig(max_new_tokens=4))
        places: list[str] = []
        if isinstance(server, SGLangServer):
            weights = server.generator.engine.decoder.parameters()
            engine.load_weights(weights, 1)
            places = sorted(path.parent.parent.name for path in folder.rglob("*.safetensors"))
        header = engine.client.authorization()
        counts = engine.take_counts()
        engine.close()
    return found.token_ids, counts, header, places


def options_of_a_server(tree: Tree, folder: Path) -> list[str]:
    """What the run would start."""
    config = config_in(tree, folder)
    return own_server_options(config.model, config.engine, torch.device("cpu"))


PROBES: dict[str, Callable[[Tree, Path], Any]] = {
    f.__name__: f
    for f in (
        *(
            objective,
            prompts,
            questions,
            lessons,
            stored,
            decoded,
            loaded,
            asked_of_the_hub,
            asked_of_datasets,
        ),
        *(run, run_again, go_on, command, workers, judged, served, verdicts, asked_over_http),
        *(sampled_from_a_server, options_of_a_server),
        *(side_by_side, on_ray),
    )
}


def refusal(probe: Callable[[Tree, Path], Any], tree: Tree, folder: Path) -> Any:
    """What ``probe`` gives, or why the config was refused."""
    try:
        return probe(tree, folder)
    except UserError as error:
        return ("refused", str(error))


def config_in(tree: Tree, folder: Path) -> RLConfig:
    """``tree`` with ``{tmp}`` as ``folder``."""
    return build(RLConfig, json.loads(json.dumps(tree).replace("{tmp}", str(folder))))


def left_behind(folder: Path) -> Any:
    """Everything below ``folder`` that says what a run did, clocks left out."""
    files = sorted(
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and "events.out" not in p.name
    )
    kept = {
        "events": any(p.name.startswith("events.out") for p in folder.rglob("*")),
        "files": files,
    }
    for path in sorted(folder.rglob("metrics.jsonl")):
        kept["rows"] = [
            {k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in read_rows(path)
        ]
    for path in sorted(folder.rglob("rollouts/*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept[path.name] = [
            (row["token_ids"], row["reward"], row["text"], row.get("terms")) for row in rows
        ]
    for path in sorted(folder.rglob("model/*.safetensors")):
        kept[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return kept


@contextlib.contextmanager
def recording() -> Generator[Counter[str]]:
    """How often models were asked what, beside what is really done."""
    seen: Counter[str] = Counter()

    def spy(owner: Any, name: str, say: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def called(*values: Any, **options: Any) -> Any:
            seen[say(*values, **options)] += 1
            return real(*values, **options)

        patch.setattr(owner, name, called)

    with MonkeyPatch.context() as patch:
        spy(
            Actor,
            "forward",
            lambda self, *a, **k: (
                f"forward, gradient {torch.is_grad_enabled()}, layout {self.layout}"
            ),
        )
        spy(forward_passes, "check_layout", lambda *a, **k: "layout checked")
        spy(PlanDecodeSession, "step", lambda self, tokens: f"{len(tokens)} rows drawn at once")
        spy(PlanDecodeSession, "reserve", lambda self, *a: f"room for {a[-1]} tokens")
        spy(NativeEngine, "load_weights", lambda *a, **k: "weights given to the engine")
        spy(AutoConfig, "from_pretrained", lambda *a, **k: f"{k}")
        spy(activation_offload, "to_host", lambda tensor: "kept for the backward pass on the host")
        spy(single, "moved", lambda tensor, device: f"optimizer state to {device}")
        spy(actors, "token_logprobs", lambda *a, **k: f"logits of {k['chunk_mb']} MiB")
        yield seen
