"""Readers of benchmarks of reward models: a prompt with right and wrong responses.

They cover RewardBench (arXiv 2403.13787), RewardBench 2 (arXiv 2506.01937), VL-RewardBench (arXiv
2411.17451) and Multimodal RewardBench (arXiv 2502.14191). All become ``{prompt, chosen: texts,
rejected: texts, subset, id}``.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightrft.datasets.benchmarks.preference_pairs import placed
from lightrft.datasets.row_tables import READERS, Row

TIES = "ties"
"""Name of the subset of RewardBench 2 with several right responses, in lower case."""


@READERS.register("reward_bench")
def reward_bench(row: Row) -> Row:
    """Read ``{prompt, chosen, rejected, subset, id}`` of RewardBench, with one response each.

    The data source ends in the subset, such as ``reward_bench/alpacaeval-easy``.
    """
    return _choice(row, "reward_bench", row["prompt"], [row["chosen"]], [row["rejected"]])


@READERS.register("reward_bench_2")
def reward_bench_2(row: Row) -> Row:
    """Read ``{prompt, chosen: texts, rejected: texts, subset, id}`` of RewardBench 2.

    The data source ends in the subset, such as ``reward_bench_2/Factuality``. In the subset Ties,
    several responses are right, and ``id`` is ``ref:N`` or ``tied:N``. A judge rates each of its
    responses: ``rate_each``.
    """
    made = _choice(row, "reward_bench_2", row["prompt"], row["chosen"], row["rejected"])
    return {**made, "rate_each": str(row["subset"]).lower() == TIES}


@READERS.register("vl_rewardbench")
def vl_rewardbench(row: Row) -> Row:
    """Read ``{id, query, image, response: [first, second], human_ranking, query_source}``.

    ``human_ranking`` is the rank of each response; 0 is better. The subset is ``query_source``.
    Raises ``ValueError`` unless the ranks are 0 and 1.
    """
    ranks = list(row["human_ranking"])
    if sorted(ranks) != [0, 1] or len(row["response"]) != 2:
        raise ValueError(f"human_ranking is {ranks}, not the ranks 0 and 1 of two responses")
    best = ranks.index(0)
    made = {**row, "subset": row.get("query_source") or "all", "images": [row["image"]]}
    # the prompt and the candidates have columns of their own
    for name in ("query", "response", "image"):
        del made[name]
    sides = [[row["response"][k]] for k in (best, 1 - best)]
    return _choice(made, "vl_rewardbench", row["query"], *sides)


@READERS.register("multimodal_rewardbench")
def multimodal_rewardbench(row: Row, *, root: str = "") -> Row:
    """Read ``{ID, Text, Image, Output1, Output2, Better, Category}``.

    ``Better`` is Output1 or Output2. ``root`` is the folder of relative paths. The subset is
    ``Category``. Raises ``ValueError`` for another value of ``Better``.
    """
    names = ["Output1", "Output2"]
    if row["Better"] not in names:
        raise ValueError(f"Better is {row['Better']!r}, not Output1 or Output2")
    best = names.index(row["Better"])
    made = {"id": row["ID"], "subset": row["Category"], "images": [placed(row["Image"], root)]}
    sides = [[row[names[k]]] for k in (best, 1 - best)]
    return _choice(made, "multimodal_rewardbench", row["Text"], *sides)


def _choice(
    row: Row, source: str, prompt: object, chosen: Sequence[str], rejected: Sequence[str]
) -> Row:
    """Return ``row`` with the usual columns of a choice among responses.

    Args:
        row: the row, with ``subset`` and ``id``.
        source: name of the benchmark.
        prompt: the prompt.
        chosen: the right responses.
        rejected: the wrong responses.
    """
    return {
        **row,
        "prompt": prompt,
        "chosen": list(chosen),
        "rejected": list(rejected),
        "data_source": f"{source}/{row['subset']}",
        "id": str(row["id"]),
    }
