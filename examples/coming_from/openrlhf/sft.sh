set -x

deepspeed --module openrlhf.cli.train_sft \
   --pretrain meta-llama/Llama-3.2-1B-Instruct \
   --dataset Open-Orca/OpenOrca \
   --input_key question \
   --output_key response \
   --max_len 2048 \
   --train_batch_size 64 \
   --micro_train_batch_size 2 \
   --max_samples 50000 \
   --max_epochs 1 \
   --learning_rate 5e-6 \
   --lr_scheduler cosine_with_min_lr \
   --l2 0.01 \
   --bf16 \
   --gradient_checkpointing \
   --save_path runs/llama3-sft \
   --save_steps 500 \
   --use_wandb $WANDB_API_KEY
