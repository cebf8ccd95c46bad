"""Constants and helpers that the kernels share with each other and with `ops`.

It does not import Triton, since `ops` imports it on every device.
"""

from torch import Tensor

IGNORE_INDEX = -100  # the label of a position without a loss, as in torch.nn.functional.cross_entropy
MAX_LOGIT_TOKENS = 2048  # tokens whose logits exist at one time; with fewer, accumulating the weight's gradient is slow


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
