import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.strategy import checkpoint, manifest
from lightrft.strategy.checkpoint import (
    CheckpointStore,
    DiskFullError,
    load_state,
    read_manifest,
    save_state,
    verify,
)
from lightrft.utils.errors import CheckpointError, DamagedError, ResourceError


def write(store, step, size=100, **options):
    with store.writing(step, **options) as path:
        (path / "policy").mkdir()
        (path / "policy/weights.bin").write_bytes(bytes([step % 256]) * size)
        (path / "trainer.json").write_text(json.dumps({"step": step}))


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_checkpoint_is_found_and_verifies(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.latest() is None
    write(store, 120, about={"model": "abc"})
    assert store.latest() == tmp_path / "checkpoints/step_000120"
    manifest = verify(store.latest(), {"model": "abc"})
    assert (manifest.step, set(manifest.files)) == (120, {"policy/weights.bin", "trainer.json"})
    assert manifest.bytes == 100 + len('{"step": 120}')
    assert names(tmp_path / "checkpoints") == ["step_000120"]


def test_a_body_that_raises_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    with pytest.raises(ZeroDivisionError), store.writing(2) as path:
        (path / "half").write_text("x")
        raise ZeroDivisionError
    assert names(tmp_path) == ["step_000001"]


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, best="eval/accuracy")
    for step, value in ((1, 0.2), (2, 0.9), (3, float("nan")), (4, 0.9), (5, None)):
        write(store, step, metric=value)
    assert names(tmp_path) == ["step_000002", "step_000004", "step_000005"]
    assert store.best() == tmp_path / "step_000002"
    write(store, 6, metric=0.95)
    write(store, 7)
    assert names(tmp_path) == ["step_000006", "step_000007"]


def test_a_minus_makes_the_smallest_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, best="-loss")
    for step, value in ((1, 0.5), (2, 0.1), (3, 0.3)):
        write(store, step, metric=value)
    assert names(tmp_path) == ["step_000002", "step_000003"]


def test_the_newest_is_by_number_not_by_name(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (999_999, 1_000_000):
        write(store, step)
    assert store.latest().name == "step_1000000"


def test_what_others_put_there_is_never_touched(tmp_path):
    for name in ("step_000001", "step_notes", ".writing_step_000009", "my model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text(name)
    (tmp_path / "step_000002").mkdir()
    # Of another program.
    (tmp_path / "step_000002/manifest.json").write_text('{"step": 2, "files": {}}')
    (tmp_path / "step_000003").symlink_to(tmp_path / "my model")
    before = names(tmp_path)
    store = CheckpointStore(tmp_path, keep=1)
    for step in (10, 11, 12):
        write(store, step)
    store.discard_after(3)
    assert names(tmp_path) == before
    assert all(
        (tmp_path / n / "precious").exists()
        for n in ("step_000001", "step_notes", ".writing_step_000009", "my model")
    )


@pytest.mark.parametrize("kind", ["a folder", "a file", "a link"])
def test_what_has_the_name_of_a_checkpoint_is_moved_aside_and_the_save_succeeds(
    tmp_path, caplog, kind
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/precious").write_text("x")
    place = tmp_path / "step_000001"
    {
        "a folder": lambda: (tmp_path / "elsewhere").rename(place),
        "a file": lambda: place.write_text("x"),
        "a link": lambda: place.symlink_to(tmp_path / "elsewhere"),
    }[kind]()
    write(CheckpointStore(tmp_path, keep=1), 1)
    assert verify(place).step == 1
    aside = tmp_path / "damaged_step_000001"
    assert (aside if kind == "a file" else aside / "precious").read_text() == "x"
    assert aside.is_symlink() == (kind == "a link")
    assert "step_000001 is not an intact checkpoint: it is moved to" in caplog.text


def test_a_step_written_again_replaces_the_old(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5, size=10)
    write(store, 5, size=20)
    assert names(tmp_path) == ["step_000005"]
    assert verify(store.latest()).files["policy/weights.bin"]["bytes"] == 20


def test_newer_checkpoints_can_be_discarded(tmp_path):
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 2, 3):
        write(store, step)
    store.discard_after(1)
    assert names(tmp_path) == ["step_000001"]


def test_truncation_and_damage_are_named(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 3)
    file = tmp_path / "step_000003/policy/weights.bin"
    good = file.read_bytes()
    file.write_bytes(good[:40])
    with pytest.raises(CheckpointError, match=r"weights\.bin has 40 bytes, 100 were saved"):
        verify(store.latest())
    file.write_bytes(b"\xff" + good[1:])
    with pytest.raises(
        CheckpointError, match=r"weights\.bin has the right size but not the content"
    ):
        verify(store.latest())
    file.unlink()
    with pytest.raises(CheckpointError, match=r"weights\.bin is missing"):
        verify(store.latest())


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 3, about={"model": "qwen 0.5b", "shape": (1, 2), "vocab": 7})
    verify(store.latest(), {"model": "qwen 0.5b", "shape": (1, 2)})
    with pytest.raises(CheckpointError) as error:
        verify(store.latest(), {"model": "qwen 7b", "vocab": 7})
    assert "model: 'qwen 0.5b' in the checkpoint, 'qwen 7b' here" in str(error.value)
    assert "vocab" not in str(error.value)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        verify(tmp_path)


def break_manifest(folder):
    (folder / "manifest.json").write_text('{"format": "light')


def remove_manifest(folder):
    (folder / "manifest.json").unlink()


def truncate_weights(folder):
    os.truncate(folder / "policy/weights.bin", 3)


@pytest.mark.parametrize("damage", [break_manifest, remove_manifest, truncate_weights])
def test_damaged_checkpoints_are_moved_aside_and_the_newest_intact_one_is_found(
    tmp_path, caplog, damage
):
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 2, 3, 4):
        write(store, step)
    for step in (1, 3, 4):
        damage(tmp_path / f"step_00000{step}")
    path, manifest = store.newest_intact()
    assert (path, manifest.step) == (tmp_path / "step_000002", 2)
    assert names(tmp_path) == [
        "damaged_step_000003",
        "damaged_step_000004",
        "step_000001",
        "step_000002",
    ]
    assert caplog.text.count("It is moved to") == 2 and "the run resumes from step 2" in caplog.text
    write(store, 4)  # the name is free again
    assert verify(store.latest()).step == 4


def test_a_copy_that_was_to_be_replaced_stands_in_for_a_damaged_one_of_its_step(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5, size=10)
    shutil.copytree(tmp_path / "step_000005", tmp_path / ".replaced_step_000005")
    break_manifest(tmp_path / "step_000005")
    path, manifest = store.newest_intact()
    assert (path.name, manifest.step) == ("step_000005", 5)
    assert names(tmp_path) == ["damaged_step_000005", "step_000005"]


def test_where_no_checkpoint_is_intact_nothing_is_moved_and_the_error_says_the_way_out(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest_intact() is None
    for step in (1, 2):
        write(store, step)
        truncate_weights(tmp_path / f"step_00000{step}")
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint .* is intact.*run\.overwrite=true.*step_000002 is damaged",
    ):
        store.newest_intact()
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_a_checkpoint_of_another_model_is_not_taken_for_a_damaged_one(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1, about={"model": "a"})
    write(store, 2, about={"model": "b"})
    with pytest.raises(CheckpointError, match="belongs to something else"):
        store.newest_intact({"model": "a"})
    assert names(tmp_path) == ["step_000001", "step_000002"]


@pytest.mark.parametrize(
    ("field", "value"), [("step", 7), ("metrics", {"loss": 0.0}), ("about", {}), ("files", {})]
)
def test_a_manifest_that_was_changed_is_damaged(tmp_path, field, value):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 3, about={"model": "a"})
    file = tmp_path / "step_000003/manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(DamagedError, match="not what was saved"):
        verify(tmp_path / "step_000003")


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 3)
    moved = (tmp_path / "step_000003").rename(tmp_path / "step_000005")
    with pytest.raises(DamagedError, match=r"is of step 3, which its name is not"):
        verify(moved)
    assert verify(moved.rename(tmp_path / "the one to keep")).step == 3


def test_a_manifest_of_an_earlier_version_is_read_and_a_newer_one_cannot_pass_for_it(tmp_path):
    write(CheckpointStore(tmp_path, keep=2), 3)
    file = tmp_path / "step_000003/manifest.json"
    document = json.loads(file.read_text()) | {"format": "lightrft-checkpoint/1"}
    file.write_text(json.dumps(document))
    with pytest.raises(DamagedError, match="not what was saved"):
        verify(file.parent)
    del document["digest"]
    file.write_text(json.dumps(document))
    assert verify(file.parent).step == 3
    file.write_text(json.dumps(document | {"format": "lightrft-checkpoint/2"}))
    with pytest.raises(DamagedError, match="not what was saved"):
        verify(file.parent)


TREE = {"moments": (torch.arange(5.0), 2.5), 7: [None, True], "seed": 123456789}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    store = CheckpointStore(folder, keep=2, best="loss")
    for step in (1, 2):
        with store.writing(
            step, {"phase": "rl", "policy parameters": "0" * 16}, metric=0.25
        ) as path:
            (path / "policy").mkdir()
            save_state(path / "policy/state", {"w": torch.arange(7.0) * step})
            save_state(path / "trainer", {**TREE, "step": step})
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@settings(max_examples=150)
@given(st.data())
def test_whatever_happens_to_a_byte_of_a_checkpoint_no_other_state_is_loaded(two_checkpoints, data):
    name = data.draw(
        st.sampled_from(sorted(n for n in two_checkpoints if n.parts[0] == "step_000002"))
    )
    good = two_checkpoints[name]
    at = data.draw(st.integers(0, len(good) - 1))
    kind = data.draw(st.sampled_from(["flip", "truncate", "zeros", "insert", "remove"]))
    mask = data.draw(st.integers(1, 255))
    bad = {
        "flip": good[:at] + bytes([good[at] ^ mask]) + good[at + 1 :],
        "truncate": good[:at],
        "zeros": good[:at] + bytes(len(good) - at),
        "insert": good[:at] + bytes([mask]) + good[at:],
        "remove": good[:at] + good[at + 1 :],
    }[kind]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        for other, content in two_checkpoints.items():
            (folder / other).parent.mkdir(parents=True, exist_ok=True)
            (folder / other).write_bytes(bad if other == name else content)
        path, manifest = CheckpointStore(folder, keep=2, best="loss").newest_intact({"phase": "rl"})
        state, weights = load_state(path / "trainer"), load_state(path / "policy/state")
    if manifest.step == 2:  # only a change that means nothing passes: a space, say
        assert name.name == "manifest.json" or bad == good
    assert (state["step"], manifest.metrics) == (manifest.step, {"loss": 0.25})
    assert weights["w"].equal(torch.arange(7.0) * manifest.step)
    assert state["moments"][0].equal(TREE["moments"][0]) and (state[7], state["seed"]) == (
        TREE[7],
        TREE["seed"],
    )


def test_a_metric_improves_on_every_checkpoint_or_not(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, best="-loss")
    assert store.improves(0.5) and not store.improves(None) and not store.improves(float("nan"))
    write(store, 1, metric=0.5)
    assert store.improves(0.4) and not store.improves(0.5) and not store.improves(0.6)
    assert not CheckpointStore(tmp_path, keep=1).improves(0.1)


def test_the_next_best_stands_in_for_a_damaged_best(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=9, best="accuracy")
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.1)):
        write(store, step, metric=value)
    assert store.best_intact() == tmp_path / "step_000002"
    truncate_weights(tmp_path / "step_000002")
    assert store.best_intact() == tmp_path / "step_000001"
    assert "the next checkpoint stands in for it" in caplog.text


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of one MiB, where this user may mount one; else ``None``."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    yield folder if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", "--lazy", folder], check=True)


def writers():
    def plain(path):
        (path / "weights").write_bytes(b"x" * 3_000_000)

    def tensors(path):
        save_state(path / "weights", {"w": torch.zeros(1_000_000)})

    def pickled(path):
        torch.save({"w": torch.zeros(1_000_000)}, path / "weights")

    return [plain, tensors, pickled]


@pytest.mark.parametrize("writer", writers(), ids=lambda f: f.__name__)
def test_a_full_disk_costs_that_checkpoint_only(small_disk, writer):
    if small_disk is None:
        pytest.skip("mounting a small disk takes root; the next test covers the rest")
    store = CheckpointStore(small_disk / "checkpoints", keep=2)
    write(store, 1, size=200_000)
    with (
        pytest.raises(DiskFullError, match=r"needs about .* are free; 1 earlier") as error,
        store.writing(2) as path,
    ):
        writer(path)
    assert isinstance(error.value, ResourceError)
    assert 500_000 < error.value.free < 2**20
    assert names(small_disk / "checkpoints") == ["step_000001"]
    verify(store.latest())
    assert store.failures == 1
    write(store, 3, size=200_000)  # and the run may go on
    assert names(small_disk / "checkpoints") == ["step_000001", "step_000003"]


@pytest.mark.parametrize("place", ["body", "manifest", "sync"])
def test_a_disk_that_fills_at_any_moment_leaves_earlier_checkpoints(tmp_path, monkeypatch, place):
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if place == "manifest":
            patch.setattr(manifest, "write_atomic", full)
        if place == "sync":
            patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError, match="was not saved") as error, store.writing(2) as path:
            (path / "w").write_bytes(b"x" * 5000)
            if place == "body":
                full()
    assert "more than 0 B" not in str(error.value)
    assert names(tmp_path) == ["step_000001"]
    assert verify(store.latest()).step == 1
    assert store.failures == 1


def test_another_error_is_not_called_a_full_disk(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(PermissionError), store.writing(2):
        raise PermissionError(errno.EACCES, "no")
    assert store.failures == 0


CHILD = """
import os, sys, pathlib
from lightrft.strategy.checkpoint import CheckpointStore
store = CheckpointStore(pathlib.Path(sys.argv[1]), keep=2)
step = int(sys.argv[2])
while True:
    step += 1
    with store.writing(max(1, step - step % 3)) as path:  # every third step is new, the others replace it
        for i in range(4):
            (path / f"part{i}").write_bytes(os.urandom(20_000))
    os.write(1, f"{max(1, step - step % 3)}\\n".encode())
"""


def test_a_kill_at_any_moment_leaves_the_latest_checkpoint_right(tmp_path):
    rng = random.Random(0)
    done = 0
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, tmp_path, str(done)], stdout=subprocess.PIPE
        ) as child:
            first = child.stdout.readline()
            time.sleep(rng.uniform(0, 0.08))
            child.kill()
            rest = child.stdout.read()
        said = [int(n) for n in (first + rest).split()]
        store = CheckpointStore(tmp_path, keep=2)
        latest = store.latest()
        assert latest is not None
        assert verify(latest).step >= said[-1]  # what was said to be saved is there, and whole
        assert all(verify(path) for path in store.steps().values())
        done = verify(latest).step
    write(store, done + 10)  # what the kills left behind is swept away
    assert all(name.startswith("step_") for name in names(tmp_path))
    assert len(names(tmp_path)) <= 2


def test_every_crash_point_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """Stop before each file-system call in turn, as a kill would, with no clean-up."""

    class KilledError(BaseException):
        pass

    calls = ["rename", "replace", "mkdir", "unlink", "rmdir", "touch"]
    real = {name: getattr(checkpoint.Path, name) for name in calls}
    countdown = [0]

    def counted(name):
        def call(self, *args, **options):
            countdown[0] -= 1
            if countdown[0] < 0:
                raise KilledError
            return real[name](self, *args, **options)

        return call

    point, finished = 0, False
    while not finished:
        folder = tmp_path / str(point)
        store = CheckpointStore(folder, keep=1)
        write(store, 1, size=10)
        write(store, 2, size=10)
        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(checkpoint.Path, name, counted(name))
            countdown[0] = point
            try:
                write(store, 2, size=20)
                write(store, 3, size=30)
                finished = True
            except KilledError:
                pass
        again = CheckpointStore(folder, keep=1)
        assert verify(again.latest()).step in (2, 3)
        write(again, 4)
        assert names(folder) == ["step_000004"]
        point += 1
    assert point > 15


def test_manifests_of_another_format_are_not_ours(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "other/9"}')
    assert read_manifest(tmp_path) is None


def test_state_saved_inside_a_checkpoint_comes_back(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    tree = {"moments": (torch.randn(3), 2.5), 7: [None, True]}
    with store.writing(1) as path:
        save_state(path / "trainer", tree)
    verify(store.latest())
    back = load_state(store.latest() / "trainer")
    assert torch.equal(back["moments"][0], tree["moments"][0])
    assert back[7] == [None, True]


def test_a_disk_that_is_full_before_the_first_byte_is_not_said_to_need_more_than_nothing(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    assert "needs" not in str(store._disk_full(tmp_path / "step_000001", 0))
    assert "needs more than 5 B" in str(store._disk_full(tmp_path / "step_000001", 5))
