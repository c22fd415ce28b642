"""Run lm-eval unchanged against ``lightrft serve``, and compare all that it reads with transformers' own numbers.

lm-eval comes from an environment of its own, since it pins versions of other libraries:

    python -m venv lm-eval-env
    lm-eval-env/bin/pip install 'lm-eval[api]' transformers
    python benchmarks/same_as_lm_eval.py --lm-eval lm-eval-env/bin/lm_eval

The tasks are one of log-likelihoods and one of generation over ``local-completions``, and one of generation over
``local-chat-completions``. The model is tiny and random. The script ends with status 1 if a difference exceeds rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lightrft.models.loading.save_model import save_model
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

CHOICES = ["2", "13", " five"]
TOKENS = 8
# float32 rounds sums of a few log-probs by less
ROUNDING = 1e-4
ROWS = [{"q": f"{a}+{b}=", "a": str(a + b)} for a in range(1, 6) for b in range(1, 6)]


def task(name: str, data: Path, **about: Any) -> dict[str, Any]:
    """The definition of a task over the rows of ``data``."""
    files = {"data_files": {"test": str(data)}}
    source = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    return {"task": name, **source, "doc_to_text": "{{q}}", **about}


def write_tasks(folder: Path) -> None:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    metric = lambda name: [{"metric": name, "aggregation": "mean", "higher_is_better": True}]  # noqa: E731
    choice = {"output_type": "multiple_choice", "doc_to_choice": CHOICES, "doc_to_target": 0}
    limits = {"until": ["\n"], "max_gen_toks": TOKENS, "do_sample": False, "temperature": 0.0}
    text = {"output_type": "generate_until", "doc_to_target": "{{a}}", "generation_kwargs": limits}
    tasks = [
        task("likelihoods", data, **choice, metric_list=metric("acc")),
        task("generation", data, **text, metric_list=metric("exact_match")),
    ]
    for one in tasks:
        # JSON is YAML
        file = folder / f"{one['task']}.yaml"
        file.write_text(json.dumps(one), encoding="utf-8")


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """Serve ``model``. Yield the address."""
    words = [sys.executable, "-m", "lightrft", "serve", str(model), "http.port=0"]
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=out, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "http://" in line:
                yield "http://" + line.split("http://")[1].split()[0].rstrip("/.,;")
                return
        raise SystemExit(f"lightrft serve ended:\n{log.read_text()}")
    finally:
        process.terminate()
        process.wait(30)


def lm_eval(program: str, folder: Path, name: str, tasks: str, *words: str) -> dict[str, Any]:
    """Run lm-eval. Return the samples of each task."""
    out = folder / name
    command = [program, "run", "--tasks", tasks, "--include_path", str(folder), "--log_samples"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    subprocess.run([*command, "--output_path", str(out), *words], env=environment, check=True)
    found = {}
    for one in tasks.split(","):
        [file] = out.rglob(f"samples_{one}_*.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[one] = sorted(rows, key=lambda row: row["doc_id"])
    return found


def expected(folder: Path) -> tuple[list[list[float]], list[str], list[str]]:
    """Log-likelihoods of all choices, and greedy responses to the prompts and to the chats, by transformers."""
    # lm-eval encodes log-likelihoods by the class of Qwen2, which splits text in its own way
    theirs = AutoTokenizer.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    likelihoods, texts, chats = [], [], []

    def greedy(ids: list[int]) -> str:
        given = torch.tensor([ids])
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=TOKENS,
            pad_token_id=tokenizer.pad_token_id,
        )
        text = tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True)
        return text.split("\n")[0]

    for row in ROWS:
        prompt = tokenizer.encode(row["q"], add_special_tokens=False)
        start = len(theirs.encode(row["q"], add_special_tokens=False))
        totals = []
        for choice in CHOICES:
            whole = theirs.encode(row["q"] + choice, add_special_tokens=False)
            with torch.inference_mode():
                logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            places = range(start, len(whole))
            totals.append(sum(float(logprobs[at - 1, whole[at]]) for at in places))
        likelihoods.append(totals)
        texts.append(greedy(prompt))
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["q"]}], add_generation_prompt=True, return_dict=False
        )
        chats.append(greedy(chat))
    return likelihoods, texts, chats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lm-eval", default="lm_eval")
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(tiny_model("qwen2"), tiny_tokenizer(), folder / "model")
        write_tasks(folder)
        with served(folder / "model", folder / "serve.log") as url:
            about = f"model={folder / 'model'},tokenizer={folder / 'model'},num_concurrent=4"
            texts = lm_eval(
                args.lm_eval,
                folder,
                "texts",
                "likelihoods,generation",
                *("--model", "local-completions"),
                *("--model_args", f"{about},base_url={url}/v1/completions"),
            )
            chats = lm_eval(
                args.lm_eval,
                folder,
                "chats",
                "generation",
                *("--model", "local-chat-completions", "--apply_chat_template"),
                *("--model_args", f"{about},base_url={url}/v1/chat/completions"),
            )
        likelihoods, plain, answered = expected(folder / "model")
    report(args, texts, chats, likelihoods, plain, answered)


def report(
    args: argparse.Namespace,
    texts: dict[str, Any],
    chats: dict[str, Any],
    likelihoods: list[list[float]],
    plain: list[str],
    answered: list[str],
) -> None:
    gap = max(
        abs(float(found[0][0]) - wanted)
        for row, totals in zip(texts["likelihoods"], likelihoods, strict=True)
        for found, wanted in zip(row["resps"], totals, strict=True)
    )
    equal = lambda rows, wanted: sum(  # noqa: E731
        row["resps"][0][0] == one for row, one in zip(rows, wanted, strict=True)
    )
    counts = [equal(texts["generation"], plain), equal(chats["generation"], answered)]
    python = Path(args.lm_eval).with_name("python")
    ask = "import importlib.metadata as m; print(m.version('lm_eval'))"
    version = subprocess.check_output([python, "-c", ask], text=True).strip()
    total, pairs = len(ROWS), len(ROWS) * len(CHOICES)
    lines = [
        "# lm-eval against `lightrft serve`",
        "",
        "`python benchmarks/same_as_lm_eval.py`",
        "",
        f"{args.machine}, lm-eval {version}, transformers {transformers.__version__}, torch "
        f"{torch.__version__}. What lm-eval read from the server, against transformers' own numbers.",
        "",
        "| lm-eval | task | compared | result |",
        "|---|---|---|---|",
        f"| `local-completions` | log-likelihoods | {pairs} sums | largest difference {gap:.1e} |",
        f"| `local-completions` | generation | {total} texts | {counts[0]} equal |",
        f"| `local-chat-completions` | generation | {total} texts | {counts[1]} equal |",
    ]
    file = args.out / f"same_as_lm_eval-{args.machine}.md"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    if gap > ROUNDING or counts != [total, total]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
