"""Marks tests of what older versions of a host library cannot do with plain models either."""

import pytest

from hf_ext.integration.versions import require


def host(*needs: str) -> pytest.MarkDecorator:
    """Skips a test where the installed versions are older than these, such as "peft>=0.19.1"."""
    reason = ""
    try:
        require("The host", *needs)
    except ImportError as error:
        reason = str(error)
    return pytest.mark.skipif(bool(reason), reason=reason)
