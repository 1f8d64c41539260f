#!/usr/bin/env bash
# `make release VERSION=0.2.0` builds all files of a release in build/release/0.2.0 and tags the
# commit in this repository. It publishes nothing, and prints the commands that would.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1
refuse() { printf 'error: %s\n' "$*" >&2; exit 2; }

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] ||
  refuse "VERSION='$version': expected three numbers, as in make release VERSION=0.2.0"
[[ -z $(git status --porcelain) ]] ||
  refuse "the checkout has changes or files outside of commits: commit or remove them (git status)"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null ||
  refuse "the tag v$version exists: choose another VERSION, or git tag --delete v$version"
written=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[[ $written == "$version" ]] ||
  refuse "VERSION=$version, but pyproject.toml has version = \"$written\": change one, and commit"
grep -Eq "^## ${version//./\\.}, 20[0-9]{2}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
  refuse "CHANGELOG.md has no heading '## $version, $(date +%F)' (the date may differ): write it"
grep -q '^\[project\.urls\]$' pyproject.toml ||
  refuse "pyproject.toml has no [project.urls]: add Repository, to which the package's page links"

"${MAKE:-make}" lint docs
out=build/release/$version
rm -rf build/release build/lib build/bdist.* && mkdir -p "$out/built"
awk -v start="## $version," '/^## / { on = index($0, start) == 1 } on' CHANGELOG.md >"$out/notes.md"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) && export SOURCE_DATE_EPOCH
python -m build --no-isolation --outdir "$out/built" . >"$out/build.log" 2>&1 ||
  { tail -n 20 "$out/build.log" >&2; refuse "the package was not built: see $out/build.log"; }
python -m zipfile --list "$out"/built/*.whl | grep '^vit/_native\.' >/dev/null ||
  refuse "the wheel lacks the C decoder: install a C compiler (apt-get install build-essential)"
if [[ $(uname) == Linux ]]; then  # names the oldest glibc that the wheel runs with
  auditwheel repair --wheel-dir "$out" "$out"/built/*.whl >>"$out/build.log" 2>&1 ||
    { tail -n 20 "$out/build.log" >&2; refuse "auditwheel refused the wheel: see $out/build.log"; }
  rm "$out"/built/*.whl
fi
mv "$out"/built/* "$out" && rmdir "$out/built" && rm "$out/build.log"
tar czf "$out/vitline-site-$version.tar.gz" -C build site
if [[ -d runs/demo/weights ]]; then
  demo=vitline-demo-$version
  python launch/export.py runs/demo --to timm --out "$out/$demo"
  cp runs/demo/metrics.jsonl "$out/$demo"
  tar czf "$out/$demo.tar.gz" -C "$out" "$demo" && rm -r "${out:?}/$demo"
else
  echo "The release has no demo weights, because runs/demo does not exist: run make demo, then" \
    "git tag --delete v$version and this command again." >&2
fi
(cd "$out" && sha256sum vitline-* >SHA256SUMS)
git tag --annotate --cleanup=whitespace --file "$out/notes.md" "v$version"
cat <<TEXT

Built in $out, and tagged v$version here. Nothing was published. To publish:
  git push origin v$version     # .github/workflows/release.yml builds the wheels of all platforms
  gh release create v$version $out/vitline-* $out/SHA256SUMS --notes-file $out/notes.md
  python -m twine upload $out/vitline-$version.tar.gz $out/vitline-$version-*.whl
TEXT
