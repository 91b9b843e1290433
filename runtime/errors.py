"""Every error that Sapwood raises on purpose.

    SapwoodError
    ├── ConfigError                 an engine option is wrong or unknown
    ├── ModelError                  a model cannot be served
    │   ├── ModelNotFoundError      nothing by that name, here or on the hub
    │   ├── ModelAccessError        the hub refused (gated, no token) or cannot be reached
    │   └── UnsupportedModelError   the checkpoint is there, and we do not serve its kind
    ├── RequestError                a request is wrong; carries `param` and `code`
    │   └── ContextLengthError      prompt longer than the model or the KV cache can take
    └── EngineError                 the engine could not finish a request
        ├── EngineBusyError         too many wait already; the same request may pass later
        └── EngineClosedError       the engine was closed before the request was done

Messages have the fact, the limit and the way out.
"""


class SapwoodError(Exception):
    """Base of all errors below."""


class ConfigError(SapwoodError, ValueError):
    """An engine option has an unknown name or a value outside its range."""


class ModelError(SapwoodError):
    """A model cannot be loaded or served."""


class ModelNotFoundError(ModelError):
    """No such file, folder, known name or hub repository."""


class ModelAccessError(ModelError):
    """The hub refused the download (gated, missing token) or could not be reached."""


class UnsupportedModelError(ModelError):
    """The checkpoint's architecture, format or a setting in it is not served."""


class RequestError(SapwoodError, ValueError):
    """A request that is wrong in itself. It never reaches the engine.

    `param` names the offending field as the caller wrote it, `code` is a short machine-readable
    reason; either may be None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt and one token more do not fit the context or the KV cache."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class EngineError(SapwoodError, RuntimeError):
    """The engine failed while it worked on a request; the request itself was sound."""


class EngineBusyError(EngineError):
    """Too much waits already for what the request needs. Sent again later, it may pass."""


class EngineClosedError(EngineError):
    """The engine was closed before the request was done, or before it was submitted."""
