"""Run all benchmarks; each writes its results file. `make bench` calls this."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

for script in ("solvers.py", "scale.py", "sampler_variance.py", "overhead.py"):
    subprocess.run([sys.executable, str(HERE / script)], check=True)
