"""AdamW on float32 master copies of (possibly bfloat16) weights, with an exponential moving average of the masters.

Pure bfloat16 weights run twice as fast through AMX as autocast's casts on every call, but an update smaller than
2 ** -8 of a weight is lost in them. So the optimizer keeps the float32 weights and writes their rounding to the model.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .distributed import mesh_of, whole


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose parameters are float32 masters of the model's parameters.

    Args:
        groups (`Iterable[dict]`):
            Parameter groups of *model* parameters (`params`, and optionally `weight_decay`, `lr`).
        lr (`float`): Peak learning rate.
        betas (`tuple[float, float]`, *optional*, defaults to `(0.9, 0.98)`): AdamW's.
        eps (`float`, *optional*, defaults to 1e-8): AdamW's.
        ema_decay (`float`, *optional*, defaults to 0.0):
            Decay per step of the moving average of the masters; 0 keeps none. The first steps use
            `(1 + step) / (10 + step)` while that is smaller, so that the average forgets the initialisation.
    """

    def __init__(
        self,
        groups: Iterable[dict],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        ema_decay: float = 0.0,
    ):
        self.model_parameters: list[nn.Parameter] = []
        master_groups = []
        for group in groups:
            parameters = list(group["params"])
            self.model_parameters += parameters
            masters = [nn.Parameter(p.detach().float().clone()) for p in parameters]
            master_groups.append({**group, "params": masters})
        self.masters = [master for group in master_groups for master in group["params"]]
        self.ema_decay = ema_decay
        self.ema = [master.detach().clone() for master in self.masters] if ema_decay else []
        self.updates = 0
        super().__init__(master_groups, lr=lr, betas=betas, eps=eps, fused=True)

    def gather_gradients(self) -> None:
        """Moves the model's gradients to the masters in float32 and clears them on the model."""
        for parameter, master in zip(self.model_parameters, self.masters, strict=True):
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Gathers the gradients and scales them so that their joint norm is at most `max_norm`; returns the norm."""
        self.gather_gradients()
        meshes: dict = defaultdict(list)
        for master in self.masters:
            if master.grad is not None:
                meshes[mesh_of(master)].append(master)
        if set(meshes) <= {None}:
            return nn.utils.clip_grad_norm_(self.masters, max_norm)
        # norms and products take tensors that are spread over the same processes only
        norms = [nn.utils.get_total_norm([master.grad for master in masters]) for masters in meshes.values()]
        norm = torch.linalg.vector_norm(torch.stack([whole(part) for part in norms]))
        for masters in meshes.values():
            nn.utils.clip_grads_with_norm_(masters, max_norm, norm)
        return norm

    @torch.no_grad()
    def step(self, closure=None):
        self.gather_gradients()
        result = super().step(closure)
        super().zero_grad()  # a parameter that is frozen in the next step must not be moved by this one's gradient
        self.updates += 1
        self._write(self.masters)
        if self.ema:
            decay = min(self.ema_decay, (1 + self.updates) / (10 + self.updates))
            torch._foreach_lerp_(self.ema, [master.detach() for master in self.masters], 1.0 - decay)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter in self.model_parameters:
            parameter.grad = None

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Puts the averaged weights into the model inside the block (no-op without `ema_decay`)."""
        if self.ema:
            self._write(self.ema)
        try:
            yield
        finally:
            if self.ema:
                self._write(self.masters)

    @torch.no_grad()
    def _write(self, weights: list[torch.Tensor]) -> None:
        _copy(self.model_parameters, [weight.detach() for weight in weights])

    def state_dict(self) -> dict:
        """AdamW's state plus `masters`, `ema` and `updates`: all that an exact continuation needs."""
        state = super().state_dict()
        state["masters"] = [master.detach() for master in self.masters]
        state["ema"] = self.ema
        state["updates"] = self.updates
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores a [`state_dict`] and writes the masters to the model.

        A state without a moving average gives one that starts at the restored masters, when `ema_decay` is set.

        Raises:
            ValueError: If the state is of another set of parameters.
        """
        state = dict(state_dict)
        masters, ema, self.updates = state.pop("masters"), state.pop("ema"), state.pop("updates")
        shapes = [tuple(master.shape) for master in masters]
        expected = [tuple(master.shape) for master in self.masters]
        if shapes != expected:
            raise ValueError(
                f"The optimizer state holds {len(shapes)} parameters that do not fit the {len(expected)} of this "
                "model: start from the weights alone with --init_from instead of resuming."
            )
        super().load_state_dict(state)
        with torch.no_grad():
            _copy(self.masters, list(masters))
            if self.ema_decay:
                self.ema = [average.clone() for average in (ema or masters)]
        self._write(self.masters)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies tensors, at once where they are not spread over processes."""
    if all(mesh_of(target) is None for target in targets):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
