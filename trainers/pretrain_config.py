"""Settings of language-model pretraining, with the shape of the model it builds."""

from dataclasses import dataclass, field

from .packed_config import PackedTrainingConfig


@dataclass
class PretrainConfig(PackedTrainingConfig):
    r"""
    Arguments of [`PretrainTrainer`]: pretraining as a language model on interleaved text and images.

    > Parameters that control the documents of one step

    Args:
        emoji_documents (`int`, *optional*, defaults to 32): Emoji and their names in several languages.
        icon_documents (`int`, *optional*, defaults to 12): Icons and their names.
        translation_documents (`int`, *optional*, defaults to 16): Names in several languages, without a picture.
        gloss_documents (`int`, *optional*, defaults to 24): Dictionary entries.
        strip_documents (`int`, *optional*, defaults to 12): Rendered headings and their text.
        clip_documents (`int`, *optional*, defaults to 1): Clips and their motion caption.
        validation_documents (`int`, *optional*, defaults to 64): Documents of each kind in the validation batch.

    > Parameters that control the shape of the model (see `MoEMBConfig`); ignored with `init_from`

    Args:
        vocab_size (`int`, *optional*, defaults to 8192): Size of the tokenizer that is trained.
        initializer_range (`float`, *optional*, defaults to 0.045):
            Standard deviation of the initial weights: about 0.8 of Xavier's at this width (0.02 suits width 2048).
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim (`int`): The decoder.
        linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim (`int`):
            The Gated DeltaNet blocks; three of four blocks.
        feed_forward (`str`, *optional*, defaults to `"moe"`):
            `"moe"`, or without a learned router `"dense"` or `"modality"` (see `MoEMBConfig`).
        num_experts, num_experts_per_tok, moe_intermediate_size, shared_expert_intermediate_size (`int`): The experts.
        intermediate_size (`int`, *optional*, defaults to 480):
            Width of the network with `"dense"`, and of each of the three with `"modality"`; the default computes as
            much for a token as the default experts.
        mrope_section (`list[int]`): Rotary frequencies for time, height and width; sums to
            `head_dim * partial_rotary_factor / 2`.
        vision_depth, vision_hidden_size, vision_heads, vision_intermediate_size, patch_size (`int`): The vision tower.
    """

    emoji_documents: int = field(default=32, metadata={"help": "Emoji documents per step."})
    icon_documents: int = field(default=12, metadata={"help": "Icon documents per step."})
    translation_documents: int = field(default=16, metadata={"help": "Translation documents per step."})
    gloss_documents: int = field(default=24, metadata={"help": "Dictionary documents per step."})
    strip_documents: int = field(default=12, metadata={"help": "Heading strips per step."})
    clip_documents: int = field(default=1, metadata={"help": "Clips per step."})
    validation_documents: int = field(default=64, metadata={"help": "Validation documents of each kind."})

    vocab_size: int = field(default=8192, metadata={"help": "Tokens of the vocabulary."})
    initializer_range: float = field(default=0.045, metadata={"help": "Std of the initial weights."})
    hidden_size: int = field(default=192, metadata={"help": "Width of the decoder and of the embedding."})
    num_hidden_layers: int = field(default=8, metadata={"help": "Blocks of the decoder."})
    num_attention_heads: int = field(default=4, metadata={"help": "Query heads."})
    num_key_value_heads: int = field(default=2, metadata={"help": "Key and value heads."})
    head_dim: int = field(default=64, metadata={"help": "Size of an attention head."})
    partial_rotary_factor: float = field(default=0.25, metadata={"help": "Share of a head that is rotated."})
    mrope_section: list[int] = field(default_factory=lambda: [4, 2, 2], metadata={"help": "Time, height, width."})
    linear_num_key_heads: int = field(default=4, metadata={"help": "Key heads of Gated DeltaNet."})
    linear_num_value_heads: int = field(default=8, metadata={"help": "Value heads of Gated DeltaNet."})
    linear_key_head_dim: int = field(default=32, metadata={"help": "Key head size of Gated DeltaNet."})
    linear_value_head_dim: int = field(default=32, metadata={"help": "Value head size of Gated DeltaNet."})
    feed_forward: str = field(default="moe", metadata={"help": "moe, dense or modality."})
    intermediate_size: int = field(default=480, metadata={"help": "Width of the network without a learned router."})
    num_experts: int = field(default=16, metadata={"help": "Routed experts."})
    num_experts_per_tok: int = field(default=4, metadata={"help": "Routed experts per token."})
    moe_intermediate_size: int = field(default=96, metadata={"help": "Width of a routed expert."})
    shared_expert_intermediate_size: int = field(default=96, metadata={"help": "Width of the shared expert."})
    vision_depth: int = field(default=4, metadata={"help": "Blocks of the vision tower."})
    vision_hidden_size: int = field(default=128, metadata={"help": "Width of the vision tower."})
    vision_heads: int = field(default=4, metadata={"help": "Heads of the vision tower."})
    vision_intermediate_size: int = field(default=512, metadata={"help": "MLP width of the vision tower."})
    patch_size: int = field(default=8, metadata={"help": "Side of a patch in pixels."})

    def __post_init__(self):
        super().__post_init__()
        rotary = self.head_dim * self.partial_rotary_factor / 2
        if sum(self.mrope_section) != rotary:
            raise ValueError(
                f"mrope_section={self.mrope_section} must sum to head_dim * partial_rotary_factor / 2 = {rotary:g}"
            )
