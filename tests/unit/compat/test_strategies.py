"""The strategy that ``get_strategy`` returns: its steps are those of AdamW, and a checkpoint continues them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from lightrft.strategy.fake_strategy import FakeStrategy, get_fake_strategy
from torch import nn
from transformers import get_scheduler

from lightrft.models import ActorLanguage
from lightrft.strategy import StrategyBase, StrategyConfig, get_strategy, is_engine
from lightrft.utils.errors import CheckpointError, ConfigError
from tests.model_helpers import small_model


def args(**changed: object) -> SimpleNamespace:
    start = {"micro_train_batch_size": 2, "train_batch_size": 4, "max_norm": 0.5, "seed": 3}
    return SimpleNamespace(**{**start, **changed})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


ROWS = [torch.sin(torch.arange(8.0).reshape(2, 4) + k) * 3 for k in range(12)]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def prepared(strategy):
    model = net()
    optimizer = strategy.create_optimizer(model, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=6)
    return strategy.prepare((model, optimizer, scheduler))


def train(strategy, triple, rows) -> list[float]:
    model, optimizer, scheduler = triple
    rates = []
    for some in rows:
        strategy.backward(loss_of(model, some), model, optimizer)
        info = strategy.optimizer_step(optimizer, model, scheduler)
        rates += [] if info is None else [info.lr]
    return rates


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_steps_are_those_of_adamw_over_mean_losses():
    strategy = get_strategy(args())
    triple = prepared(strategy)
    rates = train(strategy, triple, ROWS)
    plain = net()
    matrices = [p for p in plain.parameters() if p.dim() == 2]
    vectors = [p for p in plain.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    schedule = get_scheduler("linear", adamw, num_warmup_steps=2, num_training_steps=6)
    seen = []
    for first, second in zip(ROWS[::2], ROWS[1::2], strict=True):
        ((loss_of(plain, first) + loss_of(plain, second)) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        seen.append(adamw.param_groups[0]["lr"])
        adamw.step()
        schedule.step()
        adamw.zero_grad()
    assert rates == pytest.approx(seen) and len(set(rates)) > 2
    assert torch.allclose(weights(triple[0]), weights(plain), atol=1e-6)
    assert not torch.allclose(weights(triple[0]), weights(net()), atol=1e-3)


def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    strategy = get_strategy(args())
    triple = prepared(strategy)
    train(strategy, triple, ROWS[:4])
    strategy.save_ckpt(triple[0], str(tmp_path), "a", client_state={"consumed_samples": 8})
    train(strategy, triple, ROWS[4:])
    again = get_strategy(args())
    other = prepared(again)
    path, state = again.load_ckpt(other[0], str(tmp_path))
    assert state == {"consumed_samples": 8} and path.endswith("a")
    for _ in range(2):
        other[2].step()
    train(again, other, ROWS[4:])
    assert torch.equal(weights(other[0]), weights(triple[0]))


def test_old_checkpoints_are_removed_and_other_folders_stay(tmp_path):
    strategy = get_strategy(args())
    model = prepared(strategy)[0]
    (tmp_path / "notes").mkdir()
    for tag in "abcd":
        strategy.save_ckpt(model, str(tmp_path), tag, max_num=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "d", "latest", "notes"]
    strategy.save_ckpt(model, str(tmp_path), "e", max_num=9, max_mem=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e", "latest", "notes"]
    with pytest.raises(CheckpointError, match="no checkpoint 'a'"):
        strategy.load_ckpt(model, str(tmp_path), "a")
    with pytest.raises(ConfigError, match="load_ckpt restores weights and optimizer"):
        strategy.load_ckpt(model, str(tmp_path), load_optimizer_states=False)


def test_checkpoints_without_a_tag_are_numbered_on(tmp_path):
    strategy = get_strategy(args())
    model = prepared(strategy)[0]
    for step in range(5):
        strategy.save_ckpt(model, str(tmp_path), max_num=2, client_state={"step": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_3", "step_4"]
    assert strategy.load_ckpt(model, str(tmp_path))[1] == {"step": 4}
    assert strategy.load_ckpt(model, str(tmp_path), "step_3")[1] == {"step": 3}


def test_a_checkpoint_that_fails_leaves_the_one_of_its_name(tmp_path):
    strategy = get_strategy(args())
    model = prepared(strategy)[0]
    strategy.save_ckpt(model, str(tmp_path), "a", client_state={"step": 1})
    with pytest.raises(TypeError):
        strategy.save_ckpt(model, str(tmp_path), "a", client_state={"step": object()})
    assert strategy.load_ckpt(model, str(tmp_path))[1] == {"step": 1}


def test_a_gradient_that_is_not_finite_updates_nothing():
    strategy = get_strategy(args(train_batch_size=2))
    model, optimizer, scheduler = prepared(strategy)
    before = weights(model)
    strategy.backward(loss_of(model, ROWS[0]) * float("nan"), model, optimizer)
    info = strategy.optimizer_step(optimizer, model, scheduler)
    assert info.skipped and torch.equal(weights(model), before)
    assert scheduler.last_epoch == 0


def test_a_model_without_its_optimizer_is_refused():
    strategy = get_strategy(args())
    model = net()
    with pytest.raises(ConfigError, match=r"Sequential has no optimizer: call .*prepare"):
        strategy.backward(loss_of(model, ROWS[0]), model, None)
    with pytest.raises(ConfigError, match=r"SGD; build it by create_optimizer"):
        strategy.prepare((model, torch.optim.SGD(model.parameters()), None))
    with pytest.raises(ConfigError, match=r"is not prepared: call .*prepare"):
        strategy.create_optimizer(model).step()


def test_all_models_of_a_run_are_prepared_with_cosine_schedules(tmp_path):
    strategy = get_strategy(args(train_batch_size=2, actor_learning_rate=1e-3, l2=0.0))
    with strategy.init_model_context():
        actor = ActorLanguage(small_model("qwen2"))
        reference = copy.deepcopy(actor)
    found = strategy.prepare_models_and_optimizers(actor, None, [], reference, strategy.args, 10)
    (model, optimizer, scheduler), critic, rewards, frozen = found
    assert model is actor and critic == (None, None, None) and rewards == [] and frozen is reference
    ids = torch.tensor([[40, 41, 42, 43]])
    before = actor(ids, 2).sum()
    strategy.backward(-before, actor, optimizer)
    strategy.optimizer_step(optimizer, actor, scheduler)
    assert 0 < optimizer.param_groups[0]["lr"] <= 1e-3
    strategy.backward(-actor(ids, 2).sum(), actor, optimizer)
    info = strategy.optimizer_step(optimizer, actor, scheduler)
    assert info.lr == pytest.approx(1e-3) and float(actor(ids, 2).detach().sum()) > float(
        before.detach()
    )
    strategy.save_model(actor, None, str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_loader_shuffles_by_epoch_and_resumes_inside_one():
    strategy = get_strategy(args())
    data = list(range(10))
    loader = strategy.setup_dataloader(data, 2)
    first = torch.cat(list(loader)).tolist()
    assert sorted(first) == data and first != data
    rest = strategy.setup_dataloader(data, 2, consumed_samples=4)
    assert torch.cat(list(rest)).tolist() == first[4:] and len(rest) == 3
    loader.sampler.set_epoch(1)
    assert torch.cat(list(loader)).tolist() != first
    plain = strategy.setup_dataloader(data, 2, shuffle=False)
    assert torch.cat(list(plain)).tolist() == data


def test_sums_over_one_process_are_the_numbers_themselves(capsys):
    strategy = get_fake_strategy()
    numbers = {"loss": 2, "kl": torch.tensor([1.0, 2.0])}
    for op in ("mean", "sum", "max"):
        found = strategy.all_reduce(numbers, op)
        assert found["loss"] == 2.0 and torch.equal(found["kl"], numbers["kl"])
    assert strategy.all_gather({"loss": 2})["loss"].tolist() == [2.0]
    with pytest.raises(ConfigError, match="op = 'min'"):
        strategy.all_reduce(1, "min")
    strategy.print("step", 3)
    assert capsys.readouterr().out == "step 3\n"
    assert strategy.is_rank_0() and strategy.get_rank() == 0 and strategy.world_size == 1
    assert isinstance(strategy, FakeStrategy) and isinstance(strategy, StrategyBase)


@pytest.mark.parametrize(
    "changed",
    [{"sp_size": 2}, {"engine_tp_size": 4}, {"zpg": 2}, {"grad_accum_dtype": "bf16"}],
    ids=lambda changed: next(iter(changed)),
)
def test_an_option_of_several_processes_is_refused_by_name(changed):
    (name, value), *_ = changed.items()
    with pytest.raises(ConfigError, match=rf"{name} = {value} changes nothing in get_strategy"):
        get_strategy(args(**changed))


def test_several_processes_and_sizes_that_do_not_divide_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="train_batch_size = 5 is no multiple"):
        get_strategy(args(train_batch_size=5))
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE = 8.*launch\.processes=8"):
        get_strategy(args())


def test_an_engine_is_refused_with_the_ways_to_generate():
    strategy = get_strategy(args(fsdp=True))
    with pytest.raises(AttributeError, match=r"gather_and_generate: .*lightrft rl"):
        strategy.gather_and_generate(None)
    assert is_engine(SimpleNamespace(wake_up=None)) and not is_engine(net())


def test_options_keep_what_has_no_field():
    config = StrategyConfig.from_args(args(pretrain="a-model"))
    assert config.max_norm == 0.5 and config.extra_args == {"pretrain": "a-model"}
    assert get_strategy(args(pretrain="a-model")).args.pretrain == "a-model"


def test_options_of_a_class_are_options_of_its_objects():
    class Options:
        train_batch_size = 6
        micro_train_batch_size = 3

    class Slots:
        __slots__ = ("max_norm",)

    slots = Slots()
    slots.max_norm = 0.25
    assert get_strategy(Options()).accumulated_gradient == 2
    assert get_strategy(slots).max_norm == 0.25
    config = StrategyConfig.from_args(args_dict={"l2": 0.5, "extra_args": {"a": 1}, "b": 2})
    assert (config.l2, config.extra_args) == (0.5, {"a": 1, "b": 2})
    assert StrategyConfig.from_args(config) == config


def test_the_summary_of_options_names_those_that_differ_from_the_defaults(capsys):
    StrategyConfig(l2=0.5).print_config_summary()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "Overridden" in line] == ["l2: 0.5 (Overridden)"]


def test_a_moving_average_follows_the_weights_once_per_optimizer_step():
    strategy = get_strategy(args())
    model, average = net(), net()
    before = weights(average)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    frozen = next(model.parameters()).requires_grad_(False)
    for _ in range(strategy.accumulated_gradient):
        assert torch.equal(weights(average), before)
        strategy.moving_average(model, average, beta=0.75)
    assert torch.allclose(weights(average)[frozen.numel() :], before[frozen.numel() :] + 0.25)
    assert torch.equal(weights(average)[: frozen.numel()], before[: frozen.numel()])


def test_the_calls_of_lightrfts_loops_on_memory_leave_the_numbers():
    plain, moved = get_strategy(args()), get_strategy(args())
    one, other = prepared(plain), prepared(moved)
    train(plain, one, ROWS[:4])
    for some in (ROWS[:2], ROWS[2:4]):
        moved.maybe_load_optimizer(other[1])
        train(moved, other, some)
        assert moved.maybe_offload_optimizer(other[1]) is other[1]
        moved.reload_model(moved.offload_model([other[0]]))
    assert torch.equal(weights(one[0]), weights(other[0]))
    assert moved.prepare_model(net(), is_training=True, shard_size=8).training
    assert moved.get_ds_train_config(is_actor=True) is None is moved.get_ds_eval_config()
    with pytest.raises(AttributeError, match="wakeup_inference_engine: get_strategy has no engine"):
        moved.wakeup_inference_engine()


def test_a_reward_model_gets_the_schedule_of_an_actor():
    strategy = get_strategy(args(actor_learning_rate=0.1, lr_warmup_ratio=0.5))
    model, optimizer, scheduler = strategy.prepare_reward_model(net(), max_steps=4)
    rates = []
    for some in ROWS[:8]:
        strategy.backward(loss_of(model, some), model, optimizer)
        info = strategy.optimizer_step(optimizer, model, scheduler)
        rates += [] if info is None else [info.lr]
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.055])


@pytest.mark.parametrize("name", ["adam_offload", "fsdp_cpu_offload"])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="has another memory")
def test_offloading_where_there_is_one_memory_is_refused_by_its_own_name(name):
    with pytest.raises(ConfigError, match=f"{name} = True changes nothing on the CPU"):
        get_strategy(args(**{name: True}))
