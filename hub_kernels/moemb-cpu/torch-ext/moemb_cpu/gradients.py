"""When an operator must go through its autograd function."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def tracks(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be asked for.

    Inside a dual level always: the autograd functions have no forward mode and say so, where the bare operators would
    return outputs without tangents.
    """
    if not torch.is_grad_enabled():
        return False
    return forward_ad._current_level >= 0 or any(tensor is not None and tensor.requires_grad for tensor in tensors)
