"""A tensor that claims to be on a GPU, for tests of the launch cache without one."""

import torch


class OnCuda:
    def __init__(self, shape=(2, 80, 4, 64), stride=(20480, 256, 64, 1), dtype=torch.bfloat16, address=4096):
        self.device, self.shape, self.dtype, self.address = torch.device("cuda", 0), shape, dtype, address
        self.strides = stride

    def stride(self):
        return self.strides

    def data_ptr(self):
        return self.address
