import io

import pytest

from lightrft.observability.progress_bar import Progress, clock_time


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(rows, seconds=1.0, **options):
    """What a log that is not a terminal shows for ``rows``, one every ``seconds``."""
    clock, stream = Clock(), io.StringIO()
    with Progress(10, "rl", stream=stream, clock=clock, **options) as progress:
        for row in rows:
            clock.now += seconds
            progress.update(row)
    return stream.getvalue().splitlines(), progress


def test_a_plain_log_gets_lines_at_intervals_and_at_the_end():
    lines, _ = run([{"step": s, "reward/mean": s / 10} for s in range(1, 11)], seconds=4.0)
    assert [line.split(" · ")[0] for line in lines] == ["rl 1/10", "rl 4/10", "rl 7/10", "rl 10/10"]
    assert lines[1] == "rl 4/10 · reward 0.400 · 0:24 left"


@pytest.mark.parametrize("metric", ["loss", "policy/loss"])
def test_the_loss_is_shown_under_the_name_that_any_verb_gives_it(metric):
    lines, _ = run([{"step": 10, metric: 0.125}])
    assert "loss 0.1250" in lines[0]


def test_every_evaluation_is_shown_and_its_value_stays():
    rows = [
        {"step": 1, "tokens_per_second": 1234.4},
        {"step": 2, "eval/accuracy": 0.625},
        {"step": 10, "response/length": 7.6},
    ]
    lines, _ = run(rows, seconds=0.1)
    assert "eval 62.5%" in lines[1]
    assert "eval 62.5% · length 8 · tok/s 1,234" in lines[2]


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"preference/accuracy": 0.75, "preference/margin": 0.5}, "accuracy 75.0% · margin 0.500"),
        ({"reward_model/good/accuracy": 0.75, "reward_model/web/accuracy": 0.5}, "75.0%"),
        ({"process_model/step_accuracy": 0.25}, "step accuracy 25.0%"),
        ({"distill/divergence": 0.125}, "divergence 0.1250"),
        ({"eval/pair_accuracy": 1.0}, "eval pairs 100.0%"),
    ],
)
def test_the_line_names_what_matters_for_the_verb(row, shown):
    lines, _ = run([{"step": 10, **row}])
    assert shown in lines[0] and "50.0%" not in lines[0]


def test_time_left_follows_the_recent_steps():
    _, progress = run([{"step": 1}, {"step": 2}, {"step": 4}], seconds=2.0)
    assert progress.seconds_left() == 12.0
    assert Progress(5).seconds_left() is None


def test_nothing_is_shown_when_switched_off():
    lines, progress = run([{"step": 1}], enabled=False)
    assert lines == []
    assert progress.done == 1


def test_a_terminal_gets_one_live_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress(3, "rl", stream=stream) as progress:
        progress.update({"step": 1, "reward/mean": 0.5, "note": "text is passed over"})
        progress.update({"step": 2, "reward/mean": 0.75})
    assert "2/3" in stream.getvalue()
    assert "reward 0.750" in stream.getvalue()


def test_clock_times_read_like_a_clock():
    assert [clock_time(s) for s in (None, 0, 75, 3675)] == ["--:--", "0:00", "1:15", "1:01:15"]
