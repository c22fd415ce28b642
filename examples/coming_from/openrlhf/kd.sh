set -x

deepspeed --module openrlhf.cli.train_kd \
   --pretrain Qwen/Qwen2.5-0.5B-Instruct \
   --teacher_model Qwen/Qwen2.5-7B-Instruct \
   --save_path runs/qwen-kd \
   --dataset Open-Orca/OpenOrca \
   --input_key question \
   --output_key response \
   --max_len 4096 \
   --max_samples 500000 \
   --train_batch_size 256 \
   --micro_train_batch_size 2 \
   --max_epochs 1 \
   --learning_rate 5e-6 \
   --kd_coef 0.4 \
   --zero_stage 2 \
   --teacher_offload \
   --flash_attn \
   --gradient_checkpointing \
   --bf16 \
   --save_steps -1 \
   --eval_steps -1
