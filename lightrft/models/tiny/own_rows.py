"""The families that read media by their own processor and methods, one row each: the tokens of a
family, fields of its config and of its processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightrft.models.tiny.spec import Fields

_SQUARE: Fields = {"size": {"height": 16, "width": 16}}
CROPPED: Fields = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}


@dataclass(frozen=True, slots=True)
class OwnRow:
    """One family.

    Attributes:
        tokens: Special tokens, by the attribute of the tokenizer or processor that names each.
        written: Text that the chat template writes for a picture. Empty for families that read
            sounds alone.
        clip: Text that it writes for a clip. Empty for families whose clips are not read here.
        config: Fields of the config.
        text: Fields of the text config.
        vision: Fields of the tower's config.
        hearing: Fields of the config of a tower of sounds, where it has others.
        picture: Settings of the processor of pictures, or of sounds where it reads no pictures.
        frames: Settings of the processor of clips.
        sound: Text that it writes for a sound. Empty for families that read none.
        extractor: Class of the processor of sounds. Empty for sounds that are not read here.
        processor: Settings of the processor.
        ids: Config fields with the id of a token of ``tokens``, or with those of several.
        like: Family whose processor is used. Empty for its own.
        named: Tokens of every tiny tokenizer that an attribute names too.
    """

    tokens: Mapping[str, str] = field(default_factory=lambda: {"image_token": "<image>"})
    written: str = "<image>\n"
    clip: str = ""
    sound: str = ""
    extractor: str = "WhisperFeatureExtractor"
    config: Fields = field(default_factory=dict)
    text: Fields = field(default_factory=dict)
    vision: Fields = field(default_factory=dict)
    hearing: Fields = field(default_factory=dict)
    picture: Fields = field(default_factory=dict)
    frames: Fields = field(default_factory=dict)
    processor: Fields = field(default_factory=dict)
    ids: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    like: str = ""
    named: Mapping[str, str] = field(default_factory=dict)


_CLIP: Fields = {"patch_size": 4, "vision_feature_select_strategy": "default"}
_LLAVA: Fields = {**_CLIP, "num_additional_image_tokens": 1}
_GRIDS = [[16, 16], [16, 32], [32, 16]]
_TIMM: Fields = {
    "embed_dim": 32,
    "img_size": [16, 16],
    "patch_size": 4,
    "depth": 2,
    "num_heads": 2,
    "global_pool": "",
    "ref_feat_shape": [4, 4],
}
"""Sizes of a vision transformer of timm."""
_PAD = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_ROPE: Fields = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
}
_HALF_ROPE: Fields = {
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [1, 1, 0],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
}
_PATCHES: Fields = {"size": {"shortest_edge": 64, "longest_edge": 4096}, "patch_size": 4}
_MERGED: Fields = {"spatial_merge_size": 2, "out_hidden_size": 32}
_GLM_46V = OwnRow(
    {
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        "image_start_token": "<|begin_of_image|>",
        "image_end_token": "<|end_of_image|>",
    },
    "<|begin_of_image|><|image|><|end_of_image|>",
    picture=_PATCHES,
    text=_HALF_ROPE,
    vision=_MERGED,
)
_VISION_MARKS = OwnRow(
    {**_PAD, "vision_start_token": "<|vs|>", "vision_end_token": "<|ve|>"},
    "<|vs|><|image_pad|><|ve|>",
    picture=_PATCHES,
    vision=_MERGED,
)
_GRANITE_SPEECH = OwnRow(
    {"audio_token": "<|audio|>"},
    "",
    sound="<|audio|>",
    extractor="GraniteSpeechFeatureExtractor",
    # transformers 5.23 leaves the scale out.
    text={"logits_scaling": 1.0},
    # A saved processor does not name another number of bins.
    picture={"feature_size": 80},
    vision={
        # Of the encoder.
        "input_dim": 160,
        "output_dim": 8,
        "context_size": 20,
        "max_pos_emb": 32,
        "conv_kernel_size": 5,
        # Of the projector.
        "encoder_hidden_size": 32,
        "cross_attention_frequency": 1,
    },
)
_MINICPM = OwnRow(
    {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    },
    "<|image_pad|>",
    # The other order would amplify the rounding of its decay.
    text={"layer_types": ["full_attention", "linear_attention"]},
    picture={"patch_size": 4, "scale_resolution": 32, "max_slice_nums": 4},
    vision={"insert_layer_id": 0},
    config={"insert_layer_id": 0, "image_size": 32},
    ids={
        "image_start_id": "<image>",
        "image_end_id": "</image>",
        "slice_start_id": "<slice>",
        "slice_end_id": "</slice>",
    },
)
ROWS: dict[str, OwnRow] = {
    "aria": OwnRow(
        # Its processor pads every picture to this size.
        processor={"size_conversion": {"980": 4}},
        config={"projector_patch_to_query_dict": {"100": 4}},
        vision={"patch_size": 98, "image_size": 980},
    ),
    "aya_vision": OwnRow(
        {
            "image_token": "<image>",
            "start_of_img_token": "<|START_OF_IMG|>",
            "end_of_img_token": "<|END_OF_IMG|>",
            "img_patch_token": "<|IMG_PATCH|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
            "tile_token": "TILE",
            "tile_global_token": "TILE_GLOBAL",
        },
        picture={**_SQUARE, "crop_to_patches": True, "max_patches": 4},
        processor={"patch_size": 4, "img_size": 16, "downsample_factor": 2},
        ids={"image_token_id": "<|IMG_PATCH|>"},
    ),
    "cohere2_vision": OwnRow(
        {
            "image_token": "<image>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        # The square of this size is the number of placeholders of a tile.
        picture={**_SQUARE, "patch_size": 2, "max_patches": 4},
        config={"alignment_intermediate_size": 64},
    ),
    "deepseek_vl": OwnRow(picture=_SQUARE, processor={"num_image_tokens": 16}),
    "deepseek_vl_hybrid": OwnRow(
        picture={**_SQUARE, "high_res_size": {"height": 16, "width": 16}},
        processor={"num_image_tokens": 16},
        vision={
            "output_channels": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
            "num_pos_feats": 16,
            "mlp_dim": 64,
        },
    ),
    "ernie4_5_vl_moe": OwnRow(
        {
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        picture=_PATCHES,
        frames={"temporal_patch_size": 2, "draw_on_frames": False},
        text={
            "rope_parameters": {**_ROPE["rope_parameters"], "mrope_section": [1, 1, 2]},
            "moe_intermediate_size": [32, 32],
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "exaone4_5": OwnRow(_PAD, "<|image_pad|>", picture=_PATCHES, vision=_MERGED),
    "fast_vlm": OwnRow(
        picture=CROPPED,
        processor={"patch_size": 8, "vision_feature_select_strategy": "full"},
        vision={
            "architecture": "fastvit_t8",
            "hidden_size": 32,
            "do_pooling": True,
            "model_args": {
                "embed_dims": [8, 32],
                "layers": [1, 1],
                "mlp_ratios": [1, 1],
                "token_mixers": ["repmixer", "attention"],
                "pos_embs": [None, None],
                "downsamples": [False, True],
                "cls_ratio": 1.0,
                "inference_mode": True,
            },
        },
        like="llava",
    ),
    "glm4v": replace(_GLM_46V, text=_ROPE),
    "glm4v_moe": replace(_GLM_46V, like="glm4v"),
    "glm46v": _GLM_46V,
    "gemma3n": OwnRow(
        {
            "boi_token": "<start_of_image>",
            "boa_token": "<start_of_audio>",
            # Ids from here on are embedded by the towers.
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "eoa_token": "<end_of_audio>",
            "audio_token": "<audio_soft_token>",
        },
        "<image_soft_token>",
        sound="<audio_soft_token>",
        extractor="Gemma3nAudioFeatureExtractor",
        picture=_SQUARE,
        processor={"image_seq_length": 16, "audio_seq_length": 32},
        config={"vision_soft_tokens_per_image": 16, "audio_soft_tokens_per_image": 32},
        vision={
            "architecture": "vit_pe_core_tiny_patch16_384",
            "hidden_size": 32,
            "vocab_size": 2,
            "vocab_offset": 102,
            "model_args": {**_TIMM, "class_token": False},
        },
        hearing={
            "vocab_size": 2,
            "vocab_offset": 104,
            "input_feat_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": [8, 4],
        },
    ),
    "gemma4": OwnRow(
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "video_token": "<|video|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        "<|image|>",
        sound="<|audio|>",
        extractor="",
        # Its attention is not scaled, so that more layers would amplify rounding.
        text={
            "vocab_size_per_layer_input": 200,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "initializer_range": 0.05,
        },
        picture={"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2},
        vision={
            "pooling_kernel_size": 2,
            "patch_size": 4,
            "subsampling_conv_channels": [128, 4],
            "output_proj_dims": 32,
        },
    ),
    "audioflamingo3": OwnRow(
        {"audio_token": "<sound>"},
        "",
        sound="<sound>",
        picture={"chunk_length": 2},
        vision={"num_mel_bins": 16, "max_source_positions": 100},
    ),
    "fun_asr_nano": OwnRow(
        {"audio_token": "<|object_ref_start|>"},
        "",
        sound="<|object_ref_start|>",
        extractor="FunAsrNanoFeatureExtractor",
        vision={
            "num_mel_bins": 16,
            "max_position_embeddings": 100,
            "num_timestamp_prediction_layers": 1,
            # The adaptor's must be a quarter of the text model's hidden size.
            "intermediate_size": 8,
        },
    ),
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": replace(
        _GRANITE_SPEECH,
        vision={**_GRANITE_SPEECH.vision, "cat_hidden_layers": [1], "encoder_hidden_size": 64},
        like="granite_speech",
    ),
    "musicflamingo": OwnRow(
        {
            "audio_token": "<sound>",
            "audio_bos_token": "<|sound_bos|>",
            "audio_eos_token": "<|sound_eos|>",
        },
        "",
        sound="<sound>",
        picture={"chunk_length": 2},
        vision={"num_mel_bins": 16, "max_source_positions": 100},
    ),
    "glmasr": OwnRow(
        {"audio_token": "<|pad|>"},
        "",
        sound="<|pad|>",
        vision={"num_mel_bins": 16, "max_position_embeddings": 50},
    ),
    "qwen3_asr": OwnRow(
        {
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        "",
        extractor="Qwen3ASRFeatureExtractor",
        sound="<|audio_start|><|audio_pad|><|audio_end|>",
        vision={
            "num_mel_bins": 16,
            "max_source_positions": 100,
            "d_model": 32,
            "output_dim": 32,
            "downsample_hidden_size": 16,
        },
    ),
    "glm_ocr": replace(_GLM_46V, like="glm46v"),
    "glmga": replace(_GLM_46V, like="glm46v"),
    "cosmos3_edge": replace(_VISION_MARKS, text=_ROPE),
    "cosmos3_omni": replace(_VISION_MARKS, text=_ROPE, like="qwen3_vl"),
    "granite4_vision": OwnRow(
        # One layer for each level of features. Windows have several queries, which have gradients.
        text={"num_hidden_layers": 5, "attention_multiplier": 0.25},
        picture={**CROPPED, "image_grid_pinpoints": _GRIDS},
        vision={
            "hidden_size": 64,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        processor={**_LLAVA, "downsample_rate": "2/4"},
        config={
            "downsample_rate": "2/4",
            "projector_dropout": 0.0,
            "deepstack_layer_map": [[-2, 0]],
            "spatial_target_layers": [1, 2, 3, 4],
            "image_grid_pinpoints": _GRIDS,
        },
    ),
    "hunyuan_vl": OwnRow(
        {
            "image_token": "<|image|>",
            "image_start_token": "<|im_begin|>",
            "image_end_token": "<|im_over|>",
        },
        "<|im_begin|><|image|><|im_over|>",
        text=_ROPE,
        vision={"out_hidden_size": 32, "img_max_token_num": 64, "max_image_size": 64},
        picture={**_PATCHES, "spatial_patch_size": 1},
        ids={"im_start_id": "<|im_begin|>", "im_end_id": "<|im_over|>"},
    ),
    "hyperclovax_vision_v2": OwnRow(_PAD, "<|image_pad|>", picture=_PATCHES, vision=_MERGED),
    "idefics2": OwnRow(
        {"image_token": "<image>", "image_boundary_token": "<fake_token_around_image>"},
        "<image>",
        text={"sliding_window": None},
        picture={"size": {"shortest_edge": 16, "longest_edge": 32}},
        vision={
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
        },
        processor={"image_seq_len": 4},
    ),
    "janus": OwnRow(
        {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
        "<image>",
        picture=_SQUARE,
        vision={"projection_dim": 32},
        processor={"num_image_tokens": 16},
    ),
    "kimi_k25": OwnRow(
        {"image_token": "<|media_pad|>", "video_token": "<|video_pad|>"},
        "<|media_pad|>",
        picture={"patch_size": 4, "size": {"max_height": 8, "max_width": 8}},
        vision={"pos_emb_height": 4, "pos_emb_width": 4},
        config={"projection_hidden_size": 32},
    ),
    "lfm2_vl": OwnRow(
        {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        picture={
            "encoder_patch_size": 4,
            "tile_size": 16,
            "max_tiles": 4,
            "min_image_tokens": 1,
            "max_image_tokens": 6,
        },
        vision={"num_patches": 16},
        config={"projector_hidden_size": 32},
    ),
    "lfm3_vl": _VISION_MARKS,
    "lighton_ocr": OwnRow(
        {
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        "<|image_pad|>",
        picture={"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}},
        processor={"patch_size": 4, "spatial_merge_size": 2},
    ),
    "llama4": OwnRow(
        {
            "fake_image_token": "<|image|>",
            "image_token": "<|patch|>",
            "start_of_image_token": "<|image_start|>",
            "end_of_image_token": "<|image_end|>",
            "tile_x_separator_token": "<|tile_x_separator|>",
            "tile_y_separator_token": "<|tile_y_separator|>",
        },
        "<|image|>",
        picture={**_SQUARE, "max_patches": 4},
        vision={
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        processor={"patch_size": 4},
    ),
    "llava": OwnRow(picture=CROPPED, processor=_LLAVA),
    "llava_next": OwnRow(
        picture={**CROPPED, "image_grid_pinpoints": _GRIDS},
        processor=_LLAVA,
        config={"image_grid_pinpoints": _GRIDS},
    ),
    "llava_next_video": OwnRow(
        {"image_token": "<image>", "video_token": "<video>"},
        clip="<video>\n",
        picture={**CROPPED, "image_grid_pinpoints": _GRIDS},
        processor=_LLAVA,
        config={"image_grid_pinpoints": _GRIDS},
    ),
    "mllama": OwnRow(
        {"image_token": "<|image|>"},
        "<|image|>",
        # The processor writes it where the template does not.
        named={"bos_token": "<|im_start|>"},
        text={
            "bos_token_id": 2,
            "cross_attention_layers": [1],
            "num_hidden_layers": 3,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        },
        picture={**_SQUARE, "max_image_tiles": 4},
        vision={
            "attention_heads": 2,
            "num_global_layers": 1,
            "max_num_tiles": 4,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
            "supported_aspect_ratios": [
                [1, 1],
                [1, 2],
                [1, 3],
                [1, 4],
                [2, 1],
                [2, 2],
                [3, 1],
                [4, 1],
            ],
        },
    ),
    "minicpmv4_6": replace(_MINICPM, ids={}),
    "minicpmv4_7": _MINICPM,
    "mistral3": OwnRow(
        {
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        "[IMG]",
        text={"sliding_window": None},
        picture={"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}},
        processor={"patch_size": 4, "spatial_merge_size": 2},
    ),
    "molmo2": OwnRow(
        {
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "image_patch": "<im_patch>",
            "image_column": "<im_col>",
            "image_start_token": "<im_start>",
            "low_res_image_start_token": "<low_res_im_start>",
            "image_end_token": "<im_end>",
            "frame_start_token": "<frame_start>",
            "frame_end_token": "<frame_end>",
            "image_low": "<im_low>",
        },
        "<|image|>",
        text={
            # The head has no rows for its special tokens.
            "vocab_size": 100,
            "additional_vocab_size": 10,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        vision={"image_size": [16, 16], "vision_feature_layer": [1, 0], "text_hidden_size": 32},
        picture={**_SQUARE, "patch_size": 4, "overlap_margins": [1, 1], "max_crops": 4},
    ),
    "moss_transcribe_diarize": OwnRow(
        {
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        "",
        sound="<|audio_start|><|audio_pad|><|audio_end|>",
        extractor="MossTranscribeDiarizeFeatureExtractor",
        picture={"chunk_length": 2},
        vision={"num_mel_bins": 16, "max_source_positions": 100},
        config={"audio_chunk_size": 32000},
    ),
    "ovis2": OwnRow(
        {
            "image_token": "<image>",
            "image_atom_token": "<IMG_ATOM>",
            "image_start_token": "<IMG_START>",
            "image_grid_token": "<IMG_GRID>",
            "image_column_token": "<IMG_COL>",
            "image_row_token": "<IMG_ROW>",
            "image_end_token": "<IMG_END>",
        },
        picture={**_SQUARE, "crop_to_patches": True, "max_patches": 4},
        vision={"vocab_size": 64, "num_visual_indicator_tokens": 5},
        processor={"image_seq_length": 16},
        ids={
            "image_token_id": "<IMG_ATOM>",
            "visual_indicator_token_ids": (
                *("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
            ),
        },
    ),
    "perception_lm": OwnRow(
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        "<|image|>",
        picture={"tile_size": 16, "max_num_tiles": 4},
        processor={"patch_size": 4, "pooling_ratio": 2},
        config={"projector_pooling_ratio": 2},
        vision={
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {**_TIMM, "use_post_transformer_norm": False},
        },
    ),
    "phi4_multimodal": OwnRow(
        {"image_token": "<|image|>", "audio_token": "<|audio|>"},
        "<|image|>",
        sound="<|audio|>",
        extractor="Phi4MultimodalFeatureExtractor",
        # Its processor writes placeholders for 32 patches along each axis of a crop.
        picture={"size": {"height": 64, "width": 64}, "patch_size": 2, "dynamic_hd": 4},
        config={"bos_token_id": None},
        vision={"image_size": 64, "patch_size": 2, "crop_size": 64},
        hearing={
            "num_blocks": 2,
            "input_size": 16,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 8,
            "bias_max_distance": 20,
        },
    ),
    "paddleocr_vl": OwnRow(
        {**_PAD, "vision_start_token": "<|vs|>", "vision_end_token": "<|ve|>"},
        "<|vs|><|image_pad|><|ve|>",
        text=_ROPE,
        picture=_PATCHES,
        vision={"spatial_merge_size": 2},
    ),
    "paligemma": OwnRow(picture={**_SQUARE, "image_seq_length": 16}, config={"projection_dim": 32}),
    "qianfan_ocr": OwnRow(
        {
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
        },
        "<image>",
        picture=_SQUARE,
        processor={"image_seq_length": 4},
        ids={"image_token_id": "<IMG_CONTEXT>"},
    ),
    "video_llama_3": OwnRow(_PAD, "<|image_pad|>", picture=_PATCHES),
    "video_llava": OwnRow(
        {"image_token": "<image>", "video_token": "<video>"},
        clip="<video>\n",
        picture=CROPPED,
        processor=_LLAVA,
    ),
    "vipllava": OwnRow(
        picture=CROPPED, processor=_LLAVA, config={"vision_feature_layers": [-1, -2]}
    ),
}
