"""Training backends behind one protocol (``base.TrainBackend``), each run in a process of its own."""
