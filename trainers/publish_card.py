"""The cards of published repositories, as functions of the files that lie in them.

A card is rendered from the repository's own folder: configuration, results, recipes and `publication.json`. So a
figure that no file holds cannot come about, and a card that was edited, or whose results are missing, differs from
what its files say: see [`check_card`]. Free text (description, limits) may cite a file for its figures and show no
others.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .convert_safetensors import read_checkpoint
from .errors import MoEMBError
from .evaluation_report import percent
from .model_card import card_text, human
from .model_card_results import (
    DIAL,
    EVALUATION,
    SERVING,
    SPEED,
    benchmark_files,
    benchmark_part,
    dial_part,
    model_index,
    read_json,
    serving_part,
)


PUBLICATION = "publication.json"
CARD = "README.md"
RECIPES = "recipe"
TRAINING = "training.json"
_CITATION = re.compile(r"\{([\w./-]+)#(/[^{}|]*)(?:\|(percent|count))?\}")
# A number that stands alone: digits inside a name ("R@10", "Qwen3.5-MoE", "MMEB-V2", "moemb-35b") are no figure.
_NUMBER = re.compile(r"(?<![\w.@/#-])[+-]?\d[\d.,]*(?:\s?[kMB]\b)?(?![\w@-])")
_NO_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)


class CardError(MoEMBError, ValueError):
    """A card that shows what no file of its repository says. The message names the figure and the remedy."""


def look_up(folder: Path, file: str, pointer: str) -> Any:
    """
    A value of a JSON file of a repository.

    Args:
        folder (`Path`): the repository.
        file (`str`): path in it.
        pointer (`str`): JSON pointer (RFC 6901), such as `/model/parameters`.

    Raises:
        CardError: there is no such file or value.
    """
    try:
        value = read_json(folder / file)
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            value = value[int(part)] if isinstance(value, list) else value[part]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CardError(f"the card cites {file}#{pointer}, which the repository does not have ({error!r})") from error
    return value


def cited(text: str, folder: Path, where: str) -> str:
    """
    Free text of a card with its citations filled in.

    Args:
        text (`str`): may hold `{results/evaluation.json#/model/parameters}`, with `|percent` (0.358 as `35.8`) or
            `|count` (11938592 as `11.9 M`) where the value is to be shown so.
        folder (`Path`): the repository.
        where (`str`): what the text is, for the message.

    Raises:
        CardError: it shows a number that is no citation, or cites what is not there.
    """
    bare = _CITATION.sub("", text)
    if match := next(_NUMBER.finditer(_NO_PROSE.sub("", bare)), None):
        raise CardError(
            f"{where} shows the number '{match[0].strip()}' that no file of the repository backs: cite one, as in "
            "{results/evaluation.json#/tasks/0/queries}, or leave the number out"
        )

    def fill(match: re.Match) -> str:
        value = look_up(folder, match[1], match[2])
        shown = {"percent": percent, "count": human, None: str}[match[3]]
        return shown(value)

    return _CITATION.sub(fill, text)


def render_card(folder: Path) -> str:
    """
    The card of a repository, from its files.

    Args:
        folder (`Path`): the repository, complete but for the card.

    Returns:
        `str`: Markdown with a YAML header.

    Raises:
        CardError: there is no publication record, or its texts show figures that no file backs.
    """
    folder = Path(folder)
    about = _publication(folder)
    if about["kind"] == "kernel":
        from .publish_kernels import kernel_card

        return kernel_card(folder, about)
    if about["kind"] == "adapter":
        from .publish_adapter import adapter_card

        return adapter_card(folder, about)
    from transformers import Qwen3_5MoeConfig

    from modeling_moemb import MoEMBConfig

    plain = about["kind"] == "plain"
    config = (Qwen3_5MoeConfig if plain else MoEMBConfig).from_pretrained(str(folder))
    name = about["repository"]
    header: dict[str, Any] = {"tags": ["moemb", *([] if plain else ["custom_code"])]}
    if about.get("language"):
        header["language"] = about["language"]
    if about.get("datasets"):
        header["datasets"] = about["datasets"]
    if index := model_index(folder, name):
        header["model-index"] = index
    benchmarks = {path.name: read_json(path) for path in benchmark_files(folder)}
    return card_text(
        config,
        name=name,
        base_model=about.get("base_model"),
        license=about.get("license"),
        description=cited(about.get("description", ""), folder, "the description") or _describe(about),
        evaluation=folder / EVALUATION if (folder / EVALUATION).is_file() else None,
        limits=[cited(limit, folder, "a limit") for limit in about.get("limits", [])],
        trained=about["trained"],
        header=header,
        results=benchmark_part(benchmarks),
        parts=_parts(folder, about, config),
    )


def check_card(folder: Path) -> None:
    """
    Compares the card of a repository with what its files say.

    Raises:
        CardError: they differ; the message names the line and the figure.
    """
    shown = (folder / CARD).read_text(encoding="utf-8").splitlines()
    said = render_card(folder).splitlines()
    if shown == said:
        return
    number = next((i for i, (one, other) in enumerate(zip(shown, said)) if one != other), min(len(shown), len(said)))
    line = shown[number] if number < len(shown) else ""
    backed = set(_NUMBER.findall("\n".join(said)))
    strange = [figure.strip() for figure in _NUMBER.findall(line) if figure not in backed]
    what = f"the figure '{strange[0]}'" if strange else f"'{line.strip()[:80]}'"
    other = said[number].strip()[:80] if number < len(said) else ""
    raise CardError(
        f"{folder.name}/{CARD} line {number + 1} shows {what}, where the files of the repository say '{other}'; "
        "publish it again from its sources instead of editing it"
    )


def _publication(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / PUBLICATION)
    except (OSError, ValueError) as error:
        raise CardError(
            f"{folder} has no readable {PUBLICATION} ({error}); publish it with 'moemb publish'"
        ) from error


def _describe(about: Mapping[str, Any]) -> str:
    if about["kind"] == "plain":
        return (
            f"The weights of [{about['source_repository']}](https://huggingface.co/{about['source_repository']}) "
            "under the stock architecture: transformers, Sentence Transformers and vLLM load it without remote code. "
            "It computes the same embedding, always at full compute."
        )
    return ""


def _parts(folder: Path, about: Mapping[str, Any], config: Any) -> dict[str, list[str]]:
    """The sections between evaluation and limits."""
    parts: dict[str, list[str]] = {"Prompts and budgets": _prompts(folder)}
    if about["kind"] == "plain":
        parts["Serve it"] = _serve(about["repository"])
        if (folder / SERVING).is_file():
            parts["Serving parity"] = serving_part(read_json(folder / SERVING))
        else:
            parts["Serving parity"] = ["This repository was not compared with a serving stack."]
    elif (folder / DIAL).is_file():
        speed = read_json(folder / SPEED) if (folder / SPEED).is_file() else None
        parts["The compute dial"] = dial_part(read_json(folder / DIAL), speed)
    else:
        parts["The compute dial"] = ["Policies of `adaptive_compute` have not been measured on these weights."]
    if about["kind"] == "model":
        parts["Training"] = training_part(folder)
    parts["Versions"] = versions_part(about)
    if about["together"]:
        parts["Published together"] = together_part(about)
    parts["Citation"] = _citation(about)
    return parts


def together_part(about: Mapping[str, Any]) -> list[str]:
    """Links to the repositories that were published with this one."""
    return [f"- [{name}](https://huggingface.co/{name})" for name in about["together"]]


def _prompts(folder: Path) -> list[str]:
    """Prompts and the budgets of pictures and videos, from the files that every route reads."""
    prompts = read_json(folder / "config_sentence_transformers.json")["prompts"]
    processor = read_json(folder / "processor_config.json")
    lines = ["| prompt | text before the item |", "| --- | --- |"]
    lines += [f"| `{name}` | {f'`{text}`' if text else 'none'} |" for name, text in prompts.items()]
    lines += ["", "| budget | image | video |", "| --- | --- | --- |"]
    image, video = processor["image_processor"], processor["video_processor"]
    sizes = [part.get("size") or {} for part in (image, video)]
    rows = {"fewest pixels": "shortest_edge", "most pixels": "longest_edge"}
    for label, key in rows.items():
        lines.append(f"| {label} | {sizes[0].get(key, '')} | {sizes[1].get(key, '')} |")
    for label, key in (("frames", "num_frames"), ("frames per second", "fps"), ("most frames", "max_frames")):
        if video.get(key) is not None:
            lines.append(f"| {label} | | {video[key]} |")
    lines.append(f"| patch, pixels | {image.get('patch_size', '')} | {video.get('patch_size', '')} |")
    return lines


def training_part(folder: Path) -> list[str]:
    """Recipes word for word, and the commands of the training record."""
    lines = []
    for path in sorted((folder / RECIPES).glob("*.yaml")):
        text = path.read_text(encoding="utf-8").strip()
        lines += [f"`{RECIPES}/{path.name}`:", "", "```yaml", text, "```", ""]
    if (folder / TRAINING).is_file():
        record = read_json(folder / TRAINING)
        commands = [entry["command"] for entry in record.get("commands", [])]
        if commands:
            lines += [f"The commands that made the weights (`{TRAINING}` has times and versions):", "", "```sh"]
            lines += [*dict.fromkeys(commands), "```", ""]
    return lines[:-1] or ["No record of the training travels with these weights."]


def versions_part(about: Mapping[str, Any]) -> list[str]:
    """The versions and the commit that a tree was assembled with."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    commit = about["source"]["commit"]
    code = f", commit `{commit}`" if commit else ""
    changed = " with changes that no commit holds" if about["source"]["dirty"] else ""
    return [f"Assembled with {versions}{code}{changed}. Sizes and hashes of all files: `manifest.json`."]


def _citation(about: Mapping[str, Any]) -> list[str]:
    key = re.sub(r"\W+", "_", about["repository"].rsplit("/", 1)[-1]).strip("_")
    return [
        "```bibtex",
        f"@misc{{{key},",
        f"  title = {{{about['repository']}: a sparse mixture-of-experts multimodal embedder}},",
        f"  year = {{{about['date'][:4]}}},",
        f"  howpublished = {{https://huggingface.co/{about['repository']}}}",
        "}",
        "```",
    ]


def _serve(name: str) -> list[str]:
    from .serving import client_snippet, serve_command

    return [
        "With vLLM, as an OpenAI-style endpoint:",
        "",
        "```sh",
        serve_command(name),
        "```",
        "",
        "```python",
        client_snippet(name),
        "```",
        "",
        "Send chat messages, not bare strings: the chat template of this repository ends with `<emb>`, whose state is "
        "the embedding. A query's prompt goes into a system turn, as the table above says.",
    ]


def counted_parameters(folder: Path, experts_per_token: int, experts: int) -> dict[str, int]:
    """
    The parameters that the weight files of a repository hold, from their headers.

    Args:
        folder (`Path`): the repository.
        experts_per_token, experts (`int`): of its configuration.

    Returns:
        `dict[str, int]`: `total`, and `active` as `model_card.count_parameters` defines it.
    """
    sizes = {key: math.prod(tensor.shape) for key, tensor in read_checkpoint(folder).items()}
    routed = sum(size for key, size in sizes.items() if ".mlp.experts." in key)
    rest = sum(
        size
        for key, size in sizes.items()
        if ".mlp.experts." not in key and ".embed_tokens." not in key and "visual." not in key
    )
    return {"total": sum(sizes.values()), "active": rest + routed * experts_per_token // max(experts, 1)}


__all__ = ["CardError", "check_card", "cited", "counted_parameters", "look_up", "render_card"]
