#!/usr/bin/env bash
# Runs one Python test file in the project's own environment, and fails without that environment.
#
#   tests/python_test.sh frontends/python/tests/report_test.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD/frontends/python:$PWD/frontends/python/tests

python=.venv/bin/python
if [[ ! -x $python ]]; then
  echo "$python is not there; run scripts/setup.sh python"
  exit 1
fi
exec $python "$@"
