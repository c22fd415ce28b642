"""``lightrft import-config``: configs of other frameworks become configs that are accepted."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrft.cli.main import main
from lightrft.config.base import build, has_setting, load_settings
from lightrft.config.other_names.rows import FRAMEWORKS
from lightrft.config.verbs import RLConfig
from lightrft.diagnostics.importing.reading import Foreign, read_foreign
from lightrft.diagnostics.importing.writing import collect, translate
from lightrft.verbs import VERBS
from tests.unit.config.test_other_names import option_names

TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/tldr
num_generations: 8
per_device_train_batch_size: 16
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
beta: 0.04
use_peft: true
lora_r: 8
report_to: wandb
run_name: first
bf16: true
output_dir: out/grpo
push_to_hub: true
max_completion_lenght: 33
chat_template_kwargs: {enable_thinking: false}
"""
VERL = r"""
set -x
rollout_n=8
batch=$((32 * 4))
export MODEL=Qwen/Qwen2.5-7B  # the start model
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=train.parquet data.val_files="['a.parquet','b.parquet']" \
    data.train_batch_size=$batch \
    data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.model.path=${MODEL} \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.n=${rollout_n} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.logger='["console","wandb"]' \
    trainer.save_freq=$SAVE trainer.total_epochs=15 $@ 2>&1 | tee log.txt
"""
OPENRLHF = r"""
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \
   --pretrain meta/llama --prompt_data prompts.jsonl --input_key question --apply_chat_template \
   --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 256 \
   --prompt_max_len 1024 --generate_max_len 512 --advantage_estimator rloo \
   --init_kl_coef 1e-3 --kl_estimator k2 --use_kl_loss --actor_learning_rate 5e-7 \
   --eps_clip_low_high 0.2 0.27 --dynamic_filtering --lora_rank 0 --lora_alpha 16 --zero_stage 3
"""
LLAMA = """
stage: dpo
do_train: true
model_name_or_path: meta/llama
finetuning_type: lora
lora_rank: 8
lora_target: all
additional_target: embed_tokens,lm_head
moe_aux_loss_coef: 0.01
pref_beta: 0.2
pref_loss: sigmoid
dataset: dpo_en_demo
template: llama3
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
output_dir: saves/llama/dpo
"""
SWIFT = r"""
NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-8B --train_type full --dataset a.jsonl b.jsonl \
    --torch_dtype bfloat16 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \
    --learning_rate 1e-5 --max_length 4096 --system 'Answer: be brief.' --num_train_epochs 1
"""
LIGHTRFT = r"""
N_SAMPLES=8
torchrun --nproc-per-node 8 examples/gsm8k_geo3k/train_colocate.py --pretrain m \
   --prompt_data p.jsonl --n_samples_per_prompt $N_SAMPLES --rollout_batch_size 128 \
   --train_batch_size 128 --engine_type vllm --use_gspo --overlong_buffer \
   --overlong_buffer_len 256 --generate_max_len 1024 --init_kl_coef 0 --images_key image
"""
EXAMPLES = {
    "trl": ("a.yaml", TRL, "rl"),
    "verl": ("run.sh", VERL, "rl"),
    "openrlhf": ("run.sh", OPENRLHF, "rl"),
    "llamafactory": ("a.yaml", LLAMA, "dpo"),
    "ms-swift": ("run.sh", SWIFT, "sft"),
    "lightrft": ("run.sh", LIGHTRFT, "rl"),
}
EXPECTED: dict[str, dict[str, Any]] = {
    "trl": {
        "model.path": "Qwen/Qwen2.5-0.5B",
        "rollout.group_size": 8,
        # 16 rows x 2 micro-batches x 1 process are 32 responses to 4 prompts.
        "rollout.prompts_per_step": 4,
        "train.num_mini_batches": 1,
        "algorithm.kl.coef": 0.04,
        "algorithm.kl.where": "loss",
        "algorithm.aggregation": "token",  # dapo, the default of loss_type
        "model.lora.rank": 8,
        "log.wandb": "lightrft",
        "run.dir": "out",
        "run.name": "grpo",
        "model.dtype": "bfloat16",
        "data.chat_template_options": {"enable_thinking": False},
        "sampling.max_new_tokens": 512,
    },
    "verl": {
        "model.path": "Qwen/Qwen2.5-7B",
        "algorithm.preset": "grpo",
        "rollout.prompts_per_step": 128,
        "train.num_mini_batches": 4,
        "rollout.group_size": 8,
        "algorithm.kl.where": "loss",
        "algorithm.kl.coef": 0.001,
        "algorithm.kl.estimator": "k3",
        "launch.processes": 16,
        "eval.data.sources": ["a.parquet", "b.parquet"],
        "log.wandb": "lightrft",
        "log.tensorboard": False,
    },
    "openrlhf": {
        "data.columns.prompt": "question",
        "data.apply_chat_template": True,
        "rollout.prompts_per_step": 128,
        "train.num_mini_batches": 4,
        "algorithm.preset": "rloo",
        "algorithm.kl.where": "loss",
        "algorithm.kl.coef": 0.001,
        "algorithm.loss.clip_low": 0.2,
        "algorithm.loss.clip_high": 0.27,
        "algorithm.filters": ["zero_variance"],
        "strategy.kind": "deepspeed",
        "strategy.zero_stage": 3,
    },
    "llamafactory": {
        "preference.losses": ["sigmoid"],
        "preference.beta": 0.2,
        "batch_size": 8,
        "max_tokens": 1024,
        "model.lora.rank": 8,
        "model.lora.targets": "all-linear",
        "optimizer.schedule": "cosine",
        "run.name": "dpo",
    },
    "ms-swift": {
        "model.path": "Qwen/Qwen3-8B",
        "data.sources": ["a.jsonl", "b.jsonl"],
        "data.system": "Answer: be brief.",
        "batch_size": 32,
        "max_tokens": 4096,
        "train.epochs": 1,
    },
    "lightrft": {
        "rollout.group_size": 8,
        "algorithm.preset": "gspo",
        "algorithm.kl.coef": 0.0,
        "algorithm.shaping": [{"name": "overlong", "options": {"buffer": 256, "penalty": 1}}],
        "engine.kind": "vllm",
        "launch.processes": 8,
        "train.num_mini_batches": 8,
        "data.columns.images": "image",
    },
}


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, str]:
    name, text, verb = EXAMPLES[request.param]
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return request.param, path, verb


def test_framework_and_verb_are_found(example: tuple[str, Path, str]) -> None:
    framework, path, verb = example
    foreign = read_foreign(path)
    assert (foreign.framework(), foreign.verb()) == (framework, verb)


def test_a_config_becomes_one_that_is_accepted(example: tuple[str, Path, str]) -> None:
    framework, path, verb = example
    result = translate(read_foreign(path), framework, verb)
    assert result.problems == []
    assert {name: result.tree.get(name) for name in EXPECTED[framework]} == EXPECTED[framework]
    written = path.with_suffix(".out.yaml")
    written.write_text(result.text())
    load_settings(VERBS[verb].settings_class(), [written])


def test_every_option_is_in_the_result_or_named_in_a_comment(
    example: tuple[str, Path, str],
) -> None:
    framework, path, verb = example
    foreign = read_foreign(path)
    text = translate(foreign, framework, verb).text()
    lost = [name for name in foreign.options if name not in text]
    # Options that another one counts with; their numbers are in its settings.
    assert set(lost) <= {"gradient_accumulation_steps", "overlong_buffer", "n_samples_per_prompt"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("verb", ["rl", "dpo"])
def test_every_option_of_a_framework_is_translated_or_has_a_reason(
    framework: str, verb: str
) -> None:
    """Alone, with a value that may not fit: it sets something, or it is named."""
    exists = VERBS[verb].settings_class()
    for k, name in enumerate(option_names(framework)):
        for value in (1, "word", True, [1, 2]) if k % 25 == 0 else (1,):
            result = collect(Foreign({name: value}), framework, verb)
            assert all(has_setting(exists, setting) for setting in result.tree), name
            assert not any("unknown; check" in line for line in result.left), name


def test_options_that_are_unknown_or_set_nothing_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(TRL)
    text = translate(read_foreign(path), "trl", "rl").text()
    assert "max_completion_lenght = 33: unknown; check its spelling" in text
    assert "(set it by hand): true is a repository, such as me/model" in text
    assert "default of TRL: num_train_epochs = 3" in text
    assert "the number of processes is not given, and 1 is taken" in text


def test_the_number_of_processes_multiplies_rows_of_a_device(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(LLAMA)
    result = translate(read_foreign(path), "llamafactory", "dpo", processes=4)
    assert result.tree["batch_size"] == 32
    assert "the number of processes is not given" not in result.text()


def test_adapters_that_are_off_are_not_turned_on() -> None:
    off = {"lora_rank": 0, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": "all-linear"}
    assert not [k for k in translate(Foreign(off), "openrlhf", "sft").tree if "lora" in k]
    full = {"finetuning_type": "full", "lora_rank": 8, "lora_alpha": 16}
    assert not [k for k in translate(Foreign(full), "llamafactory", "sft").tree if "lora" in k]


def test_whole_modules_and_the_loss_of_routers_are_read() -> None:
    given = {"finetuning_type": "lora", "lora_rank": 8, "moe_aux_loss_coef": 0.01}
    given["additional_target"] = "embed_tokens,lm_head"
    tree = translate(Foreign(given), "llamafactory", "sft").tree
    assert tree["model.lora.modules_to_save"] == ["embed_tokens", "lm_head"]
    assert tree["model.router_aux_loss_coef"] == 0.01


def test_a_kl_that_is_off_stays_off() -> None:
    verl = translate(Foreign({"actor_rollout_ref.actor.kl_loss_coef": 0.001}), "verl", "rl")
    assert verl.tree["algorithm.kl.where"] == "none"
    assert verl.tree["algorithm.kl.coef"] == 0.0
    assert translate(Foreign({"num_generations": 4}), "trl", "rl").tree["algorithm.kl.coef"] == 0.0


def test_values_that_do_not_fit_together_are_reported(tmp_path: Path) -> None:
    options = {
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_type": "kl",
    }
    result = translate(Foreign({**options, "algorithm.adv_estimator": "grpo"}), "verl", "rl")
    assert "zero expected gradient" in result.text()
    assert "# This config is refused as it is:" in result.text()


def test_the_verb_prints_a_config_or_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(TRL)
    assert main(["import-config", str(path), "--from", "trl"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["rollout"]["prompts_per_step"] == 4
    output = tmp_path / "ours.yaml"
    assert main(["import-config", str(path), f"output={output}"]) == 0
    assert f"lightrft rl {output}" in capsys.readouterr().out
    assert output.read_text() == printed
    assert main(["import-config", str(path), f"output={output}"]) == 2
    assert "exists; set overwrite=true" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a file"),
        (["nowhere.yaml"], "there is no such file"),
        (["{tmp}/empty.yaml"], "must hold keys and values"),
        (["{tmp}/other.yaml"], "no option tells its framework"),
        (["{tmp}/other.yaml", "--from"], "Input should be 'auto', 'trl'"),
        (["{tmp}/other.yaml", "--from", "tlr"], "Input should be 'auto', 'trl'"),
        (["{tmp}/other.yaml", "{tmp}/empty.yaml"], "several files are named"),
        (["{tmp}/bad.yaml"], "is not YAML"),
        (["{tmp}/train.py"], "is a Python program"),
        (["{tmp}"], "is a folder"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "other.yaml").write_text("colour: red\n")
    (tmp_path / "bad.yaml").write_text("a: [\n")
    (tmp_path / "train.py").write_text("args = GRPOConfig(learning_rate=1e-6, beta=0.0)\n")
    assert main(["import-config", *(word.format(tmp=tmp_path) for word in words)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("framework", "name", "value", "urls", "protocol"),
    [
        ("openrlhf", "remote_rm_url", "http://a:1/x,http://b:1/x", 2, "openrlhf"),
        ("openrlhf", "reward.remote_url", "http://a:1/get_reward", 1, "openrlhf"),
        ("openrlhf", "remote_rm_url", ["http://a:1", "http://b:1"], 2, "openrlhf"),
        ("lightrft", "remote_rm_url", "http://a:1/score", 1, "lightrft"),
    ],
)
def test_a_server_of_rewards_is_a_model_with_its_protocol(
    framework: str, name: str, value: object, urls: int, protocol: str
) -> None:
    result = collect(Foreign({name: value}), framework, "rl")
    (model,) = build(RLConfig, {"reward": {"models": result.tree["reward.models"]}}).reward.models
    assert (len(model.urls), model.protocol) == (urls, protocol)


def test_penalties_of_long_responses_become_shapings_in_their_order() -> None:
    options = {"overlong_buffer_len": 64, "overlong_penalty_factor": 1.0}
    for coef, own in ((0.25, {"factor": 0.25}), (-0.5, {"value": -0.5})):
        given = {**options, "stop_properly_penalty_coef": coef}
        shaping = collect(Foreign(given), "openrlhf", "rl").tree["algorithm.shaping"]
        assert [part["name"] for part in shaping] == ["overlong", "truncated"]
        assert shaping[1]["options"] == own


@pytest.mark.parametrize(("value", "expected"), [(5.0, 5.0), (0.0, None)])
def test_the_clip_of_advantages_is_ours_and_off_at_0(value: float, expected: object) -> None:
    tree = collect(Foreign({"advantage_clip": value}), "lightrft", "rl").tree
    assert tree.get("algorithm.advantage.clip") == expected


def test_several_servers_of_lightrft_are_several_rewards_to_set_by_hand() -> None:
    result = collect(Foreign({"remote_rm_url": "http://a:1,http://b:1"}), "lightrft", "rl")
    assert "reward.models" not in result.tree
    assert any("several rewards" in line for line in result.left)
    own = collect(Foreign({"remote_rm_url": "a/b.py"}), "lightrft", "rl")
    assert own.tree["reward.terms"] == ["a/b.py:reward_func"]


@pytest.mark.parametrize(
    "command",
    [
        "swift rlhf --rlhf_type grpo --external_plugins a/p.py --beta 0.1",
        "python -m openrlhf.cli.train_ppo_ray --pretrain m --external_plugins a/p.py --beta 0.1",
        "torchrun --nproc_per_node 2 --no_python run.py --external_plugins a/p.py --beta 0.1",
    ],
)
def test_a_python_file_after_the_program_is_the_value_of_an_option(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "run.sh").write_text(command)
    options = read_foreign(tmp_path / "run.sh").options
    assert options["external_plugins"] == "a/p.py"
    assert options["beta"] == 0.1
    assert "run.py" not in options.values()


def test_the_keys_of_accounts_are_left_out_of_comments(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "WANDB_API_KEY=hidden1 python -m openrlhf.cli.train_dpo --pretrain m --use_wandb hidden2 "
        "--hub_token hidden3 --swanlab_api_key hidden4 --beta 0.1"
    )
    foreign = read_foreign(tmp_path / "run.sh")
    text = translate(foreign, "openrlhf", "dpo").text()
    assert "hidden" in str(foreign.options)
    assert "hidden" not in text
    assert "use_wandb = <redacted>" in text


@pytest.mark.parametrize(
    ("framework", "options", "expected"),
    [
        ("llamafactory", {"lora_rank": 4}, {"model.lora.alpha": 8.0}),
        ("llamafactory", {"lora_rank": 4, "lora_alpha": 4}, {"model.lora.alpha": 4}),
        ("llamafactory", {"finetuning_type": "full"}, {"model.lora.alpha": None}),
        ("trl", {"use_peft": True}, {"model.lora.dropout": 0.05}),
        ("trl", {}, {"model.lora.dropout": None}),
        ("openrlhf", {"lora_rank": 8}, {"model.lora.alpha": 16}),
        ("openrlhf", {}, {"model.lora.alpha": None}),
        ("ms-swift", {}, {"model.lora.rank": 8, "optimizer.lr": 1e-4}),
        ("ms-swift", {"train_type": "full"}, {"model.lora.rank": None, "optimizer.lr": 1e-5}),
        ("ms-swift", {}, {"optimizer.weight_decay": 0.1, "optimizer.betas": [0.9, 0.95]}),
        ("ms-swift", {}, {"batch_size": 16}),
        ("ms-swift", {"per_device_train_batch_size": 3}, {"batch_size": 3 * 6}),
        ("ms-swift", {"per_device_train_batch_size": 2, "nproc_per_node": 4}, {"batch_size": 16}),
        ("ms-swift", {"per_device_train_batch_size": 4, "num_processes": 8}, {"batch_size": 32}),
        ("ms-swift", {"gradient_accumulation_steps": 2}, {"batch_size": 2}),
        ("trl", {"gradient_accumulation_steps": 2}, {"batch_size": 16}),
    ],
)
def test_defaults_that_change_what_is_learned_are_written(
    framework: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    tree = collect(Foreign({"model": "q", **options}), framework, "sft").tree
    assert {name: tree.get(name) for name in expected} == expected


def test_a_default_that_multiplies_the_batch_is_named_at_it() -> None:
    text = collect(Foreign({"per_device_train_batch_size": 4}), "ms-swift", "sft", 2).text()
    assert (
        "# default of ms-swift: gradient_accumulation_steps = 2\n"
        in text.partition("batch_size: 16")[0]
    )
    tree = collect(Foreign({"rlhf_type": "grpo", "num_generations": 4}), "ms-swift", "rl").tree
    assert tree["rollout.prompts_per_step"] == 4


@pytest.mark.parametrize("other", FRAMEWORKS)
def test_a_config_that_is_clearly_of_another_framework_is_refused_with_its_name(
    example: tuple[str, Path, str], other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    framework, path, _ = example
    status = main(["import-config", str(path), "--from", other])
    err = capsys.readouterr().err
    if other == framework:
        assert status == 0, err
    elif {other, framework} != {"openrlhf", "lightrft"}:  # one began as the other
        assert status == 2 and f"give --from {framework}" in " ".join(err.split())


def test_a_file_with_names_of_several_frameworks_is_read_as_the_named_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model_name_or_path: a\nnum_generations: 4\nrlhf_type: grpo\n")
    for framework in ("trl", "ms-swift"):
        assert main(["import-config", str(path), "--from", framework]) == 0
    assert "ms-swift" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "floor"), [("cosine", 0.0), ("linear", 0.0), ("constant_with_warmup", None)]
)
def test_a_schedule_that_falls_to_zero_there_does_so_here(schedule: str, floor: object) -> None:
    for framework in ("trl", "llamafactory", "ms-swift"):
        tree = collect(Foreign({"lr_scheduler_type": schedule}), framework, "sft").tree
        assert tree.get("optimizer.min_lr_ratio") == floor
    name = "actor_rollout_ref.actor.optim.lr_scheduler_type"
    tree = collect(Foreign({name: schedule.partition("_")[0]}), "verl", "rl").tree
    if schedule != "linear":
        assert tree.get("optimizer.min_lr_ratio") == floor
    own = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}}
    tree = collect(Foreign(own), "trl", "sft").tree
    assert "optimizer.min_lr_ratio" in tree


@pytest.mark.parametrize(
    ("options", "sources", "held_out"),
    [
        ({"dataset_name": "a/b", "max_samples": 9}, [{"path": "a/b", "limit": 9}], None),
        ({"dataset_name": "a/b", "dataset_train_split": "train"}, ["a/b"], None),
        (
            {"dataset_name": "a/b", "dataset_config": "main", "eval_strategy": "steps"},
            [{"path": "a/b", "subset": "main"}],
            [{"path": "a/b", "split": "test", "subset": "main"}],
        ),
        (
            {"dataset_name": "a/b", "eval_strategy": "epoch", "dataset_test_split": "val"},
            ["a/b"],
            [{"path": "a/b", "split": "val"}],
        ),
        ({"dataset_name": "a/b", "eval_strategy": "no"}, ["a/b"], None),
        (
            {"dataset_name": "a/b", "eval_strategy": "steps", "eval_dataset": "c.jsonl"},
            ["a/b"],
            ["c.jsonl"],
        ),
        # which of the two they belong to is not known
        ({"dataset": "a,b", "max_samples": 9, "split": "x"}, ["a", "b"], None),
    ],
)
def test_options_of_the_only_source_go_into_it_and_trl_evaluates_its_test_split(
    options: dict[str, Any], sources: list[Any], held_out: list[Any] | None
) -> None:
    tree = collect(Foreign({"model_name_or_path": "model", **options}), "trl", "sft").tree
    assert tree["data.sources"] == sources
    assert tree.get("validation.sources") == held_out
