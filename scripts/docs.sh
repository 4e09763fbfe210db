#!/usr/bin/env bash
# Set up, then build the site from docs/ and from the code into build/site. Anything wrong fails it.
#
#   bash scripts/docs.sh          # then open build/site/index.html, or
#   bash scripts/docs.sh serve    # http://127.0.0.1:8000, and again whenever a page changes
#
# What it needs beyond the other scripts is the extra [docs]; it goes into the same .venv, where only
# this script installs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

stamp=.venv/.dptrain-docs-stamp
if ! cmp -s .venv/.dptrain-stamp "$stamp"; then
    echo "docs: installing what builds the site" >&2
    "$PYTHON" -m pip install --quiet -c constraints.txt -e ".[docs]"
    cp .venv/.dptrain-stamp "$stamp"
fi

export NO_MKDOCS_2_WARNING=1
case "${1:-build}" in
build) exec "$PYTHON" -m scripts.docs build ;;
serve) exec "$PYTHON" -m mkdocs serve --watch dptrain --watch recipes --watch scripts/docs ;;
*)
    echo "docs: '$1' is unknown; 'serve' shows the site, and without an argument it is built" >&2
    exit 2
    ;;
esac
