"""What the kernels share with each other and with `ops`. Imports no Triton: `ops` reads it on every device."""

from torch import Tensor

IGNORE_INDEX = -100  # a label that counts for nothing, as in torch.nn.functional.cross_entropy
MAX_LOGIT_TOKENS = 2048  # tokens whose logits exist at one time; fewer make the weight's gradient slower to add up


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
