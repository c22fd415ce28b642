"""The settings that an unknown name may mean: misspelled, shortened, or in another section."""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Iterator, Sequence

from lightrft.config.setting_paths import branch_of

if typing.TYPE_CHECKING:
    from lightrft.config.base import Settings


def nearest(cls: type[Settings], path: Sequence[str]) -> str:
    """Return the settings that the unknown ``path`` may mean, as ``a or b``, or "".

    Args:
        cls: Settings class of the whole tree.
        path: The parts of the dotted name. Its section exists.
    """
    *above, last = path
    if above and last in cls.model_fields:
        return last
    known = functools.reduce(branch_of, above, cls).model_fields
    near = difflib.get_close_matches(last, known, n=1, cutoff=0.8)
    # Alone, ``rewards`` may be a setting of a section, or ``reward`` with a letter too many.
    others = [] if above and near else _elsewhere(cls, last, above)
    if not near and (above or not others):
        near = difflib.get_close_matches(last, known, n=1)
    if not near and not others:
        # ``coefficient`` is ``coef``, which too few of its letters spell.
        near = [key for key in known if _is_begun(key, last)][:1]
    found = [*(".".join([*above, one]) for one in near), *others][:6]
    return f"one of {', '.join(found)}" if found[2:] else " or ".join(found)


def _elsewhere(cls: type[Settings], name: str, above: Sequence[str]) -> list[str]:
    """Return the settings ``name`` of other sections, as for ``group_size=8`` or ``train.lr=1``.

    Those below the section ``above`` come first, then those with the shortest names.
    """
    found = [key for key in leaves(cls) if f".{key}".endswith(f".{name}")]
    # ``critic.optimizer.lr`` is meant only by who names the critic.
    inside = [key for key in found if above and key.startswith(f"{'.'.join(above)}.")]
    outside = [key for key in found if not any(key.endswith(f".{one}") for one in found)]
    by_depth = sorted(outside, key=lambda key: key.count("."))
    return [*inside, *(key for key in by_depth if key not in inside)]


def leaves(cls: type[Settings], above: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings of ``cls``, lists of tables included."""
    for name in cls.model_fields:
        yield f"{above}{name}"
        below = branch_of(cls, name)
        if below is not cls:
            yield from leaves(below, f"{above}{name}.")


def _is_begun(a: str, b: str) -> bool:
    return min(len(a), len(b)) > 2 and (a.startswith(b) or b.startswith(a))
