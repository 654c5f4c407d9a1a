"""``python -m qcomp`` is the command ``qcomp``."""

import sys

from qcomp.cli.main import main

sys.exit(main())
