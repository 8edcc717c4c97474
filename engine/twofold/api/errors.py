"""The one error hierarchy.

    TwofoldError
    ├── ConfigError       a flag, environment variable or file of settings is wrong (CLI exit code 2)
    ├── ModelLoadError    a checkpoint, tokenizer or template cannot be used     (CLI exit code 2)
    ├── RequestError      a request is malformed or cannot ever be served        (HTTP 400)
    ├── CapacityError     the engine is full or draining; try again later        (HTTP 429 / 503)
    └── KernelError       the native code failed; our bug or the machine's       (HTTP 500)
        └── UnusableEngineError   nothing can be computed any more           (HTTP 503)
            ├── DeviceLostError       a GPU failed and cannot be used any more
            └── WeightsChangedError   a mapped file of weights was changed

A message says what was given, what was expected and what to do. Only `server/` knows HTTP codes.
"""

_MAX_CHARACTERS = 2000


class TwofoldError(Exception):
    """Root of every error that Twofold raises on purpose."""


class ConfigError(TwofoldError):
    """A setting is out of range, contradicts another or names something that does not exist."""


class ModelLoadError(TwofoldError):
    """A model directory, weight file, tokenizer or chat template is missing, damaged or unsupported.

    The message quotes untrusted files. It stays on one line: unprintable characters are escaped, and the middle of a
    very long message is left out.
    """

    def __init__(self, message: str) -> None:
        message = _shortened(message)
        if not message.isprintable():
            message = _shortened("".join(map(_printed, message)))
        super().__init__(message)


def _shortened(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[: _MAX_CHARACTERS - 500]} ... {text[-500:]}"  # the remedy comes last


def _printed(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class RequestError(TwofoldError):
    """A request can never be served. `param` names the offending field, if there is one.

    private: the part of the message that quotes the request; logs leave it out.
    """

    def __init__(self, message: str, *, param: str | None = None, private: str = "") -> None:
        super().__init__(message)
        self.param = param
        self.private = private


class TemplateLimitExceededError(RequestError):
    """The chat template exceeds a limit. Rendering the messages again in another form would take as long."""

    def __init__(self, limit: str) -> None:
        super().__init__(
            f"the chat template exceeds a limit: {limit}; send fewer or shorter messages", param="messages"
        )
        self.limit = limit


class CapacityError(TwofoldError):
    """The engine has no room at present. `retry_after_s` is a hint. `draining`: the server is shutting down; `asleep`:
    it was put to sleep; neither: the queue is full."""

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, draining: bool = False, asleep: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.draining = draining
        self.asleep = asleep


class KernelError(TwofoldError):
    """Native code reported a failure."""


class UnusableEngineError(KernelError):
    """The engine cannot compute with what it has loaded. code: what failed, as in an API's errors."""

    code: str = "engine_failed"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code


class DeviceLostError(UnusableEngineError):
    """A device failed, stopped answering or computes nonsense; nothing more is computed on it."""

    code = "device_lost"


class WeightsChangedError(UnusableEngineError):
    """A file of weights was written to or made shorter while steps read it."""

    code = "weights_changed"
