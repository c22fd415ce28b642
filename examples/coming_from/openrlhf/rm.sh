set -x

deepspeed --module openrlhf.cli.train_rm \
   --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
   --save_path runs/llama3-rm \
   --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku \
   --apply_chat_template \
   --chosen_key chosen \
   --rejected_key rejected \
   --train_batch_size 256 \
   --micro_train_batch_size 1 \
   --max_epochs 1 \
   --max_len 8192 \
   --learning_rate 9e-6 \
   --loss sigmoid \
   --value_head_prefix score \
   --zero_stage 3 \
   --packing_samples \
   --flash_attn \
   --gradient_checkpointing \
   --bf16 \
   --save_steps -1 \
   --eval_steps -1 \
   --logging_steps 1
