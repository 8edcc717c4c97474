"""Which dialects a model speaks, told from its chat template; and how templates take calls, told by rendering one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from twofold.api.errors import ConfigError
from twofold.models.registry import FAMILIES, chat_marks
from twofold.server.openai.messages import Message, turns_of
from twofold.text.chat.answer_parser import AnswerParser
from twofold.text.chat.dialects import REASONING_PARSERS, TOOL_PARSERS
from twofold.text.chat.marks import ChatMarks, chosen_marks
from twofold.text.conversation.arranging import arranged
from twofold.text.tokenizer import ChatTemplate, Tokenizer, ToolForm

from tests.tiny_models.writing import write_tiny_tokenizer

THINK = "<think>{{ m.reasoning_content }}</think>"
HERMES = '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
XML = "<tool_call>\\n<function=example>\\n<parameter=one>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>"
GLM = "<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n<arg_value>"

SEED = (
    "<seed:think>{{ t }}</seed:think><seed:tool_call>\\n<function=example>\\n<parameter=one>value</parameter>"
)
HUNYUAN = (
    '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls><think>{{ t }}</think><answer>{{ m }}</answer>'
)
HY = "<think:opensource>{{ t }}</think:opensource><tool_call:opensource>{{ f }}<tool_sep:opensource>"
SOLAR = (
    "<|think|>{{ t }}<|end|><|begin|>assistant<|content|>{{ m }}<|tool_call:begin|>{{ id }}<|tool_call:name|>"
)

# What templates of published models say, in as many words as tell them apart.
TEMPLATES: list[tuple[str, str, str | None, str | None]] = [
    ("Qwen3MoeForCausalLM", HERMES + THINK, "hermes", "qwen3"),
    ("Qwen3MoeForCausalLM", HERMES, "hermes", None),
    ("Qwen3MoeForCausalLM", XML, "qwen3_coder", None),
    ("Qwen3NextForCausalLM", HERMES + THINK, "hermes", "qwen3"),
    ("Qwen3_5MoeForCausalLM", XML + THINK, "qwen3_coder", "qwen3"),
    ("Qwen3_5ForCausalLM", XML + THINK, "qwen3_coder", "qwen3"),
    ("Qwen4ExpForConditionalGeneration", XML + THINK, "qwen3_coder", "qwen3"),
    ("Qwen2MoeForCausalLM", "<|im_start|>{{ m.role }}", None, None),
    ("MixtralForCausalLM", "[INST] {{ m.content }} [/INST]", None, None),
    ("MixtralForCausalLM", "[TOOL_CALLS] [{{ calls }}]", "mistral", None),
    ("Glm4MoeForCausalLM", GLM + THINK, "glm45", "glm45"),
    ("Glm4MoeForCausalLM", GLM.replace("\n", "") + THINK, "glm47", "glm45"),
    ("Glm4MoeLiteForCausalLM", GLM.replace("\n", "") + THINK, "glm47", "glm45"),
    ("MiniMaxM2ForCausalLM", '<minimax:tool_call><invoke name="f">' + THINK, "minimax_m2", "minimax_m2"),
    (
        "MiniMaxM3SparseForConditionalGeneration",
        '<minimax:tool_call><invoke name="f">' + THINK,
        "minimax_m2",
        "minimax_m2",
    ),
    ("Ernie4_5_MoeForCausalLM", HERMES + THINK, "hermes", "ernie45"),
    ("GraniteMoeForCausalLM", "respond only with <|tool_call|> followed by a list", "granite", None),
    ("GptOssForCausalLM", "<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    ("Lfm2MoeForCausalLM", "List of tools: <|tool_list_start|>[", "lfm2", None),
    ("Llama4ForCausalLM", '{"name": "f", "parameters": {{ a | tojson }}}', "llama4_json", None),
    ("Llama4ForCausalLM", "[func_name1(params_name1=params_value1)]", "llama4_pythonic", None),
    ("DeepseekV3ForCausalLM", "function<｜tool▁sep｜>f\\n```json" + THINK, "deepseek_v3", "deepseek_r1"),
    ("DeepseekV3ForCausalLM", "f<｜tool▁sep｜>{}" + THINK, "deepseek_v31", "deepseek_r1"),
    ("DeepseekV3ForCausalLM", "<|tool_call_argument_begin|>", "kimi_k2", None),
    ("DeepseekV2ForCausalLM", GLM.replace("\n", "") + THINK, "glm47", "deepseek_r1"),
    ("KimiK25ForConditionalGeneration", "<|tool_call_argument_begin|>" + THINK, "kimi_k2", "kimi_k2"),
    ("Gemma4ForCausalLM", "<|tool_call>call:{{ f }}<|channel>thought\\n", "gemma4", "gemma4"),
    ("Dots1ForCausalLM", "<|response|>{{ m.content }}<|endofresponse|>", None, None),
    ("SolarOpenForCausalLM", SOLAR, "solar_open", "solar_open"),
    ("SolarOpenForCausalLM", THINK, None, "deepseek_r1"),
    ("HYV3ForCausalLM", HY, "hy_v3", "hy_v3"),
    ("HYV4ForCausalLM", HY, "hy_v3", "hy_v3"),
    ("HYV3ForCausalLM", HY.replace(":opensource", ""), "hy_v3_preview", "hy_v3_preview"),
    ("HYV3ForCausalLM", THINK, None, "hy_v3_preview"),
    ("MellumForCausalLM", HERMES + THINK, "hermes", "qwen3"),
    ("Qwen3VLMoeForConditionalGeneration", HERMES + THINK, "hermes", "qwen3"),
    ("Qwen3VLForConditionalGeneration", HERMES + THINK, "hermes", "qwen3"),
    ("Glm4vMoeForConditionalGeneration", GLM + THINK, "glm45", "glm45"),
    ("ExaoneMoeForCausalLM", HERMES + THINK, "hermes", "deepseek_r1"),
    ("FlintForCausalLM", XML + THINK, "qwen3_coder", "qwen3"),
    ("LlamaForCausalLM", '{"name": "f", "parameters": {{ a | tojson }}}', "llama4_json", None),
    ("MistralForCausalLM", "[TOOL_CALLS] [{{ calls }}]", "mistral", None),
    ("Qwen2ForCausalLM", HERMES, "hermes", None),
    ("Qwen3ForCausalLM", HERMES + THINK, "hermes", "qwen3"),
    ("SeedOssForCausalLM", SEED, "seed_oss", "seed_oss"),
    ("DeepseekV32ForCausalLM", "f<｜tool▁sep｜>{}" + THINK, "deepseek_v31", "deepseek_r1"),
    ("GlmMoeDsaForCausalLM", GLM.replace("\n", "") + THINK, "glm47", "glm45"),
    ("AXK1ForCausalLM", HERMES + THINK, "hermes", "deepseek_r1"),
    ("AXK2ForCausalLM", HERMES + THINK, "hermes", "deepseek_r1"),
    (
        "MistralLarge4ForConditionalGeneration",
        "[TOOL_CALLS]{{ f }}[ARGS]{{ a }}[THINK]{{ t }}[/THINK]",
        "mistral",
        "mistral",
    ),
    ("GraniteMoeSWAForCausalLM", "respond only with <|tool_call|> followed by a list", "granite", None),
    ("HunYuanMoEV1ForCausalLM", HUNYUAN, "hunyuan_a13b", "hunyuan_a13b"),
    ("Ernie4_5_VLMoeForConditionalGeneration", HERMES + THINK, "hermes", "ernie45"),
    ("HunYuanDenseV1ForCausalLM", HUNYUAN, "hunyuan_a13b", "hunyuan_a13b"),
    ("MiMoV2FlashForCausalLM", XML + THINK, "qwen3_coder", "qwen3"),
    ("AfmoeForCausalLM", XML + THINK, "qwen3_coder", "deepseek_r1"),
    ("AfmoeForCausalLM", HERMES, "hermes", None),
    ("LagunaForCausalLM", GLM + THINK, "glm45", "deepseek_r1"),
    ("LagunaForCausalLM", GLM.replace("\n", "") + THINK, "glm47", "deepseek_r1"),
    ("Step3p7ForConditionalGeneration", XML + THINK, "qwen3_coder", "deepseek_r1"),
    ("Mistral4ForCausalLM", "[TOOL_CALLS]{{ f }}[ARGS]{{ a }}[THINK]{{ t }}[/THINK]", "mistral", "mistral"),
    ("Qwen3OmniMoeForConditionalGeneration", HERMES + THINK, "hermes", "qwen3"),
    ("OlmoeForCausalLM", HERMES + THINK, None, None),
    ("NobodysForCausalLM", HERMES + THINK, None, None),
]

# As OpenAI describes the format: instructions in the developer's message, thinking only beside a call that is not
# answered yet, one call a message, arguments as JSON, results as JSON strings.
HARMONY = """<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>
{%- set ns = namespace(name="", answered=false) %}
{%- set first = messages[0] if messages[0].role in ["system", "developer"] else none %}
{%- if first or tools %}<|start|>developer<|message|>{{ "# Instructions\n\n" ~ first.content if first }}
    {%- for tool in tools or [] %}{{ "\ntype " ~ tool.function.name ~ " = () => any;" }}{% endfor %}<|end|>{% endif %}
{%- for message in (messages[1:] if first else messages) %}
    {%- if message.role == "assistant" and "tool_calls" in message %}
        {%- if "thinking" in message %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- set ns.name = call.name %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json
        {{- "<|message|>" ~ call.arguments | tojson ~ "<|call|>" }}
    {%- elif message.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
    {%- elif message.role == "tool" %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>
        {{- message.content | tojson }}<|end|>
    {%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


@pytest.mark.parametrize(("architecture", "template", "tool", "thinking"), TEMPLATES)
def test_a_template_determines_its_dialects(
    architecture: str, template: str, tool: str | None, thinking: str | None
) -> None:
    marks = chat_marks(architecture, template)
    assert (marks.tool_call_parser, marks.reasoning_parser) == (tool, thinking)
    assert chat_marks(architecture, None).tool_call_parser is None


def test_every_family_names_parsers_that_there_are() -> None:
    for family in FAMILIES:
        assert set(family.chat.tools) <= TOOL_PARSERS.keys(), family.module
        assert set(family.chat.reasoning) <= REASONING_PARSERS.keys(), family.module
    tried = {architecture for architecture, *_ in TEMPLATES}
    speaking = [family for family in FAMILIES if family.chat.tools or family.chat.reasoning]
    assert [family.module for family in speaking if not tried & set(family.classes)] == []


def test_a_users_choice_takes_precedence() -> None:
    shown = ChatMarks("hermes", "qwen3", ("<|im_end|>",))
    assert chosen_marks(shown, None, None) == shown
    assert chosen_marks(shown, "none", "glm45") == ChatMarks(None, "glm45", ("<|im_end|>",))
    assert chosen_marks(shown, "qwen3_xml", "mimo") == ChatMarks("qwen3_coder", "qwen3", ("<|im_end|>",))
    with pytest.raises(ConfigError, match="--reasoning-parser is 'qwen', expected none or one of qwen3, "):
        chosen_marks(shown, None, "qwen")


@pytest.mark.parametrize(
    ("architecture", "template", "name"),
    [
        ("LagunaForCausalLM", GLM + THINK, "poolside_v1"),
        ("LagunaForCausalLM", GLM.replace("\n", "") + THINK, "poolside_v1"),
        ("HYV3ForCausalLM", HY, "hy_v3"),
        ("HYV3ForCausalLM", HY.replace(":opensource", ""), "hy_v3"),
        ("SolarOpenForCausalLM", SOLAR, "solar_open"),
        ("Step3p7ForConditionalGeneration", XML + THINK, "step3p5"),
        ("MiMoV2FlashForCausalLM", XML + THINK, "mimo"),
    ],
)
def test_a_name_of_vllm_chooses_the_dialect_that_the_template_shows(
    architecture: str, template: str, name: str
) -> None:
    shown = chat_marks(architecture, template)
    assert chosen_marks(shown, name, name) == shown
    assert chosen_marks(ChatMarks(), name, None).tool_call_parser in TOOL_PARSERS
    assert chosen_marks(ChatMarks(), None, name).reasoning_parser in REASONING_PARSERS


@pytest.mark.parametrize(
    ("prompt", "continued", "opened"),
    [
        ("<|assistant|><think>\n", "", True),
        ("<|assistant|><think>\n\n</think>\n\n", "", False),
        ("what is <think>?<|assistant|>", "", False),
        ("<|assistant|><think>it may", "<think>it may", True),
        ("<|assistant|><think>it may</think>be", "<think>it may</think>be", False),
    ],
)
def test_a_prompt_reports_open_thinking(prompt: str, continued: str, opened: bool) -> None:
    assert ChatMarks(reasoning_parser="qwen3").opened_by(prompt, continued) is opened
    assert not ChatMarks().opened_by(prompt, continued)


def calls(arguments: str) -> str:
    """The part of a template that shows all calls of message m."""
    return "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}" + arguments + "</call>{% endfor %}"


CONTENT = "{{ m.content }}"
OBJECT, TEXT = "{{ c.function.arguments | tojson }}", '{{ "" + c.function.arguments }}'
SHORT_IDS = "{{ raise_exception('nine') if c.id | length != 9 }}{{ c.id }}"
ITEMS = "{% for k, v in c.function.arguments | items %}{{ k ~ v }}{% endfor %}"


@pytest.mark.parametrize(
    ("turn", "form"),
    [
        (CONTENT + calls(OBJECT), ToolForm(False, False, True, shows_ids=False)),
        (CONTENT + calls(ITEMS), ToolForm(False, False, True, shows_ids=False)),
        (CONTENT + calls("{{ c.id }}" + OBJECT), ToolForm(False, False, True)),
        (CONTENT + calls(SHORT_IDS + OBJECT), ToolForm(False, False, True, short_ids=True)),
        (CONTENT + calls(TEXT), ToolForm(True, False, True, shows_ids=False)),
        # Shows an object as Python does.
        (CONTENT + calls("{{ c.function.arguments }}"), ToolForm(True, False, True, shows_ids=False)),
        (
            "{% if m.content is none %}" + calls(TEXT) + "{% else %}" + CONTENT + "{% endif %}",
            ToolForm(True, True, True, shows_ids=False),
        ),
        (
            CONTENT + "{{ m.tool_calls[0].function | tojson if m.tool_calls }}",
            ToolForm(False, False, False, shows_ids=False),
        ),
        (CONTENT, None),
        (CONTENT + "{{ raise_exception('no') if m.role == 'tool' }}", None),
        ("{{ m.content if m.role != 'tool' }}" + calls(OBJECT), None),
    ],
)
def test_a_template_determines_its_form_of_calls(turn: str, form: ToolForm | None) -> None:
    source = "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>" + turn + "{% endfor %}"
    assert ChatTemplate(source, where="here", special_tokens={}).tool_form == form


def test_harmony_is_written_and_read(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=HARMONY + "{# message.thinking #}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.tool_form == ToolForm(
        arguments_as_text=False, null_content=False, several=False, shows_ids=False
    )
    arguments = '{"city": "Brig", "days": 2}'
    call = {"id": "c", "type": "function", "function": {"name": "warmth", "arguments": arguments}}
    turns: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "20"},
    ]
    tools = [{"type": "function", "function": {"name": "warmth", "description": "w", "parameters": {}}}]

    def rendered(num_turns: int) -> str:
        messages = [Message.model_validate(turn) for turn in turns[:num_turns]]
        return str(
            tokenizer.apply_chat_template(arranged(turns_of(messages, tokenizer), tokenizer), tools=tools)
        )

    question, requested_again = rendered(2), rendered(4)
    assert question == (
        "<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|><|start|>developer<|message|>"
        "# Instructions\n\nBe brief.\ntype warmth = () => any;<|end|><|start|>user<|message|>How warm?<|end|>"
        "<|start|>assistant"
    )
    answer = requested_again.removeprefix(question).partition("<|call|>")[0] + "<|call|>"
    assert answer == (
        f"<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=functions.warmth<|channel|>commentary json"
        f"<|message|>{arguments}<|call|>"
    )
    assert requested_again.endswith(
        '<|start|>functions.warmth to=assistant<|channel|>commentary<|message|>"20"<|end|><|start|>assistant'
    )
    marks = chat_marks("GptOssForCausalLM", tokenizer.chat_template)
    parser = AnswerParser(marks.tool_call_parser, marks.reasoning_parser, tools)
    events = [
        (event.kind, event.text) for event in parser.push(answer) + parser.finish() if event.kind != "skipped"
    ]
    assert events == [
        ("reasoning", "I look."),
        ("call", "warmth"),
        ("arguments", arguments),
        ("call_end", ""),
    ]
