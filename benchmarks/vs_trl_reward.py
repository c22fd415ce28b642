"""Compare steps of reward models with TRL's ``RewardTrainer``: time, CPU time and memory.

    python benchmarks/vs_trl_reward.py [--rounds 3] [--cases pairs ranked image image_ranked] [--out DIR]

As ``vs_trl_preference.py``, whose rounds and report these are. ``pairs`` are texts. ``ranked`` are
four ranked responses to a prompt: one row of lightrft, and all six pairs of it for TRL. ``image``
and ``image_ranked`` have a picture in each prompt. TRL's trainer reads texts alone, so that its side gets tokens and
pixels from a collator here, and a Qwen2.5-VL with a linear head. Both sides compute the same loss
and gradients (``tests/numbers/test_reward_losses.py`` has the loss of TRL).

``tokens`` are tokens that the trunk computes over the nodes of the prefix trees.

Needs ``pip install trl``. Compare ratios only: absolute times belong to the machine.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from vs_trl import load_tokenizer, write_lines
from vs_trl_preference import (
    BUDGET,
    WARM,
    Case,
    Clock,
    Comparison,
    Side,
    main,
    make,
    marks,
    picture,
    trl_settings,
)
from vs_trl_vlm import MERGE, PATCH, Pictures

CASES = {
    "pairs": Case("rm", 256, 256, 8, 4, {"seconds": 1.5}),
    "ranked": Case("ranked", 256, 256, 4, 4, {"seconds": 2.5}),
    "image": Case("rm", 64, 64, 4, 3, {"seconds": 2.5}, side=16),
    "image_ranked": Case("ranked", 64, 64, 2, 3, {"seconds": 2.5}, side=16),
}
RANKED = 4
"""Responses of a ranking."""


def rows_of(case: Case, folder: Path, scratch: Path) -> list[dict[str, Any]]:
    """Write the rows of all steps to ``rows.jsonl``, and return them as pairs for TRL."""
    draw = random.Random(0)
    letters = [c for c in load_tokenizer(folder).get_vocab() if len(c) == 1 and not c.isspace()]

    def text(most: int, least: int) -> str:
        return "".join(draw.choices(letters, k=draw.randint(least, most)))

    ours, theirs = [], []
    for i in range(case.rows * (case.steps + WARM + 1)):
        prompt = text(case.prompt, case.prompt)
        count = RANKED if case.verb == "ranked" else 2
        said = [text(case.response, case.response // 4) for _ in range(count)]
        given: dict[str, Any] = {}
        asked: Any = prompt
        if case.side:
            file = picture(scratch / f"{i}.png", case.side * PATCH * MERGE, i)
            given = {"image": str(file)}
            parts = [{"type": "image", "image": file.name}, {"type": "text", "text": prompt}]
            asked = [{"role": "user", "content": parts}]
        ranked = [{"rank": rank, "completion": answer} for rank, answer in enumerate(said)]
        ours.append({"prompt": asked, "completions": ranked})
        for chosen, rejected in itertools.combinations(said, 2):
            theirs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, **given})
    write_lines(scratch / "rows.jsonl", ours)
    return theirs


def config_of(case: Case, folder: Path, scratch: Path, share: int = 1) -> Any:
    """Return the settings of ``lightrft rm``."""
    from lightrft.config.base import build
    from lightrft.config.verbs import RMConfig

    tree: dict[str, Any] = {
        "run": {"dir": str(scratch), "name": "run", "progress": False},
        "model": {"path": str(folder), "dtype": "float32", "check_layout": False},
        "data": {"sources": [{"path": str(scratch / "rows.jsonl")}], "shuffle": False},
        "batch_size": case.rows,
        "max_tokens": 4096,
        # The last step writes a checkpoint, so that one more is taken than is measured.
        "train": {"steps": case.steps + WARM + 1, "max_tokens_per_micro_batch": BUDGET // share},
        "optimizer": {"lr": 1e-5},
        "strategy": {"device": "cpu"},
        "log": {"tensorboard": False},
    }
    return build(RMConfig, tree)


def nodes_of(case: Case, config: Any) -> int:
    """Return the nodes of the prefix trees of the measured steps, one tree for each row."""
    examples = examples_of(config)
    nodes = 0
    for i in range(case.rows * WARM, case.rows * (WARM + case.steps)):
        answers = [response.token_ids for response in examples[i].responses]
        rows = [[*examples[i].prompt_ids, *answer] for answer in answers]
        nodes += len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    return nodes


def examples_of(config: Any) -> Any:
    """Return the examples as ``lightrft rm`` reads them."""
    from lightrft.datasets.preference.preference_dataset import PreferenceDataset
    from lightrft.models.loading.from_pretrained import load_tokenizer as own_tokenizer
    from lightrft.models.processors import load_processor

    tokenizer = own_tokenizer(config.model)
    return PreferenceDataset(
        config.data,
        tokenizer,
        kind="ranked",
        max_tokens=config.max_tokens,
        seed=0,
        processor=load_processor(config.model, tokenizer),
        heads=["preference"],
    )


def run_lightrft(case: Case, folder: Path, scratch: Path, part: int) -> dict[str, float]:
    """Take the steps with the verb's own run."""
    from lightrft.observability.observer import NullObserver
    from lightrft.trainer.reward_model.run import run_reward_model

    clock = Clock()

    class Marks(NullObserver):
        def update(self, row: Any) -> None:
            clock.mark()

    rows_of(case, folder, scratch)
    config = config_of(case, folder, scratch, part)
    run_reward_model(config, Marks())
    return clock.result(case.steps, nodes_of(case, config))


def run_trl(case: Case, folder: Path, scratch: Path, part: int) -> dict[str, float]:
    """Take the steps with TRL's trainer, in ``part`` micro-batches."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification

    clock = Clock()
    rows = rows_of(case, folder, scratch)
    pairs = case.rows * (RANKED * (RANKED - 1) // 2 if case.verb == "ranked" else 1)
    settings = trl_settings(case, scratch, pairs, part)
    tokenizer = load_tokenizer(folder)
    own: dict[str, Any] = {}
    if case.side:
        settings["remove_unused_columns"] = False
        processor = Pictures().processing_class(folder)
        model = scoring_model(folder, processor)
        own["data_collator"] = collator(processor)
        rows = [with_ids(row, processor) for row in rows]
    else:
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype="float32"
        )
    trainer = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[marks(clock)],
        **own,
    )
    trainer.train()
    return clock.result(case.steps, nodes_of(case, config_of(case, folder, scratch)))


def with_ids(row: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Return ``row`` with the tokens of both conversations. The picture is read by the collator."""
    found = {"image": row["image"]}
    for name in ("chosen", "rejected"):
        parts = [{"type": "image", "image": row["image"]}, {"type": "text", "text": row["prompt"]}]
        answer = [{"type": "text", "text": row[name]}]
        turns = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answer},
        ]
        encoded = processor.apply_chat_template(turns, tokenize=True, return_dict=True)
        found[f"{name}_ids"] = list(encoded["input_ids"][0])
    return found


def collator(processor: Any) -> Any:
    """Return TRL's collator of pairs, with the pixels of both conversations."""
    from PIL import Image
    from trl.trainer.reward_trainer import DataCollatorForPreference

    pad = processor.tokenizer.pad_token_id
    inner = DataCollatorForPreference(pad_token_id=pad)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        images = [Image.open(row["image"]) for row in rows]
        pixels = processor.image_processor(images=[*images, *images], return_tensors="pt")
        return {**inner(rows), **pixels}

    return collate


def scoring_model(folder: Path, processor: Any) -> Any:
    """Return a Qwen2.5-VL with a linear head on the last token, which transformers has not."""
    import torch
    from transformers import Qwen2_5_VLModel, Qwen2_5_VLPreTrainedModel
    from transformers.modeling_outputs import SequenceClassifierOutput

    class Scoring(Qwen2_5_VLPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.num_labels = 1
            self.model = Qwen2_5_VLModel(config)
            self.score = torch.nn.Linear(config.get_text_config().hidden_size, 1, bias=False)
            self.post_init()

        def forward(self, input_ids: Any, attention_mask: Any, **media: Any) -> Any:
            states = self.model(
                input_ids=input_ids, attention_mask=attention_mask, **media
            ).last_hidden_state
            rows = torch.arange(len(states))
            last = states[rows, attention_mask.sum(1) - 1]
            return SequenceClassifierOutput(logits=self.score(last))

    model = Scoring.from_pretrained(folder, dtype=torch.float32, num_labels=1)
    model.config.get_text_config().pad_token_id = processor.tokenizer.pad_token_id
    return model


if __name__ == "__main__":
    both: dict[str, Side] = {"lightrft": run_lightrft, "trl": run_trl}
    title = "Steps of reward models against TRL"
    raise SystemExit(main(Comparison(Path(__file__).resolve(), title, CASES, make, both), __doc__))
