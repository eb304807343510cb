"""verifiers tasksets and environments, in a Python of their own."""
