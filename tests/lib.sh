# lib.sh - for shell tests: pass NAME, fail NAME TEXT, skip NAME REASON, and `closing` at the end.
passed=0 failed=0 skipped=0
pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "FAIL $1: $2"; }
skip() { skipped=$((skipped + 1)); echo "skip $1: $2"; }
have() { command -v "$1" >/dev/null 2>&1; }
closing() { echo "$passed passed, $failed failed, $skipped skipped"; [ "$failed" -eq 0 ]; }

# check NAME COMMAND...: passes when the command succeeds silently on stderr and stdout.
check() {
    name=$1; shift
    if output=$("$@" 2>&1) && [ -z "$output" ]; then pass; else fail "$name" "$(echo "$output" | head -n 8)"; fi
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
