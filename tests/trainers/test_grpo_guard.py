"""What MoEMB's GRPO trainer relies on in TRL that TRL does not promise."""

import inspect

import pytest
import trl
from trl import GRPOTrainer


# private methods that MoEMBGRPOTrainer overrides, with the arguments it was written for
OVERRIDDEN = {
    "_generate_and_score_completions": ["self", "inputs"],
    "_generate": ["self", "prompts"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_get_per_token_logps_and_entropies": [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
        "compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes",
        "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
    ],
    "_compute_loss": ["self", "model", "inputs"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
}  # fmt: skip

# what the text of a method must still say, and what MoEMB does with it
SAID = {
    "_generate": [
        ("return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images",
         "MoEMB returns these eight values"),
    ],
    "_generate_and_score_completions": [
        (") = self._generate(prompts)", "MoEMB hands its rollouts over there"),
        ("self._calculate_rewards(inputs, prompts, completions, completion_ids_list)", "MoEMB adds columns there"),
        ('"prompt_ids": prompt_ids', "MoEMB reads the number of a rollout from it"),
        ('"completion_mask": completion_mask', "MoEMB takes groups without variance out of it"),
        ('"advantages": advantages', "MoEMB takes groups without variance out of it"),
        ('"num_items_in_batch": num_items_in_batch', "MoEMB counts it anew"),
        ('if "images" in inputs[0]', "MoEMB keeps columns of that name away from it"),
    ],
    "_calculate_rewards": [("rewards_per_func = gather(rewards_per_func)", "MoEMB expects rewards of all processes")],
    "_prepare_inputs": [
        ("split_tensor_dict(generation_batch, self.args.steps_per_generation)", "MoEMB's own tensors go through it"),
        ("shuffle_sequence_dict(generation_batch)", "MoEMB's own tensors go through it"),
    ],
    "_compute_loss": [
        ("torch.cat([prompt_ids, completion_ids], dim=1)", "MoEMB takes rollout and actions apart again"),
        ("per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(", "MoEMB replays there"),
        ("self.max_completion_length)", "MoEMB sets the constant of dr_grpo"),
        ("if self.aux_loss_enabled:", "MoEMB relies on router_aux_loss_coef=0 to switch it off"),
    ],
}  # fmt: skip

ATTRIBUTES = (
    "_step", "_metrics", "reward_weights", "num_generations", "num_generations_eval", "temperature",
    "multi_objective_aggregation", "max_completion_length",
)  # fmt: skip


def complaints(trainer_class) -> list[str]:
    """A sentence for each thing that is no longer as MoEMBGRPOTrainer needs it."""
    found, where = [], f"trl {trl.__version__}: GRPOTrainer"
    for name, wanted in OVERRIDDEN.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            found.append(
                f"{where}.{name} is gone, but trainers/grpo_trainer.py overrides it: find the method that took over "
                "its duty, override that one, and name it in OVERRIDDEN; until then pin trl below this release"
            )
            continue
        arguments = list(inspect.signature(method).parameters)
        if arguments != wanted:
            found.append(
                f"{where}.{name} now takes {arguments}, not {wanted}: compare what changed, adapt the override in "
                "trainers/grpo_trainer.py, then update OVERRIDDEN; until then pin trl below this release"
            )
    for name, sentences in SAID.items():
        method = getattr(trainer_class, name, None)
        source = "" if method is None else inspect.getsource(method)
        found += [
            f"{where}.{name} no longer says `{text}` ({why}): read the method, adapt trainers/grpo_trainer.py, then "
            "update SAID; until then pin trl below this release"
            for text, why in sentences
            if text not in source
        ]
    source = inspect.getsource(trainer_class.__init__)
    found += [
        f"{where}.__init__ no longer sets self.{name}, which trainers/grpo_trainer.py reads: find what stands for it"
        for name in ATTRIBUTES
        if f"self.{name} = " not in source
    ]
    return found


def test_trl_is_as_the_trainer_needs_it():
    assert not complaints(GRPOTrainer), "\n".join(complaints(GRPOTrainer))


def test_everything_that_is_overridden_is_guarded():
    from moemb.trainers.grpo_trainer import MoEMBGRPOTrainer

    own = {name for name in vars(MoEMBGRPOTrainer) if name.startswith("_") and not name.startswith("__")}
    private = {name for name in own if callable(getattr(GRPOTrainer, name, None))}
    assert private == set(OVERRIDDEN)


def _with_seed(self, prompts, seed):
    raise NotImplementedError


def _without_shuffling(self, generation_batch):
    return generation_batch


@pytest.mark.parametrize(
    ("name", "changed", "complaint"),
    [
        ("_generate", _with_seed, "._generate now takes ['self', 'prompts', 'seed']"),
        ("_compute_loss", None, "._compute_loss is gone"),
        ("_prepare_inputs", _without_shuffling, "._prepare_inputs no longer says `shuffle_sequence_dict"),
    ],
)
def test_a_change_in_trl_is_named_with_its_remedy(name, changed, complaint):
    found = complaints(type("Changed", (GRPOTrainer,), {name: changed}))
    assert any(complaint in sentence and "grpo_trainer.py" in sentence for sentence in found), found
