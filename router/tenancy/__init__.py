"""Who may ask for what: API keys, their limits, and what they have used."""
