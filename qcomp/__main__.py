"""``python -m qcomp`` runs the command ``qcomp``."""

import sys

from qcomp.cli.main import main

sys.exit(main())
