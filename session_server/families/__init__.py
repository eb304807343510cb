"""Model families: how messages become ids and sampled ids become messages. Start at ``base``."""
