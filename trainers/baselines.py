"""Honest baselines: what the same items give to methods that learned nothing.

Text is compared by character n-gram TF-IDF and by BM25, images by colour histogram and by raw pixels. They are printed
beside every model so that a number can be read: a task that pixels solve tells nothing about a model. For a composed
query (image + text) the image baselines see the image alone, and for a clip the first frame alone.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer


BM25_K1 = 1.2
BM25_B = 0.75
_PIXEL_SIDE = 64
_HISTOGRAM_BINS = 8
# A run of letters or digits is a word; Chinese, Japanese and Thai write no spaces, so each of their signs is one.
_WORD = re.compile(r"[぀-ヿ㐀-鿿฀-๿]|[^\W぀-ヿ㐀-鿿฀-๿]+")


@dataclass(frozen=True)
class System:
    """Something that scores every document of a task for every query.

    Args:
        name (`str`):
            Name in the tables.
        scores (`Callable[[int, int], np.ndarray]`):
            `scores(start, stop)` returns float32 `[stop - start, documents]` for these queries; higher is closer.
        note (`str`, *optional*, defaults to `""`):
            What the system sees, when that is less than the whole query.
    """

    name: str
    scores: Callable[[int, int], np.ndarray]
    note: str = ""


def unit_rows(matrix: np.ndarray) -> np.ndarray:
    """Returns float32 `[rows, dim]` with rows of length 1; a zero row stays zero and so is alike to nothing."""
    matrix = np.asarray(matrix, dtype=np.float32)
    return matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)


def cosine_system(name: str, queries: np.ndarray, documents: np.ndarray, note: str = "") -> System:
    """
    Cosine similarity of given vectors.

    Args:
        name (`str`):
            Name in the tables.
        queries (`np.ndarray`):
            Float `[queries, dim]`, not necessarily of unit length.
        documents (`np.ndarray`):
            Float `[documents, dim]`.
        note (`str`, *optional*, defaults to `""`):
            What the vectors were made from.
    """
    left, right = unit_rows(queries), unit_rows(documents)
    return System(name, lambda start, stop: left[start:stop] @ right.T, note)


def tfidf_system(queries: Sequence[str], documents: Sequence[str]) -> System:
    """Cosine of TF-IDF vectors of character 2- to 4-grams inside words; frequencies are those of the documents."""
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True, dtype=np.float32)
    # An n-gram at the word boundary always exists, so even one-letter documents leave a vocabulary.
    right = vectorizer.fit_transform([document or " - " for document in documents])
    left = vectorizer.transform(queries)
    return System("character TF-IDF", lambda start, stop: (left[start:stop] @ right.T).toarray())


def bm25_words(text: str) -> list[str]:
    """Returns the lower-case words of a text; each Chinese, Japanese or Thai sign is one."""
    return _WORD.findall(text.lower())


def bm25_system(queries: Sequence[str], documents: Sequence[str]) -> System:
    """BM25 (Robertson and Zaragoza 2009; k1 1.2, b 0.75, non-negative idf) over whole words."""
    vocabulary: dict[str, int] = {}
    bags = [Counter(bm25_words(document)) for document in documents]
    for bag in bags:
        for word in bag:
            vocabulary.setdefault(word, len(vocabulary))
    counts = _count_matrix(bags, vocabulary)
    lengths = np.asarray(counts.sum(axis=1)).ravel()
    mean_length = max(float(lengths.mean()), 1e-12)
    holders = np.bincount(counts.indices, minlength=counts.shape[1])
    idf = np.log1p((len(documents) - holders + 0.5) / (holders + 0.5))
    row_of_value = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))
    damping = BM25_K1 * (1 - BM25_B + BM25_B * lengths[row_of_value] / mean_length)
    weights = counts.copy()
    weights.data = idf[counts.indices] * counts.data * (BM25_K1 + 1) / (counts.data + damping)
    asked = _count_matrix([Counter(bm25_words(query)) for query in queries], vocabulary)
    right = weights.T.tocsc()
    return System("BM25", lambda start, stop: (asked[start:stop] @ right).toarray().astype(np.float32))


def _count_matrix(bags: Sequence[Counter], vocabulary: dict[str, int]) -> sparse.csr_matrix:
    """Returns float64 CSR `[texts, words]` of word counts; unknown words are dropped."""
    rows, columns, values = [], [], []
    for row, bag in enumerate(bags):
        for word, count in bag.items():
            if word in vocabulary:
                rows.append(row)
                columns.append(vocabulary[word])
                values.append(float(count))
    shape = (len(bags), max(1, len(vocabulary)))
    return sparse.csr_matrix((values, (rows, columns)), shape=shape, dtype=np.float64)


def thumbnail(image: np.ndarray, side: int = _PIXEL_SIDE) -> np.ndarray:
    """Returns an image uint8 `[H, W, 3]` scaled (not cropped) to uint8 `[side, side, 3]`."""
    if image.shape[:2] == (side, side):
        return image
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC))


def pixel_vectors(images: Sequence[np.ndarray]) -> np.ndarray:
    """Raw pixels of images uint8 `[H, W, 3]` as float32 `[images, 64 * 64 * 3]`; white, the background, is zero."""
    return np.stack([thumbnail(image).reshape(-1) for image in images]).astype(np.float32) - 255.0


def histogram_vectors(images: Sequence[np.ndarray]) -> np.ndarray:
    """
    Colour histograms.

    Args:
        images (`Sequence[np.ndarray]`):
            Images uint8 `[H, W, 3]`.

    Returns:
        `np.ndarray`: float32 `[images, 512]`, the square root of the share of pixels in each of 8 x 8 x 8 colours, so
        that the cosine is the Bhattacharyya coefficient.
    """
    rows = []
    for image in images:
        step = (thumbnail(image).reshape(-1, 3) >> 5).astype(np.int64)
        colour = (step[:, 0] * _HISTOGRAM_BINS + step[:, 1]) * _HISTOGRAM_BINS + step[:, 2]
        shares = np.bincount(colour, minlength=_HISTOGRAM_BINS**3) / len(colour)
        rows.append(np.sqrt(shares))
    return np.stack(rows).astype(np.float32)


def text_baselines(queries: Sequence[str], documents: Sequence[str]) -> list[System]:
    """The two text baselines of a task whose queries and documents are texts."""
    return [tfidf_system(queries, documents), bm25_system(queries, documents)]


def image_baselines(queries: Sequence[np.ndarray], documents: Sequence[np.ndarray], note: str = "") -> list[System]:
    """The two image baselines of a task, given the image of each query and document, uint8 `[H, W, 3]`."""
    return [
        cosine_system("raw pixels", pixel_vectors(queries), pixel_vectors(documents), note),
        cosine_system("colour histogram", histogram_vectors(queries), histogram_vectors(documents), note),
    ]
