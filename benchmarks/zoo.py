"""The encoders that coverage is counted on: tiny, random, two or three layers each.

Every row says what its module holds, counted by reading the module's code: that is what raising has to find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tfx.models.config import EncoderConfig
from tfx.models.encoder import Encoder

__all__ = ["ZOO", "Row", "make"]

LAYERS = 2
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    # Wide enough that a wrong GELU, epsilon or mask shows, small enough that softmax does not saturate.
    "initializer_range": 0.2,
}
_TEXT: dict[str, Any] = {**_SIZES, "vocab_size": 99, "max_position_embeddings": 80, "type_vocab_size": 2}
_IDS = ("input_ids:int64:batch,sequence", "attention_mask:int64:batch,sequence")
_PIXELS = ("pixel_values:float32:batch,3,16,16",)


@dataclasses.dataclass(frozen=True)
class Row:
    """One encoder of the zoo.

    Attributes:
        name: as tables show it.
        build: makes the module; weights are drawn from torch's generator, which :func:`make` seeds.
        inputs: ``name:dtype:axes`` each.
        counts: what the module holds.
        foldable: how many of them work on constants alone, so that an exporter may have computed them already.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...] = _IDS
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    foldable: Mapping[str, int] = dataclasses.field(default_factory=dict)


def make(row: Row) -> nn.Module:
    """The row's module in evaluation mode; the same weights each time."""
    torch.manual_seed(0)
    module = row.build().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # Norms begin as ones and zeros, which would hide a scale or a bias that gets lost.
            if parameter.dim() == 1 and "embed" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


class Text(nn.Module):
    """An encoder that takes ``input_ids`` and ``attention_mask``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Ids and mask (B, S) -> last_hidden_state (B, S, d)."""
        returned = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return {"last_hidden_state": returned["last_hidden_state"]}


class Single(nn.Module):
    """An encoder of images or sound: one tensor, under the name that the model gives it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Pixels(Single):
    """An encoder of images."""

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Images (B, 3, H, W) -> last_hidden_state (B, patches, d)."""
        return {"last_hidden_state": self.model(pixel_values=pixel_values)["last_hidden_state"]}


class Mel(Single):
    """An encoder of spectrograms."""

    def forward(self, input_features: Tensor) -> dict[str, Tensor]:
        """Spectrograms (B, mel, frames) -> last_hidden_state (B, frames / 2, d)."""
        return {"last_hidden_state": self.model(input_features)["last_hidden_state"]}


class Wave(Single):
    """An encoder of raw sound."""

    def forward(self, input_values: Tensor) -> dict[str, Tensor]:
        """Sound (B, samples) -> last_hidden_state (B, frames, d)."""
        return {"last_hidden_state": self.model(input_values)["last_hidden_state"]}


class TorchLayers(nn.Module):
    """``nn.TransformerEncoder`` behind an embedding."""

    def __init__(self, masks: str = "padding", nested: bool = False, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=batch_first, activation="gelu", **options)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=nested)
        self._masks = masks
        self._batch_first = batch_first

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Ids and mask (B, S) -> last_hidden_state (B, S, d)."""
        x = self.embedding(input_ids)
        length = input_ids.shape[1]
        window = None
        if self._masks == "both":
            places = torch.arange(length, device=input_ids.device)
            window = (places[:, None] - places[None, :]).abs() > 4
        x = x if self._batch_first else x.transpose(0, 1)
        x = self.encoder(x, mask=window, src_key_padding_mask=attention_mask == 0)
        return {"last_hidden_state": x if self._batch_first else x.transpose(0, 1)}


class Own(nn.Module):
    """Attention as people write it themselves, in the ways that no model above does.

    ``chunk`` and ``reshape`` split one packed projection, ``flat`` projects (B * S, d), which TorchScript writes as
    Gemm, ``wide`` has values wider than queries and keys.
    """

    def __init__(self, projection: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, 32)
        self.layers = nn.ModuleList(OwnLayer(projection) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Ids and mask (B, S) -> last_hidden_state (B, S, d)."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return {"last_hidden_state": self.norm(x)}


class OwnLayer(nn.Module):
    """Norms first, 4 heads of 8."""

    def __init__(self, projection: str) -> None:
        super().__init__()
        self.projection = projection
        self.values = 48 if projection == "wide" else 32
        widths = [32 + 32 + self.values] if projection in ("chunk", "reshape") else [32, 32, self.values]
        self.project = nn.ModuleList(nn.Linear(32, width) for width in widths)
        self.out = nn.Linear(self.values, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, S, d) and (B, S) -> (B, S, d)."""
        x = x + self.attention(self.norms[0](x), attention_mask)
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    def attention(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, S, d) and (B, S) -> (B, S, d)."""
        B, S, d = x.shape
        if self.projection == "reshape":
            packed = self.project[0](x).reshape(B, S, 3, 4, 8).permute(2, 0, 3, 1, 4)  # (3, B, H, S, 8)
            q, k, v = packed[0], packed[1], packed[2]
        else:
            if self.projection == "chunk":
                parts = self.project[0](x).chunk(3, dim=-1)
            else:
                flat = x.reshape(-1, d) if self.projection == "flat" else x
                parts = [project(flat) for project in self.project]
            q, k, v = (part.reshape(B, S, 4, -1).transpose(1, 2) for part in parts)  # (B, H, S, d / H)
        if self.projection == "chunk":
            mask = attention_mask[:, None, None, :] != 0
            heads = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        elif self.projection == "wide":
            scores = (q @ k.transpose(-1, -2)) / 8**0.5
            heads = scores.masked_fill(attention_mask[:, None, None, :] == 0, float("-inf")).softmax(-1) @ v
        else:
            bias = (1.0 - attention_mask[:, None, None, :].to(q.dtype)) * -10000.0
            heads = (torch.matmul(q * 8**-0.5, k.transpose(-1, -2)) + bias).softmax(-1) @ v
        merged = heads.transpose(1, 2)  # (B, S, H, d / H)
        if self.projection == "flat":
            return self.out(merged.reshape(B * S, self.values)).reshape(B, S, d)
        return self.out(merged.reshape(B, S, self.values))


def _reference(**options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = EncoderConfig(
            d_model=32, heads=4, layers=LAYERS, d_ff=48, vocab_size=99, max_len=80, **options
        )  # fmt: skip
        return Encoder(config)

    return build


def _hf(
    kind: str,
    implementation: str,
    wrapper: Callable[[nn.Module], nn.Module] = Text,
    model: Callable[[Any], nn.Module] | None = None,
    **options: Any,
) -> Callable[[], nn.Module]:
    """``transformers.<kind>Model`` of ``<kind>Config``, or what ``model`` makes of that configuration."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**options)
        config._attn_implementation = implementation
        return wrapper((model or getattr(transformers, f"{kind}Model"))(config))

    return build


def _whisper(config: Any) -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(config)


def _t5(config: Any) -> nn.Module:
    from transformers import T5EncoderModel

    return T5EncoderModel(config)


def _pruned(config: Any) -> nn.Module:
    """BERT with 4 heads in the first layer and 3 in the second, as pruning leaves it."""
    from transformers import BertModel

    model = BertModel(config)
    attention: Any = model.encoder.layer[1].attention
    size = 3 * 8
    for name in ("query", "key", "value"):
        setattr(attention.self, name, nn.Linear(32, size))
    attention.output.dense = nn.Linear(size, 32)
    attention.self.num_attention_heads, attention.self.all_head_size = 3, size
    return model


def _counts(attention: int = LAYERS, **others: int) -> dict[str, int]:
    return {"attention": attention, "layer_norm": 0, "rms_norm": 0, "gelu": LAYERS, "rotary": 0, **others}


_POST = _counts(layer_norm=2 * LAYERS + 1)
_MODERN: dict[str, Any] = {
    **{k: v for k, v in _TEXT.items() if k != "type_vocab_size"},
    "num_hidden_layers": 3,
    "local_attention": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
_DISTIL: dict[str, Any] = {
    "dim": 32, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48, "vocab_size": 99, "max_position_embeddings": 80,
    "initializer_range": 0.2,
}  # fmt: skip
_DEBERTA: dict[str, Any] = {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
_DEBERTA_V3: dict[str, Any] = {
    **_DEBERTA,
    "share_att_key": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
}  # fmt: skip
_T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_heads": 4, "vocab_size": 99,
    "feed_forward_proj": "gated-gelu", "initializer_factor": 0.3, "relative_attention_num_buckets": 8,
}  # fmt: skip
_VISION: dict[str, Any] = {**_SIZES, "image_size": 16, "patch_size": 8}
_CLIP: dict[str, Any] = {k: v for k, v in _VISION.items() if k != "initializer_range"}
_WHISPER: dict[str, Any] = {
    "d_model": 32, "encoder_layers": LAYERS, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 20, "init_std": 0.2,
}  # fmt: skip
_WAVE: dict[str, Any] = {
    **_SIZES,
    "conv_dim": (16, 16), "conv_stride": (3, 2), "conv_kernel": (5, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def _both(
    name: str, counts: Mapping[str, int], kind: str, *wrapper: Any, inputs: tuple[str, ...] = _IDS, **options: Any
):
    """One row with eager and one with sdpa attention."""
    return [Row(f"{name} {form}", _hf(kind, form, *wrapper, **options), inputs, counts) for form in ("eager", "sdpa")]


ZOO: tuple[Row, ...] = (
    Row("reference post", _reference(), counts=_counts(layer_norm=2 * LAYERS)),
    Row("reference pre", _reference(norm="pre"), counts=_counts(layer_norm=2 * LAYERS + 1)),
    Row("reference concat", _reference(combine="concat"), counts=_counts(layer_norm=2 * LAYERS)),
    Row("TransformerEncoder post", TorchLayers, counts=_counts(layer_norm=2 * LAYERS)),
    Row("TransformerEncoder pre", lambda: TorchLayers(norm_first=True), counts=_counts(layer_norm=2 * LAYERS)),
    Row("TransformerEncoder nested", lambda: TorchLayers(nested=True), counts=_counts(layer_norm=2 * LAYERS)),
    Row("TransformerEncoder two masks", lambda: TorchLayers("both"), counts=_counts(layer_norm=2 * LAYERS)),
    Row("TransformerEncoder seq first", lambda: TorchLayers(batch_first=False), counts=_counts(layer_norm=2 * LAYERS)),
    *(Row(f"own {form}", lambda form=form: Own(form), counts=_counts(layer_norm=2 * LAYERS + 1))
      for form in ("chunk", "reshape", "flat", "wide")),
    *_both("BERT", _POST, "Bert", **_TEXT),
    *_both("RoBERTa", _POST, "Roberta", **_TEXT, pad_token_id=1),
    *_both("XLM-R", _POST, "XLMRoberta", **_TEXT, pad_token_id=1),
    *_both("DistilBERT", _POST, "DistilBert", **_DISTIL),
    *_both("ELECTRA", _POST, "Electra", **_TEXT, embedding_size=24),
    *_both("ALBERT", _POST, "Albert", **_TEXT, embedding_size=24, hidden_act="gelu_new"),
    Row("MPNet", _hf("MPNet", "eager", **_TEXT), counts=_POST),
    Row("DeBERTa-v2", _hf("DebertaV2", "eager", **_DEBERTA), counts=_POST),
    # The norm of the relative positions is one of constants.
    Row("DeBERTa-v3", _hf("DebertaV2", "eager", **_DEBERTA_V3), counts=_counts(layer_norm=2 * LAYERS + 2),
        foldable={"layer_norm": 1}),
    *_both("ModernBERT", _counts(3, layer_norm=6 + 1, gelu=3, rotary=6), "ModernBert", **_MODERN),
    *_both("NomicBERT", _counts(layer_norm=2 * LAYERS + 1, gelu=0, rotary=2 * LAYERS), "NomicBert", **_TEXT),
    *_both("T5 encoder", _counts(rms_norm=2 * LAYERS + 1), "T5", Text, _t5, **_T5),
    *_both("ViT", _POST, "ViT", Pixels, inputs=_PIXELS, **_VISION),
    *_both("DINOv2", _POST, "Dinov2", Pixels, inputs=_PIXELS, **_VISION),
    *_both("CLIP text", _POST, "CLIPText", **{k: v for k, v in _TEXT.items() if "range" not in k},
           bos_token_id=1, eos_token_id=2),
    *_both("CLIP vision", _POST, "CLIPVision", Pixels, inputs=_PIXELS, **_CLIP),
    *_both("SigLIP vision", _POST, "SiglipVision", Pixels, inputs=_PIXELS, **_CLIP),
    *_both("Whisper encoder", _counts(layer_norm=2 * LAYERS + 1, gelu=LAYERS + 2), "Whisper", Mel, _whisper,
           inputs=("input_features:float32:batch,8,40",), **_WHISPER),
    *_both("Wav2Vec2", _counts(layer_norm=2 * LAYERS + 2, gelu=LAYERS + 3), "Wav2Vec2", Wave,
           inputs=("input_values:float32:batch,400",), **_WAVE),
    *_both("BERT pruned", _POST, "Bert", Text, _pruned, **_TEXT),
)  # fmt: skip
