"""Files without their model's indexer: the context ends where it would choose, and every place says why."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.errors import ConfigError, RequestError
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.tools.cli.main import main
from twofold.tools.cli.serve.greeting import Server, greeting

from tests.engine.model_runs import random_prompt
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model

WHY = "the context ends at 40 positions: beyond index_topk"


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_context_of_a_file_without_its_indexer_ends_at_index_topk_with_a_line(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", EXAMPLES[family].changed(index_topk=40, index_n_heads=0))
    assert main(["doctor", str(path)]) == 0
    assert WHY in capsys.readouterr().out
    with caplog.at_level(logging.WARNING, logger="twofold"):
        engine = Engine.load(EngineConfig(model=str(path), accelerator="none", cpu_threads=1))
    assert WHY in caplog.text
    shown = greeting(engine.info, "m", Server("http://x", ServerConfig(), None), engine.config)
    assert WHY in shown
    assert engine.max_context == 40
    tokens: list[int] = []
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.generate(random_prompt(30), sampling, lambda chunk: tokens.extend(chunk.token_ids))
    assert len(tokens) == 10
    with pytest.raises(RequestError, match=WHY):
        engine.generate(random_prompt(40), sampling, lambda chunk: None)
    engine.close()


def test_a_longer_context_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, EXAMPLES["deepseek_v32"].changed(index_topk=40, index_n_heads=0))
    with pytest.raises(ConfigError, match="the model's context ends at 40"):
        Engine.load(EngineConfig(model=str(path), accelerator="none", cpu_threads=1, max_model_len=41))
