"""Lets `CausalLMModule` train a causal language model of `transformers`: packed rows, and a loss averaged over tokens.

    from flash_train.integrations.causal_lm import CausalLM
    from flash_train.training import CausalLMModule

    module = CausalLMModule(CausalLM(AutoModelForCausalLM.from_pretrained("...")))

This project's attention replaces the model's own (`register` of `flash_train.integrations.transformers`).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flash_train.attention import Packing
from flash_train.integrations.packed_documents import check_attention_only, check_documents_apart, default_positions
from flash_train.integrations.transformers import register
from flash_train.model import ops

# Settings of models whose logits are more than a product with the head's weight
CHANGED_LOGITS = ("final_logit_softcapping", "logits_soft_cap", "logits_scaling", "logit_scale", "lm_head_multiplier")


class CausalLM(nn.Module):
    """A model of `transformers`, with the methods that `CausalLMModule` calls.

    It takes models that compute each document of a packed row as by itself. The configuration must name no layers but
    attention: the state of others passes from one document to the next. The model then computes two rows of two short
    documents, in another order in each, and a document's hidden states must be the same in both. This second check is
    left out, with a message, if the weights are not plain tensors of one dtype on one device, such as meta, sharded or
    quantised ones. It leaves modes, gradients, buffers and random numbers as they were.

    Args:
        model: a model for causal language modelling, such as `AutoModelForCausalLM` returns, also with adapters of
            PEFT. Its attention is replaced.
        backend: of the attention, see `register`.

    Attributes:
        blocks: its decoder layers, for models that name them `layers`.

    Raises:
        TypeError: `model` is no such model.
        ValueError: its attention cannot be replaced, it does not keep packed documents apart, it does not name its
            decoder, or PEFT puts tokens of its own before each row.
        NotImplementedError: its mask or scores are others than this attention computes.
    """

    def __init__(self, model: Any, *, backend: str = "auto") -> None:
        super().__init__()
        base = _without_adapters(model)
        if not hasattr(base, "get_output_embeddings") or base.get_output_embeddings() is None:
            kind = f"{model!r}" if isinstance(model, str) else f"a {type(base).__name__}"
            raise TypeError(f"model must be a causal language model, as AutoModelForCausalLM returns, not {kind}")
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(f"{type(model.active_peft_config).__name__}: CausalLM trains adapters, but no prompts")
        if base.base_model is base:
            raise ValueError(
                f"{type(base).__name__} has no decoder named {base.base_model_prefix!r}: CausalLM takes models whose "
                "base_model returns hidden states"
            )
        check_attention_only(base)
        register(backend=backend)  # an unknown backend is refused first
        name = register()  # the weights may be on a CPU still, where not all backends run
        base.set_attn_implementation(name)
        if base.config.get_text_config()._attn_implementation != name:
            raise ValueError(f"{type(base).__name__} has attention of its own, which CausalLM cannot replace")
        check_documents_apart(base)
        register(backend=backend)
        self.model = model

    @property
    def blocks(self) -> nn.ModuleList:
        return _without_adapters(self.model).base_model.layers

    def forward(self, tokens: Tensor, *, positions: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Return the logits of the next token, (batch, seq_len, vocab_size); arguments as `Transformer` takes them."""
        positions = default_positions(tokens, packing) if positions is None else positions
        return self.model(tokens, position_ids=positions, packing=packing, use_cache=False).logits

    def loss(
        self, tokens: Tensor, labels: Tensor, *, positions: Tensor | None = None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the cross entropies in nats (fp32 scalar), and the number of labels (int64 scalar).

        Logits are computed a part at a time, unless the head has a bias or the model changes its products.

        Args:
            labels: int64 (batch, seq_len), the next tokens; -100 is ignored.
        """
        labels = labels.reshape(-1)
        count = (labels != ops.IGNORE_INDEX).sum()
        model = _without_adapters(self.model)
        head, config = model.get_output_embeddings(), model.config.get_text_config()
        if head.bias is not None or any(getattr(config, name, None) is not None for name in CHANGED_LOGITS):
            logits = self(tokens, positions=positions, packing=packing).flatten(0, 1)
            return F.cross_entropy(logits.float(), labels, ignore_index=ops.IGNORE_INDEX, reduction="sum"), count
        positions = default_positions(tokens, packing) if positions is None else positions
        hidden = model.base_model(
            input_ids=tokens, position_ids=positions, packing=packing, use_cache=False
        ).last_hidden_state
        return ops.linear_cross_entropy(hidden.flatten(0, 1), head.weight, labels), count

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


def _without_adapters(model: Any) -> Any:
    """Return the model of `transformers` within a model of PEFT, whose layers then have the adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
