#!/usr/bin/env bash
# Installs a wheel into a fresh environment and uses it with nothing else on PATH: no compiler, no cargo, none of
# this checkout. Called by `make wheel` as: wheel-check.sh PYTHON WHEEL
set -euo pipefail
python=$1
wheel=$(realpath "$2")

case "$(basename "$wheel")" in
  headrace-*-py3-none-manylinux_*.whl | headrace-*-py3-none-linux_*.whl) ;;
  *) echo "$(basename "$wheel") is not tagged py3-none-manylinux_X_Y or py3-none-linux" >&2 && exit 1 ;;
esac

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input install "$wheel"

cd "$folder"
clean() { env -i HOME="$folder" PATH="$folder/venv/bin" LANG=C.UTF-8 "$@"; }
clean headrace version
clean headraced version
clean headrace create vol
clean python -c '
import headrace
volume = headrace.connect("vol")
volume.write_bytes("/d/file", b"from a wheel", parents=True)
assert volume.seal("/d")[0] == b"from a wheel"
'
clean headrace down vol
echo "$(basename "$wheel") works in a fresh environment, $(du -h "$wheel" | cut -f1)"
