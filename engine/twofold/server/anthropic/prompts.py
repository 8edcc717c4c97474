"""Converts Anthropic's conversations, tools and tool choices to chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from twofold.server.anthropic.schemas import Block, CountTokensRequest, OfferedTool, ToolChoice, Turn
from twofold.server.bridge.models.protocol import ServingTokenizer
from twofold.server.http.errors import ApiError, wrong_field
from twofold.server.openai.template_variables import thinking_variables
from twofold.text.conversation.content import joined_content, with_pictures

ATTRIBUTION: Final = "x-anthropic-billing-header:"
"""Start of the billing block in Claude Code's system prompt. It differs from request to request and would prevent
shared prefixes."""

_SCHEMAS_ELSEWHERE: Final = ("bash_", "text_editor_", "computer_", "memory_", "browser_")
"""Type prefixes of client-run tools whose schemas only Anthropic's models know."""
_EFFORTS: Final = {"xhigh": "high", "max": "high"}


def chat_fields(body: CountTokensRequest, tokenizer: ServingTokenizer) -> dict[str, Any]:
    """Fields of a chat request with the same prompt. ApiError 400 for content that it cannot represent."""
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*_system(body), *_messages(body.messages)],
        "tools": _tools(body.tools, body.tool_choice),
        # Clients that did not ask for thinking take the first block for the answer.
        "include_reasoning": bool(thinks and body.thinking and body.thinking.display != "omitted"),
        "chat_template_kwargs": thinking_variables(tokenizer, thinks),
        "thinking_token_budget": body.thinking.budget_tokens if thinks and body.thinking else None,
    }
    if body.tool_choice is not None and fields["tools"]:
        fields["tool_choice"] = _choice(body.tool_choice)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    output = body.output_config
    if output is not None and output.effort and "reasoning_effort" in tokenizer.template_variables:
        fields["reasoning_effort"] = _EFFORTS.get(output.effort, output.effort)
    form = output.format if output is not None and output.format is not None else body.output_format
    if form is not None:
        schema = {"name": "output_config.format", "schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    last = body.messages[-1]
    calls = isinstance(last.content, list) and any(block.type == "tool_use" for block in last.content)
    # After calls without results a new answer begins.
    fields["continue_final_message"] = last.role == "assistant" and not calls
    return fields


def _system(body: CountTokensRequest) -> list[dict[str, Any]]:
    blocks = body.system
    if isinstance(blocks, list):
        blocks = [block for block in blocks if not (block.text or "").startswith(ATTRIBUTION)]
    text = _read(blocks)
    return [{"role": "system", "content": text}] if text else []


def _messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """One message per tool result; consecutive turns of one role are merged, as in Anthropic's API."""
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        made = [_assistant(turn, number)] if turn.role == "assistant" else list(_other_messages(turn, number))
        for message in made:
            last = messages[-1] if messages else {}
            if message["role"] == last.get("role") == "user":
                last["content"] = joined_content(last["content"], "\n", message["content"])
            else:
                messages.append(message)
    return messages


def _assistant(turn: Turn, number: int) -> dict[str, Any]:
    if not isinstance(turn.content, list):
        return {"role": "assistant", "content": turn.content or ""}
    for place, block in enumerate(turn.content):
        if block.type == "tool_result":
            raise _misplaced(number, place, block.type, "user")
    # The pieces of one answer are joined without a separator, to replay it unchanged.
    return {"role": "assistant", "content": _plain(turn.content)}


def _other_messages(turn: Turn, number: int) -> Iterator[dict[str, Any]]:
    blocks: Sequence[Block | str] = turn.content if isinstance(turn.content, list) else [turn.content or ""]
    if not blocks:
        yield {"role": turn.role, "content": ""}
    for place, block in enumerate(blocks):
        if isinstance(block, Block) and block.type == "tool_result" and turn.role == "user":
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        elif isinstance(block, Block) and block.type in ("tool_use", "tool_result"):
            raise _misplaced(number, place, block.type, "assistant" if turn.role == "user" else "user")
        else:
            yield {"role": turn.role, "content": _read([block])}


def _result(block: Block) -> Any:
    content = with_pictures(block.content, "\n")
    begin = content[0] if isinstance(content, list) else content
    # Templates have no other field for it.
    if block.is_error and not str(begin).lower().startswith("error"):
        return joined_content("Error: ", "", content)
    return content


def _read(content: Sequence[Block | str] | str | None) -> Any:
    """Blocks as text and pictures, one a line."""
    return with_pictures(content if content is None or isinstance(content, str) else _plain(content), "\n")


def _plain(blocks: Sequence[Block | str]) -> list[Any]:
    """The blocks as they were sent."""
    return [block if isinstance(block, str) else block.model_dump(exclude_unset=True) for block in blocks]


def _misplaced(number: int, place: int, kind: str, role: str) -> ApiError:
    where = f"messages[{number}].content[{place}]"
    return wrong_field(where, f"a block of type {kind!r} belongs into a message of the role {role!r}")


def _tools(tools: Sequence[OfferedTool] | None, choice: ToolChoice | None) -> list[dict[str, Any]] | None:
    """The tools that the caller runs. Tools that Anthropic's servers run are dropped if others remain, because this
    server cannot run them; alone they are refused."""
    offered: list[dict[str, Any]] = []
    left_out: list[OfferedTool] = []
    for number, tool in enumerate(tools or ()):
        where = f"tools[{number}]"
        if tool.type not in (None, "custom"):
            if tool.type.startswith(_SCHEMAS_ELSEWHERE):
                raise wrong_field(
                    where,
                    f"the model does not know the schema of {tool.type!r}; offer it as a tool with name, description "
                    "and input_schema",
                )
            left_out.append(tool)
            continue
        if tool.name is None or tool.input_schema is None:
            raise wrong_field(where, "needs a name and an input_schema, a JSON schema")
        function: dict[str, Any] = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict or None,
        }
        reply = {name: value for name, value in function.items() if value is not None}
        offered.append({"type": "function", "function": reply})
    forced = choice is not None and choice.type == "tool" and choice.name in {tool.name for tool in left_out}
    if left_out and (forced or not offered):
        problem = f"only Anthropic's servers run {left_out[0].type!r}; offer a tool of your own instead"
        raise wrong_field("tools", problem)
    return offered or None


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if choice.name is None:
            raise wrong_field("tool_choice", "type 'tool' needs the tool's name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
