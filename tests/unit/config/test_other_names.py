"""Names of settings in other frameworks: each has an answer, and no answer is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from lightrft.config import verbs
from lightrft.config.base import Settings, build, has_setting, load_settings
from lightrft.config.misread_values import leaves
from lightrft.config.other_names.lookup import OLD_NAMES, answer
from lightrft.config.other_names.rows import Converted, ValueTable
from lightrft.config.other_names.table import ROWS, rows_of
from lightrft.utils.errors import ConfigError
from lightrft.verbs import all_settings

LISTS = Path(__file__).parent / "option_names"
FRAMEWORKS = sorted(path.stem for path in LISTS.glob("*.txt"))
VERBS = all_settings()


@cache
def option_names(framework: str) -> tuple[str, ...]:
    """All option names of a framework, from ``option_names``."""
    text = (LISTS / f"{framework}.txt").read_text(encoding="utf-8").replace("\n  ", " ")
    names = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        sections, _, options = line.rpartition(":")
        for section in sections.split(","):
            names += [f"{section}.{option}".lstrip(".") for option in options.split()]
    return tuple(names)


def said(verb: str, name: str, value: object = "x") -> str:
    return answer(name, value, partial(has_setting, VERBS[verb]), lambda name: "another verb")


def message(verb: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_settings(VERBS[verb], overrides=overrides)
    return str(refused.value)


def test_the_lists_are_read_whole() -> None:
    assert FRAMEWORKS == ["lightrft", "llamafactory", "ms-swift", "openrlhf", "trl", "verl"]
    assert {name: len(option_names(name)) for name in FRAMEWORKS} == {
        "lightrft": 149,
        "llamafactory": 273,
        "ms-swift": 647,
        "openrlhf": 397,
        "trl": 458,
        "verl": 1429,
    }
    assert "actor_rollout_ref.actor.optim.lr" in option_names("verl")
    assert "learning_rate" in option_names("trl")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_option_of_every_framework_is_known_in_every_verb(framework: str, verb: str) -> None:
    """It is a setting of the verb, or has an answer that names one, or says why there is none."""
    for name in option_names(framework):
        if has_setting(VERBS[verb], name):
            continue
        text = said(verb, name)
        assert text.startswith((f"{name} is ", f"{name} has no counterpart here: ")), (name, text)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_option_of_another_framework_is_never_called_unknown(framework: str) -> None:
    for name in option_names(framework)[::7]:
        if not has_setting(verbs.RLConfig, name):
            assert "unknown setting" not in message("rl", f"{name}=1"), name


def settings_named(text: str) -> list[str]:
    """The settings that the answer ``text`` translates a name to."""
    return re.findall(r"\bis ([\w.]+) here|[(,] ?([\w.]+)=", text) and [
        one or other for one, other in re.findall(r"\bis ([\w.]+) here|[(,] ?([\w.]+)=", text)
    ]


@pytest.mark.parametrize("verb", ["rl", "sft", "dpo", "rm", "distill", "generate", "serve"])
def test_an_answer_names_settings_of_the_very_verb(verb: str) -> None:
    names = {name for framework in FRAMEWORKS for name in option_names(framework)}
    found = 0
    for name in sorted(names):
        for value in (True, "x"):
            for setting in settings_named(said(verb, name, value).partition(": ")[0]):
                assert has_setting(VERBS[verb], setting), (name, value, setting)
                found += 1
    assert found > 20


def test_every_setting_of_the_table_exists_in_a_verb() -> None:
    targets = {here for row in ROWS for here in row.here.split()}
    missing = [one for one in targets if not any(has_setting(cls, one) for cls in VERBS.values())]
    # Process data alone has the separator and the placeholder.
    assert sorted(missing) == []


def test_every_row_says_what_changes_or_why_there_is_no_counterpart() -> None:
    for row in ROWS:
        assert row.here or row.note, row.names
        assert not row.note.endswith("."), row.note


@pytest.mark.parametrize("verb", ["rl", "sft", "dpo", "rm"])
def test_no_name_has_two_answers_in_one_verb(verb: str) -> None:
    for name in {name for framework in FRAMEWORKS for name in option_names(framework)}:
        text = said(verb, name)
        # Frameworks that mean different things by a name are named.
        assert len(re.findall(r" is [\w.]+ here", text)) <= 1 or re.search(
            r"\((TRL|verl|ms-swift|OpenRLHF)", text
        ), text


def test_a_name_of_ours_is_translated_only_where_another_verb_has_it() -> None:
    """A row for a setting of the verb would never be read."""
    for row in ROWS:
        for _, name in row.each_name():
            if "." in name and "*" not in name and has_setting(verbs.RLConfig, name):
                assert row.here.split()[0].split(".")[0] == name.split(".")[0], name


SECTIONS = sorted(name for name in verbs.RLConfig.model_fields if name != "reference")


@pytest.mark.parametrize("section", [*SECTIONS, "critic.optimizer", "eval.sampling", "nowhere"])
def test_the_ending_of_a_name_never_answers_for_another_section(section: str) -> None:
    """``critic.lr`` is no ``optimizer.lr``, and ``reward.temperature`` no ``sampling`` one."""
    for name in {name for framework in FRAMEWORKS for name in option_names(framework)}:
        whole = f"{section}.{name}"
        if "." in name or rows_of(whole) or has_setting(verbs.RLConfig, whole):
            continue
        text = said("rl", whole, 1)
        assert not text or text.startswith(f"{whole} is {section}."), text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("critic.optim.lr=1e-5", "critic.optim.lr is critic.optimizer.lr here"),
        ("actor.optim.lr=1e-5", "actor.optim.lr is optimizer.lr here"),
        ("critic.lr=1e-5", "critic.lr is critic.optimizer.lr here"),
        ("critic.learning_rate=1e-5", "critic.learning_rate is critic.optimizer.lr here"),
        ("critic.max_grad_norm=1", "critic.max_grad_norm is critic.optimizer.max_grad_norm here"),
        ("cost_critic.learning_rate=1", "is cost_critic.optimizer.lr here"),
        ("critic.model.path=x", "critic.model.path is critic.path here"),
        ("eval.temperature=1", "eval.temperature is eval.sampling.temperature here"),
        ("eval.max_new_tokens=9", "eval.max_new_tokens is eval.sampling.max_new_tokens here"),
        ("eval.steps=9", "eval.steps is eval.every here"),
        ("report_to=wandb", "report_to is log.wandb here (log.wandb=lightrft, "),
        ("report_to=tensorboard", "report_to is log.tensorboard here (log.tensorboard=true)"),
        ("log.trackers=[mlflow]", "log.trackers is log.mlflow here (log.mlflow=lightrft, "),
        ("report_to=mlflow", "report_to is log.mlflow here (log.mlflow=lightrft, "),
        ("report_to=[swanlab,trackio]", "report_to is log.swanlab here (log.swanlab=lightrft, "),
        ("use_swanlab=true", "use_swanlab is log.swanlab here"),
        ("report_to=clearml", "'clearml' is not supported"),
        ("rollout.max_turns=5", "rollout.max_turns has no counterpart here: episodes of several"),
        ("ppo_mini_batch_size=256", "a size in prompts there, and a count of optimizer steps here"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate is optimizer.lr here"),
        ("critic.optimizer.learning_rate=1", "is critic.optimizer.lr here"),
        ("eval.data.max_prompt_length=9", "is eval.data.max_prompt_tokens here"),
        ("eval.n=4", "eval.n is eval.samples here"),
        ("logger=[console,wandb]", "logger is log.wandb here (log.wandb=lightrft, "),
        ("algorithm.name=ppo", "algorithm.name is algorithm.preset here"),
        ("model.load_in_8bit=true", "has no counterpart here: weights are quantised by"),
        ("env=math", "env has no counterpart here: episodes of several"),
        ("algorithm=GRPO", "unknown preset 'GRPO'; did you mean 'grpo'?"),
        ("model.lora.r=8", "model.lora.r is model.lora.rank here"),
        ("actor_init_on_gpu=true", "actor_init_on_gpu has no counterpart here: fsdp2"),
        ("ref.lr=1", "unknown setting ref "),
        ("reward.temperature=1", "unknown setting reward.temperature "),
        ("foo.learning_rate=1", "unknown setting foo "),
        ("leraning_rate=1", "unknown setting leraning_rate "),
        ("actor_rollout_ref.rollout.temprature=1", "unknown setting actor_rollout_ref "),
        ("group_sise=8", "unknown setting group_sise"),
        ("prompts_per_step=8", "did you mean rollout.prompts_per_step?"),
        ("num_mini_batch=8", "unknown setting num_mini_batch"),
        ("rewards=math", "rewards is reward.terms here"),
        ("reward_model.overlong_buffer.len=4096", "overlong_buffer.len is algorithm.shaping here"),
        ("reward_model.overlong_buffer.log=true", "overlong_buffer.log is algorithm.shaping here"),
        ("fast_inference=true", "is engine.kind here (engine.kind=vllm)"),
    ],
)
def test_a_setting_that_does_not_exist_is_answered(given: str, expected: str) -> None:
    assert expected in message("rl", given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train.lr=1e-6", "; did you mean optimizer.lr or algorithm.lagrangian.lr?"),
        ("train.group_size=8", "; did you mean rollout.group_size?"),
        ("model.max_grad_norm=1", "; did you mean optimizer.max_grad_norm?"),
        ("train.output=x", "; known here: steps, "),
        ("data.label=x", "; did you mean data.columns.label?"),
        ("critic.betas=[0.9, 0.9]", "; did you mean critic.optimizer.betas or optimizer.betas?"),
        ("data.packing=true", "; packing is model.layout here"),
        ("train.learning_rate=1e-6", "; learning_rate is optimizer.lr here"),
        ("rollout.temperature=1", "rollout.temperature is sampling.temperature here"),
    ],
)
def test_a_setting_in_a_wrong_section_is_named_where_it_is(given: str, expected: str) -> None:
    assert expected in message("rl", given)


@pytest.mark.parametrize(
    ("verb", "given", "expected"),
    [
        ("sft", "per_device_train_batch_size=8", "batch_size here: rows of one device"),
        ("rl", "per_device_train_batch_size=8", "rollout.prompts_per_step here: responses of one"),
        ("sft", "gradient_accumulation_steps=4", "is batch_size here: a factor there"),
        ("sft", "micro_train_batch_size=4", "a bound in tokens of a forward pass on one device"),
        ("sft", "num_generations=4", "rollout.group_size in lightrft rl"),
        ("dpo", "num_generations=4", "num_generations is online.group_size here"),
        ("generate", "num_generations=4", "num_generations is samples here"),
        ("dpo", "beta=0.1", "beta is preference.beta here"),
        ("distill", "beta=0.1", "beta is distill.beta here"),
        ("rl", "beta=0.1", "beta is algorithm.kl.coef here"),
        ("dpo", "loss_type=exo_pair", "(preference.losses=[exo])"),
        ("dpo", "loss=ipo", "loss is preference.losses here"),
        ("rm", "loss=log_exp", "loss is reward_model.losses here"),
        (
            "rm",
            "center_rewards_coefficient=0.01",
            "is reward_model.losses here: the weight of a further loss",
        ),
        ("export", "model=runs/a", "model is path here"),
        ("merge", "model=a", "model is models here"),
        ("eval", "n=4", "n is eval.samples here"),
        ("generate", "n=4", "n is samples here"),
        ("sft", "dataset=a:b#9", "(data.sources=[{path: a, subset: b, limit: 9}])"),
        ("rl", "loss_type=dr_grpo", "(algorithm.aggregation=constant)"),
        ("rm", "loss_type=sigmoid", "(reward_model.losses=[bradley_terry])"),
        ("serve", "port=8000", "port is http.port here"),
        ("serve-rm", "host=0.0.0.0", "host is http.host here"),
        ("serve", "gpu_memory_utilization=0.9", "not a share of it"),
        ("chat", "system_prompt=x", "system_prompt is system here"),
        ("sft", "additional_target=lm_head", "additional_target is model.lora.modules_to_save"),
        ("rl", "lora_modules_to_save=lm_head", "ends of names of modules that are trained whole"),
        ("sft", "moe_aux_loss_coef=0.01", "moe_aux_loss_coef is model.router_aux_loss_coef here"),
        ("rl", "actor.aux_loss_coef=0.01", "all tokens of an optimizer step and not of each"),
        ("dpo", "router_aux_loss_coef=0.1", "router_aux_loss_coef is model.router_aux_loss_coef"),
        ("rm", "model.aux_loss_coef=0.1", "model.router_aux_loss_coef in lightrft rl"),
        ("sft", "moe_aux_loss_coeff=0.1", "Megatron's losses of routers, one for each layer"),
        ("sft", "r=16", "r is model.lora.rank here"),
        ("sft", "random_state=3407", "random_state is run.seed here"),
        ("sft", "use_gradient_checkpointing=unsloth", "(model.gradient_checkpointing=true)"),
        ("sft", "max_lora_rank=32", "max_lora_rank has no counterpart here"),
        ("sft", "full_finetuning=true", "full_finetuning is model.lora here"),
    ],
)
def test_the_answer_is_the_one_of_the_verb(verb: str, given: str, expected: str) -> None:
    assert expected in message(verb, given)


def test_a_whole_config_of_another_framework_is_answered_option_by_option() -> None:
    told = message(
        "rl",
        "actor_rollout_ref={actor: {optim: {lr: 1e-6}, ppo_mini_batch_size: 64}, rollout: {n: 8}}",
    )
    for part in (
        "actor_rollout_ref.actor.optim.lr is optimizer.lr here",
        "actor_rollout_ref.actor.ppo_mini_batch_size is train.num_mini_batches here: a size",
        "actor_rollout_ref.rollout.n is rollout.group_size here",
    ):
        assert part in told


def test_every_value_of_a_table_of_values_is_accepted() -> None:
    found = 0
    for row in ROWS:
        if not isinstance(row.convert, ValueTable):
            continue
        for value in row.convert.values.values():
            settings = value if isinstance(value, Converted) else {row.here.split()[0]: value}
            for name, new in settings.items():
                cls = next(cls for cls in VERBS.values() if has_setting(cls, name))
                build(cls, accepted_with(name, new))
                found += 1
    assert found > 100


NEEDS = {
    "model.load_in_4bit": {"model.lora.rank": 8},
    "strategy.sequence_parallel": {"launch.processes": 2},
    "engine.kind": {"engine.url": "http://127.0.0.1:8000"},
    "algorithm.kl.estimator": {"algorithm.kl.where": "reward"},
    "distill.tail": {"distill.top_k": 5},
    "engine.quantization": {"engine.kind": "vllm"},
}


def accepted_with(name: str, value: object) -> dict[str, object]:
    """The tree with ``name`` and what it needs."""
    tree: dict[str, object] = {}
    needed = NEEDS.get(name, {}) if value not in ("native", "vllm") else {}
    for key, new in {**needed, name: value}.items():
        branch = tree
        *above, last = key.split(".")
        for part in above:
            branch = branch.setdefault(part, {})  # ty: ignore[invalid-assignment]
        branch[last] = new
    return tree


def fields(cls: type[Settings]) -> Iterator[str]:
    return leaves(cls)


def class_names() -> set[str]:
    waiting, found = [Settings], set()
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        found |= {cls.__name__} if cls.__module__.startswith("lightrft.") else set()
    return found


@pytest.mark.parametrize("verb", ["rl", "dpo", "rm", "distill", "serve", "merge"])
def test_no_message_names_a_class_of_the_code(verb: str) -> None:
    names = class_names()
    for field in fields(VERBS[verb]):
        for value in ("3", "0.01", "true", "word", "[1, {a: 2}]", "{no: 1}", "null"):
            try:
                load_settings(VERBS[verb], overrides=[f"{field}={value}"])
            except ConfigError as error:
                words = set(re.findall(r"\w+", str(error)))
                assert not words & names, str(error)
                assert not re.search(r"instance of|function-|tuple\b", str(error)), str(error)


def test_a_name_of_an_earlier_version_is_answered_where_the_verb_has_its_setting() -> None:
    assert said("rl", "rollout.prompts") == "rollout.prompts is rollout.prompts_per_step here"
    assert said("sft", "rollout.prompts") == ""
    assert OLD_NAMES["reward.deadline"] == "reward.timeout"


@pytest.mark.parametrize(("name", "value", "here"), [
    ("gpus", 8, "launch.processes"), ("precision", "bf16", "model.dtype=bfloat16"),
    ("save_every", 10, "checkpoint.every"), ("eval_every", 10, "eval.every"),
    ("tp", 2, "strategy.tensor_parallel"), ("sp", 2, "strategy.sequence_parallel"),
    ("warmup", 0.1, "optimizer.warmup_ratio=0.1"), ("student", "m", "model.path"),
    ("reward_function", "a.py:f", "reward.terms"), ("target_kl", 3, "algorithm.kl.target"),
])  # fmt: skip
def test_everyday_names_of_no_framework_are_answered_with_the_setting(name, value, here):
    with pytest.raises(ConfigError, match=rf"{name} is .*{re.escape(here)}"):
        load_settings(verbs.RLConfig, [], [f"{name}={value}"])


FILES = {
    "trl": "{model_name_or_path: m, learning_rate: 1.0e-5, num_generations: 8, beta: 0.1}",
    "verl": "{data: {train_files: a, shuffle: true}, trainer: {total_epochs: 1, nnodes: 1}}",
    "openrlhf": "{pretrain: m, prompt_data: a, micro_train_batch_size: 1, zero_stage: 2}",
    "llamafactory": "{stage: sft, finetuning_type: lora, cutoff_len: 1024, template: qwen}",
}


@pytest.mark.parametrize("framework", FILES)
def test_a_file_of_another_framework_is_pointed_to_import_config(
    framework: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(FILES[framework])
    with pytest.raises(ConfigError) as refused:
        load_settings(verbs.RLConfig, [file])
    assert str(refused.value).splitlines()[-1] == (
        f"{file} is a config of another framework; translate it by: lightrft import-config {file}"
    )


def test_a_file_of_ours_with_some_names_of_others_is_not_pointed_to_import_config(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("{model: m, data: a, reward: math, learning_rate: 1, beta: 1, max_steps: 1}")
    with pytest.raises(ConfigError) as refused:
        load_settings(verbs.RLConfig, [file])
    assert "import-config" not in str(refused.value)
