"""Every command line of README.md and docs/ runs: in a folder that has what it names, made small by further flags."""

import json
import os
import shlex
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from moemb.trainers import ablate_runs, cli
from moemb.trainers.quickstart_model import mini_repository
from tests.trainers.adapters import write_adapter
from tests.trainers.app_process import App
from tests.trainers.conftest import FakeCorpus
from tests.trainers.fake_vllm import environment
from tests.trainers.rag_samples import RED, fill, png
from tests.trainers.stock_checkpoint import dense_config, save_dense_checkpoint, save_stock_checkpoint, stock_config
from tests.trainers.test_corpus_build import offline  # noqa: F401  (a fixture)
from tests.trainers.test_mini_contrastive import SETTINGS
from tests.trainers.test_pretrain import TINY

from .pages import ROOT, commands


ITEMS = "--calibration_data '{items.jsonl: 8}' --batch_size 4"
# What makes a command small, by its beginning; the longest that fits. `{}` stands for what the reader fills in.
QUIET = {"eval_strategy": "no", "save_steps": 100}
LENGTHLESS = {key: value for key, value in SETTINGS.items() if key != "max_steps"}


def settings(**values) -> str:
    """A mapping as a flag's value."""
    return shlex.quote(yaml.safe_dump(values, default_flow_style=True, width=10_000).strip())


SMALL = {
    "moemb kernels": "",
    "moemb ablate": (
        f"--pretrain_settings {settings(**{**TINY, **QUIET, 'max_steps': 1, 'warmup_steps': 0})}"
        f" --train_settings {settings(**{**LENGTHLESS, **QUIET, 'warmup_steps': 0})}"
        " --variants '{native: {}}' --steps 1 --seeds '[0]' --tasks '[emoji-concept]' --bootstrap_samples 5"
        " --output ablation"
    ),
    "moemb convert": "",
    "moemb merge": "",
    "moemb prune-experts": f"{ITEMS} --keep 8 --output pruned --sweep_tasks '[emoji-concept]' --bootstrap_samples 5",
    "moemb calibrate": f"{ITEMS} --output calibrated --tolerance 0.2",
    "moemb analyze": f"{ITEMS} --output analysis --maps 1",
    "moemb data": "--output corpus",
    "moemb train --config recipes/moemb-mini/pretrain.yaml": " ".join(
        f"--{key} {value}" for key, value in {**TINY, "max_steps": 1, "output_dir": "runs/pretrain"}.items()
    ),
    "moemb train --config recipes/moemb-mini/contrastive.yaml": " ".join(
        f"--{key} {value}" for key, value in {**SETTINGS, "max_steps": 1, "output_dir": "runs/contrastive"}.items()
    ),
    "moemb train --config recipes/moemb-mini/lora.yaml": (
        "--train_datasets '{d: {path: json, data_files: items.jsonl, max_rows: 6,"
        " columns: {query: text, positive: text}}}'"
        " --eval_datasets '{}' --eval_strategy no --load_best_model_at_end false --batch_size 4 --max_steps 1"
        " --save_strategy no --lora_expert_rank 0 --report_to none --output_dir runs/lora"
    ),
    "moemb train --config recipes/moemb-mini/adaptive": (
        "--corpus_sources '{emoji: {chunk: 4}}' --max_steps 3 --warmup_steps 0 --report_to none --output_dir runs/g"
    ),
    "moemb train --config recipes/moemb-mini/grpo.yaml": (
        "--corpus_pairs '{emoji: 4}' --per_device_train_batch_size 8 --num_generations 2 --recall_k 1 --max_steps 1"
        " --report_to none --output_dir runs/grpo"
    ),
    "moemb study": (
        "--runs '{gate: {recipe: keep.yaml, changes: {corpus_sources: {}, max_steps: 1, batch_pairs: 4,"
        " train_datasets: {d: {path: json, data_files: items.jsonl, max_rows: 6,"
        " columns: {query: text, positive: text}}}}}}'"
        " --seeds '[0]' --tasks '[emoji-concept]' --policies '{}' --calibration_data '{}' --bootstrap_samples 5"
        " --work runs/study --output study"
    ),
    "moemb evaluate": "--tasks '[emoji-concept]' --pretrained_baselines false --bootstrap_samples 5 --output e.json",
    "moemb bench --suite encode": "--quick --no-plots --vllm none",
    "moemb bench --suite app": "--quick --no-plots --vllm none",
    "moemb bench --config": "--quick --no-plots --output bench",
    "moemb quickstart": "",
    "moemb encode": "",
    "moemb plan": "--architecture Qwen/Qwen3.5-35B-A3B/config.json --devices 1 2",
    "moemb serving": "--python vllm/python --items 2 --dtype float32",
    "moemb publish": "--allow-dirty --no-kernels",
}
SLOW = (
    "moemb quickstart", "moemb bench", "moemb analyze", "moemb prune-experts", "moemb evaluate", "moemb calibrate",
    "moemb study", "moemb encode", "moemb ablate", "moemb serving", "moemb publish",
)  # fmt: skip


def small(command: str) -> str:
    fits = [start for start in SMALL if command.startswith(start)]
    assert fits, f"'{command}' is in the documentation and no test knows how to run it small: see SMALL in {__file__}"
    return SMALL[max(fits, key=len)]


def cases(served: bool):
    for command, page in commands():
        if command.startswith("moemb ") and command.startswith("moemb app") == served:
            # the app costs half a minute of starting: the README's line stands for it in the default tests
            slow = page != "README.md" if served else command.startswith(SLOW)
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(command, id=f"{page}: {command}", marks=marks)


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_settings):
    """Where the reader stands: a checkout with a stock checkpoint, items of his own and a folder of files."""
    here = tmp_path / "here"
    here.mkdir()
    shutil.copytree(ROOT / "recipes", here / "recipes")
    save_stock_checkpoint(here / "Qwen/Qwen3.5-35B-A3B", stock_config(tiny_settings), packed=True)
    save_dense_checkpoint(here / "Qwen/Qwen3.5-4B", dense_config(tiny_settings, 64))
    (here / "red.png").write_bytes(png(RED))
    items = [{"text": f"a text number {n}"} for n in range(6)] + [{"image": "red.png"}] * 2
    (here / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    fill(here / "files")
    environment(here / "vllm")
    monkeypatch.chdir(here)
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("moemb.trainers.corpus.load_corpus", lambda path: FakeCorpus())
    return here


def filled_in(command: str) -> list[str]:
    """DIR is the stock checkpoint to read from, and a new folder to write to."""
    words = shlex.split(f"{command} {small(command)}")
    known = {"--from": "Qwen/Qwen3.5-35B-A3B", "--input": "files", "--adapter": "adapter"}
    known |= dict.fromkeys(("--to", "--output", "--dry-run"), "written")
    return [known.get(words[place - 1], word) if word == "DIR" else word for place, word in enumerate(words)]


@pytest.mark.parametrize("command", cases(served=False))
def test_a_command_runs(command, folder, offline, capsys, monkeypatch):  # noqa: F811
    program, *arguments = filled_in(command)
    assert program == "moemb"
    if arguments[0] == "merge":
        write_adapter(folder / "adapter", mini_repository(), "moemb-mini")
    if arguments[0] == "ablate":  # its trainings are processes, which would not see the small corpus
        monkeypatch.setattr(
            ablate_runs.subprocess, "run", lambda command, **_: SimpleNamespace(returncode=cli.main(command[3:]))
        )
    status = cli.main(arguments)
    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", cases(served=True))
def test_the_app_starts_and_answers(command, folder):
    words = shlex.split(command)[2:]
    words = [word for number, word in enumerate(words) if "--data" not in (word, words[number - 1])]
    if "--index-only" in words:
        arguments = ["app", "--data", "files", *[("index" if word == "DIR" else word) for word in words]]
        assert cli.main(arguments) == 0
        return
    for flag in ("--index", "--port", "--watch"):  # a later one wins over that of the harness
        if flag in words and words[words.index(flag) + 1] == "DIR":
            words[words.index(flag) + 1] = str(folder / "mine")
    with App(folder / "files", folder / "index", *words) as app:
        assert app.url.startswith("http://localhost:")


@pytest.mark.parametrize("command", [command for command, _ in commands() if command.startswith("make ")])
def test_a_make_target_exists(command):
    """Told what make would do: `make test` inside the tests would never end."""
    words = shlex.split(command)
    result = subprocess.run(
        [*words[:1], "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert result.returncode == 0, result.stderr


def test_every_command_is_one_of_these():
    odd = [command for command, _ in commands() if not command.startswith(("moemb ", "make "))]
    assert odd == []
