"""Conversions of values whose meaning depends on other options of the same config."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lightrft.config.other_names.rows import (
    Converted,
    NoValue,
    Options,
    Unclear,
    ValueTable,
    as_list,
    by_hand,
)

BF16, FP16, FP32 = "bfloat16", "float16", "float32"
DTYPES = ValueTable(
    {
        **dict.fromkeys(("bf16", BF16, "torch.bfloat16"), BF16),
        **dict.fromkeys(("fp16", FP16, "half", "torch.float16"), FP16),
        **dict.fromkeys(("fp32", FP32, "float", "torch.float32"), FP32),
        "auto": "auto",
        None: Converted(),
    }
)
SCHEDULES = ValueTable(
    {
        **dict.fromkeys(("constant", "constant_with_warmup"), "constant"),
        **dict.fromkeys(("linear", "linear_with_warmup"), "linear"),
        **dict.fromkeys(("cosine", "cosine_with_warmup", "cosine_with_min_lr"), "cosine"),
    }
)
ESTIMATORS = ValueTable(
    {
        **dict.fromkeys(("k1", "kl"), "k1"),
        **dict.fromkeys(("k2", "mse"), "k2"),
        **dict.fromkeys(("k3", "low_var_kl"), "k3"),
        **dict.fromkeys(("k3+", "low_var_kl+"), "k3_straight"),
    }
)
AGGREGATIONS = ValueTable(
    {
        "token-mean": "token",
        "seq-mean-token-mean": "sequence",
        "seq-mean-token-sum": "sequence_sum",
        "seq-mean-token-sum-norm": "constant",
    }
)
ESTIMATES = ValueTable(
    {
        "gae": "ppo",
        **dict.fromkeys(("grpo", "group_norm"), "grpo"),
        "grpo_passk": "pass_at_k",
        **dict.fromkeys(("reinforce", "reinforce++", "reinforce_plus_plus"), "reinforce++"),
        **dict.fromkeys(
            ("reinforce_baseline", "reinforce_plus_plus_baseline"), "reinforce++_baseline"
        ),
        **{name: name for name in ("rloo", "remax", "opo", "gpg", "cpgd", "dr_grpo")},
        "optimal_token_baseline": "otb",
    }
)
"""Advantage estimators to presets."""
VERL_LOSSES = ValueTable(
    {
        "vanilla": Converted(),
        **{name: Converted({"algorithm.loss.name": name}) for name in ("cispo", "gmpo", "sapo")},
        "geo_mean": Converted({"algorithm.loss.name": "gmpo"}),
        "ppo": Converted(),
        "gspo": Converted({"algorithm.loss.ratio": "sequence"}),
        "clip_cov": Converted({"algorithm.token_masks": ["clip_cov"]}),
        "kl_cov": Converted({"algorithm.token_masks": ["kl_cov"]}),
        "gpg": Converted({"algorithm.loss.name": "reinforce"}),
    }
)
_POLICY = {
    **{k: Converted({"algorithm.aggregation": "sequence"}) for k in ("grpo",)},
    **{k: Converted({"algorithm.aggregation": "token"}) for k in ("bnpo", "dapo")},
    "dr_grpo": Converted({"algorithm.aggregation": "constant"}),
    **{
        k: Converted({"algorithm.loss.name": k, "algorithm.aggregation": "token"})
        for k in ("cispo", "sapo", "vespo")
    },
    "luspo": Converted({"algorithm.preset": "luspo"}),
}
_PAIRS = {
    **{k: k for k in ("sigmoid", "hinge", "ipo", "robust", "bco_pair", "sppo_hard", "aot")},
    **{k: k for k in ("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")},
    **{k: k for k in ("orpo", "simpo", "kto", "apo_zero_unpaired", "bco", "cpo")},
    "exo_pair": "exo",
    "nca_pair": "nca",
    "aot_pair": "aot_unpaired",
    "kto_pair": "kto",
    "dpo": "sigmoid",
}
_REWARDS = {"sigmoid": "bradley_terry", "logexp": "log_exp", "log_exp": "log_exp"}


def loss_type(value: Any, _: Options) -> Any:
    """Convert TRL's ``loss_type``, which names a loss of the policy, of pairs, or of rewards."""
    names = value if isinstance(value, list) else [value]
    known = [str(name).lower() for name in names]
    if len(known) == 1 and known[0] in _POLICY:
        return _POLICY[known[0]]
    if all(name in _PAIRS for name in known):
        return [_PAIRS[name] for name in known]
    raise NoValue(f"{value!r} is no loss here; docs/parts.md lists them")


def reward_loss(value: Any, options: Options) -> Any:
    """Convert the loss of a reward model."""
    return [ValueTable(_REWARDS)(value, options)]


def centre_loss(value: Any, options: Options) -> Any:
    """Convert the weight of the loss that keeps rewards around 0."""
    if not value:
        return Converted()
    first_loss = options.get("loss_type") or options.get("loss") or "sigmoid"
    return [*reward_loss(first_loss, options), {"name": "centre", "weight": value}]


def sources(value: Any, options: Options) -> Any:
    """Convert names of data sets. ``name:subset#1000`` of ms-swift takes so many rows."""
    listed, found = as_list(value, options), []
    if isinstance(listed, Converted):
        return listed
    for one in listed:
        counted = re.fullmatch(r"(.+?)(?::(\w+))?#(\d+)", str(one))
        if counted:
            one = {"path": counted[1], "subset": counted[2], "limit": int(counted[3])}
            one = {key: part for key, part in one.items() if part is not None}
        found.append(one)
    own: dict[str, Any] = {}
    # a name alone is answered without the other options
    with suppress(Unclear):
        own = {key: first(options, *names) for key, names in OF_A_SOURCE.items()}
    own = {key: given for key, given in own.items() if given is not None}
    if len(found) == 1 and own and own != {"split": "train"}:
        [one] = found
        found = [(one if isinstance(one, dict) else {"path": one}) | own]
    return found


OF_A_SOURCE = {
    "subset": ("dataset_config", "subset"),
    "split": (
        *("dataset_split", "dataset_train_split", "prompt_split", "train_split"),
        *("data.dataset_split", "data.prompt_split"),
    ),
    "limit": ("max_samples", "data.max_samples", "data.train_max_samples"),
}
"""Options of the only source of a config, by the field of a source."""
SOURCES = (
    *("dataset", "dataset_name", "dataset_path", "prompt_data", "train_data", "train_dataset"),
    *("train_file", "train_files", "data.dataset", "data.prompt_dataset", "data.train_files"),
    *("data_files", "data.path", "datasets"),
)
"""Options that name sources of rows."""


def of_a_source(value: Any, options: Options) -> Any:
    """Convert to no setting what ``sources`` reads for the only source, and the usual split."""
    given = as_list(first(options, *SOURCES), options)
    if value == "train" or (isinstance(given, list) and len(given) == 1):
        return Converted()
    return by_hand(value, options)


def held_out_split(value: Any, options: Options) -> Any:
    """Convert to no setting what a default of TRL's scripts reads."""
    return Converted() if "dataset_name" in options else by_hand(value, options)


def trackers(value: Any, options: Options) -> Converted:
    """Convert a list of places to log to: each has a setting of its own."""
    names = value if isinstance(value, list | tuple) else [value]
    names = ["none" if name is None else str(name).lower() for name in names]
    found = Converted()
    for name in names:
        name = "wandb" if name == "all" else name
        if name in _PROJECTS:
            found[f"log.{name}"] = Project(name)(True, options)
        elif name not in ("tensorboard", "none", "console", "stdout"):
            raise NoValue(f"{name!r} is not supported; metrics are in metrics.jsonl of the run")
    found["log.tensorboard"] = bool({"tensorboard", "all"} & set(names))
    return found


_PROJECTS = {
    "wandb": ("wandb_project", "logger.wandb.project"),
    "mlflow": (),
    "trackio": (),
    "swanlab": ("swanlab_project",),
}
"""Options with the name of a project, by tracker."""


@dataclass(frozen=True, slots=True)
class Project:
    """Converts a flag or a key that turns ``tracker`` on to the name of the project."""

    tracker: str

    def __call__(self, value: Any, options: Options) -> Any:
        """Return the name of the project."""
        if value in (None, False, "", "None"):
            return Converted()
        names = (*_PROJECTS[self.tracker], "trainer.project_name", "project")
        return next((options[name] for name in names if name in options), None) or "lightrft"


def first(options: Options, *names: str) -> Any:
    """Return the first value of ``names`` that is given and not null, else None."""
    return next((options[name] for name in names if options.get(name) is not None), None)


def number(options: Options, *names: str, default: float = 1) -> float:
    """Return the first number among the options ``names``."""
    value = first(options, *names)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def processes_in(options: Options) -> int | None:
    """Return the number of processes over all nodes that a config states, or None."""
    counts = ("num_processes", "nproc_per_node", "trainer.n_gpus_per_node")
    count = first(options, *counts, "actor.num_gpus_per_node", "actor_num_gpus_per_node")
    nodes = ("nnodes", "trainer.nnodes", "num_machines", "actor.num_nodes", "actor_num_nodes")
    if not isinstance(count, int):
        return None
    # The processes of accelerate are those of all nodes already.
    return count if "num_processes" in options else int(count * number(options, *nodes))


def processes(value: Any, options: Options) -> Any:
    """Convert a number of nodes or of processes of a node to the number of processes."""
    return processes_in(options) or value


GROUP = ("num_generations", "n_samples_per_prompt", "rollout.n_samples_per_prompt", "rloo_k")
"""Options that count the responses to a prompt."""


def device_batch(value: Any, options: Options) -> Converted:
    """Convert the rows of a device to the rows of a step, for rows and for prompts alike.

    GRPO of TRL and ms-swift counts responses: ``num_generations`` of them share a prompt.
    """
    ranks = processes_in(options) or 1
    accumulated = number(options, "gradient_accumulation_steps")
    generations = number(options, "steps_per_generation", default=accumulated)
    group = number(options, *GROUP, default=8)
    responses = number(options, "generation_batch_size", default=value * ranks * generations)
    prompts = responses / group
    if prompts != int(prompts) or prompts < 1:
        prompts = 0  # left out below
    found = Converted({"batch_size": int(value * ranks * accumulated)})
    if prompts:
        found["rollout.prompts_per_step"] = int(prompts)
        found["train.num_mini_batches"] = max(1, round(responses / (value * ranks * accumulated)))
    return found


def mini_batches_of(*rollout: str) -> Any:
    """Return a conversion of the prompts of a mini-batch to the number of mini-batches.

    Args:
        rollout: Options that count the prompts of a step.
    """

    def convert(value: Any, options: Options) -> Any:
        total = number(options, *rollout, default=0)
        if not total or not value:
            raise Unclear(f"it needs {rollout[0]}")
        if total % value:
            raise Unclear(f"{rollout[0]} = {total:g} is not a multiple of {value}")
        return int(total // value)

    return convert


def responses_of_mini_batch(value: Any, options: Options) -> Any:
    """Convert the responses of an optimizer step (OpenRLHF) to the number of mini-batches."""
    prompts = number(options, "rollout_batch_size", "rollout.batch_size", default=0)
    group = number(options, *GROUP)
    if not prompts:
        return Converted({"batch_size": value})
    if prompts * group % value:
        raise Unclear(f"{prompts * group:g} responses of a step are no multiple of {value}")
    return Converted({"train.num_mini_batches": int(prompts * group // value), "batch_size": value})


def of_vllm(value: Any, options: Options) -> Any:
    """Convert a setting of vLLM in the processes of the run. One of no effect sets nothing."""
    if value in (None, 1):
        return Converted()
    names = ("name", "engine_type", "infer_backend", "sampler_engine", "use_vllm", "vllm_mode")
    said = {str(one) for name, one in options.items() if name.rpartition(".")[2] in names}
    if "server" in said or not said & {"vllm", "True", "colocate"}:
        raise Unclear("it needs engine.kind=vllm, in the processes of the run")
    return value


def betas(value: Any, options: Options) -> Any:
    """Convert one of ``adam_beta1`` and ``adam_beta2``, or a pair of them."""
    if isinstance(value, list | tuple):
        return list(value)
    return [
        number(options, "adam_beta1", default=0.9),
        number(options, "adam_beta2", default=0.999),
    ]


def clip_range(value: Any, _: Options) -> Converted:
    """Convert a symmetric clip range, or a pair."""
    low, high = value if isinstance(value, list | tuple) else (value, value)
    return Converted({"algorithm.loss.clip_low": low, "algorithm.loss.clip_high": high})


def kl_in(where: str, *flags: str) -> Any:
    """Return a conversion of a coefficient that acts at ``where``, if one of ``flags`` is on.

    Without flags it always acts.
    """

    def convert(value: Any, options: Options) -> Any:
        if (flags and not first(options, *flags)) or not value:
            return Converted()
        return Converted({"algorithm.kl.coef": value, "algorithm.kl.where": where})

    return convert


def no_kl(where: str, *others: str) -> Any:
    """Return a conversion of a flag that puts the KL at ``where``.

    Args:
        where: Place of the KL if the flag is true.
        others: Flags for other places. Without any, there is no KL.
    """

    def convert(value: Any, options: Options) -> Converted:
        if value:
            return Converted({"algorithm.kl.where": where})
        if first(options, *others):
            return Converted()
        return Converted({"algorithm.kl.where": "none", "algorithm.kl.coef": 0.0})

    return convert


def kl_of_trl(value: Any, options: Options) -> Converted:
    """Convert ``beta`` of TRL: of GRPO a coefficient in the loss, elsewhere its own beta."""
    in_reward = "rloo_k" in options or options.get("kl_in_reward")
    kl = {"algorithm.kl.where": "none", "algorithm.kl.coef": 0.0}
    if value:
        kl = {"algorithm.kl.where": "reward" if in_reward else "loss", "algorithm.kl.coef": value}
    return Converted({**kl, "preference.beta": value, "distill.beta": value})


def kl_of_openrlhf(value: Any, options: Options) -> Any:
    """Convert ``init_kl_coef``, which acts in the loss with ``use_kl_loss``, else in the reward."""
    if not value:
        return Converted({"algorithm.kl.where": "none", "algorithm.kl.coef": 0.0})
    in_loss = first(options, "use_kl_loss", "algo.kl.use_loss")
    where = "loss" if in_loss else "reward"
    return Converted({"algorithm.kl.where": where, "algorithm.kl.coef": value})


def frozen(part: str, *others: str) -> Any:
    """Return a conversion of a flag that freezes ``part``.

    Args:
        part: Part that the flag freezes.
        others: ``option=part`` of flags that freeze other parts of the same model.
    """

    def convert(value: Any, options: Options) -> Any:
        if not value:
            return Converted()
        pairs = [other.split("=") for other in others]
        return [part, *(name for option, name in pairs if options.get(option))]

    return convert


OPENRLHF_KL = ("init_kl_coef", "algo.kl.init_coef")
"""Coefficients that act in the reward without ``use_kl_loss``."""
RANKS = ("lora_rank", "lora_r", "r", "ds.lora.rank", "model.lora_rank")
RANKS += tuple(f"actor_rollout_ref.model.{name}" for name in ("lora_rank", "lora.rank"))


def uses_lora(options: Options) -> bool:
    """Return True if a config trains adapters."""
    if kind := first(options, "finetuning_type", "tuner_type", "train_type"):
        return str(kind).lower() == "lora"
    if (flag := options.get("use_peft")) is not None:
        return bool(flag)
    return number(options, *RANKS, default=0) > 0


def of_lora(value: Any, options: Options) -> Any:
    """Convert a number of adapters, which counts only where a config trains some."""
    return value if value is not None and uses_lora(options) else Converted()


def lora_targets(value: Any, options: Options) -> Any:
    """Convert the modules of adapters: ``all``, a regular expression, or names with commas."""
    if not uses_lora(options):
        return Converted()
    if value in (None, "all", "all-linear", ["all-linear"], ["all"]):
        return "all-linear"
    if isinstance(value, str) and not re.search(r"[\\^$*+?()\[\]|]", value):
        return [part.strip() for part in re.split(r"[,\s]+", value) if part.strip()]
    return value


def lora_modules(value: Any, options: Options) -> Any:
    """Convert the modules that are trained whole next to adapters, a list or names with commas."""
    return as_list(value, options) if uses_lora(options) else Converted()


def folder(value: Any, _: Options) -> Converted:
    """Convert an output folder to the folder of runs and the name of this run."""
    path = PurePath(str(value))
    if not path.name or path.name == "..":
        raise Unclear(f"{value!r} names no folder of its own")
    return Converted({"run.dir": str(path.parent), "run.name": path.name, "output": str(value)})


def resume(value: Any, _: Options) -> Any:
    """Convert ``resume_from_checkpoint`` and ``resume_mode``: a flag, a word or a path."""
    words = {True: "auto", False: "never", None: "auto", "auto": "auto", "disable": "never"}
    if isinstance(value, bool | None) or value in ("auto", "disable"):
        return words[value]
    if value == "resume_path":
        return Converted()
    return value


def reward_function(value: Any, options: Options) -> Any:
    """Convert a file with a reward function, and the name of the function in another option."""
    if value in (None, ""):
        return Converted()
    names = ("custom_reward_function.name", "reward.custom_reward_function.name")
    if str(value).endswith(".py"):
        term = f"{value}:{first(options, *names) or 'reward_func'}"
        return Converted({"reward.terms": [term]})
    listed = value if isinstance(value, list | tuple) else [value]
    urls = [one.strip() for text in listed for one in str(text).split(",")]
    if all(one.startswith(("http://", "https://")) for one in urls):
        return Converted({"reward.models": [{"url": urls, "protocol": "openrlhf"}]})
    raise Unclear("give the function as file.py:function")


def lightrft_server(value: Any, options: Options) -> Any:
    """Convert ``remote_rm_url`` of LightRFT, where several servers are several rewards."""
    if isinstance(value, str) and value.startswith(("http://", "https://")) and "," not in value:
        return Converted({"reward.models": [{"url": value, "protocol": "lightrft"}]})
    if str(value).startswith(("http://", "https://", "[")):
        raise Unclear(
            "several servers are several rewards in LightRFT: give each an entry of reward.models, "
            "with url, protocol: lightrft, name and weight"
        )
    return reward_function(value, options)


def template(value: Any, _: Options) -> Any:
    """Convert ``input_template``: ``{}`` stands for the prompt."""
    if value is None or "{}" not in str(value):
        raise Unclear("a text with {} is needed")
    return str(value).replace("{}", "{prompt}")


def share_of_steps(value: Any, _: Options) -> Converted:
    """Convert ``warmup_steps``, which below 1 is a share of all steps."""
    if value is None or value < 0:
        return Converted()
    if 0 < value < 1:
        return Converted({"optimizer.warmup_ratio": value})
    return Converted({"optimizer.warmup_steps": int(value)})


def every(value: Any, _: Options) -> Any:
    """Convert a number of steps between two events; -1 or 0 turns it off, below 1 is a share."""
    if value is None or value <= 0:
        return Converted()
    if value < 1:
        raise Unclear("a share of all steps; give a number of steps")
    return int(value)


def masked(value: Any, _: Options) -> Any:
    """Convert a share of tokens with the highest entropy; 1, or 0 of LightRFT, keeps all."""
    if not value or value >= 1:
        return Converted()
    return [{"name": "high_entropy", "options": {"rho": value}}]


def overlong(*factors: str) -> Any:
    """Return a conversion of the buffer of DAPO's penalty, in tokens.

    Args:
        factors: Options with the largest penalty.
    """

    def convert(value: Any, options: Options) -> Any:
        # A flag may turn the length off.
        flags = (
            "overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
            "reward.reward_kwargs.overlong_buffer_cfg.enable",
            "reward_model.overlong_buffer.enable",
        )
        if not value or any(options.get(flag) is False for flag in flags):
            return Converted()
        penalty = number(options, *factors)
        return [{"name": "overlong", "options": {"buffer": value, "penalty": penalty}}]

    return convert


def stop_properly(value: Any, _: Options) -> Any:
    """Convert the penalty of truncated responses: a factor, or a reward below 0."""
    if value is None:
        return Converted()
    option = "value" if value < 0 else "factor"
    return [{"name": "truncated", "options": {option: float(value)}}]


def entropy_filter(value: Any, _: Options) -> Any:
    """Convert the flag of dynamic sampling."""
    return ["zero_variance"] if value else Converted()
