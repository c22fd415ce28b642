"""When a run of several processes stops: all of them at once."""

from __future__ import annotations

from typing import Any

from lightrft.config import CheckpointConfig
from lightrft.trainer.session import Nobody, Session


class Late:
    """Ranks of which this one is asked to stop while it waits for what the others say."""

    rank, size, minutes = 0, 2, 1.0

    def __init__(self) -> None:
        self.session: Session | None = None

    def gather(self, value: Any) -> list[Any]:
        assert self.session is not None
        self.session.stop.request("a signal")
        return [value, False]


def test_a_rank_that_is_asked_to_stop_while_others_are_heard_goes_on_as_they_do_and_stops_with_them_the_next_time() -> None:
    ranks = Late()
    ranks.session = Session(None, None, CheckpointConfig(), "rl", Nobody(), ranks=ranks)  # type: ignore[arg-type]
    assert [ranks.session.stopping(), ranks.session.stopping()] == [False, True]
