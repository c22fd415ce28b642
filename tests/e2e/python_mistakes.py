"""Natural mistakes of newcomers who call the verbs from Python, as rows of ``mistakes.py``.

Each has a name, the lines that follow ``START``, words of the answer separated by `` | ``, the
status (0 for a value that is used or reported) and the score. The answer has ``run`` too, if the
lines make it.
"""

from __future__ import annotations

START = """import torch
from datasets import Dataset, DatasetDict
import lightrft
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

model, tokenizer = tiny_model("llama"), tiny_tokenizer()
rows = [{"prompt": f"{a}+1=", "label": str(a + 1)} for a in range(9)]
"""
"""The first lines of each program."""

DONE = "finished at step 1"

SETTINGS = (
    (
        "trl-dataset",
        'lightrft.rl("grpo.yaml", train_dataset=rows)',
        "is data=... here (data=[...])",
    ),
    ("trl-eval", 'lightrft.rl("grpo.yaml", eval_dataset=rows)', "is eval=... here (eval=[...])"),
    (
        "trl-rewards",
        'lightrft.rl("grpo.yaml", reward_funcs=[len])',
        "is rewards=... here: a function",
    ),
    (
        "trl-args",
        "from transformers import TrainingArguments\n"
        "args = TrainingArguments(learning_rate=1e-5, per_device_train_batch_size=2)\n"
        'lightrft.sft("sft.yaml", args=args)',
        'learning_rate is optimizer={"lr": ...} here | per_device_train_batch_size is batch_size here',
    ),
    (
        "trl-tokenizer",
        'lightrft.rl("grpo.yaml", model=model, processing_class=tokenizer)',
        "model: a LlamaForCausalLM needs its tokenizer; write (model, tokenizer)",
    ),
    (
        "trl-peft",
        'from peft import LoraConfig\nlightrft.rl("grpo.yaml", peft_config=LoraConfig(r=8))',
        'is model={"lora": ...} here: a table, such as {"rank": 16, "alpha": 32.0}',
    ),
    (
        "trl-batch",
        'lightrft.rl("grpo.yaml", per_device_train_batch_size=4)',
        'is rollout={"prompts_per_step": ...} here: | processes x',
    ),
    ("unsloth-length", 'lightrft.sft("sft.yaml", max_seq_length=2048)', "is max_tokens here"),
    (
        "optimizer-class",
        'lightrft.rl("grpo.yaml", optimizer=torch.optim.AdamW)',
        "optimizer = 'AdamW' | it is a section | as in optimizer={\"lr\": ...}",
    ),
    (
        "section-text",
        'lightrft.rl("grpo.yaml", optimizer="lr=1e-5")',
        "optimizer = 'lr=1e-5' | it is a section | as in optimizer={\"lr\": ...}",
    ),
    ("lr-top", 'lightrft.rl("grpo.yaml", learning_rate=1e-5)', 'is optimizer={"lr": ...} here'),
    (
        "output-dir",
        'from pathlib import Path\nlightrft.rl("grpo.yaml", output_dir=Path("out"))',
        'run={"dir": "."}, run={"name": "out"}',
    ),
    (
        "output",
        'lightrft.rl("grpo.yaml", output="out")',
        "it is a setting of | and not of this verb",
        2,
        2,
    ),
    ("positional", 'lightrft.rl("model", rows)', "'model' is no YAML file | as in model=\"model\""),
    (
        "positional-model",
        "lightrft.rl(model, rows)",
        "of type LlamaForCausalLM is neither a YAML file nor settings | as in model=...",
    ),
    ("no-reward", "lightrft.rl(model=(model, tokenizer), data=rows)", 'e.g. rewards=["math"]'),
    (
        "trainer",
        'lightrft.sft("sft.yaml", data_collator=print)',
        "a run packs its rows itself: leave it out",
    ),
    (
        "trl-formatting",
        'lightrft.sft("sft.yaml", formatting_func=lambda row: row["prompt"])',
        "formatting_func is a keyword of other trainers | as data=...",
    ),
    (
        "trl-callbacks",
        "from transformers import TrainerCallback\n"
        'lightrft.rl("grpo.yaml", callbacks=[TrainerCallback()])',
        "callbacks is a keyword of other trainers | as on_step=...",
    ),
    ("trl-step-end", 'lightrft.rl("grpo.yaml", on_step_end=print)', "as on_step=..."),
    (
        "dtype",
        'run = lightrft.rl("grpo.yaml", model={"path": "model", "dtype": torch.bfloat16})',
        DONE,
        0,
    ),
    ("lr-text", 'run = lightrft.rl("grpo.yaml", lr="1e-5")', DONE, 0),
)
MODELS = (
    (
        "model-class",
        "from transformers import LlamaForCausalLM\n"
        'lightrft.rl("grpo.yaml", model=LlamaForCausalLM)',
        "model: LlamaForCausalLM is a class; | such as LlamaForCausalLM.from_pretrained(...)",
    ),
    (
        "tokenizer-name",
        'lightrft.rl("grpo.yaml", model=(model, "model"))',
        "needs its tokenizer, and 'model' is none; write (model, tokenizer)",
    ),
    (
        "tokenizer-other",
        'lightrft.rl("grpo.yaml", model=(tiny_model("llama", vocab_size=20), tokenizer))',
        "only 20: they do not belong together; give the tokenizer",
    ),
    (
        "model-meta",
        "from transformers import LlamaForCausalLM\n"
        'with torch.device("meta"):\n'
        "    model = LlamaForCausalLM(model.config)\n"
        'lightrft.rl("grpo.yaml", model=(model, tokenizer))',
        "model: the weights of the LlamaForCausalLM are on the device meta | load",
    ),
    (
        "model-quantized",
        "from torch.ao.quantization import quantize_dynamic\n"
        "model = quantize_dynamic(model, {torch.nn.Linear})\n"
        'lightrft.rl("grpo.yaml", model=(model, tokenizer))',
        "model: the LlamaForCausalLM cannot be written | without quantization",
    ),
    (
        "model-module",
        'lightrft.rl("grpo.yaml", model=torch.nn.Linear(3, 3))',
        "model: a value of type Linear | give a folder | (model, tokenizer)",
    ),
    (
        "reference-alone",
        'lightrft.dpo("dpo.yaml", reference=model)',
        "reference: a LlamaForCausalLM needs its tokenizer",
    ),
    (
        "reward-model",
        "from transformers import LlamaForSequenceClassification\n"
        "judge = LlamaForSequenceClassification(model.config)\n"
        'lightrft.rl("grpo.yaml", rewards=[judge])',
        "rewards[0]: a LlamaForSequenceClassification is a model | reward.models",
    ),
    ("model-list", 'run = lightrft.rl("grpo.yaml", model=[model, tokenizer])', DONE, 0),
    ("model-half", 'run = lightrft.rl("grpo.yaml", model=(model.half(), tokenizer))', DONE, 0),
    (
        "model-compiled",
        'run = lightrft.rl("grpo.yaml", model=(torch.compile(model), tokenizer))',
        DONE,
        0,
    ),
)
ROWS = (
    (
        "rows-splits",
        "splits = DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows))\n"
        'lightrft.rl("grpo.yaml", data=splits)',
        "data: the data set has the splits train, test; choose one of them, as in",
    ),
    (
        "rows-used",
        'given = (row for row in rows)\nprint(list(given))\nlightrft.rl("grpo.yaml", data=given)',
        "data: there are no rows; an iterator gives its rows once",
    ),
    (
        "rows-columns",
        "import pandas\n"
        'frame = pandas.DataFrame({"q": ["1+1="], "a": ["2"]})\n'
        'lightrft.rl("grpo.yaml", data=frame)',
        'row 0: no column with a prompt | has: q, a | in data={"columns": {"prompt": ...}}',
    ),
    (
        "rows-texts",
        'lightrft.generate(model="model", data=["1+1=", "1+2="])',
        "data: '1+1=' names no file | write [{\"prompt\": text} for text in texts]",
    ),
    (
        "rows-numpy",
        'import numpy\nlightrft.rl("grpo.yaml", data=numpy.array(["1+1=", "1+2="]))',
        'data: row 0 is of type str_, not a table such as {"prompt"',
    ),
    (
        "rows-pairs",
        'lightrft.rl("grpo.yaml", data=zip(["1+1="], ["2"]))',
        'data: row 0 is of type tuple, not a table such as {"prompt"',
    ),
    (
        "rows-loader",
        "loader = torch.utils.data.DataLoader(rows, batch_size=2)\n"
        'lightrft.rl("grpo.yaml", data=loader)',
        "data: a value of type DataLoader | give rows: a list of tables",
    ),
    (
        "rows-object",
        'lightrft.rl("grpo.yaml", data=[{"prompt": "1+1=", "label": object()}])',
        "data: row 0, column 'label': a value of type object cannot be written; give text",
    ),
    (
        "rows-tokens",
        'lightrft.sft("sft.yaml", data=[tokenizer("1+1=2")] * 8)',
        "data: row 0 has token ids | give columns of text",
    ),
    ("rows-empty", 'lightrft.rl("grpo.yaml", data=[])', "data.sources is empty | e.g. data="),
    (
        "rows-streamed",
        'run = lightrft.rl("grpo.yaml", data=Dataset.from_list(rows).to_iterable_dataset())',
        DONE,
        0,
    ),
    (
        "rows-torch",
        "class Sums(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return len(rows)\n\n"
        "    def __getitem__(self, index):\n"
        "        return rows[index]\n\n\n"
        'run = lightrft.rl("grpo.yaml", data=Sums())',
        DONE,
        0,
    ),
    (
        "rows-chats",
        'chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]\n'
        'run = lightrft.sft("sft.yaml", data=[chat] * 8)',
        DONE,
        0,
    ),
    (
        "rows-decimal",
        "from decimal import Decimal\n"
        'run = lightrft.rl("grpo.yaml", data=[{"prompt": "1+1=", "label": Decimal(2)}] * 4)',
        DONE,
        0,
    ),
)
PYTHON = (*SETTINGS, *MODELS, *ROWS)
