"""The families of the gallery, small and random, and the layouts in which each is tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import Mesh
from tests.device import DEVICE

VOCABULARY, LENGTH, ROWS = 64, 8, 4
LAYOUTS = {
    "tp2": Mesh.of(tp=2),
    "dp2": Mesh.of(dp=2),
    "fsdp2": Mesh.of(fsdp=2),
    "2x2": Mesh.of(dp=2, tp=2),
}
DECODER: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
PLAIN_DECODER: dict[str, Any] = {n: value for n, value in DECODER.items() if n != "num_key_value_heads"}
SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
ENCODER: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)


@dataclass(frozen=True)
class Family:
    """A model's class and config in transformers, and what its batches are."""

    title: str
    model: str
    config: str
    options: Mapping[str, Any]
    batch: Callable[[], dict[str, Any]]

    def build(self, transformers: Any) -> nn.Module:
        """A small model with random weights, the same in each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made: nn.Module = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.options))
        return made.eval().to(DEVICE)


def _generator() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(1)


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=_generator(), device=DEVICE)


def _text() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def _images() -> dict[str, Tensor]:
    images = torch.randn(ROWS, 3, 16, 16, generator=_generator(), device=DEVICE)
    return {"pixel_values": images, "labels": torch.arange(ROWS, device=DEVICE) % 2}


def _pairs() -> dict[str, Any]:
    return {"input_ids": tokens(), "pixel_values": _images()["pixel_values"], "return_loss": True}


def _speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(ROWS, 8, 32, generator=_generator(), device=DEVICE), "labels": tokens()}


FAMILIES = {
    "llama": Family("Llama", "LlamaForCausalLM", "LlamaConfig", DECODER, _text),
    "mistral": Family("Mistral", "MistralForCausalLM", "MistralConfig", dict(DECODER, sliding_window=4), _text),
    "qwen3": Family("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", dict(DECODER, head_dim=8), _text),
    "gemma2": Family("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", dict(DECODER, head_dim=8), _text),
    "phi3": Family("Phi-3 (fused QKV)", "Phi3ForCausalLM", "Phi3Config", DECODER, _text),
    "gpt2": Family(
        "GPT-2 (fused QKV)",
        "GPT2LMHeadModel",
        "GPT2Config",
        dict(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        ),
        _text,
    ),
    "gemma3": Family(
        "Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig", dict(DECODER, head_dim=8, sliding_window=4), _text
    ),
    "neox": Family("GPT-NeoX (fused QKV)", "GPTNeoXForCausalLM", "GPTNeoXConfig", PLAIN_DECODER, _text),
    "falcon": Family("Falcon (fused QKV)", "FalconForCausalLM", "FalconConfig", SMALL, _text),
    "bloom": Family("BLOOM (fused QKV)", "BloomForCausalLM", "BloomConfig", SMALL, _text),
    "mamba": Family("Mamba", "MambaForCausalLM", "MambaConfig", dict(SMALL, state_size=4), _text),
    "bert": Family("BERT", "BertForMaskedLM", "BertConfig", dict(ENCODER, vocab_size=VOCABULARY), _text),
    "t5": Family(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        dict(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            eos_token_id=None,
        ),
        _text,
    ),
    "bart": Family(
        "BART",
        "BartForConditionalGeneration",
        "BartConfig",
        dict(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            forced_eos_token_id=None,
        ),
        _text,
    ),
    "deberta": Family(
        "DeBERTa-v2",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        dict(ENCODER, vocab_size=VOCABULARY, relative_attention=True, pos_att_type=["c2p", "p2c"]),
        _text,
    ),
    "swin": Family(
        "Swin",
        "SwinForImageClassification",
        "SwinConfig",
        dict(image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
        _images,
    ),
    "clip": Family(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        dict(
            text_config=dict(ENCODER, vocab_size=VOCABULARY, max_position_embeddings=16, eos_token_id=2),
            vision_config=dict(ENCODER, image_size=16, patch_size=8),
            projection_dim=16,
        ),
        _pairs,
    ),
    "vit": Family("ViT", "ViTForImageClassification", "ViTConfig", dict(ENCODER, image_size=16, patch_size=8), _images),
    "whisper": Family(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        dict(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
            decoder_start_token_id=1,
        ),
        _speech,
    ),
}


TIMM = """test_resnet test_efficientnet test_convnext test_vit test_vit2 test_vit4 test_byobnet test_convnext2
    test_convnext3 test_efficientnet_evos test_efficientnet_gn test_efficientnet_ln test_mambaout test_nfnet
    mobilenetv3_small_050 lcnet_035 tinynet_e mobilevit_xxs edgenext_xx_small mnasnet_small dla46_c regnetx_002
    ghostnet_050 semnasnet_075 xcit_nano_12_p16_224"""
TORCHVISION = "squeezenet1_1 shufflenet_v2_x0_5 mobilenet_v2"


class OnImages(nn.Module):
    """A model of something else between images and three classes."""

    def __init__(self, inner: nn.Module, read: Callable[[nn.Module, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.inner, self.head, self.read = inner, nn.Linear(width, 3), read

    def forward(self, images: Tensor) -> Tensor:
        made: Tensor = self.head(self.read(self.inner, images))
        return made


def _unet(load: Callable[[str], Any]) -> nn.Module:
    made = load("diffusers").UNet2DModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return OnImages(made, lambda inner, x: inner(x, 3).sample.mean((2, 3)), 3)


def _autoencoder(load: Callable[[str], Any]) -> nn.Module:
    kinds = dict(down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",))
    made = load("diffusers").AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2, **kinds)
    return OnImages(made, lambda inner, x: inner(x).sample.mean((2, 3)), 3)


def _x_transformer(load: Callable[[str], Any], **options: Any) -> nn.Module:
    library = load("x_transformers")
    layers = library.Encoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
    made = library.ContinuousTransformerWrapper(dim_in=96, dim_out=8, max_seq_len=32, attn_layers=layers)
    return OnImages(made, lambda inner, x: inner(x.transpose(1, 2).flatten(2)).mean(1), 8)


def _of_timm(name: str) -> Callable[[Callable[[str], Any]], nn.Module]:
    return lambda load: load("timm").create_model(name, num_classes=3, drop_rate=0.0)


def _of_torchvision(name: str) -> Callable[[Callable[[str], Any]], nn.Module]:
    def make(load: Callable[[str], Any]) -> nn.Module:
        made: nn.Module = load("torchvision").models.get_model(name, num_classes=3)
        for part in made.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        return made

    return make


# Models that are no language models: made by other libraries, which a function imports.
NETWORKS: dict[str, Callable[[Callable[[str], Any]], nn.Module]] = {
    **{f"{name} (timm)": _of_timm(name) for name in TIMM.split()},
    **{f"{name} (torchvision)": _of_torchvision(name) for name in TORCHVISION.split()},
    "UNet2D (diffusers)": _unet,
    "AutoencoderKL (diffusers)": _autoencoder,
    "Encoder (x-transformers)": _x_transformer,
    "Encoder, rotary and GLU (x-transformers)": lambda load: _x_transformer(load, rotary_pos_emb=True, ff_glu=True),
}


LIBRARIES = ("timm)", "torchvision)", "diffusers)", "x-transformers)", "peft)", "trl)")


def write_table(results: Mapping[tuple[str, str], str]) -> str:
    """The page of families and layouts: what was shown of each."""
    columns = [*dict.fromkeys(layout for _, layout in results)]
    rows = [*dict.fromkeys(family for family, _ in results)]
    lines = [f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    together: dict[tuple[str, str], list[str]] = {}  # rows of one library with the same results
    for row in rows:
        name, _, library = row.partition(" (")
        cells = " | ".join(results.get((row, column)) or "-" for column in columns)
        together.setdefault((library if library in LIBRARIES else row, cells), []).append(name)
    for (library, cells), names in together.items():
        lines.append(f"| {', '.join(names) + ' (' + library if library in LIBRARIES else library} | {cells} |")
    return _PAGE.format(table="\n".join(lines))


_PAGE = """# Models that train unchanged

Written by `make test-models`, from what passed. The models are small and random. Each starts from the same weights as
a dense copy on one process, and is compared with it:

- *T*: trained; the loss of each step, and all parameters at the end, are equal
- *S*: saved by `save_pretrained`; loaded by `from_pretrained`, and in parts by `shardwise.hf.load`
- *G*: `generate()` gives the same tokens

The layouts:

- **tp2**: layers are split over 2 ranks, by the plan that `shardwise.hf.plan` makes
- **dp2**: each of 2 ranks has its own part of the batch
- **fsdp2**: the same, and the parameters are split over the ranks as well
- **2x2**: 4 ranks, `dp` x `tp`

{table}

[How to do it](hugging_face.md), and with [Lightning, accelerate, peft and TorchRec](frameworks.md).
"""
