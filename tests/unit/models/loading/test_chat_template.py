"""The chat template of a model that reads more than text, where its tokenizer's is for text alone, as in published folders."""

import json
import logging
import shutil

import pytest
import transformers
from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

from lightrft.config.model import ModelConfig
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.tiny import save_tiny_media, tiny_tokenizer
from lightrft.utils.errors import ModelError

TEXT_ONLY = (  # that of Qwen2-Audio's tokenizer, as published
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
    "'<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% "
    "endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OTHER = (
    "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] "
    "}}{% else %}[{{ p['type'] }}]"
)
OTHER += "{% endif %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder of Qwen2-Audio laid out as on the hub: the tokenizer's template is in its config, and the processor has none."""
    folder = tmp_path_factory.mktemp("published")
    save_tiny_media("qwen2_audio", folder)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    tokenizer.chat_template = TEXT_ONLY
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return folder


@pytest.fixture
def folder(published, tmp_path):
    return shutil.copytree(published, tmp_path / "folder")


def template_of(folder, **settings):
    return load_tokenizer(ModelConfig(path=str(folder), **settings)).chat_template


def test_sound_is_asked_about_as_the_familys_own_processor_does(folder, tmp_path, caplog):
    plain = transformers.AutoTokenizer.from_pretrained(folder)
    assert plain.chat_template == TEXT_ONLY
    with caplog.at_level(logging.INFO):
        tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    assert (
        "the tokenizer's chat template takes no audio: the processor's is used" in caplog.messages
    )
    sound, text = {"type": "audio"}, {"type": "text", "text": "who?"}
    talk = [
        {"role": "user", "content": [sound, sound, text]},
        {"role": "assistant", "content": "me"},
        {"role": "user", "content": [sound]},
    ]
    own = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16, chunk_length=1), plain)
    expected = own.apply_chat_template(talk, add_generation_prompt=True)
    assert (
        tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False) == expected
    )
    assert all(f"Audio {k}: <|audio_bos|><|AUDIO|><|audio_eos|>\n" in expected for k in (1, 2, 3))
    alone = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(alone, tokenize=False) == plain.apply_chat_template(
        alone, tokenize=False
    )
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template
        == tokenizer.chat_template
    )


@pytest.mark.parametrize(
    "name", ["chat_template.json", "processor_config.json", "chat_template.jinja"]
)
def test_a_template_in_the_folder_of_the_processor_is_taken(folder, name):
    text = (
        OTHER
        if name.endswith(".jinja")
        else json.dumps({"chat_template": OTHER, "processor_class": "Qwen2AudioProcessor"})
    )
    (folder / name).write_text(text)
    assert template_of(folder) == OTHER


def test_one_that_is_set_or_takes_the_models_kinds_stays(folder):
    assert template_of(folder, chat_template=TEXT_ONLY) == TEXT_ONLY
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEXT_ONLY}))
    # A processor's that takes no sound either is of no use.
    assert "Audio {{" in template_of(folder)
    (folder / "chat_template.jinja").write_text(OTHER)
    assert template_of(folder) == OTHER


def test_a_model_that_was_given_no_template_is_not_made_to_chat(folder):
    file = folder / "tokenizer_config.json"
    file.write_text(
        json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"})
    )
    assert template_of(folder) is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": OTHER}))
    assert template_of(folder) == OTHER


def test_a_damaged_template_of_a_processor_is_told(folder):
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(
        ModelError,
        match=r"the chat template of its processor cannot be read .*set model\.chat_template",
    ):
        template_of(folder)
    assert template_of(folder, chat_template=OTHER) == OTHER


@pytest.mark.parametrize("template", [TEXT_ONLY, "{{ bos_token or eos_token }}" + TEXT_ONLY])
def test_a_template_begins_with_the_token_that_the_processor_would_add(template, tmp_path):
    """Molmo 2's processor writes it before texts that lack it, and its published template does not."""
    plain = tiny_tokenizer()
    plain.chat_template = template
    plain.save_pretrained(tmp_path)
    text = {"vocab_size": len(plain), "additional_vocab_size": 0}
    transformers.Molmo2Config(text_config=text).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    written = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert written.count(tokenizer.eos_token) == 3
    assert written.startswith(tokenizer.eos_token + "<|im_start|>")
