"""``python -m ciar`` is ``ciar``."""

import sys

from ciar.cli.main import main

sys.exit(main())
