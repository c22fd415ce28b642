"""Each row of the specification's feature lists has tests, and each public name has LightRFT's arguments."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys

import pytest

from lightrft.datasets.open_source import READERS
from lightrft.utils.public_names import NAMES, names_in
from tests.architecture.tree import ROOT
from tests.specification.rows import ROWS

TESTS = ROOT / "tests"
PROOFS = [
    pytest.param(proofs, id=f"{section}: {row}")
    for section, rows in ROWS.items()
    for row, proofs in rows.items()
]

SIGNATURES = {
    "lightrft.models": {
        "ActorLanguage": "pretrain_or_model use_flash_attention_2 bf16 lora_rank lora_alpha "
        "lora_dropout target_modules ds_config device_map packing_samples high_entropy_token_ratio",
        "ActorVL": "pretrain_or_model use_flash_attention_2 bf16 lora_rank lora_alpha lora_dropout "
        "target_modules ds_config device_map packing_samples",
        "ActorVL.forward": "self sequences num_actions attention_mask pixel_values image_grid_thw "
        "pixel_values_videos video_grid_thw return_output packed_seq_lens",
        "ActorVL.generate": "self input_ids pixel_values image_grid_thw pixel_values_videos "
        "video_grid_thw kwargs",
        "CriticVL": "pretrain_or_model use_flash_attention_2 bf16 lora_rank lora_alpha lora_dropout "
        "target_modules normalize_reward ds_config init_value_head value_head_prefix device_map "
        "packing_samples",
        "supports_parameter": "modality param_name",
        "ActorVL.process_sequences": "self sequences input_len eos_token_id pad_token_id",
        "ActorAL.forward": "self sequences num_actions attention_mask pixel_values image_grid_thw "
        "pixel_values_videos video_grid_thw return_output packed_seq_lens audio_values",
        "GPTLMLoss.forward": "self logits labels",
        "PolicyLoss": "clip_eps use_dapo use_cpg_loss high_entropy_token_ratio",
        "PolicyLoss.forward": "self log_probs old_log_probs advantages action_mask entropy_mask",
        "ValueLoss": "clip_eps",
        "ValueLoss.forward": "self values old_values returns action_mask",
        "PairWiseLoss.forward": "self chosen_reward reject_reward margin",
        "LogSigmoidLoss.forward": "self chosen_reward reject_reward margin",
        "LogExpLoss.forward": "self chosen_reward reject_reward margin",
        "HPSLoss.forward": "self chosen_reward reject_reward margin",
        "DPOLoss": "beta label_smoothing ipo",
        "DPOLoss.forward": "self policy_chosen_logps policy_rejected_logps reference_chosen_logps "
        "reference_rejected_logps",
        "VanillaKTOLoss": "beta",
        "KTOLoss": "beta desirable_weight undesirable_weight world_size device",
        "KTOLoss.forward": "self policy_chosen_logps policy_rejected_logps policy_KL_logps "
        "reference_chosen_logps reference_rejected_logps reference_KL_logps",
        "KDLoss.forward": "self logits teacher_logits label",
        "PRMLoss": "placeholder_token_id reward_token_ids",
        "PRMLoss.forward": "self inputs logits labels return_acc",
        "AttentionPooling": "hidden_size num_heads qkv_bias position_bias position_bias_scale",
        "AttentionPooling.forward": "self hidden_states",
        "concatenated_forward": "model input0_ids input0_mask input1_ids input1_mask "
        "input0_img_pixels input0_img_grid_thws input1_img_pixels input1_img_grid_thws "
        "input0_video_pixels input0_video_grid_thws input1_video_pixels input1_video_grid_thws "
        "pad_token_id",
        "log_probs_from_logits": "logits labels disable_logprobs_flashattn",
        "compute_reward": "r kl_coef kl action_mask num_actions reward_clip_range",
    },
    "lightrft.trainer": {
        "AdaptiveKLController": "init_kl_coef target horizon",
        "AdaptiveKLController.update": "self current n_steps",
        "FixedKLController": "kl_coef",
        "Experience": "sequences action_log_probs base_action_log_probs values returns advantages "
        "attention_mask action_mask info kl action_entropy labels references",
        "ExperienceVL": "sequences pixel_values image_grid_thws raw_images pixel_values_videos "
        "video_grid_thws action_log_probs base_action_log_probs values returns advantages "
        "attention_mask action_mask info kl action_entropy labels references",
        "NaiveReplayBuffer": "sample_batch_size limit cpu_offload packing_samples",
        "NaiveReplayBuffer.normalize": "self attribute strategy",
        "NaiveReplayBufferVL": "sample_batch_size limit cpu_offload packing_samples",
        "make_experience_batch": "items packing_samples",
        "zero_pad_sequences": "sequences side",
        "get_advantage_calculator": "estimator_name config",
        "GAECalculator.get_advantages_and_returns": "self values rewards action_mask gamma lambd",
        "AdvantageCalculator.preprocess_rewards": "self rewards experiences max_new_tokens",
        "AdvantageCalculator.compute": "self experience final_reward gamma generate_kwargs",
        "normalize_advantages_cross_batch": "experiences advantage_estimator args",
    },
    "lightrft.strategy": {
        "get_strategy": "args",
        "is_engine": "model",
        "StrategyBase": "seed max_norm micro_train_batch_size train_batch_size args",
        "StrategyBase.backward": "self loss model optimizer",
        "StrategyBase.optimizer_step": "self optimizer model scheduler name",
        "StrategyBase.setup_dataloader": "self replay_buffer batch_size pin_memory shuffle "
        "collate_fn drop_last sampler consumed_samples",
        "StrategyBase.save_ckpt": "self model save_dir tag max_num max_mem client_state save_latest",
        "StrategyBase.prepare_models_and_optimizers": "self actor critic reward_models "
        "initial_model args max_steps",
    },
}
"""LightRFT's arguments, in its order."""

CALLS = [
    pytest.param(module, path, names.split(), id=path)
    for module, rows in SIGNATURES.items()
    for path, names in rows.items()
]


@pytest.mark.parametrize("proofs", PROOFS)
def test_a_row_of_the_specification_is_proved_by_tests_that_exist(proofs: tuple[str, ...]) -> None:
    assert proofs
    for proof in proofs:
        path, _, function = proof.partition("::")
        text = (TESTS / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {function or 'test_'}", text, re.M), proof


@pytest.mark.parametrize(("module", "path", "names"), CALLS)
def test_a_public_name_takes_lightrfts_arguments(module: str, path: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    own = list(inspect.signature(found).parameters)
    assert own[: len(names)] == names
    more = list(inspect.signature(found).parameters.values())[len(names) :]
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in more)


@pytest.mark.parametrize("module", sorted(NAMES))
def test_every_name_of_the_table_is_importable_and_documented(module: str) -> None:
    page = (ROOT / "docs" / "lightrft-names.md").read_text(encoding="utf-8")
    loaded = importlib.import_module(module)
    calculators = "the seven calculators"
    for name in names_in(module):
        found = getattr(loaded, name)
        assert inspect.getdoc(found)
        assert f"`{name}`" in page or (name.endswith("Calculator") and calculators in page)
    assert set(names_in(module)) <= set(loaded.__all__)
    with pytest.raises(AttributeError, match=rf"{module}.*no attribute 'NoSuchName'"):
        loaded.NoSuchName  # noqa: B018


SOURCES = (
    *("hpdv3", "rapidata-t2v", "rapidata-i2v", "imagerewarddb", "imagegen-cot-reward-5k"),
    *("omnirewardbench-t2i", "omnirewardbench-t2v", "omnirewardbench-t2a", "audio-alpaca"),
    *("genai_bench", "genai_bench_video", "videodpo", "videogen-rewardbench"),
)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_of_lightrft_has_a_reader(source: str) -> None:
    assert source in READERS


def test_a_module_that_lightrft_has_not_is_no_module() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lightrft.models.no_such_module")


def test_importing_the_package_loads_neither_torch_nor_these_names() -> None:
    code = (
        "import sys, lightrft, lightrft.models, lightrft.trainer, lightrft.strategy; "
        "bad = {'torch', 'lightrft.compat.losses', 'lightrft.trainer.kl_controller'}; "
        "print(sorted(bad & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
