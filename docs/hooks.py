"""Pages that are made from the repository when the documentation is built: measured results, and the commands.

Results are taken from `recipes/**/results/*.json` that carry the command that made them, with the report beside them,
so that a page cannot say what no file says.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds `results.md` with its figures, and `reference/commands.md`."""
    reports = list(find_reports(ROOT / "recipes"))
    files.append(File.generated(config, "results.md", content=results_page(reports)))
    for path, _ in reports:
        for figure in sorted(path.parent.glob(f"{path.stem}*.png")):
            name = f"figures/{figure_name(figure)}"
            files.append(File.generated(config, name, content=figure.read_bytes()))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    return files


def find_reports(recipes: Path) -> Iterator[tuple[Path, dict]]:
    """Yields each JSON of results that names its command and has a Markdown report beside it, with its content."""
    for path in sorted(recipes.glob("**/results/**/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("command") and path.with_suffix(".md").is_file():
            yield path, content


def figure_name(figure: Path) -> str:
    """Returns a name for a figure that is unique among all recipes."""
    return "-".join(figure.relative_to(ROOT / "recipes").parts)


def results_page(reports: list[tuple[Path, dict]]) -> str:
    """Returns the page of all reports, each under the command that makes it again."""
    lines = [
        "# Results",
        "",
        "Everything below was measured, and each part begins with the command that measures it again. The numbers are "
        "read from the files in the repository when this page is built. Quality is on held-out items, with the number "
        "of queries and a 95 % bootstrap interval; speed is a ratio in one run on one machine.",
        "",
    ]
    for path, content in reports:
        source = path.relative_to(ROOT).as_posix()
        body = path.with_suffix(".md").read_text(encoding="utf-8")
        title, _, rest = body.partition("\n")
        lines += [f"## {title.lstrip('# ')}", "", "```text", content["command"], "```", ""]
        lines += [f"Read from `{source}`.", ""]
        for figure in sorted(path.parent.glob(f"{path.stem}*.png")):
            lines += [f"![{figure.stem}](figures/{figure_name(figure)})", ""]
        lines += [_lower(rest).strip(), ""]
    return "\n".join(lines)


def _lower(markdown: str) -> str:
    """Headings one level down, and links to pictures that stand above already left out."""
    without = re.sub(r"^!\[[^\]]*\]\([^)]*\)\s*$", "", markdown, flags=re.MULTILINE)
    return re.sub(r"^(#+ )", r"#\1", without, flags=re.MULTILINE)


def commands_page() -> str:
    """Returns every verb with what its `--help` prints."""
    import argparse
    import importlib

    from moemb.trainers import cli

    lines = ["# Commands", "", "`moemb VERB --flags`; what each verb's `--help` prints.", ""]
    for verb, module_name in cli.VERBS.items():
        module = importlib.import_module(f"moemb.trainers.{module_name}")
        parser = argparse.ArgumentParser(
            prog=f"moemb {verb}",
            description=module.HELP,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100),
        )
        module.add_arguments(parser)
        lines += [f"## {verb}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(lines)
