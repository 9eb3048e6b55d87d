"""Small archives in the shape of the real packages, so that the corpus can be built without a registry."""

import io
import json
import tarfile
from pathlib import Path

from PIL import Image, ImageFont

from moemb.trainers.corpus_config import FONTS
from moemb.trainers.corpus_records import LANGUAGES
from moemb.trainers.corpus_sources import PACKAGES


# With the default shares these English labels fall into the splits named here (by MD5, so on every machine).
CONCEPTS = {
    "1F600": ("grinning face", "smileys-emotion"),  # train
    "1F436": ("dog face", "animals-nature"),  # train
    "1F44B": ("waving hand", "people-body"),  # train, with skin tones
    "1F9D9": ("mage", "people-body"),  # train, with a woman's form
    "1F9D9-200D-2640-FE0F": ("woman mage", "people-body"),
    "1F916": ("robot", "smileys-emotion"),  # test
    "1F528": ("hammer", "objects"),  # test
    "1F989": ("owl", "animals-nature"),  # validation
    "1F1E6-1F1E9": ("flag: Andorra", "flags"),  # train, drawn by the held-out artist alone
}
GROUPS = ["smileys-emotion", "people-body", "component", "animals-nature", "objects", "flags"]
COLOURS = ["#d22", "#2a2", "#22d", "#dd2", "#2dd", "#d2d", "#888", "#f80", "#08f", "#444", "#a50", "#0a5"]


def tgz(path: Path, members: dict[str, bytes | str]) -> Path:
    """An npm archive: members stand below `package/`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as pack:
        for name, data in members.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            pack.addfile(info, io.BytesIO(data))
    return path


def _shape(number: int, artist: int) -> str:
    """A body that differs by concept (colour, place) and by artist (form)."""
    colour, x = COLOURS[number % len(COLOURS)], 4 + 2 * (number % 5)
    if artist == 0:
        return f'<circle cx="{x + 6}" cy="16" r="9" fill="{colour}"/>'
    if artist == 1:
        return f'<rect x="{x}" y="6" width="12" height="20" fill="{colour}"/>'
    return f'<path d="M{x} 28 L{x + 8} 3 L{x + 14} 28 Z" fill="{colour}" stroke="currentColor"/>'


def _emojibase() -> dict[str, str]:
    entries = []
    for code, (label, group) in CONCEPTS.items():
        number = GROUPS.index(group)
        subgroup = 1 if label.startswith("flag:") else 0
        entry = {
            "label": label,
            "hexcode": code,
            "tags": [f"{label.split()[-1]} tag"],
            "group": number,
            "subgroup": subgroup,
        }
        if label == "waving hand":
            entry["skins"] = [
                {"label": f"{label}: light skin tone", "hexcode": f"{code}-1F3FB", "tone": 1, "group": number},
                {"label": f"{label}: dark skin tone", "hexcode": f"{code}-1F3FF", "tone": 5, "group": number},
            ]
        entries.append(entry)
    entries.append({"label": "light skin tone", "hexcode": "1F3FB", "group": 2, "subgroup": 0})
    entries.append({"label": "regional indicator A", "hexcode": "1F1E6"})
    files = {"en/data.json": json.dumps(entries)}
    for language in LANGUAGES:
        translated = [
            {
                **e,
                "label": f"{language} {e['label']}",
                "skins": [{**s, "label": f"{language} {s['label']}"} for s in e.get("skins", [])],
            }
            for e in entries
        ]
        files[f"{language}/data.json"] = json.dumps(translated)
    groups = {str(number): name for number, name in enumerate(GROUPS)}
    files["meta/groups.json"] = json.dumps({"groups": groups, "subgroups": {"0": "thing", "1": "country-flag"}})
    return files


def _iconify(artist: int, with_flags: bool) -> dict[str, str]:
    codes = [code for code, (label, _) in CONCEPTS.items() if with_flags or not label.startswith("flag:")]
    codes += ["1F44B-1F3FB", "1F44B-1F3FF"]
    icons = {f"icon-{number}": {"body": _shape(number, artist)} for number in range(len(codes))}
    pack = {"width": 32, "height": 32, "icons": icons, "aliases": {"also-0": {"parent": "icon-0"}}}
    names = ["also-0", *(f"icon-{number}" for number in range(1, len(codes)))]
    characters = dict(zip([code.lower() for code in codes], names, strict=True))
    return {"icons.json": json.dumps(pack), "chars.json": json.dumps(characters)}


def _icon(number: int) -> str:
    points = f"M3 {3 + number} H21 V{21 - number} H3 Z"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path d="{points}" stroke="currentColor"/></svg>'
    )


def _icons() -> dict[str, dict[str, str]]:
    names = ["home", "robot-off", "book-open", "tools"]  # "robot" is a held-out label, "tools" has a held-out alias
    tags = {"home": ["house"], "robot-off": [], "book-open": ["reading"], "tools": ["hammers"]}
    mdi = [
        {"name": name, "aliases": tags[name], "deprecated": name == "never", "tags": []}
        for name in [*names, "never"]
        if name in tags
    ]
    return {
        "mdi": {"meta.json": json.dumps(mdi), **{f"svg/{name}.svg": _icon(i) for i, name in enumerate(names)}},
        "tabler": {
            "icons.json": json.dumps({name: {"tags": tags[name], "category": "x"} for name in names}),
            **{f"icons/outline/{name}.svg": _icon(4 + i) for i, name in enumerate(names)},
        },
        "lucide": {
            "tags.json": json.dumps(tags),
            **{f"icons/{name}.svg": _icon(8 + i) for i, name in enumerate(names)},
        },
    }


def _wordnet() -> dict[str, str]:
    head = "  1 This software and database is being provided to you, the LICENSEE, by Princeton University\n"
    nouns = [
        "00000001 05 n 02 beagle 0 beagle_dog 0 001 @ 00000002 n 0000 | a small hound used for hunting hares; "
        '"the beagle ran"',
        "00000002 05 n 01 hound 0 001 ~ 00000001 n 0000 | any of several breeds of dog used for hunting, typically "
        "having large drooping ears",
        '00000003 06 n 02 robot 0 automaton 0 000 | a mechanism that can move automatically; "it is a robot"',
        "00000004 20 n 01 oak_tree 0 000 | a deciduous tree of the genus Quercus",
    ]
    names = [f"strange_gadget_{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(150)]
    nouns += [f"{10 + i:08d} 06 n 01 {name} 0 000 | gadget number {i} of the shed" for i, name in enumerate(names)]
    verbs = ["00000005 30 v 01 run 0 000 01 + 01 00 | move fast by using one's feet"]
    adjectives = ["00000006 00 a 01 afloat(p) 0 000 | borne on the water; floating"]
    parts = {"noun": nouns, "verb": verbs, "adj": adjectives}
    return {f"dict/data.{part}": head + "\n".join(lines) + "\n" for part, lines in parts.items()}


def _animations() -> dict[str, bytes]:
    files = {}
    for code, count in (("1F600", 12), ("1F916", 8), ("1F436", 3)):  # the last has too few frames
        frames = [Image.new("RGBA", (40, 40), (20 * i, 90, 200, 255)) for i in range(count)]
        buffer = io.BytesIO()
        frames[0].save(buffer, "WEBP", save_all=True, append_images=frames[1:], duration=40, lossless=True)
        files[f"assets/{code.lower()}.webp"] = buffer.getvalue()
    return files


def write_fake_packages(folder: Path) -> dict[str, Path]:
    """Writes all fake archives; returns them by the key of `PACKAGES`."""
    font = ImageFont.load_default(11).path.getvalue()
    contents = {
        "emojibase": _emojibase(),
        "noto": _iconify(0, False),
        "fluent": _iconify(1, False),
        "twemoji": _iconify(2, True),
        "wordnet": _wordnet(),
        "animations": _animations(),
        **_icons(),
    }
    contents |= {key: {f"ttf/{name}": font for name in names} for key, names in FONTS.items()}
    return {key: tgz(folder / PACKAGES[key].registry / f"{key}.tgz", members) for key, members in contents.items()}
