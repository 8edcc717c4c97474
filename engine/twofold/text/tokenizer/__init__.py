"""Text ⇄ token ids, chat messages → prompt, and streaming detokenisation without half characters.

Uses the `tokenizers` package, with a directory's tokenizer.json or the vocabulary in a GGUF file. Chat templates are
rendered by `chat_template.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Final

import tokenizers

from twofold.api.errors import ModelLoadError, RequestError
from twofold.text.tokenizer.backend_calls import (
    decode_ids,
    encode_texts,
    failure_of,
    reading,
    try_backend,
)
from twofold.text.tokenizer.chat_template import ChatTemplate
from twofold.text.tokenizer.detokenizer import IncrementalDetokenizer, MarkedDetokenizer
from twofold.text.tokenizer.literal_text import ControlTokens, PromptText
from twofold.text.tokenizer.pieces import TokenPieces
from twofold.text.tokenizer.shapes import Kind, RenderOutcome
from twofold.text.tokenizer.tokenizer_json import read_tokenizer_json
from twofold.text.tokenizer.tool_form import ToolForm
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.json_file import Fields, read_json_object

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer", "ToolForm"]

_SPECIAL_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """The tokenizer of one model directory or GGUF file. Immutable and safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int],
        chat_template: ChatTemplate | None,
        where: str,
        repeated: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`repeated`: ids that the backend does not know → the id with the same text."""
        self._backend = backend
        self._repeated = repeated
        self.eos_token_ids = eos_token_ids
        """Token ids that end an answer, of all the model's files. A chat's turn may also end with `turn_end`."""
        self._chat_template = chat_template
        self._pieces = TokenPieces(backend, repeated)
        self._controls = ControlTokens(backend)
        self._text_only: dict[bool, tokenizers.Tokenizer] = {}
        self._text_only_lock = Lock()
        self._where = where
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens))
        """Role → token, e.g. "eos_token" → "<|im_end|>", as the directory declares them."""

    @classmethod
    def load(
        cls, directory: str | Path, *, vocab_size: int | None = None, marks_answers: bool = False
    ) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template (chat_template.jinja, or in the config).

        Args:
            vocab_size: rows of the model's embedding, when known; every token id must be below it.
            marks_answers: see `ChatTemplate`.

        Raises:
            ModelLoadError: a file is missing, damaged or does not fit; the message names it.
        """
        directory = Path(directory)
        config_path = directory / "tokenizer_config.json"
        data = read_json_object(config_path, "the tokenizer's settings") if config_path.exists() else {}
        map_path = directory / "special_tokens_map.json"
        if map_path.exists():
            # Older repositories name the roles there only.
            named = read_json_object(map_path, "the special tokens")
            data = {**{role: named[role] for role in _SPECIAL_NAMES if role in named}, **data}
        settings = Fields(str(config_path), data)
        with reading(directory):
            path, backend = _read_backend(directory, settings)
            try_backend(backend)
        highest = -1 if vocab_size is None else _highest_id(backend, vocab_size)
        if vocab_size is not None and highest >= vocab_size:
            raise ModelLoadError(
                f"{path}: has token id {highest}, expected ids below the model's vocab_size "
                f"{vocab_size}; tokenizer and model belong to different models"
            )
        special_tokens = _special_tokens(settings, backend)
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=_eos_token_ids(directory, special_tokens, backend),
            chat_template=ChatTemplate.find(directory, data, special_tokens, marks_answers=marks_answers),
            where=str(directory),
        )

    @classmethod
    def open(cls, path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """The tokenizer of a model directory or inside a GGUF file. `vocab_size` and errors as `load`."""
        if is_gguf(path):
            return cls.from_gguf(GgufFile.open(path), vocab_size=vocab_size)
        return cls.load(path, vocab_size=vocab_size)

    @classmethod
    def from_gguf(cls, file: GgufFile, *, vocab_size: int | None = None) -> Tokenizer:
        """The tokenizer and chat template inside a GGUF file. `vocab_size` and errors as `load`."""
        # Imported here: saves 0.03 s with a tokenizer.json.
        from twofold.text.tokenizer.gguf_vocabulary import read_vocabulary

        where = str(file.path)
        with reading(file.path):
            vocabulary = read_vocabulary(file.fields, where)
            try_backend(vocabulary.backend)
        num_tokens = _num_tokens(vocabulary.backend) + len(vocabulary.repeated)
        if vocab_size is not None and num_tokens > vocab_size:
            raise ModelLoadError(
                f"{where}: has {num_tokens} tokens, expected at most the {vocab_size} rows of its embedding; the file "
                "is damaged, download it again"
            )
        return cls(
            vocabulary.backend,
            special_tokens=vocabulary.special_tokens,
            eos_token_ids=vocabulary.eos_token_ids,
            chat_template=ChatTemplate.of_gguf(file.fields, where, vocabulary.special_tokens),
            where=where,
            repeated=vocabulary.repeated,
        )

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `load` reads as the same tokenizer."""
        self._backend.save(str(directory / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        if self._chat_template is not None:
            settings["chat_template"] = self._chat_template.declared
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones. The model's embedding may have more rows (padding)."""
        return _num_tokens(self._backend) + len(self._repeated)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        return self._pieces.special

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The template's source, including a separate template for tools."""
        return None if self._chat_template is None else self._chat_template.source

    @property
    def tool_form(self) -> ToolForm | None:
        """The form of tool calls that the chat template expects in a conversation; None: it shows no calls."""
        return None if self._chat_template is None else self._chat_template.tool_form

    def shows(self, *shape: Kind) -> RenderOutcome:
        """How the chat template renders a conversation of messages of these kinds."""
        return "refused" if self._chat_template is None else self._chat_template.shows(shape)

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads, e.g. "enable_thinking"; empty without a template."""
        return frozenset() if self._chat_template is None else self._chat_template.variables

    @cached_property
    def turn_end(self) -> str | None:
        """The control token that the chat template writes after an answer; None: none, or `eos_token_ids` has it."""
        after = "" if self._chat_template is None else self._chat_template.after_answer
        token = self._controls.first(after.lstrip())
        return None if token is None or self.token_id(token) in self.eos_token_ids else token

    def texts(self) -> list[str | None]:
        """Text of every token in the tokenizer's own notation, by id; None for an unused id."""
        ids = self._backend.get_vocab(with_added_tokens=True)
        found: list[str | None] = [None] * (1 + max([*ids.values(), *self._repeated], default=-1))
        for text, token in ids.items():
            found[token] = text
        for token, first in self._repeated.items():
            found[token] = found[first]
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token inside a text, maybe half a character. Empty for an id without a token."""
        return self._pieces.bytes_of(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of one token's exact text, None when there is no such token."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. A rendered chat already holds its special tokens, so none are added by default.

        In a prompt rendered by `apply_chat_template`, control tokens in the client's words are encoded as text.

        Raises RequestError for text that is not valid Unicode (lone surrogates), or that the tokenizer fails to encode.
        """
        if isinstance(text, PromptText) and text.literal:
            return self._encode_literally(text, add_special_tokens)
        (ids,) = encode_texts(self._backend, [text], add_special_tokens)
        return ids

    def literal(self, text: str) -> PromptText:
        """`text` for `encode`, with its control tokens as text. RequestError as `apply_chat_template`."""
        return self._controls.render(lambda given: given, text)

    @cached_property
    def pair_frame(self) -> tuple[list[int], list[int], list[int]]:
        """Special tokens before, between and after two texts that are encoded as a pair."""
        try:
            framed = self._backend.encode("a", "a")
        except BaseException as error:
            raise RequestError(
                f"the model's tokenizer cannot encode pairs of texts: {failure_of(error)}"
            ) from None
        texts = framed.sequence_ids
        first, second = ([at for at, text in enumerate(texts) if text == number] for number in (0, 1))
        ids: list[int] = framed.ids
        return ids[: first[0]], ids[first[-1] + 1 : second[0]], ids[second[-1] + 1 :]

    def segments(self, text: str) -> list[str]:
        """`text` split after its control tokens, so that the concatenated ids of the parts equal the ids of the whole.

        A single part if control tokens are text or if the tokenizer depends on the text before.
        """
        if isinstance(text, PromptText) and text.literal:
            return [text]
        return self._controls.segments(text)

    def _encode_literally(self, prompt: PromptText, add_special_tokens: bool) -> list[int]:
        first, *others = self._controls.split(prompt)
        (ids,) = encode_texts(self._without_controls(begins=True), [str(first)]) if first else ([],)
        texts = [part for part in others if isinstance(part, str)]
        encoded = iter(encode_texts(self._without_controls(begins=False), texts))
        ids = ids + [id for part in others for id in ([part] if isinstance(part, int) else next(encoded))]
        if not add_special_tokens:
            return ids
        (plain,), (framed,) = (encode_texts(self._backend, ["a"], adds) for adds in (False, True))
        begin = next(at for at in range(len(framed)) if framed[at : at + len(plain)] == plain)
        return [*framed[:begin], *ids, *framed[begin + len(plain) :]]

    def _without_controls(self, *, begins: bool) -> tokenizers.Tokenizer:
        """The same tokenizer without control tokens, for text that begins a prompt (`begins`) or continues one."""
        with self._text_only_lock:
            if begins not in self._text_only:
                state = self._backend.to_str()
                if not begins:
                    state = state.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
                self._text_only[begins] = tokenizers.Tokenizer.from_str(state)
                self._text_only[begins].encode_special_tokens = True
            return self._text_only[begins]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; invalid UTF-8 becomes U+FFFD, and so does each id if the tokenizer fails to decode."""
        known = [self._repeated.get(id, id) for id in token_ids] if self._repeated else token_ids
        return decode_ids(self._backend, known, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        replaced: Mapping[str, str] = MappingProxyType({}),
        **variables: Any,
    ) -> PromptText:
        """The prompt for `messages`, as transformers renders it. `variables` go to the template unchanged.

        replaced: texts of the messages → what is in their place in the prompt, where control tokens are control tokens.

        With `continue_final_message` the prompt ends with the last message's content, for the answer to continue it.
        When the result is encoded, the template's control tokens are control tokens; those in the arguments are text.

        Raises RequestError if the model has no template, the template refuses the messages or its output is too long.
        """
        if self._chat_template is None:
            raise RequestError(
                f"the model in {self._where} has no chat template, so it cannot take chat messages; send a plain "
                "prompt to /v1/completions",
                param="messages",
            )
        template = self._chat_template

        def render(*client: Any) -> str:
            text = template.render(
                *client,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for each, written in replaced.items():
                text = text.replace(each, written, 1)
            return text

        return self._controls.render(render, messages, tools, variables)

    def detokenizer(
        self, *, shown: frozenset[int] = frozenset()
    ) -> IncrementalDetokenizer | MarkedDetokenizer:
        """A new detokenizer for one stream of ids; `shown`: special tokens that are not skipped."""
        plain = IncrementalDetokenizer(self.decode, self._pieces.text_of)
        if not shown:
            return plain
        return MarkedDetokenizer(plain, {token: self.token_bytes(token).decode() for token in shown})


def _num_tokens(backend: tokenizers.Tokenizer) -> int:
    return int(backend.get_vocab_size(with_added_tokens=True))


def _read_backend(directory: Path, settings: Fields) -> tuple[Path, tokenizers.Tokenizer]:
    """The tokenizer of tokenizer.json, else of the publisher's other vocabulary file."""
    from twofold.text.tokenizer import bpe_files, sentencepiece_file, tekken_file, tiktoken_file

    path = directory / "tokenizer.json"
    tekken, model = directory / tekken_file.NAME, directory / sentencepiece_file.NAME
    if path.exists():
        return path, read_tokenizer_json(path)
    for ranks in (directory / name for name in tiktoken_file.NAMES):
        if ranks.exists():
            return ranks, tiktoken_file.read_tiktoken(ranks, settings)
    if tekken.exists():
        return tekken, tekken_file.read_tekken(tekken)
    if model.exists():
        from twofold.text.tokenizer.gguf_vocabulary import read_vocabulary

        return model, read_vocabulary(sentencepiece_file.read_fields(model), str(model)).backend
    if all((directory / name).exists() for name in bpe_files.NAMES):
        return directory / bpe_files.NAMES[0], bpe_files.read_bpe_files(directory, settings)
    return path, read_tokenizer_json(path)


def _highest_id(backend: tokenizers.Tokenizer, expected: int) -> int:
    """Highest token id; `expected` - 1 if every token is below `expected`."""
    # The dictionary of 152k tokens takes 0.2 s, which is a tenth of a start; asking for its ids 0.07 s.
    num_tokens = _num_tokens(backend)
    if expected <= 4 * num_tokens:
        below = expected - list(map(backend.id_to_token, range(expected))).count(None)
        if below == num_tokens:
            return expected - 1
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1)


def _special_tokens(fields: Fields, backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Role → token of tokenizer_config.json, where a token is a string or an object with `content`."""
    found: dict[str, str] = {}
    for role in _SPECIAL_NAMES:
        _, value = fields.get(role)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise fields.error(role, value, "a token's text")
        if not _is_unicode(value) or backend.token_to_id(value) is None:
            raise fields.error(role, value, "a token that tokenizer.json has")
        found[role] = value
    return found


def _is_unicode(text: str) -> bool:
    """Whether the text is valid Unicode: JSON may contain lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _eos_token_ids(
    directory: Path, special_tokens: Mapping[str, str], backend: tokenizers.Tokenizer
) -> frozenset[int]:
    """The union of all sources: converters name the end of a text in one file and the end of a turn in another."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.exists():
            fields = Fields(str(path), read_json_object(path, "end-of-sequence tokens"))
            for section in (fields, fields.section("text_config")):
                found |= set(section.integers("eos_token_id")) if section is not None else set()
    known = {token for token in found if token < 1 << 32 and backend.id_to_token(token) is not None}
    own = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return frozenset(known if own is None else known | {own})
