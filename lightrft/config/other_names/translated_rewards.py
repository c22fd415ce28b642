"""Options of other frameworks about rewards, by setting."""

from __future__ import annotations

from lightrft.config.other_names import conversions as to
from lightrft.config.other_names.rows import (
    Converted,
    NameRow,
    as_list,
    by_hand,
    counted,
)
from lightrft.config.other_names.translated import MICRO

REWARD = (
    NameRow(
        "reward_model reward_model_path reward_pretrain reward_model_name_or_path "
        "reward.model_name_or_path reward_model.model.path reward.reward_model.model_path "
        "cost_model_name_or_path",
        "reward.models",
        "a folder, or a list of folders and tables; see docs/verbs/rm.md",
        as_list,
    ),
    NameRow(
        "reward_funcs reward_function verifier custom_reward_function.path reward.custom_reward_function.path "
        "reward_model_plugin external_plugins custom_reward_function",
        "reward.terms",
        "a function gets one rollout and returns a number (docs/tutorials/own-reward.md)",
        to.reward_function,
    ),
    NameRow(
        "openrlhf:remote_rm_url reward.remote_url",
        "reward.models",
        "{url: http://host:5000/get_reward, protocol: openrlhf}; a file with a function is "
        "reward.terms",
        to.reward_function,
    ),
    NameRow(
        "lightrft:remote_rm_url",
        "reward.models",
        "{url: http://host:5000/get_reward, protocol: lightrft}, which sends references and images",
        to.lightrft_server,
    ),
    NameRow(
        "custom_reward_function.name reward.custom_reward_function.name",
        "reward.terms.function",
        "file.py:name",
        counted,
    ),
    NameRow("reward_weights", "reward.terms.weight", "it belongs to a term", by_hand),
    NameRow("judge", "reward.terms", "judges that are models are reward.judges", by_hand),
    NameRow(
        "reward_model.reward_manager reward.reward_manager.name reward_manager.name",
        "reward.terms",
        "the rules of data sources are reward.per_source; dapo's length penalty is "
        "algorithm.shaping",
        by_hand,
    ),
    NameRow(
        "reward.num_workers reward_model.num_workers",
        "reward.workers",
        "processes that call reward functions, for each rank",
    ),
    NameRow(
        "reward.sandbox_fusion.memory_limit_mb reward_model.sandbox_fusion.memory_limit_mb "
        "sandbox_fusion.memory_limit_mb",
        "reward.memory_mb",
        "of each worker that calls reward functions",
    ),
    NameRow(
        "reward_model.micro_batch_size reward_model.micro_batch_size_per_gpu "
        "reward_model.forward_max_token_len_per_gpu",
        "reward.models.max_tokens_per_micro_batch",
        MICRO,
        by_hand,
    ),
    NameRow(
        "ref_reward_offload reward.offload reward_offload reward_model.model.fsdp_config."
        "param_offload",
        "reward.models.offload",
        "it belongs to a model",
        by_hand,
    ),
    NameRow(
        "overlong_buffer",
        "algorithm.shaping",
        "`overlong`, with its length and penalty as options",
        counted,
    ),
    NameRow(
        "overlong_buffer_len reward.overlong_buffer_len soft_cache_length",
        "algorithm.shaping",
        "the option `buffer` of `overlong`, in tokens",
        to.overlong("overlong_penalty_factor", "overlong_buffer_penalty_factor"),
    ),
    NameRow(
        "{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.len "
        "reward_model.overlong_buffer.len",
        "algorithm.shaping",
        "the option `buffer` of `overlong`, in tokens",
        to.overlong(
            "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
            "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
            "reward_model.overlong_buffer.penalty_factor",
        ),
    ),
    NameRow(
        "{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.{enable,penalty_factor,log} "
        "reward_model.overlong_buffer.{enable,penalty_factor,log} "
        "{reward_model,reward}.reward_kwargs.max_resp_len",
        "algorithm.shaping",
        "`overlong`, with its length and penalty as options; the longest response is "
        "sampling.max_new_tokens",
        counted,
    ),
    NameRow(
        "{custom_reward_function,reward.custom_reward_function}.reward_kwargs",
        "reward.terms.options",
        "it belongs to a term",
        by_hand,
    ),
    NameRow(
        "overlong_penalty_factor overlong_buffer_penalty_factor reward.overlong_penalty_factor",
        "algorithm.shaping",
        "the option `penalty` of `overlong`",
        counted,
    ),
    NameRow(
        "reward_clip_range reward.clip_range",
        "algorithm.shaping",
        "{name: reward_clip, options: {low: -10, high: 10}}",
        lambda value, _: (
            [{"name": "reward_clip", "options": {"low": value[0], "high": value[1]}}]
            if value
            else Converted()
        ),
    ),
    NameRow(
        "reward_clip",
        "algorithm.shaping",
        "{name: reward_clip, options: {low: -x, high: x}}; 0 clips nothing",
        lambda value, _: (
            [{"name": "reward_clip", "options": {"low": -value, "high": value}}]
            if value
            else Converted()
        ),
    ),
    NameRow(
        "stop_properly_penalty_coef reward.stop_properly_penalty_coef",
        "algorithm.shaping",
        "{name: truncated, options: {factor: c}}, or {value: c} below 0",
        to.stop_properly,
    ),
    NameRow(
        "cosine_{min,max}_len_value_{wrong,correct} cosine_max_len",
        "algorithm.shaping",
        "options of `cosine`",
        by_hand,
    ),
)
