set -x

python3 -m openrlhf.cli.train_ppo_ray \
   --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
   --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k \
   --save_path runs/llama3-ppo \
   --prompt_data OpenRLHF/prompt-collection-v0.1 \
   --input_key context_messages \
   --apply_chat_template \
   --rollout_batch_size 128 \
   --n_samples_per_prompt 1 \
   --train_batch_size 128 \
   --micro_train_batch_size 8 \
   --max_epochs 1 \
   --prompt_max_len 1024 \
   --generate_max_len 1024 \
   --actor_learning_rate 5e-7 \
   --critic_learning_rate 9e-6 \
   --init_kl_coef 0.01 \
   --advantage_estimator gae \
   --lambd 0.95 \
   --gamma 1.0 \
   --eps_clip 0.2 \
   --gradient_checkpointing \
   --bf16 \
   --seed 42
