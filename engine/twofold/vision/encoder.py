"""A checkpoint's picture encoder, computed by transformers, and the places of its rows in a prompt.

The encoder is transformers' own class of the model with its text part cut to no layers, given the checkpoint's vision
tensors alone. transformers' processor scales pictures and names the tokens that stand for one.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold.api.errors import ConfigError, ModelLoadError
from twofold.api.media import MediaRows
from twofold.vision.encoded import EncodedPicture, PictureTokens, PlacedPrompt, place_pictures
from twofold.vision.processor import picture_processor

if TYPE_CHECKING:
    from PIL.Image import Image

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_TOGETHER_ON_CPU: Final = 400_000
"""Numbers that pictures worth encoding together have at most: 256 × 256 pixels of Qwen3-VL.

On two cores, eight pictures of 64² take 63 ms each together and 177 alone; of 128² 207 and 325; of 256² 865 and 890.
"""
_TOGETHER_ON_GPU: Final = 20 * _TOGETHER_ON_CPU
"""The same where more rows fill the device. Not measured: no GPU has run it."""
_TEXT_SIZES: Final = {"num_hidden_layers": 0, "vocab_size": 1, "layer_types": [], "mlp_layer_types": []}
"""Settings of a text part whose only weight is a norm."""


@dataclass(frozen=True, eq=False)
class PreparedPicture:
    """A picture as the encoder takes it."""

    inputs: Mapping[str, Any]
    """Tensors by the names that transformers' class has for them."""
    text: str
    """Stands for the picture in a prompt, in place of the mark that the chat template writes."""
    digest: bytes
    """Digest of the inputs: equal pictures under equal settings have the same."""

    @property
    def num_values(self) -> int:
        """Numbers that the encoder reads of it."""
        return sum(value.numel() for value in self.inputs.values() if isinstance(value, Tensor))

    @property
    def grid(self) -> tuple[int, ...] | None:
        """Patches (time, height, width) from which rotary positions follow; None: the positions are those of text."""
        grids = self.inputs.get("image_grid_thw")
        return None if grids is None else tuple(grids[0].tolist())


class PictureEncoder:
    """Encodes pictures for one model. One call at a time."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], device: str = "cpu") -> None:
        """Load the encoder. It computes in float32 on the CPU, and in bfloat16 on a GPU.

        Args:
            folder: the checkpoint's configuration, tokenizer and processor settings.
            tensors: its vision tensors by their names in the checkpoint.

        Raises:
            ConfigError: transformers or pillow is not installed.
            ModelLoadError: transformers does not know the model, or tensors are missing or left over.
        """
        try:
            import PIL.Image  # noqa: F401
            import transformers  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"pictures need the extra `vision` ({error}); install it with pip install 'twofold[vision]'"
            ) from error
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._model = _encoder(folder, tensors, dtype).to(device)
        self._taken = inspect.signature(self._model.get_image_features).parameters
        self._processor = picture_processor(folder)
        self.tokenizer = self._processor.tokenizer
        """The checkpoint's tokenizer, as transformers has it."""
        self._digest = _digest({name: tensors[name] for name in sorted(tensors)})
        self.tokens = PictureTokens((self._model.config.image_token_id,), _routed_tokens(self._processor))
        self.mark: str = self._processor.image_token
        """Stands for a picture in what the chat template writes."""
        self.hidden_size: int = self._model.config.get_text_config().hidden_size
        self.values_together = _TOGETHER_ON_CPU if device == "cpu" else _TOGETHER_ON_GPU
        """Numbers that pictures worth encoding together have at most."""
        self.rotates = hasattr(self._model, "get_rope_index")
        """Whether tokens of pictures have rotary positions of their own."""

    def prepared(self, picture: Image, settings: Mapping[str, Any] | None = None) -> PreparedPicture:
        """An RGB image, scaled as the processor's settings and the given ones say."""
        merged = self._processor._merge_kwargs(
            tokenizer_init_kwargs=self.tokenizer.init_kwargs, return_tensors="pt", **(settings or {})
        )
        inputs, (text,) = self._processor._process_images([picture], **merged["images_kwargs"])
        unused = self._processor.unused_input_names
        taken = {name: value for name, value in inputs.items() if name not in unused}
        return PreparedPicture(taken, text, _digest(inputs))

    def pictures(self, pictures: Sequence[PreparedPicture]) -> list[EncodedPicture]:
        """Their rows, and what stands for them in a prompt. Neighbours are encoded together if their inputs join."""
        groups = groupby(pictures, self._joins)
        return [made for _, group in groups for made in self._together(list(group))]

    def _joins(self, picture: PreparedPicture) -> object:
        """Equal for pictures whose inputs can be joined."""
        inputs = self._inputs(picture)
        if not all(isinstance(value, Tensor) for value in inputs.values()):
            return id(picture)
        return [(name, value.shape[1:]) for name, value in inputs.items()]

    def _together(self, pictures: Sequence[PreparedPicture]) -> Iterator[EncodedPicture]:
        given = [self._inputs(picture) for picture in pictures]
        inputs = (
            given[0]
            if len(given) == 1
            else {name: torch.cat([of[name] for of in given]) for name in given[0]}
        )
        rows, deep = self._rows(inputs)
        begin = 0
        for picture in pictures:
            text, runs = self.collapsed(picture.text)
            own = slice(begin, begin := begin + sum(runs))
            digest = blake2b(self._digest + picture.digest, digest_size=32).digest()
            media = MediaRows(rows[own], digest, deep=None if deep is None else deep[:, own])
            yield EncodedPicture(text, tuple(runs), media, picture.grid)
        assert begin == len(rows)

    def _inputs(self, picture: PreparedPicture) -> dict[str, Any]:
        return {name: value for name, value in picture.inputs.items() if name in self._taken}

    @torch.inference_mode()
    def _rows(self, inputs: Mapping[str, Any]) -> tuple[F32, F32 | None]:
        """[n, hidden] of all pictures, and [layers, n, hidden] of the rows for early layers."""
        out = self._model.get_image_features(
            **{name: self._as_computed(value) for name, value in inputs.items()}
        )
        rows = getattr(out, "pooler_output", None)
        if rows is None:  # the class projects in its forward
            rows = self._model.multi_modal_projector(out.last_hidden_state)
        deep = getattr(out, "deepstack_features", None)
        return _joined(rows), np.stack([_joined(rows) for rows in deep]) if deep else None

    def _as_computed(self, value: Any) -> Any:
        """An input as the encoder computes: some processors round pictures to bf16."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self._model.device, self._model.dtype if value.is_floating_point() else None)

    def placed(self, token_ids: Sequence[int], pictures: Sequence[EncodedPicture]) -> PlacedPrompt:
        """The prompt with the pictures' rows. Raises ValueError as `place_pictures`."""
        return place_pictures(token_ids, pictures, self.tokens, self.rotations if self.rotates else None)

    def collapsed(self, text: str) -> tuple[str, list[int]]:
        """A picture's text with one token for each run of equal tokens that stand for rows, and the runs' lengths."""
        names = map(re.escape, self.tokenizer.convert_ids_to_tokens(self.tokens.rows))
        runs: list[int] = []

        def one(run: re.Match[str]) -> str:
            runs.append(len(run[0]) // len(run[1]))
            return run[1]

        return re.sub(rf"({'|'.join(names)})\1*", one, text), runs

    def rotations(self, token_ids: I64, grids: Sequence[Sequence[int] | None]) -> I32:
        """Rotary positions [axes, tokens] of a prompt with a token per row, where the family `rotates`.

        grids: patches (time, height, width) of each picture.
        """
        kinds = np.isin(token_ids, self.tokens.rows).astype(np.int64)
        positions, _ = self._model.get_rope_index(
            torch.from_numpy(token_ids)[None],
            mm_token_type_ids=torch.from_numpy(kinds)[None],
            image_grid_thw=torch.tensor(grids),
        )
        return np.asarray(positions[:, 0].numpy(), np.int32)


def vision_class(folder: Path) -> tuple[Any, Any]:
    """transformers' configuration of a model without its text, and its class with that configuration.

    Raises:
        ModelLoadError: transformers has no such model.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    for name, value in _TEXT_SIZES.items():
        if hasattr(text, name):
            setattr(text, name, value)
    if getattr(text, "pad_token_id", None) is not None:
        text.pad_token_id = 0
    kinds: Any = transformers.AutoModel
    try:
        return config, kinds._model_mapping[type(config)]
    except KeyError:
        raise ModelLoadError(
            f"{folder}: transformers has no model for {type(config).__name__}, so its pictures cannot be encoded"
        ) from None


def _routed_tokens(processor: Any) -> tuple[int, ...]:
    kinds_of = getattr(processor, "create_moe_mm_token_type_ids", None)
    if kinds_of is None:
        return ()
    return tuple(np.flatnonzero(kinds_of(np.arange(len(processor.tokenizer)))).tolist())


def _encoder(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """transformers' model with these tensors and no text."""
    config, kind = vision_class(folder)
    with _without_warnings():  # the text's tensors are missing on purpose
        model, report = kind.from_pretrained(
            None, config=config, state_dict=dict(tensors), output_loading_info=True, dtype=dtype
        )
    missing = sorted(name for name in report["missing_keys"] if "language_model" not in name)
    further = sorted(report["unexpected_keys"])
    if missing or further:
        raise ModelLoadError(
            f"{folder}: the vision tensors are not those of transformers' {kind.__name__}: missing {missing[:3]}, "
            f"unknown {further[:3]}; download the model again"
        )
    return model.eval()


@contextmanager
def _without_warnings() -> Iterator[None]:
    from transformers.utils import logging as of_transformers

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    of_transformers.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logger.setLevel(level)


def _joined(rows: Tensor | Sequence[Tensor]) -> F32:
    """[n, hidden] of a picture's rows, which may come in parts or tiles."""
    whole = rows if isinstance(rows, Tensor) else torch.cat(list(rows))
    return np.ascontiguousarray(whole.reshape(-1, whole.shape[-1]).float().cpu().numpy())


def _digest(tensors: Mapping[str, Any]) -> bytes:
    digest = blake2b(digest_size=32)
    for name, value in tensors.items():
        digest.update(f"{name} {getattr(value, 'shape', '')} {getattr(value, 'dtype', '')} ".encode())
        if isinstance(value, Tensor):
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(repr(value).encode())
    return digest.digest()
