"""`pretrain` for ranks that share the first GPU, which `launch local` refuses."""

import os
import sys

os.environ["LOCAL_RANK"] = "0"

from pretrain.__main__ import main

sys.exit(main(sys.argv[1:]))
