"""The Megatron-Core backend. Import ``shims`` and apply them before anything of megatron is imported."""
