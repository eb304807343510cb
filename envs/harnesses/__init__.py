"""Ways to let a model work on a task. Each implements ``envs.base.Harness``."""
