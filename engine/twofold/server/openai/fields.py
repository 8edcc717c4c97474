"""Table of every request field in OpenAI's and vLLM's schemas, with its status: done, refused or harmless.

Single source: schemas refuse fields by it (`refusing`), the reference page is generated from it, and a test walks it.
Names from other servers (SGLang, llama.cpp, Ollama, transformers) are listed where ignoring them would change the
answer. Unlisted fields are ignored, because clients send many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, create_model

from twofold.server.http.bodies import Unlisted

M = TypeVar("M", bound=BaseModel)

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

    def has_effect(self, value: Any) -> bool:
        return value is not None and value not in ("", [], {}) and value not in self.harmless


def _rows(
    state: State,
    names: str,
    note: str,
    *,
    example: Any = None,
    harmless: tuple[Any, ...] = (),
    only: Endpoint | None = None,
) -> list[RequestField]:
    endpoints = ENDPOINTS if only is None else (only,)
    return [
        RequestField(name, endpoint, state, note, harmless=harmless, example=example)
        for name in names.split()
        for endpoint in endpoints
    ]


_done = functools.partial(_rows, "done")
_harmless = functools.partial(_rows, "harmless")


def _refused(
    names: str, example: Any, note: str, *, harmless: tuple[Any, ...] = (), only: Endpoint | None = None
) -> list[RequestField]:
    return _rows("refused", names, note, example=example, harmless=harmless, only=only)


_TOOLS: Final = "the older name; use tools and tool_choice"
_CONSTRAINED: Final = (
    "send response_format (JSON schema) or structured_outputs (regex, choices or Lark grammar, too)"
)
_FILTER: Final = "this filter does not exist; use top_p, top_k and min_p"
_REASONING: Final = "only a chat template controls reasoning; send the request to /v1/chat/completions"
_TEXT_ONLY: Final = "the model reads and writes text only; leave it out"
_WEIGHTS: Final = "send the adapter's name as model"
_NO_CODE: Final = "code in requests is not run"
_NO_BEAMS: Final = "beam search does not exist; use best_of or n"
_NO_GUIDANCE: Final = "there is no second prompt for guidance"
_REPEATS: Final = "use repetition_penalty or frequency_penalty"
_STOPS: Final = "stop texts are never part of the answer"

FIELDS: Final[tuple[RequestField, ...]] = (
    *_done(
        "model",
        "a name of the served model (any name with --served-model-name '*') or of an adapter; default: the served "
        "model",
    ),
    *_done(
        "lora",
        "llama.cpp's: adapters by their id in GET /lora-adapters with scales, in place of one that `model` names; "
        "others get 0",
    ),
    *_done("lora_path", "SGLang's: an adapter's name, in place of `model`"),
    *_done(
        "messages",
        "text, or a list of text parts; roles system, developer, user, assistant, tool, and others that the template "
        "shows; tool calls and thinking",
        only="chat",
    ),
    *_done(
        "prompt",
        "a text, token ids, or a list of either; choices are in the order of prompts",
        only="completions",
    ),
    *_done(
        "temperature top_p top_k min_p",
        "temperature 0 is greedy; the filters apply in the order top-k, top-p, min-p; top_p 0 keeps the most likely "
        "token, top_k 0 or -1 all",
    ),
    *_done(
        "presence_penalty frequency_penalty repetition_penalty",
        "over the answer; repetition_penalty also over the prompt",
    ),
    *_done("seed", "the same seed gives the same answer; choice i of several uses seed + i"),
    *_done("logit_bias", "token id → -100 to 100, added to its logit; 1,024 at most"),
    *_done(
        "bad_words",
        "texts that the answer must not contain, with or without a space before them; 128 at most",
    ),
    *_done(
        "stop", "texts that end the answer and are not part of it; 1,024 at most; empty ones count as none"
    ),
    *_done("stop_token_ids", "tokens that end the answer like the end-of-text token; 1,024 at most"),
    *_done("ignore_eos min_tokens", "no end-of-text token at all, or none before this many tokens"),
    *_done(
        "max_tokens",
        "cut to the room that the context has left, which is also the default for chat; default for completions: 16; "
        "completions accept 0; -1: no limit but the context",
    ),
    *_done("max_completion_tokens", "the newer name of max_tokens", only="chat"),
    *_done("n", "choices per prompt; n times prompts is 128 at most"),
    *_done(
        "best_of",
        "number of answers generated; the n with the highest mean log probability are returned",
        only="completions",
    ),
    *_done("logprobs", "of each token, before penalties, bias and filters"),
    *_done("top_logprobs", "the 0 to 20 most likely tokens beside each; needs logprobs: true", only="chat"),
    *_done("prompt_logprobs", "vLLM's: the same for the prompt's tokens, 0 to 20; not in a stream"),
    *_done("return_tokens_as_token_ids", "log probabilities name tokens token_id:N"),
    *_done("return_token_ids", "the ids of prompt and answer beside the text"),
    *_done(
        "echo", "the prompt before the answer, with its log probabilities if requested", only="completions"
    ),
    *_done(
        "truncate_prompt_tokens",
        "most tokens of the prompt that are used; -1: as many as the context holds beside the answer",
    ),
    *_done("truncation_side", "left (default) drops the prompt's first tokens, right its last ones"),
    *_done("add_special_tokens", "begin-of-text and the like around the prompt; default: completions only"),
    *_done(
        "add_generation_prompt",
        "whether the prompt ends with the head of an answer; default: true",
        only="chat",
    ),
    *_done("continue_final_message", "the answer continues the last message's text", only="chat"),
    *_done(
        "chat_template_kwargs",
        "variables for the template, e.g. enable_thinking; 16 KiB at most",
        only="chat",
    ),
    *_done(
        "reasoning_effort reasoning think enable_thinking thinking",
        "the template's reasoning_effort (also from reasoning.effort and a text in think) or its switch "
        "(enable_thinking, thinking), which efforts none and minimal set to off; chat_template_kwargs overrides it; "
        "ignored with a line in the log if the template has neither; reasoning also takes OpenRouter's enabled, "
        "exclude (the thinking is left out) and max_tokens (the thinking budget)",
        only="chat",
    ),
    *_done(
        "verbosity", "the template's verbosity; ignored with a line in the log if it has none", only="chat"
    ),
    *_done(
        "prediction",
        "text that the answer is expected to resemble, which speeds it up and never changes it; usage counts its "
        "tokens that were drafted and accepted, and the others",
        only="chat",
    ),
    *_harmless("prediction", "about speed, not about the answer", only="completions"),
    *_done("stream", "server-sent events"),
    *_done("cache_salt", "only prompts with the same salt share the prefix cache; 256 characters at most"),
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
        "functions and custom tools, 512 at most, for a model whose chat template has tool calls; strict: true "
        "constrains a function's arguments to the schema; the model sees a custom tool as a function with one text "
        "argument and its grammar in the description, which is not enforced",
        only="chat",
    ),
    *_done(
        "tool_choice",
        "auto; none: the model sees no tools; required, or a function's name: the answer consists of calls that match "
        "their schemas, or one of that function; allowed_tools: the model sees only these",
        only="chat",
    ),
    *_done("parallel_tool_calls", "false: one call at most", only="chat"),
    *_done("include_reasoning", "false: thinking is left out", only="chat"),
    *_done(
        "thinking_token_budget",
        "vLLM's: after this many tokens the engine ends the thinking, and the answer begins",
        only="chat",
    ),
    *_done("separate_reasoning", "false: thinking stays in the text", only="chat"),
    *_refused("functions", [{"name": "f"}], _TOOLS, only="chat"),
    *_refused("function_call", "auto", _TOOLS, harmless=("none",), only="chat"),
    *_done("response_format", "json_object, or json_schema, which is enforced whether strict or not"),
    *_done(
        "structured_outputs",
        "vLLM's: one of json, regex, choice, grammar (Lark), json_object; with whitespace_pattern and "
        "disable_any_whitespace",
    ),
    *_done(
        "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern",
        "the same by vLLM's older names",
    ),
    *_refused("json_schema structural_tag", {"type": "object"}, _CONSTRAINED),
    *_refused("regex grammar grammar_string ebnf", "[a-z]+", _CONSTRAINED),
    *_refused("format", "json", _CONSTRAINED),
    *_harmless("guided_decoding_backend", "llguidance is the only backend"),
    *_refused("chat_template", "{{ messages }}", "only the model's own template is rendered; leave it out"),
    *_refused("documents", [{"text": "a"}], "the template gets no documents; put them into a message"),
    *_refused("reasoning_effort", "low", _REASONING, only="completions"),
    *_refused("enable_thinking think", False, _REASONING, only="completions"),
    *_refused("thinking reasoning", {"type": "disabled"}, _REASONING, only="completions"),
    *_refused("thinking_token_budget", 64, _REASONING, only="completions"),
    *_refused("include_reasoning", False, _REASONING, harmless=(True,), only="completions"),
    *_refused("separate_reasoning", True, _REASONING, harmless=(False,), only="completions"),
    *_refused("verbosity", "low", "ask for it in the prompt", harmless=("medium",), only="completions"),
    # Input and output.
    *_done(
        "suffix",
        "text after the answer, which fills the gap; for models with marks for it (Qwen, DeepSeek, StarCoder, GLM, "
        "CodeLlama, Seed-Coder, Codestral)",
        only="completions",
    ),
    *_refused("suffix", "the end.", "only /v1/completions fills a gap; leave it out", only="chat"),
    *_refused("echo", True, "only /v1/completions returns the prompt", harmless=(False,), only="chat"),
    *_refused("best_of", 3, "only /v1/completions ranks answers; use n", harmless=(1,), only="chat"),
    *_refused("top_logprobs", 2, "put the number into logprobs", harmless=(0,), only="completions"),
    *_refused("max_completion_tokens", 5, "use max_tokens", only="completions"),
    *_refused("chat_template_kwargs", {"a": 1}, "no template is rendered; leave it out", only="completions"),
    *_refused("modalities", ["audio"], _TEXT_ONLY, harmless=(["text"],)),
    *_refused("audio", {"voice": "alloy", "format": "mp3"}, _TEXT_ONLY),
    *_refused("images", ["aGVsbG8="], "send pictures as parts of a message"),
    *_refused("prompt_embeds", "aGVsbG8=", "send prompts as texts or token ids"),
    *_harmless(
        "mm_processor_kwargs media_io_kwargs mm_payload return_mm_kwargs",
        "the operator sets how pictures are processed (--mm-processor-kwargs)",
    ),
    *_refused("web_search_options", {"search_context_size": "low"}, "the web is not searched; leave it out"),
    *_refused("moderation", {"model": "m"}, "answers are not moderated; leave it out"),
    *_refused("include_stop_str_in_output no_stop_trim", True, _STOPS, harmless=(False,)),
    *_refused("stop_regex", "[.]", "only plain texts end an answer; use stop"),
    *_refused(
        "skip_special_tokens", False, "special tokens have no text; use return_token_ids", harmless=(True,)
    ),
    *_harmless("spaces_between_special_tokens", "special tokens are not shown"),
    *_refused(
        "return_hidden_states", True, "hidden states are not returned; leave it out", harmless=(False,)
    ),
    *_refused(
        "return_token_offsets",
        True,
        "token offsets are not returned; leave it out",
        harmless=(False,),
    ),
    *_refused(
        "return_prompt_text",
        True,
        "the rendered prompt is not returned; use return_token_ids and /detokenize",
        harmless=(False,),
        only="chat",
    ),
    *_refused("return_weight_versions", True, "weights have no versions; leave it out", harmless=(False,)),
    *_refused("logprob_token_ids", [1, 2], "only the most likely tokens are reported; use logprobs"),
    *_refused("watermarking", True, "answers have no watermark; leave it out", harmless=(False,)),
    *_refused(
        "routed_experts_prompt_start",
        8,
        "return_routed_experts covers the whole prompt; leave it out",
        harmless=(0,),
    ),
    # Other search and sampling methods.
    *_refused("use_beam_search", True, _NO_BEAMS, harmless=(False,)),
    *_refused("num_beams", 4, _NO_BEAMS, harmless=(1,)),
    *_harmless("length_penalty early_stopping", "only beam search uses it"),
    *_refused("do_sample", False, "send temperature: 0 for greedy answers", harmless=(True,)),
    *_refused("allowed_token_ids", [1, 2], "use logit_bias"),
    *_refused("logits_processors", ["p"], _NO_CODE),
    *_refused("custom_logit_processor", "p", _NO_CODE),
    *_refused(
        "ec_transfer_params vllm_xargs custom_params kv_transfer_params",
        {"a": 1},
        "another engine's; leave it out",
    ),
    *_refused(
        "repetition_detection", {"max_pattern_size": 4}, "repetition does not end an answer; leave it out"
    ),
    *_refused("typical_p tfs_z", 0.5, _FILTER, harmless=(1,)),
    *_refused(
        "top_a epsilon_cutoff eta_cutoff xtc_probability smoothing_factor", 0.5, _FILTER, harmless=(0,)
    ),
    *_refused("mirostat mirostat_mode", 2, _FILTER, harmless=(0,)),
    *_refused("dynatemp_range penalty_alpha", 0.5, _FILTER, harmless=(0,)),
    *_refused("guidance_scale", 1.5, _NO_GUIDANCE, harmless=(1,)),
    *_refused("negative_prompt", "sad", _NO_GUIDANCE),
    *_refused("ban_eos_token", True, "use ignore_eos", harmless=(False,)),
    *_refused("dry_multiplier", 0.8, _REPEATS, harmless=(0,)),
    *_refused("no_repeat_ngram_size", 3, _REPEATS, harmless=(0,)),
    *_refused("repeat_penalty", 1.1, "use repetition_penalty", harmless=(1,)),
    *_refused("samplers", ["top_k", "temperature"], "the order of the filters is fixed"),
    *_harmless(
        "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base dry_allowed_length "
        "dry_penalty_last_n dry_sequence_breakers repeat_last_n smoothing_curve",
        "a setting of a filter that is refused",
    ),
    *_refused("n_predict num_predict", 5, "use max_tokens", harmless=(-1,)),
    *_refused("max_new_tokens", 5, "use max_tokens"),
    *_refused("min_new_tokens", 5, "use min_tokens", harmless=(0,)),
    *_refused("num_return_sequences", 2, "use n", harmless=(1,)),
    *_refused("sampling_seed", 7, "use seed"),
    *_refused("lora_request", {"lora_name": "a"}, _WEIGHTS),
    *_refused("options", {"temperature": 0}, "put its fields beside the prompt, by OpenAI's names"),
    # Fields that cannot change an answer.
    *_harmless("user metadata store safety_identifier service_tier", "for the operator's records"),
    *_harmless("request_id rid", "the server makes its own ids; the header x-request-id is echoed"),
    *_harmless(
        "prompt_cache_key prompt_cache_options prompt_cache_retention cache_prompt "
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
            field.name: (Annotated[Unlisted, AfterValidator(_refuse_if_set(field))], None)
            for field in table_of(endpoint).values()
            if field.state == "refused"
        }
        return create_model(
            schema.__name__, __base__=schema, __module__=schema.__module__, __doc__=schema.__doc__, **refused
        )

    return add


def _refuse_if_set(field: RequestField) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if field.has_effect(value):
            raise ValueError(f"not supported: {field.note}")

    return check
