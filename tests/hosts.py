"""Marks tests of what older versions of a host library cannot do with plain models either."""

import pytest

from hf_ext.integration.versions import require

try:
    from transformers.integrations.peft import MIN_PEFT_VERSION
except ImportError:  # without Transformers, or with one that has no such limit
    MIN_PEFT_VERSION = "0"


def host(*needs: str) -> pytest.MarkDecorator:
    """Skips a test where the installed versions are older than these, such as "peft>=0.19.1"."""
    reason = _lacking(*needs)
    return pytest.mark.skipif(bool(reason), reason=reason)


def _lacking(*needs: str) -> str:
    try:
        require("The host", *needs)
    except ImportError as error:
        return str(error)
    return ""


HAS_PISSA = not _lacking("peft>=0.21")
pissa = host("peft>=0.21")
# `add_adapter` and `load_adapter` of Transformers' own models require their own version of PEFT, which may not be released yet.
adapters_of_transformers = host(f"peft>={MIN_PEFT_VERSION}")
