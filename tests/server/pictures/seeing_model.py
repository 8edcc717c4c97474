"""A served tiny model that reads pictures, and transformers' answers of the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from twofold.engine import Engine
from twofold.vision.processor import picture_processor

NUM_TOKENS: Final = 12
TEMPLATE: Final = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@dataclass(frozen=True)
class Seeing:
    """A served model that reads pictures."""

    url: str
    engine: Engine
    folder: Path
    whole: Any
    """transformers' model."""

    def expected(
        self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Image.Image]
    ) -> tuple[str, int]:
        """transformers' greedy answer, and the prompt's length in tokens. Contents are lists of parts."""
        processor = picture_processor(self.folder)
        text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = processor(text=[text], images=list(pictures), return_tensors="pt")
        with torch.inference_mode():
            ids = self.whole.generate(
                **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )
        length = inputs["input_ids"].shape[1]
        return processor.tokenizer.decode(ids[0, length:], skip_special_tokens=True), length
