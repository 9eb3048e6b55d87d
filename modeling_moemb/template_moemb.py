"""From turns to token ids: the chat template, with everything a user wrote kept apart from its structure.

The template is rendered once per shape of conversation, with placeholders where texts go, and cut at its special
tokens. Texts are put in afterwards and tokenised by a tokenizer that knows no special tokens, so no text can forge a
turn, add an image or move the pooled position. For texts without special tokens the ids equal those of the stock
tokenizer on the rendered string.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from .items_moemb import ItemError, Turn


EMB_TOKEN = "<emb>"
END_OF_TURN = "<|im_end|>"
_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(r"[<\[].*[>\]]", re.DOTALL)


@dataclass
class Run:
    """A stretch of plain text between special tokens.

    Args:
        pieces (`list[tuple[str, bool]]`): its strings, each with whether truncation may shorten it.
    """

    pieces: list[tuple[str, bool]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


@dataclass
class Slot:
    """Where the `part`-th part of the `turn`-th turn goes in a rendered template."""

    turn: int
    part: int


class ItemTemplate:
    """
    Renders and tokenises conversations.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): with the structural tokens and `<emb>`.
        chat_template (`str`): the Jinja template; it must end with `<emb>`.
        media_tokens (`dict[str, str]`): names `image`, `video`, `start` and `end` of the media tokens.
    """

    def __init__(self, tokenizer: Any, chat_template: str, media_tokens: dict[str, str]):
        self.chat_template = chat_template
        names = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        missing = [token for token in (*media_tokens.values(), EMB_TOKEN) if token not in names]
        if missing:
            raise ValueError(f"the tokenizer lacks the special tokens {missing}: add them before making a processor")
        self.emb_id = names[EMB_TOKEN]
        self.end_of_turn_id: int | None = names.get(END_OF_TURN)
        self.media_ids = {kind: names[token] for kind, token in media_tokens.items()}
        self._ids = names
        marks = {token for token in names if _MARK.fullmatch(token) and token in chat_template}
        structural = {*media_tokens.values(), EMB_TOKEN, *marks}
        self._plain = _without_specials(tokenizer, structural)
        longest_first = sorted(names, key=len, reverse=True)
        self._cutter = re.compile("|".join([*map(re.escape, longest_first), f"{_OPEN}\\d+{_CLOSE}"]))
        self._skeletons: dict[tuple, list] = {}

    def lay_out(self, turns: list[Turn], media: dict[tuple[int, int], list]) -> list[int | Run | list[int]]:
        """
        Puts the parts of one conversation into the template.

        Args:
            turns (`list[Turn]`): the conversation.
            media (`dict[tuple[int, int], list]`): for the media part at (turn, part), what stands in its place:
            strings
                and token ids in order.

        Returns:
            `list`: token ids and [`Run`]s in order; neighbouring texts are one run.
        """
        shape = tuple((turn.role, tuple(part.kind for part in turn.parts)) for turn in turns)
        skeleton = self._skeletons.get(shape)
        if skeleton is None:
            skeleton = self._skeletons[shape] = self._render(shape)
        elements: list = []
        for element in skeleton:
            if isinstance(element, Slot):
                turn = turns[element.turn]
                part = turn.parts[element.part]
                if part.kind == "text":
                    _append_text(elements, part.value, turn.role != "system")
                    continue
                for piece in media[element.turn, element.part]:
                    _append_text(elements, piece, False) if isinstance(piece, str) else elements.append(piece)
            elif isinstance(element, str):
                _append_text(elements, element, False)
            else:
                elements.append(element)
        return elements

    def tokenize(self, layouts: list[list], max_length: int | None, indices: list[int]) -> list[list[int]]:
        """
        Turns layouts into token ids; of an item that is too long, its last texts are cut.

        Args:
            layouts (`list[list]`): what [`lay_out`] returned.
            max_length (`int`, *optional*): most tokens of an item, `None` for no limit.
            indices (`list[int]`): the items' indices, for the messages.

        Returns:
            `list[list[int]]`: token ids of each item.

        Raises:
            ItemError: an item is too long without any text.
        """
        runs = {e.text: None for layout in layouts for e in layout if isinstance(e, Run)}
        encodings = self._plain.encode_batch_fast(list(runs), add_special_tokens=False)
        ids_of = {text: encoding.ids for text, encoding in zip(runs, encodings, strict=True)}
        rows = []
        for layout, index in zip(layouts, indices, strict=True):
            chunks = [ids_of[e.text] if isinstance(e, Run) else e if isinstance(e, list) else [e] for e in layout]
            length = sum(map(len, chunks))
            if max_length is not None and length > max_length:
                chunks = self._truncate(layout, chunks, length - max_length, max_length, index)
            rows.append([token for chunk in chunks for token in chunk])
        return rows

    def _truncate(self, layout: list, chunks: list[list[int]], excess: int, max_length: int, index: int):
        """Drops `excess` tokens of user text, from the end of the last text backwards."""
        chunks = list(chunks)
        for number in range(len(layout) - 1, -1, -1):
            if excess <= 0:
                break
            if isinstance(layout[number], Run) and any(cuttable for _, cuttable in layout[number].pieces):
                chunks[number], excess = self._cut_run(layout[number], excess)
        if excess > 0:
            length = max_length + excess
            raise ItemError(
                f"item {index}: its media, instruction and template take {length} tokens, more than the limit of "
                f"{max_length}: use fewer or smaller images or frames, or raise `max_length`"
            )
        return chunks

    def _cut_run(self, run: Run, excess: int) -> tuple[list[int], int]:
        encoding = self._plain.encode(run.text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        drop: set[int] = set()
        end = len(run.text)
        for piece, cuttable in reversed(run.pieces):
            start = end - len(piece)
            if cuttable:
                inside = [i for i, (a, b) in enumerate(offsets) if a >= start and b <= end]
                count = min(len(inside), excess)
                # A character of several tokens goes as a whole: half of one is no text.
                while 0 < count < len(inside) and offsets[inside[-count]][0] < offsets[inside[-count - 1]][1]:
                    count += 1
                drop.update(inside[len(inside) - count :])
                excess -= count
            end = start
            if excess <= 0:
                break
        return [token for i, token in enumerate(ids) if i not in drop], excess

    def _render(self, shape: tuple) -> list:
        """Renders one shape of conversation and cuts it into token ids, strings and slots."""
        slots, media, messages = [], {"image": [], "video": []}, []
        for turn, (role, kinds) in enumerate(shape):
            content: list[dict] = []
            for part, kind in enumerate(kinds):
                if kind == "text":
                    content.append({"type": "text", "text": f"{_OPEN}{len(slots)}{_CLOSE}"})
                    slots.append(Slot(turn, part))
                else:
                    content.append({"type": kind})
                    media[kind].append(Slot(turn, part))
            messages.append({"role": role, "content": content})
        rendered, _ = render_jinja_template(conversations=[messages], chat_template=self.chat_template)
        kinds = {self.media_ids["image"]: "image", self.media_ids["video"]: "video"}
        elements: list = []
        for literal, match in _split(self._cutter, rendered[0]):
            if literal:
                elements.append(literal)
            if match is None:
                continue
            if match.startswith(_OPEN):
                elements.append(slots[int(match[1:-1])])
            elif (kind := kinds.get(self._ids[match])) is None:
                elements.append(self._ids[match])
            elif media[kind]:
                elements.append(media[kind].pop(0))
            else:
                raise ValueError(f"the chat template writes more {kind} tokens than there are {kind}s")
        self._check(elements, shape, len(slots), media)
        return self._unwrap_videos(elements, shape)

    def _check(self, elements: list, shape: tuple, texts: int, media: dict[str, list[Slot]]) -> None:
        written = sum(isinstance(e, Slot) and shape[e.turn][1][e.part] == "text" for e in elements)
        if written != texts or any(media.values()):
            raise ValueError(f"the chat template leaves out a part of a conversation of the shape {shape}")
        if not elements or elements[-1] != self.emb_id or self.emb_id in elements[:-1]:
            raise ValueError(f"the chat template must write {EMB_TOKEN} once, as its very last token")

    def _unwrap_videos(self, elements: list, shape: tuple) -> list:
        """Drops a vision_start/vision_end pair around a video: each of its frames brings its own."""
        start, end = self.media_ids["start"], self.media_ids["end"]

        def is_video(number: int) -> bool:
            if not 0 <= number < len(elements) or not isinstance(elements[number], Slot):
                return False
            return shape[elements[number].turn][1][elements[number].part] == "video"

        return [
            element
            for number, element in enumerate(elements)
            if not (element == start and is_video(number + 1)) and not (element == end and is_video(number - 1))
        ]


def _append_text(elements: list, text: str, cuttable: bool) -> None:
    if not text:
        return
    if not elements or not isinstance(elements[-1], Run):
        elements.append(Run())
    elements[-1].pieces.append((text, cuttable))


def _split(pattern: re.Pattern, text: str):
    """Yields the literal text before each match with the match, then the rest with `None`."""
    position = 0
    for match in pattern.finditer(text):
        yield text[position : match.start()], match.group()
        position = match.end()
    yield text[position:], None


def _without_specials(tokenizer: Any, structural: set[str]) -> Tokenizer:
    """A copy of the backend that reads special and structural tokens as the characters they are written with."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] or token["content"] in structural
    state.update(truncation=None, padding=None)
    plain = Tokenizer.from_str(json.dumps(state))
    plain.encode_special_tokens = True
    for token in state["added_tokens"]:
        if token["special"] and token["id"] in plain.encode(token["content"], add_special_tokens=False).ids:
            raise ValueError(
                f"the tokenizer's vocabulary holds {token['content']!r} as an ordinary token: texts could forge it"
            )
    return plain
