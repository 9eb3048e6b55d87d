"""What counts as one item to embed, and what it consists of: turns of texts, images and videos in their order."""

import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from .media_moemb import MediaError, kind_of_bytes, media_kind_of_string, read_file_object


logger = logging.getLogger(__name__)

# The order in which the parts of a mapping such as {"text": ..., "image": ...} stand, whatever order its keys have.
CANONICAL_ORDER = ("image", "video", "text")
ROLES = ("system", "user", "assistant")

_KEYS = {"text": "text", "texts": "text", "image": "image", "images": "image", "video": "video", "videos": "video"}
_MESSAGE_KEYS = {"role", "content", "name"}
_EXPECTED = (
    "a str, PIL image, path, bytes, array, a mapping with the keys text, image and video, "
    "a list of such parts (one document), or chat messages"
)


class ItemError(ValueError):
    """
    An item that cannot be embedded. The message names the item's index, what is wrong, and the remedy.

    Args:
        message (`str`):
            The message.
    """


@dataclass(frozen=True)
class Part:
    """
    One piece of an item.

    Args:
        kind (`str`): `"text"`, `"image"` or `"video"`.
        value: the text (`str`), or anything [`load_image`] or [`load_video`] takes.
    """

    kind: str
    value: Any


@dataclass(frozen=True)
class Turn:
    """
    One turn of the conversation that an item is rendered as.

    Args:
        role (`str`): `"system"`, `"user"` or `"assistant"`.
        parts (`tuple[Part, ...]`): what the turn says, in order.
    """

    role: str
    parts: tuple[Part, ...]


def is_message(value: Any) -> bool:
    """Returns whether a value is one chat message: a mapping with `role` and `content`."""
    return isinstance(value, dict) and "role" in value and "content" in value


def as_batch(inputs: Any) -> tuple[list[Any], bool]:
    """
    Tells a batch from a single item.

    A list or tuple is a batch, with one exception: a list of chat messages is one conversation. Object and string
    arrays, pandas series, dataset columns, generators and other iterables that are no item themselves are batches too.

    Args:
        inputs:
            One item or a batch of items.

    Returns:
        `tuple[list, bool]`: the items, and whether `inputs` was a single item.
    """
    if isinstance(inputs, (list, tuple)):
        if inputs and all(is_message(part) for part in inputs):
            return [list(inputs)], True
        return list(inputs), False
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "UO" and inputs.ndim >= 1:
        return inputs.tolist(), False
    single = (str, bytes, bytearray, memoryview, dict, os.PathLike, Image.Image, np.ndarray, torch.Tensor)
    if isinstance(inputs, single) or hasattr(inputs, "read") or hasattr(inputs, "get_frames_at"):
        return [inputs], True
    if hasattr(inputs, "columns") and hasattr(inputs, "iloc"):
        raise ItemError('the items are a data frame: pass one of its columns, such as frame["text"]')
    if hasattr(inputs, "__iter__"):
        return list(inputs), False
    return [inputs], True


def parse_item(item: Any, order: tuple[str, ...] = CANONICAL_ORDER, text_separator: str = "\n") -> list[Turn]:
    """
    Reads one item as turns; nothing is decoded or opened yet.

    Args:
        item:
            The item: a string (media only if it is an existing local media file or a base64 data URL), a PIL image,
            path, bytes, array, file object, mapping, list of parts, chat message, or list of chat messages.
        order (`tuple[str, ...]`, *optional*):
            Order of the parts of a mapping.
        text_separator (`str`, *optional*, defaults to a newline):
            Stands between neighbouring texts of a list or mapping.

    Returns:
        `list[Turn]`: one user turn, or the turns of the conversation.

    Raises:
        ItemError: the item is `None`, of an unknown type, empty, or has unknown keys or roles.
    """
    if is_message(item):
        return [_turn(item)]
    if isinstance(item, (list, tuple)) and item and any(is_message(part) for part in item):
        if not all(is_message(part) for part in item):
            raise ItemError("a list mixes chat messages with other parts: use one or the other")
        return [_turn(message) for message in item]
    if isinstance(item, (list, tuple)):
        if not item:
            raise ItemError("an empty list is no item; to embed an empty text, pass ''")
        parts = [part for number, value in enumerate(item) for part in _document_part(value, number, order)]
    elif isinstance(item, dict):
        parts = _mapping_parts(item, order)
    else:
        parts = [_bare_part(item)]
    return [Turn("user", tuple(_join_texts(parts, text_separator)))]


def clean_text(text: str) -> str:
    """
    Makes a string encodable: surrogate pairs become the character they mean, lone surrogates U+FFFD (with a warning).

    Args:
        text (`str`): any Python string.

    Returns:
        `str`: the same string if it has no surrogates.
    """
    try:
        text.encode("utf-8")
        return str(text)
    except UnicodeEncodeError:
        cleaned = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if "\ufffd" in cleaned:
            logger.warning("A text holds lone surrogates, which no encoding can carry; they are read as U+FFFD.")
        return cleaned


def _bare_part(value: Any) -> Part:
    if isinstance(value, str):
        kind = media_kind_of_string(value)
        return Part(kind, str(value)) if kind else Part("text", clean_text(value))
    if value is None:
        raise ItemError(f"it is None; pass {_EXPECTED}, or leave it out")
    if isinstance(value, (bool, int, float, complex, np.number)):
        raise ItemError(f"it is the number {value!r}; to embed it as text, pass str({value!r})")
    if isinstance(value, Image.Image):
        return Part("image", value)
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return Part("video" if value.ndim >= 4 else "image", value)
    if isinstance(value, os.PathLike):
        return Part(_kind_of_path(value), value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Part(kind_of_bytes(bytes(value)), bytes(value))
    if hasattr(value, "get_frames_at"):
        return Part("video", value)
    if hasattr(value, "read"):
        data = read_file_object(value)
        return Part(kind_of_bytes(data), data)
    raise ItemError(f"it is a {type(value).__name__}; pass {_EXPECTED}")


def _kind_of_path(path: os.PathLike | str) -> str:
    """What an explicit path holds: its extension says so, else its content."""
    name = os.fsdecode(path)
    if os.path.exists(name) and not os.path.isfile(name):
        raise ItemError(f"the file {name!r} cannot be opened: it is a folder, a pipe or a device")
    try:
        with open(name, "rb") as file:
            return media_kind_of_string(name) or kind_of_bytes(file.read())
    except (OSError, ValueError) as error:
        raise ItemError(f"the file {name!r} cannot be opened: {getattr(error, 'strerror', None) or error}") from error


def _mapping_parts(item: dict, order: tuple[str, ...]) -> list[Part]:
    if "bytes" in item or set(item) == {"path"}:
        return [_encoded_file(item)]
    if "frames" in item or "array" in item:
        return [Part("video", item)]
    unknown = sorted(str(key) for key in item if key not in _KEYS)
    if unknown:
        raise ItemError(f"it has unknown keys {unknown}: use text, image (or images) and video (or videos)")
    if not item:
        raise ItemError("it is an empty mapping: give it a text, an image or a video")
    parts: dict[str, list[Part]] = {"text": [], "image": [], "video": []}
    for key, value in item.items():
        if value is None:
            raise ItemError(f"its {key!r} is None: leave the key out")
        kind = _KEYS[key]
        values = _values(kind, key, value)
        if not values:
            raise ItemError(f"its {key!r} is an empty list: leave the key out")
        parts[kind] += [_typed_part(kind, one) for one in values]
    return [part for kind in order for part in parts[kind]]


def _values(kind: str, key: str, value: Any) -> list[Any]:
    """The values under one key: a list holds several, except that a list of pictures under `video` is one video."""
    if isinstance(value, (list, tuple)):
        if kind == "video" and key == "video" and not any(_is_video(one) for one in value):
            return [list(value)] if value else []
        return list(value)
    if kind == "image" and isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim == 4:
        return list(value)
    return [value]


def _is_video(value: Any) -> bool:
    """Whether an element of a list under `video` is itself a video, not a frame."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.ndim >= 4
    if isinstance(value, dict):
        return "frames" in value or "array" in value
    if isinstance(value, (list, tuple)) or hasattr(value, "get_frames_at"):
        return True
    return isinstance(value, (str, os.PathLike)) and media_kind_of_string(os.fspath(value)) == "video"


def _typed_part(kind: str, value: Any) -> Part:
    if value is None:
        raise ItemError(f"it has a {kind} that is None: leave it out")
    if kind != "text":
        return Part(kind, value)
    if not isinstance(value, str):
        raise ItemError(f"its text is a {type(value).__name__}, not a str")
    return Part("text", clean_text(value))


def _encoded_file(item: dict) -> Part:
    data = item.get("bytes")
    if isinstance(data, (bytes, bytearray, memoryview)) and len(data):
        return Part(kind_of_bytes(bytes(data)), bytes(data))
    if item.get("path") is None:
        raise ItemError("it has neither 'bytes' nor 'path'")
    path = os.fspath(item["path"])
    return Part(_kind_of_path(path), path)


def _document_part(value: Any, number: int, order: tuple[str, ...]) -> list[Part]:
    try:
        if isinstance(value, dict) and "type" in value:
            return [_content_part(value)]
        if isinstance(value, dict):
            return _mapping_parts(value, order)
        if isinstance(value, (list, tuple)):
            raise ItemError("it is a list inside a document; frames of a video stand under {'video': [...]}")
        return [_bare_part(value)]
    except ItemError as error:
        raise ItemError(f"part {number}: {error}") from error


def _turn(message: dict) -> Turn:
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise ItemError(f"a message has the role {role!r}: use {', '.join(ROLES)}")
    unknown = sorted(str(key) for key in message if key not in _MESSAGE_KEYS)
    if unknown:
        raise ItemError(f"a message has unknown keys {unknown}: use role and content")
    if isinstance(content, str):
        return Turn(role, (Part("text", clean_text(content)),))
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, (list, tuple)):
        raise ItemError(f"a message's content is a {type(content).__name__}: use a str or a list of typed parts")
    return Turn(role, tuple(_content_part(part) for part in content))


def _content_part(part: Any) -> Part:
    """A typed part of a chat message, in the forms that transformers and OpenAI clients use."""
    if isinstance(part, str):
        return Part("text", clean_text(part))
    if not isinstance(part, dict):
        raise ItemError(f"a message part is a {type(part).__name__}: use {{'type': 'text', 'text': ...}} and the like")
    kind = str(part.get("type") or next((_KEYS[key] for key in part if key in _KEYS), "?"))
    kind = kind.removeprefix("input_").removesuffix("_url")
    if kind not in ("text", "image", "video"):
        raise ItemError(f"a message part has the type {part.get('type')!r}: use text, image or video")
    names = (kind, f"{kind}_url", "url", "path") + (() if kind == "text" else ("base64",))
    name = next((name for name in names if part.get(name) is not None), None)
    if name is None:
        raise ItemError(f"a message part of type {kind!r} lacks its {kind!r}")
    if others := sorted(key for key in part if _KEYS.get(key, kind) != kind and part[key] is not None):
        raise ItemError(f"a message part of type {kind!r} has {others} besides: make a part of its own of each")
    value = part[name]
    if isinstance(value, dict) and "url" in value:
        value = value["url"]
    if name == "base64":
        value = f"data:{kind}/*;base64,{value}"
    return _typed_part(kind, value)


def _join_texts(parts: list[Part], separator: str) -> list[Part]:
    joined: list[Part] = []
    for part in parts:
        if part.kind == "text" and joined and joined[-1].kind == "text":
            joined[-1] = Part("text", joined[-1].value + separator + part.value)
        else:
            joined.append(part)
    return joined


__all__ = ["CANONICAL_ORDER", "ItemError", "MediaError", "Part", "Turn", "as_batch", "clean_text", "parse_item"]
