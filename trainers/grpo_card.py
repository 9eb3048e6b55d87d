"""The model card of a GRPO run: the card of a MoEMB repository, and how its gates came about."""

from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCard

from .model_card import card_text


SECTION = """
## How the gates were trained

Policy optimisation (GRPO) with [TRL](https://github.com/huggingface/trl): the actions of the gates are the completion,
rollouts are executed by removing the work, the reward is recall@{recall} times the FLOPs removed, plus the margin of
the partner over the other candidates; distillation to the vector of full compute stands in place of the KL term
({distillation}). {what} trained, in groups of {group} rollouts, loss `{loss}`, {steps} steps so far.

Compute budget recorded in `config.json`: `{budget}`. TRL {trl}, transformers {transformers}, PyTorch {torch}.

### Citation

```bibtex
{citation}
```
"""


def write_card(trainer, model_name: str | None, dataset_name: str | None, tags: str | list[str] | None) -> None:
    """Writes `README.md` into the output folder of a [`MoEMBGRPOTrainer`]; arguments as in TRL's trainers."""
    args, config = trainer.args, trainer.moemb.config
    source = config._name_or_path
    base_model = source if source and not Path(source).is_dir() else None
    name = trainer.hub_model_id or model_name or Path(args.output_dir).name
    card = ModelCard(card_text(config, name=name, base_model=base_model, trained=True))
    own = [tags] if isinstance(tags, str) else list(tags or [])
    card.data.tags = list(dict.fromkeys([*card.data.tags, "generated_from_trainer", *trainer._tag_names, *own]))
    card.data.model_name = name
    if dataset_name:
        card.data.datasets = dataset_name
    as_reward = "distillation_reward" in trainer.reward_func_names
    card.text += SECTION.format(
        recall=args.num_recalled,
        distillation=" and ".join(["as a reward"] * as_reward + ["as a loss"] * trainer.distils_by_loss) or "left out",
        what="The gates alone were" if args.freeze_backbone else "The gates and the backbone's adapters were",
        group=args.num_generations,
        loss=args.loss_type,
        steps=trainer.state.global_step,
        budget=trainer.budget,
        citation=trainer._paper["citation"],
        **{package: version(package) for package in ("trl", "transformers", "torch")},
    )
    card.save(Path(args.output_dir) / "README.md")
