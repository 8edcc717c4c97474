"""Every request field that OpenAI's and vLLM's schemas know, and what becomes of it here: done, refused or harmless.

The one table: `refusing` makes schemas refuse from it, docs/serving.md is written from it, and a test walks it. Names
that other servers take (SGLang, llama.cpp, Ollama, transformers) are in it where ignoring them would change the
answer. A field that is not in it is ignored, because clients send many.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, create_model
from pydantic.json_schema import SkipJsonSchema

M = TypeVar("M", bound=BaseModel)

Unlisted = SkipJsonSchema[Any]
"""/openapi.json does not offer what is refused."""

State = Literal["done", "refused", "harmless"]
Endpoint = Literal["chat", "completions"]
ENDPOINTS: Final[tuple[Endpoint, ...]] = ("chat", "completions")


@dataclass(frozen=True)
class RequestField:
    """What becomes of one field at one endpoint."""

    name: str
    endpoint: Endpoint
    state: State
    note: str
    """Done: what it does. Refused: why, and what to do. Harmless: why it cannot change the answer."""
    harmless: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing, besides null, false-like empties: "", [] and {}."""
    example: Any = None
    """A value of a refused field that would change the answer."""

    def asks_for_something(self, value: Any) -> bool:
        return value is not None and value not in ("", [], {}) and value not in self.harmless


def _rows(
    state: State,
    names: str,
    note: str,
    *,
    only: Endpoint | None = None,
    harmless: tuple[Any, ...] = (),
    example: Any = None,
) -> list[RequestField]:
    endpoints = ENDPOINTS if only is None else (only,)
    return [
        RequestField(name, endpoint, state, note, harmless, example)
        for name in names.split()
        for endpoint in endpoints
    ]


def _done(names: str, note: str, *, only: Endpoint | None = None) -> list[RequestField]:
    return _rows("done", names, note, only=only)


def _refused(
    names: str, example: Any, note: str, *, harmless: tuple[Any, ...] = (), only: Endpoint | None = None
) -> list[RequestField]:
    return _rows("refused", names, note, only=only, harmless=harmless, example=example)


def _harmless(names: str, note: str, *, only: Endpoint | None = None) -> list[RequestField]:
    return _rows("harmless", names, note, only=only)


_TOOLS: Final = "the older name; use tools and tool_choice"
_CONSTRAINED: Final = (
    "send response_format (a JSON schema) or structured_outputs (also a regex, choices, a Lark grammar)"
)
_FILTER: Final = "this filter is not there; use top_p, top_k and min_p"
_REASONING: Final = (
    "reasoning is steered by the model's template; put the template's own variable into chat_template_kwargs"
)
_TEXT_ONLY: Final = "the model reads and writes text only; leave it out"
_WEIGHTS: Final = "adapters are not loaded; leave it out"

FIELDS: Final[tuple[RequestField, ...]] = (
    *_done("model", "the served model's name; left out: the one there is"),
    *_done(
        "messages",
        "text, or a list of text parts; roles system, developer, user, assistant, tool; calls of tools and thinking",
        only="chat",
    ),
    *_done(
        "prompt", "a text, token ids, or a list of either: choices come prompt by prompt", only="completions"
    ),
    *_done(
        "temperature top_p top_k min_p", "0 is greedy; the filters act in this order: top-k, top-p, min-p"
    ),
    *_done(
        "presence_penalty frequency_penalty repetition_penalty", "over the answer; repetition also the prompt"
    ),
    *_done("seed", "the same seed gives the same answer; choice i of several draws with seed + i"),
    *_done("logit_bias", "token id → -100 to 100, added to its logit; 1,024 at most"),
    *_done(
        "bad_words", "texts that the answer must not hold, with or without a space before them; 128 at most"
    ),
    *_done("stop", "texts that end the answer and are not part of it; four at most"),
    *_done("stop_token_ids", "tokens that end the answer as its end token does; 128 at most"),
    *_done("ignore_eos min_tokens", "no end token at all, or none before so many tokens"),
    *_done(
        "max_tokens",
        "cut to what the context leaves; left out: all of that for chat, 16 for completions; completions take 0",
    ),
    *_done("max_completion_tokens", "the newer name of max_tokens", only="chat"),
    *_done("n", "choices per prompt; n times prompts is 128 at most"),
    *_done(
        "best_of", "so many answers are made, the n of highest mean log probability given", only="completions"
    ),
    *_done("logprobs", "of each token, under the model alone: before penalties, bias and filters"),
    *_done("top_logprobs", "0 to 20 most likely tokens beside each; needs logprobs: true", only="chat"),
    *_done("prompt_logprobs", "vLLM's: the same of the prompt's tokens, 0 to 20; not in a stream"),
    *_done("return_tokens_as_token_ids", "log probabilities name tokens token_id:N"),
    *_done("return_token_ids", "the ids of prompt and answer beside the text"),
    *_done(
        "echo", "the prompt before the answer, with its log probabilities where asked", only="completions"
    ),
    *_done("truncate_prompt_tokens", "only the prompt's last so many tokens are read"),
    *_done("add_special_tokens", "begin-of-text and the like around the prompt: left out, completions only"),
    *_done("add_generation_prompt", "whether the prompt ends with the head of an answer: yes", only="chat"),
    *_done("continue_final_message", "the answer goes on with the last message's text", only="chat"),
    *_done(
        "chat_template_kwargs",
        "variables for the template, e.g. enable_thinking; 16 KiB at most",
        only="chat",
    ),
    *_done("reasoning_effort", "given to templates that read it, else refused", only="chat"),
    *_done("stream", "server-sent events"),
    *_done("cache_salt", "only prompts with the same one share the prefix cache; 256 characters at most"),
    *_done("priority", "lower is earlier; other than 0 only with --scheduling-policy priority"),
    *_done("stream_options", "include_usage, and vLLM's continuous_usage_stats"),
    *_done(
        "return_speed",
        "prefill_time and decode_time in seconds in usage, also beside a stream's finish reason",
    ),
    *_done("return_routed_experts", "the experts of each token, a .npy file in base64"),
    # Tools, forms, templates.
    *_done(
        "tools",
        "functions, 512 at most, for a model whose chat template shows calls of tools; strict: true holds their "
        "arguments to the schema",
        only="chat",
    ),
    *_done(
        "tool_choice",
        "auto; none: the model is not told of tools; required, or a function's name: the answer is calls that match "
        "their schemas, or one of that function",
        only="chat",
    ),
    *_done("parallel_tool_calls", "false: one call at most", only="chat"),
    *_done("include_reasoning", "false: thinking is left out", only="chat"),
    *_done("separate_reasoning", "false: thinking stays in the text", only="chat"),
    *_refused("functions", [{"name": "f"}], _TOOLS, only="chat"),
    *_refused("function_call", "auto", _TOOLS, harmless=("none",), only="chat"),
    *_done("response_format", "json_object, or json_schema: the schema holds whether strict or not"),
    *_done(
        "structured_outputs",
        "vLLM's: one of json, regex, choice, grammar (Lark), json_object; whitespace_pattern and "
        "disable_any_whitespace beside it",
    ),
    *_done(
        "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern",
        "the same by vLLM's older names",
    ),
    *_refused("json_schema structural_tag", {"type": "object"}, _CONSTRAINED),
    *_refused("regex grammar grammar_string ebnf", "[a-z]+", _CONSTRAINED),
    *_refused("format", "json", _CONSTRAINED),
    *_harmless("guided_decoding_backend", "llguidance is the only one"),
    *_refused("chat_template", "{{ messages }}", "only the model's own template is rendered; leave it out"),
    *_refused(
        "documents", [{"text": "a"}], "documents are not given to the template; put them into a message"
    ),
    *_refused("reasoning_effort", "low", _REASONING, only="completions"),
    *_refused("enable_thinking", False, _REASONING),
    *_refused("thinking reasoning", {"type": "disabled"}, _REASONING),
    *_refused("think", False, _REASONING),
    *_refused("thinking_token_budget", 64, "reasoning has no budget of its own; use max_tokens"),
    *_refused(
        "include_reasoning", False, "reasoning stays in the text", harmless=(True,), only="completions"
    ),
    *_refused(
        "separate_reasoning", True, "reasoning stays in the text", harmless=(False,), only="completions"
    ),
    *_refused("verbosity", "low", "answers have no verbosity; ask for it in a message", harmless=("medium",)),
    # What is read and written.
    *_refused("suffix", "the end.", "text cannot be inserted before other text; leave it out"),
    *_refused("echo", True, "only /v1/completions says the prompt back", harmless=(False,), only="chat"),
    *_refused("best_of", 3, "only /v1/completions ranks answers; use n", harmless=(1,), only="chat"),
    *_refused("top_logprobs", 2, "here the number stands in logprobs", harmless=(0,), only="completions"),
    *_refused("max_completion_tokens", 5, "use max_tokens", only="completions"),
    *_refused("chat_template_kwargs", {"a": 1}, "there is no template here", only="completions"),
    *_refused("modalities", ["audio"], _TEXT_ONLY, harmless=(["text"],)),
    *_refused("audio", {"voice": "alloy", "format": "mp3"}, _TEXT_ONLY),
    *_refused("images", ["aGVsbG8="], _TEXT_ONLY),
    *_refused("prompt_embeds", "aGVsbG8=", "prompts are texts or token ids"),
    *_harmless("mm_processor_kwargs media_io_kwargs", "there are no images or sounds to process"),
    *_refused("web_search_options", {"search_context_size": "low"}, "nothing is searched; leave it out"),
    *_refused("moderation", {"model": "m"}, "nothing is moderated; leave it out"),
    *_refused("include_stop_str_in_output", True, "stop texts are never shown", harmless=(False,)),
    *_refused("no_stop_trim", True, "stop texts are never shown", harmless=(False,)),
    *_refused("stop_regex", "[.]", "only plain texts end an answer; use stop"),
    *_refused(
        "skip_special_tokens", False, "special tokens have no text; ask return_token_ids", harmless=(True,)
    ),
    *_harmless("spaces_between_special_tokens", "special tokens are not shown"),
    *_refused("return_hidden_states", True, "hidden states are not given", harmless=(False,)),
    # Other ways to search and to sample.
    *_refused("use_beam_search", True, "there is no beam search; use best_of or n", harmless=(False,)),
    *_refused("num_beams", 4, "there is no beam search; use best_of or n", harmless=(1,)),
    *_harmless("length_penalty early_stopping", "only beam search reads it"),
    *_refused("do_sample", False, "send temperature: 0 for greedy answers", harmless=(True,)),
    *_refused("allowed_token_ids", [1, 2], "use logit_bias"),
    *_refused("logits_processors", ["p"], "no code of the request's is run"),
    *_refused("custom_logit_processor", "p", "no code of the request's is run"),
    *_refused(
        "vllm_xargs custom_params kv_transfer_params", {"a": 1}, "it is for another engine; leave it out"
    ),
    *_refused("repetition_detection", {"max_pattern_size": 4}, "repetition does not end an answer here"),
    *_refused("typical_p tfs_z", 0.5, _FILTER, harmless=(1,)),
    *_refused(
        "top_a epsilon_cutoff eta_cutoff xtc_probability smoothing_factor", 0.5, _FILTER, harmless=(0,)
    ),
    *_refused("mirostat mirostat_mode", 2, _FILTER, harmless=(0,)),
    *_refused("dynatemp_range penalty_alpha", 0.5, _FILTER, harmless=(0,)),
    *_refused("guidance_scale", 1.5, "there is no second prompt to be guided away from", harmless=(1,)),
    *_refused("negative_prompt", "sad", "there is no second prompt to be guided away from"),
    *_refused("ban_eos_token", True, "use ignore_eos", harmless=(False,)),
    *_refused("dry_multiplier", 0.8, "use repetition_penalty or frequency_penalty", harmless=(0,)),
    *_refused("no_repeat_ngram_size", 3, "use repetition_penalty or frequency_penalty", harmless=(0,)),
    *_refused("repeat_penalty", 1.1, "use repetition_penalty", harmless=(1,)),
    *_refused("samplers", ["top_k", "temperature"], "the order of the filters is fixed"),
    *_harmless(
        "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base dry_allowed_length "
        "dry_penalty_last_n dry_sequence_breakers repeat_last_n smoothing_curve",
        "a setting of a filter that is not there, and which is refused if it is asked for",
    ),
    *_refused("n_predict num_predict", 5, "use max_tokens", harmless=(-1,)),
    *_refused("max_new_tokens", 5, "use max_tokens"),
    *_refused("min_new_tokens", 5, "use min_tokens", harmless=(0,)),
    *_refused("num_return_sequences", 2, "use n", harmless=(1,)),
    *_refused("sampling_seed", 7, "use seed"),
    *_refused("lora_path lora", "a", _WEIGHTS),
    *_refused("lora_request", {"lora_name": "a"}, _WEIGHTS),
    *_refused("options", {"temperature": 0}, "put its fields beside the prompt, by OpenAI's names"),
    # What cannot change an answer.
    *_harmless("user metadata store safety_identifier service_tier", "for the operator's books"),
    *_harmless("request_id rid", "answers have ids of their own; the header x-request-id is echoed"),
    *_harmless(
        "prompt_cache_key prompt_cache_options prompt_cache_retention cache_prompt prediction "
        "keep_alive id_slot timings_per_token",
        "about speed, order or caches, not about the answer",
    ),
    *_harmless("parallel_tool_calls", "there are no tool calls", only="completions"),
)


def table_of(endpoint: Endpoint) -> dict[str, RequestField]:
    """The fields of one endpoint by name."""
    return {field.name: field for field in FIELDS if field.endpoint == endpoint}


def refusing(endpoint: Endpoint) -> Callable[[type[M]], type[M]]:
    """A class decorator: the schema also knows the endpoint's refused fields, and refuses what they ask for."""

    def add(schema: type[M]) -> type[M]:
        refused: Any = {
            field.name: (Annotated[Unlisted, AfterValidator(_refuse_if_asked(field))], None)
            for field in table_of(endpoint).values()
            if field.state == "refused"
        }
        return create_model(
            schema.__name__, __base__=schema, __module__=schema.__module__, __doc__=schema.__doc__, **refused
        )

    return add


def _refuse_if_asked(field: RequestField) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if field.asks_for_something(value):
            raise ValueError(f"not supported: {field.note}")

    return check


def markdown() -> str:
    """The table as docs/serving.md shows it."""
    lines = ["| field | at | done |", "|---|---|---|", *_lines("done")]
    lines += ["", "| refused | at | unless | because |", "|---|---|---|---|", *_lines("refused")]
    lines += ["", "| harmless, ignored | because |", "|---|---|", *_lines("harmless")]
    return "\n".join(lines)


def _lines(state: State) -> Iterable[str]:
    """A row per note; fields that share note and endpoints share the row."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for field in FIELDS:
        if field.state == state:
            unless = ", ".join(f"`{json.dumps(value)}`" for value in field.harmless)
            where.setdefault((field.name, field.note, unless), []).append(field.endpoint)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (name, note, unless), endpoints in where.items():
        at = "both" if len(endpoints) == len(ENDPOINTS) else endpoints[0]
        rows.setdefault((at, note, unless), []).append(f"`{name}`")
    for (at, note, unless), names in rows.items():
        cells = [", ".join(names), at, unless, note]
        if state == "done":
            del cells[2]
        elif state == "harmless":
            del cells[1:3]
        yield f"| {' | '.join(cells)} |"
