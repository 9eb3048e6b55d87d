"""Settings of the corpus."""

from dataclasses import dataclass, field
from pathlib import Path

from .corpus_records import EMOJI_SOURCES, ICON_SOURCES
from .corpus_sources import default_corpus_folder
from .errors import MoEMBError, nearest


FONTS = {
    "font-dejavu": ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansCondensed.ttf"),
    "font-lora": ("Lora_400Regular.ttf", "Lora_700Bold.ttf"),
    "font-open-sans": ("OpenSans_400Regular.ttf", "OpenSans_600SemiBold.ttf"),
}
EVALUATION_SETS = ("wiki", "refman", "stamps", "metamath", "flags")


class CorpusError(MoEMBError, ValueError):
    """A setting of the corpus that cannot be used; the text names it and the remedy."""


@dataclass
class CorpusConfig:
    """Settings of `moemb data`.

    Args:
        output (`str`, *optional*):
            Folder to build in. Defaults to `<cache>/mini-corpus`.
        image_sources (`list[str]`, *optional*):
            Artists and icon sets. `"openmoji"` (CC-BY-SA-4.0) may be added; it is off by default to keep training data
            permissive.
        clips (`bool`, *optional*, defaults to `True`):
            Fetch the real animations (165 MB) that the clip task is built from.
        teachers (`bool`, *optional*, defaults to `True`):
            Compute the teacher vectors.
        articles (`int`, *optional*, defaults to 20000):
            Longer WordNet texts put together for training on documents.
        test_percent (`int`, *optional*, defaults to 10):
            Share of concept families held out for the tests.
        validation_percent (`int`, *optional*, defaults to 5):
            Share of concept families held out for choosing settings.
        near_duplicate (`float`, *optional*, defaults to 0.97):
            Ink cosine above which a held-out picture counts as one seen in training.
        workers (`int`, *optional*, defaults to 1):
            Processes that render.
        threads (`int`, *optional*, defaults to 1):
            Threads the teachers use.
        evaluation_sets (`list[str]`, *optional*):
            Local-only sets that `moemb data --evaluation` builds.
    """

    output: str | None = None
    image_sources: list[str] = field(default_factory=lambda: ["noto", "fluent", "twemoji", "mdi", "tabler", "lucide"])
    clips: bool = True
    teachers: bool = True
    articles: int = 20000
    test_percent: int = 10
    validation_percent: int = 5
    near_duplicate: float = 0.97
    workers: int = 1
    threads: int = 1
    evaluation_sets: list[str] = field(default_factory=lambda: list(EVALUATION_SETS))

    def __post_init__(self):
        for source in self.image_sources:
            if source not in EMOJI_SOURCES + ICON_SOURCES:
                known = EMOJI_SOURCES + ICON_SOURCES
                raise CorpusError(
                    f"image_sources: unknown source {source!r}{nearest(source, known)}; known: {', '.join(known)}"
                )
        for needed in ("noto", "fluent", "twemoji"):
            if needed not in self.image_sources:
                raise CorpusError(f"image_sources: {needed!r} is missing, and the split and the tests need it")
        for name in self.evaluation_sets:
            if name not in EVALUATION_SETS:
                raise CorpusError(
                    f"evaluation_sets: unknown set {name!r}{nearest(name, EVALUATION_SETS)}; known: "
                    f"{', '.join(EVALUATION_SETS)}"
                )
        for name in ("workers", "threads"):
            if getattr(self, name) < 1:
                raise CorpusError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not (self.test_percent > 0 < self.validation_percent and self.test_percent + self.validation_percent < 100):
            raise CorpusError(
                f"test_percent {self.test_percent} and validation_percent {self.validation_percent} must be above 0 "
                "and leave some families to train on"
            )

    @property
    def folder(self) -> Path:
        """`Path`: the corpus folder."""
        return Path(self.output).expanduser() if self.output else default_corpus_folder()
