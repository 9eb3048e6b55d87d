"""Settings of moemb-mini's contrastive training: the mixture, the losses and the teachers."""

from dataclasses import dataclass, field

from .packed_config import PackedTrainingConfig


@dataclass
class MiniContrastiveConfig(PackedTrainingConfig):
    r"""
    Arguments of [`MiniContrastiveTrainer`].

    > Parameters that control the mixture: each source has a rate (sub-batches per step; 0.5 is one at every second
    > step, 0 switches it off) and a chunk (things per sub-batch)

    Args:
        emoji_rate (`float`, defaults to 1.0), emoji_chunk (`int`, defaults to 80): Concepts; two pictures and two
            captions each.
        icon_rate (`float`, defaults to 1.0), icon_chunk (`int`, defaults to 24): Icons.
        translation_rate (`float`, defaults to 1.0), translation_chunk (`int`, defaults to 64): Concepts; two labels.
        gloss_rate (`float`, defaults to 1.0), gloss_chunk (`int`, defaults to 64): Dictionary pairs.
        article_rate (`float`, defaults to 0.25), article_chunk (`int`, defaults to 32): Gloss and article.
        strip_rate (`float`, defaults to 1.0), strip_chunk (`int`, defaults to 48): Rendered headings.
        motion_rate (`float`, defaults to 0.25), motion_chunk (`int`, defaults to 32): Clips.
        edit_rate (`float`, defaults to 0.25), edit_chunk (`int`, defaults to 5): People; 11 to 16 pictures each.
        instruction_share (`float`, *optional*, defaults to 0.05):
            Share of queries that carry an instruction, so that one does not disturb the model.

    > Parameters that control language modelling beside the contrast (see the recipe for why)

    Args:
        language_rate (`float`, *optional*, defaults to 0.0): Language-model sub-batches per step, at most 1.
        language_documents (`int`, *optional*, defaults to 12): Documents of each kind in one.
        language_weight (`float`, *optional*, defaults to 0.5): Weight of the language-model loss.

    > Parameters that control the losses

    Args:
        emoji_weight, icon_weight, translation_weight, gloss_weight, article_weight, strip_weight, motion_weight,
            edit_weight (`float`, *optional*, default to 1.0, emoji 2.0): Weight of each source's contrastive loss.
        scale (`float`, *optional*, defaults to 20.0): Inverse temperature of the contrastive losses.
        text_teacher_weight (`float`, *optional*, defaults to 1.0): Weight of distillation to the text teacher.
        vision_teacher_weight (`float`, *optional*, defaults to 0.7): Weight of distillation to the vision teacher.
        teacher_scale (`float`, *optional*, defaults to 20.0): Inverse temperature of distillation.
    """

    emoji_rate: float = field(default=1.0, metadata={"help": "Emoji sub-batches per step."})
    emoji_chunk: int = field(default=80, metadata={"help": "Concepts per emoji sub-batch."})
    icon_rate: float = field(default=1.0, metadata={"help": "Icon sub-batches per step."})
    icon_chunk: int = field(default=24, metadata={"help": "Icons per sub-batch."})
    translation_rate: float = field(default=1.0, metadata={"help": "Translation sub-batches per step."})
    translation_chunk: int = field(default=64, metadata={"help": "Concepts per translation sub-batch."})
    gloss_rate: float = field(default=1.0, metadata={"help": "Dictionary sub-batches per step."})
    gloss_chunk: int = field(default=64, metadata={"help": "Pairs per dictionary sub-batch."})
    article_rate: float = field(default=0.25, metadata={"help": "Article sub-batches per step."})
    article_chunk: int = field(default=32, metadata={"help": "Pairs per article sub-batch."})
    strip_rate: float = field(default=1.0, metadata={"help": "Heading sub-batches per step."})
    strip_chunk: int = field(default=48, metadata={"help": "Headings per sub-batch."})
    motion_rate: float = field(default=0.25, metadata={"help": "Clip sub-batches per step."})
    motion_chunk: int = field(default=32, metadata={"help": "Clips per sub-batch."})
    edit_rate: float = field(default=0.25, metadata={"help": "Edit sub-batches per step."})
    edit_chunk: int = field(default=5, metadata={"help": "People per edit sub-batch."})
    instruction_share: float = field(default=0.05, metadata={"help": "Share of queries with an instruction."})

    language_rate: float = field(default=0.0, metadata={"help": "Language-model sub-batches per step, at most 1."})
    language_documents: int = field(default=12, metadata={"help": "Documents of each kind in a language sub-batch."})
    language_weight: float = field(default=0.5, metadata={"help": "Weight of the language-model loss."})

    emoji_weight: float = field(default=2.0, metadata={"help": "Weight of the emoji loss."})
    icon_weight: float = field(default=1.0, metadata={"help": "Weight of the icon loss."})
    translation_weight: float = field(default=1.0, metadata={"help": "Weight of the translation loss."})
    gloss_weight: float = field(default=1.0, metadata={"help": "Weight of the dictionary loss."})
    article_weight: float = field(default=1.0, metadata={"help": "Weight of the article loss."})
    strip_weight: float = field(default=1.0, metadata={"help": "Weight of the heading loss."})
    motion_weight: float = field(default=1.0, metadata={"help": "Weight of the clip loss."})
    edit_weight: float = field(default=1.0, metadata={"help": "Weight of the edit loss."})
    scale: float = field(default=20.0, metadata={"help": "Inverse temperature of the contrast."})
    text_teacher_weight: float = field(default=1.0, metadata={"help": "Weight of the text teacher."})
    vision_teacher_weight: float = field(default=0.7, metadata={"help": "Weight of the vision teacher."})
    teacher_scale: float = field(default=20.0, metadata={"help": "Inverse temperature of distillation."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("emoji", "icon", "translation", "gloss", "article", "strip", "motion", "edit"):
            if getattr(self, f"{name}_chunk") < 1:
                raise ValueError(f"{name}_chunk={getattr(self, f'{name}_chunk')}: a sub-batch holds at least 1 thing")
        for name in ("instruction_share", "language_rate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: use a value in [0, 1]")
