"""For every setting of ``RLConfig`` another legal value, and the probe that sees it act.

``{root}`` is the folder of models and data, ``{tmp}`` that of one run. A context is what the setting needs around it to mean
anything: the same on both sides of the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightrft.config.base import deep_merge
from tests.architecture.tree import ROOT

Tree = dict[str, Any]


@dataclass(frozen=True)
class Flip:
    """``value`` in the place of what the base has; ``refused`` says that one of the two is an error with the way out."""

    value: Any
    probe: str
    context: Tree = field(default_factory=dict)
    refused: bool = False


ROWS, OTHER = "{root}/rows.jsonl", "{root}/other.jsonl"
ADAPTERS: Tree = {"model": {"lora": {"rank": 4, "alpha": 8.0}}}
READER: Tree = {"model": {"path": "{root}/reader", "lora": {"rank": 4, "alpha": 8.0}}}
JUDGE: Tree = {"reward": {"models": [{"path": "{root}/judge"}]}}
SERVED: Tree = {"reward": {"models": [{"url": "http://judge", "max_tokens_per_micro_batch": 1}]}}
STEPS: Tree = {"reward": {"models": [{"path": "{root}/steps", "aggregate": "min"}]}}
TWO: list[Tree] = [{"path": "{root}/judge"}, {"path": "{root}/strict", "name": "strict"}]
GATED: Tree = {"reward": {"models": TWO, "gates": {"strict": "good"}}}
CRITIC: Tree = {
    "algorithm": {"preset": "ppo"},
    "critic": {"optimizer": {"lr": 0.01}},
    "train": {"steps": 3},
}
COSTS: list[Any] = [
    "{root}/reward.py:digits",
    {"function": "{root}/reward.py:length", "name": "cost", "weight": 0},
    {"function": "{root}/reward.py:half", "name": "other", "weight": 0},
]
LIMITED: Tree = {
    "algorithm": {"preset": "grpo_lag", "lagrangian": {"costs": [{"name": "cost"}]}},
    "reward": {"terms": COSTS, "per_source": {"sums": COSTS}},
    "train": {"steps": 2},
}
SAFE: Tree = {**LIMITED, "algorithm": {"preset": "ppo_lag"}}
COST_CRITIC: Tree = {**SAFE, "cost_critic": {"optimizer": {"lr": 0.01}}, "train": {"steps": 3}}
TEACHER: Tree = {"algorithm": {"preset": "opd"}, "teacher": {"path": "{root}/second"}}
WHOLE: Tree = {**TEACHER, "algorithm": {"preset": "opd", "distill": {"kind": "jsd"}}}
LONG: Tree = {"train": {"steps": 3}}
SLOW: Tree = {"reward": {"terms": ["{root}/reward.py:slow"]}}
BOTH: Tree = {
    "reward": {
        "terms": [{"function": "{root}/reward.py:digits", "options": {}}, "{root}/reward.py:length"]
    }
}
HELD: Tree = {"eval": {"data": {"sources": [ROWS]}, "sampling": {"max_new_tokens": 5}}}
WIDE: Tree = {"rollout": {"prompts_per_step": 6}}
PENALTY: Tree = {"algorithm": {"preset": "ppo"}}
COPIES: Tree = {
    "engine": {"speculative": {"kind": "ngram"}},
    "sampling": {"max_new_tokens": 24, "temperature": 0.3},
}
DRAFTS: Tree = {"engine": {"speculative": {"kind": "draft", "path": "{root}/second"}}}
RAY: Tree = {"launch": {"kind": "ray", "processes": 2}}
STAFF: Tree = {"launch": {"kind": "ray", "processes": 2, "ray": {"engines": 1, "references": 1}}}
FAR: Tree = {"algorithm": {"preset": None, "old_logprobs": "rollout"}}

OVER_HTTP: Tree = {"engine": {"kind": "http", "url": "http://engine"}}
OVER_SGLANG: Tree = {
    "engine": {"kind": "sglang", "url": "http://engine", "weights_dir": "{tmp}/weights"}
}

ADAPTIVE: Tree = {
    "reference": "{root}/second",
    "algorithm": {
        "preset": "ppo",
        "kl": {"controller": "adaptive", "horizon": 100, "target": 0.001},
    },
    "train": {"steps": 2},
}


def algorithm(**tree: Any) -> Tree:
    return {"algorithm": {"preset": None, **tree}}


SAMPLING: dict[str, tuple[Any, Tree]] = {
    "temperature": (0.5, {}),
    "first_token_temperature": (30.0, {}),
    "top_p": (0.2, {}),
    "top_k": (2, {}),
    "min_p": (0.9, {}),
    "repetition_penalty": (3.0, {"max_new_tokens": 12}),
    "max_new_tokens": (3, {}),
    "min_new_tokens": (4, {"stop_token_ids": list(range(4, 60))}),
    "stop": (
        ["a", "b", "c", "d", "e", "1", "2", "3", "4", " ", "X", "Y", "Z", "k", "q"],
        {"max_new_tokens": 12},
    ),
    "stop_token_ids": (list(range(4, 60)), {}),
}
CONSTRAINT: dict[str, Any] = {
    "json_schema": {"type": "boolean"},
    "regex": "[0-9]{2}",
    "choices": ["12", "34"],
    "column": "form",
}
OPTIMIZER: dict[str, tuple[Any, Tree]] = {
    "lr": (0.005, {}),
    "lr_of": ({"language": 0.005}, {}),
    "betas": ([0.5, 0.6], {}),
    "eps": (0.1, {}),
    "weight_decay": (0.5, {}),
    "schedule": ("linear", {}),
    "warmup_steps": (2, {}),
    "warmup_ratio": (0.5, {}),
    "min_lr_ratio": (0.9, {"schedule": "linear"}),
    "max_grad_norm": (1e-4, {}),
}
TOLD: Tree = {"sources": ["{root}/told.jsonl"], "apply_chat_template": True}
DATA: dict[str, tuple[Any, str, Tree]] = {
    "sources.path": (OTHER, "prompts", {}),
    "sources.name": ("mine", "prompts", {"sources": [{"path": OTHER}]}),
    "sources.subset": ("main", "asked_of_datasets", {"sources": ["hub-name"]}),
    "sources.split": ("test", "prompts", {"sources": ["{root}/split"]}),
    "sources.reader": ("{root}/rows.py:reader", "prompts", {}),
    "sources.options": ({"count": 3}, "prompts", {"sources": ["{root}/rows.py:source"]}),
    "sources.reader_options": (
        {"sign": "-"},
        "prompts",
        {"sources": [{"path": ROWS, "reader": "{root}/rows.py:reader"}]},
    ),
    "sources.weight": (9.0, "prompts", {"sources": [ROWS, OTHER], "blend": "sample"}),
    "sources.limit": (2, "prompts", {}),
    "columns.prompt": ("question", "prompts", {}),
    "columns.response": ("solution", "lessons", {}),
    "columns.label": ("solution", "prompts", {}),
    "columns.reference": ("question", "prompts", {}),
    "columns.data_source": ("kind", "prompts", {}),
    "columns.id": ("key", "prompts", {}),
    "columns.tools": ("gear", "prompts", {"apply_chat_template": True}),
    "columns.system": ("advice", "prompts", TOLD),
    "columns.history": ("past", "prompts", TOLD),
    "apply_chat_template": (True, "prompts", {"apply_chat_template": False}),
    "chat_template_options": ({"shout": True}, "prompts", {"apply_chat_template": True}),
    "template": ("Q: {prompt}", "prompts", {}),
    "prefill": (
        True,
        "prompts",
        {"sources": ["{root}/begun.jsonl"], "apply_chat_template": True},
    ),
    "system": ("Be brief.", "prompts", {"apply_chat_template": True}),
    "special_tokens": ("control", "prompts", {"sources": ["{root}/marked.jsonl"]}),
    "blend": (
        "sample_all",
        "prompts",
        {"sources": [{"path": ROWS}, {"path": OTHER}], "shuffle": False},
    ),
    "shuffle": (False, "prompts", {"sources": [ROWS, OTHER], "blend": "sample", "shuffle": True}),
    "max_prompt_tokens": (
        4,
        "prompts",
        {"overlong_prompts": "truncate", "apply_chat_template": False},
    ),
    "overlong_prompts": (
        "truncate",
        "prompts",
        {"max_prompt_tokens": 6, "apply_chat_template": False},
    ),
    "bad_rows": ("skip", "prompts", {"sources": ["{root}/broken.jsonl"]}),
    "turns": ("last", "lessons", {"sources": ["{root}/talks.jsonl"], "apply_chat_template": True}),
    "token_cache": ("{tmp}/there", "stored", {"token_cache": None, "token_cache_min_mb": 0.0}),
    "token_cache_min_mb": (
        0.0,
        "stored",
        {"token_cache": "{tmp}/there", "token_cache_min_mb": 1.0},
    ),
}

PAIRS: Tree = {"sources": ["{root}/pairs.jsonl"], "judgement": {"form": "pair"}}
PATTERN: Tree = {**PAIRS, "judgement": {"verdict": "regex", "pattern": "([AB])"}}
RATED: Tree = {"sources": ["{root}/rated.jsonl"], "judgement": {"form": "rating"}}
MARKED: Tree = {
    "sources": ["{root}/rated.jsonl"],
    "judgement": {"form": "rubric", "rubric": [{"text": "is long", "weight": 1.0}]},
}
QUESTION: dict[str, tuple[Any, Tree]] = {
    "form": ("best", PAIRS),
    "ties": (True, PAIRS),
    "scale": ([0, 10], RATED),
    "rubric.text": ("is short", MARKED),
    "rubric.weight": (2.0, MARKED),
    "criteria": ("beauty", PAIRS),
    "template": ("{root}/own.jinja", PAIRS),
    "explain": (False, PAIRS),
    "verdict": ("boxed", PAIRS),
    "pattern": ("([AB])!", PATTERN),
}
"""Settings of a question to a judge: another value, and the rows and the question that it needs."""
for _name, (_value, _tree) in QUESTION.items():
    DATA[f"judgement.{_name}"] = (_value, "prompts", _tree)
DATA["judgement.order"] = ("given", "prompts", PAIRS)
DATA["judgement.rate_best"] = (
    True,
    "prompts",
    {"sources": ["{root}/pairs.jsonl"], "judgement": {"form": "rating"}},
)
DATA["judgement.column"] = ("notes", "prompts", PAIRS)


def judge(**tree: Any) -> Tree:
    return {"reward": {"judges": [{"path": "{root}/policy", "max_new_tokens": 3, **tree}]}}


SOFT = judge(read="probability")
VOTES = judge(
    form="rating", scale=[0, 9], verdict="regex", pattern="([0-9])", samples=32, max_new_tokens=16
)
ASKED: Tree = {"reward": {"judges": [{"url": "http://judge", "read": "probability"}]}}
RATED_OVER_HTTP: Tree = {
    "reward": {"judges": [{**ASKED["reward"]["judges"][0], "form": "rating", "scale": [0, 9]}]}
}
JUDGES: dict[str, Flip] = {
    "reward.judges.url": Flip("http://127.0.0.1:9", "asked_over_http", ASKED, refused=True),
    "reward.judges.served_model": Flip("other", "asked_over_http", ASKED, refused=True),
    "reward.judges.digest": Flip("sha256:000000000000", "asked_over_http", ASKED, refused=True),
    "reward.judges.api_key_env": Flip("HOME", "asked_over_http", ASKED),
    "reward.judges.deadline": Flip(10.0, "asked_over_http", ASKED),
    "reward.judges.max_in_flight": Flip(1, "asked_over_http", ASKED),
    "reward.judges.top_logprobs": Flip(1, "asked_over_http", RATED_OVER_HTTP),
    "reward.judges.offload": Flip(True, "verdicts", SOFT),
    **{
        f"reward.judges.{name}": Flip(value, "verdicts", judge(**tree["judgement"]))
        for name, (value, tree) in QUESTION.items()
    },
    "reward.judges.path": Flip("{root}/second", "verdicts", SOFT),
    "reward.judges.weight": Flip(0.5, "verdicts", SOFT),
    "reward.judges.name": Flip("critic", "verdicts", SOFT),
    "reward.judges.against": Flip("reference", "verdicts", SOFT),
    "reward.judges.both_orders": Flip(False, "verdicts", SOFT),
    "reward.judges.read": Flip("probability", "verdicts", judge()),
    "reward.judges.samples": Flip(2, "verdicts", judge()),
    "reward.judges.vote": Flip("majority", "verdicts", VOTES),
    "reward.judges.max_new_tokens": Flip(2, "verdicts", judge()),
    "reward.judges.temperature": Flip(0.1, "verdicts", judge()),
    "reward.judges.max_tokens_per_micro_batch": Flip(1, "verdicts", SOFT),
}

EYE: Tree = {"model": {"path": "{root}/reader"}}
EAR: Tree = {"model": {"path": "{root}/listener"}}
PICTURES, CLIPS, SOUNDS, LINKS = (
    {"sources": [f"{{root}}/{name}.jsonl"]} for name in ("pictures", "clips", "sounds", "links")
)
REFUSED = (
    *(
        "media.max_source_pixels",
        "media.max_seconds",
        "media.resample",
        "media.offline",
        "media.max_decoded_mb",
        "media.max_row_mb",
    ),
    *("media.allow.roots", "media.allow.hosts"),
)
MEDIA: dict[str, tuple[Any, Tree, Tree]] = {
    "columns.images": ("other", EYE, PICTURES),
    "columns.videos": ("other", EYE, CLIPS),
    "columns.audios": ("other", EAR, SOUNDS),
    "media.root": ("{root}/split", EYE, PICTURES),
    "media.downloads": ("{tmp}/others", EYE, {**LINKS, "media": {"downloads": "{tmp}/those"}}),
    "media.offline": (True, EYE, {**LINKS, "media": {"downloads": "{tmp}/those"}}),
    "media.timeout": (3.0, EYE, {**LINKS, "media": {"downloads": "{tmp}/those"}}),
    "media.min_pixels": (1024, EYE, PICTURES),
    "media.max_pixels": (128, EYE, PICTURES),
    "media.max_source_pixels": (10, EYE, PICTURES),
    "media.fps": (0.5, EYE, {**CLIPS, "media": {"min_frames": 2}}),
    "media.max_frames": (2, EYE, CLIPS),
    "media.min_frames": (2, EYE, {**CLIPS, "media": {"fps": 0.5}}),
    "media.marks": (
        False,
        EYE,
        {**PICTURES, "template": "{prompt}<image>", "apply_chat_template": True},
    ),
    "media.max_seconds": (0.1, EAR, SOUNDS),
    "media.resample": (False, EAR, SOUNDS),
    "media.workers": (2, EYE, PICTURES),
    "media.allow.roots": (["{tmp}/nothing"], EYE, PICTURES),
    "media.allow.hosts": (["example.org"], EYE, {**LINKS, "media": {"downloads": "{tmp}/those"}}),
    "media.max_file_mb": (5.0, EYE, {**LINKS, "media": {"downloads": "{tmp}/those"}}),
    "media.max_decoded_mb": (1e-6, EYE, PICTURES),
    "media.max_row_mb": (1e-6, EYE, PICTURES),
    "media.cache_mb": (0, EYE, {**PICTURES, "media": {"workers": 0}}),
}

PRIME: Tree = {
    "algorithm": {"preset": "prime"},
    "prm": {"optimizer": {"lr": 0.01}, "threshold": 0.6},
    "train": {"steps": 3},
    "rollout": {"group_size": 4},
}
SELECT: Tree = {"rollout": {"group_size": 4, "select": {"name": "top_k", "options": {"keep": 2}}}}
CURRICULUM: Tree = {
    "rollout": {"curriculum": {"name": "priority", "threshold": 0.6, "options": {}}},
    "train": {"steps": 6},
}
PTX: Tree = {"ptx": {"coef": 0.1, "batch_size": 2, "data": {"sources": [ROWS]}}}


LESSONS = ("columns.response", "turns")
COLUMNS = ("columns.label", "columns.reference", "columns.data_source", "columns.id")
PROMPTS = (*COLUMNS, "sources.name", "max_prompt_tokens", "overlong_prompts")
UNSEEN = ("judgement.pattern", "judgement.rubric.weight", "judgement.rate_best")
INERT = {
    **{f"{branch}.{key}": f"ptx.data.{key}" for branch in ("data", "eval.data") for key in LESSONS},
    **{f"ptx.data.{key}": f"data.{key}" for key in (*PROMPTS, *UNSEEN)},
}
"""Settings that a class shared by branches has, and that only the other branch reads: what prompts are made of is not what
conversations are made of."""
QUESTIONS, TALKS = {"prompts": "questions"}, {"prompts": "lessons"}
ALONE: dict[str, Tree] = {"asked_of_datasets": {"data": {"sources": []}}}
ERRORS = ("bad_rows", "sources.subset")


def nested(branch: str, tree: Tree) -> Tree:
    """``tree`` under the dotted ``branch``."""
    for part in reversed(branch.split(".")):
        tree = {part: tree}
    return tree


def under(branch: str, tree: Tree, context: Tree) -> Tree:
    """``context`` with ``tree`` in its ``branch``."""
    return deep_merge(context, nested(branch, tree))


FLIPS: dict[str, Flip] = {
    "run.name": Flip("other", "run"),
    "run.dir": Flip("{tmp}/elsewhere", "run"),
    "run.seed": Flip(1, "run"),
    "run.resume": Flip("never", "go_on", refused=True),
    "run.overwrite": Flip(True, "run_again", refused=True),
    "run.threads": Flip(2, "command", {"run": {"threads": 1}}),
    "run.progress": Flip(False, "command"),
    "model.path": Flip("{root}/second", "run"),
    "model.base": Flip("{root}/second", "run", {"model": {"path": "{root}/adapters"}}),
    "model.tokenizer": Flip("{root}/backwards", "prompts"),
    "model.chat_template": Flip(
        "{% for m in messages %}{{ m['content'] }}!{% endfor %}",
        "prompts",
        {"data": {"apply_chat_template": True}},
    ),
    "model.revision": Flip("v2", "asked_of_the_hub"),
    "model.dtype": Flip("bfloat16", "loaded"),
    "model.attention": Flip("eager", "loaded", {"model": {"layout": "padded"}}),
    "model.layout": Flip("padded", "loaded"),
    "model.check_layout": Flip(False, "run"),
    "model.unproved_family": Flip(
        "allow", "loaded", {"model": {"path": "{root}/unproved"}}, refused=True
    ),
    "model.lora.rank": Flip(2, "loaded", ADAPTERS),
    "model.lora.alpha": Flip(16.0, "loaded", ADAPTERS),
    "model.lora.dropout": Flip(0.5, "loaded", ADAPTERS),
    "model.lora.targets": Flip(["q_proj"], "loaded", ADAPTERS),
    "model.lora.parts": Flip(["language", "tower"], "loaded", READER),
    "model.lora.dora": Flip(True, "loaded", ADAPTERS),
    "model.lora.rslora": Flip(True, "loaded", ADAPTERS),
    "model.lora.modules_to_save": Flip(["norm"], "loaded", ADAPTERS),
    "model.load_in_4bit": Flip(True, "loaded", refused=True),
    "model.gradient_checkpointing": Flip(True, "loaded"),
    "model.dropout": Flip(True, "run", {"model": {"path": "{root}/dropout"}}),
    "model.logits_mb": Flip(1, "loaded"),
    "model.trust_remote_code": Flip(True, "asked_of_the_hub"),
    "model.replay_routes": Flip(True, "run", {"model": {"path": "{root}/experts"}}),
    "model.router_aux_loss_coef": Flip(0.5, "run", {"model": {"path": "{root}/experts"}}),
    "model.freeze": Flip(["model.embed_tokens"], "loaded"),
    "reference": Flip("{root}/second", "run"),
    "teacher.path": Flip("{root}/policy", "run", TEACHER),
    "teacher.revision": Flip("v2", "asked_of_the_hub", TEACHER),
    "teacher.dtype": Flip("bfloat16", "run", TEACHER),
    "teacher.load_in_4bit": Flip(True, "run", TEACHER, refused=True),
    "teacher.trust_remote_code": Flip(True, "asked_of_the_hub", TEACHER),
    "critic.path": Flip("{root}/second", "run", CRITIC),
    "critic.warmup_steps": Flip(1, "run", CRITIC),
    **{
        f"critic.optimizer.{k}": Flip(v, "run", under("critic.optimizer", c, CRITIC))
        for k, (v, c) in OPTIMIZER.items()
    },
    "cost_critic.path": Flip("{root}/second", "run", COST_CRITIC),
    **{
        f"cost_critic.optimizer.{k}": Flip(v, "run", under("cost_critic.optimizer", c, COST_CRITIC))
        for k, (v, c) in OPTIMIZER.items()
    },
    **{
        f"optimizer.{k}": Flip(v, "run", under("optimizer", c, LONG))
        for k, (v, c) in OPTIMIZER.items()
    },
    "prm.path": Flip("{root}/second", "run", PRIME),
    "prm.beta": Flip(0.5, "run", PRIME),
    "prm.threshold": Flip(0.3, "run", PRIME),
    "prm.forward": Flip("double", "run", PRIME),
    **{
        f"prm.optimizer.{k}": Flip(v, "run", under("prm.optimizer", c, PRIME))
        for k, (v, c) in OPTIMIZER.items()
    },
    "ptx.coef": Flip(0.5, "run", PTX),
    "ptx.batch_size": Flip(3, "run", PTX),
    "ptx.max_tokens": Flip(26, "lessons", PTX),
    **{
        f"ptx.data.{k}": Flip(
            v,
            TALKS.get(probe, probe),
            {**under("ptx.data", c, PTX), **ALONE.get(probe, {})},
            k in ERRORS,
        )
        for k, (v, probe, c) in DATA.items()
        if k not in (*PROMPTS, *UNSEEN)
    },
    "ptx.data.columns.weight": Flip("level", "lessons", PTX),
    "ptx.data.loss_on": Flip("all", "lessons", PTX),
    **{
        f"data.{k}": Flip(v, probe, nested("data", c), k in ERRORS)
        for k, (v, probe, c) in DATA.items()
        if k not in LESSONS
    },
    **{
        f"eval.data.{k}": Flip(
            v,
            QUESTIONS.get(probe, probe),
            {**under("eval.data", c, HELD), **ALONE.get(probe, {})},
            k in ERRORS,
        )
        for k, (v, probe, c) in DATA.items()
        if k not in LESSONS
    },
    **{
        f"{branch}.{k}": Flip(v, "decoded", under(branch, c, {**model, **around}), k in REFUSED)
        for branch, around in (("data", {}), ("eval.data", HELD), ("ptx.data", PTX))
        for k, (v, model, c) in MEDIA.items()
    },
    "eval.every": Flip(1, "run", {**HELD, **LONG}),
    "eval.at_start": Flip(False, "run", HELD),
    "eval.limit": Flip(2, "run", HELD),
    "eval.samples": Flip(2, "run", HELD),
    **{
        f"eval.sampling.{k}": Flip(
            v, "run", under("eval.sampling", {"temperature": 1.0, "max_new_tokens": 5, **c}, HELD)
        )
        for k, (v, c) in SAMPLING.items()
    },
    **{f"eval.sampling.constraint.{k}": Flip(v, "run", HELD) for k, v in CONSTRAINT.items()},
    "eval.threshold": Flip(0.0, "run", HELD),
    "eval.stop_at": Flip(0.0, "run", deep_merge(HELD, {"eval": {"every": 1}, **LONG})),
    **{f"sampling.{k}": Flip(v, "run", nested("sampling", c)) for k, (v, c) in SAMPLING.items()},
    **{f"sampling.constraint.{k}": Flip(v, "run", refused=True) for k, v in CONSTRAINT.items()},
    "rollout.prompts_per_step": Flip(3, "run"),
    "rollout.group_size": Flip(3, "run"),
    "rollout.max_rounds": Flip(
        2, "run", {"algorithm": {"filters": [{"name": "reward_bounds", "options": {"low": 9.0}}]}}
    ),
    "rollout.oversample": Flip(2.0, "run"),
    "rollout.carry_over": Flip(
        True,
        "run",
        {**LONG, "rollout": {"oversample": 3.0}, "algorithm": {"importance_sampling": ["tis"]}},
    ),
    "rollout.select.name": Flip("random", "run", SELECT),
    "rollout.select.options": Flip({"keep": 3}, "run", SELECT),
    "rollout.curriculum.name": Flip("failures", "run", CURRICULUM),
    "rollout.curriculum.threshold": Flip(0.1, "run", CURRICULUM),
    "rollout.curriculum.momentum": Flip(0.0, "run", CURRICULUM),
    "rollout.curriculum.options": Flip({"floor": 0.9}, "run", CURRICULUM),
    "rollout.staleness": Flip(1, "run", {**FAR, **LONG}),
    "rollout.partial": Flip(True, "run", {**FAR, **LONG, "rollout": {"oversample": 3.0}}),
    "rollout.max_tokens_per_step": Flip(
        2, "run", {**FAR, **LONG, "rollout": {"partial": True, "max_tokens_per_step": 3}}
    ),
    "engine.kind": Flip("vllm", "run", ADAPTERS, refused=True),
    "engine.options": Flip(
        {"seed": 7}, "run", {"engine": {"kind": f"{ROOT}/examples/custom_engine.py:KIND"}}
    ),
    "engine.max_cache_tokens": Flip(64, "run"),
    "engine.max_num_seqs": Flip(2, "run"),
    "engine.check_logprobs": Flip(False, "run"),
    "engine.quantization": Flip("fp8_per_channel", "run", refused=True),
    "engine.tensor_parallel": Flip(2, "run", refused=True),
    "engine.gpu_memory_utilization": Flip(0.5, "run", refused=True),
    "engine.compile": Flip(True, "run", COPIES, refused=True),
    "engine.speculative.kind": Flip("draft", "run", COPIES, refused=True),
    "engine.speculative.tokens": Flip(1, "run", COPIES),
    "engine.speculative.longest_match": Flip(1, "run", COPIES),
    "engine.speculative.path": Flip("{root}/policy", "run", DRAFTS),
    "engine.url": Flip("http://127.0.0.1:9", "sampled_from_a_server", OVER_HTTP, refused=True),
    "engine.served_model": Flip("other", "sampled_from_a_server", OVER_HTTP, refused=True),
    "engine.digest": Flip("sha256:000000000000", "sampled_from_a_server", OVER_HTTP, refused=True),
    "engine.api_key_env": Flip("HOME", "sampled_from_a_server", OVER_HTTP),
    "engine.timeout": Flip(5.0, "sampled_from_a_server", OVER_HTTP),
    "engine.deadline": Flip(0.05, "sampled_from_a_server", OVER_HTTP, refused=True),
    "engine.weights_dir": Flip("{tmp}/other", "sampled_from_a_server", OVER_SGLANG),
    "engine.server_options": Flip(
        {"attention-backend": "fa3"}, "options_of_a_server", {"engine": {"kind": "sglang"}}
    ),
    "reward.terms.function": Flip("{root}/reward.py:half", "run", BOTH),
    "reward.terms.weight": Flip(0.5, "run", BOTH),
    "reward.terms.name": Flip("sum", "run", BOTH),
    "reward.terms.options": Flip({"modulus": 3}, "run", BOTH),
    "reward.per_source.function": Flip("{root}/reward.py:length", "run", WIDE),
    "reward.per_source.weight": Flip(0.5, "run", WIDE),
    "reward.per_source.name": Flip("sum", "run", WIDE),
    "reward.per_source.options": Flip({"modulus": 3}, "run", WIDE),
    "reward.models.path": Flip("{root}/strict", "judged", JUDGE),
    "reward.models.url": Flip("http://127.0.0.1:9", "served", SERVED, refused=True),
    "reward.models.protocol": Flip("openrlhf", "served", SERVED, refused=True),
    "reward.models.digest": Flip("sha256:000000000000", "served", SERVED, refused=True),
    "reward.models.token_file": Flip("{root}/reward.py", "served", SERVED),
    "reward.models.deadline": Flip(10.0, "served", SERVED),
    "reward.models.max_in_flight": Flip(1, "served", SERVED),
    "reward.models.weight": Flip(0.5, "judged", JUDGE),
    "reward.models.name": Flip("sum", "judged", JUDGE),
    "reward.models.head": Flip("short", "judged", JUDGE),
    "reward.models.max_tokens_per_micro_batch": Flip(1, "judged", JUDGE),
    "reward.models.aggregate": Flip("mean", "judged", STEPS),
    "reward.models.separator": Flip(" ", "judged", STEPS),
    "reward.models.sources": Flip(["other"], "judged", JUDGE),
    "reward.models.reencode": Flip(True, "judged", JUDGE),
    "reward.models.offload": Flip(True, "judged", JUDGE),
    "reward.success": Flip(
        "length", "run", deep_merge(HELD, deep_merge(BOTH, {"reward": {"success": "digits"}}))
    ),
    "reward.gates": Flip({"strict": "good"}, "judged", {"reward": {"models": TWO}}),
    "reward.gate_threshold": Flip(-1e6, "judged", GATED),
    "reward.combine": Flip("worst", "judged", {"reward": {"models": TWO}}),
    **JUDGES,
    "reward.workers": Flip(2, "workers"),
    "reward.timeout": Flip(300.0, "run", SLOW),
    "reward.memory_mb": Flip(64, "run", {"reward": {"terms": ["{root}/reward.py:large"]}}),
    "train.steps": Flip(2, "run"),
    "train.epochs": Flip(
        2.0, "run", {"train": {"steps": None}, "rollout": {"prompts_per_step": 8}}
    ),
    "train.ppo_epochs": Flip(2, "run"),
    "train.num_mini_batches": Flip(2, "run"),
    "train.max_tokens_per_micro_batch": Flip(16, "run"),
    "strategy.kind": Flip("fsdp2", "run", refused=True),
    "strategy.device": Flip("cuda:77", "run", refused=True),
    "strategy.hsdp_shard_size": Flip(2, "run", refused=True),
    "strategy.reshard_after_forward": Flip(False, "run", refused=True),
    "strategy.cpu_offload": Flip(True, "run", refused=True),
    "strategy.offload_activations": Flip(True, "run"),
    "strategy.offload_during_generation": Flip(True, "run", LONG),
    "strategy.zero_stage": Flip(3, "run", refused=True),
    "strategy.deepspeed": Flip({"steps_per_print": 1}, "run", refused=True),
    "strategy.tensor_parallel": Flip(2, "run", refused=True),
    "strategy.sequence_parallel": Flip(2, "run", refused=True),
    "strategy.timeout_minutes": Flip(0.02, "side_by_side", {"launch": {"processes": 2}}),
    "launch.processes": Flip(3, "side_by_side", {"launch": {"processes": 2}}),
    "launch.kind": Flip("ray", "on_ray"),
    "launch.ray.address": Flip("auto", "on_ray", RAY),
    "launch.ray.cpus": Flip(0.5, "on_ray", RAY),
    "launch.ray.devices": Flip(0.5, "on_ray", RAY),
    "launch.ray.placement": Flip("SPREAD", "on_ray", RAY),
    "launch.ray.placement_timeout_minutes": Flip(0.5, "on_ray", RAY),
    "launch.ray.restarts": Flip(1, "on_ray", RAY),
    "launch.ray.environment": Flip({"NAME": "value"}, "on_ray", RAY),
    "launch.ray.engines": Flip(2, "on_ray", RAY),
    "launch.ray.scorers": Flip(2, "on_ray", RAY),
    "launch.ray.references": Flip(2, "on_ray", RAY),
    "launch.ray.teachers": Flip(2, "on_ray", RAY),
    "launch.ray.reward_models": Flip(2, "on_ray", RAY),
    "launch.ray.worker_cpus": Flip(0.5, "on_ray", STAFF),
    "launch.ray.engine_devices": Flip(0.5, "on_ray", STAFF),
    "launch.ray.model_devices": Flip(0.5, "on_ray", STAFF),
    "launch.ray.weights": Flip("shared", "on_ray", STAFF),
    "launch.ray.bucket_mb": Flip(1, "on_ray", STAFF),
    "launch.ray.call_timeout_minutes": Flip(1, "on_ray", STAFF),
    "checkpoint.every": Flip(1, "run", LONG),
    "checkpoint.every_minutes": Flip(1e-9, "run", LONG),
    "checkpoint.keep": Flip(1, "run", {**LONG, "checkpoint": {"every": 1}}),
    "checkpoint.best": Flip(
        "-reward/mean", "run", {"train": {"steps": 5}, "checkpoint": {"every": 1, "keep": 1}}
    ),
    "hub.repo": Flip("me/it", "run", refused=True),
    "hub.push_every": Flip(1, "run", refused=True),
    "hub.private": Flip(True, "run", refused=True),
    "log.tensorboard": Flip(True, "run"),
    "log.wandb": Flip("project", "run", refused=True),
    "log.mlflow": Flip("project", "run", refused=True),
    "log.trackio": Flip("project", "run", refused=True),
    "log.swanlab": Flip("project", "run", refused=True),
    "log.rollouts_every": Flip(0, "run"),
    "log.entropy": Flip(False, "run"),
    "log.repetition": Flip(True, "run"),
    "log.batches_every": Flip(1, "run"),
    "log.samples": Flip(1, "command"),
    "log.peak_tflops": Flip(1.0, "run"),
    "algorithm.preset": Flip("dr_grpo", "objective"),
    "algorithm.advantage.name": Flip("rloo", "objective"),
    "algorithm.advantage.gamma": Flip(0.5, "objective", PENALTY),
    "algorithm.advantage.gae_lambda": Flip(0.5, "objective", PENALTY),
    "algorithm.advantage.bootstrap_truncated": Flip(True, "run", CRITIC),
    "algorithm.advantage.eps": Flip(0.1, "objective"),
    "algorithm.advantage.normalize": Flip("group", "objective"),
    "algorithm.advantage.clip": Flip(0.1, "objective"),
    "algorithm.advantage.options": Flip(
        {"alpha": 0.5}, "objective", {"algorithm": {"preset": "vapo"}}
    ),
    "algorithm.loss.name": Flip("reinforce", "objective"),
    "algorithm.loss.ratio": Flip("sequence", "objective"),
    "algorithm.loss.clip_low": Flip(0.01, "objective"),
    "algorithm.loss.clip_high": Flip(0.01, "objective"),
    "algorithm.loss.dual_clip": Flip(1.1, "objective"),
    "algorithm.loss.ratio_cap": Flip(1.3, "objective"),
    "algorithm.loss.options": Flip(
        {"tau_pos": 5.0}, "objective", {"algorithm": {"preset": "sapo"}}
    ),
    "algorithm.old_logprobs": Flip(
        "rollout", "run", {"train": {"ppo_epochs": 2}, "model": {"dtype": "bfloat16"}}
    ),
    "algorithm.importance_sampling.name": Flip(
        "icepop", "objective", algorithm(importance_sampling=[{"name": "tis"}])
    ),
    "algorithm.importance_sampling.options": Flip(
        {"high": 0.5}, "objective", algorithm(importance_sampling=[{"name": "tis"}])
    ),
    "algorithm.token_masks.name": Flip(
        "kl_cov", "objective", algorithm(token_masks=[{"name": "high_entropy"}])
    ),
    "algorithm.token_masks.options": Flip(
        {"rho": 0.6}, "objective", algorithm(token_masks=[{"name": "high_entropy"}])
    ),
    "algorithm.aggregation": Flip("sequence_sum", "objective"),
    "algorithm.constant_length": Flip(3, "objective", algorithm(aggregation="constant")),
    "algorithm.kl.where": Flip("reward", "objective"),
    "algorithm.kl.estimator": Flip("k2", "objective"),
    "algorithm.kl.weighted": Flip(True, "objective"),
    "algorithm.kl.coef": Flip(0.5, "objective"),
    "algorithm.kl.controller": Flip(
        "adaptive", "objective", {"algorithm": {"kl": {"horizon": 10}}}
    ),
    "algorithm.kl.target": Flip(1e6, "run", ADAPTIVE),
    "algorithm.kl.horizon": Flip(
        10, "objective", {"algorithm": {"kl": {"controller": "adaptive"}}}
    ),
    "algorithm.kl.final": Flip(
        0.5, "objective", {"algorithm": {"kl": {"controller": "linear", "steps": 4}}}
    ),
    "algorithm.kl.steps": Flip(
        2, "objective", {"algorithm": {"kl": {"controller": "linear", "steps": 4}}}
    ),
    "algorithm.kl.refresh_every": Flip(1, "run", LONG),
    "algorithm.kl.refresh_decay": Flip(
        0.5, "run", {**LONG, "algorithm": {"kl": {"refresh_every": 1}}}
    ),
    "algorithm.distill.kind": Flip("reverse_kl", "run", TEACHER),
    "algorithm.distill.coef": Flip(0.5, "objective", TEACHER),
    "algorithm.distill.beta": Flip(0.9, "run", WHOLE),
    "algorithm.distill.temperature": Flip(2.0, "run", WHOLE),
    "algorithm.entropy.coef": Flip(0.1, "objective"),
    "algorithm.entropy.target": Flip(9.0, "objective"),
    "algorithm.entropy.rate": Flip(0.5, "objective", {"algorithm": {"entropy": {"target": 9.0}}}),
    "algorithm.policy_drift.coef": Flip(0.1, "objective"),
    "algorithm.policy_drift.estimator": Flip(
        "k2", "objective", {"algorithm": {"policy_drift": {"coef": 0.1}}}
    ),
    "algorithm.policy_drift.level": Flip(
        "response", "objective", {"algorithm": {"policy_drift": {"coef": 0.1}}}
    ),
    "algorithm.policy_drift.cap": Flip(
        0.1, "objective", {"algorithm": {"policy_drift": {"coef": 0.1}}}
    ),
    "algorithm.positive_nll.coef": Flip(0.1, "objective"),
    "algorithm.positive_nll.threshold": Flip(
        0.0, "objective", {"algorithm": {"positive_nll": {"coef": 0.1}}}
    ),
    "algorithm.value.clip": Flip(0.001, "run", {**CRITIC, "train": {"steps": 1, "ppo_epochs": 2}}),
    "algorithm.lagrangian.costs.name": Flip("other", "run", LIMITED),
    **{
        f"algorithm.lagrangian.{k}": Flip(v, "objective", LIMITED)
        for k, v in {
            "costs.threshold": 0.9,
            "init": 2.0,
            "lr": 0.5,
            "max": 1.0,
            "delay_steps": 2,
            "window": 7,
        }.items()
    },
    "algorithm.normalize.terms": Flip("batch", "objective"),
    "algorithm.normalize.rewards": Flip(
        "standard", "objective", {"algorithm": {"preset": "dr_grpo"}}
    ),
    "algorithm.normalize.values": Flip(True, "run", CRITIC),
    "algorithm.normalize.eps": Flip(
        0.5, "objective", {"algorithm": {"preset": "dr_grpo", "normalize": {"rewards": "standard"}}}
    ),
    "algorithm.shaping.name": Flip(
        "overlong", "objective", algorithm(shaping=[{"name": "reward_clip"}])
    ),
    "algorithm.shaping.options": Flip(
        {"high": 0.5}, "objective", algorithm(shaping=[{"name": "reward_clip"}])
    ),
    "algorithm.filters.name": Flip(
        "zero_variance",
        "run",
        {
            "rollout": {"max_rounds": 1},
            "reward": {"terms": ["{root}/reward.py:half"]},
            "algorithm": {"filters": [{"name": "reward_bounds"}]},
        },
    ),
    "algorithm.filters.options": Flip(
        {"low": 9.0},
        "run",
        {"rollout": {"max_rounds": 1}, "algorithm": {"filters": [{"name": "reward_bounds"}]}},
    ),
}
