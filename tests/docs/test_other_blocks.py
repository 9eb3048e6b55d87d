"""The blocks of README.md and docs/ that are neither Python nor commands of this project: settings, and a server."""

import json

import pytest
import yaml
from PIL import Image

from moemb.trainers.contrastive_data import load_datasets
from moemb.trainers.publish_card import cited
from moemb.trainers.publish_sources import CardSettings
from moemb.trainers.recipe import load_recipe
from moemb.trainers.serving import client_snippet, serve_command

from .pages import PAGES, blocks


def of(page: str, language: str) -> list[str]:
    return [text for found, text, _ in blocks(page) if found == language]


def test_data_sets_in_the_readme_load(tmp_path, monkeypatch):
    (block,) = of("README.md", "yaml")
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (32, 32), "red").save(tmp_path / "pictures/1.png")
    row = {"question": "a red box", "file": "1.png", "title": "Box", "others": ["a lid", "a bag"], "product": 7}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    (dataset,) = load_datasets(yaml.safe_load(block)["train_datasets"], hard_negatives=2)
    found = dataset[0]
    assert (found.query, found.key) == ({"text": "a red box"}, "7")
    assert found.positive == {"image": str(tmp_path / "pictures/1.png"), "text": "Box"}
    assert found.negatives == [{"text": "a lid"}, {"text": "a bag"}]
    assert dataset.settings.query_instruction == "Find the product."


def test_the_card_of_the_how_to_is_read(tmp_path):
    (block,) = of("docs/how-to/publish.md", "yaml")
    (tmp_path / "card.yaml").write_text(block)
    (card,) = load_recipe(tmp_path / "card.yaml", CardSettings)
    assert card.license == "apache-2.0" and card.language == ["en"] and len(card.limits) == 1
    (tmp_path / "publication.json").write_text(json.dumps({"parameters": {"total": 11_938_592}}))
    assert cited(card.description, tmp_path, "the description").startswith("An embedder of 11.9 M parameters")


def test_serving_is_what_moemb_serving_runs():
    """These two are started and called by `moemb serving`, and by its tests on a stand-in of vLLM."""
    command, client = of("docs/how-to/publish.md", "text")
    assert command.strip() == serve_command("ORG/NAME-plain")
    assert client.strip() == client_snippet("ORG/NAME-plain").strip()


@pytest.mark.parametrize("page", PAGES)
def test_there_are_no_others(page):
    tested = {"README.md": ["yaml", ""], "docs/how-to/publish.md": ["yaml", "text", "text"]}
    others = [language for language, _, _ in blocks(page) if language not in ("python", "sh")]
    assert others == tested.get(page, [])
