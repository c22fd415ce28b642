"""The scorer with real processes: what bad reward functions do, and that nothing is lost."""

import importlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lightrft.config.reward import RewardConfig
from lightrft.distributed.guarded.guardian import has_more_descendants
from lightrft.rewards import REWARDS
from lightrft.rewards.registry import OverBudget
from lightrft.rewards.rules import math
from lightrft.rewards.sandbox.process import WorkerProcess
from lightrft.rewards.sandbox.rollout_view import view_of
from lightrft.rewards.scorer import Scorer
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import RewardError

FUNCTIONS = Path(__file__).with_name("reward_functions.py")


def rollout(text="1", **prompt):
    asked = Prompt(**{"id": "p0", "token_ids": [1, 2], "text": "Q?", **prompt})
    return Rollout(asked, [5, 6], [True, False], [-0.5, 0.0], [1, 1], "stop", seed=0, text=text)


def config(*functions, **settings):
    terms = [
        {"function": f"{FUNCTIONS}:{f}"}
        if isinstance(f, str)
        else {**f, "function": f"{FUNCTIONS}:{f['function']}"}
        for f in functions
    ]
    return RewardConfig.model_validate(
        {"terms": terms, "timeout": 300, "memory_mb": 256, **settings}
    )


def score(texts, *functions, **settings):
    """Each rollout by its index, and the scorer's counts."""
    rollouts = [rollout(t) for t in texts]
    with Scorer(config(*functions, **settings)) as scorer:
        with scorer._lock:  # no worker takes some before all are there
            for r in rollouts:
                scorer.submit(r)
        back = list(scorer.results(wait=True))
        assert scorer.pending == 0
    assert sorted(map(id, back)) == sorted(map(id, rollouts))
    return rollouts, scorer


@pytest.fixture
def overdue(monkeypatch, tmp_path):
    """Once a call says that it is stuck, its deadline, which is far, is over in the scorer."""
    file = tmp_path / "stuck"
    monkeypatch.setenv("LIGHTRFT_TEST_STUCK", str(file))
    now, receive, late = time.monotonic, WorkerProcess.receive, []

    def received(worker, seconds):
        messages = receive(worker, min(seconds, 0.1))
        if not messages and file.exists():
            file.unlink()
            late.append(1000)
        return messages

    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: now() + sum(late)})
    monkeypatch.setattr("lightrft.rewards.scorer.time", clock)
    monkeypatch.setattr(WorkerProcess, "receive", received)


@pytest.mark.parametrize(
    ("text", "failed", "kind"),
    [
        ("raise", "raised ValueError: no such luck (plain)", "raised"),
        ("loop", "deadline 300 s (plain)", "deadline"),
        ("stubborn", "deadline 300 s (plain)", "deadline"),
        ("c-loop", "deadline 300 s (plain)", "deadline"),
        ("memory", "memory 256 MiB (plain)", "memory"),
        ("leak", "memory 256 MiB (plain)", "memory"),
        ("exit", "ended its process with status 3 (plain)", "died"),
        ("sys.exit", "raised SystemExit: 4 (plain)", "raised"),
        ("segv", "ended its process by signal 11 (plain)", "died"),
        (
            "sigkill",
            "killed from outside, as when the machine runs out of memory (plain)",
            "memory",
        ),
        ("hang up", "cut its worker off (plain)", "died"),
        ("nan", "returned nan (plain)", "value"),
        ("inf", "returned inf (plain)", "value"),
        ("str", "returned str, not a number (plain)", "value"),
        (
            "none",
            "returned NoneType, not a number; end each way through it by return and a number "
            "(plain)",
            "value",
        ),
        (
            "list",
            "returned list, not a number; for several responses at once, name its parameter rollouts (plain)",
            "value",
        ),
        ("huge", "returned an integer too large for a float (plain)", "value"),
        ("dict", "returned an empty dict (plain)", "value"),
    ],
)
def test_a_call_that_fails_in_any_way_fails_its_own_sample_only(text, failed, kind, overdue):
    # The clock is that of all workers.
    workers = {"workers": 1} if text in ("stubborn", "c-loop") else {}
    rollouts, scorer = score(["1", "2", text, "3", "4"], "plain", **workers)
    assert [r.reward for r in rollouts] == [1, 2, None, 3, 4]
    assert [r.failed for r in rollouts] == ["", "", failed, "", ""]
    assert rollouts[2].terms == {} and rollouts[1].terms == {"plain": 2.0}
    assert dict(scorer.counts) == {"scored": 4, kind: 1}


@pytest.mark.parametrize(
    ("weights", "said"),
    [((1.0, 1.0), "inf"), ((1.0, -1.0), "0.0"), ((1e10, 1e10), "inf"), ((1e10, -1e10), "nan")],
)
def test_a_sum_of_terms_that_is_not_finite_fails_its_response_alone(weights, said):
    terms = [
        {"function": name, "weight": weight}
        for name, weight in zip(("plain", "asynchronous"), weights, strict=True)
    ]
    (large, small), _ = score(["1e308", "1"], *terms)
    if said == "0.0":
        assert (large.failed, large.reward) == ("", 0.0)
    else:
        assert large.failed == f"the weighted sum of terms is {said}"
    assert (small.failed, small.reward) == ("", sum(weights))


def test_an_endless_python_loop_costs_its_deadline_but_no_process():
    (endless, _), scorer = score(["loop", "1"], "plain")
    assert (endless.failed, scorer.restarts) == ("deadline 300 s (plain)", 0)


def test_what_a_function_prints_forks_or_reads_disturbs_nothing():
    rollouts, scorer = score(["print", "fork", "stdin", "true", "5"], "plain")
    assert [r.reward for r in rollouts] == [1, 1, 0, 1, 5]
    assert scorer.counts["scored"] == 5


@pytest.mark.parametrize("function", ["batched", "batched_async", "asynchronous"])
@pytest.mark.parametrize(
    "guilty",
    ["raise", "nan", pytest.param("loop", marks=pytest.mark.slow), "memory", "exit"],
)
def test_one_guilty_rollout_does_not_fail_those_that_share_its_call(function, guilty):
    rollouts, _ = score(["1", "2", guilty, "3"] * 2, function)
    assert [r.reward for r in rollouts] == [1, 2, None, 3] * 2
    assert all(r.failed for r in rollouts[2::4])


def test_a_batched_function_gets_many_rollouts_at_one_time():
    rollouts, _ = score(["1"] * 50, "batch_size")
    assert max(r.reward for r in rollouts) >= 16


def test_a_batch_of_the_wrong_length_is_a_failure_that_says_so():
    rollouts, _ = score(["1"] * 3, "batched_short")
    assert {r.failed for r in rollouts} == {"returned 2 values for 1 rollouts (batched_short)"}


def test_an_async_call_that_waits_for_ever_is_overdue_and_the_others_are_not():
    rollouts, scorer = score(["1", "sleep", "2"], "asynchronous")
    assert [r.failed for r in rollouts] == ["", "deadline 300 s (asynchronous)", ""]
    assert scorer.restarts == 0


def test_async_calls_wait_together():
    rollouts = [replace(rollout(), seed=k) for k in range(40)]
    with Scorer(config("open_at_once", workers=1)) as scorer:
        with scorer._lock:
            for r in rollouts:
                scorer.submit(r)
        list(scorer.results(wait=True))
    assert max(r.reward for r in rollouts) == 40


def test_the_reward_is_the_weighted_sum_of_terms_and_each_is_kept_unweighted():
    terms = [
        {"function": "plain", "weight": 2},
        {"function": "terms", "weight": 0.5, "options": {"scale": 10}, "name": "style"},
        "counted",
    ]
    (scored,), _ = score(["3"], *terms)
    assert scored.reward == pytest.approx(2 * 3 + 0.5 * 30 + 0.5)
    assert scored.terms == {
        "plain": 3,
        "style": 30,
        "style/a": 10,
        "style/b": 20,
        "counted": 0.5,
        "counted/steps": 7,
    }
    assert scored.weights == {"plain": 2, "style": 0.5, "counted": 1}
    assert scored.reward == sum(w * scored.terms[k] for k, w in scored.weights.items())


def test_a_rollout_with_one_failed_term_has_no_reward():
    (bad, good), scorer = score(["nan", "1"], "plain", "terms")
    assert (bad.reward, bad.terms, bad.weights, bad.failed) == (
        None,
        {},
        {},
        "returned nan (plain)",
    )
    assert good.reward == 4
    assert sum(scorer.counts.values()) == 2


def test_each_data_source_has_its_own_terms():
    per_source = {"algebra": [f"{FUNCTIONS}:terms"]}
    with Scorer(config("plain", per_source=per_source)) as scorer:
        a, b = rollout("7", data_source="algebra"), rollout("7", data_source="other")
        scorer.submit(a)
        scorer.submit(b)
        list(scorer.results(wait=True))
    assert a.terms == {"terms": 3, "terms/a": 1, "terms/b": 2} and b.terms == {"plain": 7}


def test_a_data_source_without_terms_is_an_error_that_names_it():
    with Scorer(
        RewardConfig.model_validate({"per_source": {"algebra": f"{FUNCTIONS}:plain"}})
    ) as scorer:
        scorer.check_sources(["algebra"])
        with pytest.raises(RewardError, match=r"'poetry'.*'algebra'"):
            scorer.check_sources(["algebra", "poetry"])
        with pytest.raises(RewardError, match="'poetry'"):
            scorer.submit(rollout(data_source="poetry"))
        assert scorer.pending == 0


def test_a_function_sees_the_whole_rollout():
    seen = rollout(label="gold", reference="why", data_source="here", columns={"bonus": 0.25})
    with Scorer(config("columns")) as scorer:
        scorer.submit(seen)
        list(scorer.results(wait=True))
    assert (seen.reward, seen.failed) == (0.25, "")


def test_a_rollout_that_cannot_be_sent_fails_alone():
    stuck, fine = rollout(columns={"key": lambda: 0}), rollout("2")
    with Scorer(config("plain")) as scorer:
        scorer.submit(stuck)
        scorer.submit(fine)
        list(scorer.results(wait=True))
    assert stuck.failed.startswith("cannot be sent to a worker: ") and fine.reward == 2


def test_a_rollout_too_large_for_a_worker_fails_alone():
    rollouts = [
        rollout(str(i), columns={"blob": bytes(80 * 2**20) if i == 2 else bytes(3 * 2**20)})
        for i in range(8)
    ]
    with Scorer(config("batched", memory_mb=64)) as scorer:
        for r in rollouts:
            scorer.submit(r)
        list(scorer.results(wait=True))
    assert [r.reward for r in rollouts] == [0, 1, None, 3, 4, 5, 6, 7]
    assert rollouts[2].failed == "memory 64 MiB (batched)"


def test_a_function_that_another_module_registers_is_found_by_workers(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "from lightrft.rewards import REWARDS\n"
        "@REWARDS.register('mine')\ndef mine(rollout): return 4.0\n"
        "REWARDS.register('hidden')(lambda rollout: 1.0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("my_rewards")
    scored = rollout()
    with Scorer(RewardConfig.model_validate({"terms": ["mine"]})) as scorer:
        scorer.submit(scored)
        list(scorer.results(wait=True))
    assert (scored.reward, scored.terms) == (4.0, {"mine": 4.0})
    REWARDS["hidden"].__module__ = "__main__"
    with pytest.raises(RewardError, match=r"use file\.py:function"):
        Scorer(RewardConfig.model_validate({"terms": ["hidden"]}))


def test_a_worker_is_light_and_warmed_up():
    rollouts, _ = score(["1"], "loaded")
    assert rollouts[0].failed == "" and rollouts[0].reward != os.getpid()


def test_submitting_does_not_wait_for_slow_rewards(tmp_path):
    gate = tmp_path / "gate"
    with Scorer(config("waits_for_a_file", timeout=900)) as scorer:
        for _ in range(4):
            scorer.submit(rollout(str(gate)))
        assert list(scorer.results(wait=False)) == []
        assert scorer.pending == 4
        time.sleep(0.3)
        gate.touch()
        deadline = time.monotonic() + 300
        back = []
        while len(back) < 4 and time.monotonic() < deadline:
            back += scorer.results(wait=False)
            time.sleep(0.02)
        assert len(back) == 4 and all(r.reward == 1 for r in back)


def test_the_time_in_functions_and_the_time_before_them_are_measured():
    _, scorer = score(["0.3"] * 4, "sleeps", workers=1)
    assert scorer.seconds["busy"] >= 1.2 and scorer.seconds["queue"] > 0.3


def test_every_rollout_comes_back_once_whatever_happens_to_the_workers():
    dice = random.Random(7)
    choices = ["raise", "exit", "nan", "memory", "loop", "print", "segv", "fork"]
    texts = [
        dice.choice(choices) if dice.random() < 0.12 else str(dice.randrange(100))
        for _ in range(120)
    ]
    rollouts, scorer = score(texts, "plain", "asynchronous", "batched", workers=2)
    for text, r in zip(texts, rollouts):
        good = text.isdigit() or text in ("print", "fork")
        assert (r.reward is not None) == good == (not r.failed)
        assert not text.isdigit() or r.reward == 3 * int(text)
    assert sum(scorer.counts.values()) == len(texts)


def test_closing_leaves_no_process_and_gives_back_what_was_not_scored():
    before = set(psutil.Process().children(recursive=True))
    scorer = Scorer(config("sleeps", timeout=1800, workers=2))
    rollouts = [rollout("900") for _ in range(5)]
    for r in rollouts:
        scorer.submit(r)
    ends = time.monotonic() + 300
    while len(set(psutil.Process().children(recursive=True)) - before) < 2:
        assert time.monotonic() < ends
        time.sleep(0.02)
    began = time.monotonic()
    scorer.close()
    assert time.monotonic() - began < 300  # 900 s where it waits for a call
    assert set(psutil.Process().children(recursive=True)) <= before
    assert {id(r) for r in scorer.results(wait=True)} == {id(r) for r in rollouts}
    assert {r.failed for r in rollouts} == {"the scorer was closed"}
    scorer.close()
    with pytest.raises(RewardError, match="closed"):
        scorer.submit(rollout())


def test_what_a_function_started_ends_with_its_worker():
    started = rollout()
    with Scorer(config("child")) as scorer:
        scorer.submit(started)
        list(scorer.results(wait=True))
        assert psutil.pid_exists(int(started.reward))
    assert gone(int(started.reward))


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's help that this tests exists on Linux only"
)
def test_workers_do_not_outlive_a_killed_parent():
    program = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from lightrft.config.verbs import RewardConfig
        from lightrft.rewards.scorer import REWARDS, Scorer
        from lightrft.types import Prompt, Rollout
        scorer = Scorer(RewardConfig.model_validate({{"terms": ["{FUNCTIONS}:plain"], "workers": 2, "timeout": 1000}}))
        for text in ("1", "c-loop"):
            scorer.submit(Rollout(Prompt("p", []), [], [], [], [], "stop", 0, text=text))
        next(scorer.results(wait=True))
        print("ready", flush=True)
        time.sleep(1000)
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    ends = time.monotonic() + 300
    while len(workers := psutil.Process(parent.pid).children(recursive=True)) < 4:
        assert time.monotonic() < ends, "two workers, each below its guardian"
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


STRAY = {
    "text": "hello\n",
    "part of a line": "hello",
    "a list": "[1]\n",
    "deep": "deep",
    "too long": "long",
    "a number": "1e999\n",
    "another call": '{"i": 77, "s": 0.1, "terms": {"": 1.0}}\n',
    "not finite": '{"i": 0, "s": 0.1, "terms": {"": NaN}}\n',
    "no terms": '{"i": 0, "s": 0.1, "terms": {}}\n',
    "no seconds": '{"i": 0, "s": null, "terms": {"": 1.0}}\n',
    "ready": '{"ready": true}\n',
    "error": '{"error": "out of my hands"}\n',
    "begun for ever": "begun for ever",
}


@pytest.mark.parametrize("what", STRAY)
def test_a_stray_line_on_the_workers_socket_fails_its_own_sample_only(what):
    rollouts, scorer = score(["1", STRAY[what], "2"], "writes_to_its_socket")
    assert [r.reward for r in rollouts] == [1, None, 2]
    assert rollouts[1].failed.startswith("ended its worker: its socket brought")
    # Restarts: none where the scorer is closed at once.
    assert dict(scorer.counts) == {
        "scored": 2,
        "garbled": 1,
    }


def test_an_error_of_the_scorer_itself_ends_the_run_and_does_not_hang_it(monkeypatch):
    monkeypatch.setattr(Scorer, "_pickled", lambda self, calls: 1 / 0)
    with Scorer(config("plain")) as scorer, pytest.raises(RewardError, match="ZeroDivisionError"):
        scorer.submit(rollout())
        list(scorer.results(wait=True))


def test_asyncio_is_loaded_for_rewards_that_wait_only(tmp_path):
    """It is a third of what a process needs to start."""
    file = tmp_path / "loaded.py"
    plain = "import sys\ndef plain(rollout):\n    return float('asyncio' in sys.modules)\n"
    waits = "async def waits(rollout):\n    return plain(rollout)\n"
    file.write_text(plain + waits)
    for names, loaded in ((["plain"], 0.0), (["plain", "waits"], 2.0)):
        settings = RewardConfig.model_validate(
            {"terms": [f"{file}:{name}" for name in names], "timeout": 300}
        )
        asked = rollout()
        with Scorer(settings) as scorer:
            scorer.submit(asked)
            list(scorer.results(wait=True))
        assert asked.reward == loaded


def gone(pid):
    """Whether process ``pid`` ends."""
    ends = time.monotonic() + 300
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True


linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux gives orphans to a subreaper"
)


@linux_only
def test_a_daemon_that_a_function_started_ends_with_the_scorer():
    started = rollout()
    with Scorer(config("daemon")) as scorer:
        scorer.submit(started)
        list(scorer.results(wait=True))
        assert psutil.pid_exists(int(started.reward))
    assert gone(int(started.reward))


@linux_only
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_daemon_that_a_function_started_ends_with_a_run_that_is_killed(how):
    program = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from lightrft.config.verbs import RewardConfig
        from lightrft.rewards.scorer import Scorer
        from lightrft.types import Prompt, Rollout
        scorer = Scorer(RewardConfig.model_validate({{"terms": ["{FUNCTIONS}:daemon"], "timeout": 1000}}))
        scorer.submit(Rollout(Prompt("p", []), [], [], [], [], "stop", 0, text="1"))
        print(int(next(scorer.results(wait=True)).reward), flush=True)
        time.sleep(1000)
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    daemon = int(parent.stdout.readline())
    assert psutil.pid_exists(daemon)
    getattr(parent, how)()
    parent.wait()
    assert gone(daemon)


@linux_only
def test_a_fork_bomb_fails_its_own_sample_and_leaves_nothing(monkeypatch):
    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setenv("LIGHTRFT_TEST", "1")
    with Scorer(config("bomb", timeout=3)) as scorer:
        bomb = rollout()
        scorer.submit(bomb)
        list(scorer.results(wait=True))
    assert bomb.failed and scorer.counts["scored"] == 0
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not [
        p
        for p in psutil.process_iter(["environ"])
        if (p.info["environ"] or {}).get("LIGHTRFT_TEST") == "1"
    ]


@linux_only
def test_more_descendants_than_a_bound_are_counted_also_in_other_sessions():
    program = (
        "import os, time; [os.fork() for _ in range(2)]; print('up', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        for _ in range(4):
            parent.stdout.readline()
        assert has_more_descendants(parent.pid, 2) and not has_more_descendants(parent.pid, 3)
        os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.parametrize("text", ["python", "c", "1"])
def test_a_call_beyond_its_cpu_time_is_wrong_and_counted_also_where_python_does_not_get_to_run(
    text,
):
    (scored,), scorer = score([text], "budgeted", timeout=900)
    assert (scored.failed, scorer.counts["scored"]) == ("", 1)
    assert scored.terms == (
        {"budgeted": 1.0} if text == "1" else {"budgeted": 0.0, "budgeted/ungraded": 1.0}
    )


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"function": "mth"}, "did you mean 'math'"),
        ({"function": f"{FUNCTIONS}:plian"}, "did you mean 'plain'"),
        ({"function": "nowhere.py:reward"}, "there is no file"),
        ({"function": "no_such_package:reward"}, "cannot import no_such_package"),
        ({"function": f"{FUNCTIONS}:takes_nothing"}, "first parameter must take the rollout"),
        ({"function": f"{FUNCTIONS}:only_keyword"}, "first parameter must take the rollout"),
        ({"function": f"{FUNCTIONS}:NOT_A_FUNCTION"}, "is int, not a function"),
        ({"function": f"{FUNCTIONS}:terms", "options": {"scael": 1}}, "scael"),
        ({"function": "length"}, "function: length, options: {limit: ..., buffer: ...}}"),
        ({"function": "__main__:reward"}, "use file.py:function"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_before_anything_starts(term, message):
    if term["function"].startswith("__main__"):
        sys.modules["__main__"].reward = lambda rollout: 1.0
    with pytest.raises(RewardError, match=message):
        Scorer(RewardConfig.model_validate({"terms": [term]}))


def test_no_terms_and_terms_of_one_name_are_errors():
    with pytest.raises(RewardError, match="at least one reward"):
        Scorer(RewardConfig())
    with pytest.raises(RewardError, match="two terms are called 'math'"):
        Scorer(RewardConfig.model_validate({"terms": ["math", "math"]}))


@pytest.mark.parametrize(
    ("in_the_worker", "said"),
    [("import no_such_thing", "no_such_thing"), ("os._exit(5)", "cannot run")],
)
def test_a_file_that_only_the_worker_cannot_import_stops_the_run(tmp_path, in_the_worker, said):
    file = tmp_path / "mine.py"
    file.write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    {in_the_worker}\ndef reward(rollout): "
        "return 1.0\n"
    )
    settings = RewardConfig.model_validate({"terms": [f"{file}:reward"]})
    with Scorer(settings) as scorer, pytest.raises(RewardError, match=said):
        scorer.submit(rollout())
        list(scorer.results(wait=True))


def test_a_pattern_that_backtracks_for_ever_costs_its_deadline():
    terms = [{"function": "format", "options": {"pattern": "(a+)+"}}]
    endless, short = rollout("a" * 40 + "b"), rollout("aa")
    for one, seconds in ((endless, 1), (short, 300)):
        with Scorer(RewardConfig.model_validate({"terms": terms, "timeout": seconds})) as scorer:
            scorer.submit(one)
            list(scorer.results(wait=True))
    assert (endless.reward, endless.failed) == (None, "deadline 1 s (format)")
    assert short.reward == 1.0


def test_built_in_rules_grade_in_a_worker():
    graded = [
        rollout(r"\boxed{\frac{x^2-1}{x-1}}", label="x+1"),
        rollout("#### 5", label="5"),
        rollout("#### 5", label="???"),
    ]
    with Scorer(RewardConfig.model_validate({"terms": ["math"]})) as scorer:
        for r in graded:
            scorer.submit(r)
        list(scorer.results(wait=True))
    assert [r.reward for r in graded] == [1.0, 1.0, None]
    assert graded[2].failed.startswith(
        "raised ValueError: label '???' cannot be read as mathematics"
    )


HARD = [
    (r"\boxed{(x+y+z)^{500}}", "x+y"),
    (r"\boxed{\binom{10^9}{5\cdot10^8}}", "x"),
    ("The answer is " + "{" * 300 + "\n", "x+1"),
    (r"\boxed{" + "x^{" * 60 + "x" + "}" * 61, "x^2"),
    (r"\boxed{" + "(" * 300 + "x" + ")" * 300 + "}", "x+1"),
    (r"\boxed{" + r"\sin(" * 120 + "x" + ")" * 120 + "}", "x+3"),
    (r"\boxed{(a+b+c+d+e+f+g+h)^{60}}", r"(a+b+c+d+e+f+g+h)^{59}"),
    (r"\boxed{9^{9^{9^{9}}}}", "7"),
    (r"\boxed{\sum_{i=1}^{10^9} i^{7/3}}", "5"),
    (r"\boxed{(1+\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11})^{40}}", "3"),
]


def test_answers_that_cannot_be_graded_are_wrong_and_counted_and_the_next_one_is_graded():
    rollouts = [rollout(text, label=label) for text, label in (*HARD, (r"\boxed{x+1}", "1+x"))]
    with Scorer(RewardConfig.model_validate({"terms": ["math"], "timeout": 900})) as scorer:
        for r in rollouts:
            scorer.submit(r)
        list(scorer.results(wait=True))
    # The deadline ends no call.
    assert [r.reward for r in rollouts] == [0.0] * len(HARD) + [1.0] and not any(
        r.failed for r in rollouts
    )
    assert sum("math/ungraded" in r.terms for r in rollouts) >= len(HARD) - 3, (
        "a few are just wrong: bounds are enough to tell"
    )


def test_a_label_that_cannot_be_read_in_time_fails_and_is_not_taken_for_a_wrong_answer(monkeypatch):
    def slow(gold):
        raise OverBudget

    monkeypatch.setattr(math, "_check_gold", slow)
    with pytest.raises(ValueError, match="takes more than"):
        math.math_reward(view_of(rollout("#### 1", label="2")))


def test_cheap_rewards_run_by_the_thousand():
    rollouts, scorer = score(["1"] * 3000, "loaded", workers=2)
    assert len({r.reward for r in rollouts}) <= 2  # numbers of processes
    assert scorer.restarts == 0


def test_a_relative_file_name_holds_even_after_the_program_changes_its_folder(
    tmp_path, monkeypatch
):
    (tmp_path / "mine.py").write_text(
        "import os\ndef reward(rollout):\n    if rollout.text == 'exit': os._exit(1)\n    return "
        "2.0\n"
    )
    monkeypatch.chdir(tmp_path)
    rollouts = [rollout("exit"), rollout()]
    with Scorer(RewardConfig.model_validate({"terms": ["mine.py:reward"]})) as scorer:
        monkeypatch.chdir("/")
        for r in rollouts:
            scorer.submit(r)
        list(scorer.results(wait=True))
    assert [r.reward for r in rollouts] == [None, 2.0]
