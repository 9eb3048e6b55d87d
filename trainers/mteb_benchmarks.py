"""mteb's tasks and benchmarks: text, pictures, visual documents (ViDoRe, VisRAG) and video."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import MoEMBError, nearest


logger = logging.getLogger(__name__)


class UnknownMTEBTaskError(MoEMBError, ValueError):
    """A task or benchmark that mteb does not have. The message names it and the nearest one it has."""


def select_mteb_tasks(benchmarks: Sequence[str], names: Sequence[str]) -> list[Any]:
    """
    Chooses tasks of mteb.

    Args:
        benchmarks (`Sequence[str]`): names of benchmarks, such as `"ViDoRe(v3)"`; all of their tasks.
        names (`Sequence[str]`): names of tasks. With benchmarks it narrows them down to tasks of these names, and adds
            those they do not have.

    Returns:
        `list[AbsTask]`: in order, without repeats.

    Raises:
        UnknownMTEBTaskError: mteb has no benchmark or task of a name, or neither was given.
    """
    import mteb

    if not benchmarks and not names:
        raise UnknownMTEBTaskError("name benchmarks or tasks of mteb: benchmarks: [ViDoRe(v1)] or tasks: [STS12]")
    known = {benchmark.name: benchmark for benchmark in mteb.get_benchmarks()} if benchmarks else {}
    found: dict[str, Any] = {}
    for name in benchmarks:
        if name not in known:
            raise UnknownMTEBTaskError(f"mteb has no benchmark '{name}'{nearest(name, known)}")
        found |= {task.metadata.name: task for task in known[name].tasks}
    if not names:
        return list(found.values())
    chosen = []
    for name in dict.fromkeys(names):
        if name not in found:
            try:
                found[name] = mteb.get_task(name)
            except (KeyError, ValueError) as error:
                every = [task.metadata.name for task in mteb.get_tasks()]
                raise UnknownMTEBTaskError(f"mteb has no task '{name}'{nearest(name, every)}") from error
        chosen.append(found[name])
    return chosen


def run_mteb_tasks(
    encoder: Any,
    tasks: Sequence[Any],
    results: Path,
    batch_size: int,
    report: Callable[[Mapping[str, Any]], None],
    refuse: Callable[[str, str], None],
) -> None:
    """
    Runs tasks one by one; what was finished by an earlier run is read from its results.

    Args:
        encoder (`MoEMBEncoder`): the model.
        tasks (`Sequence[AbsTask]`): the tasks.
        results (`Path`): folder of mteb's own result files, from which `mteb` makes leaderboard submissions.
        batch_size (`int`): items in one forward pass.
        report (`Callable`): called with the entry of each task that ran.
        refuse (`Callable`): called with name and reason of each task that did not.
    """
    import mteb

    cache = mteb.ResultCache(results)
    for task in tasks:
        started = time.perf_counter()
        try:
            done = mteb.evaluate(
                encoder, task, cache=cache, encode_kwargs={"batch_size": batch_size}, co2_tracker=False,
                overwrite_strategy="only-missing",
            )  # fmt: skip
            entry = mteb_result(task, done.task_results[0], time.perf_counter() - started)
        except MoEMBError:
            raise
        except Exception as error:
            # A data set that cannot be had must not cost the others; the reason stands in the report.
            logger.debug("task %s", task.metadata.name, exc_info=True)
            text = " ".join(str(error).split())[:300]
            refuse(
                task.metadata.name,
                f"{type(error).__name__}: {text} (its data set is {task.metadata.dataset['path']}, which mteb fetches "
                "from the Hub or finds in its cache, HF_HOME)",
            )
            continue
        encoder.model.finish_task()
        report(entry)


def mteb_result(task: Any, result: Any, seconds: float) -> dict[str, Any]:
    """
    The entry of a task in the results, from what mteb returned.

    Args:
        task (`AbsTask`): the task.
        result (`TaskResult`): its result.
        seconds (`float`): how long it took.

    Returns:
        `dict`: as of the other benchmarks; `parts` holds the main score of each split and subset. mteb reports no
        scores by query, so there is no interval.
    """
    metadata = task.metadata
    parts = {
        f"{split}/{scores['hf_subset']}": {"value": float(scores["main_score"]), "queries": None}
        for split, every in result.scores.items()
        for scores in every
    }
    return {
        "name": metadata.name,
        "group": metadata.type,
        "metric": metadata.main_score,
        "value": float(result.get_score()),
        "interval": None,
        "queries": None,
        "candidates": None,
        "ranking": "",
        "tied_queries": None,
        "metrics": {metadata.main_score: float(result.get_score())},
        "parts": parts if len(parts) > 1 else {},
        "source": f"{metadata.dataset['path']}, mteb {result.mteb_version}",
        "expected_rows": None,
        "complete": True,
        "seconds": seconds,
        "dataset": metadata.dataset["path"],
        "config": None,
        "split": ",".join(result.scores),
        "revision": result.dataset_revision,
    }
