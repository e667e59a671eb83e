"""`python -m hf_ext`: the `hf-ext` command."""

import sys

from hf_ext.cli.main import main

sys.exit(main())
