"""Reader of GSM8K, grade-school math word problems (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re

from lightrft.datasets.row_readers import READERS
from lightrft.datasets.row_tables import Row

MARK = re.compile(r"<<[^<>]*>>")
ANSWER = re.compile(r"####\s*(\S.*?)\s*$")


@READERS.register("gsm8k")
def gsm8k(row: Row, *, keep_marks: bool = False) -> Row:
    """Read ``{question, answer}``, where ``answer`` is a worked solution.

    ``question`` is the prompt, and the solution is the response. The label is the number after
    ``####``, without commas. Calculator marks (``<<48/2=24>>``) are removed from the response
    unless ``keep_marks`` is True. Raises ``ValueError`` if there is no ``####`` line.
    """
    solution = str(row["answer"])
    found = ANSWER.search(solution)
    if found is None:
        raise ValueError("the column 'answer' has no '#### number' at its end")
    response = solution if keep_marks else MARK.sub("", solution)
    # Some labels have commas between thousands, which few responses write.
    label = found[1].replace(",", "")
    named = {
        "prompt": row["question"],
        "response": response,
        "label": label,
        "reference": response,
        "data_source": "gsm8k",
    }
    return {**row, **named}
