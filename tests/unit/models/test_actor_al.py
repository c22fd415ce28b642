"""The documented audio actor: rectangles and packed rows against plain rows of the model's own forward."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from lightrft.config.model import ModelConfig
from lightrft.models import ActorAL, ActorLanguage, get_supported_parameters
from lightrft.models.actor_modality import ActorModality
from lightrft.models.loading.from_pretrained import load_model
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ModelError
from tests.media_helpers import mixed_prompts, rig
from tests.model_helpers import Float64, float32_bound, gap, small_model, weights

PAD, EOS = 0, 3
ANSWERS = ([40, 41, 42, EOS], [50, 51, EOS], [60, 61])


class Example:
    """Samples of text alone, one clip and two clips."""

    def __init__(self, rig):
        self.rig, self.prompts = rig, mixed_prompts(rig)
        assert [
            len(p.media.get("feature_lengths", [])) and len(p.media["feature_lengths"].values)
            for p in self.prompts
        ] == [
            0,
            1,
            2,
        ]
        self.batch = Batch(Segments.of_prompts(self.prompts), Segments.of(ANSWERS), torch.arange(3))
        media = self.batch.prompts.media
        self.frames = media["feature_lengths"].values.tolist()
        kept = [min(n + 2, 100) for n in self.frames]
        self.clips = [clip.t() for clip in media["input_features"].values.split(kept)]
        self.rows = [p.token_ids + answer for p, answer in zip(self.prompts, ANSWERS)]

    @property
    def whole(self):
        """``[clips, mels, window]`` as the family's processor in transformers gives them: own frames, then silence."""
        return pad_sequence([c.t() for c in self.clips] + [torch.zeros(100, 16)], batch_first=True)[
            :-1
        ].transpose(1, 2)

    @property
    def mask(self):
        return (torch.arange(100) < torch.tensor(self.frames)[:, None]).long()

    def left(self):
        return _rectangle(self.rows, "left")

    def packed(self):
        mask = [i + 1 for i, row in enumerate(self.rows) for _ in row]
        return (
            torch.tensor([[t for row in self.rows for t in row]]),
            torch.tensor([mask]),
            [len(row) for row in self.rows],
        )


def _rectangle(rows, side):
    ids, mask = (
        pad_sequence(
            [torch.tensor(r) for r in each], batch_first=True, padding_value=PAD, padding_side=side
        )
        for each in (rows, [[1] * len(r) for r in rows])
    )
    return ids, mask


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return Example(rig("qwen2_audio", tmp_path_factory.mktemp("al")))


def actor_of(example, dtype=torch.float64, **options):
    return ActorAL(load_model(ModelConfig(path=str(example.rig.path)), dtype=dtype), **options)


def of_rows(actor, example, **media):
    """Log-probs ``[N]`` of the answers in rectangles and in a packed row."""
    ids, mask = example.left()
    columns = actor(ids, 4, mask, **media)
    found = {"left": torch.cat([row[4 - len(a) :] for row, a in zip(columns, ANSWERS)])}
    ids, mask, lengths = example.packed()
    actor.packing_samples = True
    found["packed"] = actor(ids, [len(a) for a in ANSWERS], mask, packed_seq_lens=lengths, **media)[
        0
    ]
    actor.packing_samples = False
    return found


def test_padded_and_packed_rows_give_the_logprobs_and_gradients_of_the_trainers_actor(example):
    actor, grads = actor_of(example), []
    media = {"audio_values": example.whole, "feature_attention_mask": example.mask}
    with Float64():
        expected = actor.actor.own_logprobs(example.batch)
        for way in ("own", "left", "packed"):
            actor.zero_grad()
            logprobs = expected if way == "own" else of_rows(actor, example, **media)[way]
            assert (logprobs - expected).abs().max() < 1e-9 * expected.abs().max(), way
            (logprobs * weights(len(logprobs), torch.float64)).sum().backward()
            grads.append(
                {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}
            )
    assert any("audio_tower" in name for name in grads[0])
    assert all(gap(some, grads[0]) < 1e-9 for some in grads[1:])


def test_without_a_mask_all_frames_that_are_given_count(example):
    actor = actor_of(example)
    own = [clip[:, :n] for clip, n in zip(example.clips, example.frames)]
    filled = pad_sequence([c.t() for c in own] + [torch.zeros(100, 16)], batch_first=True)[
        :-1
    ].transpose(1, 2)
    with torch.no_grad():
        for way, found in of_rows(actor, example, audio_values=own).items():
            expected = of_rows(
                actor, example, audio_values=filled, feature_attention_mask=example.mask
            )[way]
            assert torch.allclose(found, expected, atol=1e-12)


def test_of_filled_up_clips_as_many_frames_count_as_there_are_placeholders_for(example):
    """Four frames make a feature."""
    actor = actor_of(example)
    token = actor.model.config.audio_token_index
    runs = [
        [len(run) for run in "".join("a" if t == token else " " for t in p.token_ids).split()]
        for p in example.prompts
    ]
    counts = torch.tensor([4 * n for each in runs for n in each])
    mask = (torch.arange(100) < counts[:, None]).long()
    with torch.no_grad():
        found = of_rows(actor, example, audio_values=example.whole)
        expected = of_rows(actor, example, audio_values=example.whole, feature_attention_mask=mask)
    assert all(torch.equal(found[way], expected[way]) for way in found)


def test_clips_beyond_the_towers_window_are_cut(example):
    actor, (ids, mask) = actor_of(example, torch.float32), example.left()
    longer = torch.nn.functional.pad(example.whole, (0, 30), value=5.0)
    with torch.no_grad():
        given = {"feature_attention_mask": example.mask}
        assert torch.equal(
            actor(ids, 4, mask, audio_values=longer, **given),
            actor(ids, 4, mask, audio_values=example.whole, **given),
        )


def test_voxtral_hears_whole_windows(tmp_path):
    other = rig("voxtral", tmp_path)
    prompt = mixed_prompts(other)[1]
    actor, frames = ActorAL(str(other.path), bf16=False), prompt.media["input_features"].values
    mels = torch.cat([frames, frames[-1:].expand(100 - len(frames), -1)]).t()
    batch = Batch(Segments.of_prompts([prompt]), Segments.of([ANSWERS[0]]), torch.tensor([0]))
    with torch.no_grad():
        expected = actor.actor.own_logprobs(batch)
        found = actor(torch.tensor([prompt.token_ids + ANSWERS[0]]), 4, audio_values=mels[None])
    assert torch.allclose(found[0], expected, atol=1e-5)


def test_a_batch_without_placeholders_is_text_alone(example):
    actor = actor_of(example, torch.float32)
    ids = torch.tensor([[10, 11, 12, 13, EOS]])
    with torch.no_grad():
        assert torch.equal(actor(ids, 2, audio_values=example.whole), actor(ids, 2))
    found = actor.generate(
        ids[:, :4], audio_values=example.whole, do_sample=False, max_new_tokens=3
    )
    assert torch.equal(found[0], actor.generate(ids[:, :4], do_sample=False, max_new_tokens=3)[0])


def test_text_alone_gives_the_numbers_of_the_text_actor(example):
    """The language model of an audio-language model, taken out of it."""
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
    }
    alone.load_state_dict(
        {n: v for n, v in state.items() if "audio_tower" not in n and "projector" not in n}
    )
    ids, mask = _rectangle([list(range(10, 22)), [30, 31, 32]], "left")
    found = []
    with torch.no_grad():
        for policy in (ActorLanguage(alone), actor, ActorAL(alone), ActorLanguage(actor.model)):
            rows = policy(ids, 2, mask)
            policy.packing_samples = True
            packed = policy(
                ids[:1], [3, 4], torch.tensor([[1] * 5 + [2] * 7]), packed_seq_lens=[5, 7]
            )
            found.append(torch.cat([rows.flatten(), packed[0]]))
    bound = float32_bound(alone) * found[0].abs().max()
    assert all((some - found[0]).abs().max() < bound for some in found)


def test_greedy_answers_of_a_padded_batch_are_those_of_each_row_alone(example):
    actor = actor_of(example, torch.float32)
    ids, mask = _rectangle([p.token_ids for p in example.prompts], "left")
    limits = {"max_new_tokens": 6, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    media = {"audio_values": example.whole, "feature_attention_mask": example.mask}
    sequences, attended, actions = actor.generate(ids, attention_mask=mask, **media, **limits)
    assert attended.shape == sequences.shape
    assert actions.shape == (3, sequences.shape[1] - ids.shape[1])
    seen = 0
    for row, p in zip(sequences, example.prompts):
        count = len(p.media["feature_lengths"].values) if p.media else 0
        own = {
            "input_features": example.whole[seen : seen + count],
            "feature_attention_mask": example.mask[seen : seen + count],
        }
        alone = actor.model.generate(
            input_ids=torch.tensor([p.token_ids]),
            use_cache=False,
            min_new_tokens=1,
            **(own if count else {}),
            **limits,
        )[0, len(p.token_ids) :].tolist()
        seen += count
        cut = len(alone) == 6 and alone[-1] != EOS
        answer = row[ids.shape[1] : ids.shape[1] + len(alone)].tolist()
        assert answer == ([*alone[:-1], EOS] if cut else alone)
    with torch.no_grad():
        output = actor(sequences, attention_mask=attended, return_output=True, **media)
    said = sequences[:, ids.shape[1] :]
    kept = actions.bool() & (said != EOS)
    assert kept.sum() > 3
    assert torch.equal(said[kept], output.logits[:, ids.shape[1] - 1 : -1].argmax(-1)[kept])


def test_what_a_loop_keeps_of_its_inputs_builds_a_call(example):
    assert ActorAL.modality is ActorModality.AUDIO_LANGUAGE
    candidates = {
        "audio_values": example.whole,
        "image_grid_thw": torch.ones(1, 3),
        "pixel_values": torch.zeros(1),
        "x": 1,
    }
    kept = {
        name: value
        for name, value in candidates.items()
        if name in get_supported_parameters(ActorAL.modality)
    }
    assert set(kept) == {"audio_values", "image_grid_thw"}
    actor, (ids, mask) = actor_of(example, torch.float32), example.left()
    with torch.no_grad():
        assert torch.equal(
            actor(ids, 3, mask, **kept), actor(ids, 3, mask, audio_values=example.whole)
        )
    assert actor.generate(ids, attention_mask=mask, max_new_tokens=2, **kept)[0].shape[0] == 3


def test_sound_by_another_name_is_used_and_pictures_are_refused(example):
    actor, (ids, mask) = actor_of(example, torch.float32), example.left()
    given = {
        "attention_mask": mask,
        "feature_attention_mask": example.mask,
        "do_sample": False,
        "max_new_tokens": 4,
    }
    heard = actor.generate(ids, audio_values=example.whole, **given)[0]
    assert torch.equal(actor.generate(ids, input_features=example.whole, **given)[0], heard)
    assert not torch.equal(
        actor.generate(ids, input_features=example.whole.flip(1) * 3, **given)[0], heard
    )
    with pytest.raises(ModelError, match="two names"):
        actor.generate(ids, input_features=example.whole, audio_values=example.whole, **given)
    pictures = {
        "pixel_values": torch.zeros(4, 12),
        "pixel_values_videos": example.whole,
        "video_grid_thw": torch.ones(1, 3),
    }
    for name, value in pictures.items():
        with pytest.raises(ModelError, match=f"{name}: .*audio_values"):
            actor.generate(ids, **{name: value}, **given)
        with pytest.raises(ModelError, match=f"{name}: .*audio_values"):
            actor(ids, 3, mask, **{name: value})


def test_sound_as_pixel_values_is_sound(example):
    actor, (ids, mask) = actor_of(example, torch.float32), example.left()
    clips, masks = example.whole, {"feature_attention_mask": example.mask}
    with torch.no_grad():
        scores = actor(ids, 3, mask, audio_values=clips, **masks)
        assert torch.equal(actor(ids, 3, mask, pixel_values=clips, **masks), scores)
        both = {"pixel_values": clips.clone(), "audio_values": clips}
        assert torch.equal(actor(ids, 3, mask, **both, **masks), scores)
        louder = actor(ids, 3, mask, pixel_values=clips.flip(1) * 3, **masks)
        assert not torch.equal(louder, scores)
    given = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 3, **masks}
    rows = actor.generate(ids, audio_values=clips, **given)[0]
    assert torch.equal(actor.generate(ids, pixel_values=clips, **given)[0], rows)
    with pytest.raises(ModelError, match="pixel_values and audio_values are two names"):
        actor(ids, 3, mask, pixel_values=clips * 2, audio_values=clips)


def test_adapters_stay_out_of_the_tower_and_its_projector(example):
    actor = actor_of(example, torch.float32, lora_rank=4, lora_alpha=8)
    adapted = {name for name, p in actor.named_parameters() if p.requires_grad}
    assert adapted
    assert all("lora_" in name and "language_model" in name for name in adapted)


def test_what_cannot_hear_says_so_and_unknown_keywords_are_rejected(example):
    actor, (ids, _) = actor_of(example, torch.float32), example.left()
    with pytest.raises(ModelError, match="'qwen2' cannot take them"):
        ActorAL(small_model("qwen2"))(ids, 3, audio_values=example.whole)
    with pytest.raises(TypeError, match="max_tokens"):
        actor.generate(ids, max_tokens=3)
    with pytest.raises(TypeError, match="input_feature, which is no tensor"):
        actor(ids, 3, input_feature=3)
