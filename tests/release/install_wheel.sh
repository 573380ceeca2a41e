#!/usr/bin/env bash
# Install dist/*.whl into an empty environment, and run the demo there with nothing of the checkout.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
install=("$folder/venv/bin/python" -m pip install -q --disable-pip-version-check -c "$repository/constraints.txt")
"${install[@]}" torch
"${install[@]}" "$repository"/dist/*.whl
cd "$folder"
PATH=$folder/venv/bin:$PATH
python - <<PY
import paceline
assert paceline.__file__.startswith("$folder"), paceline.__file__
PY
cat > run.yaml <<YAML
name: docstrings
workload: classifier
model: {width: 64, heads: 4, layers: 1, ffn: 128}
data: {source: docstrings, max_length: 64, vocab: 2048}
train: {steps: 30, global_batch: 64, lr: 1e-3}
YAML
paceline --version
paceline explain run.yaml
paceline plan run.yaml --devices 1,2
paceline plan run.yaml --cluster 4xV100@pcie
paceline train run.yaml parallel.ranks=2
paceline check run.yaml --ranks 1,2 --steps 4
paceline report runs/docstrings --out report
test -s report/report.html
python - <<PY
import numpy as np
counts = np.random.default_rng(0).poisson(0.3, (200, 100))
np.save("counts.npy", counts)
PY
paceline topics counts.npy -k 4 --out runs/topics
paceline runs
echo "1 passed, 0 failed"
