"""An HTTP endpoint over the rollout engine, for agents that speak OpenAI's API."""
