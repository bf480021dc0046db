#!/usr/bin/env bash
# Runs every test that needs a GPU and shows what each measured. Where torch can use no GPU, that is a failure: nothing
# was checked. PYTHON names the interpreter (one with a torch for CUDA); arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
"$python" - <<'END'
import sys
import torch

if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} can use no GPU here: nothing was checked")
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, GPUs: {', '.join(names)}")
END
exec "$python" -m pytest -m gpu -rPs --durations=0 "$@"
