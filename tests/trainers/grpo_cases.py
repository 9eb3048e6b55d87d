"""A tiny model with gates, pairs of items, and trainers of them; run as a script it is one process of a training."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file

from modeling_moemb.gates_moemb import attach_gates
from moemb.trainers.grpo_config import MoEMBGRPOConfig
from moemb.trainers.grpo_trainer import MoEMBGRPOTrainer
from tests.modeling_moemb.embedders import build, picture
from tests.processors import lean_processor


GATES = {"gradual": {}, "skip": {"blocks": [2, 3, 5, 7]}}


def gated_model(tiny_settings, gates=GATES, saving: float = -1.0):
    """A tiny model whose gates save often, and by what they see."""
    processor = lean_processor(max_length=128)
    model = build(tiny_settings, processor)
    attach_gates(model, gates)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.gates.named_parameters():
            if name.endswith("bias") and not name.startswith("keep.norm"):
                parameter.fill_(saving)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.05)
        if model.gates.keep is not None:
            model.gates.keep.head.bias.copy_(torch.tensor([0.0, saving]))
    return model, processor


def pairs(count: int = 12) -> Dataset:
    """Names and pictures; the items are made when a row is read."""

    def rows(numbers: dict) -> dict:
        return {
            "prompt": [f"picture number {number}" for number in numbers["number"]],
            "positive": [{"text": "see", "image": picture(48, 64, seed=number)} for number in numbers["number"]],
            "number": numbers["number"],
        }

    columns = {"number": list(range(count)), "prompt": [""] * count, "positive": [""] * count}
    return Dataset.from_dict(columns).with_transform(rows)


def grpo_trainer(model, processor, folder, data=None, reward_funcs=None, trainer=None, **settings):
    settings = {
        "per_device_train_batch_size": 12,
        "num_generations": 4,
        "recall_k": 1,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "per_device_eval_batch_size": 12,
        **settings,
    }
    args = MoEMBGRPOConfig(str(folder), **settings)
    data = pairs() if data is None else data
    extra = trainer or {}
    return MoEMBGRPOTrainer(
        model, args=args, train_dataset=data, processing_class=processor, reward_funcs=reward_funcs, **extra
    )


def generation(trainer) -> list[dict]:
    """The first generation batch, as the sampler delivers it."""
    return next(iter(trainer.get_train_dataloader()))


if __name__ == "__main__":
    from tests.conftest import tiny_settings

    torch.set_num_threads(1)
    output, per_device, replay = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    model, processor = gated_model(tiny_settings.__wrapped__())
    trainer = grpo_trainer(
        model, processor, output / "run", per_device_train_batch_size=per_device, num_generations=8, replay=replay,
        loss_type=sys.argv[4], optim="sgd", learning_rate=1.0,  # Adam would make rounding of tiny gradients a step
    )  # fmt: skip
    trainer.train()
    if trainer.accelerator.is_main_process:
        logged = {f"log/{name}": torch.tensor(float(value)) for name, value in trainer.state.log_history[0].items()}
        save_file({**trainer.moemb.gates.state_dict(), **logged}, output / "gates.safetensors")
