"""Errors that a server reports to its client."""

from __future__ import annotations

import sys

from hf_ext.errors import CheckpointError


def bad_request(error: CheckpointError) -> CheckpointError:
    """Returns an error that `transformers serve` answers with status 400 and the message; by default it answers with 500.

    FastAPI, on which the server is built, reports its own HTTPException to the client. In a process that has not imported
    FastAPI, the error is returned as it is.
    """
    if "fastapi" not in sys.modules:
        return error
    from fastapi import HTTPException

    class BadRequest(CheckpointError, HTTPException):
        def __init__(self, message: str):
            HTTPException.__init__(self, 400, message)

        def __str__(self) -> str:
            return str(self.detail)

    return BadRequest(str(error))
