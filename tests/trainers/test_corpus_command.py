import argparse

import pytest

from moemb.trainers import corpus_command
from moemb.trainers.corpus_config import CorpusConfig
from moemb.trainers.recipe import load_recipe

from .test_corpus_build import offline  # noqa: F401  (a fixture)


RECIPE = "recipes/moemb-mini/data.yaml"


def parse(*arguments):
    parser = argparse.ArgumentParser()
    corpus_command.add_arguments(parser)
    args, args.overrides = parser.parse_known_args(arguments)
    return args


@pytest.fixture
def recipe(request):
    return str(request.config.rootpath / RECIPE)


def test_the_recipe_is_the_defaults(recipe):
    assert load_recipe(recipe, CorpusConfig)[0] == CorpusConfig()


def test_the_verb_builds_checks_and_ships(offline, recipe, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr("moemb.trainers.corpus_gallery.fetch", offline.__getitem__)
    monkeypatch.setattr("moemb.trainers.corpus_gallery._STRIPS", 2)
    folder = tmp_path / "corpus"
    gallery = tmp_path / "gallery"
    (gallery / "old").mkdir(parents=True)
    assert corpus_command.run(parse("--config", recipe, "--output", str(folder), "--gallery", str(gallery))) == 0
    assert "text pairs in" in capsys.readouterr().out and (folder / "manifest.json").exists()
    assert sorted(path.name for path in gallery.iterdir()) == [
        "ATTRIBUTION.md", "clips.webp", "concepts.json", "fluent.webp", "gallery.json", "items.jsonl", "noto.webp",
        "strips.webp", "twemoji.webp",
    ]  # fmt: skip
    assert corpus_command.run(parse("--output", str(folder), "--check")) == 0
    assert "no leak among" in capsys.readouterr().out
    (folder / "concepts.json").write_text((folder / "concepts.json").read_text() + " ")
    assert corpus_command.run(parse("--output", str(folder), "--check")) == 1
    assert "concepts.json: missing or changed" in capsys.readouterr().out


def test_overrides_win_and_unknown_ones_are_named(recipe):
    assert corpus_command._config(parse("--config", recipe, "--workers", "2"), CorpusConfig).workers == 2
    assert corpus_command._config(parse(), CorpusConfig) == CorpusConfig()
    with pytest.raises(ValueError, match="unknown key 'wokers'.*workers"):
        corpus_command._config(parse("--wokers", "2"), CorpusConfig)


def test_sets_that_cannot_be_built_make_the_verb_fail(offline, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(
        "moemb.trainers.corpus_evaluation.build_evaluation_sets", lambda folder, names: {"stamps": "no apt-get"}
    )
    assert corpus_command.run(parse("--output", str(tmp_path), "--evaluation", "--teachers", "false")) == 1
    assert "left out: stamps. no apt-get" in capsys.readouterr().out
