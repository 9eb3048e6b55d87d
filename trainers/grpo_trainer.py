"""GRPO for the gates of adaptive compute, on TRL's trainer.

The actions of the gates are the completion. TRL's [`~trl.GRPOTrainer`] keeps the sampler, the buffering over
`steps_per_generation` and `num_iterations`, reward aggregation and advantages, clipping and loss types, the entropy
bonus, logging, checkpoints and the model card. Here stand the five methods in which a text trainer would speak to a
language model:

- `_generate_and_score_completions` runs the rollouts first, and takes groups without variance out afterwards;
- `_generate` hands the actions over in place of text: a "prompt" is the number of a rollout;
- `_calculate_rewards` gives reward functions what they need to know of a rollout;
- `_get_per_token_logps_and_entropies` replays the actions for their log-probabilities;
- `_compute_loss` adds distillation to the vector of full compute, in place of the KL term.

They are private to TRL: `tests/trainers/test_grpo_guard.py` says what changed when one of them does.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather, is_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from modeling_moemb.settings_moemb import active_gates

from .files import write_atomically
from .grpo_actions import Exploration, replayed_from_logits
from .grpo_card import write_card
from .grpo_config import MoEMBGRPOConfig
from .grpo_items import SIDES, describe_item, encode_item
from .grpo_rollouts import RolloutBatch, RolloutSettings, replay_rollouts, run_rollouts
from .grpo_setup import COLUMNS, FlatRewards, GRPOError, check_columns, gates_budget, reward_functions
from .lora import use_packed_adapters
from .packed_trainer import COMPLETE_MARKER
from .rewards import retrieval_scores


STATE = "grpo_state.json"
GATES = "gates.safetensors"


class MoEMBGRPOTrainer(GRPOTrainer):
    """
    Trains the gates of a [`MoEMBModel`] by policy optimisation.

    Args:
        model (`MoEMBModel`): With gates (`attach_gates`).
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Reward functions with TRL's signature, see `rewards.py`; those of `args.rewards` by default. The
            distillation reward is added to them where `args.distillation` says so.
        args ([`MoEMBGRPOConfig`]): Settings.
        train_dataset (`Dataset` or `IterableDataset`):
            Pairs of items: a query in the column `prompt` and its target in `positive`, as the processor takes them.
            `prompt_instruction` and `positive_instruction` (*optional*) stand instead of the recorded prompts. All
            columns are passed to the reward functions.
        eval_dataset (*optional*): The same for evaluation.
        processing_class (`MoEMBProcessor`): The model's processor.
        peft_config (`PeftConfig`, *optional*): Adapters to train beside the gates.
        kwargs (*optional*): `callbacks`, `optimizers`, `quantization_config`, as in TRL.

    Raises:
        GRPOError: for a model without gates, a budget that is not the gates' own, or data without pairs.
    """

    _tag_names = ["trl", "grpo", "moemb"]
    _name = "GRPO"

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: MoEMBGRPOConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        peft_config=None,
        **kwargs,
    ):
        args = args if args is not None else MoEMBGRPOConfig("moemb-grpo")
        if getattr(model, "gates", None) is None:
            raise GRPOError("the model has no gates to train: add some with `attach_gates(model, {'skip': {}})`")
        self.budget = gates_budget(model, args.adaptive_compute)
        model.set_adaptive_compute(self.budget)
        check_columns(train_dataset)
        if args.freeze_backbone and peft_config is not None:
            raise GRPOError("freeze_backbone=True trains the gates alone, but a peft_config was passed; set it False")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(
                name.startswith("gates.") or (parameter.requires_grad and not args.freeze_backbone)
            )
        given_weights = args.reward_weights
        reward_funcs = reward_functions(reward_funcs, args, trains_backbone := not args.freeze_backbone)
        model.generation_config = GenerationConfig()  # TRL asks for one, though nothing is generated
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            **kwargs,
        )
        if peft_config is not None:
            use_packed_adapters(self.model)
        args.reward_weights = given_weights  # the weight of distillation was in it
        del model.generation_config
        vars(model).pop("forward", None)  # TRL's fused language-model head
        for name, parameter in model.gates.named_parameters():
            if "lora_" in name:
                raise GRPOError(f"peft_config adapts the gates ({name}): leave them out, exclude_modules=r'.*gates.*'")
            parameter.requires_grad_(True)  # adapters froze them
        self.distils_by_loss = args.distillation_weight > 0 and (
            args.distillation in ("loss", "both") or (args.distillation == "auto" and trains_backbone)
        )
        self.stores_inputs = args.replay == "stored" or (args.replay == "auto" and not trains_backbone)
        if self.stores_inputs and (trains_backbone or self.distils_by_loss):
            raise GRPOError(
                "replay='stored' has no gradient with respect to the backbone: use replay='forward' where it is "
                "trained or distillation is a loss"
            )
        self._batches: dict[str, RolloutBatch] = {}
        self._scoring = self._vectors = self._learns = None
        self._evaluated = 0
        self._flat = FlatRewards(args.flat_patience)

    # Rollouts

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    def rollout_settings(self) -> RolloutSettings:
        """How rollouts are run now."""
        args, blocks = self.args, self.moemb.config.text_config.num_hidden_layers
        exploration = Exploration(args.exploration_sigma, args.exploration_groups, blocks, self.temperature)
        evaluates = self.mode == "eval"
        return RolloutSettings(
            self.budget,
            exploration,
            args.seed,
            args.efficiency_scope,
            args.rollout_batch_size,
            {"both": (0, 1), "query": (0,), "positive": (1,)}[args.acting],
            self.stores_inputs and not evaluates,
            greedy=evaluates,
        )

    @property
    def moemb(self):
        """The `MoEMBModel` inside of wrappers and adapters."""
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if is_peft_model(model) else model

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self._run_rollouts(inputs)
        self._batches[self.mode] = batch
        if self.max_completion_length is None:
            longest = self.accelerator.gather(torch.tensor([batch.completions.shape[1]], device=batch.pair.device))
            self.max_completion_length = max(1, int(longest.max()))
        self._scoring = inputs
        try:
            # columns that TRL would take for pictures of a prompt stay here; reward functions get them all
            shown = [{"prompt": describe_item(row["prompt"])} for row in inputs]
            output = super()._generate_and_score_completions(shown)
        finally:
            self._scoring = None
        return self._without_zero_variance(output)

    def _run_rollouts(self, inputs: Sequence[dict[str, Any]]) -> RolloutBatch:
        """The rollouts of the rows, which TRL repeats for each group; a group may go on in another process."""
        size, device = self.group_size, self.accelerator.device
        numbers = self.accelerator.process_index * len(inputs) + torch.arange(len(inputs), device=device)
        groups, counts = (numbers // size).unique_consecutive(return_counts=True)
        starts = (counts.cumsum(0) - counts).tolist()
        rows = [(inputs[start], int(group)) for start, group in zip(starts, groups.tolist(), strict=True)]
        pairs = [
            tuple(
                encode_item(self.processing_class, row[name], side, group, row.get(f"{name}_instruction"))
                for name, side in zip(COLUMNS, SIDES, strict=True)
            )
            for row, group in rows
        ]
        if self.mode == "train":
            within = self._step % self.current_gradient_accumulation_steps
            generation = self.state.global_step * self.args.gradient_accumulation_steps + within
        else:
            self._evaluated += 1
            generation = -self._evaluated
        return run_rollouts(self.moemb, pairs, counts.tolist(), numbers, generation, self.rollout_settings())

    def _generate(self, prompts: list) -> tuple:
        batch, device = self._batches[self.mode], self.accelerator.device
        lengths = batch.lengths.sum(1)
        completions = [row[:length].cpu().numpy() for row, length in zip(batch.completions, lengths.tolist())]
        self._log_rollouts(batch)
        tokens = sum(batch.pairs[pair][side].tokens for pair in batch.pair.tolist() for side in range(len(SIDES)))
        if self.mode == "train":
            seen = self.accelerator.gather(torch.tensor([tokens], device=device)).sum()
            self.state.num_input_tokens_seen += int(seen)
        self._metrics[self.mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        texts = [batch.describe(number) for number in range(len(prompts))]
        return [[number] for number in range(len(prompts))], completions, None, texts, None, {}, None, []

    def _log_rollouts(self, batch: RolloutBatch) -> None:
        metrics, lengths = self._metrics[self.mode], self.accelerator.gather(batch.lengths.sum(1)).float()
        for name, value in (("mean", lengths.mean()), ("min", lengths.min()), ("max", lengths.max())):
            metrics[f"completions/{name}_length"].append(value.item())
        removed = self.accelerator.gather(batch.removed)
        metrics["flops_removed"].append(removed.mean().item())
        spread = removed.view(-1, self.group_size).std(1, correction=0)
        metrics["flops_removed_group_std"].append(spread.mean().item())
        for kind in active_gates(self.budget):
            nothing = torch.zeros_like(batch.pair)
            counts = torch.stack([held.get(kind, nothing).sum() for held in (batch.saved, batch.asked)])
            saved, asked = self.accelerator.reduce(counts, reduction="sum").tolist()
            metrics[f"gates/{kind}_rate"].append(saved / max(asked, 1))

    # Rewards

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        batch, rows = self._batches[self.mode], self._scoring
        pool = self._candidates(batch)
        scores = self._scores(batch, pool, batch.vectors, batch.removed, batch.pair)
        metrics = self._metrics[self.mode]
        for name in ("recall", "teacher_cosine"):
            metrics[name].append(self.accelerator.gather(scores[name]).mean().item())
        if batch.greedy is not None:
            self._log_greedy(batch, pool)
        columns = {name: values.tolist() for name, values in scores.items()}
        for side, name in enumerate(("query_embedding", "target_embedding")):
            columns[name] = list(batch.vectors[:, side].unbind(0))
        inputs = [
            {**row, **{name: values[number] for name, values in columns.items()}} for number, row in enumerate(rows)
        ]
        prompts, actions = [row["prompt"] for row in rows], [ids.tolist() for ids in completion_ids_list]
        rewards = super()._calculate_rewards(inputs, prompts, completions, actions)
        self._learns = self._groups_with_variance(rewards)
        return rewards

    @property
    def group_size(self) -> int:
        return self.num_generations if self.mode == "train" else self.num_generations_eval

    def _candidates(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Full-compute vectors `(pairs, sides, hidden)` and content keys `(pairs, sides)` of all processes' pairs."""
        keys = torch.tensor([[item.key for item in pair] for pair in batch.pairs], device=batch.pair.device)
        vectors, keys = gather((batch.full[batch.pair], keys[batch.pair]))
        return vectors[:: self.group_size], keys[:: self.group_size]

    def _scores(
        self, batch: RolloutBatch, pool: tuple[Tensor, Tensor], vectors: Tensor, removed: Tensor, pair: Tensor
    ) -> dict[str, Tensor]:
        """What rewards are made of, for rows of vectors `(rows, sides, hidden)` of the pairs `pair` `(rows,)`."""
        place = torch.zeros(len(batch.pairs), dtype=torch.long, device=pair.device)
        place[batch.pair] = batch.numbers // self.group_size
        found = []
        for side in self.rollout_settings().acting:
            partners, keys = (tensor[:, 1 - side] for tensor in pool)
            scores = retrieval_scores(vectors[:, side], place[pair], partners, keys, self.args.num_recalled)
            cosine = (vectors[:, side] * batch.full[pair, side]).sum(-1)
            found.append(torch.stack([*scores, cosine]))
        names = ("recall", "positive_similarity", "negative_similarity", "teacher_cosine")
        target = self.args.target_reduction
        return {
            **dict(zip(names, torch.stack(found).mean(0), strict=True)),
            "flops_removed": removed,
            "efficiency": removed if target is None else (removed / target).clamp(max=1),
        }

    def _log_greedy(self, batch: RolloutBatch, pool: tuple[Tensor, Tensor]) -> None:
        """What the model does when it is deployed: no exploration, every gate takes its likelier choice."""
        removed = (1 - batch.greedy_flops.sum(1) / batch.full_flops.sum(1)).float()
        pairs = torch.arange(len(batch.pairs), device=batch.pair.device)
        scores = self._scores(batch, pool, batch.greedy, removed, pairs)
        for name in ("recall", "teacher_cosine", "flops_removed"):
            held = torch.stack([scores[name].sum(), torch.ones_like(scores[name]).sum()])
            total, count = self.accelerator.reduce(held, reduction="sum").tolist()
            self._metrics[self.mode][f"greedy/{name}"].append(total / count)

    def _groups_with_variance(self, rewards_per_func: Tensor) -> Tensor:
        """Rollouts of this process whose group can be learned from, `torch.BoolTensor` of shape `(rollouts,)`."""
        if self.multi_objective_aggregation == "sum_then_normalize":
            missing = rewards_per_func.isnan().all(1, keepdim=True)
            weights = self.reward_weights.to(rewards_per_func)
            rewards_per_func = (rewards_per_func * weights).nansum(1, keepdim=True).masked_fill(missing, torch.nan)
        grouped = rewards_per_func.double().unflatten(0, (-1, self.group_size))
        spread = (grouped - grouped.nanmean(1, keepdim=True)).square()
        count = (~spread.isnan()).sum(1)
        std = (spread.nansum(1) / (count - 1).clamp_min(1)).sqrt()
        learns = (std > self.args.zero_variance).any(-1).repeat_interleave(self.group_size)
        return learns[self._batches[self.mode].numbers]

    def _without_zero_variance(self, output: dict[str, Any]) -> dict[str, Any]:
        """Groups of rollouts with equal rewards contribute nothing, not even regularisation."""
        learns = self._learns.to(output["completion_mask"])
        output["completion_mask"] = output["completion_mask"] * learns[:, None]
        output["advantages"] = output["advantages"] * learns
        output["num_items_in_batch"] = self.accelerator.gather(output["completion_mask"].sum()).sum()
        output["learns"] = learns
        if self.mode == "train":
            self._flat.see(bool(output["num_items_in_batch"] > 0), self._metrics["train"])
        return output

    # Loss

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ) -> tuple[Tensor, Tensor | None, None]:
        batch, width = self._batches[self.mode], input_ids.shape[1] - logits_to_keep
        rollouts, completions = input_ids[:, width - 1], input_ids[:, width:]
        if self._scoring is not None:  # TRL asks for the log-probabilities of the policy that acted
            return batch.log_probs[rollouts, :logits_to_keep], None, None
        settings = self.rollout_settings()
        if batch.stored is None:
            log_probs, entropies, self._vectors = replay_rollouts(model, batch, rollouts, completions, settings)
        else:
            calls = batch.stored.select(rollouts, len(batch.pair))
            logits = model(gate_inputs=[(kind, block, inputs) for kind, block, *_, inputs in calls]).gate_logits
            log_probs, entropies = replayed_from_logits(calls, logits, completions, settings.exploration)
        return log_probs, entropies if compute_entropy else None, None

    def _compute_loss(self, model, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        if not self.distils_by_loss:
            return loss
        batch, rollouts = self._batches[self.mode], inputs["prompt_ids"][:, -1]
        teacher = batch.full[batch.pair[rollouts]][:, list(self.rollout_settings().acting)]
        distance = (1 - (self._vectors * teacher).sum(-1)).mean(1)
        learns = inputs["learns"].to(distance)
        steps = self.current_gradient_accumulation_steps if self.mode == "train" else 1
        self._metrics[self.mode]["distillation_loss"].append(self.accelerator.gather(distance.detach()).mean().item())
        self._vectors = None
        return loss + self.args.distillation_weight * (distance * learns).mean() / steps

    # Optimizer, evaluation, saving

    def create_optimizer(self, model=None):
        """Like `Trainer`'s, with a learning rate of their own for the gates and no weight decay on them."""
        if self.optimizer is None:
            gates = {id(parameter) for parameter in self.moemb.gates.parameters()}
            super().create_optimizer(model)
            groups = []
            for group in self.optimizer.param_groups:
                own = [each for each in group["params"] if id(each) in gates]
                group["params"] = [each for each in group["params"] if id(each) not in gates]
                if own:
                    rate = self.args.gate_learning_rate or self.args.learning_rate
                    groups.append({**group, "params": own, "lr": rate, "weight_decay": 0.0})
            kept = [group for group in self.optimizer.param_groups if group["params"]]
            self.optimizer.param_groups[:] = kept + groups
        return self.optimizer

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        self._evaluated = 0  # the same draws at every evaluation
        return super().evaluate(*args, **kwargs)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None) -> None:
        if self.is_world_process_zero():
            write_card(self, model_name, dataset_name, tags)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if is_peft_model(self.accelerator.unwrap_model(self.model)) and self.args.should_save:
            save_file(self.moemb.gates.state_dict(), Path(output_dir or self.args.output_dir) / GATES)

    def _save_checkpoint(self, model, trial) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (folder / STATE).write_text(json.dumps({"max_completion_length": self.max_completion_length}) + "\n")
            # written last: a folder without it was cut short by a kill
            write_atomically(folder / COMPLETE_MARKER, json.dumps({"step": self.state.global_step}) + "\n")

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if (Path(checkpoint) / GATES).is_file():
            self.moemb.gates.load_state_dict(load_file(Path(checkpoint) / GATES))
        if self.args.max_completion_length is None and (Path(checkpoint) / STATE).is_file():
            self.max_completion_length = json.loads((Path(checkpoint) / STATE).read_text())["max_completion_length"]
