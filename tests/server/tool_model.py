"""The bundled model, which has never seen a tool, with a template that shows tools and opens or closes its thinking."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from twofold.api.config import EngineConfig
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path

TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{%- endfor %}"
    "{{- '<|im_start|>assistant\n' }}{%- if thinks %}{{- '<think>\n' }}{%- endif %}"
    "{%- if closed %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- set _ = enable_thinking %}"
)
QUESTION: list[Any] = [{"role": "user", "content": "a king"}]
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
KIND = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "age", "parameters": AGE}},
    {"type": "function", "function": {"name": "kind", "parameters": KIND}},
]
WARM = {"temperature": 1.0, "max_tokens": 120}


def started(directory: Path) -> Engine:
    """An engine of the model, which is written to `directory`."""
    model = directory / "bundled"
    shutil.copytree(bundled_model_path(), model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    made = Engine.load(EngineConfig(model=str(model), accelerator="none", cpu_threads=2))
    made.start()
    return made
