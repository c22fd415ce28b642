"""Sound, family by family: the numbers of transformers' own processors and forward, and what cannot be heard."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Qwen2AudioProcessor, VoxtralProcessor, WhisperFeatureExtractor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_torchvision_available

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.attention import interface
from lightrft.models.attention.layout_check import check_layout
from lightrft.models.loading.from_pretrained import load_model, load_tokenizer
from lightrft.models.loading.save_model import save_model
from lightrft.models.onednn.layers import replace_patch_embeddings
from lightrft.models.processors import load_processor
from lightrft.models.tiny import audio, save_tiny_media
from lightrft.types import Batch, Extent, Segments
from lightrft.utils.errors import ModelError
from tests.media_helpers import mixed_batch, mixed_prompts, rig
from tests.model_helpers import Float64, rounding

# A frame is the Fourier transform of 400 samples, which the extractor computes in float32.
WINDOW = rounding(400)

HEARING = tuple(audio.FAMILIES)


def sound(samples, seed=0):
    return np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)


def qwen2_audio(tmp_path, dtype=torch.float32, **options):
    return rig("qwen2_audio", tmp_path, dtype, **options)


@pytest.mark.parametrize("samples", [330, 2500, 7000, 15600, 15999, 16000])
def test_frames_are_those_of_the_feature_extractor_up_to_the_last_that_matters(tmp_path, samples):
    part = qwen2_audio(tmp_path).processor.parts["audio"]
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    value = sound(samples)
    made = extractor(value, sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
    found = part.inputs(value, Extent(value.shape))
    assert found["feature_lengths"].tolist() == made["attention_mask"].sum(-1).tolist()
    frames = found["input_features"]
    assert len(frames) == min(int(found["feature_lengths"]) + 2, 100)
    torch.testing.assert_close(
        frames.T, made["input_features"][0, :, : len(frames)], atol=WINDOW, rtol=0
    )


@pytest.mark.parametrize("samples", [330, 2500, 7000, 16000])
def test_the_prompt_is_the_one_that_the_familys_own_processor_writes(tmp_path, samples):
    r = qwen2_audio(tmp_path)
    part = r.processor.parts["audio"]
    own = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16, chunk_length=1), r.tokenizer)
    text = f"<|audio_bos|>{part.written}<|audio_eos|>who?"
    made = own(text=text, audio=[sound(samples)], sampling_rate=16000, return_tensors="pt")
    extent = Extent((samples,))
    assert (
        r.tokenizer(text.replace(part.written, part.placeholder_text(extent)))["input_ids"]
        == made["input_ids"][0].tolist()
    )
    assert (
        part.count(part.inputs(sound(samples), extent))
        == (made["input_ids"] == r.processor.tokens["audio"]).sum()
    )


@pytest.mark.parametrize("layerdrop", [0.0, 1.0])
def test_features_are_those_of_whole_windows(tmp_path, layerdrop):
    """The model's own forward takes every clip filled up to its window with silence, and nothing of ours."""
    r = qwen2_audio(tmp_path, torch.float64)
    r.actor.base.model.audio_tower.training = True
    r.actor.base.model.audio_tower.layerdrop = layerdrop
    clips = [sound(n, n) for n in (700, 7000, 16000)]
    own = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16, chunk_length=1), r.tokenizer)
    made = own(
        text=["<|AUDIO|>?"] * 3, audio=clips, sampling_rate=16000, return_tensors="pt", padding=True
    )
    part = r.processor.parts["audio"]
    inputs = [part.inputs(c, Extent(c.shape)) for c in clips]
    with Float64(), torch.no_grad():
        expected = r.actor.base.model(**made, use_cache=False).last_hidden_state
        tower = r.actor.family.reader.towers[0]
        values = tower.features(
            r.actor.base, {k: torch.cat([i[k] for i in inputs]) for k in inputs[0]}
        ).values
        embeddings = r.actor.base.get_input_embeddings()(made["input_ids"])
        embeddings[made["input_ids"] == r.processor.tokens["audio"]] = values
        found = r.actor.base.model.language_model(
            inputs_embeds=embeddings, attention_mask=made["attention_mask"], use_cache=False
        ).last_hidden_state
    real = made["attention_mask"].bool()
    assert (found - expected)[
        real
    ].abs().max() < 1e-5 * expected.abs().max()  # the extractor itself computes in float32


def test_the_tower_runs_on_no_more_frames_than_the_longest_clip_has(tmp_path):
    r = qwen2_audio(tmp_path)
    part = r.processor.parts["audio"]
    seen = []
    r.actor.base.model.audio_tower.conv1.register_forward_hook(
        lambda m, args, out: seen.append(tuple(args[0].shape))
    )
    inputs = [part.inputs(sound(n), Extent((n,))) for n in (1600, 3200)]
    r.actor.family.reader.towers[0].features(
        r.actor.base, {k: torch.cat([i[k] for i in inputs]) for k in inputs[0]}
    )
    assert seen == [(2, 16, 22)]


@pytest.mark.parametrize("family", HEARING)
def test_every_text_layer_attends_by_the_plan_and_no_layer_of_the_tower_does(
    family, tmp_path, monkeypatch
):
    r = rig(family, tmp_path)
    seen = []

    def spy(module, *args, **options):
        seen.append(module.layer_idx)
        return interface.attention(module, *args, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, interface.NAME, spy)
    r.actor.score(mixed_batch(mixed_prompts(r)))
    assert sorted(seen) == list(range(r.actor.text_config.num_hidden_layers))


def test_a_clip_longer_than_the_window_is_an_error_in_seconds(tmp_path):
    part = qwen2_audio(tmp_path).processor.parts["audio"]
    for refused in (
        lambda: part.placeholder_text(Extent((24000,))),
        lambda: part.inputs(sound(24000), Extent((24000,))),
    ):
        with pytest.raises(ValueError, match=r"1\.5 s .* at most 1 s: cut it into shorter clips"):
            refused()


def test_a_clip_that_is_less_than_a_frame_too_long_is_cut_as_transformers_cuts_it(tmp_path):
    part = qwen2_audio(tmp_path).processor.parts["audio"]
    window, hop = part.extractor.n_samples, part.extractor.hop_length
    value = sound(window + hop)
    cut = part.inputs(value[:-1], Extent((len(value) - 1,)))
    whole = part.inputs(value[:window], Extent((window,)))
    assert all(torch.equal(cut[name], whole[name]) for name in whole)
    assert part.placeholder_text(Extent((window + hop - 1,))) == part.placeholder_text(
        Extent((window,))
    )
    with pytest.raises(ValueError, match=r"a clip of 1\.01 s .* at most 1 s: cut it"):
        part.placeholder_text(Extent((window + hop,)))


def test_sampled_marks_of_media_do_not_stop_the_check_of_the_layout_of_omni(tmp_path):
    """The model's own forward counts them as media, which the prompts have no more of."""
    r = omni(tmp_path)
    prompts = mixed_prompts(r)
    config = r.actor.base.config
    for mark in (config.audio_start_token_id, config.vision_start_token_id):
        answers = [[5, mark, 7], [8, 9], [mark]] * len(prompts)
        prompt_of = torch.arange(len(prompts)).repeat_interleave(3)
        batch = Batch(Segments.of_prompts(prompts), Segments.of(answers), prompt_of)
        assert check_layout(r.actor, batch) == ""


@pytest.mark.parametrize(
    "family, samples",
    [("qwen2_audio", 0), ("qwen2_audio", 1), ("qwen2_audio", 320), ("voxtral", 0)],
)
def test_a_clip_without_a_single_feature_is_an_error(tmp_path, family, samples):
    part = rig(family, tmp_path).processor.parts["audio"]
    with pytest.raises(ValueError, match=f"a clip of {samples} samples .* is too short"):
        part.placeholder_text(Extent((samples,)))


def test_an_extractor_that_does_not_fit_the_tower_is_an_error(tmp_path):
    save_tiny_media("qwen2_audio", tmp_path, processor={"feature_size": 40})
    config = ModelConfig(path=str(tmp_path))
    with pytest.raises(
        ModelError, match=r"\(mel bins, frames\) = \(40, 100\), the audio tower takes \(16, 100\)"
    ):
        load_processor(config, load_tokenizer(config))


def test_sizes_of_tower_and_extractor_can_be_chosen(tmp_path):
    r = qwen2_audio(
        tmp_path,
        tower={"num_mel_bins": 40, "d_model": 96, "encoder_layers": 3, "max_source_positions": 25},
        processor={"feature_size": 40, "sampling_rate": 8000},
    )
    part = r.processor.parts["audio"]
    assert part.rate == 8000
    assert part.inputs(sound(8000), Extent((8000,)))["input_features"].shape == (50, 40)
    assert part.placeholder_text(Extent((8000,))) == "<|AUDIO|>" * 12
    assert (
        r.actor.score(mixed_batch([r.prompt("a", ("audio", (8000,)), "?")]))
        .logprobs.isfinite()
        .all()
    )


@pytest.mark.parametrize("family", HEARING)
def test_a_saved_folder_loads_by_transformers_own_classes_and_says_the_same(family, tmp_path):
    r = rig(family, tmp_path)
    batch = mixed_batch(mixed_prompts(r))
    before = r.actor.score(batch).logprobs
    again = tmp_path / "again"
    save_model(r.actor, r.tokenizer, again, processor=r.processor)
    config = ModelConfig(path=str(again))
    assert torch.equal(Actor(load_model(config), config).score(batch).logprobs, before)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(again)
    assert type(extractor) is WhisperFeatureExtractor
    # One file has the settings of sound and of pictures, and an extractor keeps both.
    expected = r.processor.parts["audio"].extractor.to_dict()
    assert extractor.to_dict() | {"min_pixels": 64, "max_pixels": 1024} == expected | {
        "min_pixels": 64,
        "max_pixels": 1024,
    }
    own = getattr(transformers, r.actor.family.loader).from_pretrained(again)
    # A convolution differs from a product in the last bit.
    replace_patch_embeddings(own)
    assert torch.equal(Actor(own).own_logprobs(batch), r.actor.own_logprobs(batch))


def test_a_saved_folder_is_a_processor_of_qwen2_audio(tmp_path):
    r = qwen2_audio(tmp_path)
    again = tmp_path / "again"
    save_model(r.actor, r.tokenizer, again, processor=r.processor)
    made = Qwen2AudioProcessor.from_pretrained(again)(
        text="<|AUDIO|>?", audio=[sound(7000)], sampling_rate=16000, return_tensors="pt"
    )
    assert r.actor.base(**made).logits.isfinite().all()


@pytest.mark.parametrize("samples", [1, 2500, 15800, 15999, 16000, 16001, 31700, 40000])
def test_windows_of_voxtral_are_those_of_its_own_processor(tmp_path, samples):
    r = rig("voxtral", tmp_path)
    part, value = r.processor.parts["audio"], sound(samples)
    own = SimpleNamespace(
        feature_extractor=WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    )
    made = VoxtralProcessor._retrieve_input_features(  # the rest of it needs mistral-common
        own,
        [value],
        100,
        sampling_rate=16000,
        padding=True,
        truncation=False,
        pad_to_multiple_of=16000,
        return_tensors="pt",
    )
    found = part.inputs(value, Extent(value.shape))
    assert len(found["input_features"]) <= samples / 160 + 4
    tower = r.actor.family.reader.towers[0]
    torch.testing.assert_close(
        tower.adapt(r.actor.base.config, found)["input_features"], made, atol=WINDOW, rtol=0
    )
    assert (
        part.count(found)
        == len(made) * 25
        == part.placeholder_text(Extent(value.shape)).count("[AUDIO]")
    )


def test_windows_of_samples_that_reach_too_far_back_are_an_error_for_voxtral(tmp_path):
    save_tiny_media("voxtral", tmp_path, processor={"n_fft": 800})
    config = ModelConfig(path=str(tmp_path))
    with pytest.raises(ModelError, match=r"n_fft = 800 is more than 4 \* hop_length = 640"):
        load_processor(config, load_tokenizer(config))


def test_a_clip_of_several_windows_is_heard_in_every_layout(tmp_path):
    r = rig("voxtral", tmp_path, torch.float64)
    batch = mixed_batch(
        [
            r.prompt("0", ("audio", (40000,)), "?"),
            r.prompt("1", ("audio", (3000,)), ("audio", (16001,))),
        ]
    )
    with Float64(), torch.no_grad():
        expected = r.actor.own_logprobs(batch)
        for layout in ("prefix_shared", "packed", "padded"):
            r.actor.layout = layout
            assert (r.actor.score(batch).logprobs - expected).abs().max() < 1e-9


def omni(tmp_path, dtype=torch.float32):
    return rig("qwen2_5_omni_thinker", tmp_path, dtype)


def test_features_of_omni_are_those_of_its_own_extractors_frames(tmp_path):
    r = omni(tmp_path, torch.float64)
    part, clips = r.processor.parts["audio"], [sound(n, n) for n in (700, 7000, 16000)]
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    made = extractor(clips, sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
    inputs = [part.inputs(c, Extent(c.shape)) for c in clips]
    with Float64(), torch.no_grad():
        expected = r.actor.base.get_audio_features(
            made["input_features"], feature_attention_mask=made["attention_mask"], return_dict=True
        ).last_hidden_state
        tower = r.actor.family.reader.towers[2]
        found = tower.features(
            r.actor.base, {k: torch.cat([i[k] for i in inputs]) for k in inputs[0]}
        ).values
    assert (
        found - expected
    ).abs().max() < 1e-5 * expected.abs().max()  # the extractor itself computes in float32
    assert (
        len(found)
        == sum(part.count(i) for i in inputs)
        == sum(part.placeholder_text(Extent(c.shape)).count("<|AUDIO|>") for c in clips)
    )


def test_marks_and_placeholders_that_stand_for_nothing_do_not_move_positions_of_omni(tmp_path):
    r = omni(tmp_path)
    vocabulary = r.tokenizer.get_vocab()
    prompt = r.prompt(
        "0", ("audio", (4000,)), "a", ("image", (16, 24, 3)), "b", ("video", (4, 12, 12, 3)), "c"
    )
    media = {name: rows.values for name, rows in prompt.media.items()}
    ids = torch.tensor([prompt.token_ids])
    types = sum(
        (ids == tower.token_id(r.actor.base.config)) * tower.type_id
        for tower in r.actor.family.reader.towers
    )
    strays = [
        vocabulary[mark]
        for mark in ("<|audio_bos|>", "<|vision_bos|>", "<|IMAGE|>", "<|AUDIO|>", "<|VIDEO|>")
    ]
    positions = []
    for last in (strays, [vocabulary["x"]] * len(strays)):
        row = torch.cat([ids, torch.tensor([last])], dim=1)
        kinds = torch.nn.functional.pad(types, (0, len(last)))
        positions.append(
            r.actor.family.reader.positions(r.actor.base, row, kinds, torch.ones_like(row), media)
        )
    assert torch.equal(*positions)
    assert not torch.equal(positions[0][0], positions[0][1])  # there is height and width in them


@pytest.mark.parametrize(
    ("family", "whole"),
    [
        ("qwen2_5_omni_thinker", "Qwen2_5Omni{}"),
        ("qwen3_omni_moe_thinker", "Qwen3OmniMoe{}"),
    ],
)
def test_of_a_folder_that_can_speak_the_part_that_answers_in_text_is_loaded(
    family, whole, tmp_path
):
    r = rig(family, tmp_path)
    settings = getattr(transformers, whole.format("Config"))(
        thinker_config=r.actor.base.config.to_dict(), enable_audio_output=False
    )
    model = getattr(transformers, whole.format("ForConditionalGeneration"))(settings)
    model.thinker.load_state_dict(r.actor.base.state_dict())
    folder = tmp_path / "whole"
    save_model(model, r.tokenizer, folder, processor=r.processor)
    weights = load_file(folder / "model.safetensors")
    assert all(name.startswith("thinker.") for name in weights)
    save_file(
        {**weights, "talker.codec_head.weight": torch.ones(2, 2)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    loaded = Actor.load(ModelConfig(path=str(folder)))
    batch = mixed_batch(mixed_prompts(r))
    assert loaded.base.config.model_type == family
    assert torch.equal(loaded.score(batch).logprobs, r.actor.score(batch).logprobs)
    assert load_processor(loaded.config, load_tokenizer(loaded.config)).parts.keys() == {
        "image",
        "video",
        "audio",
    }


OMNI3 = "qwen3_omni_moe_thinker"


def test_a_sound_of_omni3_that_is_shorter_than_a_piece_of_its_tower_is_refused(tmp_path):
    part = rig(OMNI3, tmp_path).processor.parts["audio"]
    assert part.count(part.inputs(sound(2000), Extent((2000,)))) == 13
    with pytest.raises(ValueError, match=r"0\.124938 s.*less than 0\.125 s.*append silence"):
        part.placeholder_text(Extent((1999,)))


@pytest.mark.torchvision
@pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")
def test_sounds_and_clips_of_omni3_are_those_of_its_own_processor(tmp_path):
    """Limits of clips are the processor's own, whatever the folder says."""
    r = rig(OMNI3, tmp_path)
    for kind, text in (("image", "IMAGE"), ("video", "VIDEO"), ("audio", "AUDIO")):
        setattr(r.tokenizer, f"{kind}_token", f"<|{text}|>")
        setattr(r.tokenizer, f"{kind}_token_id", r.processor.tokens[kind])
    for name in ("vision_bos", "vision_eos", "audio_bos", "audio_eos"):
        setattr(r.tokenizer, f"{name}_token", f"<|{name}|>")
    own = transformers.Qwen3OmniMoeProcessor(
        transformers.AutoImageProcessor.from_pretrained(r.path, backend="pil"),
        transformers.Qwen2VLVideoProcessor.from_pretrained(r.path),
        WhisperFeatureExtractor.from_pretrained(r.path),
        r.tokenizer,
    )
    part, clip = r.processor.parts["video"], np.full((5, 24, 36, 3), 90, np.uint8)
    extent = Extent(clip.shape, (0.0, 0.5, 1.0, 1.5, 2.0), 2.0)
    frames = torch.from_numpy(clip).permute(0, 3, 1, 2)
    made = own(
        text=[f"a{part.written}b"],
        videos=[frames],
        fps=2.0,
        do_sample_frames=False,
        return_tensors="pt",
    )
    found = part.inputs(clip, extent)
    text = f"a{part.placeholder_text(extent)}b"
    assert r.tokenizer(text)["input_ids"] == made["input_ids"][0].tolist()
    assert torch.equal(found["video_grid_thw"], made["video_grid_thw"])
    assert torch.equal(found["second_per_grid_ts"], made["video_second_per_grid"])
    torch.testing.assert_close(found["pixel_values_videos"], made["pixel_values_videos"])
    part, value = r.processor.parts["audio"], sound(7013)
    made = own(text=[f"a{part.written}b"], audio=[value], sampling_rate=16000, return_tensors="pt")
    text = f"a{part.placeholder_text(Extent(value.shape))}b"
    assert r.tokenizer(text)["input_ids"] == made["input_ids"][0].tolist()
    mels = part.inputs(value, Extent(value.shape))["input_features"]
    assert torch.equal(mels.T, made["input_features"][0])


def test_pictures_and_sound_of_omni_are_set_in_one_file(tmp_path):
    r = omni(tmp_path)
    again = tmp_path / "again"
    save_model(r.actor, r.tokenizer, again, processor=r.processor.limited(None, 4096))
    config = ModelConfig(path=str(again))
    parts = load_processor(config, load_tokenizer(config)).parts
    assert parts["image"].processor.size["longest_edge"] == 4096
    assert (parts["audio"].extractor.feature_size, parts["audio"].rate) == (16, 16000)


def test_mel_bins_that_do_not_fit_the_tower_of_omni_are_an_error(tmp_path):
    save_tiny_media("qwen2_5_omni_thinker", tmp_path, processor={"audio": {"feature_size": 40}})
    config = ModelConfig(path=str(tmp_path))
    with pytest.raises(ModelError, match="makes 40 mel bins, the audio tower takes 16"):
        load_processor(config, load_tokenizer(config))


@pytest.mark.parametrize("family", HEARING)
def test_a_processor_can_be_sent_to_another_process(family, tmp_path):
    r = rig(family, tmp_path)
    part = pickle.loads(pickle.dumps(r.processor)).parts["audio"]
    value = sound(5000)
    for name, tensor in r.processor.parts["audio"].inputs(value, Extent(value.shape)).items():
        assert torch.equal(part.inputs(value, Extent(value.shape))[name], tensor)


@pytest.mark.parametrize("told", [True, False], ids=["lengths told", "placeholders counted"])
@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni_thinker"])
def test_frames_of_a_filled_up_clip_are_those_that_count(family, told, tmp_path):
    r = rig(family, tmp_path)
    # 39 and 100 frames: 10 and 25 features.
    part, clips = (
        r.processor.parts["audio"],
        [sound(n, n) for n in (6240, 16000)],
    )
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    made = extractor(clips, sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
    lengths = made["attention_mask"].sum(-1).tolist()
    assert lengths == [39, 100]
    tower = next(t for t in r.actor.family.reader.towers if t.kind == "audio")
    found = tower.arrange(
        r.actor.base, list(made["input_features"]), lengths if told else None, [10, 25]
    )
    counted = lengths if told else [40, 100]
    assert found["feature_lengths"].tolist() == counted
    if told:
        inputs = [part.inputs(c, Extent(c.shape)) for c in clips]
        torch.testing.assert_close(
            found["input_features"],
            torch.cat([i["input_features"] for i in inputs]),
            atol=WINDOW,
            rtol=0,
        )
    assert len(tower.features(r.actor.base, found).values) == 35
