"""The runs of a study: what is shared, the model it becomes, contrastive training. Each is skipped when it is there.

A run is a process of its own, `moemb train` with a recipe that is written beside its checkpoints, so that it can be
repeated by hand, and goes on from its newest checkpoint when the study was stopped.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .ablate_config import AblateConfig, AblationError, Variant
from .errors import nearest
from .files import write_atomically
from .recipe import read_recipe
from .upcycling import Design


METHODS = ("contrastive", "mini-contrastive")
RECIPE = "recipe.yaml"
# what a step of the FLOPs estimate embeds: a label, and a picture of 64 x 64 pixels
TEXT_TOKENS, IMAGE_PATCHES = 16, (8, 8)


class Study:
    """
    The runs of a study.

    Args:
        config ([`AblateConfig`]): Settings.

    Raises:
        AblationError: a recipe of another method.
    """

    def __init__(self, config: AblateConfig):
        self.config = config
        self.train = read_recipe(config.train)
        if self.train.get("method") not in METHODS:
            raise AblationError(
                f"train {config.train} has method {self.train.get('method')!r}, but must be {' or '.join(METHODS)}"
            )
        known = sorted(self.train.get("train_datasets", {}))
        for task, name in config.presented.items():
            if name not in known:
                raise AblationError(
                    f"presented: '{task}' as '{name}', but train {config.train} has no data set of that name"
                    f"{nearest(name, known)}; it has {', '.join(known) or 'none'}"
                )
        self.pretrain = self._recipe("pretrain", "pretrain")
        self.common = self._recipe("common", "mini-contrastive")

    def _recipe(self, name: str, method: str) -> dict[str, Any] | None:
        path = getattr(self.config, name)
        if path is None:
            return None
        recipe = read_recipe(path)
        if recipe.get("method") != method:
            raise AblationError(f"{name} {path} has method {recipe.get('method')!r}, not {method}")
        corpus = {} if self.config.corpus is None else {"corpus": str(self.config.corpus)}
        return {**recipe, **getattr(self.config, f"{name}_settings"), **corpus}

    def instructions(self, name: str) -> dict[str, str | None]:
        """Instruction of each side that a data set of the training has."""
        settings = self.train["train_datasets"][name]
        return {side: settings.get(f"{side}_instruction") for side in ("query", "document")}

    def repository(self, name: str, seed: int) -> Path:
        """The trained repository of a variant and seed; trains what is not there yet."""
        base = self.base(name, seed)
        folder = self.config.output / "runs" / name / f"seed-{seed}"
        mini = self.train["method"] == "mini-contrastive"
        recipe = self.train_recipe(name) | {
            "output_dir": str(folder), "seed": seed, "max_steps": self.steps(name),
            "init_from" if mini else "model": str(base),
        }  # fmt: skip
        if self.config.corpus is not None and mini:
            recipe["corpus"] = str(self.config.corpus)
        final = folder / "final"
        train(recipe, folder, final, f"{name}, seed {seed}")
        if not mini:
            return final
        from .repository import assemble_checkpoint

        target = folder / "repository"
        if not (target / "modules.json").is_file():
            assemble_checkpoint(final, target)
        return target

    def train_recipe(self, name: str) -> dict[str, Any]:
        """The keys of a variant's training that do not depend on the seed."""
        return {**self.train, **self.config.train_settings, **self.config.variants[name].train}

    def steps(self, name: str) -> int:
        """Steps of a variant's training."""
        variant, first = self.config.variants[name], next(iter(self.config.variants))
        if variant.steps is not None:
            return variant.steps
        if self.config.equal == "steps" or name == first:
            return self.config.steps
        return max(1, round(self.config.steps * self.step_flops(first) / self.step_flops(name)))

    def step_flops(self, name: str) -> float:
        """Forward FLOPs of the items of one step, a label and a picture each half of them."""
        return self.item_flops(name) * items_of_step(self.train_recipe(name))

    def item_flops(self, name: str) -> float:
        """Forward FLOPs of an item, see [`item_flops`]."""
        from modeling_moemb import MoEMBConfig

        return item_flops(MoEMBConfig.from_pretrained(self.base(name, self.config.seeds[0])))

    def base(self, name: str, seed: int) -> Path:
        """The repository that a variant's training starts from."""
        variant = self.config.variants[name]
        if self.pretrain is None:
            from .calibration_repository import locate_model

            source, key = locate_model(self.config.base), self.config.base
            if variant.design is None and variant.emb == "mean":
                return source
        else:
            source, key = self.pretrained(variant, seed)
        identity = fingerprint([key, variant.design, variant.emb, seed])
        target = self.config.output / "base" / identity
        if not (target / "modules.json").is_file():
            make_base(source, target, variant, seed)
        return target

    def pretrained(self, variant: Variant, seed: int) -> tuple[Path, str]:
        """The checkpoint that a variant's training starts from, pretrained and trained in common; and its identity."""
        recipe = {**self.pretrain, **variant.pretrain, "seed": seed}
        source, identity = self._shared(recipe, fingerprint(without_output(recipe)), f"pretraining, seed {seed}")
        if self.common is None:
            return source, identity
        recipe = {**self.common, "seed": seed}
        identity = fingerprint([identity, without_output(recipe)])
        return self._shared(recipe | {"init_from": str(source)}, identity, f"training in common, seed {seed}")

    def _shared(self, recipe: dict[str, Any], identity: str, label: str) -> tuple[Path, str]:
        """Runs what several variants begin with, and other studies with the same `pretrain_output`."""
        folder = self.config.pretrain_output / identity
        train(recipe | {"output_dir": str(folder)}, folder, folder / "final", label)
        return folder / "final", identity


def without_output(recipe: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name != "output_dir"}


def train(recipe: dict[str, Any], folder: Path, final: Path, label: str) -> None:
    """
    Runs `moemb train` in a process of its own, unless it was run to its end.

    Args:
        recipe (`dict`): the recipe; written to `recipe.yaml` in the folder.
        folder (`Path`): the run's folder.
        final (`Path`): what is there when it is complete.
        label (`str`): what to call it.

    Raises:
        AblationError: the folder holds a run of other settings, or the training failed.
    """
    path, text = folder / RECIPE, yaml.safe_dump(recipe, sort_keys=True, allow_unicode=True)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise AblationError(
            f"{folder} holds a run of other settings ({changed_keys(path, recipe)}); remove it, or choose another "
            "output"
        )
    done = folder / "done.json"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # two studies may share it
        if not (done.is_file() and final.is_dir()):
            if not path.is_file():
                write_atomically(path, text)
            _run_to_its_end(path, final, label)
            write_atomically(done, json.dumps({"steps": recipe.get("max_steps")}) + "\n")
        for checkpoint in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):  # there is nothing left to go on with
            shutil.rmtree(checkpoint)


def _run_to_its_end(path: Path, final: Path, label: str) -> None:
    print(f"== {label}: moemb train --config {path}", file=sys.stderr, flush=True)
    run = subprocess.run([sys.executable, "-m", f"{__package__}.cli", "train", "--config", str(path)], check=False)
    if run.returncode == 130:
        raise KeyboardInterrupt
    if run.returncode or not final.is_dir():
        raise AblationError(
            f"{label}: the training ended with status {run.returncode}; its messages stand above. Mend the cause and "
            "run the study again: it goes on from the newest checkpoint"
        )


def changed_keys(path: Path, recipe: dict[str, Any]) -> str:
    before = read_recipe(path)
    return ", ".join(sorted(k for k in {*before, *recipe} if before.get(k) != recipe.get(k))) or "written otherwise"


def make_base(source: Path, target: Path, variant: Variant, seed: int) -> None:
    """
    Turns a pretrained checkpoint into the repository that training starts from.

    Args:
        source (`Path`): a checkpoint, or a repository.
        target (`Path`): the folder to make.
        variant ([`Variant`]): its design and the beginning of its `<emb>` row.
        seed (`int`): seed of what is drawn.
    """
    from .convert import convert_checkpoint
    from .repository import assemble_checkpoint

    target.parent.mkdir(parents=True, exist_ok=True)
    prepared = target.with_name(f"{target.name}-checkpoint")
    shutil.rmtree(prepared, ignore_errors=True)
    with_emb_row(source, prepared, variant.emb, seed)
    if variant.design is None:
        assemble_checkpoint(prepared, target)
    else:
        convert_checkpoint(prepared, target, design=Design(**{"seed": seed, **variant.design}))
    shutil.rmtree(prepared)


def with_emb_row(source: Path, target: Path, emb: str, seed: int) -> None:
    """Copies a checkpoint with a fresh `<emb>` row: the mean of the table, or that of the token that ends a document.

    A checkpoint whose `<emb>` was trained keeps it when `emb` is `"mean"`; with `"new"` it begins anew.
    """
    import torch

    from modeling_moemb import MoEMBModel

    from .checkpoint import write_checkpoint
    from .mini_contrastive_trainer import prepare_emb
    from .tokenizer import PAD, load_tokenizer

    tokenizer = load_tokenizer(source)
    model = MoEMBModel.from_pretrained(source, dtype=torch.float32)
    if emb == "new":
        model.config.pooling = "last"  # as before anything was pooled
    prepare_emb(model, seed)
    if emb == "end":
        table = model.get_input_embeddings().weight
        with torch.no_grad():
            table[model.config.emb_token_id] = table[tokenizer.convert_tokens_to_ids(PAD)]
    write_checkpoint(target, model, tokenizer, {"emb": emb, "seed": seed})


def items_of_step(recipe: dict[str, Any]) -> float:
    """Items of one step of a training recipe, up to a factor that is the same for all variants."""
    from .contrastive_config import ContrastiveConfig
    from .mini_contrastive_config import MiniContrastiveConfig

    if recipe["method"] == "contrastive":
        return recipe.get("batch_size", ContrastiveConfig.batch_size)
    names = ("emoji", "icon", "translation", "gloss", "article", "strip", "motion", "edit")

    def value(key: str) -> float:
        return recipe.get(key, getattr(MiniContrastiveConfig, key))

    return sum(value(f"{name}_rate") * value(f"{name}_chunk") for name in names)


def item_flops(config) -> float:
    """Forward FLOPs of an item of a training: the mean of a label and of a picture of 64 x 64 pixels."""
    from modeling_moemb.compute_moemb import ItemShape, count_flops, record_of_shapes

    items = [ItemShape(TEXT_TOKENS), ItemShape(4, images=[IMAGE_PATCHES])]
    return count_flops(config, record_of_shapes(config, items, {}, pooled_only=True)).total / len(items)


def fingerprint(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
