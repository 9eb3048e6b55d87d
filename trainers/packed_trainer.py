"""The trainer under MoEMB's training methods: `transformers.Trainer` over batches that are functions of the step.

Why not `SentenceTransformerTrainer`: it runs the model once per column (anchor, positive, ...) of one data set per
batch. Here all sub-batches of a step - texts, images, clips, composed queries - go through the packed model in a
single call, which keeps the expert products large, and several losses read the same vectors. What `Trainer` gives
(loop, logging, progress bar, checkpoints, resuming) is kept; batches, optimizer, schedule and evaluation are ours.
"""

import json
import math
import os
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .checkpoint import LOG, RECORD, write_checkpoint
from .files import write_atomically
from .losses import expert_load, load_balancing_loss, router_z_loss
from .optimizer import MasterAdamW
from .packed_config import PackedTrainingConfig


# Written last into a checkpoint folder: one without it was cut short by a kill and is not resumed from.
COMPLETE_MARKER = "complete.json"
_ENDLESS = 1 << 31


class StepDataset(Dataset):
    """Item `i` is the finished batch of step `i`, so resuming at a step needs no saved sampler.

    Args:
        build (`Callable[[int], dict]`): Builds the batch of a step.
    """

    def __init__(self, build):
        self.build = build

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, step: int) -> dict:
        return self.build(step)


def only_item(items: list[dict]) -> dict:
    """Collator of [`StepDataset`]: its items are whole batches."""
    (item,) = items
    return item


def learning_rate_factor(step: int, warmup: int, total: int, decay_steps: int, floor: float) -> float:
    """Learning rate relative to its peak: linear warm-up, flat, then a cosine over the last `decay_steps` steps.

    Args:
        step (`int`): Steps done.
        warmup (`int`): Steps of warm-up.
        total (`int`): Steps of the run.
        decay_steps (`int`): Steps of the decay; negative: all steps after warm-up.
        floor (`float`): Value at the end.
    """
    if step < warmup:
        return (step + 1) / warmup
    if decay_steps < 0:
        decay_steps = total - warmup
    begin = total - decay_steps
    if step < begin or decay_steps == 0:
        return 1.0
    progress = min(1.0, (step - begin) / decay_steps)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


class PackedTrainer(Trainer):
    """Trainer of a [`MoEMBModel`] on batches built step by step.

    Subclasses implement `build_batch(step) -> dict`, `compute_loss` and `validate() -> dict[str, float]`, and name the
    metric of the best checkpoint in `best_metric`.

    The output folder holds `checkpoint-<step>/` (to resume from), `best/` (weights with the best validation so far),
    `final/` (weights at the end) and `log.jsonl`.

    Args:
        model (`MoEMBModel`): The model; it is cast to `args.weights_dtype`.
        args ([`PackedTrainingConfig`]): Settings.
        tokenizer (`PreTrainedTokenizerFast`): Saved beside the weights.
        heads (`nn.Module`, *optional*):
            Modules trained beside the model and thrown away after: they live in the optimizer state only.
    """

    best_metric = ""

    def __init__(self, model, args: PackedTrainingConfig, tokenizer, heads: nn.Module | None = None):
        self.heads = heads
        if heads is not None:
            heads.float()
        model.to(getattr(torch, args.weights_dtype))
        batches = StepDataset(self.build_batch)
        super().__init__(
            model=model,
            args=args,
            data_collator=only_item,
            train_dataset=batches,
            # Never read: `evaluate` is ours. `Trainer` only asks that there be one.
            eval_dataset=batches,
            processing_class=tokenizer,
            callbacks=[JsonLines(args.output_dir), StopAfter(args.max_minutes)],
        )
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self.best_value = _best_value(Path(args.output_dir), self.best_metric)

    # What a method supplies

    def build_batch(self, step: int) -> dict[str, Any]:
        """The batch of a step; must depend on the step and the settings only."""
        raise NotImplementedError

    def validate(self) -> dict[str, float]:
        """Scores on validation items (never on test items)."""
        raise NotImplementedError

    # Batches

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)

    def floating_point_ops(self, inputs) -> int:
        return 0

    # Optimizer and schedule

    def create_optimizer(self, model=None) -> MasterAdamW:
        if self.optimizer is None:
            modules = [self.model] + ([self.heads] if self.heads is not None else [])
            parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
            groups = [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.args.weight_decay},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ]
            self.optimizer = MasterAdamW(
                groups,
                lr=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                ema_decay=self.args.ema_decay,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None) -> LambdaLR:
        if self.lr_scheduler is None:
            args, warmup = self.args, self.args.get_warmup_steps(num_training_steps)
            self.lr_scheduler = LambdaLR(
                optimizer or self.optimizer,
                lambda step: learning_rate_factor(
                    step, warmup, num_training_steps, args.decay_steps, args.min_lr_ratio
                ),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _clip_grad_norm(self, model) -> torch.Tensor:
        # `Trainer` would clip the model's gradients alone, in the weights' dtype; the heads belong to the same norm.
        return self._master_optimizer().clip_gradients(self.args.max_grad_norm)

    def _master_optimizer(self) -> MasterAdamW:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    # Logging and evaluation

    def record(self, **metrics: float) -> None:
        """Adds values whose mean over the logging window goes into the log."""
        for name, value in metrics.items():
            entry = self._sums[name]
            entry[0] += float(value)
            entry[1] += 1

    def router_loss(self, router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Weighted load-balancing and z-loss of all blocks; records them and the load of the experts.

        The last block may have logits of the pooled rows alone; they are balanced like the others. A model without
        learned routers has none: its loss is 0.
        """
        if not router_logits:
            return torch.zeros((), device=self.model.device)
        top_k = self.model.config.text_config.num_experts_per_tok
        balance, z = load_balancing_loss(router_logits, top_k), router_z_loss(router_logits)
        busiest, idlest = expert_load(router_logits, top_k)
        self.record(balance_loss=balance.item(), z_loss=z.item(), expert_load_max=busiest, expert_load_min=idlest)
        return self.args.router_balance_weight * balance + self.args.router_z_weight * z

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs:
            logs = {**logs, **{name: round(total / count, 5) for name, (total, count) in self._sums.items()}}
            self._sums.clear()
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """Validates (the averaged weights, if there are such), logs, and keeps the weights when they are the best."""
        begin = time.perf_counter()
        self.model.eval()
        with torch.no_grad(), self._averaged_weights():
            metrics = {f"eval_{name}": round(value, 5) for name, value in self.validate().items()}
            metrics["eval_seconds"] = round(time.perf_counter() - begin, 2)
            value = metrics[f"eval_{self.best_metric}"]
            if self.best_value is None or value > self.best_value:
                self.best_value = value
                self.export("best", {**metrics, "step": self.state.global_step})
        self.model.train()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _averaged_weights(self):
        if self.optimizer is None:
            from contextlib import nullcontext

            return nullcontext()
        return self._master_optimizer().averaged_weights()

    # Saving

    def export(self, name: str, record: dict[str, Any]) -> Path:
        """Writes the model as it is now to `output_dir/name`, a shippable checkpoint (see [`write_checkpoint`])."""
        target = Path(self.args.output_dir) / name
        settings = {"seed": self.args.seed, "max_steps": self.args.max_steps, "init_from": self.args.init_from}
        write_checkpoint(target, self.model, self.processing_class, {**record, **settings})
        return target

    def export_final(self) -> Path:
        """Writes `final/`: the (averaged) weights at the end of the run."""
        with self._averaged_weights():
            return self.export("final", {"step": self.state.global_step})

    def _save_checkpoint(self, model, trial) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        write_atomically(folder / COMPLETE_MARKER, json.dumps({"step": self.state.global_step}) + "\n")


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest whole checkpoint of a run; folders that a kill cut short are removed."""
    whole = []
    for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if (folder / COMPLETE_MARKER).is_file():
            whole.append(folder)
        else:
            shutil.rmtree(folder)
    return max(whole, key=lambda folder: int(folder.name.rsplit("-", 1)[1]), default=None)


def _best_value(output_dir: Path, metric: str) -> float | None:
    record = output_dir / "best" / RECORD
    return json.loads(record.read_text()).get(f"eval_{metric}") if record.is_file() else None


class JsonLines(TrainerCallback):
    """Appends every log entry to `output_dir/log.jsonl` with the step, the wall-clock time and the run's CPU-hours.

    `cpu_hours` goes on from the last entry of the file: it is what the run took over all continuations.
    """

    def __init__(self, output_dir: str):
        self.path = Path(output_dir) / LOG
        self.hours_before = _last_value(self.path, "cpu_hours") - time.process_time() / 3600

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            hours = self.hours_before + time.process_time() / 3600
            stamp = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "cpu_hours": round(hours, 4)}
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **stamp, **logs}) + "\n")


def _last_value(log: Path, name: str) -> float:
    data = log.read_bytes() if log.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:  # a kill cut the last line; cut, not written again, so that another kill loses nothing
        os.truncate(log, len(whole))
    entries = [json.loads(line) for line in whole.splitlines()]
    return next((entry[name] for entry in reversed(entries) if name in entry), 0.0)


class StopAfter(TrainerCallback):
    """Saves and stops the run when its time is up."""

    def __init__(self, minutes: float):
        self.seconds = minutes * 60
        self.begin = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if self.seconds and time.monotonic() - self.begin > self.seconds:
            control.should_save = True
            control.should_evaluate = True
            control.should_training_stop = True
        return control
