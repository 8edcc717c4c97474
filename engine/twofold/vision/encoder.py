"""A checkpoint's picture encoder, computed by transformers, and the places of its rows in a prompt.

The encoder is transformers' own class of the model with its text part cut to no layers, given the checkpoint's vision
tensors alone. transformers' processor scales pictures and names the tokens that stand for one.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold.api.errors import ConfigError, ModelLoadError
from twofold.api.media import MediaRows, MediaSpan, PromptMedia

if TYPE_CHECKING:
    from PIL.Image import Image

I32 = npt.NDArray[np.int32]

_TEXT_SIZES: Final = {"num_hidden_layers": 0, "vocab_size": 1, "layer_types": [], "mlp_layer_types": []}
"""Settings of a text part that has no weights but a norm."""


@dataclass(frozen=True, eq=False)
class PreparedPicture:
    """A picture as the encoder takes it."""

    inputs: Mapping[str, Any]
    """Tensors by the names of `get_image_features`' arguments."""
    text: str
    """What stands for the picture in a prompt instead of one mark."""
    digest: bytes
    """Of the tensors, hence of the picture and the processor's settings."""
    width: int
    height: int
    """Pixels, as given."""


class PictureEncoder:
    """Encodes pictures for one model. One call at a time."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """folder: the checkpoint's configuration, tokenizer and processor settings. tensors: its vision tensors.

        Raises:
            ConfigError: transformers, pillow or torchvision is missing.
            ModelLoadError: transformers does not know the class, or tensors are missing or left over.
        """
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise ConfigError(
                f"pictures need the extra `vision` ({error}); install it with pip install 'twofold[vision]'"
            ) from error
        self._model = _encoder(AutoConfig.from_pretrained(folder), tensors, folder)
        self._processor = _processor(folder)
        self.tokenizer = self._processor.tokenizer
        """The checkpoint's tokenizer, as transformers has it."""
        self._digest = _digest({name: tensors[name] for name in sorted(tensors)})
        self.mark: str = self._processor.image_token
        """Token that chat templates write for a picture."""
        self.row_tokens: tuple[int, ...] = tuple(self._processor.image_token_ids)
        """Tokens each of which stands for a row."""

    def prepared(self, picture: Image, settings: Mapping[str, Any] | None = None) -> PreparedPicture:
        """The picture, an RGB image, scaled as the processor's settings and the given ones say."""
        merged = self._processor._merge_kwargs(
            tokenizer_init_kwargs=self._processor.tokenizer.init_kwargs, return_tensors="pt", **(settings or {})
        )
        inputs, (text,) = self._processor._process_images([picture], **merged["images_kwargs"])
        unused = set(self._processor.unused_input_names)
        tensors = {name: value for name, value in inputs.items() if name not in unused}
        return PreparedPicture(tensors, text, _digest(tensors), *picture.size)

    @torch.inference_mode()
    def encoded(self, pictures: Sequence[PreparedPicture]) -> list[MediaRows]:
        """The rows of each picture, computed together where their sizes are the same for the processor."""
        found = []
        for picture in pictures:
            out = self._model.get_image_features(**_named(self._model, picture.inputs))
            deep = getattr(out, "deepstack_features", None)
            found.append(
                MediaRows(
                    _f32(out.pooler_output),
                    blake2b(self._digest + picture.digest, digest_size=32).digest(),
                    np.stack([_f32(each) for each in deep]) if deep else None,
                )
            )
        return found

    def placed(
        self, token_ids: Sequence[int], pictures: Sequence[PreparedPicture], rows: Sequence[MediaRows]
    ) -> PromptMedia:
        """Where the pictures' rows are in a prompt, whose marks were replaced by `PreparedPicture.text`.

        Raises:
            ValueError: the prompt has more or fewer tokens for rows than the pictures have rows.
        """
        ids = np.asarray(token_ids)
        places = np.flatnonzero(np.isin(ids, self.row_tokens))
        counts = [len(each.rows) for each in rows]
        if len(places) != sum(counts):
            raise ValueError(
                f"the prompt has {len(places)} tokens for rows of pictures; {sum(counts)} were expected for "
                f"{len(pictures)} pictures"
            )
        spans: list[MediaSpan] = []
        for media, own in zip(rows, np.split(places, np.cumsum(counts)[:-1]), strict=True):
            cuts = np.flatnonzero(np.diff(own) > 1) + 1
            for stretch in np.split(np.arange(len(own)), cuts):
                spans.append(MediaSpan(int(own[stretch[0]]), len(stretch), media, int(stretch[0])))
        return PromptMedia(tuple(spans), self._rotations(ids, places, pictures))

    def _rotations(self, ids: npt.NDArray[Any], places: npt.NDArray[Any], pictures: Sequence[PreparedPicture]) -> I32 | None:
        rope_index = getattr(self._model, "get_rope_index", None)
        if rope_index is None:
            return None
        kinds = np.zeros(len(ids), np.int64)
        kinds[places] = 1
        grids = torch.cat([picture.inputs["image_grid_thw"] for picture in pictures])
        positions, _ = rope_index(
            torch.from_numpy(ids.astype(np.int64))[None],
            mm_token_type_ids=torch.from_numpy(kinds)[None],
            image_grid_thw=grids,
        )
        return positions[:, 0].numpy().astype(np.int32)


def _processor(folder: Path) -> Any:
    """The checkpoint's processor without its parts for video and sound, which need further libraries.

    Raises:
        ModelLoadError: the processor's class is unknown to transformers.
    """
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    stated = [
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("processor_config.json", "preprocessor_config.json", "config.json")
        if (folder / name).is_file()
    ]
    names = [each["processor_class"] for each in stated if "processor_class" in each]
    names += [PROCESSOR_MAPPING_NAMES[kind] for each in stated if (kind := each.get("model_type")) in PROCESSOR_MAPPING_NAMES]
    kind = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    if kind is None:
        raise ModelLoadError(f"{folder}: transformers knows no processor of its pictures ({', '.join(names) or 'none named'})")

    class PicturesAlone(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            """Parts that are left out are None."""

    parts = {name: None for name in kind.get_attributes()}
    parts |= {"image_processor": AutoImageProcessor.from_pretrained(folder), "tokenizer": AutoTokenizer.from_pretrained(folder)}
    own = {name: value for each in stated[:1] for name, value in each.items() if name in inspect.signature(kind.__init__).parameters}
    return PicturesAlone(**(own | parts))


def _encoder(config: Any, tensors: Mapping[str, Tensor], folder: Path) -> Any:
    from transformers import AutoModel

    text = config.get_text_config()
    for name, value in _TEXT_SIZES.items():
        if hasattr(text, name):
            setattr(text, name, value)
    if getattr(text, "pad_token_id", None) is not None:
        text.pad_token_id = 0
    try:
        kind = AutoModel._model_mapping[type(config)]
    except KeyError:
        raise ModelLoadError(
            f"{folder}: transformers has no model of {type(config).__name__}, so its pictures cannot be encoded"
        ) from None
    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its text tensors are missing on purpose
    try:
        model, report = kind.from_pretrained(
            None, config=config, state_dict=dict(tensors), output_loading_info=True, attn_implementation="sdpa"
        )
    finally:
        logging.getLogger("transformers").setLevel(level)
    missing = [name for name in report["missing_keys"] if "language_model" not in name]
    if missing or report["unexpected_keys"]:
        raise ModelLoadError(
            f"{folder}: the vision tensors lack {sorted(missing)[:3]} and have {sorted(report['unexpected_keys'])[:3]} "
            "beyond those that transformers' class has; download the model again"
        )
    return model.eval()


def _named(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that `get_image_features` takes."""
    names = inspect.signature(model.get_image_features).parameters
    return {name: value for name, value in inputs.items() if name in names}


def _f32(rows: Tensor | Sequence[Tensor]) -> npt.NDArray[np.float32]:
    """[n, hidden] of one picture's rows, which may come in parts or tiles."""
    whole = rows if isinstance(rows, Tensor) else torch.cat(list(rows))
    return np.ascontiguousarray(whole.reshape(-1, whole.shape[-1]).float().numpy())


def _digest(tensors: Mapping[str, Any]) -> bytes:
    digest = blake2b(digest_size=32)
    for name, value in tensors.items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value.contiguous().view(torch.uint8) if isinstance(value, Tensor) else value).tobytes())
    return digest.digest()
