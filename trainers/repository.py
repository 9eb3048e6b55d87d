"""Model repositories: all that a folder needs to load through AutoModel, AutoProcessor and Sentence Transformers."""

import copy
import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .chat_templates import LEAN_TEMPLATE, QWEN_TEMPLATE
from .errors import MoEMBError
from .evaluation_conventions import default_conventions
from .files import put_in_place


EMB_TOKEN = "<emb>"
# Budgets that Qwen3-VL-Embedding is run with: 4 to 1,800 tokens an image, 1 frame a second up to 64, 7,680 tokens a
# video.
QWEN_IMAGE_PIXELS = (4 * 32 * 32, 1800 * 32 * 32)
QWEN_VIDEO = {"fps": 1.0, "min_frames": 4, "max_frames": 64, "size": {"shortest_edge": 4096, "longest_edge": 7864320}}
QWEN_MAX_LENGTH = 8192
QWEN_PROMPT = "Represent the user's input."
# moemb-mini: 4 to 16 tokens an image or a pair of frames, at most 8 frames.
MINI_PIXELS = (32 * 32, 64 * 64)
MINI_FRAMES = 8

_MODULES = "sentence_transformers.{}"
_TRANSFORMER = "base.modules.transformer.Transformer"
_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")


class RepositoryError(MoEMBError, ValueError):
    """A repository that cannot be written. The message names the file or setting and the remedy."""


def processor_from_checkpoint(source: str | Path, plain: bool = False) -> Any:
    """
    Makes the processor of a repository from the one of a stock Qwen3.5 or Qwen3-VL checkpoint.

    Args:
        source (`str` or `Path`):
            Folder with the stock tokenizer and preprocessor files.
        plain (`bool`, *optional*, defaults to `False`):
            Whether to make a stock `Qwen3VLProcessor`, for stacks that do not run our code.

    Returns:
        `MoEMBProcessor` or `Qwen3VLProcessor`: with `<emb>` (added if the tokenizer lacks it), the chat template that
        ends with it, and the pixel and frame budgets of the published models.

    Raises:
        RepositoryError: a file of the stock processor is missing or of another kind.
    """
    from transformers import AutoProcessor, Qwen3VLProcessor

    try:
        stock = AutoProcessor.from_pretrained(str(source))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RepositoryError(
            f"{source} has no complete processor ({error}); it needs tokenizer.json, tokenizer_config.json, "
            "preprocessor_config.json and video_preprocessor_config.json (or processor_config.json) of the checkpoint"
        ) from error
    if not isinstance(stock, Qwen3VLProcessor):
        raise RepositoryError(f"{source} holds a {type(stock).__name__}; the converter wants a Qwen3VLProcessor")
    tokenizer = stock.tokenizer
    if EMB_TOKEN not in tokenizer.get_vocab():
        tokenizer.add_special_tokens({"additional_special_tokens": [EMB_TOKEN]}, replace_extra_special_tokens=False)
    tokenizer.model_max_length = QWEN_MAX_LENGTH
    tokenizer.chat_template = None
    image_processor = type(stock.image_processor)(
        **_settings(stock.image_processor)
        | {"size": dict(zip(("shortest_edge", "longest_edge"), QWEN_IMAGE_PIXELS, strict=True))}
    )
    video_processor = type(stock.video_processor)(
        **_settings(stock.video_processor) | QWEN_VIDEO | {"num_frames": None, "cap_pixels_per_frame": True}
    )
    if plain:
        return Qwen3VLProcessor(image_processor, tokenizer, video_processor, chat_template=QWEN_TEMPLATE)
    from modeling_moemb.processing_moemb import MoEMBProcessor

    prompts = dict.fromkeys(("default", "query", "document"), QWEN_PROMPT)
    return MoEMBProcessor(
        image_processor,
        tokenizer,
        video_processor,
        chat_template=QWEN_TEMPLATE,
        embedding={"prompts": prompts, "default_prompt_name": "default"},
    )


def mini_processor(tokenizer: Any) -> Any:
    """
    Makes moemb-mini's processor: the lean template, 8 px patches, pictures of about 64 x 64 px, clips of 8 frames.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): with MoEMB's special tokens.

    Returns:
        `MoEMBProcessor`
    """
    from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor

    from modeling_moemb.processing_moemb import MoEMBProcessor

    low, high = MINI_PIXELS
    cut = {
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    image_processor = Qwen2VLImageProcessor(**cut, size={"shortest_edge": low, "longest_edge": high})
    video_processor = Qwen3VLVideoProcessor(
        **cut,
        size={"shortest_edge": low, "longest_edge": high * MINI_FRAMES},
        num_frames=MINI_FRAMES,
        fps=None,
        min_frames=1,
        max_frames=MINI_FRAMES,
        cap_pixels_per_frame=True,
        max_video_tokens=high // 16**2,
    )
    return MoEMBProcessor(image_processor, tokenizer, video_processor, chat_template=LEAN_TEMPLATE)


def write_repository_files(
    folder: Path,
    *,
    config: Any,
    processor: Any,
    card_text: str = "",
    plain: bool = False,
    conventions: dict[str, Any] | None = None,
) -> None:
    """
    Writes everything but the weights into an existing folder.

    Args:
        folder (`Path`): the repository.
        config (`MoEMBConfig`, or with `plain` `Qwen3_5MoeConfig`): written as it is, with the processor's conventions
            and, unless it has some, those of its evaluation.
        processor (`MoEMBProcessor`, or with `plain` `Qwen3VLProcessor`): the processor.
        card_text (`str`, *optional*): README.md; none is written when empty.
        plain (`bool`, *optional*, defaults to `False`): no code of ours, for stacks that load stock models only.
        conventions (`dict`, *optional*): settable conventions that replace the processor's, see `DEFAULT_EMBEDDING`;
            with `plain` the prompts and the default prompt's name are heeded, and stand instead of Qwen's.

    Raises:
        RepositoryError: the processor does not fit (no template ending in `<emb>`, or `<emb>` not the configured
        token).
    """
    from modeling_moemb.processing_moemb import MoEMBProcessor

    folder = Path(folder)
    if plain == isinstance(processor, MoEMBProcessor):
        raise RepositoryError(
            f"a {type(processor).__name__} does not go with plain={plain}: see processor_from_checkpoint"
        )
    config = copy.deepcopy(config)
    if plain:
        known = {
            "prompts": dict.fromkeys(("default", "query", "document"), QWEN_PROMPT),
            "default_prompt_name": "default",
        }
        known |= conventions or {}
        prompts, default = known["prompts"], known["default_prompt_name"]
    else:
        processor = _with_conventions(processor, conventions or {})
        config.embedding = processor.conventions()
        if getattr(config, "evaluation", None) is None:
            config.evaluation = default_conventions(processor).to_dict()
        prompts, default = processor.embedding["prompts"], processor.embedding["default_prompt_name"]
        if config.emb_token_id != processor.template.emb_id:
            raise RepositoryError(
                f"config.emb_token_id is {config.emb_token_id}, but the tokenizer gives {EMB_TOKEN} the id "
                f"{processor.template.emb_id}"
            )
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    dimension = config.get_text_config().hidden_size
    for name, content in _sentence_transformers_files(dimension, prompts, default, plain).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not plain:
        from modeling_moemb.sentence_transformer_moemb import complete_saved_code

        complete_saved_code(folder)
    if card_text:
        (folder / "README.md").write_text(card_text, encoding="utf-8")


def assemble_repository(
    target: Path,
    *,
    model: Any = None,
    weights_dir: Path | None = None,
    config: Any = None,
    processor: Any,
    card_text: str = "",
    conventions: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """
    Writes a complete model repository, all or nothing.

    Args:
        target (`Path`): the folder to make.
        model (`MoEMBModel`, *optional*): its weights and configuration are saved.
        weights_dir (`Path`, *optional*): instead of `model`, a folder with safetensors and `config.json`.
        config (`MoEMBConfig`, *optional*): instead of the model's or the folder's.
        processor (`MoEMBProcessor`): the processor.
        card_text (`str`, *optional*): README.md.
        conventions (`dict`, *optional*): see [`write_repository_files`].
        overwrite (`bool`, *optional*, defaults to `False`): whether an existing target is replaced.

    Returns:
        `Path`: the target.

    Raises:
        RepositoryError: neither or both of `model` and `weights_dir`, no weights, or the target exists.
    """
    target = Path(target).absolute()
    if (model is None) == (weights_dir is None):
        raise RepositoryError("give either `model` or `weights_dir`")
    if target.exists() and not overwrite:
        raise RepositoryError(f"{target} exists: remove it, choose another folder, or pass overwrite=True")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.assembling-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        if model is not None:
            model.save_pretrained(draft)
            config = config or model.config
        else:
            config = config or _copy_weights(Path(weights_dir), draft)
        write_repository_files(draft, config=config, processor=processor, card_text=card_text, conventions=conventions)
        put_in_place(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def assemble_checkpoint(checkpoint: Path, target: Path) -> Path:
    """
    Makes a repository of a training checkpoint.

    Args:
        checkpoint (`Path`): folder with `config.json`, safetensors, and what `MoEMBProcessor.save_pretrained` writes;
        its
            `README.md`, if any, becomes the card.
        target (`Path`): the folder to make; an existing one is replaced.

    Returns:
        `Path`: the target.

    Raises:
        RepositoryError: the checkpoint is incomplete.
    """
    from modeling_moemb.processing_moemb import MoEMBProcessor

    checkpoint = Path(checkpoint)
    needed = ("config.json", "tokenizer.json", "processor_config.json", "chat_template.jinja")
    if missing := [name for name in needed if not (checkpoint / name).is_file()]:
        raise RepositoryError(f"the checkpoint {checkpoint} lacks {missing}")
    card = checkpoint / "README.md"
    return assemble_repository(
        target,
        weights_dir=checkpoint,
        processor=MoEMBProcessor.from_pretrained(str(checkpoint)),
        card_text=card.read_text(encoding="utf-8") if card.is_file() else "",
        overwrite=True,
    )


def _copy_weights(source: Path, draft: Path) -> Any:
    """Copies the weight files and returns the configuration of their folder."""
    from modeling_moemb import MoEMBConfig

    files = [file for pattern in _WEIGHT_PATTERNS for file in sorted(source.glob(pattern))]
    if not any(file.suffix == ".safetensors" for file in files):
        raise RepositoryError(f"{source} has no *.safetensors")
    for file in files:
        shutil.copy(file, draft / file.name)
    return MoEMBConfig.from_pretrained(str(source))


def _with_conventions(processor: Any, conventions: dict[str, Any]) -> Any:
    if not conventions:
        return processor
    return type(processor)(
        processor.image_processor,
        processor.tokenizer,
        processor.video_processor,
        chat_template=processor.chat_template,
        embedding=processor.embedding | conventions,
    )


def _settings(processor: Any) -> dict[str, Any]:
    unwanted = ("image_processor_type", "video_processor_type", "processor_class", "auto_map")
    return {key: value for key, value in processor.to_dict().items() if key not in unwanted}


def _sentence_transformers_files(dimension: int, prompts: dict, default: str | None, plain: bool) -> dict[str, Any]:
    """The files of Sentence Transformers, by name."""
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    first = {"idx": 0, "name": "0", "path": "", "type": _MODULES.format(_TRANSFORMER)}
    modules = [
        first,
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": _MODULES.format("sentence_transformer.modules.pooling.Pooling"),
        },
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": _MODULES.format("base.modules.normalize.Normalize")},
    ]
    if not plain:
        first |= {"type": "sentence_transformer_moemb.MoEMBTransformer", "kwargs": ["adaptive_compute", "router_task"]}
    return {
        "modules.json": modules,
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": dict.fromkeys(("text", "image", "video"), forward)
            | {"message": forward | {"format": "structured"}},
            "module_output_name": "token_embeddings",
            "unpad_inputs": False,
        },
        "1_Pooling/config.json": {
            "embedding_dimension": dimension,
            "pooling_mode": "lasttoken",
            "include_prompt": True,
        },
        "2_Normalize/config.json": {
            "module_input_name": "sentence_embedding",
            "module_output_name": "sentence_embedding",
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "__version__": {name: version(package) for name, package in _VERSIONS.items()},
            "prompts": prompts,
            "default_prompt_name": default,
            "similarity_fn_name": "cosine",
            "requirements": {
                "transformers": _TESTED if not plain else ">=5.2",
                "sentence-transformers": ">=6.2",
            },
        },
    }


# The releases of transformers that the model's own code is tested with, the pinned one and the newest.
_TESTED = ">=5.22,<6"
_VERSIONS = {"sentence_transformers": "sentence-transformers", "transformers": "transformers", "pytorch": "torch"}
