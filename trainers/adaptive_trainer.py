"""`method: adaptive`: gates trained by gradients (MoEMB section 4), on a frozen backbone, with adapters, or with it.

One step: the vectors of full compute (no gates, no gradient) are the teacher; the same batch is embedded with the
gates in their differentiable form; the loss adds InfoNCE, the distance to the teacher and the budgets. What the gates
would do when deployed is measured beside it, and a gate that has collapsed stops the run.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.trainer import TRAINING_ARGS_NAME

from modeling_moemb import MoEMBModel, MoEMBProcessor
from modeling_moemb.compute_moemb import count_flops
from modeling_moemb.gates_moemb import attach_gates, twin_null_experts
from modeling_moemb.settings_moemb import without_gates

from .adaptive_adapters import adapter_config, merged_adapters, without_adapters
from .adaptive_budgets import budget_terms, deployed_budget, estimators_of, shift_to_flops
from .adaptive_config import AdaptiveConfig
from .adaptive_data import AdaptiveBatch, AdaptiveData, CorpusData, PairData
from .adaptive_flops import estimate_of
from .adaptive_monitor import CollapseLimits, CollapseMonitor
from .adaptive_objectives import distillation_distance
from .adaptive_policy import TrainingPolicy
from .adaptive_strategies import ORDER, Phase, phase_at
from .calibration_repository import locate_model
from .checkpoint import write_checkpoint
from .errors import MoEMBError
from .files import write_atomically
from .gate_repository import RECORD, write_with_gates
from .lora import ADAPTER, is_adapter, load_adapter_weights, save_adapter, use_packed_adapters
from .optimizer import MasterAdamW
from .packed_trainer import PackedTrainer
from .repository import assemble_repository


GATES_CHECKPOINT = "gates.safetensors"


class AdaptiveError(MoEMBError, ValueError):
    """A training of gates that cannot start; the text names the value and the remedy."""


class AdaptiveTrainer(PackedTrainer):
    """Trains gates.

    Args:
        model (`MoEMBModel`): the model; gates that it lacks are added.
        args ([`AdaptiveConfig`]): settings.
        processing_class (`MoEMBProcessor` or `PreTrainedTokenizerFast`): saved beside the weights.
        data ([`AdaptiveData`]): the batches.
        source (`Path`, *optional*): repository that the weights were loaded from.
    """

    best_metric = "score"

    def __init__(
        self, model: Any, args: AdaptiveConfig, processing_class: Any, data: AdaptiveData, source: Path | None = None
    ):
        self.data, self.source = data, source
        had = set(model.config.gates or {})
        torch.manual_seed(args.seed)
        try:
            attach_gates(model, args.gates)
        except ValueError as error:
            raise AdaptiveError(str(error)) from error
        if "null" in args.gates and "null" not in had:
            twin_null_experts(model, args.null_noise, args.null_bias, args.seed)
        if args.lora_rank:
            model.add_adapter(adapter_config(args.lora_rank, args.lora_alpha, args.lora_targets), ADAPTER)
            use_packed_adapters(model)
        super().__init__(model, args, processing_class)
        self.model.gates.float()
        self.kinds = tuple(kind for kind in ORDER if kind in args.gates)
        self.budget = deployed_budget(args, self.kinds)
        self.estimators = estimators_of(args)
        self.macs = {kind: getattr(model.gates, kind).macs for kind in self.kinds}
        limits = CollapseLimits(
            args.collapse_window, args.collapse_after, cosine=args.collapse_cosine, gap=args.collapse_gap
        )
        self.monitor = CollapseMonitor(limits, args.targets)
        self._choose_trained()

    def _choose_trained(self) -> None:
        """Gates, and with a learning rate of their own adapters, or the decoder without its routers."""
        self.model.requires_grad_(False)
        for kind in self.kinds:
            getattr(self.model.gates, kind).requires_grad_(True)
        named = self.model.named_parameters() if self.args.lora_rank else ()
        self.adapters = [parameter.requires_grad_(True) for name, parameter in named if is_adapter(name)]
        self.backbone = []
        if self.args.backbone_learning_rate:
            for name, parameter in self.model.language_model.named_parameters():
                router = ".mlp.gate." in name or "shared_expert_gate" in name
                if name.startswith("layers.") and not router:
                    self.backbone.append(parameter.requires_grad_(True))

    def build_batch(self, step: int) -> dict[str, Any]:
        return {"batch": self.data.batch(step), "step": step}

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "batch": inputs["batch"].to(self.args.device)}

    def create_optimizer(self, model=None) -> MasterAdamW:
        if self.optimizer is None:
            groups = [{"params": list(self.model.gates.parameters()), "weight_decay": 0.0}]
            args = self.args
            more = [(self.adapters, args.lora_learning_rate), (self.backbone, args.backbone_learning_rate)]
            groups += [{"params": params, "weight_decay": 0.0, "lr": rate} for params, rate in more if params]
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = MasterAdamW(groups, args.learning_rate, betas, args.adam_epsilon, args.ema_decay)
        return self.optimizer

    # One step

    def phase(self, step: int) -> Phase:
        """What the gates do at a step."""
        return phase_at(self.args.strategy, self.kinds, step, self.args.max_steps, self.args.alternate_every)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch, step = inputs["batch"], inputs["step"]
        phase = self.phase(step)
        for kind in self.kinds:  # a gate without a gradient keeps the optimizer's moments as they are
            getattr(self.model.gates, kind).requires_grad_(kind in phase.trained)
        tokens = batch.inputs["input_ids"].numel()
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        policy = TrainingPolicy(phase, self.estimators, tokens, generator)
        teacher = self._teacher(model, batch)
        student, output = self._student(model, batch, policy)
        losses = {"distill": self.args.distill_weight * distillation_distance(student, teacher)}
        if self.args.contrast_weight and batch.pairs:
            contrast = sum(pairs.loss(student, self.args.scale) for pairs in batch.pairs)
            losses["contrast"] = self.args.contrast_weight * contrast
        account = policy.account(self.model.config.text_config.num_hidden_layers, student.device, self.macs)
        estimate = estimate_of(self.model.config, batch.inputs)
        terms, shares = budget_terms(self.args, self.model, policy, account, estimate, output)
        losses |= terms
        total = sum(losses.values())
        if not total.requires_grad:  # no gate was asked, such as in a batch of texts alone
            total = total + 0 * sum(p.sum() for p in self.model.gates.parameters() if p.requires_grad)
        cosine = (student.detach() * teacher).sum(-1).mean().item()
        removed = float(
            estimate.removed(account.mass, account.kept, account.gate_macs, self.args.flops_scope).detach()
        )
        named = {f"{name}_loss": float(value.detach()) for name, value in losses.items()}
        kept = {f"{kind}_{name}": value for kind, both in shares.items() for name, value in both.items()}
        self.record(cosine=cosine, flops_removed=removed, **named, **kept)
        trained = {kind: both for kind, both in shares.items() if kind in phase.trained}
        self.monitor.check(step, phase.progress, float(total.detach()), cosine, trained)
        if (step + 1) % max(int(self.args.logging_steps), 1) == 0:
            self._record_gap(batch, student.detach(), teacher, phase)
        return (total, student) if return_outputs else total

    @torch.no_grad()
    def _teacher(self, model: Any, batch: AdaptiveBatch) -> Tensor:
        """Vectors of full compute, of the weights that `args.teacher` names."""
        start = self.adapters and self.args.teacher == "start"
        with without_adapters(self.model) if start else nullcontext():
            output = model(**batch.inputs, adaptive_compute={}, pooled_only=True)
        return F.normalize(output.pooler_output.float(), dim=-1)

    def _student(self, model: Any, batch: AdaptiveBatch, policy: TrainingPolicy) -> tuple[Tensor, Any]:
        wants_logits = "null" in policy.phase.trained and self.args.null_estimator == "balance"
        output = model(
            **batch.inputs,
            adaptive_compute=self.budget,
            gate_policy=policy,
            pooled_only=True,
            output_router_logits=wants_logits,
        )
        return F.normalize(output.pooler_output.float(), dim=-1), output

    @torch.no_grad()
    def _record_gap(self, batch: AdaptiveBatch, student: Tensor, teacher: Tensor, phase: Phase) -> None:
        """How the deployed gates, executed by removal, differ from the form they are trained in."""
        active = without_gates(self.budget, [kind for kind in self.kinds if kind not in phase.active]) or {}
        training = self.model.training
        self.model.eval()
        output = self.model(**batch.inputs, adaptive_compute=active, pooled_only=True, output_compute=True)
        self.model.train(training)
        hard = F.normalize(output.pooler_output.float(), dim=-1)
        scope = self.args.flops_scope
        done = getattr(count_flops(self.model.config, output.compute), scope)
        self.record(
            soft_hard_gap=1 - (hard * student).sum(-1).mean().item(),
            hard_cosine=(hard * teacher).sum(-1).mean().item(),
            hard_flops_removed=1 - done / estimate_of(self.model.config, batch.inputs).full(scope),
        )
        if batch.pairs:
            for name, vectors in (("recall_full", teacher), ("recall_soft", student), ("recall_hard", hard)):
                found = torch.cat([pairs.recall(vectors) for pairs in batch.pairs]).float()
                self.record(**{name: found.mean().item()})

    # Checkpoints hold what is trained: with a frozen backbone the gates alone, or with the adapters

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.backbone:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        gates = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.gates.state_dict().items()}
        save_file(gates, folder / GATES_CHECKPOINT)
        if self.adapters:
            save_adapter(self.model, folder, self.args.init_from or "")
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        if self.backbone:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            if self.adapters:
                load_adapter_weights(self.model, Path(resume_from_checkpoint))
            self.model.gates.load_state_dict(load_file(Path(resume_from_checkpoint) / GATES_CHECKPOINT))

    # Deployment

    def validate(self) -> dict[str, float]:
        """Scores of the deployed gates of this step."""
        phase = self.phase(max(self.state.global_step - 1, 0))
        active = without_gates(self.budget, [kind for kind in self.kinds if kind not in phase.active]) or {}
        before = self.model.config.adaptive_compute
        self.model.set_adaptive_compute(active)
        try:
            return self.data.validate(self.model)
        finally:
            self.model.config.adaptive_compute = before

    def export(self, name: str, record: dict[str, Any]) -> Path:
        """Writes the model with its gates at work, and its adapters merged, to `output_dir/name`."""
        self.model.set_adaptive_compute(self.budget)
        target = Path(self.args.output_dir) / name
        names = ("seed", "max_steps", "init_from", "strategy", "targets", "flops_removed", "flops_scope")
        names += ("lora_rank", "lora_alpha", "lora_targets", "lora_learning_rate", "teacher") if self.adapters else ()
        record = {**record, **{name: getattr(self.args, name) for name in names}}
        if self.source is not None and not self.backbone and not self.adapters:
            return write_with_gates(self.source, target, self.model, record)
        processor = self.processing_class
        if self.source is not None and not isinstance(processor, MoEMBProcessor):
            processor = MoEMBProcessor.from_pretrained(self.source)
        with merged_adapters(self.model) if self.adapters else nullcontext():
            if not isinstance(processor, MoEMBProcessor):
                write_checkpoint(target, self.model, processor, record)
                return target
            assemble_repository(target, model=self.model, processor=processor, overwrite=True)
        write_atomically(target / RECORD, json.dumps(record, indent=2).replace(str(Path.home()), "~") + "\n")
        return target

    def export_final(self) -> Path:
        """Shifts the gates to the FLOPs that were asked for, and writes `final/` (and `adapter/`, if there is one)."""
        record: dict[str, Any] = {"step": self.state.global_step}
        with self._averaged_weights():
            if self.args.flops_removed is not None and self.args.match_flops:
                record |= shift_to_flops(self.model, self.args, self.budget, self.kinds, self._matching_batches())
            if self.adapters:
                save_adapter(self.model, Path(self.args.output_dir) / "adapter", self.args.init_from or "")
            return self.export("final", record)

    def _matching_batches(self) -> list[AdaptiveBatch]:
        """Batches behind the training's: enough items for a steady share."""
        first = self.args.max_steps
        return [self.data.batch(first + number).to(self.args.device) for number in range(8)]


def build_trainer(args: AdaptiveConfig) -> AdaptiveTrainer:
    """Loads the model and the data that the settings name.

    Raises:
        AdaptiveError: without `init_from`.
        CalibrationError: there is no such model, or it is not MoEMB's.
    """
    if not args.init_from:
        raise AdaptiveError("adaptive training needs init_from: moemb-mini, or the folder of a MoEMB repository")
    source = locate_model(args.init_from)
    given = {} if args.device_map is None else {"device_map": args.device_map}
    model = MoEMBModel.from_pretrained(source, dtype=getattr(torch, args.weights_dtype), **given)
    if args.corpus_sources:
        from .corpus import load_corpus
        from .tokenizer import load_tokenizer

        tokenizer = load_tokenizer(source)
        data = CorpusData(load_corpus(args.corpus), tokenizer, model.config, args.corpus_sources, args.seed)
        return AdaptiveTrainer(model, args, tokenizer, data, source)
    processor = MoEMBProcessor.from_pretrained(source)
    data = PairData(processor, args.train_datasets, args.eval_datasets, args.batch_pairs, args.seed)
    return AdaptiveTrainer(model, args, processor, data, source)
