import json

WANTED = {"north": 42, "south": 12, "west": 1}
try:
    with open("/app/answer.json") as file:
        found = json.load(file)
except (OSError, ValueError) as error:
    print(f"no answer: {error}")
    found = {}
right = sum(found.get(region) == total for region, total in WANTED.items()) if isinstance(found, dict) else 0
reward = {"reward": float(found == WANTED), "regions": right / len(WANTED)}
with open("/logs/verifier/reward.json", "w") as file:
    json.dump(reward, file)
