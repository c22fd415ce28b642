"""Natural mistakes of newcomers, as typed, with words of the answer that each must get.

``test_mistakes.py`` types each of them, and ``docs/errors.md`` shows the answers. The numbers are those of
the list that they were found in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.e2e.python_mistakes import PYTHON as PYTHON_ROWS


class Mistake(NamedTuple):
    """A command of a newcomer, or lines of Python.

    Args:
        id: Name of the mistake.
        typed: The command. ``rl+`` begins with the words of ``STARTS``, which later words replace.
            ``key=`` removes a word of them. Quotes are those of a shell. Lines of Python begin with
            ``PROMPT``.
        said: Words of the answer, separated by `` | ``.
        status: Exit status; 0 for a value that is used, or for one that is reported.
        score: 3 if the answer says what, where and the fix; 0 for silence.
    """

    id: str
    typed: str
    said: str
    status: int = 2
    score: int = 3


PROMPT = ">>> "
"""Start of lines of Python."""


def jsonl(*rows: dict[str, Any] | str) -> str:
    """Return rows as JSON lines. A row that is text stays as it is."""
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def with_keys(rows: Iterable[dict[str, Any]], **keys: Any) -> str:
    """Return JSON lines of ``rows``, in which functions of ``keys`` make columns from a row."""
    return jsonl(*({key: make(row) for key, make in keys.items()} for row in rows))


def own(body: str, parameters: str = "rollout") -> str:
    """Return a file with the function ``reward``."""
    return f"def reward({parameters}):\n    {body}\n"


SUMS = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(1, 5) for b in range(1, 6)]
PAIRS = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(8)]
CHATS = [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]] * 8


def prompt(row: dict[str, Any]) -> str:
    """Return the prompt of a row."""
    return row["prompt"]


def label(row: dict[str, Any]) -> str:
    """Return the label of a row."""
    return row["label"]


def user(row: dict[str, Any], role: str = "user") -> dict[str, str]:
    """Return the prompt of a row as a message."""
    return {"role": role, "content": row["prompt"]}


FILES: dict[str, str | bytes] = {
    "sums.jsonl": jsonl(*SUMS),
    "a.jsonl": jsonl(*SUMS[:10]),
    "b.jsonl": jsonl(*SUMS[10:]),
    "three.jsonl": jsonl(*SUMS[:3]),
    "empty.jsonl": "",
    "broken.jsonl": jsonl(*SUMS[:2], '{"prompt": "1+1=", "label": }', *SUMS[3:]),
    "empty_prompt.jsonl": jsonl(*SUMS[:4], {"prompt": "", "label": "3"}, *SUMS[5:]),
    "qa.jsonl": with_keys(SUMS, q=prompt, a=label),
    "no_label.jsonl": with_keys(SUMS, prompt=prompt),
    "some.jsonl": jsonl(*SUMS[:9], {"prompt": "1+1=", "label": None}),
    "floats.jsonl": with_keys(SUMS, prompt=prompt, label=lambda row: float(row["label"])),
    "lists.jsonl": with_keys(SUMS, prompt=prompt, label=lambda row: [row["label"]]),
    "human.jsonl": with_keys(SUMS, prompt=lambda row: [user(row, "human")], label=label),
    "prefill.jsonl": with_keys(
        SUMS, prompt=lambda row: [user(row), {"role": "assistant", "content": "It is"}], label=label
    ),
    "system.jsonl": with_keys(
        SUMS, prompt=lambda row: [{"role": "system", "content": "Add."}, user(row)], label=label
    ),
    "images.jsonl": jsonl(*[{"prompt": "what?", "label": "1", "images": ["gone.png"]}] * 8),
    "image_q.jsonl": jsonl(*[{"q": "what?", "label": "1", "images": ["gone.png"]}] * 8),
    "chats.jsonl": jsonl(*({"messages": chat} for chat in CHATS)),
    "no_answer.jsonl": jsonl(*({"messages": chat[:1]} for chat in CHATS)),
    "pairs.jsonl": jsonl(*PAIRS),
    "equal.jsonl": jsonl(*({**pair, "rejected": pair["chosen"]} for pair in PAIRS)),
    "good_bad.jsonl": with_keys(
        PAIRS, prompt=prompt, good=lambda row: row["chosen"], bad=lambda row: row["rejected"]
    ),
    "latin.csv": "prompt,label\ncafé+1=,2\n".encode("latin-1"),
    "rl.yaml": "model: model\ndata: {sources: sums.jsonl}\nrollout: {group_size: 4}\n",
    "tab.yaml": "model: model\ntrain:\n\tsteps: 1\n",
    "indent.yaml": "model: model\ntrain:\n  steps: 1\n batch: 2\n",
    "varied.py": own("return float(sum(rollout.token_ids) % 7)"),
    "always.py": own("return 1.0"),
    "none.py": own("return None"),
    "text.py": own('return "1.0"'),
    "list.py": own("return [1.0]"),
    "nan.py": own('return float("nan")'),
    "pair.py": own('return (1.0, "why")'),
    "trl.py": own("return [1.0 for _ in completions]", "completions, **kwargs"),
    "trl_rows.py": own(
        "return [1.0 for _ in completions]", "prompts, completions, answer, **kwargs"
    ),
    "score.py": own('return {"score": 1, "acc": 0, "length": 57}'),
    "hang.py": own("while True: pass"),
    "verl.py": own("return 1.0", "data_source, solution_str, ground_truth, extra_info=None"),
    "openrlhf.py": own("return [1.0 for _ in queries]", "queries, prompts, labels"),
    "typo.py": own('return float(rollout.prompt.labels == "1")'),
    "two.py": own("return float(rollout.text == label)", "rollout, label"),
    "words.py": own('return {"reward": 1.0, "why": "good"}'),
    "in_label.py": own("return float(rollout.prompt.label in rollout.text)"),
    "named_r.py": own("return float(len(r.text) % 3)", "r"),
    "plain.pt": b"xx",
    "text.jsonl": jsonl(*({"text": f"{i}+1={i + 1}"} for i in range(8))),
    "alpaca.jsonl": with_keys(
        SUMS, instruction=lambda row: "Add.", input=prompt, output=lambda row: row["label"]
    ),
    "as_text.jsonl": jsonl(*({"messages": json.dumps(chat)} for chat in CHATS)),
    "no_text.jsonl": jsonl(
        *({"messages": [chat[0], {"role": "assistant", "content": None}]} for chat in CHATS)
    ),
    "no_completion.jsonl": with_keys(SUMS, prompt=prompt, completion=lambda row: ""),
    "templated.jsonl": with_keys(
        SUMS, prompt=lambda row: f"<|im_start|>user\n{row['prompt']}<|im_end|>\n", completion=label
    ),
    "numbers.jsonl": with_keys(SUMS, prompt=lambda row: 5, label=label),
    "two_forms.jsonl": jsonl(*({**pair, "chosen": CHATS[0]} for pair in PAIRS)),
    "good.jsonl": jsonl(*({"prompt": "1+1=", "completion": "2", "label": "good"} for _ in PAIRS)),
    "comma.json": '[{"prompt": "1+1=", "label": "2"},\n {"prompt": "1+2=", "label": "3"},\n]',
    "semicolons.csv": "prompt;label\n1+1=;2\n2+1=;3\n",
    "sums.txt": "1+1=2\n",
    "factory.yaml": "stage: sft\nfinetuning_type: lora\nlora_target: all\ntemplate: qwen\n"
    "model_name_or_path: model\ndataset: chats.jsonl\ncutoff_len: 1024\n",
    "no_return.py": own("score = float('1' in rollout.text)"),
    "imports.py": f"import math_verifier\n\n{own('return 1.0')}",
    "open_r1.py": own("return [1.0 for _ in completions]", "completions, solution, **kwargs"),
    "response.py": own("return float('1' in rollout.response)"),
    "answer.py": own("return float(rollout.prompt.answer in rollout.text)"),
    "undefined.py": own("return float(extract(rollout.text) == rollout.prompt.label)"),
    "scorer.py": "class Scorer:\n    def __call__(self, rollout):\n        return 1.0\n",
    "value.py": "reward = 1.0\n",
}
TRAINING = "train.steps=1 log.tensorboard=false run.progress=false"
STARTS = {
    "rl": "model=model data.sources=sums.jsonl reward.terms=[math] rollout.prompts_per_step=2 "
    f"rollout.group_size=2 sampling.max_new_tokens=4 {TRAINING}",
    "sft": f"model=model data.sources=chats.jsonl batch_size=2 {TRAINING}",
    "dpo": f"model=model data.sources=pairs.jsonl batch_size=2 {TRAINING}",
    "distill": f"model=model data.sources=chats.jsonl batch_size=2 {TRAINING}",
}
OWN_CODE = "model= model.path=own_code model.trust_remote_code=true model.unproved_family=allow"
VARIED = "reward.terms=[varied.py:reward]"
ONE = "a function gets one rollout and returns a number: def reward(r)"

SETTINGS = (
    Mistake("01", "rl+ optimzer.lr=1e-5", "unknown setting optimzer | did you mean optimizer?"),
    Mistake("02", "rl+ optimizer.learning_rate=1e-5", "optimizer.learning_rate is optimizer.lr"),
    Mistake("03", "rl+ lr=1e-5", "lr is optimizer.lr here"),
    Mistake("05", "rl+ reward.terms=maths", "unknown reward 'maths'; did you mean 'math'?"),
    Mistake("06", "rl+ reward.terms=[]", "reward.terms is empty | e.g. reward.terms=[math]"),
    Mistake(
        "23", "rl+ sampling.temperature=0", "sampling.temperature = 0: | sampling.temperature=1"
    ),
    Mistake("24", "rl+ rollout.group_size=1", "rollout.group_size = 1: | set it to 2 or more"),
    Mistake("25", "rl+ optimizer.lr=1e-5x", "optimizer.lr = '1e-5x' | number | Peak learning rate"),
    Mistake("26", "rl+ optimizer.lr=5", "lr = 5: | lower it to 1 at most"),
    Mistake("27", f"rl+ 'model={{path: model, lora: 16}}' {VARIED}", "finished at step 1", 0),
    Mistake("28", "rl+ model= model.path=model model.lora.r=16", "is model.lora.rank here"),
    Mistake("29", "rl+ train.steps=1.5", "train.steps = 1.5 | valid integer | Number of steps"),
    Mistake("32", "rl+ algorithm=grpoo", "unknown preset 'grpoo'; did you mean 'grpo'?"),
    Mistake("33", "rl+ algorithm=dpo", "unknown preset 'dpo' | lightrft dpo"),
    Mistake("51", "rl+ eval.every=1", "eval.every = 1 changes nothing | eval.data.sources=["),
    Mistake(
        "52", "rl+ checkpoint.best=eval/acc", "'eval/acc' is never measured | name the eval set"
    ),
    Mistake("53", "train model=model", "there is no verb 'train'; did you mean 'rl'?"),
    Mistake("54", "grpo model=model", "there is no verb 'grpo' | 'lightrft rl algorithm=grpo'?"),
    Mistake("55", "rl r.yaml", "there is no config file r.yaml; did you mean rl.yaml?"),
    Mistake("56", "rl --config r.yaml", "there is no config file r.yaml; did you mean rl.yaml?"),
    Mistake("57", "eval data.sources=sums.jsonl", "unknown setting data | did you mean eval.data?"),
    Mistake("59", "chat modle=model", "unknown setting modle | did you mean model?"),
    Mistake("62b", "rl+ algorithm.kl.coefficient=1", "did you mean algorithm.kl.coef?"),
    Mistake("68", "rl+ loss_type=dapo", "loss_type is algorithm.aggregation | aggregation=token"),
    Mistake("69", "rl+ algorithm.loss.name=dapo", "'dapo'; it is a preset: algorithm=dapo."),
    Mistake("70", "rl+ 'reward.terms=[{function: math, weights: 1}]'", "reward.terms.0.weight?"),
    Mistake(
        "71", "rl+ 'reward.terms=[{function: math, options: {x: 1}}]'", "argument 'x' | last_number"
    ),
    Mistake("72", "rl+ optimizer.type=muon", "optimizer.type has no counterpart here | AdamW"),
    Mistake("72b", "rl+ optimizer.kind=muon", "optimizer.kind has no counterpart here | AdamW"),
    Mistake("73", "rl+ data.columns.answer=label", "columns.answer is data.columns.label here"),
    Mistake("90", "rl tab.yaml", "tab.yaml is not YAML: line 3 | indent by spaces, not by tabs"),
    Mistake("91", "rl indent.yaml", "indent.yaml is not YAML: line 4, 'batch: 2' | indentation"),
    Mistake(
        "93",
        "sft rl.yaml",
        "unknown setting rollout (from rl.yaml); it is a setting of lightrft rl",
    ),
    Mistake(
        "97", "rl+ reward.terms=math,format", "'math,format'; a list is written [math, format]."
    ),
    Mistake("106", "rl+ validation.sources=a.jsonl", "is eval.data.sources here"),
    Mistake("107", "rl+ train.epochs=0", "train.epochs = 0 | greater than 0; Passes over the data"),
    Mistake(
        "114b",
        "sft+ data.max_tokens=9",
        "unknown setting data.max_tokens | did you mean max_tokens?",
    ),
    Mistake(
        "y6", "rl+ smapling.top_p=1 train.steps=many lr=1", "smapling | 'many' | lr is optimizer.lr"
    ),
    Mistake("y9", f"rl+ algorithm.kl=0.01 {VARIED}", "finished at step 1", 0),
    Mistake("m1", "rl+ log.wandb=true", "log.wandb = True | not true; Weights & Biases project"),
    Mistake("m3", "rl+ report_to=wandb", "report_to is log.wandb here (log.wandb=lightrft"),
    Mistake("r3", "rl --pretrain model", "pretrain is model.path here"),
    Mistake("n1", "rl+ environment=x", "environment has no counterpart here: episodes of several"),
    Mistake("n1b", "rl+ tools=[x]", "tools has no counterpart here: episodes of several turns"),
    Mistake("n1c", "rl+ multi_turn=true", "multi_turn has no counterpart here: episodes"),
    Mistake("n2", "rl+ rollout.max_turns=5", "rollout.max_turns has no counterpart here: episodes"),
    Mistake("h1", "sft --help optimizer", "optimizer.lr | Peak learning rate", 0),
    Mistake("f1", "rl+ num_generations=8", "num_generations is rollout.group_size here"),
    Mistake("f2", "rl+ beta=0.04", "beta is algorithm.kl.coef here: with algorithm.kl.where=loss"),
    Mistake("f3", "rl+ scale_rewards=false", "here (algorithm.advantage.name=group_mean)"),
    Mistake(
        "f4",
        "rl+ save_strategy=epoch",
        "checkpoint.every here | give the steps of an epoch",
        score=2,
    ),
    Mistake("f5", "rl+ load_best_model_at_end=true", "is checkpoint.best here: a metric such as"),
    Mistake("f52", "rl+ rlhf_type=grpo", "rlhf_type has no counterpart here | algorithm=grpo"),
    Mistake("f7", "rl+ actor_rollout_ref.rollout.n=8", "rollout.n is rollout.group_size here"),
    Mistake("f8", "rl+ algorithm.adv_estimator=grpo", "is algorithm.preset here: a preset sets"),
    Mistake(
        "f9", "rl+ algorithm.kl.coef=1 algorithm.kl.estimator=low_var_kl", "did you mean 'k3'?"
    ),
    Mistake("f11", "rl+ rewards=[math]", "rewards is reward.terms here: as in reward.terms=[math]"),
    Mistake(
        "f12", "sft+ template=qwen", "is model.chat_template here | a name such as qwen is none"
    ),
    Mistake("f13", "dpo+ pref_loss=simpo", "preference.losses here (preference.losses=[simpo])"),
    Mistake("f15", "rl+ sampling.top_p=50", "sampling.top_p = 50 | equal to 1; | 1 keeps all"),
    Mistake("f16", "rl+ hub=true", "hub = True | it is a section | hub.repo"),
    Mistake("f17", "rl rl.yaml --learning_rate 1e-5", "learning_rate is optimizer.lr here"),
    Mistake("f18", "sft factory.yaml", "template is model.chat | cutoff_len is max_tokens here"),
    Mistake(
        "f19", "rl+ log.tensorboard=runs/tb", "true or false; did you mean log.tensorboard=true?"
    ),
)
DATA = (
    Mistake(
        "04", "rl+ data.sources=sum.jsonl", "no file or folder sum.jsonl; did you mean sums.jsonl?"
    ),
    Mistake(
        "09", "rl+ data.sources=qa.jsonl", "line 1: no column | has: q, a | data.columns.prompt"
    ),
    Mistake(
        "10", "rl+ data.columns.prompt=query", "no column 'query' | the row has: prompt, label"
    ),
    Mistake(
        "11", "rl+ data.sources=no_label.jsonl", "there is no label | 20 rows | data.columns.label"
    ),
    Mistake("14", "rl+ data.sources=some.jsonl", "line 10: there is no label | data.columns.label"),
    Mistake("15", "rl+ data.sources=empty.jsonl", "empty.jsonl has no rows; name another file"),
    Mistake(
        "16",
        "rl+ data.sources=broken.jsonl",
        "line 3: | column 29. Mend the row, or set data.bad_rows",
    ),
    Mistake(
        "18", "rl+ data.sources=empty_prompt.jsonl", "line 5: the prompt is empty. Mend the row"
    ),
    Mistake(
        "20", f"data model=model data.sources=human.jsonl {VARIED}", "<|im_start|>user\n1+1=", 0
    ),
    Mistake(
        "31", "rl+ data.sources=three.jsonl rollout.prompts_per_step=4", "per_step to 3 or less"
    ),
    Mistake("34", "dpo+ data.sources=sums.jsonl", "has: prompt, label | such as lightrft rl"),
    Mistake(
        "35", "rl+ data.sources=pairs.jsonl", "no label | chosen and rejected are for lightrft dpo"
    ),
    Mistake(
        "36", "sft+ data.sources=pairs.jsonl", "no response | data.columns.response | lightrft dpo"
    ),
    Mistake(
        "37", "sft+ data.sources=no_answer.jsonl", "line 1: | by a message of the role assistant"
    ),
    Mistake(
        "39", "dpo+ data.sources=equal.jsonl", "line 1: chosen is equal to rejected | Mend the row"
    ),
    Mistake("40", "dpo+ data.sources=good_bad.jsonl", "prompt, good, bad | data.columns.chosen"),
    Mistake(
        "42",
        "rl+ data.sources=images.jsonl model=eye",
        "line 1, column 'images' | no file gone.png",
    ),
    Mistake("43", "rl+ data.sources=images.jsonl", "reads text alone | data.columns.images: null"),
    Mistake(
        "83",
        "rl+ data.sources=image_q.jsonl model=eye",
        "no column with a prompt | data.columns.prompt",
    ),
    Mistake(
        "84", "rl+ data.sources=lists.jsonl", "label ['2'] is list, not a number or text; give one"
    ),
    Mistake("85", f"data model=model data.sources=prefill.jsonl {VARIED}", "assistant\nIt is", 0),
    Mistake(
        "88",
        "rl+ data.sources=latin.csv",
        "latin.csv, line 2: not UTF-8 text | save the file as UTF-8",
    ),
    Mistake("98", "rl+ data.sources=a.jsonl,b.jsonl", "a list is written [a.jsonl, b.jsonl]"),
    Mistake(
        "114", "sft+ max_tokens=2", "nothing is left of chats.jsonl | more than max_tokens = 2"
    ),
    Mistake("67", "rl+ data.max_prompt_tokens=2", "nothing is left | data.max_prompt_tokens = 2"),
    Mistake(
        "80",
        "rl+ 'data.template={question} Answer:'",
        "data.template names {question} | prompt, label",
    ),
    Mistake(
        "T3", "rl+ 'data.template=Q: {question}'", "data.template names {question} | prompt, label"
    ),
    Mistake(
        "T1", f"rl+ 'data.template=T: {{prompt}}' {VARIED}", "'T: {prompt}' is written inside", 0
    ),
    Mistake(
        "105",
        f"rl+ eval.data=a.jsonl eval.limit=2 eval.every=1 eval.sampling.max_new_tokens=4 {VARIED}",
        "are prompts of data",
        0,
    ),
    Mistake(
        "ev",
        f"data model=model data.sources=a.jsonl eval.data=b.jsonl data.system=Add {VARIED}",
        "eval.data: the first | system\nAdd<|im_end|>\n<|im_start|>user\n3+1=",
        0,
    ),
    Mistake("y14", "rl+ eval.data=no_label.jsonl eval.every=1", "eval.data.columns.label"),
    Mistake("d1", "dpo+ data.sources= data=pairs.jsonl", "finished at step 1", 0),
    Mistake(
        "120", "generate model=model data=sums.jsonl output=sums.jsonl", "exists; choose another"
    ),
    Mistake(
        "f20", "sft+ data.sources=text.jsonl", "has: text. Split | columns prompt and completion"
    ),
    Mistake(
        "f21", "sft+ data.sources=no_completion.jsonl", "line 1: | empty: completion. Mend the row"
    ),
    Mistake(
        "f22", "sft+ data.sources=no_text.jsonl", "line 1: | empty: the last of messages. Mend"
    ),
    Mistake("f23", "rl+ data.sources=comma.json", "line 3: not JSON | Mend that place", score=2),
    Mistake("f24", "rl+ data.sources=semicolons.csv", "line 1: the header | by commas, not by ';'"),
    Mistake(
        "f25", "sft+ data.sources=sums.txt", "sums.txt is not one of .jsonl | one JSON object a"
    ),
    Mistake(
        "f26", "dpo+ data.sources=two_forms.jsonl", "line 1: chosen is a list | write all in one"
    ),
    Mistake(
        "f27", "sft+ data.sources=templated.jsonl", "special token | set data.special_tokens", 0
    ),
    Mistake("f28", "sft+ data.sources=alpaca.jsonl", "finished at step 1", 0),
    Mistake("f29", "sft+ data.sources=as_text.jsonl", "finished at step 1", 0),
    Mistake("f30", "rl+ data.sources=numbers.jsonl", "line 1: a prompt must be text | not int"),
    Mistake(
        "f31", "rl+ data.columns.label=answer", "no column 'answer' | the row has: prompt, label"
    ),
    Mistake(
        "f32", "kto model=model data.sources=good.jsonl train.steps=1", "'good' | write true or"
    ),
    Mistake("f33", "dpo+ batch_size=64", "batch_size = 64 | lower batch_size to 8 or less"),
    Mistake(
        "f34", "generate model=model prompts=sums.jsonl output=o.jsonl", "prompts is data here"
    ),
)
REWARDS = (
    Mistake("07", "rl+ reward.terms=always.py", "must be named: write always.py:reward"),
    Mistake("08", "rl+ reward.terms=[always.py:nope]", "always.py has no 'nope'"),
    Mistake("13", "rl+ data.sources=floats.jsonl reward.terms=[exact_match]", "float | or take math"),
    Mistake("21a", "rl+ reward.terms=[none.py:reward]", "none.py:reward | NoneType, not a number"),
    Mistake("21b", "rl+ reward.terms=[text.py:reward]", "text.py:reward | returned str, not a number"),
    Mistake("21c", "rl+ reward.terms=[list.py:reward]", "list.py:reward | returned list, not a number"),
    Mistake("21d", "rl+ reward.terms=[nan.py:reward]", "nan.py:reward | returned nan"),
    Mistake("21e", "rl+ reward.terms=[pair.py:reward]", "pair.py:reward | returned tuple, not a number"),
    Mistake("21f", "rl+ reward.terms=[trl.py:reward]", f"'completions' of rewards of TRL | {ONE}"),
    Mistake("21h", "rl+ reward.terms=[verl.py:reward]", f"'solution_str' of rewards of verl | {ONE}"),
    Mistake("21i", "rl+ reward.terms=[openrlhf.py:reward]", f"'queries' | OpenRLHF | {ONE}"),
    Mistake("21j", "rl+ reward.terms=[typo.py:reward]", "attribute 'labels'; did you mean 'label'?"),
    Mistake("21k", "rl+ reward.terms=[two.py:reward]", "(rollout, label) | r.prompt.label"),
    Mistake("21g", "rl+ reward.terms=[trl_rows.py:reward]", f"'completions' of rewards of TRL | {ONE}"),
    Mistake("21l", "rl+ reward.terms=[score.py:reward]", "reward 1 (reward 1, reward/acc 0"),
    Mistake("22", "rl+ reward.terms=[hang.py:reward] reward.timeout=1", "longer than reward.timeout = 1 s"),
    Mistake("21m", "rl+ reward.terms=[words.py:reward]", "not a number for 'why'; leave 'why' out"),
    Mistake("63", "rl+ reward.models=[model]", "'model' | no reward model | lightrft rm | reward.judges"),
    Mistake("118", "rl+ data.sources=no_label.jsonl reward.terms=[in_label.py:reward]", "have no label"),
    Mistake("c1", "check named_r.py:reward", "as reward | all 5 checks hold", 0),
    Mistake("f6", "rl+ reward.terms=[always.py:reward,math] eval.data=a.jsonl eval.limit=2 "
            "eval.every=1 eval.sampling.max_new_tokens=4", "100% of groups have equal rewards"),
    Mistake("f35", "rl+ reward.terms=[no_return.py:reward]", "NoneType, not a number; end each | return"),
    Mistake("f36", "rl+ reward.terms=[imports.py:reward]", "install the package of math_verifier"),
    Mistake("f37", "rl+ reward.terms=[open_r1.py:reward]", f"'completions' of rewards of TRL | {ONE}"),
    Mistake("f38", "rl+ reward.terms=[response.py:reward]", "'response'; did you mean 'text'?"),
    Mistake("f39", "rl+ reward.terms=[answer.py:reward]", "'answer'; did you mean 'label'?"),
    Mistake("f40", "rl+ reward.terms=[undefined.py:reward]", "line 2 | name 'extract' is not defined", score=2),
    Mistake("f41", "rl+ reward.terms=[scorer.py:Scorer]", "is type, not a function | an instance of the"),
    Mistake("f42", "rl+ reward.terms=[accuracy]", "unknown reward 'accuracy'; did you mean 'math'?"),
)  # fmt: skip
MODELS = (
    Mistake("44", "sft+ model=bare", "has no chat template: messages are written | chat_template", 0),
    Mistake("45", "rl+ model=bare data.apply_chat_template=true", "no chat template; set model.chat"),
    Mistake("47", "sft+ model=./modle", "there is no such folder; did you mean model?"),
    Mistake("61", "merge 'models=[{model: model},{model: other}]' output=m", "of the type llama | qwen2"),
    Mistake("62", "rl+ reference=reordered algorithm.kl=0.1", "reference = 'reordered' | same tokenizer"),
    Mistake("62d", "dpo+ reference=reordered", "reference = 'reordered' | differ | same tokenizer"),
    Mistake("64", "rl+ algorithm=ppo critic.path=nope", "critic.path = 'nope' | no folder nope here"),
    Mistake("66", "rl+ model= model.path=model model.chat_template=chatml", "'chatml' is neither | leave it out"),
    Mistake("94", "rl+ data.sources=system.jsonl model=no_system", "refuses | system | model.chat_template"),
    Mistake("95", "rl+ model=no_weights", "'no_weights': the weights cannot be read | copy the folder"),
    Mistake("103", "rl+ model= model.path=model model.lora.targets=[q_projj]", "did you mean 'q_proj'?"),
    Mistake("109", "distill+ teacher=reordered", "teacher.path = 'reordered' | same tokenizer | kind=uld"),
    Mistake("p1", "rl+ model=own_code", "custom code | set model.trust_remote_code=true"),
    Mistake("p3", f"rl+ {OWN_CODE} {VARIED}", "finished at step 1", 0),
    Mistake("110c", "chat model=runs/nope", "model.path = 'runs/nope': there is no such folder"),
    Mistake("p4", "rl+ model=plain.pt", "model.path = 'plain.pt': it is a file; give the folder"),
    Mistake("p8", f"rl+ model= model.path=no_eos {VARIED}", "finished at step 1", 0),
    Mistake("f43", "sft+ model= model.path=model model.lora.rank=8 model.lora.targets=all", "'all' is the | 'all-linear'?"),
    Mistake("f44", "sft+ model= model.path=model model.lora.rank=8 model.lora.targets=[c_attn]", "'c_attn' is | such as [down_proj"),
    Mistake("f45", "sft+ model= model.path=model model.dtype=fp16", "did you mean model.dtype=float16?"),
    Mistake("f46", "rl+ model=awq", "model.path = 'awq': its weights are quantised | model.load_in_4bit"),
)  # fmt: skip
RUNS = (
    Mistake("58", "report demp", "there is no run folder demp; did you mean runs/demo?"),
    Mistake("60", "export model out", "'out' is neither | as in output=out"),
    Mistake("60b", "export from=model to=out", "to is output here"),
    Mistake("60c", "export model output=out", "neither a run folder | lightrft convert"),
    Mistake("104", "rl+ run.resume=runs/gone", "run.resume = 'runs/gone': there is no such checkpoint"),
    Mistake("108", "rl+ run.dir=/proc/runs", "run.dir/run.name: cannot make /proc/runs/run | another"),
    Mistake("110", "chat runs/nope", "'runs/nope' is neither | there is no folder runs/nope"),
    Mistake("c4", "eval model=model reward.terms=[always.py:reward] eval.data=a.jsonl eval.limit=4 "
            "eval.sampling.max_new_tokens=4", "'always.py:reward' is 1 for all 4 responses | '2'", 0),
    Mistake("110b", "eval runs/nope", "'runs/nope' is neither | there is no folder runs/nope"),
    Mistake("119", f"rl+ optimizer.lr=1e-2 {VARIED}", "optimizer.lr = 0.01 is above 0.001 | lower it", 0),
    Mistake("y2", "rl+ run.name=demo run.resume=never", "holds a run already | run.overwrite=true"),
    Mistake("y3", "rl+ run.name=demo optimizer.lr=1e-4", "another run.name | optimizer.lr: 1e-06 in the"),
    Mistake("g4", "rl+ run.name=demo optimizer.lr=1e-4 run.resume=runs/demo", "(and run.resume=runs/demo/"),
    Mistake("k1", "report runs/demo --step 10", "step=10: there are no settings here, but runs alone"),
    Mistake("f47", "rl+ run.resume=true", "run.resume = True | did you mean run.resume=auto?"),
    Mistake("f48", "rl+ run.resume=runs/demo", "no manifest.json; did you mean runs/demo/checkpoints/"),
    Mistake("m2", "rl+ log.wandb=p", "log.wandb = 'p' needs the package wandb | or leave log.wandb empty"),
    Mistake("m4", "rl+ log.mlflow=x", "log.mlflow = 'x' needs the package mlflow | leave log.mlflow empty"),
)  # fmt: skip
LAUNCH = (
    Mistake("48", "rl+ strategy.device=cuda:7", "device = 'cuda:7' cannot be used | strategy.device"),
    Mistake("65", "rl+ strategy.tensor_parallel=4", "strategy.tensor_parallel | launch.processes"),
    Mistake("l1", "rl+ launch.processes=0", "launch.processes = 0 | equal to 1; Number of ranks"),
    Mistake("l2", "rl+ launch.kind=slurm", "launch.kind = 'slurm' | 'local' or 'ray'"),
    Mistake("l3", "rl+ nproc_per_node=4", "nproc_per_node is launch.processes here | over all nodes"),
    Mistake("l4", "rl+ strategy=fsdp2", "'fsdp2' shards over several processes; set launch.processes"),
    Mistake("l5", "rl+ strategy.zero_stage=3", "needs strategy.kind deepspeed | strategy.kind=deepspeed"),
    Mistake("l6", "rl+ deepspeed=ds.json", "deepspeed is strategy.kind here | strategy.zero_stage"),
    Mistake("l7", "rl+ strategy.sequence_parallel=2", "set launch.processes to a multiple of 2"),
    Mistake("l8", "rl+ engine=vlm", "kind = 'vlm' is no engine; did you mean 'vllm'?"),
    Mistake("f49", "rl+ use_vllm=true", "use_vllm is engine.kind here (engine.kind=vllm)"),
    Mistake("f50", "rl+ trainer.n_gpus_per_node=8", "n_gpus_per_node is launch.processes here"),
    Mistake("49", "rl+ engine.kind=vllm", "engine.kind = vllm needs the package | set engine.kind=native"),
)  # fmt: skip
MEMORY = (
    Mistake("30", "rl+ sampling.max_new_tokens=100000", "max_new_tokens = 100000: | lower"),
    Mistake("50", "rl+ model= model.path=model model.load_in_4bit=true", "cannot be trained | lora.rank=16"),
    Mistake(
        "113b", "rl+ gradient_accumulation_steps=4", "is rollout.prompts_per_step here | product"
    ),
    Mistake("113", f"rl+ train.max_tokens_per_micro_batch=4 {VARIED}", "is a number of tokens", 0),
    Mistake(
        "112", "rl+ train.num_mini_batches=256", "256: it counts optimizer steps | 4 responses"
    ),
    Mistake(
        "112b", "rl+ ppo_mini_batch_size=256", "is train.num_mini_batches here | optimizer steps"
    ),
    Mistake("e1", "rl+ per_device_train_batch_size=4", "is rollout.prompts_per_step here | processes x"),
    Mistake("e2", "rl+ gradient_checkpointing=true", "is model.gradient_checkpointing here"),
    Mistake("e3", "rl+ strategy.offload=cpu", "strategy.offload is strategy.cpu_offload here"),
    Mistake("e4", "rl+ gpu_memory_utilization=0.5", "is engine.gpu_memory_utilization here | engine.max_cache_tokens"),
    Mistake("e5", "rl+ model= model.path=model model.load_in_8bit=true", "no counterpart | model.load_in_4bit"),
    Mistake("e6", "rl+ bf16=true", "bf16 is model.dtype here (model.dtype=bfloat16)"),
    Mistake("e7", "rl+ train.max_tokens_per_micro_batch=0", "per_micro_batch = 0 | Most tokens in one forward"),
    Mistake("96", "doctor model=big data.sources=sums.jsonl", "does not fit | set model.lora or"),
    Mistake("f51", "rl+ model= model.path=model model.gradient_checkpointing=unsloth", "checkpointing=true?"),
)  # fmt: skip
PYTHON = tuple(
    Mistake(f"python-{name}", f"{PROMPT}{typed}", *rest) for name, typed, *rest in PYTHON_ROWS
)
FILES |= {
    f"{name}.yaml": "".join(f"{word.replace('=', ': ', 1)}\n" for word in STARTS[verb].split())
    for name, verb in {"grpo": "rl", "sft": "sft", "dpo": "dpo"}.items()
}
FILES["grpo.yaml"] = FILES["grpo.yaml"].replace("[math]", "[varied.py:reward]")
"""The words of ``STARTS`` as files, which ``PYTHON`` starts from."""
SUBJECTS = {
    "Settings": SETTINGS,
    "Data": DATA,
    "Rewards": REWARDS,
    "Models": MODELS,
    "Memory": MEMORY,
    "Launch": LAUNCH,
    "Runs": RUNS,
    "Python": PYTHON,
}
"""The mistakes by what they are about."""
MISTAKES = tuple(mistake for part in SUBJECTS.values() for mistake in part)
