#!/usr/bin/env bash
# Set up, then train a small VGG on handwritten digits at ε = 8. Arguments go to the recipe:
#
#   bash scripts/demo.sh
#   bash scripts/demo.sh privacy.epsilon=2 overwrite=true
#   bash scripts/demo.sh --resume
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
exec "$PYTHON" -m recipes.vision --config configs/digits_vgg_minsep.yaml "$@"
