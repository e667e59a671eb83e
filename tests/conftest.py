"""All tests run offline; those of the Hub talk to `local_hub` from processes of their own."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
