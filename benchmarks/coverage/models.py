"""Tiny models of the transformers classes with a language-model head, and batches for them.

In: the name of a class. Out: a model of about ten thousand weights, whose configuration has every
size reduced by the rules below, and keyword arguments for which it returns a loss::

    model = build("LlamaForCausalLM")
    loss = model(**next(batches(model))).loss

:mod:`benchmarks.coverage.overrides` has the exceptions to the rules.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from benchmarks.coverage.overrides import OVERRIDES

MAPPINGS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")

V = 131  # no other size is 131, so that the class dimension is recognisable in a graph
BATCH, TOKENS = 2, 12

# The first pattern that matches the whole field name gives the upper bound of the size.
SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|.*_n_top|num_channels|in_channels|sampling_rate", 10**9),
    (r".*vocab_size.*|.*hash_byte_group_vocab", V),
    (r"(max|num)_.*(position|seq|source|target|patches).*|n_positions|n_ctx|max_.*", 256),
    (r".*experts_per_tok.*|.*top_?k.*|moe_k", 2),
    (r"n_groups?|topk_group|n_group|num_expert_groups?", 1),
    (r".*shared_experts", 1),
    (r".*(num|n)_.*experts|num_experts.*|.*_experts", 4),
    (r".*(key_value|kv)_heads|.*num_kv.*", 2),
    (r".*layers?|.*depth|num_blocks|num_self_attends_per_block|n_layer", 1),
    (r".*(head_dim|dim_head|d_head|d_kv|head_size|qk_\w*dim|v_head_dim|rotary_dim).*", 16),
    (r".*heads?", 4),
    (r".*(intermediate|ffn|mlp|feed_forward)_?\w*|d_ff|n_inner|.*ff_mult", 96),
    (r"(\w*_)?(hidden|embed|embedding|embd|emb|proj\w*|output)_?(size|dim|dims)\w*", 64),
    (r"d_model|n_embd|dim|.*_dim|.*hidden_size.*|d_inner|.*_channels?", 64),
    (r".*lora_rank|.*_rank", 16),
    (r".*d_state|.*state_size", 8),
    (r"image_size|crop_size|resolution", 32),
    (r"patch_size", 8),
    (r".*window\w*|.*chunk_size", 8),
    (r".*", 0),
)
LARGE = 512  # sizes without a rule are unchanged below this, and become 64 above


def classes() -> dict[str, str]:
    """Class name → the name of the first mapping that has it."""
    found: dict[str, str] = {}
    for mapping in MAPPINGS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, mapping)
    return found


# ---------------------------------------------------------------- configurations


class _Tokens:
    """Special tokens beyond the small vocabulary get ids at its end; equal ids stay equal."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}

    def __call__(self, token: int) -> int:
        return token if token < V - 40 else self.ids.setdefault(token, V - 1 - len(self.ids))


def config_of(name: str) -> Any:
    """The tiny configuration of a class."""
    kind = getattr(transformers, name)
    return kind.config_class(**_tiny(kind.config_class, {}, OVERRIDES.get(name, {}), _Tokens()))


def _tiny(kind: Any, given: dict[str, Any], override: dict[str, Any], tokens: _Tokens) -> dict:
    # copies, since configurations change the dictionaries of their arguments
    override = copy.deepcopy({**OVERRIDES.get(kind.model_type, {}), **override})
    defaults = {
        f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default  # type: ignore[misc]
        for f in dataclasses.fields(kind)
        if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
    }
    defaults |= given
    small = {name: _shrink(name, value, tokens) for name, value in defaults.items()}
    if defaults.get("num_key_value_heads") == defaults.get("num_attention_heads", 0):
        small["num_key_value_heads"] = small["num_attention_heads"]  # no grouped-query attention
    if "head_dim" in small and small["head_dim"] is None:
        small["head_dim"] = 16
    result = {n: v for n, v in small.items() if n in given or v is not defaults[n]}
    for key, spec in getattr(kind, "sub_configs_defaults", {}).items():
        if spec.optional and key not in override:
            continue
        own = override.get(key, {})
        model_type = own.get("model_type", spec.model_type)
        if model_type != spec.model_type:  # an instance, since the class may be fixed
            sub = CONFIG_MAPPING[model_type]
            result[key] = sub(**_tiny(sub, {}, own, tokens))
            continue
        fixed = "Auto" not in spec.config_class.__name__
        sub = spec.config_class if fixed else CONFIG_MAPPING[model_type]
        result[key] = {**_tiny(sub, spec.init_kwargs, own, tokens), "model_type": model_type}
    result |= {k: v for k, v in override.items() if not isinstance(v, dict) or k not in result}
    return {k: v for k, v in result.items() if k == "model_type" or not k.startswith("_")}


def _shrink(name: str, value: Any, tokens: _Tokens) -> Any:
    if isinstance(value, float) and re.search("drop|jitter|mask_.*_prob", name):
        return 0.0
    if re.fullmatch(r".*(token_id|token_index|_index|_id|token_ids)s?", name):
        if isinstance(value, list | tuple):
            return [tokens(t) if isinstance(t, int) else t for t in value]
        return tokens(value) if isinstance(value, int) else value
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    size = next(size for pattern, size in SIZES if re.fullmatch(pattern, name))
    return min(value, size) if size else 64 if value >= LARGE else value


def build(name: str) -> Any:
    """The model in f32 with random weights, in training mode, without any dropout.

    Raises:
        ValueError: the class takes no labels. Exceptions of the class pass through.
    """
    kind = getattr(transformers, name)
    if "labels" not in inspect.signature(kind.forward).parameters:
        raise ValueError("it takes no labels")
    torch.manual_seed(0)
    config = config_of(name)
    config._attn_implementation = "eager"
    model = kind(config)
    for module in model.modules():
        if "Dropout" in type(module).__name__ and hasattr(module, "p"):
            module.p = 0.0
    return model.float().train()


# ---------------------------------------------------------------- batches


def vocabulary(model: Any) -> int:
    """The number of classes of the model's head."""
    return getattr(model.config.get_text_config(decoder=True), "vocab_size", None) or V


def batches(model: Any) -> Iterator[dict[str, Any]]:
    """Batches that the class may accept; the caller uses the first batch that gives a loss."""
    name = type(model).__name__
    accepted = set(inspect.signature(model.forward).parameters)
    generator = torch.Generator().manual_seed(0)
    top = min(V - 45, vocabulary(model))
    ids = torch.randint(5, top, (BATCH, TOKENS), generator=generator)
    labels = torch.randint(5, top, (BATCH, TOKENS), generator=generator)
    if classes()[name] in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT"):
        labels = ids.clone()
    labels[0, :3] = -100
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if "attention_mask" in accepted:
        batch["attention_mask"] = torch.ones_like(ids)
    if name in INPUTS:
        batch = {k: v for k, v in {**batch, **INPUTS[name](model, ids)}.items() if v is not None}
    yield batch
    if "decoder_input_ids" in accepted:
        yield {**batch, "decoder_input_ids": labels.clamp(min=1)}
    yield {"input_ids": ids, "labels": labels}
    if "pixel_values" in accepted:
        yield {**batch, "pixel_values": _pixels(model)}
        yield {"labels": labels, "pixel_values": _pixels(model)}


def _pixels(model: Any, *shape: int) -> Tensor:
    size = _image_size(model)
    return torch.randn(BATCH, *shape, 3, size, size, generator=torch.Generator().manual_seed(1))


def _image_size(model: Any) -> int:
    vision = getattr(model.config, "vision_config", None) or getattr(model.config, "encoder", None)
    size = getattr(vision, "image_size", 32)
    return size if isinstance(size, int) else size[0]


def double(batch: dict[str, Any]) -> dict[str, Any]:
    """The same batch for a float64 model."""
    return {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in batch.items()
    }


def _with_image(model: Any, ids: Tensor, *shape: int) -> dict[str, Any]:
    """Pixels, and image tokens at the beginning of each row."""
    ids, config = ids.clone(), model.config
    token = config.video_token_id if shape else config.image_token_id
    ids[:, : config.num_query_tokens] = token
    return {"input_ids": ids, "pixel_values": _pixels(model, *shape)}


def _codebooks(model: Any, ids: Tensor) -> dict[str, Any]:
    books = model.config.num_codebooks
    return {
        "input_ids": ids.repeat_interleave(books, 0),
        "labels": ids[..., None].repeat(1, 1, books),
        "attention_mask": None,
    }


# class → its additional batch entries, from the model and the tokens; None removes an entry
INPUTS: dict[str, Callable[[Any, Tensor], dict[str, Any]]] = {
    "Blip2ForConditionalGeneration": _with_image,
    "GitForCausalLM": lambda m, ids: {"pixel_values": _pixels(m)},
    "IdeficsForVisionText2Text": lambda m, ids: {
        "pixel_values": _pixels(m, 1),
        "image_attention_mask": torch.ones(BATCH, TOKENS, 1),
    },
    "InstructBlipForConditionalGeneration": lambda m, ids: {
        **_with_image(m, ids),
        "qformer_input_ids": ids,
    },
    "InstructBlipVideoForConditionalGeneration": lambda m, ids: {
        **_with_image(m, ids, 1),
        "qformer_input_ids": ids,
    },
    "Kosmos2ForConditionalGeneration": lambda m, ids: {
        "pixel_values": _pixels(m),
        "image_embeds_position_mask": torch.arange(TOKENS)[None].expand(BATCH, -1)
        < m.config.latent_query_num,
    },
    "Molmo2ForConditionalGeneration": lambda m, ids: {"mm_token_type_ids": torch.zeros_like(ids)},
    "MusicgenForCausalLM": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "Pix2StructForConditionalGeneration": lambda m, ids: {
        "input_ids": None,
        "attention_mask": None,
        "flattened_patches": torch.ones(
            BATCH, 4, 2 + m.config.vision_config.patch_embed_hidden_size
        ),
    },
    "UdopForConditionalGeneration": lambda m, ids: {"bbox": torch.zeros(BATCH, TOKENS, 4)},
    "VisionEncoderDecoderModel": lambda m, ids: {"input_ids": None, "pixel_values": _pixels(m)},
    "VoxtralRealtimeForConditionalGeneration": lambda m, ids: {
        "encoder_inputs_embeds": torch.ones(
            BATCH, m.config.downsample_factor * TOKENS, m.config.audio_config.hidden_size
        ),
    },
}
