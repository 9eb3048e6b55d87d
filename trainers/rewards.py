"""Rewards of rollouts: functions with TRL's signature, and the retrieval scores that they are made of.

A reward function is called as `reward(prompts, completions, completion_ids, **columns)` and returns one number per
rollout, or `None` where it has nothing to say. Beside the columns of the data set it gets, each a list with an entry
per rollout:

- `recall` (`float`): whether retrieval succeeds with the gated vectors, averaged over query -> target and back;
- `efficiency` (`float`): FLOPs removed, as a share of full compute, or of the target if there is one (at most 1);
- `flops_removed` (`float`): FLOPs removed from the pair, `1 - F / F_full`;
- `positive_similarity`, `negative_similarity` (`float`): mean cosine of the gated vectors to the full-compute vectors
  of the partner, and of all the others in the batch;
- `teacher_cosine` (`float`): mean cosine of the gated vectors to those of full compute of the same weights;
- `query_embedding`, `target_embedding` (`torch.FloatTensor` of shape `(hidden,)`): the gated vectors, of unit length;

and `trainer_state`, `log_extra` and `log_metric`, as in TRL. Function names are what they are logged under.

The reward of the paper, `R = recall@G * S + m (s+ - s-)`, is the sum of [`efficiency_reward`] and [`margin_reward`].
"""

import importlib
from collections.abc import Callable, Sequence

from torch import Tensor

from .errors import MoEMBError, nearest


class RewardError(MoEMBError, ValueError):
    """A reward function that cannot be found. The message names it and the remedy."""


def efficiency_reward(recall: Sequence[float], efficiency: Sequence[float], **kwargs) -> list[float]:
    """What is saved, where retrieval still succeeds: saving without finding is worth nothing."""
    return [found * saved for found, saved in zip(recall, efficiency, strict=True)]


def margin_reward(positive_similarity: Sequence[float], negative_similarity: Sequence[float], **kwargs) -> list[float]:
    """How far the partner stands out from the other candidates, in cosine."""
    return [near - far for near, far in zip(positive_similarity, negative_similarity, strict=True)]


def distillation_reward(teacher_cosine: Sequence[float], **kwargs) -> list[float]:
    """Minus the cosine distance to the vector of full compute: what takes the place of the KL term.

    With a frozen backbone this has to be a reward: the distance has no gradient with respect to hard actions.
    """
    return [cosine - 1 for cosine in teacher_cosine]


REWARDS: dict[str, Callable[..., list[float | None]]] = {
    "efficiency": efficiency_reward,
    "margin": margin_reward,
    "distillation": distillation_reward,
}


def find_reward(name: str) -> Callable[..., list[float | None]]:
    """The reward function of a name in `REWARDS`, or of `module:function`.

    Raises:
        RewardError: if there is none.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, separator, function = name.partition(":")
    if not separator:
        raise RewardError(
            f"no reward is called '{name}'{nearest(name, REWARDS)}; write one of {list(REWARDS)}, or "
            "'module:function' for one of your own"
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RewardError(
            f"the reward '{name}' cannot be imported: {error}; the module must be on the Python path"
        ) from error
    if not callable(found):
        raise RewardError(f"the reward '{name}' is a {type(found).__name__}, not a function")
    return found


def retrieval_scores(
    vectors: Tensor, positive: Tensor, candidates: Tensor, keys: Tensor, recall_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """How well gated vectors find their partners among full-compute vectors.

    Candidates with the content of the partner count neither for nor against.

    Args:
        vectors (`torch.FloatTensor` of shape `(rollouts, hidden)`): gated, of unit length.
        positive (`torch.LongTensor` of shape `(rollouts,)`): number of each one's partner among the candidates.
        candidates (`torch.FloatTensor` of shape `(candidates, hidden)`): of full compute, of unit length.
        keys (`torch.LongTensor` of shape `(candidates,)`): equal for equal content.
        recall_k (`int`): retrieval succeeds if the partner is among so many best.

    Returns:
        Three `torch.FloatTensor` of shape `(rollouts,)`: 1 where retrieval succeeds, else 0; cosine to the partner;
        mean cosine to the negatives (0 if there are none).
    """
    similarity = vectors.float() @ candidates.float().T
    partner = similarity.gather(1, positive[:, None]).squeeze(1)
    negatives = keys[None] != keys[positive][:, None]
    better = ((similarity > partner[:, None]) & negatives).sum(dim=1)
    mean = (similarity * negatives).sum(dim=1) / negatives.sum(dim=1).clamp_min(1)
    return (better < recall_k).float(), partner, mean


__all__ = [
    "REWARDS",
    "RewardError",
    "distillation_reward",
    "efficiency_reward",
    "find_reward",
    "margin_reward",
    "retrieval_scores",
]
