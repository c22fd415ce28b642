"""``lightrft convert`` writes a GGUF file as a model folder with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.e2e.command import command

HEADS, KV_HEADS, LAYERS = 4, 2, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "ab", "abc"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
"""Names of llama.cpp by those of transformers."""
Kind = GGMLQuantizationType


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def exchanged(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a projection in the order of llama.cpp, which rotates neighbouring values."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


@torch.no_grad()
def write_file(file: Path, model: LlamaForCausalLM, kind: Kind) -> None:
    """Write ``model`` in the type ``kind``, and give it the weights that the file then has."""
    writer = GGUFWriter(file, "llama")
    config = model.config
    writer.add_name("A title")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        own = name
        for theirs, short in NAMES.items():
            own = own.replace(theirs, short)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(own.split(".")[-2], 0)
        weight = parameter.numpy()
        if weight.ndim == 1:
            writer.add_tensor(own, weight)
            continue
        written = quantize(exchanged(weight, heads) if heads else weight, kind)
        writer.add_tensor(own, written, raw_dtype=kind)
        parameter.copy_(torch.from_numpy(dequantize(quantize(weight, kind), kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_1], ids=lambda k: k.name)
def test_the_written_folder_has_the_logits_of_the_file(kind: Kind, tmp_path: Path, capsys: Any):
    model = tiny_model()
    write_file(tmp_path / "m.gguf", model, kind)
    outcome = command(capsys, "convert", tmp_path / "m.gguf", f"output={tmp_path / 'out'}")
    assert outcome.status == 0, outcome.err
    norms = 2 * LAYERS + 1
    matrices = 7 * LAYERS + 2
    counts = {
        "F32": f"not quantized: {norms + matrices} of F32; dequantized: none",
        "F16": f"not quantized: {matrices} of F16, {norms} of F32; dequantized: none",
    }
    expected = f"not quantized: {norms} of F32; dequantized: {matrices} of {kind.name}"
    assert counts.get(kind.name, expected) in outcome.out
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.float32
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [TOKENS[i] for i in ids if i < 3 or i > 258] == ["<|im_start|>", "abc", "<|im_end|>"]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.decode(ids) == text
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization_config", "_model_name_or_path", "_name_or_path"} & set(fields)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_a_gguf_file_is_written_in_another_type_and_trains(tmp_path: Path, capsys: Any):
    write_file(tmp_path / "m.gguf", tiny_model(), Kind.Q8_0)
    out = tmp_path / "out"
    words = ("convert", f"path={tmp_path / 'm.gguf'}", "dtype=bfloat16", f"output={out}")
    assert command(capsys, *words).status == 0
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "abc", "response": "ab"}) + "\n")
    run = ("sft", f"model={out}", f"data.sources={rows}", f"run.dir={tmp_path}", "batch_size=1")
    outcome = command(capsys, *run, "train.steps=1", "log.tensorboard=false")
    assert outcome.status == 0, outcome.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("convert", "{file}", "base=b"), "base = 'b' changes nothing"),
        (("convert", "{cut}"), "transformers cannot read the file"),
        (("convert", "nowhere.gguf"), "nowhere.gguf"),
        (("chat", "model={file}"), "lightrft convert {file} output=FOLDER"),
        (("sft", "model={file}", "data.sources={file}"), "lightrft convert {file} output=FOLDER"),
        (("generate", "{folder}", "data.sources={file}"), "lightrft convert {file} output=FOLDER"),
    ],
)
def test_what_cannot_be_done_with_a_gguf_file_is_refused_by_name(
    words: tuple[str, ...], expected: str, tmp_path: Path, capsys: Any
):
    (tmp_path / "folder").mkdir()
    names = {"file": tmp_path / "folder" / "m.gguf", "cut": tmp_path / "cut.gguf"}
    names["folder"] = tmp_path / "folder"
    write_file(names["file"], tiny_model(), Kind.F32)
    names["cut"].write_bytes(names["file"].read_bytes()[:5000])
    more = (f"output={tmp_path / 'out'}",) if words[0] == "convert" else ()
    outcome = command(capsys, *(word.format(**names) for word in words), *more)
    assert outcome.status == 2 and expected.format(**names) in outcome.err
    assert not (tmp_path / "out").exists()
