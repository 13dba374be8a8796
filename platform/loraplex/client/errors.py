"""What a client can be told: the server's refusal, or that no server answered.

ClientError
    ConnectionFailedError
    NoKeyError
"""

from __future__ import annotations

from loraplex_registry.wire.adapter import Report


class ClientError(Exception):
    """The server refused the request; `code`, `param` and `message` are its own words.

    `status` is the HTTP status, 0 where no answer came; `report` is there when an upload was refused.
    """

    code = "client_error"

    def __init__(
        self,
        message: str | None = None,
        *,
        status: int = 0,
        code: str = "",
        param: str | None = None,
        report: Report | None = None,
    ) -> None:
        self.message = message or " ".join((type(self).__doc__ or "").split())
        self.status = status
        self.code = code or type(self).code
        self.param = param
        self.report = report
        super().__init__(self.message)


class ConnectionFailedError(ClientError):
    """No server answered; start one with `loraplex up`, or set LORAPLEX_URL to where it runs."""

    code = "connection_failed"


class NoKeyError(ClientError):
    """There is no API key; set LORAPLEX_API_KEY, or use the machine and user that run `loraplex up`."""

    code = "no_api_key"
