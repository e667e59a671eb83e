"""PiSSA requires PEFT 0.21. With an older one, the tests of its adapters are not collected."""

import peft
from packaging.version import Version

collect_ignore_glob = [] if Version(peft.__version__) >= Version("0.21") else ["test_*pissa*.py"]
