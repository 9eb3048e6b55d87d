"""A planted task: a model and items of which it is known what may be dropped, for checks that a training learns.

Every item holds content tokens, which say what it is about, among distractors, all of them visual. The weights of a
small random model are changed so that distractors have no effect: their direction `u` is taken out of what every layer
reads and writes, their writes to the delta rule are closed, and the convolutions see one token. A distractor therefore
stays `u` from the first block to the last, adds nothing to any other token's state beyond a share of the attention's
softmax, and its experts give zero. Dropping all distractors and no content is the best that a gate can do; so is
skipping their experts. A gate sees the difference in one direction of the state, and has to find it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling_moemb import MoEMBConfig, MoEMBModel
from modeling_moemb.compute_moemb import count_flops
from modeling_moemb.gating_moemb import GatePolicy, GateQuery

from .adaptive_data import AdaptiveBatch, Pairs


_CLOSED = -40.0  # before a sigmoid or softplus


@dataclass(frozen=True)
class PlantedSettings:
    """
    Sizes of the task.

    Args:
        content (`int`): content tokens of an item.
        distractors (`int`): distractors of an item.
        topics (`int`): content ids to draw from.
        hidden_size (`int`): width of the model.
        blocks (`int`): decoder blocks, every fourth with attention.
    """

    content: int = 6
    distractors: int = 18
    topics: int = 64
    hidden_size: int = 32
    blocks: int = 4


class PlantedTask:
    """
    The task, and the model that it is planted in.

    Args:
        seed (`int`): of the weights and the items.
        settings ([`PlantedSettings`], *optional*): sizes.

    Attributes:
        model (`MoEMBModel`): float32, without gates.
    """

    def __init__(self, seed: int = 0, settings: PlantedSettings | None = None):
        self.seed, self.settings = seed, settings or PlantedSettings()
        topics = self.settings.topics
        self.text_ids = range(4)
        self.content_ids = range(4, 4 + topics)
        self.distractor_ids = range(4 + topics, 4 + 2 * topics)
        self.emb_id = 4 + 2 * topics
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.model = MoEMBModel(self._config()).eval()
            _plant(self.model, self.distractor_ids)

    def _config(self) -> MoEMBConfig:
        width, blocks = self.settings.hidden_size, self.settings.blocks
        text = {
            "vocab_size": self.emb_id + 8, "hidden_size": width, "num_hidden_layers": blocks,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                                "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        }  # fmt: skip
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 8,
                  "out_hidden_size": width, "num_position_embeddings": 16}  # fmt: skip
        ids = {name: self.emb_id + 1 + place for place, name in enumerate(
            ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"))}  # fmt: skip
        return MoEMBConfig(text_config=text, vision_config=vision, emb_token_id=self.emb_id, **ids)

    def batch(self, step: int, pairs: int = 16) -> dict[str, Tensor]:
        """Inputs of `pairs` queries, then their documents: the same content, in another order among others.

        Returns:
            `dict[str, torch.Tensor]`: `input_ids`, `mm_token_type_ids` and `position_ids`, int64
            `[2 * pairs, tokens]`.
        """
        sizes, rng = self.settings, np.random.default_rng([self.seed, step])
        queries, documents = [], []
        for _ in range(pairs):
            content = rng.choice(self.content_ids, sizes.content, replace=False)
            queries.append(self._item(content, rng))
            documents.append(self._item(content, rng))
        ids = torch.tensor(np.array(queries + documents))
        visual = torch.zeros_like(ids)
        visual[:, 1:-1] = 1
        places = torch.arange(ids.shape[1]).expand_as(ids)
        return {"input_ids": ids, "mm_token_type_ids": visual, "position_ids": places}

    def _item(self, content: np.ndarray, rng: np.random.Generator) -> list[int]:
        others = rng.choice(self.distractor_ids, self.settings.distractors)
        place = rng.permutation(len(content) + len(others))  # content keeps its order: order carries meaning
        is_content = np.zeros(len(place), dtype=bool)
        is_content[place[: len(content)]] = True
        body = np.empty(len(place), dtype=np.int64)
        body[is_content], body[~is_content] = content, others
        return [0, *body.tolist(), self.emb_id]

    def distractors(self, inputs: dict[str, Tensor]) -> Tensor:
        """`torch.BoolTensor` `[items, tokens]`: where distractors stand."""
        ids = inputs["input_ids"]
        return (ids >= self.distractor_ids.start) & (ids < self.distractor_ids.stop)

    def oracle(self, inputs: dict[str, Tensor]) -> GatePolicy:
        """The best policy for these inputs: it saves on distractors, and on nothing else."""
        gone = self.distractors(inputs).flatten()

        def decide(query: GateQuery) -> Tensor:
            saved = gone.to(query.source.device)[query.source % len(gone)]
            return saved if query.logits.dim() == 1 else saved[:, None].expand(query.logits.shape)

        return decide

    @torch.no_grad()
    def reward(
        self,
        model: Any,
        budget: dict[str, Any],
        steps: range,
        policy: str = "gates",
        pairs: int = 16,
        recall_k: int = 1,
    ) -> float:
        """Mean reward: recall times the FLOPs removed of those that the oracle removes (at most 1), plus the margin.

        Candidates are the other side's vectors of full compute; the margin is the cosine to the right one less the
        mean cosine to the wrong ones.

        Args:
            model (`MoEMBModel`): the model.
            budget (`dict`): the compute budget that its gates are at work in.
            steps (`range`): numbers of the batches, apart from those of the training.
            policy (`str`, *optional*, defaults to `"gates"`): `"gates"` as trained, `"oracle"`, or `"none"`.
            pairs (`int`, *optional*, defaults to 16): pairs in a batch.
            recall_k (`int`, *optional*, defaults to 1): the right one must be among so many best.
        """
        total = []
        for step in steps:
            inputs = self.batch(step, pairs)
            full = self._run(model, inputs, {}, None)
            best = self._run(model, inputs, budget, self.oracle(inputs))
            done = {"gates": None, "oracle": best, "none": full}[policy]
            done = self._run(model, inputs, budget, None) if done is None else done
            saved = min((full[1] - done[1]) / (full[1] - best[1]), 1.0)
            opposite = torch.cat([full[0][pairs:], full[0][:pairs]]).view(2, pairs, -1)
            scores = torch.einsum("spd,sqd->spq", done[0].view(2, pairs, -1), opposite)
            right = scores.diagonal(dim1=1, dim2=2)
            recall = ((scores > right[..., None]).sum(-1) < recall_k).float()
            margin = right - (scores.sum(-1) - right) / (pairs - 1)
            total.append((recall * saved + margin).mean().item())
        return float(np.mean(total))

    @staticmethod
    def _run(model: Any, inputs: dict[str, Tensor], budget: dict, policy: GatePolicy | None) -> tuple[Tensor, int]:
        output = model(**inputs, adaptive_compute=budget, gate_policy=policy, pooled_only=True, output_compute=True)
        return F.normalize(output.pooler_output.float(), dim=-1), count_flops(model.config, output.compute).decoder


@torch.no_grad()
def _plant(model: MoEMBModel, distractor_ids: range) -> None:
    """Makes the direction of the distractors one that no layer reads or writes."""
    table = model.get_input_embeddings().weight
    table.normal_(0, 1)
    direction = F.normalize(torch.randn(table.shape[1]), dim=0)
    table -= (table @ direction)[:, None] * direction
    for place in distractor_ids:
        table[place] = direction * table.shape[1] ** 0.5

    def blind(weight: Tensor, scale: float = 1.0) -> None:
        weight.normal_(0, scale / weight.shape[-1] ** 0.5)
        weight -= (weight @ direction)[..., None] * direction

    def mute(weight: Tensor, scale: float) -> None:
        weight.normal_(0, scale / weight.shape[-1] ** 0.5)
        along = torch.einsum("d,...di->...i", direction, weight)
        weight -= direction[:, None] * along[..., None, :]

    for layer in model.language_model.layers:
        if layer.block_type == "linear_attention":
            mixer = layer.linear_attn
            for projection in (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_a, mixer.in_proj_b):
                blind(projection.weight)
            strength = table.shape[1] ** 0.5  # what a normed distractor measures along its direction
            for projection in (mixer.in_proj_a, mixer.in_proj_b):
                projection.weight += _CLOSED / strength * direction
            mixer.conv1d.weight.zero_()[..., -1] = 1
            mixer.A_log.fill_(-3.0)
            mute(mixer.out_proj.weight, 2.0)
        else:
            mixer = layer.self_attn
            for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj):
                blind(projection.weight)
            mute(mixer.o_proj.weight, 2.0)
        blind(layer.mlp.gate.weight, 2.0)
        blind(layer.mlp.experts.gate_up_proj)
        mute(layer.mlp.experts.down_proj, 1.0)
        for projection in (layer.mlp.shared_expert.gate_proj, layer.mlp.shared_expert.up_proj):
            blind(projection.weight)
        mute(layer.mlp.shared_expert.down_proj.weight, 1.0)


class PlantedData:
    """
    The task as training data of gates, see `adaptive_data`.

    Args:
        task ([`PlantedTask`]): the task.
        pairs (`int`, *optional*, defaults to 16): pairs of a step.
    """

    def __init__(self, task: PlantedTask, pairs: int = 16):
        self.task, self.pairs = task, pairs

    def batch(self, step: int) -> AdaptiveBatch:
        inputs, rows = self.task.batch(step, self.pairs), torch.arange(self.pairs)
        count, length = inputs["input_ids"].shape
        flat = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
        flat["cu_seq_lens_q"] = torch.arange(0, (count + 1) * length, length, dtype=torch.int32)
        return AdaptiveBatch(flat, [Pairs(rows, self.pairs + rows, torch.eye(self.pairs, dtype=torch.bool))])

    @torch.no_grad()
    def validate(self, model: Any) -> dict[str, float]:
        """Recall at 1 on batches behind the training's, as `score`."""
        found = []
        for step in range(1 << 20, (1 << 20) + 4):
            batch = self.batch(step)
            vectors = F.normalize(model(**batch.inputs, pooled_only=True).pooler_output, dim=-1)
            found += [pairs.recall(vectors) for pairs in batch.pairs]
        return {"score": torch.cat(found).float().mean().item()}
