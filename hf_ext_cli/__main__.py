"""`python -m hf_ext_cli`, for where the package is not installed."""

import sys

from hf_ext_cli.main import main

sys.exit(main())
