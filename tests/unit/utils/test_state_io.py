import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.utils.errors import CheckpointError
from lightrft.utils.state_io import load_state, save_state

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    width = torch.empty((), dtype=dtype).element_size()
    size = math.prod(shape) * width
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        raw = bytearray(b & 1 for b in raw)
    if not size:
        return torch.empty(shape, dtype=dtype)
    # Any bits: nan payloads and denormals too.
    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    return tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor


keys = st.one_of(
    st.text(max_size=5), st.integers(), st.sampled_from(["$tensor", "$dict", "a.b", ""])
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), tensors()
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = (
            a.contiguous().reshape(-1).view(torch.uint8),
            b.contiguous().reshape(-1).view(torch.uint8),
        )
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(x) is type(y) for x, y in zip(a, b))
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    return a == b


@settings(deadline=None)
@given(trees)
def test_any_tree_comes_back_bit_for_bit(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("state") / "x"
    save_state(path, tree)
    assert same(load_state(path), tree)


def test_optimizer_state_goes_on_exactly(tmp_path):
    torch.manual_seed(0)

    def make():
        model = torch.nn.Linear(5, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model, optimizer, x):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    (model, optimizer), (other, restored) = make(), make()
    data = [torch.randn(2, 5) for _ in range(4)]
    for x in data[:2]:
        step(model, optimizer, x)
    save_state(tmp_path / "s", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    saved = load_state(tmp_path / "s")
    other.load_state_dict(saved["model"])
    restored.load_state_dict(saved["optimizer"])
    for x in data[2:]:
        step(model, optimizer, x)
        step(other, restored, x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    assert same(optimizer.state_dict(), restored.state_dict())


def test_tied_tensors_are_saved_once_and_stay_tied(tmp_path):
    weight = torch.randn(100, 100)
    save_state(tmp_path / "s", {"embed": weight, "head": weight, "view": weight[10:20]})
    loaded = load_state(tmp_path / "s")
    assert loaded["embed"] is loaded["head"]
    assert same(loaded["view"], weight[10:20])
    assert (tmp_path / "s.pt").stat().st_size < 4 * 10_000 + 4 * 1_000 + 3_000


def test_a_view_does_not_drag_its_storage_along(tmp_path):
    save_state(tmp_path / "s", {"row": torch.randn(1000, 1000)[3]})
    assert (tmp_path / "s.pt").stat().st_size < 10_000


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", torch.eye(2).to_sparse()])
def test_what_cannot_be_saved_is_named_by_its_place(tmp_path, value):
    with pytest.raises(TypeError, match=r"state\.a\.1"):
        save_state(tmp_path / "s", {"a": [0, value]})


@pytest.mark.parametrize("length", [0, 3, 400, -7])
def test_a_truncated_file_is_a_clear_error(tmp_path, length):
    save_state(tmp_path / "s", {"w": torch.ones(100)})
    file = tmp_path / "s.pt"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"s\.pt is (truncated|damaged), or"):
        load_state(tmp_path / "s")


def test_a_file_that_would_run_code_is_refused(tmp_path):
    torch.save({"w": pytest.raises}, tmp_path / "s.pt")
    with pytest.raises(CheckpointError, match=r"s\.pt is damaged, or holds more than plain values"):
        load_state(tmp_path / "s")


def test_a_state_of_an_earlier_version_is_refused_with_the_reason(tmp_path):
    (tmp_path / "s.json").write_text('{"tensors": false, "tree": {}}')
    with pytest.raises(
        CheckpointError, match=r"s\.pt .* only s\.json, of an earlier version of lightrft"
    ):
        load_state(tmp_path / "s")


def test_a_missing_state_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="nothing"):
        load_state(tmp_path / "nothing")
