"""Uploading against a stand-in of the Hub: together or not at all to the public, and resumable."""

import json
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants

from moemb.trainers.publish_assemble import Tree
from moemb.trainers.publish_upload import UploadError, upload

from .publish_cases import StandIn, new_repository


@pytest.fixture
def hub(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield stand_in
    stand_in.close()


@pytest.fixture
def trees(tmp_path) -> list[Tree]:
    """A kernel repository and a model, with small stand-ins for weights."""
    made = []
    for repo_type, name, files in (
        (
            "kernel",
            "moemb-test/fast",
            {
                "README.md": "---\nlicense: mit\n---\n",
                "build/a/_ops.py": "x = 1\n",
                "build.toml": "[general]\nversion = 3\n",
            },
        ),
        (
            "model",
            "moemb-test/tiny",
            {"README.md": "---\nlicense: mit\n---\n", "config.json": "{}", "a.safetensors": "w" * 99},
        ),
    ):
        folder = tmp_path / repo_type
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        made.append(Tree(name, repo_type, repo_type, folder))
    return made


def send(hub: StandIn, trees: list[Tree], journal: Path, **options) -> list[str]:
    api = HfApi(endpoint=hub.endpoint, token="hf_" + "x" * 20)
    return upload(trees, journal=journal, message="Publish tiny", api=api, **options)


def on_disk(tree: Tree) -> dict[str, bytes]:
    return {p.relative_to(tree.folder).as_posix(): p.read_bytes() for p in tree.folder.rglob("*") if p.is_file()}


def test_one_commit_per_repository_and_then_public(hub, trees, tmp_path):
    commits = send(hub, trees, tmp_path / "journal")
    assert len(commits) == 2
    for tree in trees:
        repo = hub.repos[tree.repo_type, tree.repository]
        assert repo["commits"] == ["Publish tiny"] and not repo["private"]
        assert {name: data for name, data in repo["files"].items() if name != ".gitattributes"} == on_disk(tree)
    opened = hub.requests.index(("PUT", "/api/models/moemb-test/tiny/settings"))
    committed = [i for i, (_, path) in enumerate(hub.requests) if "/commit/" in path]
    assert len(committed) == 2 and max(committed) < opened, "nothing is public before every commit is in"


def test_the_version_of_a_kernel_is_a_branch(hub, trees, tmp_path):
    """`kernels.get_kernel(..., version=3)` reads the branch v3."""
    send(hub, trees, tmp_path / "journal")
    repo = hub.repos["kernel", "moemb-test/fast"]
    assert repo["branches"].keys() == {"v3"} and repo["branches"]["v3"]["files"] == repo["files"]
    assert hub.repos["model", "moemb-test/tiny"]["branches"] == {}
    (trees[0].folder / "build" / "a" / "_ops.py").write_text("x = 2\n")
    send(hub, trees, tmp_path / "journal")
    assert repo["branches"]["v3"]["files"] == repo["files"] and repo["files"]["build/a/_ops.py"] == b"x = 2\n"
    assert len(repo["commits"]) == 2 and len(repo["branches"]["v3"]["commits"]) == 1


def test_a_branch_of_the_model(hub, trees, tmp_path):
    hub.repos["model", "moemb-test/tiny"] = new_repository()
    send(hub, trees, tmp_path / "journal", revision="next")
    repo = hub.repos["model", "moemb-test/tiny"]
    assert repo["files"].keys() == {".gitattributes"} and "config.json" in repo["branches"]["next"]["files"]


def test_private_stays_private(hub, trees, tmp_path):
    send(hub, trees, tmp_path / "journal", private=True)
    assert all(repo["private"] for repo in hub.repos.values())


@pytest.mark.parametrize(
    ("method", "part"),
    [("PUT", "/lfs/"), ("POST", "models/moemb-test/tiny/commit"), ("POST", "tiny/preupload"), ("PUT", "/settings")],
)
def test_an_interrupted_upload_goes_on(hub, trees, tmp_path, monkeypatch, method, part):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.fail_at(method, part)
    with pytest.raises(UploadError, match="moemb-test/tiny.*run the same command again to go on"):
        send(hub, trees, tmp_path / "journal")
    public = [key for key, repo in hub.repos.items() if not repo["private"] and key[0] == "model"]
    assert public == [], "a model that is not complete is not public"
    hub.failures.clear()
    sent = dict(hub.storage)
    hub.requests.clear()
    send(hub, trees, tmp_path / "journal")
    repo = hub.repos["model", "moemb-test/tiny"]
    assert not repo["private"] and repo["commits"] == ["Publish tiny"]
    assert {name: data for name, data in repo["files"].items() if name != ".gitattributes"} == on_disk(trees[1])
    assert not [path for verb, path in hub.requests if verb == "PUT" and path.split("/")[-1] in sent], "sent once"


def test_publishing_again_replaces_and_removes(hub, trees, tmp_path):
    send(hub, trees, tmp_path / "journal")
    (trees[1].folder / "config.json").write_text('{"a": 1}')
    (trees[1].folder / "a.safetensors").rename(trees[1].folder / "b.safetensors")
    send(hub, trees, tmp_path / "journal")
    repo = hub.repos["model", "moemb-test/tiny"]
    assert len(repo["commits"]) == 2 and len(hub.repos["kernel", "moemb-test/fast"]["commits"]) == 1
    assert {name: data for name, data in repo["files"].items() if name != ".gitattributes"} == on_disk(trees[1])


def test_an_unchanged_private_repository_of_somebody_is_left_private(hub, trees, tmp_path):
    hub.repos["model", "moemb-test/tiny"] = new_repository(True, **{"old.txt": b""})
    send(hub, trees, tmp_path / "journal")
    assert hub.repos["model", "moemb-test/tiny"]["private"], "its owner closed it, not we"
    assert "old.txt" not in hub.repos["model", "moemb-test/tiny"]["files"]


def test_no_rights(hub, trees, tmp_path):
    hub.orgs = ["elsewhere"]
    with pytest.raises(UploadError, match="someone is no member of 'moemb-test'.*Nothing was published"):
        send(hub, trees, tmp_path / "journal")
    assert hub.repos == {}


def test_no_hub(trees, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    api = HfApi(endpoint="http://127.0.0.1:9", token="hf_" + "x" * 20)
    with pytest.raises(UploadError, match="does not know you .*hf auth login"):
        upload(trees, journal=tmp_path / "journal", message="x", api=api)
    assert not (tmp_path / "journal").exists()


def test_the_journal_names_what_is_ours_to_open(hub, trees, tmp_path):
    hub.fail_at("POST", "/commit/")
    with pytest.raises(UploadError, match="No commit was made"):
        send(hub, trees, tmp_path / "journal")
    assert json.loads((tmp_path / "journal").read_text()) == [["model", "moemb-test/tiny"]]
