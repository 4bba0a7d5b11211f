"""OpenAI's HTTP API: what strangers may say, and how they are answered."""
