"""Exceptions to the rules of :mod:`benchmarks.coverage.models`, for each configuration.

Data only: ``model_type`` of a configuration, or the name of a class → values that replace those of
the rules. Sizes are those of the rules: 131 classes, 12 tokens, 4 heads of 16.
"""

from __future__ import annotations

from typing import Any

# three axes of positions share the 8 frequencies of a head of 16
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_MROPE_HALF = {**_MROPE, "mrope_section": [1, 1, 2]}  # half of the head rotates
# the cache needs one layer of attention to know how long it is
_LINEAR_AND_FULL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_TIMM = {"vision_config": {"model_type": "siglip_vision_model"}}  # text only: timm is not needed

# model_type, or the name of a class → values of its configuration
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 2, "layer_group_size": 2},
    "blip-2": {"num_query_tokens": 2, "image_token_index": 100},
    "instructblip": {"num_query_tokens": 2, "image_token_index": 100},
    "instructblipvideo": {"num_query_tokens": 2, "video_token_index": 100},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "blt": {"use_cache": False},  # its cache asks for a number of layers that it does not have
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "cosmos3_edge_text": {"rope_parameters": _MROPE},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},  # None by default
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 96},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"]},
    "emu3": {"vocabulary_map": {"<image>": 100, "<|extra_200|>": 101}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}},
    "evolla": {"aligner_num_add_layers": 1, "resampler_num_latents": 4, "resampler_depth": 1},
    "florence_vision": {
        **{"depths": [1], "embed_dim": [64], "num_heads": [4], "num_groups": [4]},
        **{"patch_size": [7], "patch_stride": [4], "patch_padding": [3], "patch_prenorm": [False]},
    },
    "esm": {"vocab_size": 131, "pad_token_id": 1, "mask_token_id": 3},  # all None by default
    "esmc": {"vocab_size": 131},  # 64 would not hold the tokens
    "fast_vlm": _TIMM,
    "gemma3n_text": {"num_kv_shared_layers": 0},  # no layer is left to share from
    "glm46v_text": {"rope_parameters": _MROPE},
    "glm4v_text": {"rope_parameters": _MROPE},
    "glm4v_moe_text": {"rope_parameters": _MROPE_HALF},
    "glm5_next_text": {**_LINEAR_AND_FULL, "num_key_value_heads": 4, "index_topk": 16},
    "glm_ocr_text": {"rope_parameters": _MROPE},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        **{"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [0, 0, 0, 0]},
        "downsample_rate": "1/2",
    },
    "granitemoehybrid": _LINEAR_AND_FULL,
    "hunyuan_vl_text": {"rope_parameters": _MROPE},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LINEAR_AND_FULL,
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm3": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},  # 8 heads of 16 are twice the hidden size
    "molmo2_adapter": {"vision_feature_layer": [0, 0]},
    "muse_spark_audio": {"num_hidden_layers": 4},  # one for each of its patch sizes
    "nemotron": {"num_key_value_heads": 4},
    "olmo_hybrid": _LINEAR_AND_FULL,
    "paddleocr_vl_text": {"rope_parameters": _MROPE},
    "perceiver": {"max_position_embeddings": 12},  # every position is decoded
    "kosmos-2": {"latent_query_num": 2},
    "perception_lm": {
        "vision_config": {"model_type": "siglip_vision_model", "model_args": {"embed_dim": 64}}
    },
    "qwen2_vl_text": {"rope_parameters": _MROPE},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "qwen2_5_omni_text": {"rope_parameters": _MROPE},
    "qwen3_5_text": _LINEAR_AND_FULL,
    "qwen3_5_moe_text": _LINEAR_AND_FULL,
    "qwen3_next": _LINEAR_AND_FULL,
    "qwen4_exp_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 8, "indexer_compress_ratio": 4},
    },
    "recurrent_gemma": {"num_hidden_layers": 3},  # the third has attention
    "reformer": {
        **{"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
        **{"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2},
        "hash_seed": 0,  # else eager itself is different every time
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "rwkv": {"num_hidden_layers": 2},  # divides by the number of layers before the last
    "step3p5": {"sliding_window": 8},
    "udop": {"decoder_start_token_id": 0},
    "vision-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 1},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},  # a multiple of its hop
    "xlstm": {"chunk_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {  # two layers share one attention
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["linear_attention", "hybrid"]},
}
