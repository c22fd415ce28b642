"""Extract the final answer from a response.

Only the response is searched, since a prompt may contain tags and boxes too.
"""

from __future__ import annotations

import re

from lightrft.rewards.sandbox.rollout_view import RolloutView

_BOX = re.compile(r"\\f?box(?:ed)?\s*(?=[{\s\\\w])")
ANSWER_IS = (
    r"(?:\b(?:antwort|réponse|respuesta|risposta|resposta|ответ)\**+\s*+"
    r"(?:(?:ist|est|es|è|é)\b|[-–—:=])"
    r"|(?:答案|答え|正解|정답|답)\**+\s*+(?:应?该?[是为]|就是|等于|は|은|는|[:：=]))"
)
"""Pattern of "the answer is" in other languages than English. Its time is linear in the text."""
UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
"""Characters of scripts whose words follow a number without a space, for a class of a pattern."""
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def reference_answer(rollout: RolloutView) -> object:
    """Return the expected answer: the prompt's label, else its reference.

    Raises:
        ValueError: If the prompt has neither.
    """
    prompt = rollout.prompt
    gold = prompt.reference if prompt.label is None else prompt.label
    if gold is None or (isinstance(gold, str) and not gold.strip()):
        raise ValueError(
            f"prompt {prompt.id!r} has neither a label nor a reference to compare with"
        )
    return gold


def after_thinking(text: str) -> str:
    """Return ``text`` without its thinking; empty while the thinking has not ended."""
    # The opening tag may be part of the prompt, so the closing one alone ends the thinking.
    _, end, tail = text.rpartition("</think>")
    text = tail if end else text
    return text.partition("<think>")[0]


def in_tags(text: str) -> str | None:
    """Return the content of the last ``<answer>`` tag, if there is one."""
    found = _TAG.findall(text)
    return found[-1] if found else None


def answer_part(text: str) -> str:
    """Return the content of the last ``<answer>`` tag after the thinking, else all that follows
    the thinking."""
    text = after_thinking(text)
    tagged = in_tags(text)
    return text if tagged is None else tagged


def last_box(text: str) -> tuple[int, str | None] | None:
    r"""Return the start and the content of the last ``\boxed{}``; ``None`` if there is no box.

    The content is ``None`` if the box never closes.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    last = boxes[-1]
    start = last.end()
    if text[start : start + 1] != "{":
        # TeX takes one character or command as the argument. Who writes \boxed 12 means the number.
        word = re.match(r"\\[A-Za-z]+|-?\d++(?:[.,]\d++)*+|\S", text[start:].lstrip())
        return last.start(), word.group() if word else None
    depth = 0
    escaped = False
    for position in range(start, len(text)):
        character = text[position]
        if escaped:
            escaped = False
            continue
        escaped = character == "\\"
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return last.start(), text[start + 1 : position]
    return last.start(), None


def visible_answer(text: str) -> str | None:
    """Return the final answer; ``None`` if a box is empty or open.

    It is in the last box, else in the last tag, else everything after the thinking.
    """
    answer = answer_part(text)
    box = last_box(answer)
    if box is not None:
        _, answer = box
    return content_of(answer)


def content_of(answer: str | None) -> str | None:
    """Return ``answer``; ``None`` if it is blank."""
    return answer if answer and answer.strip() else None
