"""MoEMBProcessor: any item a user may want embedded, to model inputs, by one recorded set of conventions."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from .items_moemb import CANONICAL_ORDER, ItemError, Part, Turn, as_batch, clean_text, parse_item
from .media_moemb import BACKGROUND, MediaError, load_image, refuse_remote
from .patches_moemb import PatchCutter, patchify, pixel_bounds
from .template_moemb import EMB_TOKEN, END_OF_TURN, ItemTemplate
from .video_moemb import FrameSampling, VideoClip, load_video


# What a repository may settle; the rest of the conventions is fixed by the code and the stock processors' settings.
DEFAULT_EMBEDDING = {
    "prompts": {"query": "", "document": ""},
    "default_prompt_name": None,
    "order": list(CANONICAL_ORDER),
    "text_separator": "\n",
    "background": list(BACKGROUND),
    "bare_frames_fps": 24.0,
    "video_timestamps": True,
}
# What a repository may settle besides; absent unless it is needed.
OPTIONAL_EMBEDDING = ("instruction_mask",)


class MoEMBProcessor(Qwen3VLProcessor):
    r"""
    Turns items into the inputs of [`MoEMBModel`].

    `processor(items)` takes one item or a batch. An item is a text, an image (PIL, path, bytes, array, data URL), a
    video, a mapping with the keys `text`, `image`, `video`, a list of such parts (one document, in that order), or
    chat messages. `processor(text=..., images=..., videos=...)` is the stock interface for prompts that are rendered
    already: special tokens in such a `text` are obeyed, so never pass it what others wrote.

    Args:
        image_processor (`Qwen2VLImageProcessor`):
            Patch size and pixel budget of images.
        tokenizer (`PreTrainedTokenizerFast`):
            With Qwen's special tokens and `<emb>`. Its `model_max_length` limits an item's tokens.
        video_processor (`Qwen3VLVideoProcessor`):
            Patch size, pixel budget and frame sampling (`num_frames`, or `fps` with `min_frames` and `max_frames`).
        chat_template (`str`):
            Jinja template that ends with `<emb>`.
        embedding (`dict`, *optional*):
            Conventions of the repository, see `DEFAULT_EMBEDDING`; saved in `processor_config.json`. With
            `instruction_mask` true, for models that are conditioned on the instruction, its tokens are marked.
        allow_remote_media (`bool`, *optional*, defaults to `False`):
            Whether http(s) URLs under `image` and `video` may be fetched. Never read from or saved to a repository.
    """

    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        video_processor=None,
        chat_template=None,
        embedding=None,
        allow_remote_media=False,
        **kwargs,
    ):
        super().__init__(image_processor, tokenizer, video_processor, chat_template=chat_template, **kwargs)
        unknown = sorted(set(embedding or {}) - set(DEFAULT_EMBEDDING) - set(OPTIONAL_EMBEDDING))
        if unknown:
            raise ValueError(f"unknown conventions {unknown}: known are {sorted(DEFAULT_EMBEDDING)}")
        self.embedding = {**DEFAULT_EMBEDDING, **(embedding or {})}
        if sorted(self.embedding["order"]) != sorted(CANONICAL_ORDER):
            raise ValueError(
                f"the order of parts must name {CANONICAL_ORDER} once each, got {self.embedding['order']}"
            )
        name = self.embedding["default_prompt_name"]
        if name is not None and name not in self.embedding["prompts"]:
            raise ValueError(
                f"default_prompt_name {name!r} is not among the prompts {sorted(self.embedding['prompts'])}"
            )
        self._allow_remote_media = bool(allow_remote_media)
        self._template: ItemTemplate | None = None

    @classmethod
    def from_args_and_dict(cls, args, processor_dict, **kwargs):
        # A repository must not be able to switch network access on for its user.
        processor_dict = {key: value for key, value in processor_dict.items() if key != "allow_remote_media"}
        return super().from_args_and_dict(args, processor_dict, **kwargs)

    @property
    def allow_remote_media(self) -> bool:
        """Whether http(s) URLs under `image` and `video` may be fetched; bare strings never are."""
        return self._allow_remote_media

    @allow_remote_media.setter
    def allow_remote_media(self, value: bool) -> None:
        self._allow_remote_media = bool(value)

    def __call__(
        self,
        inputs: Any = None,
        *,
        text=None,
        images=None,
        videos=None,
        prompt_name: str | None = None,
        instruction: str | None = None,
        indices: list[int] | None = None,
        max_length: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        **kwargs,
    ) -> BatchFeature:
        r"""
        Prepares items for the model.

        Args:
            inputs:
                One item or a list of items (see the class). A list is a batch, except a list of chat messages.
            text, images, videos:
                The stock interface instead of `inputs`; with it, every other argument is the stock processor's.
            prompt_name (`str`, *optional*):
                Name of a recorded prompt to use as instruction; by default the recorded `default_prompt_name`.
            instruction (`str`, *optional*):
                Instruction text; stands instead of `prompt_name`. Chat messages with a system turn keep their own.
            indices (`list[int]`, *optional*):
                Indices to call the items by in errors; by default their places in `inputs`.
            max_length (`int`, *optional*):
                Most tokens of an item; by default the tokenizer's `model_max_length`. Only texts are cut.
            min_pixels, max_pixels (`int`, *optional*):
                Override the recorded pixel budget of an image.
            num_frames, fps (`int`, `float`, *optional*):
                Override the recorded frame sampling of a video; one of them at most.

        Returns:
            `BatchFeature`: `input_ids`, `attention_mask` and `mm_token_type_ids` (0 text, 1 image, 2 video), int64
            `[B, T]`, padded on the tokenizer's side; where there are images, `pixel_values` float32 `[patches,
            values]` and `image_grid_thw` int64 `[images, 3]`; where there are videos, `pixel_values_videos` and
            `video_grid_thw`; with the convention `instruction_mask`, `instruction_mask` int64 `[B, T]`, 1 at the
            tokens of a leading system turn.

        Raises:
            ItemError: an item cannot be embedded; the message starts with `item <index>:`.
            ValueError: no items, or contradicting arguments.
        """
        if inputs is None and (text is not None or images is not None or videos is not None):
            if max_length is not None:
                kwargs["max_length"] = max_length
            if not self._allow_remote_media:
                refuse_remote([images, videos])
            return super().__call__(images=images, text=text, videos=videos, **kwargs)
        if text is not None or images is not None or videos is not None:
            raise ValueError("pass either items, or the stock arguments text, images and videos, not both")
        if unknown := sorted(set(kwargs) - {"return_tensors", "padding", "return_dict"}):
            raise ValueError(f"unknown arguments {unknown} for items")
        for name, value in zip(
            ("min_pixels", "max_pixels", "num_frames", "fps"), (min_pixels, max_pixels, num_frames, fps)
        ):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        items, _ = as_batch(inputs)
        if not items:
            raise ValueError("there are no items: the list is empty")
        indices = list(range(len(items))) if indices is None else list(indices)
        instruction = self.resolve_instruction(prompt_name, instruction)
        cutter = PatchCutter(self.image_processor, self.video_processor, min_pixels, max_pixels)
        sampling = self.frame_sampling(num_frames, fps)
        pictures: list[np.ndarray] = []
        clips: list[np.ndarray] = []
        layouts, instructed = [], []
        for item, index in zip(items, indices, strict=True):
            try:
                turns = self._turns(item, instruction)
                instructed.append(turns[0].role == "system")
                layouts.append(self._lay_out(turns, cutter, sampling, pictures, clips))
            except (ItemError, MediaError) as error:
                raise ItemError(f"item {index}: {error}") from error
            except Exception as error:
                raise ItemError(f"item {index}: it cannot be read: {type(error).__name__}: {error}") from error
        limit = max_length if max_length is not None else self.tokenizer.model_max_length
        limit = None if limit is None or limit > 10**9 else int(limit)
        features = self._pad(self.template.tokenize(layouts, limit, indices))
        if self.embedding.get("instruction_mask"):
            features["instruction_mask"] = self._instruction_mask(features, instructed)
        if pictures:
            features["pixel_values"], features["image_grid_thw"] = cutter.cut_images(pictures)
        if clips:
            features["pixel_values_videos"], features["video_grid_thw"] = cutter.cut_clips(clips)
        return BatchFeature(features)

    def apply_chat_template(self, conversation, chat_template=None, **kwargs):
        """
        Renders or processes chat messages.

        With `tokenize=True` and the repository's own template this is `processor(conversation)`: special tokens in
        texts stay text, and nothing is fetched unless allowed. Otherwise it is the stock method.
        """
        if not kwargs.get("tokenize") or chat_template not in (None, self.chat_template):
            return super().apply_chat_template(conversation, chat_template, **kwargs)
        text_kwargs = (kwargs.get("processor_kwargs") or {}).get("text_kwargs") or {}
        batch = [conversation] if conversation and isinstance(conversation[0], dict) else conversation
        features = self(batch, instruction="", max_length=text_kwargs.get("max_length", kwargs.get("max_length")))
        return features if kwargs.get("return_dict") else features["input_ids"]

    def resolve_instruction(self, prompt_name: str | None = None, instruction: str | None = None) -> str:
        """Returns the instruction that `prompt_name` and `instruction` stand for, `""` for none."""
        if instruction is not None:
            return clean_text(instruction)
        name = prompt_name if prompt_name is not None else self.embedding["default_prompt_name"]
        if name is None:
            return ""
        if name not in self.embedding["prompts"]:
            raise ValueError(f"no prompt is named {name!r}: the recorded ones are {sorted(self.embedding['prompts'])}")
        return self.embedding["prompts"][name]

    def frame_sampling(self, num_frames: int | None = None, fps: float | None = None) -> FrameSampling:
        """Returns the recorded frame sampling, with `num_frames` or `fps` put in its place if given."""
        if num_frames is not None and fps is not None:
            raise ValueError(f"num_frames={num_frames} and fps={fps} contradict each other: give one of them")
        stock = self.video_processor
        sampling = FrameSampling(
            stock.num_frames,
            stock.fps,
            stock.min_frames,
            stock.max_frames,
            float(self.embedding["bare_frames_fps"]),
        )
        if num_frames is not None:
            return replace(sampling, num_frames=int(num_frames))
        return sampling if fps is None else replace(sampling, num_frames=None, fps=float(fps))

    def conventions(self) -> dict[str, Any]:
        """
        Returns everything that decides how an item is embedded, as `config.embedding` records it.

        The processor is the one source: the settable part is in `processor_config.json`, the rest is read from the
        stock processors and the template.
        """
        image_low, image_high = pixel_bounds(self.image_processor)
        video_low, video_high = pixel_bounds(self.video_processor)
        stock = self.video_processor
        return {
            **self.embedding,
            "pooled_token": EMB_TOKEN,
            "instruction_placement": "system turn before the content; no turn when there is no instruction",
            "animated_image": "first frame as an image, all frames as a video",
            "truncation": "texts only, last text first",
            "max_length": self.tokenizer.model_max_length if self.tokenizer.model_max_length < 10**9 else None,
            "image": {"min_pixels": image_low, "max_pixels": image_high},
            "video": {
                "num_frames": stock.num_frames,
                "fps": stock.fps if stock.num_frames is None else None,
                "min_frames": stock.min_frames,
                "max_frames": stock.max_frames,
                "min_pixels": video_low,
                "max_pixels": video_high,
                "max_tokens_per_frame": stock.max_video_tokens if stock.cap_pixels_per_frame else None,
            },
            "chat_template_sha256": hashlib.sha256(self._single_template().encode()).hexdigest(),
        }

    @property
    def template(self) -> ItemTemplate:
        """The compiled chat template; made anew when `chat_template` changed."""
        source = self._single_template()
        if self._template is None or self._template.chat_template != source:
            tokens = {
                "image": self.image_token,
                "video": self.video_token,
                "start": self.vision_start_token,
                "end": self.vision_end_token,
            }
            self._template = ItemTemplate(self.tokenizer, source, tokens)
        return self._template

    def _single_template(self) -> str:
        source = self.chat_template
        if isinstance(source, dict):
            source = source.get("default")
        if not source:
            raise ValueError("the processor has no chat template: chat_template.jinja is missing in the repository")
        return source

    def _turns(self, item: Any, instruction: str) -> list[Turn]:
        turns = parse_item(item, tuple(self.embedding["order"]), self.embedding["text_separator"])
        if instruction and not any(turn.role == "system" for turn in turns):
            turns = [Turn("system", (Part("text", instruction),)), *turns]
        return turns

    def _lay_out(self, turns, cutter: PatchCutter, sampling: FrameSampling, pictures: list, clips: list) -> list:
        """Decodes the media of one item into `pictures` and `clips` and puts its tokens into the template."""
        media: dict[tuple[int, int], list] = {}
        background = tuple(self.embedding["background"])
        merged = self.image_processor.merge_size**2
        for t, turn in enumerate(turns):
            for p, part in enumerate(turn.parts):
                if part.kind == "image":
                    picture = load_image(part.value, self._allow_remote_media, background)
                    _, rows, columns = cutter.image_grid(*picture.shape[:2])
                    media[t, p] = [[self.image_token_id] * (rows * columns // merged)]
                    pictures.append(picture)
                elif part.kind == "video":
                    clip = load_video(part.value, sampling, self._allow_remote_media, background)
                    media[t, p] = self._video_tokens(clip, cutter)
                    clips.append(clip.frames)
        return self.template.lay_out(turns, media)

    def _video_tokens(self, clip: VideoClip, cutter: PatchCutter) -> list:
        """Per temporal patch: its mean time as text, then its tokens between vision_start and vision_end."""
        steps, rows, columns = cutter.clip_grid(*clip.frames.shape[:3])
        size = self.video_processor.temporal_patch_size
        times = np.concatenate([clip.times, np.repeat(clip.times[-1:], steps * size - len(clip.times))])
        tokens: list = []
        for step in times.reshape(steps, size):
            if self.embedding["video_timestamps"]:
                tokens.append(f"<{(step[0] + step[-1]) / 2:.1f} seconds>")
            count = rows * columns // self.video_processor.merge_size**2
            tokens.append([self.vision_start_token_id, *[self.video_token_id] * count, self.vision_end_token_id])
        return tokens

    def _pad(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        lengths = torch.tensor([len(row) for row in rows])
        places = torch.arange(int(lengths.max()))[None]
        left = self.tokenizer.padding_side == "left"
        mask = places >= (lengths.max() - lengths)[:, None] if left else places < lengths[:, None]
        pad_id = self.tokenizer.pad_token_id
        ids = torch.full(mask.shape, 0 if pad_id is None else pad_id, dtype=torch.long)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        types = (ids == self.image_token_id).long() + 2 * (ids == self.video_token_id).long()
        return {"input_ids": ids, "attention_mask": mask.long(), "mm_token_type_ids": types}

    def _instruction_mask(self, features: dict[str, torch.Tensor], instructed: list[bool]) -> torch.Tensor:
        """1 at the tokens before the first end of a turn, in the items that begin with a system turn."""
        end = self.template.end_of_turn_id
        if end is None:
            raise ValueError(f"instructions cannot be marked: the tokenizer has no {END_OF_TURN}, which ends them")
        before = (features["input_ids"] == end).cumsum(1) == 0
        return (before & features["attention_mask"].bool() & torch.tensor(instructed)[:, None]).long()

    def to_dict(self) -> dict[str, Any]:
        # The parent deep-copies every attribute, and the compiled template holds a second tokenizer.
        template, self._template = self._template, None
        try:
            return super().to_dict()
        finally:
            self._template = template

    def __getstate__(self):
        # The compiled template is cheap to make again and large to send to a worker.
        return {**self.__dict__, "_template": None}


__all__ = ["DEFAULT_EMBEDDING", "ItemError", "MoEMBProcessor", "patchify"]
