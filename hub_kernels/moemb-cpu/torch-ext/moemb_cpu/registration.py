"""Shape rules of the operators, for `torch.compile`."""

from collections.abc import Callable

import torch

from ._ops import add_op_namespace_prefix


def register_fake(name: str) -> Callable:
    """Decorator: `function` takes the operator's arguments and does nothing, for operators that only write outputs.

    The same build may be loaded from two folders (a checkout and an environment); its operators exist once, so the
    second registration is left out.
    """

    def decorate(function: Callable) -> Callable:
        qualified = add_op_namespace_prefix(name)
        if torch._library.simple_registry.singleton.find(qualified).fake_impl.kernel is None:
            torch.library.register_fake(qualified, function)
        return function

    return decorate
