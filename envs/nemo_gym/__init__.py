"""NeMo Gym resources servers over HTTP: seed a session, call tools, verify."""
