#!/usr/bin/env bash
# Answers one prompt twice on this machine's CPU, with the small model of the checkout: interleaved (one process) and
# disaggregated (one process prefills, another decodes). Shows both answers, and where the second one's stages ran.
#
#   bash launch/demo.sh ["PROMPT"]
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

if (($# > 1)) || [[ ${1-} == -h || ${1-} == --help ]]; then
  say "usage: bash launch/demo.sh [\"PROMPT\"]"
  exit 2
fi
prompt=${1-What is the purpose of life?}

setup_venv ""
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$root"

"$python" - "$prompt" >"$scratch/request.jsonl" <<'EOF'
import json
import sys

print(json.dumps({"prompt": sys.argv[1], "max_tokens": 64, "temperature": 0}))
EOF

for mode in interleaved disaggregated; do
  say "Running $mode ..."
  if ! "$python" -m launch.local --config=configs/tiny.py --config.mode="$mode" --mode=batch \
    --input="$scratch/request.jsonl" --output="$scratch/$mode.jsonl" </dev/null 2>"$scratch/$mode.log"; then
    cat "$scratch/$mode.log" >&2
    [[ ! -s $scratch/$mode.jsonl ]] || cat "$scratch/$mode.jsonl" >&2
    say "The $mode run failed."
    exit 1
  fi
done

"$python" - "$prompt" "$scratch" <<'EOF'
import json
import pathlib
import re
import sys

prompt, scratch = sys.argv[1], pathlib.Path(sys.argv[2])
sys.stdout.reconfigure(errors="replace")
answers = {}
for mode in ("interleaved", "disaggregated"):
    answers[mode] = json.loads((scratch / f"{mode}.jsonl").read_text(encoding="utf-8"))
    if error := answers[mode].get("error"):
        sys.exit(f"The {mode} run answered with an error: {error['message']}")

print(f"\nprompt:        {prompt}")
for mode, answer in answers.items():
    print(f"{mode + ':':15}{answer['text']}")
print("\nstages of the disaggregated run:")
for line in (scratch / "disaggregated.log").read_text(encoding="utf-8", errors="replace").splitlines():
    if stage := re.search("(prefill on|transfer from|insert on) .*", line):
        print(f"  {stage[0]}")
same = all(len({json.dumps(answer[field]) for answer in answers.values()}) == 1 for field in ("text", "token_ids"))
print(f"\nidentical: {'yes' if same else 'no'}")
sys.exit(not same)
EOF
