"""A model behind the index: documents in batches, queries at any stop of the compute dial with their time measured."""

import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import MoEMBError


_REPEATS = 5
# Measuring must not make a search slow: large models are timed once.
_MEASURING_SECONDS = 0.25


class SearchModelError(MoEMBError, ValueError):
    """A model that the search cannot use. The message names it and the remedy."""


@dataclass(frozen=True)
class DialStop:
    """
    A stop of the compute dial.

    Args:
        name (`str`): what it spends, for people.
        budget (`dict`): `adaptive_compute` of a forward pass; empty for full compute.
    """

    name: str
    budget: dict[str, Any]


@dataclass(frozen=True)
class Spent:
    """
    What embedding a query took at one stop.

    Args:
        stop (`DialStop`): the stop.
        vector (`np.ndarray`): float32 `[dim]`, of unit length.
        seconds (`float`): of the forward pass, median of `runs` runs that alternated with those of the other stops.
        runs (`int`): how many.
        flops (`int`): executed, in vision tower, merger and decoder.
    """

    stop: DialStop
    vector: np.ndarray
    seconds: float
    runs: int
    flops: int


def dial_stops(config: Any) -> list[DialStop]:
    """
    The stops of a model's dial, from full compute downwards.

    Args:
        config (`MoEMBConfig`): the model's configuration.

    Returns:
        `list[DialStop]`: full compute; the budget the repository was calibrated for, if any; fewer experts per token;
        and one expert per token with half of the picture and video tokens dropped halfway. Only what the model allows.
    """
    from modeling_moemb import validate_adaptive_compute

    text = config.text_config
    most, blocks = text.num_experts_per_tok, text.num_hidden_layers
    stops = [DialStop("full compute", {})]
    if config.adaptive_compute:
        stops.append(DialStop("as calibrated", dict(config.adaptive_compute)))
    fewer = sorted({max(1, round(most * share)) for share in (0.75, 0.5, 0.25)} - {most}, reverse=True)
    stops += [DialStop(f"{k} of {most} experts", {"top_k": k}) for k in fewer]
    pruning = {"layer": max(1, blocks // 2), "keep": 0.5}
    least = {"top_k": 1, "token_pruning": pruning} if most > 1 else {"token_pruning": pruning}
    stops.append(DialStop(f"1 of {most} experts, half of the picture tokens", least))
    return [stop for stop in stops if _allowed(stop.budget, text, validate_adaptive_compute)]


def _allowed(budget: dict, text_config: Any, validate) -> bool:
    try:
        validate(budget, text_config)
    except ValueError:
        return False
    return True


class Turns:
    """Lets one forward pass run at a time, and queries before documents."""

    def __init__(self):
        self._condition = threading.Condition()
        self._busy = False
        self._queries = 0

    @contextmanager
    def query(self) -> Iterator[None]:
        """Waits for the pass that is running, not for those that wait."""
        with self._condition:
            self._queries += 1
            self._condition.wait_for(lambda: not self._busy)
            self._queries -= 1
            self._busy = True
        yield from self._release()

    @contextmanager
    def document(self) -> Iterator[None]:
        """Waits until no query is waiting."""
        with self._condition:
            self._condition.wait_for(lambda: not self._busy and not self._queries)
            self._busy = True
        yield from self._release()

    def _release(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._condition:
                self._busy = False
                self._condition.notify_all()


class Encoder:
    """
    Embeds documents and queries with a MoEMB model. Threads may share it.

    Args:
        model (`SentenceTransformer`): the loaded model.
        name (`str`): how messages call it.
        batch_size (`int`, *optional*, defaults to 32): documents in one forward pass.

    Raises:
        SearchModelError: the model is not a MoEMB model.
    """

    def __init__(self, model: Any, name: str, batch_size: int = 32):
        self.model, self.name, self.batch_size = model, name, batch_size
        self.network = model[0].auto_model
        kind = self.network.config.model_type
        if kind != "moemb":
            raise SearchModelError(f"'{name}' is a '{kind}' model; the search needs a MoEMB model: moemb convert")
        self.stops = dial_stops(self.network.config)
        self.sampling = model[0].processor.frame_sampling()
        self._turns = Turns()

    def documents(self, items: Sequence[Any], budget: Mapping[str, Any] | None = None) -> np.ndarray:
        """
        Embeds documents.

        Args:
            items (`Sequence`): anything `encode_document` takes.
            budget (`Mapping`, *optional*): `adaptive_compute`; full compute by default.

        Returns:
            `np.ndarray`: float32 `[items, dim]`, of unit length.
        """
        with self._turns.document():
            vectors = self.model.encode_document(
                list(items),
                batch_size=self.batch_size,
                show_progress_bar=False,
                normalize_embeddings=True,
                adaptive_compute=dict(budget or {}),
            )
        return np.asarray(vectors, dtype=np.float32)

    def query(self, item: Any, stops: Sequence[DialStop]) -> tuple[list[Spent], float]:
        """
        Embeds a query at some stops of the dial, and measures each.

        Args:
            item: anything `encode_query` takes.
            stops (`Sequence[DialStop]`): the stops.

        Returns:
            `tuple[list[Spent], float]`: what each stop gave and took, and the seconds it took to prepare the item
            (decoding, resizing, tokens), which the dial does not change.
        """
        import torch

        with self._turns.query(), torch.inference_mode():
            started = time.perf_counter()
            prompt = (self.model.prompts or {}).get("query")
            features = self.model.preprocess([item], prompt=prompt, task="query")
            given = {
                name: value.to(self.model.device) if isinstance(value, torch.Tensor) else value
                for name, value in features.items()
                if name in self.model[0]._declared_forward_params
            }
            prepared = time.perf_counter() - started
            first = [self._counted(given, stop) for stop in stops]
            seconds = self._timed(given, stops)
        return [
            Spent(stop, vector, statistics.median(times), len(times), flops)
            for stop, (vector, flops), times in zip(stops, first, seconds, strict=True)
        ], prepared

    def _counted(self, given: dict[str, Any], stop: DialStop) -> tuple[np.ndarray, int]:
        """The vector and the executed FLOPs; counting slows the pass down, so it is not the one that is timed."""
        import torch

        from modeling_moemb.compute_moemb import count_flops

        output = self.network(**given, pooled_only=True, adaptive_compute=dict(stop.budget), output_compute=True)
        vector = torch.nn.functional.normalize(output.pooler_output.float(), dim=-1)[0]
        return vector.cpu().numpy(), int(count_flops(self.network.config, output.compute).total)

    def _timed(self, given: dict[str, Any], stops: Sequence[DialStop]) -> list[list[float]]:
        import torch

        times: list[list[float]] = [[] for _ in stops]
        began = time.perf_counter()
        while len(times[0]) < _REPEATS and (not times[0] or time.perf_counter() - began < _MEASURING_SECONDS):
            for stop, taken in zip(stops, times, strict=True):
                started = time.perf_counter()
                self.network(**given, pooled_only=True, adaptive_compute=dict(stop.budget))
                if self.model.device.type == "cuda":
                    torch.cuda.synchronize(self.model.device)
                taken.append(time.perf_counter() - started)
        return times

    def probe(self) -> np.ndarray:
        """
        Embeds a text, a picture and a clip that never change: how a model is recognised.

        Returns:
            `np.ndarray`: float32 `[3, dim]`, of unit length.
        """
        ramp = np.arange(64, dtype=np.uint8) * 4
        picture = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], np.uint8(128)), axis=-1)
        clip = np.stack([np.roll(picture, 16 * shift, axis=1) for shift in range(4)])
        return self.documents(["a red balloon over the sea", {"image": picture}, {"video": clip}])
