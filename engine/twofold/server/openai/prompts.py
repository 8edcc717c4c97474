"""Converts request bodies to token ids: prompts and bad words. Runs on worker threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from twofold.api.errors import RequestError, TemplateLimitExceededError
from twofold.server.bridge.models.prompt_tokens import TokenCache
from twofold.server.bridge.models.protocol import Prompt, ServingTokenizer
from twofold.server.bridge.models.request_pictures import RequestPictures
from twofold.server.bridge.requests.turn_ends import turn_ends
from twofold.server.openai.chat_tools import with_parameters
from twofold.server.openai.completion_schema import CompletionRequest
from twofold.server.openai.fill_in import fill_prompt
from twofold.server.openai.messages import KNOWN_ROLES, Message, Picture, turns_of
from twofold.server.openai.schemas import MAX_INT64, ChatRequest, SamplingFields
from twofold.server.openai.template_variables import template_variables, thinking_is_off
from twofold.text.chat.marks import ChatMarks
from twofold.text.conversation.arranging import rendered
from twofold.text.conversation.content import placeholder

_PREDICTED_CHARS_PER_TOKEN: Final = 4


def chat_prompts(
    body: ChatRequest,
    tokenizer: ServingTokenizer,
    marks: ChatMarks,
    *,
    with_turn_ends: bool = False,
    cache: TokenCache | None = None,
    max_context: int = MAX_INT64,
    pictures: RequestPictures | None = None,
    on_rendered: Callable[[], None] = lambda: None,
) -> list[Prompt]:
    """The rendered conversation as prompts. RequestError when the template refuses it.

    pictures: those of the messages, encoded; None: the model reads text only. `on_rendered` is called between rendering
    and tokenising.
    """
    variables = template_variables(body, tokenizer)
    continues = body.continues
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    tools = body.offered_tools or None
    replaced = {} if pictures is None else pictures.of_prompt.written(tokenizer)

    def render(messages: list[dict[str, Any]], begins: bool, continues: bool = False) -> str:
        return tokenizer.apply_chat_template(
            messages,
            begins,
            tools=tools,
            continue_final_message=continues,
            replaced=replaced,
            **variables,
        )

    def render_all() -> tuple[list[dict[str, Any]], str]:
        turns = turns_of(body.messages, tokenizer, _replacement(pictures))
        return rendered(turns, tokenizer, lambda turns: render(turns, begins, continues))

    try:
        messages, text = render_all()
    except TemplateLimitExceededError:
        raise
    except RequestError:
        whole = [with_parameters(tool) for tool in tools or ()]
        if whole == (tools or []):
            raise
        tools = whole
        messages, text = render_all()
    _check_roles(body.messages, text)
    on_rendered()
    token_ids = _encoded(text, body, tokenizer, cache)
    truncated = tuple(token_ids) if pictures is not None else _truncated(token_ids, body, max_context)
    continued = (messages[-1]["content"] or "") if continues else ""
    opened = marks.opened_by(text, continued)
    closed = not opened and (thinking_is_off(variables) or marks.closed_by(text, continued))
    # Turn ends are counted from the prompt's end, which truncation on the right drops.
    if not with_turn_ends or (body.truncation_side == "right" and len(truncated) < len(token_ids)):
        return [Prompt(truncated, opens_reasoning=opened, closes_reasoning=closed)]
    counts = [len(messages)] * begins + [len(messages) - 1] * (len(messages) > 1)
    without = [partial(render, messages[:count], False) for count in counts]
    ends = turn_ends(text, truncated, without, tokenizer)
    return [Prompt(truncated, opens_reasoning=opened, closes_reasoning=closed, turn_ends=ends)]


def _encoded(
    text: str, body: ChatRequest, tokenizer: ServingTokenizer, cache: TokenCache | None
) -> list[int]:
    if cache is None or body.add_special_tokens:
        return tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    return cache.encode(text, tokenizer, body.cache_salt or "")


def _replacement(pictures: RequestPictures | None) -> Callable[[Picture], str]:
    """What stands for each picture of the messages, in their order."""
    if pictures is None:
        return lambda picture: placeholder("image", picture.name)
    numbers = itertools.count()
    return lambda picture: pictures.of_prompt.stand_in(next(numbers))


def with_prediction(
    prompts: list[Prompt], body: ChatRequest, tokenizer: ServingTokenizer, max_context: int
) -> list[Prompt]:
    """The prompts with the request's predicted answer, as much of it as the context can hold."""
    if body.prediction is None:
        return prompts
    text = body.prediction.text[: _PREDICTED_CHARS_PER_TOKEN * max_context]
    prediction = tuple(tokenizer.encode(text))[:max_context]
    return [replace(prompt, prediction=prediction) for prompt in prompts]


def continuing(context: Sequence[int], prompt: Prompt, tokenizer: ServingTokenizer) -> Prompt:
    """`prompt` appended to the tokens of `context`. A begin-of-text token stays at the start only."""
    begin = tuple(tokenizer.encode("", add_special_tokens=True))
    is_twice = tuple(context[: len(begin)]) == begin == prompt.token_ids[: len(begin)]
    own = prompt.token_ids[len(begin) if is_twice else 0 :]
    shift = len(context) + len(own) - len(prompt.token_ids)
    ends = tuple(end + shift for end in prompt.turn_ends)
    return replace(prompt, token_ids=(*context, *own), turn_ends=ends)


def _check_roles(messages: Sequence[Message], rendered: str) -> None:
    """RequestError for a message that the template left out because it does not know its role."""
    for number, message in enumerate(messages):
        if message.role not in KNOWN_ROLES and (message.content or "").strip() not in rendered:
            raise RequestError(
                f"messages[{number}].role: this model's chat template leaves out messages of the role "
                f"{message.role!r}; send it as a user's or a system's message",
                param=f"messages[{number}].role",
            )


def completion_prompts(
    body: CompletionRequest, tokenizer: ServingTokenizer, max_context: int
) -> list[Prompt]:
    """The prompts in the request's order."""
    return [_completion_prompt(prompt, body, tokenizer, max_context) for prompt in body.prompts]


def _completion_prompt(
    prompt: str | list[int], body: CompletionRequest, tokenizer: ServingTokenizer, max_context: int
) -> Prompt:
    if isinstance(prompt, str):
        begins = body.add_special_tokens is not False and not body.suffix
        all_ids = tokenizer.encode(prompt, add_special_tokens=begins)
    else:
        all_ids = prompt
    token_ids = _truncated(all_ids, body, max_context)
    if body.suffix:
        begins = body.add_special_tokens is not False
        return Prompt(tuple(fill_prompt(token_ids, body.suffix, tokenizer, begins=begins)))
    if not body.echo:
        return Prompt(token_ids)
    if isinstance(prompt, str) and len(token_ids) == len(all_ids):
        return Prompt(token_ids, prompt)
    return Prompt(token_ids, tokenizer.decode(token_ids, skip_special_tokens=False))


def bad_word_sequences(words: Sequence[str], tokenizer: ServingTokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word at the start of a text and, where different, after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for prefix in ("", " "):
            token_ids = tuple(tokenizer.encode(prefix + (word.lstrip(" ") or word)))
            if token_ids:
                sequences[token_ids] = None
    return tuple(sequences)


def _truncated(token_ids: Sequence[int], body: SamplingFields, max_context: int) -> tuple[int, ...]:
    limit = body.prompt_limit(max_context)
    if limit is None:
        return tuple(token_ids)
    return tuple(token_ids[:limit] if body.truncation_side == "right" else token_ids[-limit:])
