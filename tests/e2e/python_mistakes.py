"""Natural mistakes of newcomers who call the verbs from Python, as rows of ``mistakes.py``.

Each has a name, the lines that follow ``START``, words of the answer separated by `` | ``, the
status (0 for a value that is used or reported) and the score. The answer has ``run`` too, if the
lines make it.
"""

from __future__ import annotations

START = """import lightrft
import torch
from datasets import Dataset, DatasetDict
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
        "from transformers import TrainingArguments\n\n"
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
        'from peft import LoraConfig\n\nlightrft.rl("grpo.yaml", peft_config=LoraConfig(r=8))',
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
        'from pathlib import Path\n\nlightrft.rl("grpo.yaml", output_dir=Path("out"))',
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
        "from transformers import TrainerCallback\n\n"
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
        "from transformers import LlamaForCausalLM\n\n"
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
        "from transformers import LlamaForCausalLM\n\n"
        'with torch.device("meta"):\n'
        "    model = LlamaForCausalLM(model.config)\n"
        'lightrft.rl("grpo.yaml", model=(model, tokenizer))',
        "model: the weights of the LlamaForCausalLM are on the device meta | load",
    ),
    (
        "model-quantized",
        "from torch.ao.quantization import quantize_dynamic\n\n"
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
        "from transformers import LlamaForSequenceClassification\n\n"
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
        "import pandas\n\n"
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
        'import numpy\n\nlightrft.rl("grpo.yaml", data=numpy.array(["1+1=", "1+2="]))',
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
        "from decimal import Decimal\n\n"
        'run = lightrft.rl("grpo.yaml", data=[{"prompt": "1+1=", "label": Decimal(2)}] * 4)',
        DONE,
        0,
    ),
)
STEP = """with lightrft.Policy("grpo.yaml") as policy:
    groups = policy.score(policy.sample(policy.prompts()))
    batch = policy.batch(groups)
"""
"""The start of a loop of the program."""
REWARDS = (
    (
        "reward-trl",
        "def accuracy(completions, **kwargs):\n"
        "    return [1.0 for _ in completions]\n\n\n"
        'lightrft.rl("grpo.yaml", rewards=[accuracy])',
        "reward 'accuracy' has the parameter 'completions' of rewards of TRL | def reward(r)",
    ),
    (
        "reward-none",
        'lightrft.rl("grpo.yaml", rewards=[lambda rollout: None])',
        "returned NoneType, not a number; end each way",
    ),
    (
        "reward-list",
        'lightrft.rl("grpo.yaml", rewards=[lambda rollout: [1.0]])',
        "returned list, not a number; for several responses at once, name its parameter rollouts",
    ),
    (
        "reward-not-awaited",
        "async def judged(text):\n"
        "    return 1.0\n\n\n"
        'lightrft.rl("grpo.yaml", rewards=[lambda rollout: judged(rollout.text)])',
        "returned coroutine, not a number; await it, in a function that is async",
    ),
    (
        "reward-yield",
        'def shares(rollout):\n    yield 1.0\n\n\nlightrft.rl("grpo.yaml", rewards=[shares])',
        "returned generator, not a number; write return",
    ),
    (
        "reward-class",
        "class Judge:\n"
        "    def __call__(self, rollout):\n"
        "        return 1.0\n\n\n"
        'lightrft.rl("grpo.yaml", rewards=[Judge])',
        "rewards[0]: Judge is a class; give an object of it, such as Judge()",
    ),
    (
        "reward-called",
        "def always(rollout=None):\n"
        "    return 1.0\n\n\n"
        'lightrft.rl("grpo.yaml", rewards=[always()])',
        "= 1.0: it is no function | the function itself and not its result",
    ),
    (
        "reward-weight",
        'lightrft.rl("grpo.yaml", rewards=[("math", 0.5)])',
        'rewards[0] = | it is a section | as in {"function": ...} | reward.terms.weight',
    ),
    (
        "reward-file",
        'log = open("log.txt", "w")\n'
        'lightrft.rl("grpo.yaml", rewards=[lambda rollout: log.write(rollout.text)])',
        "since it uses 'log', which is of type TextIOWrapper | lightrft.here(function)",
    ),
    (
        "reward-lock",
        "import threading\n\n\n"
        "class Judge:\n"
        "    lock = threading.Lock()\n\n"
        "    def score(self, rollout):\n"
        "        return 1.0\n\n\n"
        'lightrft.rl("grpo.yaml", rewards=[Judge().score])',
        "the function 'score' cannot be sent to other processes | lightrft.here(function)",
    ),
    (
        "reward-async",
        "async def share(rollout):\n"
        "    return sum(rollout.token_ids) % 7\n\n\n"
        'run = lightrft.rl("grpo.yaml", rewards=[share])',
        DONE,
        0,
    ),
    (
        "reward-numpy",
        "import numpy\n\n"
        'run = lightrft.rl("grpo.yaml", rewards=[lambda r: numpy.float32(sum(r.token_ids) % 7)])',
        DONE,
        0,
    ),
    (
        "reward-names",
        'run = lightrft.rl("grpo.yaml", rewards={"odd": lambda r: sum(r.token_ids) % 7})',
        DONE,
        0,
    ),
)
CALLBACKS = (
    (
        "callback-trl",
        "from transformers import TrainerCallback\n\n"
        'lightrft.rl("grpo.yaml", on_step=TrainerCallback())',
        "on_step is of type TrainerCallback, not a function; give a function of one event",
    ),
    (
        "callback-arguments",
        'lightrft.rl("grpo.yaml", on_step=lambda args, state, control: None)',
        "on_step is called as function(event), but its signature is (args, state, control)",
    ),
    (
        "callback-async",
        "async def watch(step):\n"
        "    print(step.number)\n\n\n"
        'lightrft.rl("grpo.yaml", on_step=watch)',
        "on_step is async | give a plain function",
    ),
    (
        "callback-metric",
        'lightrft.rl("grpo.yaml", on_step=lambda step: print(step.metrics["reward"]))',
        "there is no 'reward'; did you mean 'reward/mean'",
    ),
    (
        "callback-step",
        'lightrft.rl("grpo.yaml", on_step=lambda event: print(event.global_step))',
        "'StepEvent' object has no attribute 'global_step'; did you mean 'number'?",
    ),
    (
        "callback-assigns",
        "def halve(step):\n"
        '    step.settings["optimizer.lr"] = 1e-7\n\n\n'
        'lightrft.rl("grpo.yaml", on_step=halve)',
        "settings are read; to change one, call event.change('optimizer.lr', 1e-07)",
    ),
    (
        "callback-change",
        'lightrft.rl("grpo.yaml", on_step=lambda step: step.change("lr", 1e-7))',
        "lr cannot change during a run of rl; what can is optimizer.lr",
    ),
    (
        "callback-eval",
        'lightrft.rl("grpo.yaml", on_eval=print)',
        "on_eval is never called | eval set",
    ),
)
RUNS = (
    ("run-step", 'lightrft.Run("demo").rollouts(step=9)', "of step 9; it has those of steps 1"),
    (
        "run-step-text",
        'lightrft.Run("demo").rollouts(step="1")',
        "step = '1' is no number of a step",
    ),
    ("run-kind", 'lightrft.Run("demo").rollouts(kind="train")', "kind = 'train': write 'step' or"),
    ("run-train", 'lightrft.Run("demo").train()', "'train'; the run is trained; resume(steps=...)"),
    ("run-history", 'lightrft.Run("demo").log_history', "'log_history'; did you mean 'metrics'?"),
    (
        "run-saves",
        'lightrft.Run("demo").save_pretrained("out")',
        "in the folder that 'model' names",
    ),
    (
        "run-failed",
        "try:\n"
        '    lightrft.rl("grpo.yaml", on_start=lambda event: 1 / 0)\n'
        "except ZeroDivisionError:\n"
        "    pass\n"
        'lightrft.Run("run").metrics',
        "run has no metrics: no step has ended; log.txt says why",
    ),
    ("run-gone", 'lightrft.Run("runs/demp")', "no run folder runs/demp; did you mean runs/demo?"),
    (
        "run-prompt",
        'lightrft.Run("demo").generate(tokenizer("1+1="))',
        "a prompt is a text or a list of messages, and not of type BatchEncoding",
    ),
    (
        "run-generate",
        'lightrft.Run("demo").generate("1+1=", max_new_tokens=4)',
        'is sampling={"max_new_tokens": ...} here',
    ),
    (
        "run-resume",
        'lightrft.Run("demo").resume(lr=1e-3)',
        'holds a run of another config | run={"overwrite": True} | optimizer.lr: 1e-06 in',
    ),
    (
        "run-positional",
        'lightrft.export(lightrft.Run("demo"), "out")',
        "'runs/demo' is no YAML file; name the setting, as in path=\"runs/demo\"",
    ),
    (
        "run-twice",
        'with lightrft.Policy("grpo.yaml"):\n    lightrft.rl("grpo.yaml")',
        "is in use by a run of this process; let it end first, or choose another name",
    ),
    ("run-again", 'run = lightrft.Run(lightrft.Run("demo"))', DONE, 0),
    (
        "run-thread",
        "from concurrent.futures import ThreadPoolExecutor\n\n"
        "with ThreadPoolExecutor() as pool:\n"
        '    run = pool.submit(lightrft.rl, "grpo.yaml").result()',
        DONE,
        0,
    ),
    (
        "run-cell",
        "import asyncio\n\n\n"
        "async def cell():\n"
        '    return lightrft.rl("grpo.yaml")\n\n\n'
        "run = asyncio.run(cell())",
        DONE,
        0,
    ),
)
LOOPS = (
    (
        "loop-texts",
        'with lightrft.Policy("grpo.yaml") as policy:\n    policy.sample(["1+1="])',
        "sample() takes prompts, as prompts() returns them, and not a value of type str",
    ),
    (
        "loop-group",
        f"{STEP}    policy.score(groups[0])",
        "groups are lists of responses, one for each prompt | of type Rollout",
    ),
    (
        "loop-update",
        f"{STEP}    policy.update(groups)",
        "update() takes the batch that batch() returns, and not a value of type list",
    ),
    (
        "loop-advantages",
        f"{STEP}    batch.replace(advantages=batch.rewards)",
        "one number for each token | repeat_interleave(batch.lengths)",
    ),
    (
        "loop-column",
        f"{STEP}    batch.replace(advantage=batch.advantages)",
        "a batch has no column 'advantage'; did you mean 'advantages'?",
    ),
    (
        "loop-loss",
        f"{STEP}    policy.update(batch, lambda logprobs: -logprobs)",
        "token_losses is called as function(logprobs, batch), but its signature is (logprobs)",
    ),
    (
        "loop-detached",
        f"{STEP}    policy.update(batch, lambda logprobs, batch: -logprobs.detach())",
        "a loss without gradient | without detach() and no_grad()",
    ),
    (
        "loop-reward",
        'with lightrft.Policy("grpo.yaml") as policy:\n'
        "    groups = policy.sample(policy.prompts())\n"
        '    groups[0][0].reward = groups[0][1].reward = "1.0"\n'
        "    policy.batch(groups[:1])",
        "the reward of a response is of type str; give one number",
    ),
    (
        "loop-metric",
        f'{STEP}    policy.sync({{"note": "good"}})',
        "metric 'note' is of type str; give one number",
    ),
    (
        "loop-closed",
        f"{STEP}    policy.update(batch)\n    policy.sync()\npolicy.prompts()",
        "the policy is closed; open it again",
    ),
    (
        "loop-range",
        'with lightrft.Policy("grpo.yaml") as policy:\n'
        "    for _ in range(2):\n"
        "        groups = policy.score(policy.sample(policy.prompts()))\n"
        "        policy.update(policy.batch(groups))\n"
        "        policy.sync()",
        "train.steps = 1: these steps are done; loop by `for step in policy`",
    ),
    (
        "loop-generate",
        'with lightrft.Policy("grpo.yaml") as policy:\n    policy.generate("1+1=")',
        "'generate'; did you mean 'sample'?",
    ),
)
PYTHON = (*SETTINGS, *MODELS, *ROWS, *REWARDS, *CALLBACKS, *RUNS, *LOOPS)
