"""Contrastive training of any MoEMB repository, on `SentenceTransformerTrainer`.

What Sentence Transformers gives is kept: the model, loop, logging, progress bar, schedules, evaluators, checkpoints,
resuming. Ours are the batches (a weighted mixture, see [`MixtureBatchSampler`]), the step (all queries, positives and
negatives go through the packed model together, in chunks of bounded size, see [`contrastive_step`]), and the optimizer
(float32 masters of what is trained).
"""

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from torch.nn.parallel import DistributedDataParallel
from transformers import set_seed

from modeling_moemb import MoEMBConfig
from modeling_moemb.sentence_transformer_moemb import MoEMBTransformer, pooled_only

from .cached_gradients import Embedded, average_gradients, contrastive_step, most_over_processes
from .calibration_repository import locate_model
from .contrastive_batches import ContrastiveBatch, RowEncoder, model_inputs, split_into_chunks
from .contrastive_checkpoint import export_run, load_trained, write_checkpoint_folder, write_model
from .contrastive_config import ContrastiveConfig
from .contrastive_data import PairDataset, RowError, load_datasets
from .contrastive_evaluation import build_evaluator
from .contrastive_loss import ContrastiveLoss, LossOutput
from .contrastive_sampler import MixtureBatchSampler, MixtureLoader, MixtureRows
from .distributed import (
    check_architecture,
    distributed_kwargs,
    divide_gradients_once,
    is_spread,
    loading_for_adapters,
    mesh_of,
    share_adapters,
)
from .errors import MoEMBError
from .lora import check_trainable, prepare_trainable, trainable_table
from .objectives import Objective
from .optimizer import MasterAdamW
from .packed_trainer import JsonLines, StopAfter, newest_checkpoint
from .router_objectives import RouterObjectives
from .router_settings import RouterSettings, RouterTasks, condition_routers


class ContrastiveError(MoEMBError, RuntimeError):
    """A training that cannot go on; the text names the step, the value and the remedy."""


class ContrastiveTrainer(SentenceTransformerTrainer):
    """
    Trains an embedder on pairs.

    `output_dir` then holds `checkpoint-<step>/` (to go on from), `log.jsonl`, and at the end `adapter/` (with LoRA)
    and `final/` (a repository that loads everywhere).

    Args:
        model (`SentenceTransformer`): The model, as [`load_trainable`] gives it.
        args ([`ContrastiveConfig`]): Settings.
        datasets (`Sequence[PairDataset]`): What is trained on.
        base (`Path`): Folder that the model was loaded from.
        evaluator (`BaseEvaluator`, *optional*): Evaluated every `eval_steps`.
        objectives (`Sequence[Objective]`, *optional*): Losses beside the contrast.
        task_id_dropout (`float`, *optional*, defaults to 0.0):
            Share of items whose data set routers that are conditioned on it are not told.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        args: ContrastiveConfig,
        datasets: Sequence[PairDataset],
        base: Path,
        evaluator: Any = None,
        objectives: Sequence[Objective] = (),
        task_id_dropout: float = 0.0,
    ):
        self.datasets, self.base, self.objectives = list(datasets), Path(base), list(objectives)
        self.encoder = RowEncoder(model[0].processor, datasets, args.max_length)
        self.backbone = model[0].model
        loss = ContrastiveLoss(
            args.scale,
            args.symmetric,
            args.mask_duplicates,
            args.matryoshka_dims,
            args.matryoshka_weights,
            args.gather_across_devices,
        )
        # `Trainer` refuses to keep the optimizer's state of a model that is spread; that of adapters is whole
        given, args.save_only_model = args.save_only_model, args.save_only_model or args.distributed is not None
        super().__init__(
            model=model,
            args=args,
            train_dataset=MixtureRows(datasets),
            evaluator=evaluator,
            loss=loss,
            data_collator=self.encoder,
            processing_class=model[0].processor,
            callbacks=[JsonLines(args.output_dir), StopAfter(args.max_minutes)],
        )
        args.save_only_model = given
        if self.is_deepspeed_enabled:
            raise ContrastiveError(
                "DeepSpeed is not supported: use DDP, or FSDP2 by 'distributed' (see recipes/accelerate)"
            )
        size = self.backbone.config.text_config.hidden_size
        if max(args.matryoshka_dims or [1]) > size:
            raise ContrastiveError(f"matryoshka_dims={args.matryoshka_dims}: the model's vectors have {size} numbers")
        conditioning = self.backbone.config.task_conditioning
        self.router_tasks = None
        if conditioning is not None and conditioning["kind"] == "id":
            self.router_tasks = RouterTasks(conditioning, [dataset.name for dataset in datasets], task_id_dropout)
        self.trained = [parameter for parameter in self.backbone.parameters() if parameter.requires_grad]
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self._router_logits: tuple[torch.Tensor, ...] = ()
        self.backbone.register_forward_hook(self._keep_router_logits)
        model[0].register_forward_hook(self._forget_packing)
        # `Trainer` would write the tokenizer's padding token into the model's configuration
        self.processor, self.processing_class = self.processing_class, None

    # Data

    def preprocess_dataset(self, dataset=None, dataset_name=None):
        return dataset

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """The card is written from the run's record at the end, see [`export_run`]."""

    def get_train_dataloader(self) -> MixtureLoader:
        """Batches of this process; nothing of them is on the device before its chunk is embedded."""
        args = self.args
        sampler = MixtureBatchSampler(
            [len(dataset) for dataset in self.datasets],
            [dataset.settings.weight for dataset in self.datasets],
            args.batch_size,
            args.sub_batch_size,
            args.seed,
            args.process_index,
            args.world_size,
        )
        return MixtureLoader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            generator=torch.Generator().manual_seed(args.seed),
        )

    def floating_point_ops(self, inputs) -> int:
        return 0

    # The step

    def train(self, *args, **kwargs):
        """Prints and asserts what is trained, then trains; see `Trainer.train`."""
        check_trainable(self.backbone, self.args)
        if self.is_world_process_zero():
            print(trainable_table(self.backbone), file=sys.stderr)
        try:
            return super().train(*args, **kwargs)
        except RowError as error:
            text = str(error)
            if text.startswith("Caught "):  # a worker's traceback; its last line is the message
                raise RowError(text.strip().splitlines()[-1].partition("RowError: ")[2]) from None
            raise

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        begin = time.perf_counter()
        model.train()
        batch: ContrastiveBatch = inputs["batch"]
        if self.router_tasks is not None:
            # a function of the step: a run that goes on draws the same ones, and both passes see them
            draws = torch.Generator().manual_seed(hash((self.args.seed, self.state.global_step)) % 2**63)
            batch.router_task = self.router_tasks(torch.tensor([item.task for item in batch.items]), draws)
        tokens = [item.tokens for item in batch.items]
        chunks, idle = self._chunks(tokens)
        alone = model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()
        with alone:
            output = contrastive_step(
                chunks,
                partial(self.embed, model, batch),
                partial(self.loss, batch=batch),
                self.accelerator.backward,
                self.objectives,
                self.args.device,
                idle,
            )
        self._check_finite("loss", output.value, batch)
        average_gradients([parameter for parameter in self.trained if not is_spread(parameter)])
        self._record_step(output, chunks, tokens, time.perf_counter() - begin)
        return output.value

    @property
    def spreads_weights(self) -> bool:
        """Whether weights are spread over processes: their gradients are then averaged by what spreads them."""
        return bool(self.is_distributed_loading_by_transformers)

    def _sync_replicated_trainable_parameters(self, model) -> None:
        # `Trainer` would also average adapters after the backward pass of every chunk: here it is done once a step
        share_adapters(model)

    def _chunks(self, tokens: Sequence[int]) -> tuple[list[range], int]:
        """The items of each chunk, and how many more times the model has to be called to no effect."""
        chunks = split_into_chunks(tokens, self.args.mini_batch_tokens)
        if not self.spreads_weights:
            return chunks, 0
        most = most_over_processes(len(chunks), self.args.device)
        chunks = split_into_chunks(tokens, self.args.mini_batch_tokens, most)
        return chunks, most - len(chunks)

    def embed(self, model, batch: ContrastiveBatch, places: range) -> Embedded:
        """
        Vectors of some items of a batch, in one packed call.

        Args:
            model (`nn.Module`): The `SentenceTransformer`, as it is wrapped for training.
            batch (`ContrastiveBatch`): The batch.
            places (`range`): Places in its items.
        """
        items = [batch.items[place] for place in places]
        inputs = model_inputs(items, self.encoder.normalisations, self.args.device)
        bounds = inputs["cu_seq_lens_q"]
        segment = torch.arange(len(items), device=bounds.device).repeat_interleave(bounds.diff().long())
        tasks = torch.tensor([item.task for item in items], device=bounds.device)
        if any(objective.active for objective in self.objectives):
            inputs["output_router_logits"] = True
        if batch.router_task is not None:
            inputs["router_task"] = batch.router_task[places.start : places.stop].to(bounds.device)
        with pooled_only():
            vectors = model(inputs)["sentence_embedding"].float()
        logits, self._router_logits = self._router_logits, ()
        return Embedded(vectors, logits, segment, tasks)

    def _keep_router_logits(self, module, args, output) -> None:
        # the modules after the backbone pass the vectors on alone
        self._router_logits = output.router_logits or ()

    def _forget_packing(self, module, args, features) -> None:
        # one vector per item is left, and the pooling that follows would look for its items' tokens
        features.pop("cu_seq_lens_q", None)

    def _check_finite(self, name: str, value: torch.Tensor, batch: ContrastiveBatch | None = None) -> None:
        if bool(torch.isfinite(value)):
            return
        whole = newest_checkpoint(self.args.output_dir) if self.is_world_process_zero() else None
        where = "" if batch is None else f" on rows of {self._names(batch)}"
        last = f"the last whole checkpoint is {whole}" if whole else "there is no checkpoint yet"
        raise ContrastiveError(
            f"step {self.state.global_step + 1}: the {name} is {value.item()}{where}; {last}. Lower learning_rate "
            f"({self.args.learning_rate}), lengthen warmup_steps, or use weights_dtype: float32"
        )

    def _names(self, batch: ContrastiveBatch) -> str:
        rows: dict[str, list[int]] = {}
        for dataset, number in zip(batch.dataset.tolist(), batch.numbers):
            rows.setdefault(self.datasets[dataset].name, []).append(number)
        return ", ".join(f"'{name}' ({', '.join(map(str, some[:8]))}{', ...' * (len(some) > 8)})"
                         for name, some in rows.items())  # fmt: skip

    # Logging

    def _record_step(self, output: LossOutput, chunks: Sequence[range], tokens: Sequence[int], seconds: float) -> None:
        self.record(
            hits=output.hits,
            masked=output.masked,
            chunks=len(chunks),
            items=len(tokens),
            tokens=sum(tokens),
            step_seconds=seconds,
            **{f"loss_{self.datasets[number].name}": value for number, value in output.by_dataset.items()},
        )
        for objective in self.objectives:
            if objective.active:
                self.record(**objective.metrics())

    def record(self, **metrics: float) -> None:
        """Adds values whose mean over the logging window goes into the log."""
        for name, value in metrics.items():
            entry = self._sums[name]
            entry[0] += float(value)
            entry[1] += 1

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **{name: round(total / count, 5) for name, (total, count) in self._sums.items()}}
            self._sums.clear()
        super().log(logs, start_time)

    # Optimizer

    def create_optimizer(self, model=None) -> MasterAdamW:
        if self.optimizer is None:
            args = self.args
            groups: dict[tuple, list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in (model or self.model).parameters():
                if parameter.requires_grad:
                    groups[parameter.dim() <= 1, mesh_of(parameter)].append(parameter)
            self.optimizer = MasterAdamW(
                [
                    {"params": groups[key], "weight_decay": 0.0 if key[0] else args.weight_decay}
                    for key in sorted(groups, key=lambda key: key[0])
                ],
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
            )
        return self.optimizer

    def _clip_grad_norm(self, model) -> torch.Tensor:
        # `Trainer` would clip the gradients in the weights' dtype; the optimizer steps with the masters'
        norm = getattr(self.optimizer, "optimizer", self.optimizer).clip_gradients(self.args.max_grad_norm)
        self._check_finite("norm of the gradients", norm)
        return norm

    # Checkpoints

    def _save_checkpoint(self, model, trial) -> None:
        write_checkpoint_folder(self, partial(super()._save_checkpoint, model, trial))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        write_model(self, Path(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        load_trained(self, Path(resume_from_checkpoint))

    def export_final(self) -> Path:
        """Writes `adapter/` and `final/`, see [`export_run`]; returns the one to use."""
        return export_run(self)


def load_trainable(folder: Path, args: ContrastiveConfig, router: RouterSettings) -> SentenceTransformer:
    """
    The model of a repository, with what the settings train made trainable.

    Args:
        folder (`Path`): The repository.
        args (`ContrastiveConfig`): Settings.
        router ([`RouterSettings`]): What the routers are conditioned on.
    """
    # the classes of this package stand in for the copies in the repository, so that fixes reach old repositories
    classes = {"sentence_transformer_moemb.MoEMBTransformer": MoEMBTransformer}
    check_architecture(MoEMBConfig.from_pretrained(str(folder)), args)
    with loading_for_adapters(args):
        model = SentenceTransformer._load_with_module_classes(
            str(folder),
            classes,
            device="cpu" if args.use_cpu else None,
            model_kwargs={"dtype": getattr(torch, args.weights_dtype), **distributed_kwargs(args)},
        )
    divide_gradients_once(model[0].model, args)
    # `Trainer` asks the model it is given, which here is the one around the backbone
    model.is_distributed_loading_by_transformers = args.distributed is not None
    condition_routers(model[0].model, model[0].processor, router, list(args.train_datasets))
    prepare_trainable(model[0].model, args)
    return model


def build_trainer(args: ContrastiveConfig, router: RouterSettings | None = None) -> ContrastiveTrainer:
    """
    The trainer of a recipe.

    Args:
        args (`ContrastiveConfig`): Settings.
        router ([`RouterSettings`], *optional*): The routers' objectives and conditioning; by default none.

    Raises:
        MoEMBError: a model or data set that is not there or does not fit; names it and the remedy.
    """
    folder = locate_model(args.model)
    datasets = load_datasets(args.train_datasets, args.hard_negatives)
    evaluator = build_evaluator(args.eval_datasets, args.per_device_eval_batch_size, args.matryoshka_dims)
    set_seed(args.seed)
    router = router or RouterSettings()
    model = load_trainable(folder, args, router)
    objectives = [RouterObjectives(model[0].model, router, list(args.train_datasets))]
    return ContrastiveTrainer(model, args, datasets, folder, evaluator, objectives, router.task_id_dropout)
