"""flash-attn's modules and helpers, under its names: `bert_padding`, `layers.rotary`, `modules.mha`.

A program that uses flash-attn changes the imports; flash-attn itself is not needed. flash-attn's functions are in
`flash_train.attention`.
"""

from flash_train.integrations.flash_attn.mha import (
    MHA,
    FlashCrossAttention,
    FlashSelfAttention,
    InferenceParams,
    get_alibi_slopes,
)
from flash_train.integrations.flash_attn.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

__all__ = [
    "MHA",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "InferenceParams",
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "get_alibi_slopes",
]
