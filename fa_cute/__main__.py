"""``python -m fa_cute``: the command line."""

import sys

from fa_cute.cli import main

sys.exit(main())
