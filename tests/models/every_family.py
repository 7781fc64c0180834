"""Every family of transformers, small and random: configurations made from the classes of their configs.

1. A family is a type of models. Of its heads the first one in `HEADS` is tried.
2. The config's own defaults are made small by the names of what they set (`NUMBERS`, `ITEMS`), sub-configs as well.
3. What does not come out right by names is written down in `ODD`.
4. The batch is made for what the head reads; a model with images among its tokens says itself how many it needs.
"""

from __future__ import annotations

import inspect
import itertools
import re
import textwrap
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import pytree

VOCABULARY, LENGTH, ROWS, IMAGE, MOST = 96, 8, 4, 32, 16e6  # the most parameters of a model that is tried

NUMBERS = {
    32: """hidden_size d_model n_embd dim embed_dim encoder_hidden_size word_embed_proj_dim decoder_hidden_size
        hidden_dim embedding_size rnn_hidden_size attention_hidden_size mask_feature_size feature_size conv_dim
        fusion_hidden_size image_size encoder_embed_dim decoder_embed_dim emb_dim vision_hidden_size
        text_hidden_size out_hidden_size dim_model
        encoder_hidden_dim decoder_dim projector_hidden_size lru_width input_size d_embed max_target_positions
        output_channels fpn_hidden_size audio_hidden_size condition_dim""",
    64: """intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size moe_intermediate_size
        shared_expert_intermediate_size d_inner dim_feedforward encoder_intermediate_size decoder_intermediate_size
        dim_ff intermediate_dim mlp_dim inner_dim feed_forward_size feedforward_dim encoder_feedforward_dim
        expert_ffn_hidden_size intermediate_size_mlp block_ff_dim shared_intermediate_size max_position_embeddings
        n_positions n_ctx""",
    2: """num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_decoder_layers depth
        num_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_hidden_groups detr_decoder_layers
        num_blocks l_layers x_layers r_layers text_layers vision_layers num_key_value_heads num_kv_heads n_kv_heads
        encoder_kv_heads num_experts_per_tok moe_topk moe_k num_selected_experts expert_top_k""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads nhead
        encoder_num_attention_heads decoder_num_attention_heads num_encoder_attention_heads sliding_window
        num_cross_attention_heads num_self_attention_heads num_decoder_attention_heads num_experts n_routed_experts
        num_local_experts moe_num_experts mamba_d_state state_size upsample_groups""",
    8: """head_dim d_kv d_head kv_channels attention_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim num_mel_bins
        patch_size""",
    16: "max_source_positions qk_head_dim kv_lora_rank q_lora_rank",
    1: "n_group topk_group",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
}
SIZES = {name: size for size, names in NUMBERS.items() for name in names.split()}
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
TOKENS |= dict.fromkeys(("forced_eos_token_id", "forced_bos_token_id"))
ITEMS = {
    1: "depths layers_block_list block_sizes num_blocks",
    2: "num_heads num_attention_heads",
    4: "window_size",
    8: "patch_size",
    32: """hidden_sizes embed_dims encoder_hidden_sizes decoder_hidden_sizes neck_hidden_sizes image_size embed_dim
        conv_dim tdnn_dim conv_channels backbone_feature_channels encoder_in_channels decoder_in_channels
        stage_out_channels num_channels""",
}
LISTS = {name: size for size, names in ITEMS.items() for name in names.split()}
ODD: dict[str, dict[str, Any]] = {
    "bailing_hybrid": dict(
        layer_types=["linear_attention", "full_attention"], n_group=1, topk_group=1, num_local_experts=8, num_experts=8
    ),
    "bamba": dict(mamba_n_heads=4, attn_layer_indices=[1], mamba_chunk_size=4),
    "bit": dict(num_groups=4),
    "codegen": dict(rotary_dim=4),
    "gptj": dict(rotary_dim=4),
    "cohere_compass_text": dict(layer_types=["sliding_attention", "full_attention"]),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "donut-swin": dict(window_size=4, depths=[1, 1], num_heads=[2, 4]),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1),
    "esm": dict(vocab_size=VOCABULARY, mask_token_id=90, pad_token_id=1),
    "gemma3n_text": dict(
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        intermediate_size=[64] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
    ),
    "granitemoehybrid": dict(mamba_n_heads=4, layer_types=["mamba", "attention"], mamba_chunk_size=4),
    "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8, num_experts=4, moe_topk=2, moe_intermediate_size=32),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "kimi_linear": dict(
        layer_types=["linear_attention", "full_attention"], linear_head_dim=8, linear_num_heads=4, num_local_experts=8
    ),
    "lilt": dict(hidden_size=48, channel_shrink_ratio=4),
    "levit": dict(image_size=64, patch_size=16),
    "layoutlmv3": dict(coordinate_size=5, shape_size=6, input_size=IMAGE),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "luke": dict(entity_vocab_size=VOCABULARY, entity_emb_size=16),
    "mamba2": dict(num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "ministral": dict(head_dim=8),
    "mobilevitv2": dict(width_multiplier=0.5, image_size=64),
    "nemotron": dict(head_dim=8, num_key_value_heads=2),
    "nemotron_h": dict(
        layers_block_type=["mamba", "attention", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=4,
        ssm_state_size=8,
        moe_shared_expert_intermediate_size=32,
    ),
    "longcat_flash": dict(expert_ffn_hidden_size=32, zero_expert_num=2, n_routed_experts=4, moe_topk=2),
    "reformer": dict(is_decoder=True, axial_pos_embds=False, attn_layers=["local", "local"], local_attn_chunk_length=4),
    "roc_bert": dict(pronunciation_vocab_size=VOCABULARY, shape_vocab_size=VOCABULARY),
    "siglip2_vision_model": dict(patch_size=8),
    "swin": dict(window_size=4, depths=[1, 1], num_heads=[2, 4]),
    "swinv2": dict(window_size=4, depths=[1, 1], num_heads=[2, 4]),
    "xlstm": dict(num_heads=4, num_blocks=2),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        attention_hidden_size=64,
        attention_head_dim=16,
    ),
    "zamba2": dict(
        layers_block_type=["mamba", "hybrid"],
        n_mamba_heads=4,
        chunk_size=4,
        adapter_rank=8,
        attention_hidden_size=64,
        attention_head_dim=16,
    ),
    "wav2vec2-bert": dict(vocab_size=32),
    "wav2vec2-conformer": dict(vocab_size=32),
    "fsmt": dict(src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY),
    "perceiver": dict(
        max_position_embeddings=LENGTH,
        num_latents=8,
        d_latents=32,
        num_blocks=1,
        num_self_attends_per_block=2,
        qk_channels=32,
        v_channels=32,
        d_model=32,
    ),
    "efficientnet": dict(width_coefficient=0.2, depth_coefficient=0.2, hidden_dim=256),
    "granite_speech5_encoder": dict(context_size=16),
    "textnet": dict(stem_out_channels=32),
    "rt_detr_resnet": dict(embedding_size=8, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1]),
}
SERIES = dict(prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, feature_size=5)
ODD |= {kind: dict(SERIES) for kind in ("autoformer", "informer", "time_series_transformer")}
ODD |= dict(
    patchtst=dict(context_length=16, patch_length=4, patch_stride=4, num_input_channels=2),
    patchtsmixer=dict(context_length=16, patch_length=4, patch_stride=4, num_input_channels=2),
    timesfm=dict(context_length=64, patch_length=8, horizon_length=8),
    timesfm2_5=dict(context_length=64, patch_length=8, horizon_length=8, output_patch_length=8),
    kimi_linear=dict(ODD["kimi_linear"], num_experts_per_token=2, num_experts=8),
    dots1=dict(ODD["dots1"], num_experts_per_tok=2),
    deepseek_ocr2=dict(text_config=dict(mlp_layer_types=["dense", "sparse"])),
    bridgetower=dict(hidden_size=64, num_attention_heads=4),
    bridgetower_text_model=dict(hidden_size=64),
    bridgetower_vision_model=dict(hidden_size=64),
    blip_2_qformer=dict(use_qformer_text_input=True),
    bros=dict(hidden_size=64),
    chameleon=dict(vocabulary_map={"<image>": VOCABULARY - 1, "IMGIMGAZ": 50}),
    cohere_compass_text=dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=1e4) for kind in ("sliding_attention", "full_attention")
        },
    ),
    dbrx=dict(
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
    ),
    diffusion_gemma_text=dict(num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    ernie4_5_vl_moe_text=dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])),
    molmo2_adapter=dict(vision_feature_layer=[1, 0]),
    muse_spark_audio=dict(num_hidden_layers=4),
    musicgen_decoder=dict(num_codebooks=1),
    musicgen_melody_decoder=dict(num_codebooks=1),
    neomme=dict(head_dim=16),
    step3p7_text=dict(sliding_window=4),
    qwen3_omni_moe_talker_text=dict(shared_expert_intermediate_size=32),
    moonshine=dict(pad_token_id=0),
)
RESNET = dict(model_type="resnet", embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1])
DETR = dict(backbone_config=dict(RESNET, out_features=["stage4"]), use_timm_backbone=False, num_queries=5)
RT_DETR = dict(encoder_in_channels=[16, 32, 32], num_queries=5, num_denoising=0, encoder_hidden_dim=32, d_model=32)
ROTARY = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
ODD |= {kind: dict(DETR, hidden_size=32) for kind in ("detr", "conditional_detr", "dab-detr", "table-transformer")}
ODD["deformable_detr"] = dict(
    ODD["detr"], backbone_config=dict(RESNET, out_features=["stage3", "stage4"]), num_feature_levels=2
)
ODD |= {kind: dict(RT_DETR) for kind in ("rt_detr", "rt_detr_v2")}
ODD |= {
    f"{kind}_text": dict(rope_parameters=ROTARY)
    for kind in ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "glm4v", "glm_ocr")
}
ODD["glm_image_text"] = dict(rope_parameters=ROTARY)
STAGES = [f"stage{i}" for i in range(1, 5)]
DINO = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, image_size=IMAGE, patch_size=8, mlp_ratio=2)
DINO |= dict(model_type="dinov2", out_indices=[1, 2, 3, 4], reshape_hidden_states=False)
DEPTH = dict(backbone_config=DINO, reassemble_hidden_size=32, neck_hidden_sizes=[16] * 4, fusion_hidden_size=16)
ODD |= {kind: dict(DEPTH, head_hidden_size=8) for kind in ("depth_anything", "prompt_depth_anything")}
ODD["dpt"] = dict(
    DEPTH, backbone_config=dict(DINO, reshape_hidden_states=True), neck_ignore_stages=[], use_auxiliary_head=False
)
ODD["rt_detr"]["backbone_config"] = ODD["rt_detr_v2"]["backbone_config"] = dict(
    model_type="rt_detr_resnet",
    embedding_size=8,
    hidden_sizes=[16, 16, 32, 32],
    depths=[1, 1, 1, 1],
    out_features=STAGES[1:],
)
ODD["upernet"] = dict(
    backbone_config=dict(RESNET, out_features=STAGES),
    hidden_size=16,
    pool_scales=[1, 2],
    auxiliary_channels=8,
    auxiliary_in_channels=16,
)
ODD["maskformer"] = dict(
    backbone_config=dict(RESNET, out_features=STAGES),
    decoder_config=dict(model_type="detr", d_model=32, encoder_layers=1, decoder_layers=1, num_queries=5),
    fpn_feature_size=32,
    mask_feature_size=32,
)
ENCODER = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
BERT = dict(ENCODER, model_type="bert", vocab_size=VOCABULARY, max_position_embeddings=64)
PAIR = dict(decoder=dict(BERT, is_decoder=True, add_cross_attention=True), pad_token_id=0, decoder_start_token_id=1)
PAIRS = {
    "encoder-decoder": dict(PAIR, encoder=BERT),
    "vision-encoder-decoder": dict(PAIR, encoder=dict(ENCODER, model_type="vit", image_size=IMAGE, patch_size=8)),
    "speech-encoder-decoder": dict(
        PAIR,
        encoder=dict(
            ENCODER,
            model_type="wav2vec2",
            conv_dim=[32] * 3,
            conv_kernel=[10, 3, 3],
            conv_stride=[5, 2, 2],
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            apply_spec_augment=False,
        ),
    ),
}
ODD["qwen2_5_omni_text"] = dict(rope_parameters=ROTARY)
ODD["glm4v_moe_text"] = dict(rope_parameters=dict(ROTARY, partial_rotary_factor=1.0))
ODD |= {"led": dict(attention_window=4), "longformer": dict(attention_window=4)}
HGNET = dict(
    stem_channels=[3, 8, 16],
    stage_in_channels=[16, 32, 32, 32],
    stage_mid_channels=[8, 16, 16, 16],
    stage_out_channels=[32, 32, 32, 32],
    hidden_sizes=[32, 32, 32, 32],
    depths=[1, 1, 1, 1],
    stage_num_blocks=[1, 1, 1, 1],
    stage_numb_of_layers=[2, 2, 2, 2],
)
ON_HGNET = dict(
    backbone_config=dict(HGNET, model_type="hgnet_v2", out_features=STAGES[1:]),
    encoder_in_channels=[32, 32, 32],
    encode_proj_layers=[2],
    num_queries=5,
    num_denoising=0,
)
VQ = dict(base_channels=32, channel_multiplier=[1, 1], num_embeddings=32, resolution=IMAGE, latent_channels=32)
ODD |= dict(
    hgnet_v2=HGNET,
    d_fine=ON_HGNET,
    deimv2=ON_HGNET,
    align=dict(projection_dim=64),
    align_vision_model=dict(width_coefficient=0.2, depth_coefficient=0.2, hidden_dim=64),
    chameleon_vqgan=VQ,
    janus_vqgan=VQ,
    gemma3n_vision=dict(architecture="mobilenetv3_small_050"),
    hunyuan_vl_text=dict(head_dim=8, rope_parameters=ROTARY),
    mimi=dict(
        num_filters=4, codebook_size=16, codebook_dim=16, vector_quantization_hidden_dimension=16, num_quantizers=8
    ),
    mistral4=dict(qk_rope_head_dim=8, qk_nope_head_dim=8, head_dim=16),
    pp_formulanet_vision=dict(output_channels=256),
    rf_detr=dict(num_queries=5, group_detr=1),
    sam_vision_model=dict(num_pos_feats=16),
    sam_hq_vision_model=dict(num_pos_feats=16),
    sam2_hiera_det_model=dict(
        hidden_size=16,
        blocks_per_stage=[1, 1, 1, 1],
        embed_dim_per_stage=[16, 32, 32, 32],
        num_attention_heads_per_stage=[1, 2, 2, 4],
    ),
    vibevoice_acoustic_tokenizer_encoder=dict(num_filters=4, depths=[1] * 7),
    vjepa2=dict(
        crop_size=IMAGE,
        frames_per_clip=4,
        patch_size=8,
        pred_hidden_size=32,
        pred_num_attention_heads=4,
        pred_num_hidden_layers=2,
    ),
    zoedepth=dict(DEPTH, bottleneck_features=16, bin_embedding_dim=8, num_relative_features=16),
    qwen4_exp_text=dict(
        layer_types=["linear_attention", "full_attention"],
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        ngram_vocab_size_base=50,
        ple_embed_dim=8,
        split_ngram_parts=1,
    ),
)
HEADS = {
    "CAUSAL_LM": "Text, predicted token by token; some read images or sound as well",
    "SEQ_TO_SEQ_CAUSAL_LM": "Text or sound to text, by an encoder and a decoder",
    "SPEECH_SEQ_2_SEQ": "Sound to text, by an encoder and a decoder",
    "MASKED_LM": "Text, encoded",
    "IMAGE_CLASSIFICATION": "Images, classified",
    "CTC": "Sound to text, by an encoder",
    "AUDIO_CLASSIFICATION": "Sound, classified",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": "Images beside texts",
    "IMAGE_TEXT_TO_TEXT": "Images among text",
    "MULTIMODAL_LM": "Images and sound among text",
    "SEMANTIC_SEGMENTATION": "Images, by pixel",
    "OBJECT_DETECTION": "Things in images",
    "VIDEO_CLASSIFICATION": "Videos, classified",
    "SEQUENCE_CLASSIFICATION": "Text and forms, classified",
    "UNIVERSAL_SEGMENTATION": "Regions of images",
    "DEPTH_ESTIMATION": "Depth of images",
    "TIME_SERIES_PREDICTION": "Series of numbers",
    "MODEL": "Others: the model without a head, trained on the sum of the squares of what it returns",
}


def list_families() -> dict[str, tuple[str, str]]:
    """Each type of models, with the head that is tried and its class."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str]] = {}
    for head in HEADS:
        listed = "MODEL_MAPPING_NAMES" if head == "MODEL" else f"MODEL_FOR_{head}_MAPPING_NAMES"
        for kind, name in getattr(modeling_auto, listed).items():
            found.setdefault(kind, (head, name if isinstance(name, str) else name[0]))
    return found


def make_small(config: Any) -> dict[str, Any]:
    """The options of a small config like this one."""
    layers = [getattr(config, name, None) for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")]
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    taken = _make_small(values, next((count for count in layers if isinstance(count, int)), 0))
    heads = next((n for n in ("num_attention_heads", "n_head", "num_heads") if isinstance(values.get(n), int)), "")
    if heads and values.get("num_key_value_heads") == values[heads] and "num_key_value_heads" in taken:
        taken["num_key_value_heads"] = taken[heads]
    ids = [n for n, v in values.items() if n.endswith(("_token_id", "_token_index")) and isinstance(v, int)]
    special = enumerate(name for name in ids if name not in TOKENS)
    return taken | {name: VOCABULARY - 1 - i for i, name in special if values[name] >= VOCABULARY}


def _make_small(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    taken: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            taken[name] = {**make_small(value), "model_type": value.model_type, **ODD.get(value.model_type, {})}
        elif isinstance(value, dict):
            if name not in ("id2label", "label2id") and (inner := _make_small(value, layers)):
                taken[name] = {**value, **inner}
        elif name == "mrope_section":
            taken[name] = ROTARY["mrope_section"]
        elif isinstance(value, list | tuple):
            if name in LISTS and value and isinstance(value[0], int):
                taken[name] = [min(v, LISTS[name]) for v in value]
            elif len(value) == layers > 2:
                taken[name] = [value[0], value[-1]]
        elif name in TOKENS:
            if value is not None:
                taken[name] = TOKENS[name]
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            taken[name] = min(value, SIZES[name])
    return taken


class NotTried(Exception):
    """A family that has no small dense model here, and why."""


def build(kind: str, name: str) -> nn.Module:
    """A small random model of a family; weights that are all 0 or 1 by default are random too."""
    import transformers

    made_of = getattr(transformers, name).config_class
    with warnings.catch_warnings(action="ignore"):
        if kind in PAIRS:  # made of two models, which have no defaults
            config = made_of(**PAIRS[kind])
        else:
            default = made_of()
            options = {**make_small(default), **ODD.get(kind, {})}
            starts = getattr(default, "decoder_start_token_id", None)
            if getattr(default, "is_encoder_decoder", False) and starts is None:
                options["decoder_start_token_id"] = 0
            config = made_of(**options)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            count = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
        if count > MOST:
            raise NotTried(f"{count / 1e6:.0f} M parameters")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = getattr(transformers, name)(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.is_floating_point():
                        parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def find(config: Any, *names: str) -> Any:
    """The first of these names that a config or one of its parts has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for part in vars(config).values():
        if type(part).__name__.endswith("Config") and (value := find(part, *names)) is not None:
            return value
    return None


def make_batch(model: Any, head: str) -> dict[str, Any]:
    """What the forward pass of a model reads."""
    generator = torch.Generator().manual_seed(1)
    named = inspect.signature(model.forward).parameters
    config, main = model.config, model.main_input_name

    def tokens(*, length: int = LENGTH) -> Tensor:
        return torch.randint(3, 30, (ROWS, length), generator=generator)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels = find(config, "num_channels", "in_channels", "in_chans") or 3
    channels = channels if isinstance(channels, int) else 3
    side = find(config, "image_size") or IMAGE
    sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
    batch: dict[str, Any] = {}
    if main in ("input_ids", "inputs"):
        batch[main] = tokens()
    if main == "pixel_values" or head in ("ZERO_SHOT_IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION"):
        if "pixel_values" in named:
            frames = (find(config, "num_frames"),) if head == "VIDEO_CLASSIFICATION" else ()
            batch["pixel_values"] = randn(ROWS, *frames, channels, *sides)
        if "pixel_values_videos" in named:
            batch["pixel_values_videos"] = randn(ROWS, find(config, "num_frames", "frames_per_clip"), channels, *sides)
        if "input_ids" in named:
            batch["input_ids"] = tokens()
    if main == "input_features":
        bins = find(config, "feature_projection_input_dim", "num_mel_bins", "feature_size", "n_mels", "input_dim") or 80
        length = 2 * (find(config, "max_source_positions") or 16)
        order = (
            (bins, length)
            if "whisper" in config.model_type or "audio" in config.model_type or "voxtral" in config.model_type
            else (length, bins)
        )
        batch["input_features"] = randn(ROWS, *order)
        if "input_ids" in named:
            batch["input_ids"] = tokens()
        if head == "CTC":
            batch["attention_mask"] = torch.ones(batch["input_features"].shape[:2], dtype=torch.long)
    if main == "input_values":
        if config.model_type == "audio-spectrogram-transformer":
            batch["input_values"] = randn(ROWS, config.max_length, config.num_mel_bins)
        else:
            batch["input_values"] = randn(ROWS, 2000)
    if head in (
        "CAUSAL_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "MASKED_LM",
        "IMAGE_TEXT_TO_TEXT",
        "CTC",
        "MULTIMODAL_LM",
    ):
        if "labels" in named:
            batch["labels"] = tokens(length=2) if head == "CTC" else tokens()
    elif head in ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"):
        if "labels" in named:
            batch["labels"] = torch.arange(ROWS) % 2
    elif head == "SEMANTIC_SEGMENTATION":
        batch["labels"] = torch.randint(0, 2, (ROWS, *sides), generator=generator)
    elif head == "OBJECT_DETECTION" and "labels" in named:
        boxes = 0.25 + 0.5 * torch.rand(ROWS, 2, 4, generator=generator)
        batch["labels"] = [{"class_labels": torch.tensor([0, 1]), "boxes": b} for b in boxes]
    if "noise" in named:  # what a model that masks patches at random draws otherwise
        batch["noise"] = randn(ROWS, (sides[0] // (find(config, "patch_size") or 1)) ** 2)
    if "return_loss" in named and len(batch) > 1:
        batch["return_loss"] = True
    if main == "input_ids" and "pixel_values" in named and "pixel_values" not in batch:
        batch = _add_images(model, batch, randn(ROWS, channels, *sides))
    return batch if _runs(model, batch) else _add_others(model, batch, generator, (channels, *sides))


def _runs(model: Any, batch: Mapping[str, Any]) -> bool:
    try:
        with torch.no_grad():
            model(**batch)
    except Exception:  # of any kind: another batch is tried
        return False
    return True


def _add_others(
    model: Any, batch: dict[str, Any], generator: torch.Generator, image: tuple[int, ...]
) -> dict[str, Any]:
    """A batch with all else that a model may read, by the names of its arguments, where that makes it run."""
    named, config = inspect.signature(model.forward).parameters, model.config
    length = next((t.shape[1] for n, t in batch.items() if n in ("input_ids", "inputs")), LENGTH)
    patch = find(config, "patch_size") or 8
    patch, side = patch if isinstance(patch, int) else patch[0], 2 * (find(config, "spatial_merge_size") or 2)
    in_patch = image[0] * (find(config, "temporal_patch_size") or 1) * patch * patch
    episode, history = LENGTH // 2, find(config, "context_length", "seq_length") or 16
    history += max(getattr(config, "lags_sequence", None) or [0])
    wide = getattr(config, "num_input_channels", None)
    series = () if wide is None else (wide,)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def numbers(top: int, *shape: int) -> Tensor:
        return torch.randint(top, shape, generator=generator)

    forward = getattr(config, "prediction_length", None) or 4
    bins = find(config, "num_mel_bins", "feature_size", "n_mels", "input_dim", "input_feat_size") or 80
    shapes: dict[str, list[tuple[int, ...]]] = {  # what one model reads in one form and another in another
        "pixel_values": [
            (ROWS, *image),
            (ROWS * side * side, in_patch),
            (ROWS * side * side, image[0], patch, patch),
            (ROWS, 16, in_patch),
            (ROWS, 2, *image),
            (ROWS, find(config, "num_frames") or 2, *image),
        ],
        "input_features": [(ROWS, bins, 32), (ROWS, 32, bins), (ROWS, bins, 200), (ROWS, 1, 32, bins)],
        "input_values": [(ROWS, 1, 1920)],
    }
    made: dict[str, Any] = {
        "hidden_states": randn(ROWS * side * side, in_patch),
        "grid_thw": torch.tensor([[1, side, side]] * ROWS),
        "merge_sizes": torch.full((ROWS,), side // 2),
        "target_sizes": torch.tensor([[4, 4]] * ROWS),
        "pixel_values_videos": randn(ROWS, find(config, "num_frames", "frames_per_clip") or 2, *image),
        "input_ids": numbers(30, ROWS, length) + 3,
        "bbox": torch.tensor([1, 2, 5, 8]).expand(ROWS, length, 4).contiguous(),
        "decoder_input_ids": numbers(30, ROWS, length) + 3,
        "query_embeds": randn(ROWS, length, find(config, "hidden_size") or 32),
        "encoder_hidden_states": randn(ROWS, 5, find(config, "encoder_hidden_size", "hidden_size") or 32),
        "visual_feats": randn(ROWS, 3, find(config, "visual_feat_dim") or 8),
        "visual_pos": randn(ROWS, 3, 4),
        "flattened_patches": randn(ROWS, 6, 2 + (find(config, "patch_embed_hidden_size") or 30)),
        "audio_mel": randn(ROWS, 32, find(config, "input_feat_size") or 8),
        "audio_mel_mask": torch.zeros(ROWS, 32, dtype=torch.bool),
        "states": randn(ROWS, episode, find(config, "state_dim") or 8),
        "actions": randn(ROWS, episode, find(config, "act_dim") or 8),
        "rewards": randn(ROWS, episode, 1),
        "returns_to_go": randn(ROWS, episode, 1),
        "timesteps": torch.arange(episode).expand(ROWS, episode).contiguous(),
        "past_values": randn(ROWS, history, *series),
        "past_time_features": randn(ROWS, history, 1),
        "past_observed_mask": torch.ones(ROWS, history, *series),
        "future_values": randn(ROWS, forward, *series),
        "future_time_features": randn(ROWS, forward, 1),
        "pixel_attention_mask": torch.ones(ROWS, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * ROWS),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(ROWS, 16, 2).contiguous(),
    }
    needed = {n for n, p in named.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    own = {name: value for name, value in batch.items() if name in named}
    varied = [name for name in shapes if name in named]
    for forms in itertools.product(*(shapes[name] for name in varied)):
        others = {**made, **{name: randn(*form) for name, form in zip(varied, forms, strict=True)}}
        if "input_features" in others:
            others["input_features_mask"] = torch.ones(ROWS, others["input_features"].shape[-1], dtype=torch.long)
            others["attention_mask"] = torch.ones(ROWS, others["input_features"].shape[1], dtype=torch.long)
        elif "input_ids" in named:
            others["attention_mask"] = torch.ones(ROWS, length, dtype=torch.long)
        for wanted in (needed, needed | own.keys(), named.keys()):
            given = {name: value for name, value in others.items() if name in wanted}
            for tried in ({**own, **given}, {**given, **own}):
                if _runs(model, tried):
                    return tried
    return batch


def _add_images(model: Any, batch: dict[str, Any], images: Tensor) -> dict[str, Any]:
    """An image for each row, if the model takes it so: the model says itself how many tokens stand for it."""
    token = find(model.config, "image_token_id", "image_token_index")
    if token is None:
        return batch
    tried = {**batch, "pixel_values": images}
    for _ in range(2):
        try:
            with torch.no_grad():
                model(**tried)
        except Exception as error:  # of any kind: it is read for the number
            numbers = [int(n) for n in re.findall(r"\d+", str(error)) if int(n) > ROWS]
            if "feature" not in str(error) or not numbers or numbers[-1] % ROWS:
                return batch
            here = torch.full((ROWS, numbers[-1] // ROWS), token)
            if here.shape[1] > 300:
                return batch
            tried["input_ids"] = torch.cat([here, batch["input_ids"]], 1)
            tried["labels"] = torch.cat([torch.full_like(here, -100), batch["labels"]], 1)
        else:
            return tried
    return batch


def find_loss(output: Any) -> Tensor:
    """The loss that a model gives, else one of what it gives."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    leaves = [v for v in pytree.tree_leaves(dict(output)) if isinstance(v, Tensor) and v.requires_grad]
    return sum((v * v).sum() for v in leaves)


def write_families(cells: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """The part of the page that lists every family."""
    if len(cells) < 100:  # of a run of the sample
        return ""
    tried = {key: cell for key, cell in cells.items() if cell["outcome"] != "skipped"}
    results = {
        key: cell.get("refused", "equal") if cell["outcome"] == "passed" else "wrong" for key, cell in tried.items()
    }
    kinds = {kind: cells[kind, layout]["head"] for kind, layout in cells}
    left_out = {kind: cell["skipped"] for (kind, _), cell in cells.items() if cell["outcome"] == "skipped"}
    count = {r: sum(1 for v in results.values() if v == r) for r in ("equal", "wrong")}
    refused = len(results) - count["equal"] - count["wrong"]
    text = _PAGE.format(
        families=len({kind for kind, _ in tried}),
        cells=len(tried),
        equal=count["equal"],
        refused=refused,
        wrong=count["wrong"],
        whole=len(
            {kind for kind in kinds if kind not in left_out} - {k for (k, _), r in results.items() if r != "equal"}
        ),
    )
    lines = []
    for head, title in HEADS.items():
        mine = sorted(kind for kind, other in kinds.items() if other == head and kind not in left_out)
        every = [kind for kind in mine if all(r == "equal" for (k, _), r in results.items() if k == kind)]
        if mine:
            lines += [f"### {title}", "", _wrap(f"{len(mine)} families. Equal in all layouts: {', '.join(every)}."), ""]
        others = [(k, layout, r) for (k, layout), r in results.items() if k in mine and k not in every and r != "equal"]
        rows: dict[tuple[str, str], list[str]] = {}
        for kind, layout, result in others:
            rows.setdefault((kind, _shorten(result)), []).append(layout)
        if rows:
            lines += ["| family | layouts | refused |", "|---|---|---|"]
            lines += [f"| {kind} | {', '.join(layouts)} | {result} |" for (kind, result), layouts in rows.items()]
            lines += [""]
    if left_out:
        lines += [_wrap(f"Not tried, as no small model of it ran on one process here: {', '.join(sorted(left_out))}.")]
    return text + "\n".join(lines).rstrip() + "\n"


def _wrap(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _shorten(sentence: str) -> str:
    return sentence.replace("|", "\\|").replace("\n", " ")


_PAGE = """
## Every family

Every family of transformers of which a small random model runs on one process: {families} families, {cells} cells. In
each cell the loss and the gradients of all parameters are compared with those of the dense model: {equal} are equal,
{refused} are refused by one sentence, {wrong} are wrong. {whole} families are equal in all layouts.

"""
