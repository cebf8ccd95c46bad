"""A causal language model of `transformers` as `CausalLMModule` trains it: packed, with the loss of a whole token mean.

    from flash_train.integrations.causal_lm import CausalLM
    from flash_train.training import CausalLMModule

    module = CausalLMModule(CausalLM(AutoModelForCausalLM.from_pretrained("...")))

The model keeps its own attention; `register` of `flash_train.integrations.transformers` gives it this project's.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flash_train.attention import Packing
from flash_train.integrations.transformers import register
from flash_train.model import ops

# Settings of models whose logits are more than a product with the head's weight
CHANGED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


class CausalLM(nn.Module):
    """A model of `transformers`, with the methods that `CausalLMModule` calls.

    Args:
        model: a model for causal language modelling, such as `AutoModelForCausalLM` returns. Its attention is replaced.
        backend: of the attention, see `register`.

    Attributes:
        blocks: its decoder layers.
    """

    def __init__(self, model: Any, *, backend: str = "auto") -> None:
        super().__init__()
        model.set_attn_implementation(register(backend=backend))
        self.model = model

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.base_model.layers

    def forward(self, tokens: Tensor, *, positions: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Return the logits of the next token, (batch, seq_len, vocab_size); arguments as `Transformer` takes them."""
        return self.model(tokens, position_ids=positions, packing=packing, use_cache=False).logits

    def loss(
        self, tokens: Tensor, labels: Tensor, *, positions: Tensor | None = None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the cross entropies in nats (fp32 scalar), and the number of labels (int64 scalar).

        Logits are computed a part at a time, unless the model changes them after the head's product.

        Args:
            labels: int64 (batch, seq_len), the next tokens; -100 is ignored.
        """
        labels = labels.reshape(-1)
        count = (labels != ops.IGNORE_INDEX).sum()
        config = self.model.config.get_text_config()
        if any(getattr(config, name, None) is not None for name in CHANGED_LOGITS):
            logits = self(tokens, positions=positions, packing=packing).flatten(0, 1)
            return F.cross_entropy(logits.float(), labels, ignore_index=ops.IGNORE_INDEX, reduction="sum"), count
        hidden = self.model.base_model(
            input_ids=tokens, position_ids=positions, packing=packing, use_cache=False
        ).last_hidden_state
        head = self.model.get_output_embeddings().weight
        return ops.linear_cross_entropy(hidden.flatten(0, 1), head, labels), count

    def model_flops(self, n_tokens: int, pairs: int) -> int:
        """Return the FLOPs of a forward and backward over `n_tokens`, with `pairs` query-key pairs in each layer.

        It counts 6 for each weight of a product and each token, and attention's products. Of experts it counts those
        that a token is sent to. A layer with a sliding window has at most as many pairs for each token.
        """
        config = self.model.config.get_text_config()
        heads, width = config.num_attention_heads, config.hidden_size
        head_dim = getattr(config, "head_dim", None) or width // heads
        per_pair = 12 * heads * head_dim
        if getattr(config, "v_head_dim", None):  # latent attention: queries and keys have another size than values
            per_pair = 6 * heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        if not getattr(config, "layer_types", None) and window:
            kinds = ["sliding_attention"] * config.num_hidden_layers
        windowed = sum(kind == "sliding_attention" for kind in kinds)
        in_window = pairs if not window else min(pairs, n_tokens * window)
        attention = per_pair * (windowed * in_window + (len(kinds) - windowed) * pairs)
        return 6 * self._used_weights * n_tokens + attention

    @cached_property
    def _used_weights(self) -> int:
        """Count the weights that multiply a token: of linear layers, and of the experts that it is sent to."""
        config = self.model.config.get_text_config()
        experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_local_experts", None)
        experts = experts or getattr(config, "num_experts", None)
        count, seen = 0, set()
        for layer in self.model.modules():
            for name, weight in layer.named_parameters(recurse=False):
                if id(weight) in seen and not isinstance(layer, nn.Linear):
                    continue
                if isinstance(layer, nn.Linear) and name == "weight":
                    count += weight.numel()
                elif weight.dim() == 3 and experts and len(weight) == experts:
                    count += weight.numel() * config.num_experts_per_tok // experts
                seen.add(id(weight))
        return count
