"""What the packages of pictures say: emoji concepts with their labels, and captioned drawings."""

import json
from dataclasses import dataclass
from pathlib import Path

from .corpus_sources import read_members
from .corpus_split import PhraseSet, concept_family, family_split


LANGUAGES = (
    "fr", "de", "es", "it", "pt", "nl", "sv", "da", "nb", "fi", "et", "lt", "pl", "hu", "ru", "uk", "zh", "zh-hant",
    "ja", "ko",
    "th", "vi", "ms", "hi", "bn",
)  # fmt: skip
SKIN_TONES = {
    1: "light skin tone", 2: "medium-light skin tone", 3: "medium skin tone", 4: "medium-dark skin tone",
    5: "dark skin tone",
}  # fmt: skip
EMOJI_SOURCES = ("noto", "fluent", "openmoji", "twemoji")
ICON_SOURCES = ("mdi", "tabler", "lucide")
_COMPONENT_GROUP = 2  # bare skin tones and hair pieces: no pictures of their own
_INK = "#222222"


@dataclass(frozen=True)
class Drawing:
    """One captioned SVG: `row` is its line of `images.jsonl`, `svg` the source text."""

    row: dict
    svg: str


def code_point_key(code: str) -> str:
    """Code points in lower case without the presentation selector: the id of a concept, such as `"1f44b-1f3fd"`."""
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def read_concepts(archive: Path, test_percent: int = 10, validation_percent: int = 5) -> dict[str, dict]:
    """Emoji concepts with labels in all languages and their split.

    Args:
        archive (`Path`):
            The `emojibase-data` package.
        test_percent (`int`, *optional*, defaults to 10):
            Share of families held out for the tests.
        validation_percent (`int`, *optional*, defaults to 5):
            Share of families held out for choosing settings.

    Returns:
        `dict[str, dict]`: by concept id: `en`, `tags`, `group`, `subgroup`, `labels` (language to label), `base` (id
        of the concept this one is a skin variant of, or `None`), `tone` (text of the skin tone, or `None`), `family`,
        `split`.
    """
    wanted = {f"{language}/data.json" for language in ("en", *LANGUAGES)} | {"meta/groups.json"}
    members = {name: json.loads(data) for name, data in read_members(archive, wanted.__contains__).items()}
    labels: dict[str, dict[str, str]] = {}
    for language in LANGUAGES:
        for entry in members[f"{language}/data.json"]:
            for form in (entry, *entry.get("skins", ())):
                labels.setdefault(code_point_key(form["hexcode"]), {})[language] = form["label"]
    names = members["meta/groups.json"]
    concepts: dict[str, dict] = {}
    for entry in members["en/data.json"]:
        if entry.get("group") is None or entry["group"] == _COMPONENT_GROUP:
            continue
        base = code_point_key(entry["hexcode"])
        family = concept_family(entry["label"])
        common = {
            "group": names["groups"][str(entry["group"])],
            "subgroup": names["subgroups"][str(entry["subgroup"])],
            "family": family,
            "split": family_split(family, test_percent, validation_percent),
        }
        for form in (entry, *entry.get("skins", ())):
            key = code_point_key(form["hexcode"])
            is_base = form is entry
            concepts[key] = {
                "en": form["label"], "tags": form.get("tags", []) if is_base else [], **common,
                "labels": labels.get(key, {}),
                "base": None if is_base else base, "tone": None if is_base else _tone_text(form["tone"]),
            }  # fmt: skip
    return concepts


def _tone_text(tone: int | list[int]) -> str:
    tones = tone if isinstance(tone, list) else [tone]
    return ", ".join(SKIN_TONES[number] for number in tones)


class _IconifySet:
    """The icons of one `@iconify-json` package, each as a whole SVG document."""

    def __init__(self, archive: Path):
        members = read_members(archive, {"icons.json", "chars.json"}.__contains__)
        self._pack = json.loads(members["icons.json"])
        self.characters = {code_point_key(code): name for code, name in json.loads(members["chars.json"]).items()}

    def svg(self, name: str) -> str | None:
        """SVG text of an icon; `None` if the name (or the end of its alias chain) is not in the set."""
        for _ in range(8):
            if name in self._pack["icons"] or name not in self._pack.get("aliases", {}):
                break
            name = self._pack["aliases"][name]["parent"]
        icon = self._pack["icons"].get(name)
        if icon is None:
            return None
        width = icon.get("width", self._pack.get("width", 16))
        height = icon.get("height", self._pack.get("height", 16))
        box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
        body = icon["body"].replace("currentColor", _INK)
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'width="{width}" height="{height}" viewBox="{box}">{body}</svg>'
        )


def emoji_drawings(source: str, archive: Path, concepts: dict[str, dict]) -> list[Drawing]:
    """One drawing per concept the artist drew. Twemoji rows have the split `"evaluation"`, others their concept's."""
    pack = _IconifySet(archive)
    drawings = []
    for key, concept in concepts.items():
        svg = pack.svg(pack.characters[key]) if key in pack.characters else None
        if svg is None:
            continue
        split = "evaluation" if source == "twemoji" else concept["split"]
        row = {
            "key": f"{source}/{key}",
            "source": source,
            "concept": key,
            "text": concept["en"],
            "tags": concept["tags"],
        }
        drawings.append(Drawing({**row, "split": split}, svg))
    return drawings


def icon_drawings(source: str, archive: Path, held_out: PhraseSet) -> tuple[list[Drawing], int]:
    """Icons of one set whose captions hold no held-out label.

    Returns:
        `tuple[list[Drawing], int]`: the drawings, and how many icons were dropped for their captions.
    """
    captions = {"mdi": _mdi_captions, "tabler": _tabler_captions, "lucide": _lucide_captions}[source]
    folder = {"mdi": "svg/", "tabler": "icons/outline/", "lucide": "icons/"}[source]
    members = read_members(archive, lambda name: name.endswith(".json") or name.startswith(folder))
    drawings, dropped = [], 0
    for name, text, tags in captions(members):
        data = members.get(f"{folder}{name}.svg")
        if data is None:
            continue
        if any(held_out.found_in(caption) for caption in (text, *tags)):
            dropped += 1
            continue
        row = {
            "key": f"{source}/{name}",
            "source": source,
            "concept": None,
            "text": text,
            "tags": tags,
            "split": "train",
        }
        drawings.append(Drawing(row, data.decode().replace("currentColor", _INK)))
    return drawings, dropped


def _spaced(name: str) -> str:
    return " ".join(name.replace("-", " ").replace("_", " ").split())


def _mdi_captions(members: dict[str, bytes]):
    for icon in json.loads(members["meta.json"]):
        if not icon["deprecated"]:
            yield icon["name"], _spaced(icon["name"]), [_spaced(alias) for alias in icon["aliases"]]


def _tabler_captions(members: dict[str, bytes]):
    for name, icon in json.loads(members["icons.json"]).items():
        yield name, _spaced(name), [_spaced(str(tag)) for tag in icon["tags"]]


def _lucide_captions(members: dict[str, bytes]):
    for name, tags in json.loads(members["tags.json"]).items():
        yield name, _spaced(name), [_spaced(tag) for tag in tags]
