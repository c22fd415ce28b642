set -x
export NNODES=1 GPUS=8

torchrun --nnodes $NNODES --nproc-per-node $GPUS examples/gsm8k_geo3k/train_colocate.py \
   --pretrain Qwen/Qwen2.5-0.5B-Instruct \
   --save_path results/gsm8k-grpo \
   --prompt_data data/gsm8k \
   --input_key prompt \
   --label_key label \
   --apply_chat_template \
   --system_prompt "Think step by step. Put the answer into a box." \
   --reward_pretrain "" \
   --advantage_estimator group_norm \
   --n_samples_per_prompt 8 \
   --rollout_batch_size 128 \
   --train_batch_size 128 \
   --micro_train_batch_size 4 \
   --micro_rollout_batch_size 4 \
   --max_epochs 1 \
   --num_episodes 20 \
   --prompt_max_len 1024 \
   --generate_max_len 2048 \
   --actor_learning_rate 1e-6 \
   --lr_warmup_ratio 0.03 \
   --use_kl_loss \
   --init_kl_coef 0.01 \
   --kl_estimator k3 \
   --loss_agg_mode seq-mean-token-mean \
   --fsdp \
   --flash_attn \
   --gradient_checkpointing \
   --bf16 \
   --l2 1e-2 \
   --engine_type vllm \
   --engine_mem_util 0.6 \
   --engine_tp_size 2 \
   --enable_engine_sleep \
   --eval_steps 20 \
   --save_steps 20 \
   --max_ckpt_num 2
