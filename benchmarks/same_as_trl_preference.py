"""Compare losses, metrics, gradients and optimizer steps with TRL's.

    python benchmarks/same_as_trl_preference.py [--cases sigmoid kto ...] [--report]

The cases are losses of preferences and of reward models, SFT and GKD. Both sides load the same two
model folders (a tiny qwen2 as the policy, and a neighbour of it as the reference or the teacher), or
the same classifier as the reward model, and read the same rows. For each case, one batch goes through
TRL's trainer and through the learner here. Then both take five steps of the same AdamW. Everything is in float32 on one CPU.
The table has the largest differences. The exit status is 1 if one is above its limit.

``CASES`` has the settings of both sides. Where a default here differs from TRL by decision, ``note``
names the setting that gives TRL's form. Needs ``pip install trl``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROWS, STEPS = 8, 5
LEARNING_RATE = 1e-4
EPS = 1e-5
"""AdamW's epsilon. The bias of keys has a gradient of 0 but for rounding, and a smaller epsilon
would make a step of that rounding."""
TAU = 0.5
"""Temperature of DiscoPOP. The default of 0.05 multiplies the rounding of log-probs by 20."""
LIMIT = 1e-5
"""Largest difference of a loss or a metric, relative above 1, and of a gradient or a weight relative
to the largest one."""
BETA = 0.3
NOISE = 0.005
"""Standard deviation of the distance between policy and reference: log-ratios of up to about 1."""
NOISE_SEED = 30
"""Seed with which AOT differs from DPO, and the reference point of KTO is above 0, in the first batch."""
WHOLE_BATCH = 100_000
PAIR_METRICS = {
    "rewards/chosen": "preference/reward_chosen",
    "rewards/rejected": "preference/reward_rejected",
    "rewards/margins": "preference/margin",
    "rewards/accuracies": "preference/accuracy",
    "logps/chosen": "preference/logprobs_chosen",
    "logps/rejected": "preference/logprobs_rejected",
}
LOGPS = {key: name for key, name in PAIR_METRICS.items() if key.startswith("logps")}
KTO_METRICS = {
    "rewards/chosen": "preference/reward_desirable",
    "rewards/rejected": "preference/reward_undesirable",
}
REWARD_METRICS = {
    "mean_reward": "reward_model/preference/score",
    "accuracy": "reward_model/preference/accuracy",
    "margin": "reward_model/preference/margin",
}
SCORE = "preference"
OPTIMIZER: dict[str, Any] = {"lr": LEARNING_RATE, "betas": (0.9, 0.999), "eps": EPS}
SCORE_STD = 0.2
"""Standard deviation of the head's weights: scores of about 1, so that a margin matters."""


@dataclass(frozen=True, slots=True)
class Case:
    """One loss on both sides.

    Attributes:
        trainer: Name of TRL's trainer without ``Trainer``.
        theirs: Settings of TRL.
        ours: The settings ``preference``, ``distill`` for GKD, or ``reward_model`` for a reward
            model. Empty for SFT.
        metrics: Names of metrics here, by TRL's.
        note: What differs by decision, and the setting that makes it equal.
        margin: The rows have margins. TRL reads them wherever they are.
    """

    trainer: str
    theirs: Mapping[str, Any]
    ours: Mapping[str, Any]
    metrics: Mapping[str, str] = field(default_factory=lambda: PAIR_METRICS)
    note: str = ""
    margin: bool = False

    @property
    def experimental(self) -> bool:
        return self.trainer in ("CPO", "ORPO", "TPO", "GKD")

    @property
    def neighbour(self) -> str:
        """The name of the second model in TRL's trainer, or an empty string."""
        return {"DPO": "ref_model", "KTO": "ref_model", "GKD": "teacher_model"}.get(
            self.trainer, ""
        )

    @property
    def start(self) -> str:
        """The folder of the model that is trained."""
        return "scorer" if self.trainer == "Reward" else "policy"


def dpo(loss: str, ours: str, note: str = "", **more: Any) -> Case:
    """A case of TRL's ``DPOTrainer`` with one loss and settings of the same name on both sides."""
    tree = {"losses": [{"name": ours, "options": more.pop("options", {})}], "beta": BETA, **more}
    theirs: dict[str, Any] = {"loss_type": [loss], "beta": BETA}
    theirs |= {key: more[key] for key in ("label_smoothing", "ld_alpha") if key in more}
    if ours == "discopop":
        tree["losses"] = [loss_of("discopop", tau=TAU)]
        theirs["discopop_tau"] = TAU
        note = "`tau: 0.5` on both sides; 0.05 multiplies the rounding of log-probs by 20."
    return Case("DPO", theirs, tree, note=note)


def divergent(loss: str, kind: str, theirs: str, alpha: float = 0.5) -> Case:
    """A case of TRL's ``DPOTrainer`` under an f-divergence."""
    tree: dict[str, Any] = {"kind": kind, **({"alpha": alpha} if kind == "alpha" else {})}
    case = dpo(loss, loss, f_divergence=tree)
    options = {"f_divergence_type": theirs, "f_alpha_divergence_coef": alpha}
    return replace(case, theirs={**case.theirs, **options})


def free(name: str, theirs: Mapping[str, Any], ours: Sequence[Any], **more: Any) -> Case:
    """A case without a reference."""
    smoothing = {key: theirs[key] for key in ("label_smoothing",) if key in theirs}
    tree = {"losses": list(ours), "beta": BETA, **smoothing}
    return Case(name, {"beta": BETA, **theirs}, tree, **more)


REWARDS = {key: name for key, name in PAIR_METRICS.items() if key.startswith("rewards")}
MEANS = "TRL reports means per token as log-probs; sums are reported here."
NLL = "The likelihood is a mean over the tokens of the batch: `alpha: 0` and the loss `sft`."
SFT = {"name": "sft", "weight": 1.0}
GOLD = {"name": "sft_gold", "weight": 1.0}


def loss_of(name: str, **options: Any) -> dict[str, Any]:
    """A loss with options."""
    return {"name": name, "options": options}


def dpo_cases() -> dict[str, Case]:
    """The cases of TRL's ``DPOTrainer``."""
    same = ("hinge", "ipo", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down")
    cases = {name: dpo(name, name) for name in ("sigmoid", *same, "discopop", "sigmoid_norm")}
    cases["exo"] = dpo("exo_pair", "exo", label_smoothing=0.01)
    cases["robust"] = dpo("robust", "robust", label_smoothing=0.1)
    cases["nca"] = dpo("nca_pair", "nca")
    shift = "TRL's loss has no running shift: `shifted: false`."
    cases["bco_pair"] = dpo("bco_pair", "bco_pair", shift, options={"shifted": False})
    for name in ("aot", "aot_unpaired"):
        cases[f"{name}, smoothed labels"] = dpo(name, name, label_smoothing=0.1)
    for name in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "discopop"):
        cases[f"{name}, forward KL"] = divergent(name, "forward_kl", "forward_kl")
        cases[f"{name}, Jensen-Shannon"] = divergent(name, "js", "js_divergence")
        cases[f"{name}, alpha 0.25"] = divergent(name, "alpha", "alpha_divergence", 0.25)
    for name in ("sigmoid", "aot", "apo_zero"):
        cases[f"{name}, LD 0.5"] = dpo(name, name, ld_alpha=0.5)
    uncapped = "TRL does not cap the weights: `wpo_cap: null`."
    wpo = dpo("sigmoid", "sigmoid", uncapped, wpo=True, wpo_cap=None)
    cases["sigmoid, WPO"] = replace(wpo, theirs={**wpo.theirs, "use_weighting": True})
    moved = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}
    tree = {"source": "step", "refresh_every": 2, "refresh_decay": 0.4}
    share = "`refresh_decay` is the share of the old reference, and TRL's alpha that of the policy."
    moving = dpo("sigmoid", "sigmoid", share, reference=tree)
    cases["sigmoid, TR-DPO"] = replace(moving, theirs={**moving.theirs, **moved})
    unread = "TRL's rewards compare with a reference, which the loss does not read."
    cases["sft of chosen"] = Case("DPO", {"loss_type": ["sft"]}, {"losses": ["sft"]}, LOGPS, unread)
    cases["MPO"] = Case(
        "DPO",
        {
            "loss_type": ["sigmoid", "bco_pair", "sft"],
            "loss_weights": [0.8, 0.2, 1.0],
            "beta": BETA,
        },
        {
            "losses": [
                {"name": "sigmoid", "weight": 0.8},
                {"name": "bco_pair", "weight": 0.2, "options": {"shifted": False}},
                SFT,
            ],
            "beta": BETA,
        },
        note=shift,
    )
    return cases


def kto_cases() -> dict[str, Case]:
    """The cases of TRL's ``KTOTrainer``."""
    cases = {}
    for name in ("kto", "apo_zero_unpaired"):
        weights = {"desirable_weight": 1.0, "undesirable_weight": 1.5}
        tree = {"losses": [loss_of(name, **weights)], "beta": BETA}
        theirs = {"loss_type": name, "beta": BETA, **weights}
        # TRL reports a mean that is below 0 as 0; in the first batch it is above
        kl = {"kl": "preference/mismatched_kl"} if name == "kto" else {}
        cases[name] = Case("KTO", theirs, tree, {**KTO_METRICS, **kl})
    return cases


def reference_free_cases() -> dict[str, Case]:
    """The cases of TRL's ``CPOTrainer``, ``ORPOTrainer`` and ``TPOTrainer``."""
    cases = {}
    for form in ("sigmoid", "hinge", "ipo"):
        means = {"metrics": REWARDS, "note": f"{NLL} {MEANS}"} if form == "ipo" else {"note": NLL}
        theirs = {"loss_type": form}
        ours = [loss_of("cpo", form=form, alpha=0.0), SFT]
        cases[f"cpo, {form}"] = free("CPO", {**theirs, "cpo_alpha": 1.0}, ours, **means)
        ours = [loss_of("tpo", form=form, alpha=0.0), GOLD]
        means |= {"note": means["note"].replace("`sft`", "`sft_gold`")}
        cases[f"tpo, {form}"] = free("TPO", {**theirs, "tpo_alpha": 1.0}, ours, **means)
    means = {"metrics": REWARDS, "note": MEANS}
    simpo = {"loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.0}
    cases["simpo"] = free("CPO", simpo, [loss_of("simpo", gamma=0.5)], **means)
    smooth = {**simpo, "label_smoothing": 0.1}
    cases["simpo, smoothed labels"] = free("CPO", smooth, [loss_of("simpo", gamma=0.5)], **means)
    powers = f"{MEANS} TRL's rewards are powers, and their order alone is compared."
    means = {"metrics": {"rewards/accuracies": REWARDS["rewards/accuracies"]}, "note": powers}
    alpha = loss_of("alphapo", alpha=0.25, gamma=0.5)
    cases["alphapo"] = free("CPO", {**simpo, "alpha": 0.25}, [alpha], **means)
    smooth = {"loss_type": "sigmoid", "cpo_alpha": 0.5, "label_smoothing": 0.1}
    ours = [loss_of("cpo", alpha=0.0), {**SFT, "weight": 0.5}]
    cases["cpo, smoothed labels"] = free("CPO", smooth, ours, note=NLL)
    length = {"loss_type": "tpo-l", "tpo_l_gamma": 0.5, "tpo_alpha": 1.0}
    ours = [loss_of("tpo", form="length_normalized", gamma=0.5, alpha=0.0), GOLD]
    note = f"{NLL.replace('`sft`', '`sft_gold`')} {MEANS}"
    cases["tpo, length-normalized"] = free("TPO", length, ours, metrics=REWARDS, note=note)
    prompt = (
        "TRL's likelihood is that of prompt and response, as a mean over the tokens of the batch: "
        "`alpha: 0`, and the loss `sft_gold` with prompt and chosen response as the gold response."
    )
    ours = [loss_of("orpo", alpha=0.0), GOLD]
    cases["orpo"] = free("ORPO", {}, ours, metrics=REWARDS, note=f"{prompt} {MEANS}")
    return cases


def gkd_cases() -> dict[str, Case]:
    """The cases of TRL's ``GKDTrainer`` on given responses."""
    forms: dict[str, tuple[float, dict[str, Any]]] = {
        "gkd, forward KL": (0.0, {"kind": "forward_kl"}),
        "gkd, reverse KL": (1.0, {"kind": "reverse_kl"}),
        "gkd, beta 0.3": (0.3, {"kind": "jsd", "beta": 0.3}),
    }
    cases = {}
    for name, (beta, ours) in forms.items():
        cases[name] = Case("GKD", {"beta": beta, "lmbda": 0.0}, ours, {})
    return cases


def reward_cases() -> dict[str, Case]:
    """The cases of TRL's ``RewardTrainer``."""

    def case(theirs: Mapping[str, Any], *losses: Any, **more: Any) -> Case:
        return Case("Reward", theirs, {"losses": list(losses)}, REWARD_METRICS, **more)

    pairs = loss_of("bradley_terry")
    apart = loss_of("bradley_terry", margin=True)
    centre = {"name": "centre", "weight": 0.05}
    coefficient = {"center_rewards_coefficient": 0.05}
    return {
        "reward model": case({}, pairs),
        "reward model, margin": case({}, apart, margin=True),
        "reward model, centred": case(coefficient, pairs, centre),
        "reward model, margin, centred": case(coefficient, apart, centre, margin=True),
    }


CASES: dict[str, Case] = {
    **dpo_cases(),
    **kto_cases(),
    **reference_free_cases(),
    **gkd_cases(),
    "sft": Case("SFT", {}, {}, {}),
    **reward_cases(),
}


# ---------------------------------------------------------------- models and rows of both sides


def write_models(folder: Path) -> None:
    """Write a tiny model as ``policy``, one near it as ``reference``, and a ``scorer``."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from lightrft.models.tiny.text import tiny_model

    model = tiny_model("qwen2", seed=3)
    for name in ("policy", "reference"):
        model.save_pretrained(folder / name)
        noise = torch.Generator().manual_seed(NOISE_SEED)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(NOISE * torch.randn(parameter.shape, generator=noise))
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1)
    torch.nn.init.normal_(scorer.score.weight, std=SCORE_STD, generator=noise)
    scorer.save_pretrained(folder / "scorer")


def plain_tokenizer() -> Any:
    """Return a tokenizer of characters without a chat template: rows are plain text."""
    from lightrft.models.tiny.text import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def chat_tokenizer() -> Any:
    """Return a tokenizer of characters whose chat template ends with the end of the last turn."""
    from lightrft.models.tiny.text import CHAT_TEMPLATE, tiny_tokenizer

    # TRL trains on a line break after the end of the turn, too.
    return tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("<|im_end|>\n", "<|im_end|>"))


def tokenizer_of(trainer: str) -> Any:
    """Return the tokenizer of both sides. GKD reads conversations alone."""
    return chat_tokenizer() if trainer == "GKD" else plain_tokenizer()


def rows_of(case: Case) -> list[dict[str, Any]]:
    """Return the rows of all steps in the columns of TRL, which are read here too."""
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    rows = []
    for i in range(ROWS * STEPS):
        a, b, c = words[i % 10], words[(3 * i + 1) % 10], words[(7 * i + 4) % 9]
        prompt = f"{i} is {b}, or {a * (1 + i % 3)}? "
        texts = {"chosen": f"{a} {c}.", "rejected": f"{b}, {'so ' * (i % 4)}{i}"}
        if case.trainer == "KTO":
            good = i % 3 != 0
            said = texts["chosen" if good else "rejected"]
            rows.append({"prompt": prompt, "completion": said, "label": good})
        elif case.trainer == "GKD":
            said = {"role": "assistant", "content": texts["chosen"]}
            rows.append({"messages": [{"role": "user", "content": prompt}, said]})
        elif case.trainer == "SFT":
            rows.append({"prompt": prompt, "completion": texts["chosen"]})
        else:
            more: dict[str, Any] = {}
            if case.trainer == "TPO":
                more = {"reference": f"{c} and {a}"}
            if case.margin:
                more = {"margin": i % 5 / 4}
            rows.append({"prompt": prompt, **texts, **more})
    return rows


# ---------------------------------------------------------------- TRL


@dataclass(slots=True)
class Side:
    """What one side computed.

    Attributes:
        losses: Loss of the batch, and of each step.
        metrics: Metrics of the batch.
        gradients: Gradient of the batch, by parameter.
        weights: Weights after the steps, by parameter.
    """

    losses: list[float]
    metrics: dict[str, float]
    gradients: dict[str, Any]
    weights: dict[str, Any]


def trl_trainer(case: Case, models: Path, scratch: Path) -> Any:
    """Build TRL's trainer."""
    import importlib

    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    home = f"trl.experimental.{case.trainer.lower()}" if case.experimental else "trl"
    module = importlib.import_module(home)
    config = getattr(module, f"{case.trainer}Config")(
        output_dir=str(scratch),
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        adam_epsilon=EPS,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_length=512,
        logging_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **case.theirs,
    )
    auto: Any = AutoModelForCausalLM
    if case.trainer == "Reward":
        auto = AutoModelForSequenceClassification
    models_of = {"model": models / case.start}
    if case.neighbour:
        models_of[case.neighbour] = models / "reference"
    loaded = {
        name: auto.from_pretrained(folder, dtype="float32") for name, folder in models_of.items()
    }
    return getattr(module, f"{case.trainer}Trainer")(
        **loaded,
        args=config,
        train_dataset=Dataset.from_list(rows_of(case)),
        processing_class=tokenizer_of(case.trainer),
    )


def run_trl(case: Case, models: Path, scratch: Path) -> Side:
    """Compute one batch with TRL's loss, then train."""
    trainer = trl_trainer(case, models, scratch)
    model = trainer.model
    model.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    stored = trainer._stored_metrics if case.trainer in ("CPO", "ORPO") else trainer._metrics
    metrics = {key: values[-1] for key, values in stored["train"].items()}
    model.zero_grad()
    losses = [float(loss.detach())]
    compute = trainer.compute_loss

    def recorded(*args: Any, **options: Any) -> Any:
        found = compute(*args, **options)
        losses.append(float(found.detach()))
        return found

    trainer.compute_loss = recorded
    trainer.train()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Side(losses, metrics, gradients, weights)


# ---------------------------------------------------------------- lightrft


class Learner:
    """The policy, the reference and the optimizer of one run here.

    ``step`` takes a batch and the number of earlier steps, and returns the metrics.
    """

    def __init__(self, case: Case, models: Path) -> None:
        from transformers import AutoModelForCausalLM

        from lightrft.config.preference.sections import PreferenceReferenceConfig
        from lightrft.config.strategy import OptimizerConfig, StrategyConfig
        from lightrft.learner.reference_update import MovingReference
        from lightrft.models.actor import Actor
        from lightrft.roles import FrozenModel, Roles, TrainableModel
        from lightrft.strategy.single import SingleStrategy

        def actor(name: str) -> Actor:
            folder = models / name
            return Actor(AutoModelForCausalLM.from_pretrained(folder, dtype="float32")).eval()

        strategy = SingleStrategy(StrategyConfig(device="cpu"))
        optimizer = OptimizerConfig(**OPTIMIZER)
        policy = actor("policy")
        state = strategy.prepare(policy, optimizer, STEPS)
        reference = FrozenModel(actor("reference").requires_grad_(False))
        if "reference" in case.ours:
            moves = PreferenceReferenceConfig.model_validate(case.ours["reference"])
            reference = MovingReference.of(reference.model, state.shapes, strategy, moves)
        # The engine and the scorer of reinforcement learning have no part in this.
        unused: Any = None
        trained = TrainableModel(policy, state)
        self.roles = Roles(strategy, trained, unused, unused, unused)
        if case.trainer == "GKD":
            self.roles.teacher = reference
        else:
            self.roles.reference = reference
        self.strategy = strategy
        self.step = step_of(case, self.roles)

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the weights by the names of the model itself."""
        for name, parameter in self.roles.actor.named_parameters():
            yield name.removeprefix("model."), parameter


class RewardLearner:
    """The reward model and the optimizer of one run here, as ``Learner``."""

    def __init__(self, case: Case, models: Path) -> None:
        from lightrft.config.base import build
        from lightrft.config.model import ModelConfig
        from lightrft.config.reward_model.sections import RewardModelConfig
        from lightrft.config.strategy import OptimizerConfig, StrategyConfig
        from lightrft.learner.reward_model.step import RewardModelSettings, reward_model_step
        from lightrft.models.reward.reward_model import RewardModel
        from lightrft.roles import TrainableModel
        from lightrft.strategy.single import SingleStrategy

        settings = build(RewardModelConfig, dict(case.ours))
        config = ModelConfig(path=str(models / case.start), dtype="float32")
        self.model = RewardModel.load(config, settings)
        self.strategy = SingleStrategy(StrategyConfig(device="cpu"))
        state = self.strategy.prepare(self.model, OptimizerConfig(**OPTIMIZER), STEPS)
        trained = TrainableModel(self.model, state)
        of_step = RewardModelSettings(settings, WHOLE_BATCH, [SCORE])

        def step(batch: Any, done: int) -> Any:
            return reward_model_step(self.strategy, trained, batch, of_step)

        self.step = step

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the weights by the names of transformers' classifier."""
        for name, parameter in self.model.named_parameters():
            own = name.removeprefix("model.")
            if own == "lm_head.weight":
                # not used by either side
                continue
            yield own.replace(f"heads.{SCORE}.layers", "score"), parameter


def learner_of(case: Case, models: Path) -> Learner | RewardLearner:
    """Return a learner at step 0."""
    return (RewardLearner if case.trainer == "Reward" else Learner)(case, models)


def step_of(case: Case, roles: Any) -> Callable[[Any, int], Any]:
    """Return a function that takes a step on a batch and returns its metrics."""
    from lightrft.algorithms.preference.compatibility import check_preference
    from lightrft.algorithms.preference.requirements import preference_requirements
    from lightrft.config.base import build
    from lightrft.config.preference.sections import PreferenceConfig
    from lightrft.config.train import DistillationConfig
    from lightrft.learner.distillation.step import Lesson, distill_step
    from lightrft.learner.preference_batch import PreferenceStats
    from lightrft.learner.preference_step import PreferenceSettings, preference_step
    from lightrft.learner.reference_update import update_reference
    from lightrft.learner.sft_step import sft_step

    if case.trainer == "SFT":
        return lambda batch, step: sft_step(roles.strategy, roles.policy, batch, WHOLE_BATCH)
    if case.trainer == "GKD":
        divergence = build(DistillationConfig, dict(case.ours))
        return lambda batch, step: distill_step(roles, Lesson(batch), divergence, WHOLE_BATCH)
    config = build(PreferenceConfig, dict(case.ours))
    check_preference(config)
    needed = preference_requirements(config)
    settings, stats = PreferenceSettings(config, needed, WHOLE_BATCH, 0), PreferenceStats()

    def step(batch: Any, done: int) -> Any:
        update_reference(roles, config.reference, done)
        return preference_step(roles, batch, settings, stats, done)

    return step


def run_ours(case: Case, models: Path, scratch: Path) -> Side:
    """Compute one batch with the learner here, then train."""
    batches = batches_of(case, scratch)
    first = learner_of(case, models)
    gradients: dict[str, Any] = {}
    step = first.strategy.step

    def recorded(state: Any) -> Any:
        for name, parameter in first.parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.detach().clone()
        return step(state)

    first.strategy.step = recorded
    metrics = first.step(batches[0], 0).compute()
    # from the start again: the step above has moved the weights
    learner = learner_of(case, models)
    losses = [learner.step(batch, i).compute()["loss"] for i, batch in enumerate(batches)]
    weights = {name: parameter.detach().clone() for name, parameter in learner.parameters()}
    return Side([metrics["loss"], *losses], metrics, gradients, weights)


def batches_of(case: Case, scratch: Path) -> list[Any]:
    """Read the rows through the data sets here, and collate them to the batches of the steps."""
    from lightrft.config.data import PreferenceDataConfig, RewardDataConfig, SFTDataConfig
    from lightrft.datasets.preference.preference_dataset import PreferenceDataset
    from lightrft.datasets.sft_dataset import SFTDataset
    from lightrft.learner.preference_batch import preference_to_batch
    from lightrft.learner.sft_step import examples_to_batch

    file = scratch / "rows.jsonl"
    rows = rows_of(case)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options: dict[str, Any] = {"max_tokens": 512, "seed": 0}
    tree = {"sources": str(file), "token_cache": None}
    if case.trainer in ("SFT", "GKD"):
        settings = SFTDataConfig.model_validate(tree)
        examples: Any = SFTDataset(settings, tokenizer_of(case.trainer), **options)
        collate: Callable[[Any], Any] = examples_to_batch
    elif case.trainer == "Reward":
        reward = RewardDataConfig.model_validate(tree)
        options |= {"kind": "ranked", "heads": [SCORE]}
        examples = PreferenceDataset(reward, plain_tokenizer(), **options)
        collate = partial(preference_to_batch, heads=[SCORE])
    else:
        kind = "labelled" if case.trainer == "KTO" else "pair"
        config = PreferenceDataConfig.model_validate(tree)
        options |= {"kind": kind, "gold": case.trainer == "TPO"}
        examples = PreferenceDataset(config, plain_tokenizer(), **options)
        collate = preference_to_batch
    parts = [range(start, start + ROWS) for start in range(0, ROWS * STEPS, ROWS)]
    batches = [collate([examples[i] for i in part]) for part in parts]
    return [with_prompt_and_chosen(b) for b in batches] if case.trainer == "ORPO" else batches


def with_prompt_and_chosen(batch: Any) -> Any:
    """Add prompts with their chosen responses as gold responses, all tokens but the first."""
    import torch

    from lightrft.types import GOLD as GOLD_RANK
    from lightrft.types import Batch, Segments

    responses = lists_of(batch.responses)
    better = (batch.rank == 0).nonzero()[:, 0].tolist()
    chosen = [responses[row] for row in better]
    whole = [[*p, *c] for p, c in zip(lists_of(batch.prompts), chosen, strict=True)]
    gold = Segments.of([row[1:] for row in whole])
    examples = torch.arange(len(whole))
    trained = torch.ones(len(gold.tokens), dtype=torch.bool)
    return Batch(
        Segments.cat([batch.prompts, Segments.of([row[:1] for row in whole])]),
        Segments.cat([batch.responses, gold]),
        torch.cat([batch.prompt_of, len(batch.prompts) + examples]),
        sampled=torch.cat([batch.sampled, trained]),
        example=torch.cat([batch.example, examples]),
        rank=torch.cat([batch.rank, torch.full_like(examples, GOLD_RANK)]),
    )


def lists_of(segments: Any) -> list[list[int]]:
    """Return the tokens of each sequence."""
    return [part.tolist() for part in segments.tokens.split(segments.lengths.tolist())]


# ---------------------------------------------------------------- the comparison


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest differences of one case.

    Attributes:
        loss: Of the loss of the batch.
        metrics: Of its metrics; ``None`` if none are comparable.
        gradients: Of its gradient, relative to the largest one.
        losses: Of the losses of the five steps.
        weights: Of the weights after them, relative to the largest one.
        moved: Largest distance of a weight from its start, so that equal weights mean something.
    """

    loss: float
    metrics: float | None
    gradients: float
    losses: float
    weights: float
    moved: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.metrics or 0.0, self.gradients, self.losses, self.weights)


def apart(x: float, y: float) -> float:
    """Return the difference of two numbers, relative to them where they are above 1."""
    return abs(x - y) / max(1.0, abs(x), abs(y))


def tensors_apart(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Return the largest difference of two sets of tensors, relative to the largest number."""
    if set(ours) != set(theirs):
        raise ValueError(f"the sides have different parameters: {sorted(set(ours) ^ set(theirs))}")
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / largest


def compare(case: Case, models: Path, scratch: Path) -> Difference:
    """Run both sides of a case."""
    from safetensors.torch import load_file

    ours, theirs = run_ours(case, models, scratch), run_trl(case, models, scratch)
    if not len(ours.losses) == len(theirs.losses) == STEPS + 1:
        raise ValueError(f"{len(ours.losses)} losses here, {len(theirs.losses)} in TRL")
    losses = [apart(x, y) for x, y in zip(ours.losses, theirs.losses, strict=True)]
    metrics = [apart(ours.metrics[name], theirs.metrics[key]) for key, name in case.metrics.items()]
    start = load_file(models / case.start / "model.safetensors")
    moved = max(float((w - start[name]).abs().max()) for name, w in ours.weights.items())
    return Difference(
        losses[0],
        max(metrics) if metrics else None,
        tensors_apart(ours.gradients, theirs.gradients),
        max(losses[1:]),
        tensors_apart(ours.weights, theirs.weights),
        moved,
    )


def line_of(name: str, found: Difference) -> str:
    """Return the row of the table."""
    metrics = "-" if found.metrics is None else f"{found.metrics:.1e}"
    numbers = [found.gradients, found.losses, found.weights]
    rest = " | ".join(f"{number:.1e}" for number in numbers)
    equal = "yes" if found.largest <= LIMIT else "NO"
    return f"| {name} | {found.loss:.1e} | {metrics} | {rest} | {equal} |"


HEAD = (
    "| case | loss | metrics | gradients | losses of 5 steps | weights after 5 steps | equal |\n"
    "|---|---|---|---|---|---|---|"
)


def page(found: Mapping[str, Difference]) -> str:
    """Return the report in Markdown."""
    from importlib.metadata import version

    packages = ("trl", "transformers", "torch")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    lines = [
        "# Preference learning, reward models, SFT and GKD equal TRL",
        "",
        f"Written by `python benchmarks/same_as_trl_preference.py --report` with {versions}, on "
        f"{platform.machine()}, in float32.",
        "",
        f"Each number is the largest difference of a batch of {ROWS} rows; the limit is {LIMIT:g}. "
        "Losses and metrics are compared absolutely up to 1 and relatively above. Gradients and "
        "weights are relative to the largest one. In five steps of AdamW, a weight moved by up to "
        f"{max(one.moved for one in found.values()):.1e}.",
        "",
        HEAD,
        *(line_of(name, one) for name, one in found.items()),
        "",
        "## Where the defaults differ",
        "",
        "TRL's form is compared, with these settings:",
        "",
    ]
    notes: dict[str, list[str]] = {}
    for name in found:
        if CASES[name].note:
            notes.setdefault(CASES[name].note, []).append(name)
    lines += [f"* {'; '.join(names)}: {note}" for note, names in notes.items()]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the cases and exit with 1 if a difference is above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--report", action="store_true", help="write the table to results/")
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    args = parser.parse_args()
    # Rows and models are local, and a run must not depend on a network.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    import torch

    torch.set_num_threads(1)
    found: dict[str, Difference] = {}
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        write_models(models)
        for i, name in enumerate(args.cases):
            scratch = Path(folder) / str(i)
            scratch.mkdir()
            with contextlib.redirect_stdout(io.StringIO()):
                found[name] = compare(CASES[name], models, scratch)
            print(line_of(name, found[name]), flush=True)
    if args.report:
        file = HERE / "results" / f"same_as_trl_preference-{args.machine}.md"
        file.write_text(page(found), encoding="utf-8")
        print(f"wrote {file}")
    unequal = [name for name, one in found.items() if one.largest > LIMIT]
    if unequal:
        sys.exit(f"above {LIMIT:g}: {', '.join(unequal)}")


if __name__ == "__main__":
    main()
