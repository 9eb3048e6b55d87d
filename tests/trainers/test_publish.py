"""`moemb publish --dry-run`: the trees are complete, checked, true to the source, and load anywhere."""

import argparse
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from moemb.trainers import cli, publish, publish_sources
from moemb.trainers.model_card import human
from moemb.trainers.publish_assemble import Tree
from moemb.trainers.publish_card import CardError, check_card, cited, render_card
from moemb.trainers.publish_checks import check_tree, open_tree
from moemb.trainers.publish_manifest import write_manifest
from moemb.trainers.publish_sources import PublishError, check_id
from moemb.trainers.publish_verify import fresh_reference, probe

from .publish_cases import RECIPE, dial, evaluation, make_checkpoint, to_hub_cache


MODEL, PLAIN = "moemb-test/tiny", "moemb-test/tiny-plain"


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    publish.add_arguments(parser)
    return parser.parse_args([*words])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_settings) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source"), tiny_settings)


@pytest.fixture(scope="module")
def dry(checkpoint, tmp_path_factory) -> Path:
    """A dry run without kernels. It compares vectors in fresh processes, so it stands for many tests."""
    target = tmp_path_factory.mktemp("dry") / "out"
    words = ("--model", str(checkpoint), "--to", MODEL, "--dry-run", str(target), "--no-kernels", "--allow-dirty")
    assert publish.run(arguments(*words)) == 0
    return target


@pytest.fixture
def tree(dry, tmp_path) -> Tree:
    """A copy of the model's tree, to be harmed."""
    shutil.copytree(dry / "models" / MODEL, tmp_path / "tree")
    return open_tree(tmp_path / "tree", MODEL)


def card_of(dry: Path, repository: str) -> tuple[dict, str]:
    text = (dry / "models" / repository / "README.md").read_text(encoding="utf-8")
    _, header, body = text.split("---\n", 2)
    return yaml.safe_load(header), body


class TestDryRun:
    def test_exactly_the_trees(self, dry):
        assert sorted(path.name for path in dry.parent.iterdir()) == ["out"], "no draft is left"
        assert sorted(path.name for path in dry.iterdir()) == ["models", "plan.json"]
        plan = json.loads((dry / "plan.json").read_text())
        assert [row["repository"] for row in plan["repositories"]] == [PLAIN, MODEL], "the model comes last"
        compared = {row["repository"]: row for row in plan["compared"]}
        assert compared[MODEL]["largest_difference"] == 0.0
        assert set(compared[MODEL]["routes"]) == {
            "auto/encode",
            *(f"sentence_transformers/{s}" for s in ("encode", "query", "document")),
        }
        assert compared[PLAIN]["lowest_cosine"] >= 0.99999

    def test_the_model_is_complete(self, dry, checkpoint):
        folder = dry / "models" / MODEL
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert names >= {
            "README.md", "LICENSE", "manifest.json", "publication.json", "config.json", "model.safetensors",
            "modules.json", "modeling_moemb.py", "sentence_transformer_moemb.py", "training.json", "recipe/train.yaml",
            "results/evaluation.json", "results/dial.json", "chat_template.jinja", "tokenizer.json",
        }  # fmt: skip
        assert (folder / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
        assert (folder / "recipe" / "train.yaml").read_text() == RECIPE
        manifest = json.loads((folder / "manifest.json").read_text())
        assert set(manifest["files"]) == names - {"manifest.json"}
        assert manifest["total_size"] == sum((folder / name).stat().st_size for name in names - {"manifest.json"})

    def test_the_plain_variant_is_stock(self, dry):
        from safetensors.torch import load_file

        folder = dry / "models" / PLAIN
        assert not list(folder.rglob("*.py")) and not (folder / "results" / "dial.json").exists()
        config = json.loads((folder / "config.json").read_text())
        assert (config["model_type"], config["architectures"]) == (
            "qwen3_5_moe",
            ["Qwen3_5MoeForConditionalGeneration"],
        )
        assert not {"emb_token_id", "pooling", "adaptive_compute", "embedding"} & set(config)
        ours, theirs = (load_file(dry / "models" / name / "model.safetensors") for name in (MODEL, PLAIN))
        assert {f"model.{key}" for key in ours} == set(theirs)
        for key, tensor in ours.items():
            if ".linear_attn." not in key:  # its heads are wider, see test_publish_heads
                assert tensor.equal(theirs[f"model.{key}"]), key
        assert config["text_config"]["linear_key_head_dim"] == config["text_config"]["linear_value_head_dim"] == 128

    def test_metadata(self, dry):
        header, _ = card_of(dry, MODEL)
        assert header["license"] == "apache-2.0" and header["language"] == ["en"]
        assert header["pipeline_tag"] == "sentence-similarity" and header["library_name"] == "sentence-transformers"
        assert {"moemb", "custom_code", "feature-extraction"} <= set(header["tags"])
        metrics = {m["type"]: m["value"] for m in header["model-index"][0]["results"][0]["metrics"]}
        assert metrics == {"recall_at_1": 25.0, "recall_at_10": 50.0, "mrr": 37.5}
        header, body = card_of(dry, PLAIN)
        assert header["base_model"] == MODEL and "custom_code" not in header["tags"] and "model-index" not in header
        assert "vllm serve moemb-test/tiny-plain --runner pooling --convert embed" in body
        assert "trust_remote_code" not in body and "was not compared with a serving stack" in body

    def test_the_card_tells_the_facts(self, dry):
        folder, (_, body) = dry / "models" / MODEL, card_of(dry, MODEL)
        parameters = json.loads((folder / "publication.json").read_text())["parameters"]
        for count in (parameters["total"], parameters["active"]):
            assert human(count) in body
        assert f"A model of {human(parameters['total'])} parameters for tests." in body
        assert "| 2 | emoji-concept | all | 165 x 1914 | 25.0 (20.0–30.0) | 50.0 (45.0–55.0) |" in body
        assert '| top-1 | `{"top_k": 1}` | 43.8 (38.8–48.8) | -6.2 | 12.5 | 512 | 12.5 |' in body
        assert "moemb train --config recipes/tiny/train.yaml --max_steps 3" in body and RECIPE.strip() in body
        assert "- It has learned nothing." in body and "@misc{tiny," in body
        assert f"[{PLAIN}](https://huggingface.co/{PLAIN})" in body
        assert "| `query` | none |" in body and "| most pixels | 4096 | 32768 |" in body

    def test_the_source_is_not_changed(self, dry, checkpoint):
        assert sorted(path.name for path in checkpoint.parent.iterdir()) == [
            "card.yaml",
            "checkpoint",
            "results",
            "train.yaml",
        ]
        assert not (checkpoint / "modules.json").exists()

    def test_a_target_that_exists(self, dry, checkpoint):
        words = ("--model", str(checkpoint), "--to", MODEL, "--dry-run", str(dry), "--no-kernels", "--allow-dirty")
        with pytest.raises(PublishError, match="exists already"):
            publish.run(arguments(*words))


class TestFigures:
    """A card shows nothing that no file says."""

    def numbers(self, text: str) -> set[str]:
        """An own reading of a card: numbers outside of code, links and names."""
        prose = re.sub(r"```.*?```|`[^`]*`|\(https?:[^)]*\)", " ", text, flags=re.DOTALL)
        return set(re.findall(r"(?<![\w.@-])[+-]?\d+(?:[.,]\d+)*(?![\w@-])", prose))

    def test_every_number_of_the_card_is_in_a_file(self, dry):
        """By an oracle of its own: all numbers of the files, in every form that a card may show them in."""
        folder, (_, body) = dry / "models" / MODEL, card_of(dry, MODEL)
        said: set[str] = {"95"}  # the level of the intervals, a convention of `moemb evaluate`

        def collect(value):
            if isinstance(value, dict):
                [collect(part) for part in value.values()]
            elif isinstance(value, list):
                said.update({str(len(value)), *(str(value.count(kind)) for kind in map(str, value))})
                [collect(part) for part in value]
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                forms = (
                    f"{value:.3g}",
                    str(value),
                    human(int(value)).split()[0],
                    f"{100 * value:.1f}",
                    f"{100 * value:+.1f}",
                )
                said.update({*forms, f"{100 * value:.2f}"})
            elif isinstance(value, str):
                said.update(re.findall(r"\d+(?:[.,]\d+)*", value))

        for path in folder.rglob("*.json"):
            collect(json.loads(path.read_text()))
        from modeling_moemb import MoEMBConfig
        from moemb.trainers.model_card import count_parameters

        collect({**count_parameters(MoEMBConfig.from_pretrained(folder)), "shared": 1})
        assert self.numbers(body) - said == set()

    def test_an_edited_figure(self, tree):
        card = tree.folder / "README.md"
        card.write_text(card.read_text().replace("50.0 (45.0–55.0)", "98.7 (45.0–55.0)"))
        with pytest.raises(CardError, match=r"README.md line \d+ shows the figure '98.7'"):
            check_card(tree.folder)
        write_manifest(tree.folder)
        assert any("98.7" in str(finding) for finding in check_tree(tree))

    @pytest.mark.parametrize("name", ["results/evaluation.json", "results/dial.json", "training.json"])
    def test_a_file_that_is_missing(self, tree, name):
        (tree.folder / name).unlink()
        with pytest.raises(CardError, match="where the files of the repository say"):
            check_card(tree.folder)

    def test_free_text_cites_its_figures(self, tree):
        shown = cited(
            "R@10 {results/evaluation.json#/tasks/0/lines/0/systems/0/R@10/value|percent} of Qwen3.5",
            tree.folder,
            "it",
        )
        assert shown == "R@10 50.0 of Qwen3.5"
        with pytest.raises(CardError, match="the description shows the number '98.7' that no file"):
            cited("It scores 98.7 on everything.", tree.folder, "the description")
        with pytest.raises(CardError, match="cites results/none.json#/a, which"):
            cited("{results/none.json#/a}", tree.folder, "it")
        assert cited("`top_k=2`, MMEB-V2 and [one](https://a/2)", tree.folder, "it").startswith("`top_k=2`")

    def test_without_results_the_card_says_so(self, tree):
        shutil.rmtree(tree.folder / "results")
        text = render_card(tree.folder)
        assert "No evaluation of this repository has been run." in text
        assert "have not been measured on these weights" in text and "model-index" not in text


class TestRefusals:
    def plan(self, checkpoint, *words: str):
        given = ("--model", str(checkpoint), "--to", MODEL, "--no-kernels", "--allow-dirty", "--dry-run", "x")
        return publish.make_plan(arguments(*given, *words))

    @pytest.fixture
    def copy(self, checkpoint, tmp_path) -> Path:
        shutil.copytree(checkpoint.parent, tmp_path / "copy")
        return tmp_path / "copy" / "checkpoint"

    def test_no_licence(self, copy):
        (copy.parent / "card.yaml").unlink()
        with pytest.raises(PublishError, match="has no licence: .*--license"):
            self.plan(copy)
        assert self.plan(copy, "--license", "mit").sources.card.license == "mit"
        with pytest.raises(PublishError, match="'Apache-2.0' is no identifier .*did you mean 'apache-2.0'"):
            self.plan(copy, "--license", "Apache-2.0")
        with pytest.raises(PublishError, match="'other' needs license_name"):
            self.plan(copy, "--license", "other")

    def test_an_unknown_key_of_the_card(self, copy):
        (copy.parent / "card.yaml").write_text("licence: mit\n")
        with pytest.raises(PublishError, match="unknown key 'licence'.*did you mean 'license'"):
            self.plan(copy)

    def test_results_of_another_model(self, copy):
        (copy.parent / "results" / "evaluation.json").write_text(json.dumps(evaluation(7)))
        with pytest.raises(PublishError, match="are of a model with 7 parameters"):
            self.plan(copy)
        report = dial() | {"model": {"weights": "0" * 64}}
        (copy.parent / "results" / "evaluation.json").write_text(json.dumps(report))
        with pytest.raises(PublishError, match="are of other weights"):
            self.plan(copy)

    @pytest.mark.parametrize("name", ["tiny", "a/b/c", "a--b/c", "-a/b", "a/b.git", "a b/c"])
    def test_ids(self, name):
        with pytest.raises(PublishError, match="a Hub id is ORG/NAME"):
            check_id(name)

    def test_no_model(self, tmp_path, tiny_settings):
        with pytest.raises(PublishError, match="no such folder"):
            self.plan(tmp_path / "none")
        with pytest.raises(PublishError, match="has no config.json"):
            self.plan(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_moe"}')
        with pytest.raises(PublishError, match="neither model.safetensors"):
            self.plan(tmp_path)

    def test_a_dirty_checkout(self, tmp_path, monkeypatch, capsys, checkpoint):
        def git(*words):
            identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
            subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

        (tmp_path / "modeling_moemb").mkdir()
        code = tmp_path / "modeling_moemb" / "__init__.py"
        code.write_text("a = 1\n")
        monkeypatch.setattr(publish_sources.modeling_moemb, "__file__", str(code))
        with pytest.raises(PublishError, match="is no git checkout"):
            publish_sources.source_state()
        git("init", "-q")
        git("add", ".")
        git("commit", "-qm", "first")
        clean = publish_sources.source_state()
        assert len(clean.commit) == 40 and clean.changes == ()
        code.write_text("a = 2\n")
        words = ["publish", "--model", str(checkpoint), "--to", MODEL, "--no-kernels"]
        assert cli.main([*words, "--dry-run", str(tmp_path / "dry")]) == 1
        said = capsys.readouterr().err
        assert "changes that no commit holds (M modeling_moemb/__init__.py)" in said and "--allow-dirty" in said
        assert cli.main([*words, "--allow-dirty"]) == 1
        assert "--allow-dirty goes with --dry-run alone" in capsys.readouterr().err
        assert not (tmp_path / "dry").exists()
        assert publish_sources.source_state(allow_dirty=True).changes == ("M modeling_moemb/__init__.py",)

    def test_a_full_disk(self, checkpoint, tmp_path, monkeypatch):
        from moemb.trainers import publish_assemble

        plan = self.plan(checkpoint)
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(publish_assemble.shutil, "disk_usage", lambda path: usage._replace(free=10**6))
        with pytest.raises(PublishError, match="GB are needed .* Nothing was published"):
            publish.dry_run(plan, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_the_disk_fills_up_on_the_way(self, checkpoint, tmp_path, monkeypatch):
        from moemb.trainers import publish_assemble

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device", str(tmp_path))

        monkeypatch.setattr(publish_assemble, "write_manifest", full)
        with pytest.raises(OSError, match="No space left"):
            publish.dry_run(self.plan(checkpoint), tmp_path / "out")
        assert list(tmp_path.iterdir()) == [], "nothing is left behind"


class TestPublish:
    """What is between assembling and uploading; the upload itself has tests of its own."""

    @pytest.fixture
    def quick(self, checkpoint, monkeypatch, tmp_path):
        """A plan, without the comparison in fresh processes."""
        monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("moemb.trainers.publish_verify.verify", lambda *args: [])
        given = ("--model", str(checkpoint), "--to", MODEL, "--no-kernels", "--allow-dirty", "--dry-run", "x")
        return publish.make_plan(arguments(*given))

    def test_an_interrupted_upload_does_not_assemble_again(self, quick, monkeypatch, tmp_path):
        from moemb.trainers import publish_upload

        calls, made = [], []
        build = publish.build

        def break_off(trees, **options):
            calls.append([tree.repository for tree in trees])
            assert all((tree.folder / "README.md").is_file() for tree in trees)
            if len(calls) == 1:
                raise publish_upload.UploadError("the line broke")
            return ["https://commit"]

        monkeypatch.setattr(publish_upload, "upload", break_off)
        monkeypatch.setattr(publish, "build", lambda *args: made.append(1) or build(*args))
        with pytest.raises(publish_upload.UploadError):
            publish.publish(quick)
        _, commits = publish.publish(quick)
        assert commits == ["https://commit"] and len(made) == 1 and calls[0] == calls[1] == [PLAIN, MODEL]
        assert not list((tmp_path / "cache" / "publish").iterdir()), "the trees are removed when all is in"

    def test_a_broken_rule_stops_before_the_upload(self, quick, monkeypatch, tmp_path):
        from moemb.trainers import publish_assemble, publish_upload

        def leak(source, target):
            (target / "notes.json").write_text('{"folder": "/home/somebody/runs"}')

        monkeypatch.setattr(publish_assemble, "_keep_calibration_note", leak)
        monkeypatch.setattr(publish_upload, "upload", lambda *args, **kwargs: pytest.fail("it was uploaded"))
        with pytest.raises(PublishError, match="notes.json line 1: names the folder '/home/somebody'"):
            publish.publish(quick)
        assert not list((tmp_path / "cache" / "publish").iterdir())


@pytest.mark.slow
def test_moved_elsewhere_it_loads_by_path_and_by_id(dry, checkpoint, tmp_path, monkeypatch):
    """Offline, in fresh processes: AutoModel, AutoProcessor, Sentence Transformers, mteb; the source's bits."""
    moved, cache = tmp_path / "moved", tmp_path / "hub"
    shutil.copytree(dry, moved)
    for name in (MODEL, PLAIN):
        to_hub_cache(moved / "models" / name, name, cache)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    wanted = fresh_reference(checkpoint)
    request = {"trust_remote_code": True, "routes": ["sentence_transformers", "auto", "mteb"]}
    for source in (str(moved / "models" / MODEL), MODEL):
        found = probe(request | {"folder": source}, scratch)
        assert set(found.vectors) == {
            *(f"sentence_transformers/{side}" for side in ("encode", "query", "document")), "auto/encode",
            "mteb/query", "mteb/document",
        }  # fmt: skip
        assert found.kernels == wanted.kernels
        for route, vectors in found.vectors.items():
            expected = wanted.vectors[route.split("/")[1]][: len(vectors)]
            np.testing.assert_array_equal(vectors, expected, err_msg=f"{source} by {route}")
    plain = probe(
        {"folder": PLAIN, "trust_remote_code": False, "text_only": True, "routes": ["sentence_transformers"]}, scratch
    )
    expected = fresh_reference(checkpoint, full_compute=True).vectors["encode"]
    # not 1e-5: heads are filled up, and small states feel the epsilon of the other norms, see test_publish_heads
    assert (plain.vectors["sentence_transformers/encode"] * expected).sum(1) == pytest.approx(1, abs=1e-5)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
