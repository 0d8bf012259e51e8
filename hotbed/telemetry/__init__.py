"""What a run reports while it trains: the step clock, spans, the lines of metrics.jsonl, and where they are sent."""
