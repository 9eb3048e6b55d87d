"""A tiny model repository, loaded once as users load it."""

import pytest
from sentence_transformers import SentenceTransformer

from moemb.trainers.repository import assemble_repository

from ..processors import lean_processor
from .embedders import build, some_items


@pytest.fixture(scope="session")
def repository(tmp_path_factory, tiny_settings):
    processor = lean_processor(max_length=128)
    prompts = {"query": "find: ", "document": ""}
    return assemble_repository(
        tmp_path_factory.mktemp("repository") / "mini",
        model=build(tiny_settings, processor),
        processor=processor,
        conventions={"prompts": prompts},
        card_text="---\nlicense: apache-2.0\n---\n# Tiny\n",
    )


@pytest.fixture(scope="session")
def embedder(repository):
    return SentenceTransformer(str(repository), trust_remote_code=True, device="cpu")


@pytest.fixture(scope="session")
def vectors(embedder):
    return embedder.encode(some_items())
