"""The documented vision actor and critic: rectangles and packed rows against plain rows of the model's own forward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from lightrft.config.model import ModelConfig
from lightrft.models import ActorLanguage, ActorVL, CriticVL, get_supported_parameters
from lightrft.models.actor_modality import ActorModality
from lightrft.models.loading.from_pretrained import load_model
from lightrft.models.lora import is_adapted
from lightrft.models.utils import find_all_linear_modules
from lightrft.types import Batch, Prompt, Segments
from lightrft.utils.errors import ModelError
from tests.media_helpers import Rig, mixed_prompts, rig
from tests.model_helpers import Float64, float32_bound, gap, small_model, weights

PAD, EOS = 0, 3
NAMES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
ANSWERS = ([40, 41, 42, EOS], [50, 51, 52, 53, 54, EOS], [60, 61], [70, 71, EOS], [80, 81, 82])


@dataclass
class Example:
    """Samples with media in every form that the documented interface takes."""

    rig: Rig
    prompts: list[Prompt]
    answers: tuple[list[int], ...] = ANSWERS

    @property
    def media(self) -> dict[str, torch.Tensor]:
        joined = Segments.of_prompts(self.prompts).media
        return {name: joined[name].values for name in NAMES}

    @property
    def batch(self) -> Batch:
        return Batch(
            Segments.of_prompts(self.prompts),
            Segments.of(self.answers),
            torch.arange(len(self.answers)),
        )

    @property
    def samples(self) -> list[list[int]]:
        return [p.token_ids + answer for p, answer in zip(self.prompts, self.answers)]

    def left(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As a sampler lays rows out: prompts end in one column, answers are filled up behind."""
        return _rectangle([p.token_ids for p in self.prompts], "left", list(self.answers))

    def right(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _rectangle(self.samples, "right")

    def packed(self, filler: int = 3) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        flat = [t for row in self.samples for t in row] + [PAD] * filler
        mask = [i + 1 for i, row in enumerate(self.samples) for _ in row] + [0] * filler
        return torch.tensor([flat]), torch.tensor([mask]), [len(row) for row in self.samples]


def _rectangle(rows, side, after=None):
    def pad(each, where):
        return pad_sequence(
            [torch.tensor(r) for r in each], batch_first=True, padding_value=PAD, padding_side=where
        )

    ids, mask = pad(rows, side), pad([[1] * len(r) for r in rows], side)
    if after is None:
        return ids, mask
    answers, answered = pad(after, "right"), pad([[1] * len(r) for r in after], "right")
    return torch.cat([ids, answers], 1), torch.cat([mask, answered], 1)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    r = rig("qwen2_5_vl", tmp_path_factory.mktemp("vl"))
    prompts = mixed_prompts(r)
    assert len(prompts) == len(ANSWERS)
    assert {"pixel_values", "pixel_values_videos"} <= {name for p in prompts for name in p.media}
    return Example(r, prompts)


def actor_of(example, dtype=torch.float64, kind=ActorVL, **options):
    return kind(load_model(ModelConfig(path=str(example.rig.path)), dtype=dtype), **options)


def of_rows(actor, example):
    """Log-probs ``[N]`` of the answers by every way in."""
    ids, mask = example.left()
    width = max(map(len, example.answers))
    columns = actor(ids, width, mask, **example.media)
    found = {"left": torch.cat([row[: len(a)] for row, a in zip(columns, example.answers)])}
    ids, mask = example.right()
    rows = actor(ids, ids.shape[1] - 1, mask, **example.media)
    pieces = [
        row[len(s) - len(a) - 1 : len(s) - 1]
        for row, s, a in zip(rows, example.samples, example.answers)
    ]
    found["right"] = torch.cat(pieces)
    ids, mask, lengths = example.packed()
    actor.packing_samples = True
    found["packed"] = actor(
        ids, [len(a) for a in example.answers], mask, packed_seq_lens=lengths, **example.media
    )[0]
    actor.packing_samples = False
    return found


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_rows_padded_on_either_side_and_packed_rows_give_the_logprobs_of_the_trainers_actor(
    tmp_path, family
):
    r = rig(family, tmp_path)
    example = Example(r, mixed_prompts(r))
    actor = actor_of(example)
    with Float64(), torch.no_grad():
        expected = actor.actor.own_logprobs(example.batch)
        found = of_rows(actor, example) | {"trainer": actor.actor.score(example.batch).logprobs}
    for way, logprobs in found.items():
        assert (logprobs - expected).abs().max() < 1e-9 * expected.abs().max(), way


def test_the_gradient_of_padded_rows_is_that_of_the_trainers_actor_tower_included(example):
    actor = actor_of(example)
    grads = []
    with Float64():
        for way in ("trainer", "left", "packed"):
            actor.zero_grad()
            logprobs = (
                actor.actor.score(example.batch).logprobs
                if way == "trainer"
                else of_rows(actor, example)[way]
            )
            (logprobs * weights(len(logprobs), torch.float64)).sum().backward()
            grads.append(
                {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}
            )
    assert any("visual" in name for name in grads[0])
    assert all(gap(some, grads[0]) < 1e-9 for some in grads[1:])


def test_a_path_loads_the_familys_own_class(example):
    actor = ActorVL(str(example.rig.path), bf16=False)
    assert type(actor.model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    with torch.no_grad():
        expected = example.rig.actor.score(example.batch).logprobs
        assert torch.allclose(of_rows(actor, example)["left"], expected, atol=1e-5)
    assert ActorVL(str(example.rig.path)).model.dtype == torch.bfloat16


def test_an_existing_model_is_kept_and_every_attribute_is_set(example):
    model = load_model(ModelConfig(path=str(example.rig.path)))
    before = [(name, type(module)) for name, module in model.named_modules()]
    actor = ActorVL(model, packing_samples=True, high_entropy_token_ratio=0.2)
    assert actor.model is model
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert (actor.pretrain_or_model, actor.packing_samples, actor.high_entropy_token_ratio) == (
        "qwen2_5_vl",
        True,
        0.2,
    )
    assert ActorVL(str(example.rig.path)).pretrain_or_model == str(example.rig.path)


def test_grids_may_be_one_tensor_per_sample(example):
    actor, (ids, mask) = actor_of(example, torch.float32), example.left()
    pictures = [
        p.media["image_grid_thw"].values if "image_grid_thw" in p.media else None
        for p in example.prompts
    ]
    clips = [
        p.media["video_grid_thw"].values.squeeze(0)
        for p in example.prompts
        if "video_grid_thw" in p.media
    ]
    with torch.no_grad():
        expected = actor(ids, 3, mask, **example.media)
        lists = {**example.media, "image_grid_thw": pictures, "video_grid_thw": clips}
        assert torch.equal(actor(ids, 3, mask, **lists), expected)


def test_packed_slices_are_those_of_the_whole_output(example):
    actor = actor_of(example, torch.float32, packing_samples=True)
    ids, mask, lengths = example.packed()
    counts = [4, 1, 2, 0, 3]
    with torch.no_grad():
        logprobs, output = actor(
            ids, counts, mask, return_output=True, packed_seq_lens=lengths, **example.media
        )
    whole = output.logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    expected = torch.cat([whole[end - n - 1 : end - 1] for end, n in zip(ends, counts)])
    assert logprobs.shape == (1, 10)
    assert torch.allclose(logprobs[0], expected, atol=1e-5)


def test_without_num_actions_only_the_output_can_be_returned(example):
    actor, (ids, mask) = actor_of(example, torch.float32), example.left()
    with pytest.raises(ValueError, match="return_output"):
        actor(ids, attention_mask=mask, **example.media)
    with torch.no_grad():
        output = actor(ids, attention_mask=mask, return_output=True, **example.media)
        again = actor(ids, 3, mask, return_output=True, **example.media)[1]
    assert output.logits.shape[:2] == ids.shape
    assert torch.equal(output.logits, again.logits)


def test_a_placeholder_that_was_sampled_stands_for_nothing(example):
    actor = actor_of(example)
    token = actor.model.config.image_token_id
    odd = Example(example.rig, example.prompts, tuple([token, *a[1:]] for a in example.answers))
    with Float64(), torch.no_grad():
        expected = actor.actor.score(odd.batch).logprobs
        ids, mask = odd.left()
        rows = actor(ids, 6, mask, **odd.media)
        ids, mask, lengths = odd.packed()
        actor.packing_samples = True
        packed = actor(
            ids, [len(a) for a in odd.answers], mask, packed_seq_lens=lengths, **odd.media
        )[0]
    found = torch.cat([row[: len(a)] for row, a in zip(rows, odd.answers)])
    assert (found - expected).abs().max() < 1e-9
    assert (packed - expected).abs().max() < 1e-9


def test_media_and_placeholders_that_do_not_fit_are_an_error(example):
    actor, (ids, mask) = actor_of(example, torch.float32), example.left()
    fewer = ids.clone()
    fewer[fewer == actor.model.config.image_token_id] = 40
    with pytest.raises(ModelError, match="0 image tokens in the batch"):
        actor(fewer, 3, mask, **example.media)
    for call in (
        lambda a: a(ids, 3, mask, **example.media),
        lambda a: a.generate(ids, attention_mask=mask, **example.media),
    ):
        with pytest.raises(ModelError, match="'qwen2' cannot read media"):
            call(ActorVL(small_model("qwen2", vocab_size=200), bf16=False))


def test_greedy_answers_of_a_padded_batch_are_those_of_each_row_alone(example):
    actor = actor_of(example, torch.float32)
    ids, mask = _rectangle([p.token_ids for p in example.prompts], "left")
    limits = {"max_new_tokens": 6, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    sequences, attended, actions = actor.generate(
        ids, attention_mask=mask, **example.media, **limits
    )
    assert torch.equal(sequences[:, : ids.shape[1]], ids)
    assert attended.shape == sequences.shape
    assert actions.shape == (len(ids), sequences.shape[1] - ids.shape[1])
    for row, real, p in zip(sequences, mask, example.prompts):
        own = {name: rows.values for name, rows in p.media.items()}
        types = torch.zeros(1, len(p.token_ids), dtype=torch.long)
        for kind, token in (
            (1, actor.model.config.image_token_id),
            (2, actor.model.config.video_token_id),
        ):
            types[0, torch.tensor(p.token_ids) == token] = kind
        alone = actor.model.generate(
            input_ids=torch.tensor([p.token_ids]),
            mm_token_type_ids=types,
            use_cache=False,
            min_new_tokens=1,
            **own,
            **limits,
        )[0, len(p.token_ids) :]
        answer = row[ids.shape[1] : ids.shape[1] + len(alone)]
        cut = len(alone) == 6 and alone[-1] != EOS
        assert answer.tolist() == ([*alone[:-1].tolist(), EOS] if cut else alone.tolist())
        assert real.sum() == len(p.token_ids)
    with torch.no_grad():
        output = actor(sequences, attention_mask=attended, return_output=True, **example.media)
    chosen = output.logits[:, ids.shape[1] - 1 : -1].argmax(-1)
    said = sequences[:, ids.shape[1] :]
    kept = actions.bool() & (said != EOS)
    assert kept.sum() > len(ids)
    assert torch.equal(said[kept], chosen[kept])


def test_sampled_answers_come_with_their_masks(example):
    actor = actor_of(example, torch.float32)
    ids, mask = _rectangle([p.token_ids for p in example.prompts], "left")
    torch.manual_seed(0)
    sequences, attended, actions = actor.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=7,
        eos_token_id=EOS,
        pad_token_id=PAD,
        top_k=20,
        temperature=0.8,
        **example.media,
    )
    for row, seen, action in zip(
        sequences[:, ids.shape[1] :].tolist(), attended[:, ids.shape[1] :], actions.tolist()
    ):
        length = row.index(EOS) + 1  # a row without an end token was given one
        assert action == [1] * length + [0] * (len(row) - length)
        assert seen.tolist() == action
    assert torch.equal(attended[:, : ids.shape[1]], mask)


@pytest.mark.parametrize(
    ("row", "expected", "attended", "actions"),
    [
        pytest.param(
            [PAD, 10, 11, 12, EOS, PAD],
            [PAD, 10, 11, 12, EOS, PAD],
            [0, 1, 1, 1, 1, 0],
            [1, 1, 0],
            id="stopped",
        ),
        pytest.param(
            [9, 10, 11, 12, 13, 14],
            [9, 10, 11, 12, 13, EOS],
            [1] * 6,
            [1, 1, 1],
            id="cut: its last token is an end now",
        ),
        pytest.param(
            [9, EOS, 11, 12, 13, EOS],
            [9, EOS, 11, 12, 13, EOS],
            [1] * 6,
            [1, 1, 1],
            id="an end inside the prompt",
        ),
        pytest.param(
            [9, 10, EOS, 12, 13, EOS],
            [9, 10, EOS, 12, 13, EOS],
            [1] * 6,
            [1, 1, 1],
            id="a prompt that ends in an end",
        ),
        pytest.param(
            [9, 10, 11, PAD, 13, EOS],
            [9, 10, 11, PAD, 13, EOS],
            [1] * 6,
            [1, 0, 1],
            id="a pad inside the answer",
        ),
        pytest.param(
            [9, 10, 11, EOS, EOS, EOS],
            [9, 10, 11, EOS, EOS, EOS],
            [1, 1, 1, 1, 0, 0],
            [1, 0, 0],
            id="stopped at once",
        ),
    ],
)
def test_generated_rows_get_the_documented_masks(example, row, expected, attended, actions):
    given = torch.tensor([row])
    found = actor_of(example, torch.float32).process_sequences(given, 3, EOS, PAD)
    assert [x.tolist() for x in found] == [[expected], [attended], [actions]]
    assert given.tolist() == [row]


def test_text_alone_gives_the_numbers_of_the_text_actor(example):
    """The language model of a vision-language model, taken out of it."""
    actor = actor_of(example, torch.float32)
    text = actor.model.config.get_text_config().to_dict()
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "max_position_embeddings",
        "vocab_size",
        "rms_norm_eps",
    )
    alone = small_model("qwen2", **{name: text[name] for name in sizes}, tie_word_embeddings=False)
    state = {
        name.replace("language_model.", ""): value
        for name, value in actor.model.state_dict().items()
        if "visual" not in name
    }
    alone.load_state_dict(state)
    plain = Example(
        example.rig, [Prompt("a", list(range(10, 22))), Prompt("b", [30, 31, 32])], ANSWERS[:2]
    )
    ids, mask = plain.left()
    packed, ones, lengths = plain.packed()
    found = []
    with torch.no_grad():
        for policy in (ActorLanguage(alone), actor, ActorVL(alone), ActorLanguage(actor.model)):
            rows = policy(ids, 6, mask)
            policy.packing_samples = True
            found.append(
                torch.cat(
                    [rows.flatten(), policy(packed, [4, 6], ones, packed_seq_lens=lengths)[0]]
                )
            )
    bound = float32_bound(alone) * found[0].abs().max()
    assert all((some - found[0]).abs().max() < bound for some in found)
    limits = {"max_new_tokens": 5, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    answers = [
        p.generate(ids[:, :12], attention_mask=mask[:, :12], **limits)[0]
        for p in (ActorLanguage(alone), actor)
    ]
    assert torch.equal(*answers)


def test_linear_modules_leave_out_the_tower_if_it_is_frozen_and_its_connector_always(example):
    model = actor_of(example, torch.float32).model
    text = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert find_all_linear_modules(model, True) == text
    tower = {
        n.rsplit(".", 1)[-1]
        for n, m in model.named_modules()
        if ".visual.blocks." in n and isinstance(m, torch.nn.Linear)
    }
    assert tower - text
    assert find_all_linear_modules(model, False) == text | tower


def test_adapters_stay_out_of_the_tower_and_its_projector(example):
    actor = actor_of(example, torch.float32, lora_rank=4, lora_alpha=8)
    adapted = {name for name, p in actor.named_parameters() if p.requires_grad}
    assert is_adapted(actor.model)
    assert adapted
    assert all("lora_" in name and "language_model" in name for name in adapted)
    ids, mask = example.left()
    with torch.no_grad():
        assert torch.allclose(
            actor(ids, 3, mask, **example.media),
            actor_of(example, torch.float32)(ids, 3, mask, **example.media),
            atol=1e-5,
        )


def test_what_a_loop_keeps_of_its_inputs_builds_a_call(example):
    assert ActorVL.modality is CriticVL.modality is ActorModality.VISION_LANGUAGE
    candidates = {**example.media, "audio_values": torch.zeros(1), "something": 1}
    kept = {
        name: value
        for name, value in candidates.items()
        if name in get_supported_parameters(ActorVL.modality)
    }
    assert set(kept) == set(NAMES)
    ids, mask = example.left()
    for part in (actor_of(example, torch.float32), actor_of(example, torch.float32, CriticVL)):
        assert part(ids, num_actions=3, attention_mask=mask, **kept).shape == (5, 3)


def test_unknown_keywords_are_rejected(example):
    actor, (ids, _) = actor_of(example, torch.float32), example.left()
    with pytest.raises(TypeError, match="max_tokens"):
        actor.generate(ids, max_tokens=3, **example.media)
    with pytest.raises(ModelError, match=r"cannot read media \(audio_values\)"):
        actor(ids, 3, audio_values=torch.zeros(1, 80, 30))
    with pytest.raises(TypeError, match="audio_values, which is no tensor"):
        actor(ids, 3, audio_values=True)
    with pytest.raises(TypeError, match="pixels"):
        ActorVL(str(example.rig.path), pixels=3)


def recomputes(actor):
    return any(getattr(module, "gradient_checkpointing", False) for module in actor.modules())


def test_gradient_checkpointing_changes_no_gradient(example):
    actor, (ids, mask) = actor_of(example).train(), example.left()
    grads = []
    for on in (False, True):
        actor.zero_grad()
        if on:
            actor.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        assert recomputes(actor) is on
        actor(ids, 3, mask, **example.media).sum().backward()
        grads.append(
            {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}
        )
    assert gap(*grads) < 1e-9
    actor.gradient_checkpointing_disable()
    assert not recomputes(actor)


def test_trainable_parameters_are_printed(example, capsys):
    actor_of(example, torch.float32).print_trainable_parameters()
    assert "trainable%: 100.0000" in capsys.readouterr().out


def test_the_critic_gives_values_of_the_states_before_actions(example):
    critic = actor_of(example, kind=CriticVL)
    with Float64(), torch.no_grad():
        expected, _ = critic.critic.values(example.batch)
        ids, mask = example.left()
        rows, everything = critic(ids, 6, mask, return_output=True, **example.media)
        ids, mask, lengths = example.packed()
        critic.packing_samples = True
        packed = critic(
            ids, [len(a) for a in example.answers], mask, packed_seq_lens=lengths, **example.media
        )[0]
    found = torch.cat([row[: len(a)] for row, a in zip(rows, example.answers)])
    assert everything.shape == (5, rows.shape[1] + len(example.left()[0][0]) - 6)
    assert (found - expected).abs().max() < 1e-9
    assert (packed - expected).abs().max() < 1e-9
