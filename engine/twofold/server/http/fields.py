"""Table of every request field in OpenAI's and vLLM's schemas, with its status: done, refused or harmless.

Single source: schemas refuse fields by it (`refusing`), the reference page is generated from it, and a test walks it.
Names from other servers (SGLang, llama.cpp, Ollama, transformers) are listed where ignoring them would change the
answer. Unlisted fields are ignored, because clients send many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, create_model
from pydantic.json_schema import SkipJsonSchema

M = TypeVar("M", bound=BaseModel)

Unlisted = SkipJsonSchema[Any]
"""Leaves refused fields out of /openapi.json."""


def refused(why: str) -> Any:
    """Type of a field that is accepted only with an empty value."""

    def check(value: Any) -> None:
        if value not in (None, False, "", [], {}):
            raise ValueError(f"not supported: {why}")

    return Annotated[Unlisted, AfterValidator(check)]


State = Literal["done", "refused", "harmless"]
Endpoint = Literal["chat", "completions"]
ENDPOINTS: Final[tuple[Endpoint, ...]] = ("chat", "completions")


@dataclass(frozen=True)
class RequestField:
    """The handling of one field at one endpoint."""

    name: str
    endpoint: Endpoint
    state: State
    note: str
    """Done: what it does. Refused: why, and what to do. Harmless: why it cannot change the answer."""
    harmless: tuple[Any, ...] = ()
    """Values of a refused field that request nothing, besides null and the empty "", [] and {}."""
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
    "reasoning is steered by a chat template, which no completion has; send it to /v1/chat/completions"
)
_TEXT_ONLY: Final = "the model reads and writes text only; leave it out"
_WEIGHTS: Final = "adapters are not loaded; leave it out"

FIELDS: Final[tuple[RequestField, ...]] = (
    *_done(
        "model", "a name of the served model, or any with --served-model-name '*'; left out: the one there is"
    ),
    *_done(
        "messages",
        "text, or a list of text parts; roles system, developer, user, assistant, tool, and others that the template "
        "shows; calls of tools and thinking",
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
    *_done("truncate_prompt_tokens", "only so many tokens of the prompt are read"),
    *_done("truncation_side", "left (the default) drops the prompt's first tokens, right its last ones"),
    *_done("add_special_tokens", "begin-of-text and the like around the prompt: left out, completions only"),
    *_done("add_generation_prompt", "whether the prompt ends with the head of an answer: yes", only="chat"),
    *_done("continue_final_message", "the answer goes on with the last message's text", only="chat"),
    *_done(
        "chat_template_kwargs",
        "variables for the template, e.g. enable_thinking; 16 KiB at most",
        only="chat",
    ),
    *_done(
        "reasoning_effort reasoning think enable_thinking thinking",
        "the template's reasoning_effort (reasoning.effort and a text in think, too), or its switch (enable_thinking, "
        "thinking), which efforts none and minimal set off; chat_template_kwargs goes before it; ignored with a line "
        "in the log where the template reads neither",
        only="chat",
    ),
    *_done(
        "verbosity",
        "the template's verbosity; ignored with a line in the log where it reads none",
        only="chat",
    ),
    *_done("stream", "server-sent events"),
    *_done("cache_salt", "only prompts with the same one share the prefix cache; 256 characters at most"),
    *_done("priority", "lower is earlier; other than 0 only with --scheduling-policy priority"),
    *_done("stream_options", "include_usage, and vLLM's continuous_usage_stats"),
    *_done(
        "return_speed",
        "KTransformers': prefill_time and decode_time in seconds in usage, also beside a stream's finish reason; "
        "prompt_tokens then counts computed tokens only, cached_tokens the others, total_tokens all",
    ),
    *_done("return_routed_experts", "the experts of each token, a .npy file in base64"),
    # Tools, formats, templates.
    *_done(
        "tools",
        "functions and custom tools, 512 at most, for a model whose chat template shows calls of tools; strict: true "
        "holds a function's arguments to the schema; the model knows a custom tool as a function of one text and is "
        "told its grammar, which is not enforced",
        only="chat",
    ),
    *_done(
        "tool_choice",
        "auto; none: the model is not told of tools; required, or a function's name: the answer is calls that match "
        "their schemas, or one of that function; allowed_tools: the model is told of these only",
        only="chat",
    ),
    *_done("parallel_tool_calls", "false: one call at most", only="chat"),
    *_done("include_reasoning", "false: thinking is left out", only="chat"),
    *_done(
        "thinking_token_budget",
        "vLLM's: thinking that has so many tokens is ended by the engine, and the answer begins",
        only="chat",
    ),
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
    *_refused("enable_thinking think", False, _REASONING, only="completions"),
    *_refused("thinking reasoning", {"type": "disabled"}, _REASONING, only="completions"),
    *_refused(
        "thinking_token_budget",
        64,
        "there is no template here, so no thinking is told apart",
        only="completions",
    ),
    *_refused(
        "include_reasoning", False, "reasoning stays in the text", harmless=(True,), only="completions"
    ),
    *_refused(
        "separate_reasoning", True, "reasoning stays in the text", harmless=(False,), only="completions"
    ),
    *_refused(
        "verbosity",
        "low",
        "answers have no verbosity; ask for it in the prompt",
        harmless=("medium",),
        only="completions",
    ),
    # Input and output.
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
    *_harmless(
        "mm_processor_kwargs media_io_kwargs mm_payload return_mm_kwargs",
        "there are no images or sounds to process",
    ),
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
    *_refused("return_token_offsets", True, "offsets of a prompt's tokens are not given", harmless=(False,)),
    *_refused(
        "return_prompt_text",
        True,
        "the rendered prompt is not given; ask return_token_ids and /detokenize",
        harmless=(False,),
        only="chat",
    ),
    *_refused("return_weight_versions", True, "weights have no versions; leave it out", harmless=(False,)),
    *_refused("logprob_token_ids", [1, 2], "log probabilities are of the likeliest tokens; use logprobs"),
    *_refused("watermarking", True, "answers carry no watermark; leave it out", harmless=(False,)),
    *_refused(
        "routed_experts_prompt_start",
        8,
        "return_routed_experts gives all of the prompt; leave it out",
        harmless=(0,),
    ),
    # Other search and sampling methods.
    *_refused("use_beam_search", True, "there is no beam search; use best_of or n", harmless=(False,)),
    *_refused("num_beams", 4, "there is no beam search; use best_of or n", harmless=(1,)),
    *_harmless("length_penalty early_stopping", "only beam search reads it"),
    *_refused("do_sample", False, "send temperature: 0 for greedy answers", harmless=(True,)),
    *_refused("allowed_token_ids", [1, 2], "use logit_bias"),
    *_refused("logits_processors", ["p"], "no code of the request's is run"),
    *_refused("custom_logit_processor", "p", "no code of the request's is run"),
    *_refused(
        "ec_transfer_params vllm_xargs custom_params kv_transfer_params",
        {"a": 1},
        "it is for another engine; leave it out",
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
    # Fields that cannot change an answer.
    *_harmless("user metadata store safety_identifier service_tier", "for the operator's books"),
    *_harmless("request_id rid", "answers have ids of their own; the header x-request-id is echoed"),
    *_harmless(
        "prompt_cache_key prompt_cache_options prompt_cache_retention cache_prompt prediction "
        "keep_alive id_slot timings_per_token session_id stream_interval",
        "about speed, order or caches, not about the answer",
    ),
    *_harmless("parallel_tool_calls", "there are no tool calls", only="completions"),
)


def table_of(endpoint: Endpoint) -> dict[str, RequestField]:
    """The fields of one endpoint by name."""
    return {field.name: field for field in FIELDS if field.endpoint == endpoint}


def refusing(endpoint: Endpoint) -> Callable[[type[M]], type[M]]:
    """Class decorator: adds the endpoint's refused fields to the schema, with checks that refuse them."""

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
