"""What a run leaves behind: metrics.jsonl, result.json, env.json. No torch and no Lightning at import."""
