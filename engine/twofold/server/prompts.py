"""From request bodies to token ids: prompts, and words that answers must not hold. Runs on worker threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from twofold.api.errors import RequestError
from twofold.chat.marks import ChatMarks
from twofold.server.kept_tokens import KeptTokens
from twofold.server.messages import messages_for_template
from twofold.server.protocol import ServingTokenizer
from twofold.server.schemas import ChatRequest, CompletionRequest
from twofold.server.turn_ends import turn_ends


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the engine."""

    token_ids: tuple[int, ...]
    text: str | None = None
    """For `echo`, if it was asked for."""
    opens_reasoning: bool = False
    """The answer begins inside the model's thinking."""
    turn_ends: tuple[int, ...] = ()
    """See `GenerationRequest.turn_ends`."""


def chat_prompts(
    body: ChatRequest,
    tokenizer: ServingTokenizer,
    marks: ChatMarks,
    *,
    with_turn_ends: bool = False,
    kept: KeptTokens | None = None,
) -> list[Prompt]:
    """The rendered conversation. RequestError when the template refuses it or does not know what was asked."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in tokenizer.template_variables:
            raise RequestError(
                "reasoning_effort: not supported, this model's template does not read it; leave it out, or put the "
                "template's own variable into chat_template_kwargs",
                param="reasoning_effort",
            )
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    messages = messages_for_template(body.messages, tokenizer)
    tools = body.offered_tools or None

    def render(count: int, begins: bool, continues: bool = False) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], begins, tools=tools, continue_final_message=continues, **variables
        )

    text = render(len(messages), begins, continues)
    if kept is None or body.add_special_tokens:
        token_ids = tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    else:
        token_ids = kept.encode(text, tokenizer, body.cache_salt or "")
    truncated = _truncated(token_ids, body.truncate_prompt_tokens)
    opened = marks.opened_by(text, (body.messages[-1].content or "") if continues else "")
    if not with_turn_ends:
        return [Prompt(truncated, opens_reasoning=opened)]
    counts = [len(messages)] * begins + [len(messages) - 1] * (len(messages) > 1)
    without = [partial(render, count, False) for count in counts]
    ends = turn_ends(text, truncated, without, tokenizer)
    return [Prompt(truncated, opens_reasoning=opened, turn_ends=ends)]


def completion_prompts(body: CompletionRequest, tokenizer: ServingTokenizer) -> list[Prompt]:
    """The prompts in the request's order."""
    return [_completion_prompt(prompt, body, tokenizer) for prompt in body.prompts]


def _completion_prompt(
    prompt: str | list[int], body: CompletionRequest, tokenizer: ServingTokenizer
) -> Prompt:
    if isinstance(prompt, str):
        all_ids = tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        all_ids = prompt
    token_ids = _truncated(all_ids, body.truncate_prompt_tokens)
    if not body.echo:
        return Prompt(token_ids)
    if isinstance(prompt, str) and len(token_ids) == len(all_ids):
        return Prompt(token_ids, prompt)
    return Prompt(token_ids, tokenizer.decode(token_ids, skip_special_tokens=False))


def bad_word_sequences(words: Sequence[str], tokenizer: ServingTokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokens it has at the begin of a text and, where they differ, behind a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for prefix in ("", " "):
            token_ids = tuple(tokenizer.encode(prefix + (word.lstrip(" ") or word)))
            if token_ids:
                sequences[token_ids] = None
    return tuple(sequences)


def _truncated(token_ids: Sequence[int], limit: int | None) -> tuple[int, ...]:
    return tuple(token_ids if limit is None else token_ids[-limit:])
