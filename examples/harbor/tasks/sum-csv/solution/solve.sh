#!/bin/bash
set -e
[ "$MODE" = exact ]
python3 - <<'PY'
import csv, json, os
totals = {}
with open(os.environ["TABLE"]) as file:
    for row in csv.DictReader(file):
        totals[row["region"]] = totals.get(row["region"], 0) + int(row["amount"])
with open("/app/answer.json", "w") as file:
    json.dump(totals, file)
PY
