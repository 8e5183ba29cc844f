"""One thread per process, set before torch is imported: results then do not depend on the number of cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
