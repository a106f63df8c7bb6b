#!/usr/bin/env bash
# The steps of action.yml, one an argument. SPECS: a path or a pattern a line.
set -euo pipefail
shopt -s globstar nullglob

MARK="<!-- vtaps diff -->" # by which a later run finds its comment
LONGEST=60000              # GitHub takes 65,536 characters

find_specs() { # into the array `specs`
    local IFS=$'\n'
    # shellcheck disable=SC2206 # the lines are patterns
    specs=(${SPECS:?})
    if [ ${#specs[@]} -eq 0 ]; then
        echo "::error::vtaps: no spec is at ${SPECS//$'\n'/ or }"
        exit 1
    fi
}

case "${1:?}" in
install)
    if command -v vtaps >/dev/null; then
        vtaps --version
    else
        # The action came with the whole repository: its own version of vtaps, with every pin.
        make -C "$GITHUB_ACTION_PATH/../../.." venv VENV="$RUNNER_TEMP/vtaps"
        echo "$RUNNER_TEMP/vtaps/bin" >>"$GITHUB_PATH"
    fi
    ;;
check)
    find_specs
    vtaps check "${specs[@]}"
    ;;
compile)
    find_specs
    status=0
    vtaps compile --check --format sarif "${specs[@]}" >"$SARIF" || status=$?
    if [ -s "$SARIF" ]; then
        echo "sarif=$SARIF" >>"${GITHUB_OUTPUT:-/dev/null}"
    fi
    if [ $status -ne 0 ]; then # also where the repository has no code scanning
        vtaps compile --check --format github "${specs[@]}" || true
    fi
    exit $status
    ;;
diff)
    find_specs
    : >"$BODY"
    git cat-file -e "$BASE^{commit}" 2>/dev/null || git fetch --quiet --no-tags --depth=1 origin "$BASE"
    for spec in "${specs[@]}"; do
        # A vector or a prompt file that changed shows in the lock.
        if git diff --quiet "$BASE" -- "$spec" "${spec%.*}.lock.json"; then
            continue
        fi
        {
            printf '### %s\n\n' "$spec"
            if git cat-file -e "$BASE:$spec" 2>/dev/null; then
                status=0
                vtaps diff --format markdown "$BASE:$spec" "$spec" 2>"$BODY.err" || status=$?
                if [ $status -gt 1 ]; then # a side does not check
                    printf '```\n%s\n```\n' "$(cat "$BODY.err")"
                fi
            else
                printf 'A new spec.\n'
            fi
            printf '\n'
        } >>"$BODY"
    done
    if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
        cat "$BODY" >>"$GITHUB_STEP_SUMMARY"
    fi
    ;;
comment)
    there=$(gh api --paginate "repos/$GITHUB_REPOSITORY/issues/$PULL/comments" \
        --jq ".[] | select(.body | startswith(\"$MARK\")) | .id" | sed -n 1p)
    if [ -s "$BODY" ]; then
        text=$(head -c $LONGEST "$BODY" | iconv -c -f utf-8 -t utf-8)
        if [ "$(wc -c <"$BODY")" -gt $LONGEST ]; then
            text+=$'\n\n… cut: the summary of the job has all of it.'
        fi
    elif [ -n "$there" ]; then
        text="No spec means anything else any more."
    else
        exit 0
    fi
    if [ -n "$there" ]; then
        gh api --silent --method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/$there" -f body="$MARK"$'\n'"$text"
    else
        gh api --silent --method POST "repos/$GITHUB_REPOSITORY/issues/$PULL/comments" -f body="$MARK"$'\n'"$text"
    fi
    ;;
*)
    echo "steps.sh: no step $1" >&2
    exit 2
    ;;
esac
