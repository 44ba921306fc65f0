"""`python -m privet` is the command `privet`."""

import sys

from privet.cli import main

sys.exit(main())
